"""Tokens a second of a request's whole path, against bare AsyncLLM, on one engine, in one run.

    python -m bench.rollout                       # some six minutes
    python -m bench.rollout --at-once 128 --lengths long

The path is the one of the main job, started by its launcher, every role in a process of its own: agent loops, rollout
controller, rollout worker with a real engine, judge; this process gives them groups, as the producer does. Bare is
the AsyncLLM of that same worker, asked in its own process by a loop that does nothing else: the same engine, threads
and sampling, and the same requests in the same order, as many groups of them at once. So what differs is what
stands between a group and the engine. The model has half a million parameters and random weights: the faster an engine,
the more the path counts.

More groups are given at once than the engine has places, so that it never waits for one. Lengths are fixed for each
request, all equal or lognormal (mean 136, at most 384). Each round runs both ways, the first one in turn.

The last line is one JSON object: for each case `ratio`, path over bare, the median of the rounds with its range; CPU
seconds of each role a second; and the foreign load, cores that others used meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import psutil

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")

import ray
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import actors
from actors.agent_loop import AgentLoopPool
from actors.rollout.worker import RolloutWorker
from bench.figures import cpu_seconds, machine_seconds, spread
from bench.production import save_tokenizer
from jobs import launch
from jobs.models import Models
from raypost.config import Config, parse_config
from raypost.types import Group, RolloutState, SampleParams, Status
from raypost.weights.manifest import pack

T = TypeVar("T")
Lengths = list[int]

TASK, GROUP_SIZE, PROMPT_TOKENS = "sums", 8, 12
MEAN_TOKENS, MOST_TOKENS = 136, 384
SIGMA = 0.8
"""Of the lognormal lengths."""
DEADLINE_S = 900.0
WORKER, CONTROLLER, LOOP, JUDGE = "rollout-0", "rollout-controller", "agent-loop-0", "judge-0"


class MeasuredWorker(RolloutWorker):
    """The rollout worker, whose AsyncLLM can also be asked directly."""

    async def bare(self, groups: list[Lengths], in_flight: int) -> float:
        """Generate groups with vLLM alone, `in_flight` of them at once; return the seconds it took."""
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        assert self._life.engine is not None, "started before it is measured"
        llm = self._life.engine.llm

        async def one(name: str, prompt: list[int], length: int) -> None:
            params = SamplingParams(
                max_tokens=length,
                temperature=1.0,
                ignore_eos=True,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            async for output in llm.generate(tokens_input(prompt), params, name):
                assert len(output.outputs[0].token_ids) == length

        async def group(number: int, lengths: Lengths) -> None:
            prompt = prompt_of(number).tolist()
            await asyncio.gather(*(one(f"{number}/{n}", prompt, length) for n, length in enumerate(lengths)))

        begin = time.perf_counter()
        await all_of(groups, in_flight, group)
        return time.perf_counter() - begin


async def all_of(
    groups: list[Lengths], in_flight: int, run: Callable[[int, Lengths], Awaitable[None]]
) -> None:
    """Run every group, `in_flight` of them at once."""
    left = iter(enumerate(groups))

    async def one_after_the_other() -> None:
        for number, lengths in left:
            await run(number, lengths)

    await asyncio.gather(*(one_after_the_other() for _ in range(in_flight)))


def prompt_of(number: int) -> np.ndarray:
    """Return the prompt of a group; no two of a round are the same."""
    return np.random.default_rng(number).integers(1, 15, PROMPT_TOKENS).astype(np.int32)


def draw(kind: str, num_groups: int) -> list[Lengths]:
    """Return the lengths of a round's groups, the same ones in every round; both kinds have one mean."""
    if kind == "equal":
        return [[MEAN_TOKENS] * GROUP_SIZE] * num_groups
    rng = np.random.default_rng(1)
    drawn = rng.lognormal(np.log(MEAN_TOKENS) - SIGMA**2 / 2, SIGMA, (num_groups, GROUP_SIZE))
    # Cutting the tail lowers the mean: what is cut is given back by a factor.
    for _ in range(20):
        cut = np.clip(drawn, 1, MOST_TOKENS)
        drawn *= MEAN_TOKENS / cut.mean()
    lengths: list[Lengths] = np.clip(drawn, 1, MOST_TOKENS).astype(int).tolist()
    return lengths


# ---------------------------------------------------------------- the path


def configuration(folder: Path, model: Path, args: argparse.Namespace, at_once: int) -> Config:
    """Return the run's configuration; nothing in it is particular to a benchmark but the sizes."""
    return parse_config(
        {
            "name": "rollout",
            "runs_dir": str(folder),
            "model": {"name": str(model)},
            "tasks": [
                {
                    "name": TASK,
                    "source": {"kind": "python", "dataset": "bench.production:prompts"},
                    "judge": {"kind": "exact", "answer_pattern": r"(\d)\D*$"},
                    "group_size": GROUP_SIZE,
                    "max_prompt_tokens": PROMPT_TOKENS,
                    "max_tokens": MOST_TOKENS,
                }
            ],
            "rollout": {
                "max_num_seqs": at_once,
                "agent_workers": args.agents,
                "enforce_eager": not args.compiled,
            },
            "train": {"num_steps": 1, "batch_size": 8, "micro_batch_tokens": 1024},
        }
    )


def make_model(folder: Path) -> LlamaForCausalLM:
    """Save the configuration and the tokenizer of a Llama; return it with random weights."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    save_tokenizer(folder)
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


async def load(pool: Any, model: LlamaForCausalLM) -> None:
    """Bring version 0 into the workers, which then serve."""
    tensors = (
        (name, weight.detach().numpy().reshape(-1).view(np.uint8), "float32", tuple(weight.shape))
        for name, weight in model.named_parameters()
    )
    manifest, buckets = pack(0, tensors, 256 << 20)
    await pool.load_weights(manifest, [ray.put(one) for one in buckets])
    await pool.resume(0)


@contextlib.asynccontextmanager
async def started(config: Config, model: LlamaForCausalLM) -> AsyncIterator[AgentLoopPool]:
    """Start the roles of the path, serving; end them on leaving."""
    models = Models(config.model.name, None, {}, np.arange(4, dtype=np.int32))
    with mock.patch.object(launch, "RolloutWorker", MeasuredWorker):
        async with launch.Launcher(config, models) as launcher:
            pool = launcher.rollout_pool()
            agents = launcher.agents(launcher.judges())
            await launcher.start_engines()
            await load(pool, model)
            yield agents


async def path(agents: AgentLoopPool, groups: list[Lengths], in_flight: int) -> float:
    """Generate and judge groups by all roles, `in_flight` of them at once; return the seconds it took."""

    async def group(number: int, lengths: Lengths) -> None:
        states = [
            RolloutState(
                task=TASK,
                group_id=number,
                sample_index=n,
                prompt_ids=prompt_of(number),
                sample_params=SampleParams(max_tokens=length),
                metadata={"question": "1+1=?", "answer": "2"},
            )
            for n, length in enumerate(lengths)
        ]
        done = await agents.run(Group(task=TASK, group_id=number, states=states))
        assert done.status is Status.COMPLETED, done.states[0].error
        assert [state.num_tokens for state in done.states] == lengths

    begin = time.perf_counter()
    await all_of(groups, in_flight, group)
    return time.perf_counter() - begin


# ---------------------------------------------------------------- what is measured


@dataclass
class Usage:
    """CPU seconds of the processes behind the roles, of all that this one started, and of the machine."""

    names: Sequence[str]
    _roles: dict[str, psutil.Process] = field(init=False)

    def __post_init__(self) -> None:
        """Look the processes up."""
        pids = {
            name: ray.get(ray.get_actor(name).__ray_call__.remote(lambda _: os.getpid()))
            for name in self.names
        }
        self._roles = {name: psutil.Process(pid) for name, pid in pids.items()}
        # The engine's core, beside a process of Python's own.
        self._roles["engine"] = max(self._roles[WORKER].children(), key=lambda one: sum(one.cpu_times()[:2]))
        self._roles["driver"] = psutil.Process()
        for child in psutil.Process().children(recursive=True):
            if child.name() in ("raylet", "gcs_server"):
                self._roles[child.name()] = child

    def cpu_s(self) -> dict[str, float]:
        """Return them by role; `others` are processes of this run without one, `foreign` is what is not ours."""
        used = {name: sum(one.cpu_times()[:2]) for name, one in self._roles.items()}
        ours = cpu_seconds()
        return used | {"others": ours - sum(used.values()), "foreign": machine_seconds() - ours}


@dataclass
class Way:
    """One way through a case: its rates, and what it used, round by round."""

    rates: list[float] = field(default_factory=list)
    cores: list[dict[str, float]] = field(default_factory=list)

    def median_cores(self) -> dict[str, float]:
        """Return the median of each role."""
        return {name: round(statistics.median(one[name] for one in self.cores), 3) for name in self.cores[0]}


async def measured(usage: Usage, way: Way, tokens: int, running: Awaitable[float]) -> None:
    """Run one round and record it."""
    before, begin = usage.cpu_s(), time.perf_counter()
    seconds = await running
    after, whole_s = usage.cpu_s(), time.perf_counter() - begin
    way.rates.append(tokens / seconds)
    way.cores.append({name: (after[name] - before[name]) / whole_s for name in before})


async def cases(args: argparse.Namespace, folder: Path, at_once: int) -> list[dict[str, Any]]:
    """Measure both lengths with one engine that decodes `at_once` requests."""
    model_folder = folder / f"model-{at_once}"
    model_folder.mkdir()
    model = make_model(model_folder)
    in_flight = max(1, round(args.ahead * at_once / GROUP_SIZE))
    num_groups = args.groups or at_once * 5 // 16
    rounds: dict[str, tuple[Way, Way]] = {kind: (Way(), Way()) for kind in args.lengths}
    async with started(configuration(folder, model_folder, args, at_once), model) as agents:
        worker = ray.get_actor(WORKER)
        usage = Usage([WORKER, CONTROLLER, LOOP, JUDGE])
        for number in range(-1, args.rounds):
            for kind, (bare, whole) in rounds.items():
                # The round before the first only warms up.
                warm = number < 0
                groups = draw(kind, num_groups)
                tokens = sum(map(sum, groups))
                ways = [
                    (Way() if warm else bare, lambda groups=groups: worker.bare.remote(groups, in_flight)),
                    (Way() if warm else whole, lambda groups=groups: path(agents, groups, in_flight)),
                ]
                for way, run in ways if number % 2 else reversed(ways):
                    await measured(usage, way, tokens, run())
    return [summary(kind, at_once, *ways) for kind, ways in rounds.items()]


def summary(kind: str, at_once: int, bare: Way, whole: Way) -> dict[str, Any]:
    """Return what is said about one case."""
    ratios = [one / other for one, other in zip(whole.rates, bare.rates, strict=True)]
    foreign = [cores["foreign"] for way in (bare, whole) for cores in way.cores]
    roles = whole.median_cores()
    return {
        "lengths": kind,
        "at_once": at_once,
        "ratio": spread(ratios),
        "path_tokens_per_s": spread(whole.rates),
        "bare_tokens_per_s": spread(bare.rates),
        "path_cores": roles,
        "bare_cores": bare.median_cores(),
        "foreign_cores": spread(foreign),
    }


def show(case: dict[str, Any]) -> None:
    """Print one case for people."""
    path_way, bare_way = case["path_tokens_per_s"]["median"], case["bare_tokens_per_s"]["median"]
    print(
        f"{case['lengths']:6}{case['at_once']:4} at once: path {path_way:.0f} tokens/s, bare {bare_way:.0f}, ratio "
        "{median:.3f} ({low:.3f} to {high:.3f}); foreign cores ".format(**case["ratio"])
        + "{median:.2f} ({low:.2f} to {high:.2f})".format(**case["foreign_cores"])
    )
    for name, of_path in case["path_cores"].items():
        print(f"    {name:20}{of_path:7.3f} cores, bare {case['bare_cores'][name]:7.3f}", flush=True)


def main() -> None:
    """Measure all cases and print them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--at-once", type=int, nargs="+", default=[64, 128], help="requests an engine decodes"
    )
    parser.add_argument("--lengths", nargs="+", default=["equal", "long"], choices=["equal", "long"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--groups",
        type=int,
        default=0,
        help="groups of 8 a round; 0: 2.5 times as many requests as --at-once",
    )
    parser.add_argument("--ahead", type=float, default=2.0, help="requests given at once, of --at-once")
    parser.add_argument("--agents", type=int, default=1, help="agent-loop actors")
    parser.add_argument("--compiled", action="store_true", help="enforce_eager: false")
    args = parser.parse_args()
    print(f"code: {Path(actors.__file__).parent}")
    folder = Path(tempfile.mkdtemp(prefix="rp-", dir="/tmp"))
    torch.set_num_threads(1)
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=512 << 20,
        _temp_dir=str(folder),
        log_to_driver=False,
    )
    found = []
    try:
        for at_once in args.at_once:
            for case in asyncio.run(asyncio.wait_for(cases(args, folder, at_once), DEADLINE_S)):
                show(case)
                found.append(case)
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps({"bench": "rollout", "rounds": args.rounds, "ahead": args.ahead, "cases": found}))


if __name__ == "__main__":
    main()
