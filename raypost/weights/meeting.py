"""Where the ranks of a process group find one another: a store that listens on one address only."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore


def meeting_store(address: str, port: int, rank: int, num_ranks: int, timeout: timedelta) -> TCPStore:
    """Return this rank's end of the store at `address`; rank 0 has it, and waits for nobody.

    PyTorch by itself lets the store listen on all interfaces, and whoever reaches it can write into it. Raises OSError
    if the port is taken.
    """
    listener = None
    if rank == 0:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        server = socket.create_server((address, port), family=family)
        port, listener = server.getsockname()[1], server.detach()
    return TCPStore(
        address, port, num_ranks, rank == 0, timeout, wait_for_workers=False, master_listen_fd=listener
    )
