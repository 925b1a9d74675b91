"""What a test knows to be there although its type says that it may be None."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def present(value: T | None) -> T:
    """Return the value. Fails the test if it is None."""
    assert value is not None
    return value
