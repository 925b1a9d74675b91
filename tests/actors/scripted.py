"""A scripted rollout worker: no engine, tokens by rule. For tests of the pool, never of the engine."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from actors.engine.life import EngineInfo
from actors.many_calls import CallBatches
from actors.rollout.gate import OpenRequests
from actors.rollout.status import Held, WorkerStatus
from raypost.errors import EngineLostError
from raypost.observe.spans import Span
from raypost.types import GenerateRequest, GenerateResult, WeightReport, WorkerStats
from raypost.types.pause import PauseMode, stricter


class ScriptedWorker(CallBatches):
    """Generates `max_tokens` tokens, one every `token_s` seconds, each carrying the version held then."""

    def __init__(
        self,
        name: str,
        token_s: float = 0.0,
        lie: bool = False,
        start_s: float = 0.0,
        dies_unless: Path | None = None,
    ) -> None:
        super().__init__()
        self.name, self.token_s, self.lie, self.start_s = name, token_s, lie, start_s
        self.dies_unless = dies_unless
        """A file without which its first start ends it."""
        self.tokens = self.answered = self.num_begun = 0
        self.version: int | None = None
        self.digest = ""
        self.gate_open = False
        self.requests = OpenRequests(name)
        self.mode: PauseMode | None = None
        self.started = False
        self.num_starts = 0
        self.sleeping: str | None = None
        """What of its memory sleeps: all, kv_cache or None."""

    def __repr__(self) -> str:
        return self.name

    async def start(self) -> EngineInfo:
        await asyncio.sleep(self.start_s)
        if self.dies_unless is not None and not self.dies_unless.exists():
            self.dies_unless.touch()
            os._exit(1)
        self.started = True
        self.num_starts += 1
        return EngineInfo(os.getpid(), [])

    def check_started(self) -> None:
        if not self.started:
            raise EngineLostError(f"{self.name} has no engine")

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self.check_started()
        if not self.gate_open:
            return GenerateResult.nothing("abort", self.name)
        ticket = self.requests.enter(request.request_id)
        ids: list[int] = []
        versions: list[int] = []
        try:
            while len(ids) < request.sample_params.max_tokens:
                await asyncio.sleep(self.token_s)
                if self.mode == "abort":
                    break
                if self.mode == "keep":
                    continue
                assert self.version is not None
                self.num_begun += not ids
                ids.append(len(ids) + 1)
                versions.append(self.version)
        finally:
            self.num_begun -= bool(ids)
            self.requests.leave(ticket)
        self.tokens, self.answered = self.tokens + len(ids), self.answered + 1
        done = len(ids) == request.sample_params.max_tokens
        return GenerateResult(
            response_ids=np.asarray(ids, np.int32),
            logprobs=np.zeros(len(ids), np.float32),
            policy_versions=np.asarray(versions, np.int32),
            finish_reason="length" if done else "abort",
            worker=self.name,
        )

    async def pause(self, mode: PauseMode = "abort") -> PauseMode:
        self.gate_open = False
        self.mode = stricter(self.mode, mode)
        self.requests.frozen = self.mode == "keep"
        while len(self.requests) and self.mode != "keep":
            await asyncio.sleep(0.005)
        return self.mode

    async def paused_as(self) -> PauseMode | None:
        return self.mode

    async def resume(self, version: int) -> None:
        self.check_started()
        assert version == self.version
        self.mode = self.sleeping = None
        self.requests.frozen = False
        self.gate_open = True

    async def sleep(self, keep_weights: bool) -> None:
        assert not self.gate_open and not len(self.requests), "a worker that serves cannot sleep"
        if self.started:
            self.sleeping = "all"
            self.version = self.version if keep_weights else None

    async def state(self) -> tuple[bool, str | None, int | None]:
        """Whether it has an engine, what of that sleeps, and the version held."""
        return self.started, self.sleeping, self.version

    async def load_weights(self, manifest: Any, *buckets: Any) -> WeightReport:
        self.started = True  # an engine that is missing is built by a load
        if self.sleeping and self.version != manifest.version:
            self.sleeping = "kv_cache"
        self.version, self.digest = manifest.version, "lie" if self.lie else manifest.digest
        return WeightReport(version=self.version, digest=self.digest, worker=self.name, load_s=0.01)

    async def swap(self, manifest: Any, *buckets: Any) -> WeightReport:
        await self.pause("keep")
        report = await self.load_weights(manifest, *buckets)
        await self.resume(manifest.version)
        return report

    async def stage_weights(self, manifest: Any, *buckets: Any) -> None:
        """Nothing has to be brought anywhere."""

    async def seat(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    async def receive_weights(self, manifest: Any, seats: Any) -> None:
        raise AssertionError("no trainer sends to it")

    async def canary(self, prompt_ids: np.ndarray) -> np.ndarray:
        return np.zeros(len(prompt_ids) - 1, np.float32)

    async def status(self) -> WorkerStatus:
        return WorkerStatus(
            has_engine=self.started,
            serving=self.gate_open,
            mode=None if self.gate_open else self.mode,
            held=None if self.version is None else Held(self.version, self.digest, 0),
            asleep=self.sleeping is not None,
        )

    async def starts(self) -> int:
        return self.num_starts

    async def stats(self) -> WorkerStats:
        return WorkerStats(
            worker=self.name,
            version=-1 if self.version is None else self.version,
            running=self.requests.running,
            generated_tokens=self.tokens,
            answered=self.answered,
            request_s=self.requests.request_s,
        )

    async def drain_spans(self) -> list[Span]:
        return self.requests.drain_spans()

    async def ping(self) -> None:
        """It answers."""

    async def slow_down(self, token_s: float) -> None:
        self.token_s = token_s

    async def begun(self) -> int:
        """Requests under way that have a token."""
        return self.num_begun

    async def hang(self) -> None:
        time.sleep(1000)

    async def die(self) -> None:
        os._exit(1)

    async def shutdown(self) -> None:
        self.gate_open = False
