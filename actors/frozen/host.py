"""FrozenHost: the engine of a worker whose model never changes, built when it is first needed.

Owns when it is built and what becomes of a build that fails. An actor that Ray started again gets its engine by its
first call, and that call waits for it: nobody has to start it a second time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, TypeVar

from actors.engine_life import EngineLife
from raypost.config.engine import EngineConfig
from raypost.errors import RaypostError

if TYPE_CHECKING:
    from actors.frozen.vllm_engine import FrozenEngine

T = TypeVar("T")


class FrozenHost:
    """Every method belongs to one event loop."""

    def __init__(
        self, name: str, model_path: str, config: EngineConfig, logits_mb: int | None = None
    ) -> None:
        """`model_path`: a folder with the weights. `logits_mb`: as of a FrozenEngine, None for one that scores."""
        self._name = name
        self._model_path = model_path
        self._config = config
        self._logits_mb = logits_mb
        self._life = EngineLife(name, config, self._make_engine)
        self._building: asyncio.Task[FrozenEngine] | None = None

    def _make_engine(self) -> FrozenEngine:
        # vLLM reads the environment when it is imported.
        from actors.frozen.vllm_engine import FrozenEngine

        return FrozenEngine(self._model_path, self._config, self._logits_mb)

    async def start(self) -> dict[str, Any]:
        """Build the engine unless there is one. {pid, engine_pids, init_s}. Raises RaypostError if it does not come
        up."""
        await self.engine()
        return self._life.info

    async def engine(self) -> FrozenEngine:
        """The engine, once there is one. Raises RaypostError if it does not come up; the next call tries again."""
        if self._building is None:
            self._building = asyncio.create_task(self._build(), name=f"build the engine of {self._name}")
        # Whoever asked first may be cancelled; the others want it all the same.
        return await asyncio.shield(self._building)

    async def _build(self) -> FrozenEngine:
        try:
            return await self._life.build()
        except Exception as error:
            self._life.discard()
            self._building = None
            raise RaypostError(
                f"the engine of {self._name} did not start: {error} (its log says more)"
            ) from error

    async def alive(self, call: Awaitable[T]) -> T:
        """Await a call to the engine; end this process if the engine turns out to be dead."""
        return await self._life.alive(call)

    def shutdown(self) -> None:
        """End the engine's processes."""
        self._building = None
        self._life.discard()
