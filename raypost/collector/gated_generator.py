"""GatedGenerator: a generator without a pause of its own, made a rollout pool that has one.

Owns the gate and the requests behind it. Owns no engine, and no versions: the wrapped generator says which
policy produced a token. Invariant: after `pause` no request is open, and none starts before `resume`.
"""

from __future__ import annotations

import asyncio

from raypost.errors import ConfigError
from raypost.types import GenerateRequest, GenerateResult, Generator
from raypost.types.pause import PauseMode


class GatedGenerator:
    """A `Generator` and a `RolloutControl`.

    Aborting cancels open requests: the tokens of the turn that is being generated are lost, those before it stay.
    """

    def __init__(self, generator: Generator) -> None:
        """Start paused."""
        self._generator = generator
        self._open = asyncio.Event()
        self._requests: set[asyncio.Task[GenerateResult]] = set()

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Return what the generator gives; "abort" without tokens if a pause comes first."""
        if not self._open.is_set():
            return GenerateResult.nothing("abort")
        task = asyncio.ensure_future(self._generator.generate(request))
        self._requests.add(task)
        try:
            await asyncio.wait([task])
        finally:
            self._requests.discard(task)
            task.cancel()
        if task.cancelled() and not self._open.is_set():
            return GenerateResult.nothing("abort")
        return task.result()

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Close the gate; abort: cancel what is open, wait: let it end. Raises ConfigError for keep."""
        if mode == "keep":
            raise ConfigError(
                f"{type(self._generator).__name__} has no pause of its own, so its requests cannot be kept: use "
                "pause mode abort or wait"
            )
        self._open.clear()
        requests = list(self._requests)
        for request in requests if mode == "abort" else ():
            request.cancel()
        if requests:
            await asyncio.wait(requests)

    async def resume(self, version: int) -> None:
        """Open the gate."""
        self._open.set()
