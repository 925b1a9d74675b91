"""The process that a reward function runs in: it loads the function, and answers calls until its parent is gone.

Started by function_process.py as a file, with a socket and its parent's process id, and without the modules that only
the parent needs. What the function prints goes to the standard error, that is into the judge's log.

    parent --(number, samples), pickled--> [load the function once] --{"number", "scores" | "error"}, JSON--> parent
                                                                        error null: past its deadline

A function that is no coroutine runs in the main thread, one call after the other; coroutines run at once. A copy of
this process that the function forked never answers: it ends where the function returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import inspect
import json
import linecache
import math
import os
import pickle
import signal
import socket
import struct
import sys
import traceback
import types
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from raypost.types import Sample, Score

HEADER = struct.Struct(">Q")
"""Length of the message that follows, in bytes."""
MODULE = "raypost_reward"
"""Name of the module that a function's file becomes."""
ALL = inspect.Parameter.VAR_KEYWORD


class RefusedError(Exception):
    """What a function is or returned cannot be used; the message is for its author."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionSpec:
    """Which function, and how it is called."""

    function: str
    """`reward.py:score` or `module:score`."""
    source: str | None
    """Text of the file; None: the function is in a module."""
    timeout_s: float
    """For one call."""
    answer_field: str = "answer"
    """What the data calls the answer: functions may ask for it by that name."""
    chat: bool = False
    """Prompts are conversations: functions of TRL's shape are given lists of messages."""


# ---------------------------------------------------------------- loading


def load(spec: FunctionSpec) -> Callable[..., Any]:
    """Return the function. Raises RefusedError."""
    place, _, name = spec.function.rpartition(":")
    try:
        module = importlib.import_module(place) if spec.source is None else _module_of(place, spec.source)
    # It is the user's code, which may raise anything and even leave.
    except BaseException as error:
        raise RefusedError(f"{spec.function} cannot be imported: {_describe(error, place)}") from error
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise RefusedError(f"{spec.function}: {place} has no {name!r}")
        found = getattr(found, part)
    if not callable(found):
        raise RefusedError(f"{spec.function} is a {type(found).__name__} and no function")
    function: Callable[..., Any] = found
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            raise RefusedError(
                f"{spec.function} has the positional-only parameter {parameter.name!r}; arguments are given by name: "
                "leave the / out"
            )
    return function


def _module_of(path: str, source: str) -> types.ModuleType:
    module = types.ModuleType(MODULE)
    module.__file__ = path
    # Tracebacks then show its lines, on nodes that do not have the file.
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    sys.modules[MODULE] = module
    exec(compile(source, path, "exec"), module.__dict__)
    return module


def is_coroutine(function: Callable[..., Any]) -> bool:
    """Return whether calls of the function can run at once."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


# ---------------------------------------------------------------- calling


class Caller:
    """Calls one function with samples, in the shape that its parameters ask for.

    With a parameter `completions` it is called as TRL calls reward functions, with `samples` once for all samples of a
    call, otherwise once for each.
    """

    def __init__(self, spec: FunctionSpec, function: Callable[..., Any]) -> None:
        """Take the function that `load` returned."""
        self._spec = spec
        self._function = function
        self._parameters = inspect.signature(function).parameters
        self.is_coroutine = is_coroutine(function)
        self._pid = os.getpid()
        self._per_call = "completions" in self._parameters or "samples" in self._parameters

    def results(self, samples: Sequence[Sample]) -> list[Any]:
        """Call the function for all samples; what it returns may have to be awaited."""
        if "completions" in self._parameters:
            return [self._called(self._columns(samples))]
        if "samples" in self._parameters:
            return [self._called({"samples": list(samples)})]
        return [self._called(self._fields(sample)) for sample in samples]

    def _called(self, given: dict[str, Any]) -> Any:
        result = self._function(**self._chosen(given))
        self.end_copy()
        return result

    def end_copy(self) -> None:
        """End this process if it is one that the function forked: before it meets what it shares with the other."""
        if os.getpid() != self._pid:
            os._exit(0)

    def scores(self, results: Sequence[Any], num_samples: int) -> list[Score]:
        """Return one score for each sample. Raises RefusedError."""
        function = self._spec.function
        if self._per_call:
            (returned,) = results
            if hasattr(returned, "tolist"):
                returned = returned.tolist()
            if not isinstance(returned, list | tuple):
                raise RefusedError(
                    f"{function} returned a {type(returned).__name__} ({returned!r:.80}) for {num_samples} responses: "
                    "it must return a list with one score for each"
                )
            if len(returned) != num_samples:
                raise RefusedError(
                    f"{function} returned {len(returned)} scores for {num_samples} responses: it must return one "
                    "for each"
                )
            results = returned
        return [self._score(result) for result in results]

    def _score(self, result: Any) -> Score:
        function = self._spec.function
        parts, words = (result.parts, result.words) if isinstance(result, Score) else ({}, "")
        score = Score(number_of(result, f"{function} returned"), words=str(words))
        for name, value in parts.items():
            if not isinstance(name, str) or "\n" in name:
                raise RefusedError(f"{function} named a part {name!r}: a name is a text of one line")
            score.parts[name] = number_of(value, f"{function}: part {name!r} is")
        return score

    def _fields(self, sample: Sample) -> dict[str, Any]:
        own = {field.name: getattr(sample, field.name) for field in fields(Sample)}
        return {**sample.metadata, self._spec.answer_field: sample.answer, **own, "sample": sample}

    def _columns(self, samples: Sequence[Sample]) -> dict[str, Any]:
        names = dict.fromkeys(name for sample in samples for name in sample.metadata)
        columns: dict[str, Any] = {name: [s.metadata.get(name) for s in samples] for name in names}
        columns[self._spec.answer_field] = [s.answer for s in samples]
        if self._spec.chat:
            prompts: list[Any] = [s.turns[:-1] for s in samples]
            completions: list[Any] = [s.turns[-1:] for s in samples]
        else:
            prompts, completions = [s.prompt for s in samples], [s.response for s in samples]
        ids = [s.response_ids.tolist() for s in samples]
        return {**columns, "prompts": prompts, "completions": completions, "completion_ids": ids}

    def _chosen(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return those of the arguments that the function has parameters for. Raises RefusedError if it needs more."""
        kinds = {name: one.kind for name, one in self._parameters.items()}
        variadic = (ALL, inspect.Parameter.VAR_POSITIONAL)
        needed = [
            name
            for name, one in self._parameters.items()
            if one.default is inspect.Parameter.empty and one.kind not in variadic
        ]
        if missing := [name for name in needed if name not in given]:
            raise RefusedError(
                f"{self._spec.function} has the parameter {missing[0]!r}, which is none of those it can be given: "
                f"{', '.join(sorted(given))}"
            )
        return given if ALL in kinds.values() else {name: given[name] for name in kinds if name in given}


def number_of(value: Any, what: str) -> float:
    """Return a finite number: of Python, NumPy or a tensor of one element. Raises RefusedError."""
    number = value.item() if hasattr(value, "item") else value
    if not isinstance(number, int | float):
        raise RefusedError(f"{what} {value!r:.80}, a {type(value).__name__}: a score must be a number")
    if not math.isfinite(number):
        raise RefusedError(f"{what} {number}: a score must be finite")
    return float(number)


def _describe(error: BaseException, place: str) -> str:
    """Return an error's kind and text, and where in the function's file it was raised."""
    text = f"{type(error).__name__}: {error}"
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_in(frame.filename, place)]
    return f"{text} (line {lines[-1].lineno} of {lines[-1].filename})" if lines else text


def _is_in(filename: str, place: str) -> bool:
    return filename == place or Path(filename).stem == place.rpartition(".")[2]


# ---------------------------------------------------------------- the process


class Server:
    """Answers the parent's calls."""

    def __init__(self, parent: socket.socket, spec: FunctionSpec) -> None:
        """Load the function and say how it went; `ok` tells whether calls can be answered."""
        self._parent = parent
        self._spec = spec
        self._pid = os.getpid()
        try:
            self._caller = Caller(spec, load(spec))
        except RefusedError as error:
            self.ok = False
            self._answer({"error": str(error)})
            return
        self.ok = True
        self._answer({"is_coroutine": self._caller.is_coroutine})

    def run(self) -> None:
        """Answer calls until the parent is gone."""
        if self._caller.is_coroutine:
            asyncio.run(self._serve())
            return
        while (call := receive(self._parent)) is not None:
            number, samples = call
            try:
                results = [awaited(result) for result in self._caller.results(samples)]
                self._caller.end_copy()
                self._answer_scores(number, self._caller.scores(results, len(samples)))
            except BaseException as error:  # the user's code: what it raises is the answer
                self._answer({"number": number, "error": self._text(error)})

    async def _serve(self) -> None:
        loop, open_calls = asyncio.get_running_loop(), set[asyncio.Task[None]]()
        while (call := await loop.run_in_executor(None, receive, self._parent)) is not None:
            task = asyncio.create_task(self._reply(*call))
            open_calls.add(task)
            task.add_done_callback(open_calls.discard)

    async def _reply(self, number: int, samples: list[Sample]) -> None:
        try:
            async with asyncio.timeout(self._spec.timeout_s) as deadline:
                results = await asyncio.gather(*map(self._awaited, self._caller.results(samples)))
            self._answer_scores(number, self._caller.scores(results, len(samples)))
        except BaseException as error:  # as above
            late = isinstance(error, TimeoutError) and deadline.expired()
            self._answer({"number": number, "error": None if late else self._text(error)})

    async def _awaited(self, result: Awaitable[Any]) -> Any:
        try:
            found = await result
            self._caller.end_copy()
            return found
        except (SystemExit, KeyboardInterrupt) as error:  # they would end the loop, and with it all calls
            raise RefusedError(self._text(error)) from error

    def _answer_scores(self, number: int, scores: list[Score]) -> None:
        self._answer(
            {"number": number, "scores": [[score.reward, score.parts, score.words] for score in scores]}
        )

    def _text(self, error: BaseException) -> str:
        if isinstance(error, RefusedError):
            return str(error)
        place = self._spec.function.rpartition(":")[0]
        return f"{self._spec.function} raised {_describe(error, place)}"

    def _answer(self, answer: dict[str, Any]) -> None:
        if os.getpid() != self._pid:
            os._exit(0)  # a copy in which the function raised, or which was forked by an import
        data = json.dumps(answer).encode()
        self._parent.sendall(HEADER.pack(len(data)) + data)


def awaited(result: Any) -> Any:
    """Return the result, after waiting for it if it must be awaited."""

    async def wait() -> Any:
        return await result

    return asyncio.run(wait()) if inspect.isawaitable(result) else result


def receive(parent: socket.socket) -> Any:
    """Return the next message, None when the parent is gone."""
    header = _read(parent, HEADER.size)
    data = None if header is None else _read(parent, HEADER.unpack(header)[0])
    return None if data is None else pickle.loads(data)


def _read(parent: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        with contextlib.suppress(InterruptedError):
            part = parent.recv(min(size - len(data), 1 << 20))
            if not part:
                return None
            data += part
    return bytes(data)


def die_with(parent: int) -> None:
    """Have the system end this process when its parent dies, however busy the function is."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def main(fd: int, parent: int) -> None:
    """Serve on the socket `fd`."""
    die_with(parent)
    os.set_inheritable(fd, False)
    os.dup2(2, 1)
    link = socket.socket(fileno=fd)
    os.register_at_fork(after_in_child=link.close)
    spec = receive(link)
    if spec is not None:
        server = Server(link, FunctionSpec(**spec))
        if server.ok:
            server.run()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
