"""Arrays of tokens, and references to what lies in Ray's object store."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]


FloatArray = NDArray[np.float32]


MaskArray = NDArray[np.bool_]


NO_VERSION = -1
"""`policy_versions` entry of a token that no policy produced (a tool's or an environment's)."""


T_co = TypeVar("T_co", covariant=True)


class Ref(Protocol[T_co]):
    """Reference to a value in Ray's object store. Roles pass it on unopened; awaiting it fetches the value."""

    def __await__(self) -> Generator[Any, None, T_co]:
        """Fetch the value."""
        ...


def empty_ints() -> IntArray:
    """Return no token ids."""
    return np.empty(0, np.int32)


def empty_floats() -> FloatArray:
    """Return no logprobs."""
    return np.empty(0, np.float32)


def empty_mask() -> MaskArray:
    """Return the mask of no tokens."""
    return np.empty(0, np.bool_)
