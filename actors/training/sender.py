"""GroupSender: the trainer's end of broadcast groups, on rank 0.

Owns the group under way and its sockets. The bytes are those that were put into the object store: engines that come
later, or whose group failed, take them from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import ray

from raypost.errors import TransportError

if TYPE_CHECKING:
    from raypost.weights.group import Host
    from raypost.weights.manifest import Bytes
    from raypost.weights.seats import Backend, Member, Seats


class GroupSender:
    """One group at a time."""

    def __init__(self) -> None:
        """Listen nowhere yet."""
        self._host: Host | None = None

    def open(self, members: Sequence[Member], backend: Backend, timeout_s: float) -> Seats:
        """Give the group under way up for another one; wait for nobody. Returns where it meets, on this node."""
        # Here, since PyTorch is slow to import, and an actor must answer soon.
        from raypost.weights.group import Host

        self._host = None
        self._host = Host(ray.util.get_node_ip_address(), backend, timeout_s, members)
        return self._host.seats

    def send(self, buckets: Sequence[ray.ObjectRef[Bytes]], seats: Seats) -> str:
        """Send buckets, from `seats.first_bucket` on, to all others of the group; "", or what failed.

        Waits for the others, for the group's timeout at most. A group that failed is given up.
        """
        host, self._host = self._host, None
        if host is None or host.seats.meeting != seats.meeting:
            return f"the group at {seats.address}:{seats.port} is not open: it failed, or the trainer was started again"
        try:
            for ref in buckets[seats.first_bucket :]:
                host.send(ray.get(ref))
        except TransportError as error:
            return str(error)
        self._host = host
        return ""
