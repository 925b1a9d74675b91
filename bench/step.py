"""Whole train steps: raypost against engine and trainer alone, and against TRL, in one run.

    python -m bench.step                                    both settings; some ten minutes
    python -m bench.step --only synchronous --rounds 3

synchronous: 8 prompts x 8 samples x 64 tokens, staleness 0. Sides: raypost, also with two engines and two ranks
(`raypost_two`) and with engine and rank on shared devices (`raypost_colocate`); the same requests and the trainer's
step one after the other with nothing between them (`alone`); TRL's GRPOTrainer, generating with transformers (`trl`)
and with a colocated vLLM (`trl_vllm`).

asynchronous: lengths with a long tail (mean 136, max 384 tokens, the same for all samples of a prompt), staleness at
most 4. Sides: raypost, also with the keys and values of frozen requests computed anew at each sync
(`raypost_recompute`); an engine that is always full and a trainer that always has a batch, both at once on the two
cores with nothing between them (`bare`: the slower of the two, the physical limit). raypost has its defaults but for
what is said here.

All sides have one model of 0.8 million parameters with random weights, the same lengths and about the same rewards;
none saves checkpoints.
Each is a process that starts once; then they take turns, round after round. The last line of the output is one JSON
object: groups per second of each side (median of the rounds, and their range), raypost's ratio to the others (of each
round), and the cores that other processes of the machine took meanwhile. TRL is among the development requirements; a
side that cannot start is named and left out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml

from bench.figures import Foreign, spread
from bench.step_sides import PROMPT_TOKENS, PROMPTS, REWARD, Setup

ROOT = Path(__file__).resolve().parent.parent
START_TIMEOUT_S = 300
END_TIMEOUT_S = 15
TURN_SLACK_S = 120
"""Longest time a side may take beyond its turn to end its last step."""
SETTINGS = {
    "synchronous": (
        ("raypost",),
        ("raypost_two",),
        ("raypost_colocate",),
        ("alone",),
        ("trl",),
        ("trl_vllm",),
    ),
    "asynchronous": (("raypost",), ("raypost_recompute",), ("engine_only", "trainer_only")),
}
"""Sides of each setting; those that stand together have their turns at once."""
TURN_S = {"synchronous": 6.0, "asynchronous": 15.0}
NICE = {"RAY_worker_niceness": "0"}
"""Ray's workers are nice by default: beside other programs of the machine raypost alone would give way."""
BARE = {"synchronous": "alone", "asynchronous": "bare"}


class Side:
    """One process."""

    def __init__(self, name: str, setup: Path) -> None:
        """Start it."""
        self.name = name
        self.log = setup.parent / f"{name}.log"
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bench.step_sides", name, str(setup)],
                cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=os.environ | NICE,
            )  # fmt: skip

    def begin(self, seconds: float) -> None:
        """Start its turn."""
        assert self._process.stdin is not None
        print("go", seconds, file=self._process.stdin, flush=True)

    def answer(self, timeout_s: float) -> dict[str, float]:
        """Return its next answer. Raises RuntimeError if it ended, or is late."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            why = f"ended with {self._process.poll()}" if ready else f"took longer than {timeout_s:.0f} s"
            raise RuntimeError(f"{self.name} {why}; its log ends with:\n{self.log.read_text()[-1500:]}")
        answer: dict[str, float] = json.loads(line)
        return answer

    def end(self) -> None:
        """Tell it that there are no more turns: it ends its actors."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def wait(self) -> None:
        """Wait until it has ended, and kill what is left of it."""
        try:
            family = psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            family = []
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        for one in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()


def write_files(folder: Path, tailed: bool) -> Setup:
    """Write model, prompts and the recipes of the sides into a folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from raypost.models.tiny import TinyRecipe, build_tokenizer

    tokenizer = build_tokenizer(TinyRecipe())
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=128, intermediate_size=512, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=512, tie_word_embeddings=False,
            pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
        )
    ).save_pretrained(folder / "model")  # fmt: skip
    tokenizer.save_pretrained(folder / "model")
    with (folder / "prompts.jsonl").open("w") as lines:
        for prompt in PROMPTS:
            print(json.dumps({"prompt": prompt, "answer": "1"}), file=lines)
    setup = Setup(folder=folder, tailed=tailed)
    recipe = recipe_of(setup)
    for name, more in {
        "raypost": {},
        "raypost_two": {
            key: recipe[key] | {"num_workers": 2, "num_cpus": 0.5} for key in ("rollout", "train")
        },
        "raypost_recompute": {"sync": {"recompute_kv_cache": True}},
        "raypost_colocate": {"placement": "colocate"},
        "alone": {"placement": "colocate"},
    }.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(recipe | more))
    return setup


def recipe_of(setup: Setup) -> dict[str, Any]:
    """Return raypost's configuration: its defaults, but for the work itself and what needs a second machine."""
    return {
        "device": "cpu",
        "model": {"name": setup.model},
        "tasks": [
            {
                "source": {"kind": "jsonl", "dataset": str(setup.folder / "prompts.jsonl")},
                "judge": {"kind": "exact", "answer_pattern": REWARD},
                "strategy": {"kind": "async", "max_staleness": 4} if setup.tailed else {"kind": "sync"},
                "group_size": setup.group_size,
                "max_prompt_tokens": PROMPT_TOKENS,
                "max_tokens": max(map(setup.length, range(setup.groups))),
                "ignore_eos": True,
            }
        ],
        "rollout": {"max_num_seqs": 128, "kv_cache_gb": 0.3},
        "train": {"num_steps": 10**6, "batch_size": setup.groups, "learning_rate": 1e-6},
        "eval": {"num_prompts": 0},
        "checkpoint": {"every_s": None},
    }


def start(names: Sequence[tuple[str, ...]], setup: Setup, up: list[tuple[Side, ...]]) -> None:
    """Start all sides at once, and leave in `up` those that came up."""
    path = setup.write()
    up += [tuple(Side(name, path) for name in together) for together in names]
    for sides in list(up):
        try:
            for side in sides:
                side.answer(START_TIMEOUT_S)
        except RuntimeError as error:
            print(f"left out: {error}", flush=True)
            ended(sides)
            up.remove(sides)


def ended(sides: Sequence[Side]) -> None:
    """End sides and wait for it."""
    for side in sides:
        side.end()
    for side in sides:
        side.wait()


def turn(sides: tuple[Side, ...], seconds: float, groups: int) -> tuple[dict[str, float], float]:
    """Return groups per second of each of the sides, and the cores that others took meanwhile."""
    foreign = Foreign()
    for side in sides:
        side.begin(seconds)
    rates = {}
    for side in sides:
        answer = side.answer(seconds + TURN_SLACK_S)
        rates[side.name] = answer.get("groups", answer["steps"] * groups) / answer["seconds"]
    if len(sides) > 1:
        rates["bare"] = min(rates.values())
    return rates, foreign.cores()


def measure(setting: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one setting."""
    folder.mkdir()
    setup = write_files(folder, tailed=setting == "asynchronous")
    wanted = [names for names in SETTINGS[setting] if not args.sides or set(names) & set(args.sides)]
    rounds: list[dict[str, float]] = []
    foreign: list[float] = []
    up: list[tuple[Side, ...]] = []
    try:
        start(wanted, setup, up)
        for number in range(args.rounds + 1):
            rates: dict[str, float] = {}
            for sides in up:
                of_sides, taken = turn(sides, args.seconds or TURN_S[setting], setup.groups)
                rates |= of_sides
                foreign.append(taken)
            told = ", ".join(f"{name} {rate:.2f}" for name, rate in rates.items())
            print(f"{setting} round {number or 'of warming up'}: {told} groups/s", flush=True)
            if number:
                rounds.append(rates)
    finally:
        ended([side for sides in up for side in sides])
    return figures(setting, rounds, foreign)


def figures(setting: str, rounds: list[dict[str, float]], foreign: list[float]) -> dict[str, Any]:
    """Return medians and ranges of the rounds, and of their ratios."""
    names = list(rounds[0])
    others = [name for name in names if not name.startswith(("raypost", "engine", "trainer"))]
    ratios = {
        own: {other: spread([one[own] / one[other] for one in rounds]) for other in others}
        for own in names
        if own.startswith("raypost")
    }
    best = max(ratios, key=lambda own: statistics.median(one[own] for one in rounds), default=None)
    of_best = ratios.get(best or "", {})
    peers = [of_best[name] for name in ("trl_vllm", "trl") if name in of_best]
    return {
        "groups_per_s": {name: spread([one[name] for one in rounds]) for name in names},
        "ratios": ratios,
        "best": best,
        "ratio_to_bare": of_best.get(BARE[setting]),
        "ratio_to_trl": peers[0] if peers else None,
        "rounds": len(rounds),
        "foreign_cores": spread(foreign),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=SETTINGS, help="this setting alone")
    parser.add_argument("--sides", nargs="+", help="these sides alone")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, help="length of a turn")
    parser.add_argument("--keep", type=Path, help="keep models, logs and run folders here")
    args = parser.parse_args()
    # Whoever ends it ends the sides too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    folder = args.keep or Path(tempfile.mkdtemp(prefix="step-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        results = {
            setting: measure(setting, folder / setting, args)
            for setting in SETTINGS
            if args.only in (None, setting)
        }
    finally:
        if args.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(results | {"cores": os.cpu_count(), "load": os.getloadavg()}))


if __name__ == "__main__":
    main()
