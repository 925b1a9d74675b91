"""FrozenWorker: the base of workers whose engine's weights never change.

Owns when the engine is built and what becomes of a build that fails. An actor that Ray restarted builds its engine
during its first call, which waits for it; no second `start` is needed.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from actors.engine.life import EngineInfo, EngineLife
from actors.many_calls import CallBatches
from raypost.config.engine import EngineConfig

if TYPE_CHECKING:
    from actors.frozen.vllm_engine import FrozenEngine


class FrozenWorker(CallBatches):
    """One engine. It holds no state between calls, so a call may be repeated on any worker."""

    def __init__(
        self,
        name: str,
        model_path: str,
        config: EngineConfig,
        logits_mb: int | None = None,
        *,
        speaks: bool = False,
    ) -> None:
        """`model_path`: a folder with the weights. `logits_mb`, `speaks`: as of FrozenEngine."""
        super().__init__()
        self._name = name
        self._model_path = model_path
        self._config = config
        self._logits_mb = logits_mb
        self._speaks = speaks
        self._life = EngineLife(name, config, self._make_engine)
        self._building: asyncio.Task[EngineInfo] | None = None

    def __repr__(self) -> str:
        """Return the actor's name."""
        return self._name

    def _make_engine(self) -> FrozenEngine:
        # vLLM reads the environment when it is imported.
        from actors.frozen.vllm_engine import FrozenEngine

        return FrozenEngine(self._model_path, self._config, self._logits_mb, speaks=self._speaks)

    async def start(self) -> EngineInfo:
        """Build the engine unless there is one. Raises RaypostError if it does not come up; the next call retries."""
        if self._building is None or (self._building.done() and self._life.engine is None):
            self._building = asyncio.create_task(self._life.build(), name=f"build the engine of {self._name}")
        # The caller may be cancelled; others wait for the same engine.
        return await asyncio.shield(self._building)

    async def _engine(self) -> FrozenEngine:
        await self.start()
        assert self._life.engine is not None, "it was started"
        return self._life.engine

    async def shutdown(self) -> None:
        """End the engine's processes. The actor itself is ended by its owner."""
        self._life.discard()
