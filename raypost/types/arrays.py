"""Arrays of tokens, their bytes in a record that travels, and references to what lies in Ray's object store.

An array that is pickled by itself costs both sides microseconds: of records that travel by the hundred, `__reduce_ex__`
gives the bytes of their arrays. What is read from them cannot be written to, as what Ray gives cannot. Copies, which
ask for an older protocol than pickle's 5, are made as of any other object.
"""

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


def bytes_of(array: NDArray[Any], dtype: type[np.generic]) -> bytes:
    """Return the values of an array as that type has them."""
    return np.asarray(array, dtype).tobytes()


def empty_ints() -> IntArray:
    """Return no token ids."""
    return np.empty(0, np.int32)


def empty_floats() -> FloatArray:
    """Return no logprobs."""
    return np.empty(0, np.float32)


def empty_mask() -> MaskArray:
    """Return the mask of no tokens."""
    return np.empty(0, np.bool_)
