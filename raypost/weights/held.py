"""What a model holds of the tensors that were sent to it, read back from its own parameters.

Owns where an engine's loaders put each tensor, and the comparison of what lies there with what was sent. Knows nothing
of vLLM: whoever loads hands over the tensors one by one, and the parameters before they are packed and afterwards.

    recording    once a layout: each copy from a tensor into a parameter, seen while the engine's own loaders make it
    sent         each load: the digest that every part of a tensor must have in its parameter
    unpacked     each load: the digest it has there, of parameters that the engine then packs into a form of its own
    verify       each load: the digests of all other parameters, and whether everything is what was sent
    draft        a load beside what the model holds: what is noted of it counts once it takes the model's place

Invariants: a digest that `verify` compares was computed from the parameter, never taken from what was sent; a tensor
that is not sent again must still be what it was; what a loader changes on the way is left out and named.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from raypost.errors import WeightError
from raypost.weights.manifest import Manifest, TensorEntry, digest_bytes

P = ParamSpec("P")
R = TypeVar("R")

SMALL_BYTES = 1 << 20
"""A digest of so much takes less time than to have a thread compute it."""


class Strided(NamedTuple):
    """Some elements of a tensor: a view of it, which begins `offset` elements after it."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, view: Tensor, whole: Tensor) -> Strided:
        """Return which elements of `whole` are in `view`."""
        return cls(tuple(view.shape), view.stride(), int(view.storage_offset() - whole.storage_offset()))

    def of_tensor(self, whole: Tensor) -> Tensor:
        """Return these elements."""
        return whole.detach().as_strided(self.size, self.stride, whole.storage_offset() + self.offset)


class Place(NamedTuple):
    """A part of a tensor and where it lies in a parameter."""

    tensor: str
    parameter: str
    here: Strided
    """Of the tensor."""
    there: Strided
    """Of the parameter."""


@dataclass(frozen=True, slots=True)
class Form:
    """What a parameter is like while it is loaded."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Form:
        """Return the form of a tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)


class ReadBack(NamedTuple):
    """What one verification read, in bytes of the parameters."""

    in_use: int
    """Where the model computes with them."""
    unpacked: int
    """Before the engine packed them into a form of its own."""
    left_out: tuple[str, ...]
    """Tensors of which a loader changed something on the way, and the parameters that have it."""
    seconds: float = 0.0
    """That the engine stood still for it."""

    @classmethod
    def of_ranks(cls, ranks: Sequence[ReadBack]) -> ReadBack:
        """Return what the ranks of one engine read together."""
        return cls(
            in_use=sum(one.in_use for one in ranks),
            unpacked=sum(one.unpacked for one in ranks),
            left_out=tuple(sorted({name for one in ranks for name in one.left_out})),
            seconds=max(one.seconds for one in ranks),
        )


class HeldWeights:
    """The tensors that one rank of an engine was sent, and where they lie in its model."""

    def __init__(self, executor: Executor) -> None:
        """`executor` computes digests while the engine goes on loading; one thread, so that memory stays bounded."""
        self._executor = executor
        self._forms: dict[str, Form] = {}
        """Of each parameter, by its name."""
        self._places: dict[str, list[Place]] = {}
        """By tensor."""
        self._parts: dict[str, list[Place]] = {}
        """The same, by parameter."""
        self._left_out: set[str] = set()
        self._expected: dict[Place, Future[str] | str] = {}
        self._contents: dict[str, str] = {}
        """Of each tensor, as it was loaded last."""
        self._unpacked: dict[str, Future[list[str]]] = {}
        """Digests of what each parameter held before it was packed, in the order of its parts."""
        self._in_use: dict[str, Future[list[str]]] = {}
        """The same of those that the model computes with."""
        self._recorder: _Recorder | None = None

    def draft(self) -> HeldWeights:
        """Return what takes note of a version that is not loaded yet. Take it in place of this once that is."""
        made = copy.copy(self)
        made._expected, made._contents = dict(self._expected), dict(self._contents)
        made._unpacked, made._in_use = dict(self._unpacked), {}
        return made

    @property
    def is_known(self) -> bool:
        """Whether the layout was recorded."""
        return bool(self._forms)

    @property
    def left_out(self) -> bool:
        """Whether a loader changed something on the way."""
        return bool(self._left_out)

    def places(self, tensor: str) -> Sequence[Place]:
        """Return where the parts of a tensor go."""
        return self._places.get(tensor, ())

    def parts(self, parameter: str) -> Sequence[Place]:
        """Return what comes into a parameter."""
        return self._parts.get(parameter, ())

    def form(self, parameter: str) -> Form:
        """Return what a parameter is like while it is loaded."""
        return self._forms[parameter]

    @contextmanager
    def recording(self, parameters: Iterable[tuple[str, Tensor]]) -> Iterator[None]:
        """Record where what is sent in this block goes; `parameters` as they are when the loaders are called."""
        whole = dict(parameters)
        self._forms = {name: Form.of(tensor) for name, tensor in whole.items()}
        self._recorder = _Recorder(whole, self._note)
        try:
            with self._recorder:
                yield
            self._learn(self._recorder)
        finally:
            self._recorder = None

    def _learn(self, recorder: _Recorder) -> None:
        self._left_out |= recorder.changed
        for name in recorder.changed:
            for place in self._parts.pop(name, []):
                self._left_out.add(place.tensor)
                self._places[place.tensor].remove(place)
        for entry, tensor in recorder.sent.values():
            self._expect(entry, tensor)

    def sent(self, tensors: Iterable[tuple[TensorEntry, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors for the engine to load, and take note of what must be found in its model."""
        for entry, tensor in tensors:
            recorder, storage = self._recorder, tensor.untyped_storage()._cdata
            if recorder is not None:
                recorder.sent[storage] = entry, tensor
            yield entry.name, tensor
            if recorder is None or entry.name in self._places:
                self._expect(entry, tensor)
                if recorder is not None:
                    del recorder.sent[storage]

    def _note(self, place: Place) -> None:
        parts = self._parts.setdefault(place.parameter, [])
        if place not in parts:
            parts.append(place)
            self._places.setdefault(place.tensor, []).append(place)

    def _expect(self, entry: TensorEntry, tensor: Tensor) -> None:
        self._contents[entry.name] = entry.content
        for place in self._places.get(entry.name, []):
            dtype = self._forms[place.parameter].dtype
            part = place.here.of_tensor(tensor)
            is_as_sent = entry.added is None and tensor.dtype == dtype
            if is_as_sent and part.numel() == tensor.numel() and part.is_contiguous():
                self._expected[place] = entry.digest
            else:
                self._expected[place] = self._computed(part.nbytes, _digest, part, dtype)
        if entry.name not in self._places:
            self._left_out.add(entry.name)

    def unpacked(self, name: str, parameter: Tensor) -> None:
        """Take note of what a parameter holds once it is loaded, before the engine packs it and frees it."""
        parts = self._parts.get(name)
        if parts:
            views = [part.there.of_tensor(parameter) for part in parts]
            self._unpacked[name] = self._computed(parameter.nbytes, _digests, views)

    def _computed(self, nbytes: int, compute: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Compute digests of so many bytes: now, or by the thread while the engine goes on loading."""
        if nbytes > SMALL_BYTES:
            return self._executor.submit(compute, *args, **kwargs)
        done: Future[R] = Future()
        done.set_result(compute(*args, **kwargs))
        return done

    def begin_to_verify(self, parameters: Mapping[str, Tensor]) -> None:
        """Begin to compute the digests of the parameters that the model computes with.

        One that has another form than while it was loaded counts by what it was before it was packed.
        """
        self._in_use.clear()
        for name, parts in self._parts.items():
            parameter = parameters.get(name)
            if parameter is not None and Form.of(parameter) == self._forms[name]:
                views = [part.there.of_tensor(parameter) for part in parts]
                self._in_use[name] = self._computed(parameter.nbytes, _digests, views)

    def verify(self, manifest: Manifest) -> ReadBack:
        """Compare what the model holds with `manifest`.

        Raises WeightError naming the first tensor that differs, or of which nothing shows that it was loaded.
        """
        version = manifest.version
        for entry in manifest.tensors:
            if self._contents.get(entry.name) != entry.content:
                raise WeightError(f"version {version}: {entry.name!r} was not loaded: load it again")
        in_use = unpacked = 0
        for name, parts in self._parts.items():
            nbytes = sum(prod(part.there.size) for part in parts) * self._forms[name].dtype.itemsize
            if name in self._in_use:
                found, where = self._in_use[name].result(), "holds"
                in_use += nbytes
            elif name in self._unpacked:
                found, where = self._unpacked[name].result(), "was given to pack"
                unpacked += nbytes
            else:
                raise WeightError(
                    f"version {version}: nothing shows that {parts[0].tensor!r} was loaded into {name!r}: load it again"
                )
            for part, digest in zip(parts, found, strict=True):
                self._compare(version, part, digest, where)
        return ReadBack(in_use, unpacked, tuple(sorted(self._left_out)))

    def _compare(self, version: int, part: Place, found: str, where: str) -> None:
        sent = self._expected[part]
        sent = sent if isinstance(sent, str) else sent.result()
        if found != sent:
            raise WeightError(
                f"version {version}: what {part.parameter!r} {where} of {part.tensor!r} has digest {found}, and "
                f"{sent} was sent: load it again"
            )


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch has no types for it
    """Notes every copy into a parameter."""

    def __init__(self, parameters: dict[str, Tensor], note: Callable[[Place], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self._parameters = parameters
        self._names = {one.untyped_storage()._cdata: name for name, one in parameters.items()}
        self._note_place = note
        self.sent: dict[int, tuple[TensorEntry, Tensor]] = {}
        """What may still be copied, by its storage, which is kept so that no other takes its place."""
        self.changed: set[str] = set()
        """Parameters that got something else than elements of what was sent."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default:
            self._note(*args[:2])
        return func(*args, **(kwargs or {}))

    def _note(self, there: Tensor, here: Tensor) -> None:
        name = self._names.get(there.untyped_storage()._cdata)
        if name is None:
            return
        entry, tensor = self.sent.get(here.untyped_storage()._cdata, (None, None))
        if entry is None or tensor is None or there.shape != here.shape:
            self.changed.add(name)
            return
        whole = self._parameters[name]
        self._note_place(Place(entry.name, name, Strided.of(here, tensor), Strided.of(there, whole)))


def _digests(views: Sequence[Tensor]) -> list[str]:
    return [_digest(view) for view in views]


def _digest(view: Tensor, dtype: torch.dtype | None = None) -> str:
    """Return the digest of a tensor's elements in order, as `dtype` unless that is its own."""
    flat = view.to(dtype or view.dtype).contiguous().reshape(-1).view(torch.uint8)
    return digest_bytes(flat.cpu().numpy())
