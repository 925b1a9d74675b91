"""ReferenceWorker: one engine with the model that training starts from. ReferenceGroup: all of them as one.

    driver: ReferenceGroup.compute_ref_logprobs(batch_ref) --ref--> every worker: its part of the trajectories
                                                           <--ref-- the first worker: all parts as one column

Owns which worker computes which trajectories, and that what comes out is the column that TrainerGroup would give:
logprobs of the tokens that are trained, 0 elsewhere. The weights come from the model's folder and never change.

An engine gives logprobs at temperature 1 over the whole vocabulary. Tokens sampled otherwise are refused, because
vLLM applies neither temperature nor top_p, top_k and min_tokens to the tokens of a prompt.

Invariant: the driver never opens a batch or a column.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from collections.abc import Sequence

import numpy as np
import ray
from ray.actor import ActorHandle

from actors.engine.life import EngineInfo
from actors.frozen.worker import FrozenWorker
from actors.remote import ACTOR_ERRORS, within
from raypost.config import Config
from raypost.config.engine import EngineConfig
from raypost.errors import RaypostError
from raypost.observe.spans import TRAIN, Span, SpanLog
from raypost.trainer.batch.train_batch import Column, Limits, Sample, plan_batch
from raypost.types import FloatArray, Ref
from raypost.types.packed import PackedGroups

log = logging.getLogger(__name__)


class ReferenceWorker(FrozenWorker):
    """One engine with the reference."""

    def __init__(self, name: str, model_path: str, engine: EngineConfig, config: Config) -> None:
        """`model_path`: a folder with the model that training starts from."""
        super().__init__(name, model_path, engine, config.train.logits_mb)
        self._run = config
        self._spans = SpanLog(name)

    async def compute_ref_logprobs(self, packed: PackedGroups, part: int, parts: int) -> tuple[None, Column]:
        """Return a column with the logprobs of this part of the batch's trajectories. Raises RaypostError."""
        with self._spans.span(TRAIN):
            engine, train = await self._engine(), self._run.train
            limits = Limits(engine.vocab_size, self._run.max_model_len)
            batch = plan_batch(packed, train.advantage, train.num_minibatches, limits)
            samples = share(batch.samples, part, parts)
            for sample in samples:
                _check_sampling(sample)
            column = np.zeros(batch.num_tokens, np.float32)
            for sample, logprobs in zip(samples, await self._logprobs(samples), strict=True):
                # The first entry is that of the sequence's second token.
                column[sample.places] = logprobs[len(sample.state.prompt_ids) - 1 + sample.trained]
            return None, column

    async def _logprobs(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """Return the logprob of every token but the first of each sequence, all in the engine at once."""
        engine = await self._engine()
        states = [sample.state for sample in samples]
        sequences = [np.concatenate([state.prompt_ids, state.response_ids]) for state in states]
        calls = [asyncio.ensure_future(self._life.alive(engine.logprobs(ids))) for ids in sequences]
        try:
            return list(await asyncio.gather(*calls))
        finally:
            for call in calls:
                call.cancel()

    async def join(self, *columns: Column) -> tuple[None, Column]:
        """Return the columns of all parts as one."""
        return None, np.sum(columns, axis=0, dtype=np.float32)

    async def drain_spans(self) -> list[Span]:
        """Return the time spent computing since the last call."""
        return self._spans.drain()


def share(samples: Sequence[Sample], part: int, parts: int) -> list[Sample]:
    """Return the samples of a part, 0 to `parts` - 1.

    Every sample is in one part; parts have about equally many tokens.
    """
    loads = [(0, number) for number in range(parts)]
    mine = []
    for sample in sorted(samples, key=lambda one: one.num_inputs, reverse=True):
        load, number = heapq.heappop(loads)
        heapq.heappush(loads, (load + sample.num_inputs, number))
        if number == part:
            mine.append(sample)
    return mine


def _check_sampling(sample: Sample) -> None:
    params = sample.state.sample_params
    if (params.temperature, params.top_p, params.top_k, params.min_tokens) != (1.0, 1.0, 0, 0):
        raise RaypostError(
            f"group {sample.key} sample {sample.state.sample_index} was sampled with temperature {params.temperature}, "
            f"top_p {params.top_p}, top_k {params.top_k}, min_tokens {params.min_tokens}, but engines compute a "
            "reference's logprobs at 1, 1, 0 and 0 only: set train.loss.kl.pool to null, so that the ranks do"
        )


class ReferenceGroup:
    """All workers as one reference. Holds handles only, so it can be passed to other actors."""

    def __init__(self, workers: Sequence[ActorHandle], start_timeout_s: float, step_timeout_s: float) -> None:
        """`workers`: actors of ReferenceWorker.

        `step_timeout_s`: longest time a batch may take, a worker's restart included.
        """
        if not workers:
            raise ValueError("a reference needs at least one worker")
        self._workers = list(workers)
        self._start_timeout_s = start_timeout_s
        self._step_timeout_s = step_timeout_s

    def __repr__(self) -> str:
        """Return the role's name."""
        return "reference"

    async def start(self) -> list[EngineInfo]:
        """Start all engines; return where each runs."""
        starting = asyncio.gather(*(worker.start.remote() for worker in self._workers))
        return list(await within(starting, self._start_timeout_s, "the reference's engines to start"))

    async def compute_ref_logprobs(self, batch_ref: Ref[PackedGroups]) -> Ref[Column]:
        """Return a ref of the Column with the logprobs of the batch's trained tokens. Raises RaypostError."""
        return await within(
            self._column(batch_ref), self._step_timeout_s, "the reference's logprobs of a batch"
        )

    async def _column(self, batch_ref: Ref[PackedGroups]) -> Ref[Column]:
        parts = len(self._workers)
        calls = [
            asyncio.ensure_future(self._call(part, "compute_ref_logprobs", batch_ref, part, parts))
            for part in range(parts)
        ]
        try:
            columns = await asyncio.gather(*calls)
        finally:
            for call in calls:
                call.cancel()
        return columns[0] if parts == 1 else await self._call(0, "join", *columns)

    async def _call(self, first: int, method: str, *args: object) -> Ref[Column]:
        """Return a ref of a call's second return once it is there; the next worker is asked when one is away."""
        for attempt in itertools.count():
            worker = self._workers[(first + attempt) % len(self._workers)]
            done: Ref[None]
            result: Ref[Column]
            done, result = getattr(worker, method).options(num_returns=2).remote(*args)
            try:
                await done
                return result
            except ACTOR_ERRORS as error:
                log.warning("reference: %s is repeated on the next worker: %s", method, type(error).__name__)
                await asyncio.sleep(0.5 * (1 + attempt // len(self._workers)))
        raise AssertionError("unreachable: it tries until it is cancelled")

    async def shutdown(self) -> None:
        """End the engines and the actors, including those that do not answer."""
        ending = asyncio.gather(
            *(worker.shutdown.remote() for worker in self._workers), return_exceptions=True
        )
        try:
            await within(ending, min(10.0, self._step_timeout_s), "the reference's engines to end")
        except RaypostError as error:
            log.warning("%s; they are ended with their actors", error)
        finally:
            for worker in self._workers:
                ray.kill(worker)
