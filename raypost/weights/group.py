"""BroadcastGroup: one trainer rank and the processes with the engines' models, which get the same bytes from it.

    Host             rank 0's end: where the others meet, which it tells them (seats.py)
    BroadcastGroup   one process's membership; rank 0 sends, the others receive

Owns the sockets and the deadlines; knows neither Ray nor vLLM nor what the bytes mean: whoever receives them verifies
them. A group has a fixed membership: another one is made for each change of it. PyTorch's default group is not
touched, since trainer and engines have one each.

Invariants: no call waits longer than the group's timeout; whatever fails, the group is of no more use and says so;
sockets listen on the address that is given and on no other.
"""

from __future__ import annotations

import socket
import warnings
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from raypost.errors import TransportError
from raypost.weights.manifest import Bytes
from raypost.weights.meeting import meeting_store
from raypost.weights.seats import Backend, Member, Seats


class Host:
    """Rank 0's end: where the others of one group meet, and the group once they are there."""

    def __init__(self, address: str, backend: Backend, timeout_s: float, members: Sequence[Member]) -> None:
        """Listen at `address`, on a port that is free."""
        workers = tuple((member.worker, member.ranks) for member in members)
        seats = Seats(address, 0, backend, timeout_s, workers)
        self.store = meeting_store(address, 0, 0, seats.size, timedelta(seconds=timeout_s))
        self.seats = replace(seats, port=self.store.port)
        self._group: BroadcastGroup | None = None

    def send(self, bucket: Bytes) -> None:
        """Give a bucket to all others; the first one waits until all have come. Raises TransportError."""
        if self._group is None:
            self._group = BroadcastGroup(self.seats, 0, self.store)
        self._group.broadcast(bucket)


class BroadcastGroup:
    """One rank of a group."""

    def __init__(self, seats: Seats, rank: int, store: Store | None = None) -> None:
        """Join, and wait until all have. Raises TransportError if they do not within the timeout.

        `store`: of rank 0, which has it already.
        """
        self.seats = seats
        self._name = f"rank {rank} of {seats.size} of the weights group at {seats.address}:{seats.port}"
        self._timeout = timedelta(seconds=seats.timeout_s)
        self._device = "cuda" if seats.backend == "nccl" else "cpu"
        try:
            if store is None:
                store = meeting_store(seats.address, seats.port, rank, seats.size, self._timeout)
            self._group = _made(store, seats, rank, self._timeout)
        except Exception as error:
            raise TransportError(f"{self._name} could not join: {_first_line(error)}") from error
        self._rank = rank

    def broadcast(self, data: Bytes) -> None:
        """Send `data` from rank 0, or fill it with what rank 0 sends. Raises TransportError."""
        try:
            tensor = _tensor(data)
            carried = tensor.to(self._device)
            options = dist.BroadcastOptions()
            options.rootRank = 0
            options.timeout = self._timeout
            self._group.broadcast([carried], options).wait(self._timeout)
            if self._rank > 0 and carried is not tensor:
                tensor.copy_(carried)
        except Exception as error:
            raise TransportError(f"{self._name} failed: {_first_line(error)}") from error


def _made(store: Store, seats: Seats, rank: int, timeout: timedelta) -> Any:
    if seats.backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, seats.size, options)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    # By itself gloo takes the address of the host's name, which need not be the cluster's network.
    options._devices = [gloo.create_device(hostname=_own_address(seats))]
    return gloo(store, rank, seats.size, options)


def _own_address(seats: Seats) -> str:
    """Return the address by which this machine reaches rank 0, which the others reach too."""
    family = socket.AF_INET6 if ":" in seats.address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Nothing is sent: the system only chooses the interface.
        probe.connect((seats.address, seats.port))
        address: str = probe.getsockname()[0]
    return address


def _tensor(data: Bytes) -> torch.Tensor:
    with warnings.catch_warnings():
        # Of memory that must not be written: rank 0 only reads it.
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(data)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
