"""Groups a second from the dataset to the trainer, with an engine that answers at once: what the roles cost.

    python -m bench.production                                 # some minutes
    python -m bench.production --rounds 1 --groups 20000       # memory over a long run

Every role of production is the one of the main job, in a process of its own: sampler, producer and ledger, agent
loops, judge, rollout pool, replay buffer with its journal. Only what computes is scripted: the engine behind the
real rollout worker gives `max_tokens` ids with logprobs at once, and the trainer looks at a batch and is done.
The driver takes, acknowledges and syncs every few steps, as jobs/train.py does.

The limit it is compared with is what Ray alone allows in the same run: the same token arrays, packed, over as many
hops, through actors that do nothing else, one group a call and as many as production puts into one. Both take turns,
round after round. The last line is one JSON object: medians and ranges of groups a second and of their ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
from ray.actor import ActorHandle
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from actors.agent_loop import MANY, AgentLoopPool, AgentLoopWorker
from actors.judge import JudgeWorker
from actors.placement import spawn
from actors.producer import ProducerActor
from actors.remote import Remote, RemotePool
from actors.replay_buffer import ReplayBufferActor, remote_buffer
from actors.rollout.controller import RolloutController
from actors.rollout.routing import router_to
from actors.rollout.weights import Says
from actors.rollout.worker import RolloutWorker
from bench.figures import Foreign, spread
from bench.production_limit import DEADLINE_S, limit
from raypost.config import Config, parse_config
from raypost.config.engine import EngineConfig
from raypost.production.build import buffer_bounds, task_limits
from raypost.types import GenerateRequest, GenerateResult
from raypost.types.packed import PackedGroups
from raypost.weights.manifest import Bytes, Manifest, pack

TASK, VOCABULARY = "sums", ["<eos>", " ", "+", "=", "?", *map(str, range(10))]
PROMPTS = 50_000


# ---------------------------------------------------------------- what is scripted


def prompts() -> list[dict[str, Any]]:
    """Return the dataset: `source.dataset` of the configuration below."""
    return [{"prompt": f"{n}+1=?", "answer": str((n + 1) % 10)} for n in range(PROMPTS)]


class InstantEngine:
    """Stands for vLLM: `max_tokens` ids with logprobs for every request, at once."""

    vocab_size = len(VOCABULARY)
    is_dead = asleep = False

    def __init__(self, max_tokens: int) -> None:
        rng = np.random.default_rng(0)
        self._ids = rng.integers(1, self.vocab_size, 2 * max_tokens).astype(np.int32)
        self._logprobs = -rng.random(2 * max_tokens, np.float32)
        self._asked = 0
        self._held: tuple[int, str, bool] = (-1, "", False)

    async def process_ids(self) -> list[int]:
        return []

    async def warm_up(self) -> None:
        pass

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        wanted = request.sample_params.max_tokens
        self._asked = self._asked + 1
        at = self._asked % wanted
        return GenerateResult(
            response_ids=self._ids[at : at + wanted],
            logprobs=self._logprobs[at : at + wanted],
            policy_versions=np.full(wanted, self._held[0], np.int32),
            finish_reason="length",
            worker="",
        )

    async def held(self) -> Says:
        return self._held

    async def stage(self, manifest: Manifest, buckets: Sequence[Bytes]) -> None:
        pass

    async def load(self, manifest: Manifest) -> tuple[None, Says]:
        self._held = (manifest.version, manifest.digest, False)
        return None, self._held

    async def pause(self, mode: str, clear_cache: bool = True) -> None:
        pass

    async def resume(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


class ScriptedWorker(RolloutWorker):
    """The rollout worker with that engine; gate, account of requests and pauses are the real ones."""

    def _make_engine(self) -> Any:
        return InstantEngine(self._config.max_model_len)


class ScriptedTrainer:
    """Reads a batch, as a trainer would, and is done with it."""

    def fit(self, batch: PackedGroups) -> int:
        """Tokens of the batch."""
        assert all(len(column) for column in batch.columns)
        return len(batch.columns[1])


# ---------------------------------------------------------------- one run


@dataclass
class Actors:
    """The actors of one run, under the names that the main job gives them."""

    handles: dict[str, ActorHandle]
    config: Config

    def __getitem__(self, name: str) -> ActorHandle:
        return self.handles[name]

    def end(self) -> None:
        for handle in self.handles.values():
            ray.kill(handle)


def configuration(args: argparse.Namespace, folder: Path) -> Config:
    """Return the run's configuration; nothing in it is particular to a benchmark but the sizes."""
    return parse_config(
        {
            "name": "production",
            "runs_dir": str(folder),
            "model": {"name": "scripted"},
            "tasks": [
                {
                    "name": TASK,
                    "source": {"kind": "python", "dataset": "bench.production:prompts"},
                    "judge": {"kind": "exact", "answer_pattern": r"(\d)\D*$"},
                    "strategy": {"max_pending": args.pending},
                    "group_size": args.group_size,
                    "max_tokens": args.tokens,
                }
            ],
            # Slots for all that may be in flight: an engine that answers at once has no other limit.
            "rollout": {
                "num_workers": args.workers,
                "agent_workers": args.agents,
                "max_num_seqs": args.pending * args.group_size,
            },
            "train": {
                "num_steps": 10**6,
                "batch_size": args.batch,
                "micro_batch_tokens": 2 * args.tokens + 64,
            },
            "sync": {"sync_weights_interval": args.sync_every},
        }
    )


def save_tokenizer(folder: Path) -> None:
    """Save a tokenizer of one character a token."""
    backend = Backend(models.WordLevel({token: n for n, token in enumerate(VOCABULARY)}, unk_token=" "))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": VOCABULARY[0]}))


def start(config: Config, model_path: str) -> Actors:
    """All roles, joined as jobs/wiring.py joins them."""
    workers = {
        name: spawn(ScriptedWorker, name, model_path, EngineConfig.of(config), n, name=name)
        for n, name in enumerate(f"rollout-{n}" for n in range(config.rollout.num_workers))
    }
    handles = dict(workers)

    def add(cls: type, *args: Any, name: str) -> None:
        handles[name] = spawn(cls, *args, name=name)

    names = {name: name for name in workers}
    add(RolloutController, names, config.rollout, config.sync.timeout_s, name="rollout-controller")
    pool = Remote("rollout-controller", 600, many=MANY)
    router = router_to("rollout-controller", 600)
    judges = RemotePool(["judge-0"], 600, many=MANY)
    add(JudgeWorker, "judge-0", config.tasks, name="judge-0")
    loops = [f"agent-loop-{n}" for n in range(config.rollout.agent_workers)]
    for name in loops:
        add(AgentLoopWorker, name, config, model_path, router, judges, name=name)
    add(
        ReplayBufferActor,
        task_limits(config),
        buffer_bounds(config),
        str(config.run_dir / "buffer"),
        uuid.uuid4().hex,
        name="replay-buffer",
    )
    agents, store = (
        AgentLoopPool(RemotePool(loops, 1200, many=MANY)),
        remote_buffer("replay-buffer", timeout_s=60, tries=8),
    )
    add(ProducerActor, config, model_path, agents, store, pool, "bench", name="producer")
    add(ScriptedTrainer, name="trainer")
    return Actors(handles, config)


async def sync(actors: Actors, version: int) -> None:
    """Bring a new, tiny version into the pool; production is paused."""
    data = np.full(8, version % 251, np.uint8)
    manifest, buckets = pack(version, [("w", data, "float32", (2,))], 1 << 20)
    await actors["rollout-controller"].load_weights.remote(manifest, [ray.put(one) for one in buckets])
    await actors["producer"].resume.remote(version)


async def train(
    actors: Actors, first: int, num_steps: int, production: asyncio.Future[None]
) -> tuple[float, int]:
    """Run the main loop for `num_steps` steps; returns the seconds spent in syncs, and their number."""
    producer, syncing_s, syncs = actors["producer"], 0.0, 0
    for step in range(first, first + num_steps):
        while True:
            taking = asyncio.ensure_future(_of(producer.take_batch.remote(step)))
            await asyncio.wait({taking, production}, return_when="FIRST_COMPLETED")
            if production.done():
                production.result()
            status, batch_ref = await taking
            if status.num_groups:
                await actors["trainer"].fit.remote(batch_ref)
                await producer.acknowledge.remote(step)
            if status.num_groups == 0 or actors.config.sync_due(step):
                begin = time.perf_counter()
                await producer.pause.remote(actors.config.sync.pause_mode)
                await sync(actors, step if status.num_groups else step - 1)
                syncing_s, syncs = syncing_s + time.perf_counter() - begin, syncs + 1
            if status.num_groups:
                break
    return syncing_s, syncs


async def _of(ref: ray.ObjectRef) -> Any:
    return await ref


class Usage:
    """CPU seconds and memory of the processes behind the roles, and of Ray's own."""

    def __init__(self, actors: Actors) -> None:
        pids = {
            name: ray.get(handle.__ray_call__.remote(lambda _: os.getpid()))
            for name, handle in actors.handles.items()
        }
        self._processes = {
            "driver": psutil.Process(),
            **{name: psutil.Process(pid) for name, pid in pids.items()},
        }
        for child in psutil.Process().children(recursive=True):
            if child.name() in ("raylet", "gcs_server"):
                self._processes[child.name()] = child

    def cpu_s(self) -> dict[str, float]:
        return {name: sum(one.cpu_times()[:2]) for name, one in self._processes.items()}

    def own_mb(self) -> dict[str, float]:
        """Resident memory without what is shared: the object store, and code."""
        infos = {name: one.memory_info() for name, one in self._processes.items()}
        return {name: (info.rss - info.shared) / 2**20 for name, info in infos.items()}


async def rounds(actors: Actors, args: argparse.Namespace) -> dict[str, Any]:
    """Let production and bare actors take turns; returns what they came to."""
    await actors["rollout-controller"].start.remote()
    await sync(actors, 0)
    production = asyncio.ensure_future(_of(actors["producer"].run.remote()))
    usage, step = Usage(actors), 0
    rates: list[float] = []
    bare: dict[int, list[float]] = {size: [] for size in (() if args.no_limit else (1, MANY["run"]))}
    foreign: list[float] = []
    for _ in range(args.rounds):
        others = Foreign()
        rate, step = await measure(actors, args, usage, step, production)
        rates.append(rate)
        # What production has started ahead must not run beside the others.
        await actors["producer"].pause.remote("abort")
        for size, found in bare.items():
            found.append(await asyncio.to_thread(limit, args, args.groups // 2, size))
        await actors["producer"].resume.remote(step)
        foreign.append(others.cores())
    for size, found in bare.items():
        shares = spread(rate / one for rate, one in zip(rates, found, strict=True))
        print(
            f"bare actors, {size} groups a call: {spread(found)} groups/s; production reaches {shares} of it"
        )
    return {
        "groups_per_s": spread(rates),
        "bare_groups_per_s": {size: spread(found) for size, found in bare.items()},
        "ratio": {
            size: spread(rate / one for rate, one in zip(rates, found, strict=True))
            for size, found in bare.items()
        },
        "rounds": len(rates),
        "foreign_cores": spread(foreign),
    }


async def measure(
    actors: Actors, args: argparse.Namespace, usage: Usage, step: int, production: asyncio.Future[None]
) -> tuple[float, int]:
    """Run the loop from the step after `step` on and print what it did; groups a second, and the last step."""
    # Whole sync periods, so that each round ends with a sync; the first of them fills the pipeline.
    period = actors.config.sync.sync_weights_interval
    warm_up = -(-args.warm_up // args.batch // period) * period
    await train(actors, step + 1, warm_up, production)
    step += warm_up
    num_steps = -(-args.groups // args.batch // period) * period
    cpu, held, begin = usage.cpu_s(), usage.own_mb(), time.perf_counter()
    syncing_s, syncs = await train(actors, step + 1, num_steps, production)
    seconds, after, grown = time.perf_counter() - begin, usage.cpu_s(), usage.own_mb()
    counts = await actors["producer"].counts.remote()
    assert counts.lost == 0, counts
    groups: int = num_steps * args.batch
    samples = groups * args.group_size
    print(
        f"{groups} groups of {args.group_size} x {args.tokens} tokens in {seconds:.1f} s: "
        f"{groups / seconds:.1f} groups/s, {samples / seconds:.0f} samples/s"
    )
    print(f"{100 * syncing_s / seconds:.0f} % of the time in {syncs} syncs")
    print(f"{'':20}{'CPU':>8}{'a group':>11}{'own memory':>12}{'at the end':>12}")
    used = {name: after[name] - cpu[name] for name in cpu}
    for name, seconds_of in [*used.items(), ("all", sum(used.values()))]:
        line = f"{name:20}{100 * seconds_of / seconds:6.0f} %{1000 * seconds_of / groups:8.2f} ms"
        print(line + (f"{held[name]:9.0f} MB{grown[name]:9.0f} MB" if name in held else ""), flush=True)
    return groups / seconds, step + num_steps


def main() -> None:
    """Measure one setting and print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--groups", type=int, default=2560, help="groups of a round")
    parser.add_argument("--warm-up", type=int, default=512, help="groups before each round")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--batch", type=int, default=64, help="groups a step")
    parser.add_argument("--sync-every", type=int, default=4, help="steps between syncs")
    parser.add_argument("--pending", type=int, default=64, help="groups in flight at most")
    parser.add_argument("--workers", type=int, default=1, help="rollout workers")
    parser.add_argument("--agents", type=int, default=1, help="agent-loop actors")
    parser.add_argument("--no-limit", action="store_true", help="leave the bare actors out")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="rp-", dir="/tmp"))
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=512 << 20,
        _temp_dir=str(folder),
        log_to_driver=False,
    )
    try:
        (folder / "model").mkdir()
        save_tokenizer(folder / "model")
        actors = start(configuration(args, folder), str(folder / "model"))
        print(json.dumps(asyncio.run(asyncio.wait_for(rounds(actors, args), DEADLINE_S))))
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
