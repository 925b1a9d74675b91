"""HostStates: frees the device memory of tensors and keeps their contents in main memory meanwhile.

What is freed is the storage below tensors, so that views of it, of which ZeRO has many, stay views and see their
contents again afterwards. Nothing may compute with them meanwhile.

DeepSpeed moves states itself too, but not what is needed here: at ZeRO 3 only with an optimizer that has to be
compiled, not at ZeRO 0, and nowhere frozen weights.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK_BYTES = 2**28
"""Pinned memory is given out in powers of two: one piece for a tensor could take twice what it holds."""
_OWNERS = ("deepspeed.", "torch.optim.")


@dataclass(frozen=True, slots=True)
class _Freed:
    storage: torch.UntypedStorage
    nbytes: int
    copies: list[Tensor]
    """Of all of it, in pieces; none of scratch memory."""


class HostStates:
    """The memory that was freed on one device. All of it comes back at once."""

    def __init__(self, device: torch.device) -> None:
        """Move nothing yet. `device`: whose memory is freed."""
        self._device = device
        self._freed: list[_Freed] = []
        self.is_offloaded = False

    def offload(self, tensors: Iterable[Tensor], scratch: Iterable[Tensor] = ()) -> int:
        """Free the memory of those tensors that lie on the device; return its bytes, 0 if it is free already.

        Needs as much main memory, pinned if the device is a GPU, but none for `scratch`, which comes back with
        whatever it holds then. If there is not enough, everything else is as before.
        """
        if self.is_offloaded:
            return 0
        storages = self._storages(scratch)
        unread = set(storages)
        storages |= self._storages(tensors)
        self.is_offloaded = True
        try:
            for address, storage in storages.items():
                copies = [] if address in unread else self._copied(storage)
                self._freed.append(_Freed(storage, storage.nbytes(), copies))
                storage.resize_(0)
        except BaseException:
            self.reload()
            raise
        self._settle()
        return sum(one.nbytes for one in self._freed)

    def reload(self) -> None:
        """Take the memory back, with what it held. Idempotent; what did not fit yet comes with the next call."""
        while self._freed:
            one = self._freed[-1]
            one.storage.resize_(one.nbytes)
            for part, copy in zip(torch.split(_bytes_of(one.storage), CHUNK_BYTES), one.copies, strict=False):
                part.copy_(copy, non_blocking=True)
            self._freed.pop()
        self._settle()
        self.is_offloaded = False

    def _storages(self, tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
        """Return the memory below the tensors that can be freed, by its address."""
        storages = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.device.type == self._device.type and storage.nbytes() and storage.resizable():
                storages[storage.data_ptr()] = storage
        return storages

    def _copied(self, storage: torch.UntypedStorage) -> list[Tensor]:
        pinned = self._device.type == "cuda"
        copies = []
        for part in torch.split(_bytes_of(storage), CHUNK_BYTES):
            copies.append(torch.empty(part.shape, dtype=torch.uint8, pin_memory=pinned))
            copies[-1].copy_(part, non_blocking=True)
        return copies

    def _settle(self) -> None:
        """Wait for copies, and give memory that PyTorch keeps at hand back to the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def tensors_of(*owners: object) -> Iterator[Tensor]:
    """Yield every tensor that optimizers, containers and tensors hold, directly or through one another.

    Gradients, and what ZeRO keeps in attributes of weights, are among them.
    """
    seen: dict[int, object] = {}
    left: list[object] = list(owners)
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = one
        if isinstance(one, Tensor):
            yield one
            left.append(vars(one))
            if one.is_leaf:
                left.append(one.grad)
        elif isinstance(one, dict):
            left += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple | set | frozenset | deque):
            left += one
        elif type(one).__module__.startswith(_OWNERS) and hasattr(one, "__dict__"):
            left.append(vars(one))
