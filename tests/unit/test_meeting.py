"""Ranks meet at one address, which nobody reaches from another interface."""

from __future__ import annotations

from datetime import timedelta

import psutil
import pytest

from raypost.weights.meeting import meeting_store

SOON = timedelta(seconds=20)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_store_listens_on_its_own_address_only(address: str) -> None:
    store = meeting_store(address, 0, 0, 2, SOON)
    other = meeting_store(address, store.port, 1, 2, SOON)
    store.set("here", "rank 0")
    assert other.get("here") == b"rank 0"
    listening = [
        one.laddr for one in psutil.Process().net_connections("tcp") if one.status == psutil.CONN_LISTEN
    ]
    assert {one.ip for one in listening if one.port == store.port} == {address}
    with pytest.raises(OSError):
        meeting_store(address, store.port, 0, 2, SOON)
