"""Telemetry: the actor that writes the run folder and watches the other actors without holding them up.

Owns the RunWriter, the background pull of spans and statistics, the gauges and the memory samples. What a figure
means is in raypost.report; what the terminal shows is the driver's.

Invariants: an actor that is slow or dead costs a poll at most `deadline_s` and is counted by name; a drained
span is written exactly once, because a late answer is waited for and not asked for again.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import time
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from actors.telemetry.gauges import RunGauges
from actors.telemetry.memory import MemoryWatch
from raypost.config import Config
from raypost.data.tokenizer import Tokenizer
from raypost.faults import Incident
from raypost.observe import metrics
from raypost.observe.spans import Span
from raypost.report.samples import SampleWriter
from raypost.report.writer import RunWriter
from raypost.types import GroupCounts, RunStatus, SyncReport, WorkerStats
from raypost.types.packed import PackedGroups

log = logging.getLogger(__name__)

POLL_S = 2.0
SAMPLE_S = 5.0
"""Between two questions for all of METHODS and looks at the memory, after which gauges are set again: half of the
interval at which Ray reads them. Each question costs its two processes some two milliseconds of computing."""
DEADLINE_S = 5.0
SAMPLES_S = 30.0
"""Longest time that a batch may take to come for its samples."""
METHODS = ("drain_spans", "drain_figures", "stats", "counts", "states")
"""What is asked of every source that has it."""
OFTEN = "drain_figures"
"""That of them which is asked every POLL_S, since its answers are figures of the step at hand."""


class Telemetry:
    """Records one run. `sources` are the names of actors, or handles by name; each is asked for what it has of METHODS.

    One that is started again needs names.
    """

    def __init__(
        self,
        config: Config,
        sources: Mapping[str, ActorHandle] | Sequence[str],
        started_s: float | None = None,
        model_path: str | None = None,
        known_problems: Sequence[str] = (),
        poll_s: float = POLL_S,
        deadline_s: float = DEADLINE_S,
        sample_s: float = SAMPLE_S,
    ) -> None:
        """Start watching, inside a running event loop. `started_s`: when the run began, if before now.

        `model_path`: a folder with the tokenizer, for samples. `known_problems`: what the report says from the start.
        """
        self._writer = RunWriter(config.run_dir, config, started_s)
        for problem in known_problems:
            self._writer.write_problem(problem)
        self._samples: SampleWriter | None = None
        if config.keep_samples and model_path is not None:
            decode = Tokenizer.load(model_path).decode
            self._samples = SampleWriter(config.run_dir, config.keep_samples, decode)
        self._methods = {
            (name, method): getattr(handle, method)
            for name, handle in _handles(sources).items()
            for method in METHODS
            if hasattr(handle, method)
        }
        self._asked: dict[tuple[str, str], asyncio.Task[Any]] = {}
        """The calls that are open, at most one of each method of a source."""
        self._poll_s = poll_s
        self._deadline_s = deadline_s
        self._sample_s = sample_s
        self._gauges = RunGauges(config.name, [task.name for task in config.tasks])
        for pool, rollout in config.rollout.by_pool().items():
            self._gauges.set("pool_target", rollout.num_workers, pool=pool or "rollout")
        self._tokens: dict[str, int] = {}
        self._slow: set[str] = set()
        """Workers that are slow beside their siblings."""
        self._tokens_generated = 0
        self._counts: GroupCounts | None = None
        self._judging = {task.name: metrics.JudgeFigures() for task in config.tasks}
        """What judges did since the last step, by task."""
        self._judged = {task.name: metrics.JudgeFigures() for task in config.tasks}
        """The same since the session began."""
        self._unreachable: collections.Counter[str] = collections.Counter()
        self._memory = MemoryWatch()
        self._sampled_s = 0.0
        self._report: dict[str, Any] | None = None
        self._polling = asyncio.get_running_loop().create_task(self._poll_for_ever(), name="telemetry poll")

    def __repr__(self) -> str:
        """Return the name that the dashboard shows."""
        return "telemetry"

    async def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Record train step `step`. A repeated step replaces the first."""
        self._check()
        judged = {task: figures.drain() for task, figures in self._judging.items() if figures.calls}
        of_judges = [figures.metrics(task) for task, figures in judged.items()]
        self._writer.write_step(step, dict(collections.ChainMap(dict(values), *of_judges)))
        self._gauges.step(step, values)

    async def log_samples(self, step: int, batch: Sequence[Awaitable[PackedGroups]]) -> None:
        """Keep samples of the batch of `step`, given as a list with its ref. What prevents it is a problem."""
        if self._samples is None:
            return
        try:
            async with asyncio.timeout(SAMPLES_S):
                packed = await batch[0]
            await asyncio.to_thread(self._samples.write, step, packed)
        # A supervision boundary: samples are for looking at, training does not need them.
        except Exception as error:
            log.warning("no samples of step %s were kept", step, exc_info=error)
            self._writer.write_problem(f"samples were not kept: {type(error).__name__}: {error}")

    async def log_eval(self, step: int, scores: Mapping[str, Any]) -> None:
        """Record an evaluation of the weights of `step`."""
        self._writer.write_eval(step, scores)
        self._gauges.set("held_out_score", metrics.finite_floats(scores).get(metrics.HELD_OUT))

    async def log_sync(self, report: SyncReport) -> None:
        """Record one weight sync."""
        self._writer.write_sync(report)
        self._gauges.set("sync_seconds", report.seconds)

    async def log_incident(self, incident: Incident, fields: Mapping[str, Any]) -> None:
        """Record what happened to the run and did not end it."""
        self._writer.write_incident(incident, fields)
        self._gauges.incident(incident, fields)

    async def finish(
        self, status: RunStatus, error: str | None, counts: GroupCounts | None
    ) -> dict[str, Any]:
        """Pull once more, write the report and return it; repeated, return the same report.

        `counts` None: the last that were seen.
        """
        if self._report is None:
            self._polling.cancel()
            await asyncio.gather(self._polling, return_exceptions=True)
            await self._poll()
            await self._sample()
            for task in self._asked.values():
                task.cancel()
            if counts is not None:
                self._gauges.groups(counts)
            self._report = await asyncio.to_thread(self._writer.finish, status, error, counts)
        return self._report

    def _check(self) -> None:
        """Raise the error that ended the watching, if one did."""
        if self._polling.done() and not self._polling.cancelled():
            self._polling.result()

    # ---------------------------------------------------------------- watching

    async def _poll_for_ever(self) -> None:
        while True:
            is_due = time.monotonic() - self._sampled_s >= self._sample_s
            await self._poll(METHODS if is_due else (OFTEN,))
            if is_due:
                self._sampled_s = time.monotonic()
                await self._sample()
            await asyncio.sleep(self._poll_s)

    async def _poll(self, methods: Sequence[str] = METHODS) -> None:
        """Ask every source once; answers that come after the deadline are read by a later poll."""
        for call in self._methods.keys() - self._asked.keys():
            if call[1] in methods:
                self._asked[call] = asyncio.create_task(self._ask(call), name=".".join(call))
        if self._asked:
            await asyncio.wait(self._asked.values(), timeout=self._deadline_s)
        for call, task in list(self._asked.items()):
            if not task.done():
                self._missed(call, f"no answer within {self._deadline_s:.0f} s")
                continue
            del self._asked[call]
            try:
                self._take(*call, task.result())
            except RayError as error:
                self._missed(call, type(error).__name__)

    async def _ask(self, call: tuple[str, str]) -> Any:
        return await self._methods[call].remote()

    async def _sample(self) -> None:
        """Look at the memory, set gauges again, and write down what a report needs if this process is killed now."""
        await asyncio.to_thread(self._memory.look)
        self._gauges.set("peak_memory_bytes", self._memory.peak_bytes)
        self._gauges.hold()
        if self._counts is not None:
            self._writer.write_counts(self._counts)
            self._counts = None
        judges = {task: figures.as_dict() for task, figures in self._judged.items() if figures.calls}
        self._writer.write_usage(
            self._memory.peak_bytes, self._tokens_generated or None, self._unreachable, judges=judges
        )

    def _take(self, name: str, method: str, answer: Any) -> None:
        if method == "drain_spans":
            spans: list[Span] = answer
            self._writer.write_spans(spans)
        elif method == "drain_figures":
            self._count_judging(answer)
        elif method == "stats":
            stats: list[WorkerStats] = answer
            self._count_tokens(stats)
        elif method == "states":
            self._gauges.workers(name, answer)
        elif isinstance(answer, GroupCounts) and answer.sampled:  # before a restore there are none
            self._counts = answer
            self._gauges.groups(answer)

    def _count_judging(self, answer: dict[str, metrics.JudgeFigures]) -> None:
        for task, figures in answer.items():
            self._judging[task].add(figures)
            self._judged[task].add(figures)
            self._gauges.judge(task, figures)

    def _count_tokens(self, stats: list[WorkerStats]) -> None:
        new = 0
        for worker in stats:
            before = self._tokens.get(worker.worker, 0)
            # A worker that was restarted counts from zero again.
            new += worker.generated_tokens - before * (worker.generated_tokens >= before)
            self._tokens[worker.worker] = worker.generated_tokens
        slow = {worker.worker: worker.share for worker in stats if worker.share < 1}
        for name in slow.keys() - self._slow:
            self._writer.write_incident(Incident.WORKER_SLOW, {"actor": name, "share": slow[name]})
        self._slow = set(slow)
        self._tokens_generated += new
        self._gauges.tokens(new, sum(worker.running for worker in stats))

    def _missed(self, call: tuple[str, str], why: str) -> None:
        name, method = call
        if not self._unreachable[name]:
            log.warning("%s.%s: %s; its next answer is waited for, the run goes on", name, method, why)
        self._unreachable[name] += 1


def _handles(sources: Mapping[str, ActorHandle] | Sequence[str]) -> Mapping[str, ActorHandle]:
    if isinstance(sources, Mapping):
        return sources
    found = {}
    for name in sources:
        try:
            found[name] = ray.get_actor(name)
        except ValueError:
            log.warning("%s is gone: telemetry does not watch it", name)
    return found
