"""Engine and rank by rule, under the real RolloutWorker and TrainerWorker: tokens are a function of what stands before
them and of the weights, weights of the batches. So two runs that train the same end with the same bits.

Both write onto a board, a file, what they begin with: the harness kills by it. Another file says how long a step takes.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from actors.rollout.weights import Says
from actors.rollout.worker import RolloutWorker
from actors.training.answers import Publication
from actors.training.worker import TrainerWorker
from raypost.config import Config
from raypost.errors import BatchMemoryError, CheckpointError, NotStagedError, RaypostError
from raypost.types import EVALUATION_PRIORITY, FloatArray, GenerateRequest, GenerateResult, GroupKey, IntArray
from raypost.types.packed import PackedGroups
from raypost.weights.manifest import Bytes, Given, Manifest, verify, views

BOARD, PACE, MEMORY = "board", "pace", "memory"
"""Files in the folder above the runs: what began, the seconds of a train step, and, where ranks have little memory, the
tokens of the largest micro-batch that fits."""
TOKEN_S = 0.003
VOCABULARY = 32
STATE, STEP = "scripted.npy", "scripted.json"
Weights = dict[str, FloatArray]


class Board:
    """Where roles write what they begin with."""

    def __init__(self, below: str, who: str) -> None:
        """`below`: any path below the folder of the board."""
        self.who = who
        parents = Path(below).resolve().parents
        self.folder = next((one for one in parents if (one / BOARD).exists()), None)

    def begin(self, phase: str) -> None:
        if self.folder is not None:
            with (self.folder / BOARD).open("a") as file:
                file.write(f"{phase} {self.who} {time.time():.3f}\n")

    @property
    def memory(self) -> float:
        file = None if self.folder is None else self.folder / MEMORY
        return float("inf") if file is None or not file.exists() else float(file.read_text())

    @property
    def pace_s(self) -> float:
        return 0.0 if self.folder is None else float((self.folder / PACE).read_text())


def random_of(*parts: object) -> np.random.Generator:
    """Return random numbers that are a function of these."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return np.random.default_rng(np.frombuffer(digest, np.uint32))


def logprobs_of(digest: str, token_ids: IntArray) -> FloatArray:
    """Return what the canary is answered with."""
    return -random_of(digest, token_ids.tolist()).random(len(token_ids) - 1).astype(np.float32)


# ---------------------------------------------------------------- engine


class ScriptedEngine:
    """Stands for RolloutEngine."""

    vocab_size = 1 << 16
    cache_tokens = 0
    is_dead = False

    def __init__(self, model_path: str, name: str) -> None:
        self._board = Board(model_path, name)
        self._board.begin("start")
        self._held: tuple[int, str] = (-1, "")
        self._staged: tuple[Manifest, Sequence[Bytes]] | None = None
        self._running = asyncio.Event()
        self._aborts = 0
        self.asleep = False

    async def process_ids(self) -> list[int]:
        return []

    async def warm_up(self) -> None: ...

    def shutdown(self) -> None: ...

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        if request.priority == EVALUATION_PRIORITY:
            self._board.begin("evaluate")
        sample = request.request_id.split("/")[2]
        params, ids = request.sample_params, [int(one) for one in request.token_ids]
        made, logprobs, versions, aborts = list[int](), list[float](), list[int](), self._aborts
        reason = "length"
        while len(made) < params.max_tokens:
            await asyncio.sleep(TOKEN_S)
            await self._running.wait()
            if aborts != self._aborts:
                reason = "abort"
                break
            drawn = random_of(self._held[1], sample, ids)
            token = int(drawn.integers(1, VOCABULARY))
            if drawn.random() < 0.15 and len(made) >= params.min_tokens and params.stop_token_ids:
                token = params.stop_token_ids[0]
            ids.append(token)
            made.append(token)
            logprobs.append(-float(drawn.random()))
            versions.append(self._held[0])
            if token in params.stop_token_ids:
                reason = "stop"
                break
        return GenerateResult(
            response_ids=np.asarray(made, np.int32),
            logprobs=np.asarray(logprobs, np.float32),
            policy_versions=np.asarray(versions, np.int32),
            finish_reason=reason,
            worker="",
        )

    async def prompt_logprobs(self, prompt_ids: IntArray, resume: bool = False) -> FloatArray:
        if resume:
            await self.resume()
        return logprobs_of(self._held[1], prompt_ids)

    async def pause(self, mode: str, clear_cache: bool = True) -> None:
        self._board.begin("pause")
        if mode == "abort":
            self._aborts += 1
            self._running.set()
            await asyncio.sleep(2 * TOKEN_S)
        self._running.clear()

    async def resume(self) -> None:
        self._board.begin("resume")
        self._running.set()

    async def stage(self, manifest: Manifest, buckets: Sequence[Bytes]) -> None:
        if len(buckets) < len(manifest.bucket_sizes):
            raise NotStagedError("this engine keeps nothing of the version before: it asks for all")
        verify(manifest, buckets)
        self._staged = manifest, buckets

    async def load(self, manifest: Manifest) -> tuple[None, Says]:
        self._board.begin("load")
        assert self._staged is not None and self._staged[0] == manifest
        await asyncio.sleep(0.01)
        assert sum(len(one) for _, one in views(*self._staged)) == 4096
        self._held = manifest.version, manifest.digest
        return None, await self.held()

    async def held(self) -> Says:
        return (*self._held, False)


class ScriptedRolloutWorker(RolloutWorker):
    """The real worker, with a scripted engine."""

    def _make_engine(self) -> Any:
        return ScriptedEngine(self._model_path, self._name)


# ---------------------------------------------------------------- rank


@dataclass
class ScriptedSnapshot:
    """Stands for Snapshot; rank 0 alone has something to write."""

    rows: FloatArray | None
    step: int
    is_copy: bool = True

    def write(self, path: Path) -> None:
        if self.rows is not None:
            np.save(path / STATE, self.rows, allow_pickle=False)
            (path / STEP).write_text(json.dumps(self.step))


class ScriptedRank:
    """Stands for PolicyRank: the weights after a step are half of those before it, and noise that its batch seeds."""

    is_offloaded = False

    def __init__(self, config: Config, model_path: str, rank: int) -> None:
        self._board = Board(model_path, f"trainer-{rank}")
        self._board.begin("start")
        self._rank = rank
        self._micro_batch_tokens = config.train.micro_batch_tokens
        self.step = 0
        self._weights: Weights = {f"w{n}": np.full(256, n, np.float32) for n in range(4)}
        self._metrics: dict[str, float] = {}
        self.left_out: dict[GroupKey, str] = {}

    def train(self, packed: PackedGroups, step: int, inputs: object = None) -> dict[str, float]:
        self._board.begin("take")
        if step == self.step:
            return self._metrics
        if step != self.step + 1:
            raise RaypostError(f"rank {self._rank} is at step {self.step} and was given step {step}")
        if self._micro_batch_tokens > self._board.memory:
            raise BatchMemoryError(f"out of memory: a micro-batch of {self._micro_batch_tokens} tokens")
        time.sleep(self._board.pace_s / 2)
        self._board.begin("fit")
        time.sleep(self._board.pace_s / 2)
        for name, before in self._weights.items():
            noise = random_of(name, content_of(packed)).random(256).astype(np.float32)
            self._weights[name] = before * np.float32(0.5) + noise
        tokens = float(len(packed.response_ids))
        self.step = step
        self._metrics = {
            "loss": float(self._weights["w0"][0]),
            "num_samples": float(packed.num_samples),
            "response_tokens": tokens,
            "response_tokens_mean": tokens / packed.num_samples,
            "reward_mean": 0.0,
            "left_out": 0.0,
        }
        return self._metrics

    def digest(self) -> str:
        return hashlib.sha256(b"".join(one.tobytes() for one in self._weights.values())).hexdigest()

    def gather(self) -> Given:
        """Yield name, bytes, type and shape of each tensor, on rank 0 alone."""
        self._board.begin("publish")
        for name, one in self._weights.items() if self._rank == 0 else ():
            yield name, one.view(np.uint8), "float32", one.shape

    gather_weights = gather

    def canary_logprobs(self, token_ids: IntArray) -> FloatArray:
        return logprobs_of(self.published, token_ids)

    published = ""
    """Digest of the manifest that was made last, which is what an engine knows its weights by."""

    def export_snapshot(self, exports: object) -> ScriptedSnapshot:
        self._board.begin("save")
        rows = np.stack([*self._weights.values()])
        return ScriptedSnapshot(rows, self.step) if self._rank == 0 else ScriptedSnapshot(None, self.step)

    def snapshot(self) -> ScriptedSnapshot:
        return self.export_snapshot({})

    def load(self, path: Path) -> int:
        try:
            rows = np.load(path / STATE, allow_pickle=False)
            self._weights = dict(zip(self._weights, rows, strict=True))
            self.step = json.loads((path / STEP).read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path / STATE} cannot be read: {error!r}") from error
        return self.step

    def close(self) -> None: ...


class ScriptedTrainerWorker(TrainerWorker):
    """The real worker, with a scripted rank."""

    def _build(self, master_addr: str, master_port: int) -> Any:
        return ScriptedRank(self._config, self._model_path, self._rank)

    @property
    def _policy(self) -> Any:
        return self._ready

    def _put(
        self,
        weights: Iterable[tuple[str, Any]],
        make: Callable[[Given], tuple[Manifest, list[Any]]] | None,
    ) -> Publication | None:
        given = cast(Given, list(weights))
        if self._rank != 0 or make is None:
            return None
        made = Publication(*make(given))
        self._policy.published = made.manifest.digest
        return made

    def canary_logprobs(self, token_ids: IntArray) -> FloatArray:
        return self._policy.canary_logprobs(token_ids) if self._rank == 0 else np.empty(0, np.float32)


def content_of(packed: PackedGroups) -> str:
    """Return a digest of what is trained: not of who generated it, or how often it was interrupted."""
    digest = hashlib.sha256(repr(packed.tasks).encode())
    versions = np.repeat(packed.run_versions, packed.run_lengths)
    for array in (packed.group_ids, packed.response_offsets, packed.response_ids, packed.logprobs, versions):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def weights_of(checkpoint: Path) -> bytes:
    """Return the bytes of the weights that a checkpoint holds."""
    return (checkpoint / STATE).read_bytes()
