r"""What a run keeps on disk: seconds to save and restore a full buffer, to ask a long ledger, to open many rows.

    python -m bench.store                                     # 20,000 groups, a million, 200,000 rows; some 3 min
    python -m bench.store --parts ledger --ledger-groups 100000
    python -m bench.store --parts stall                       # a run with checkpoints of 270 MB, on Ray; some 2 min

The others need no Ray. Every figure is the median of five rounds with the lowest and the highest, beside what a plain
reading of the same bytes takes in the same round; the commands are processes of their own, so theirs are with the start
of Python, which is given beside them. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np

from bench.figures import spread
from raypost.buffer.journal import BufferJournal
from raypost.buffer.replay_buffer import ReplayBuffer
from raypost.checkpoint import CheckpointDir, load_state, save_state
from raypost.config import Config, JudgeConfig, SourceConfig, TaskConfig, load_config
from raypost.data.task_source import build_source
from raypost.files.disk import Fsync
from raypost.ledger.closed import CLOSED_FILE
from raypost.ledger.events import LedgerEvent
from raypost.ledger.journal import JournalReader
from raypost.ledger.ledger import LEDGER_FILE, Ledger, group_facts
from raypost.ledger.replay import continued
from raypost.observe.spans import Span, SpanKind
from raypost.plan.checks import run_dir_problems
from raypost.report.files import SPANS
from raypost.report.writer import RunWriter
from raypost.types import Group, RolloutState, SampleParams, Status, TaskLimits
from raypost.types.packed import PackedGroups, pack_groups

ROUNDS = 5
TASK, GROUP_SIZE, PUT_GROUPS, BATCH = "sums", 8, 32, 32

Figures = dict[str, Any]


def made(first: int, count: int, tokens: int) -> list[Group]:
    """Return judged groups as agent loops hand them over, with some 500 bytes of metadata each."""
    groups, params = [], SampleParams(max_tokens=tokens)
    for n in range(first, first + count):
        entry = {"values": list(range(20)), "difficulty": {"terms": [2, 4]}, "text": f"{n} " * 30}
        metadata = {"question": f"What is {n} plus {n + 1}? " * 4, "answer": str(2 * n + 1), "entry": entry}
        states = [
            RolloutState(
                task=TASK,
                group_id=n,
                sample_index=index,
                prompt_ids=np.arange(64, dtype=np.int32),
                sample_params=params,
                metadata=metadata,
                status=Status.COMPLETED,
                reward=float(index % 2),
                finish_reason="stop",
                worker=f"rollout-{n % 4}",
                response_text=f"The answer is {2 * n + 1}. " * 3,
                response_ids=np.full(tokens, 7, np.int32),
                logprobs=np.full(tokens, -0.5, np.float32),
                policy_versions=np.full(tokens, n // BATCH, np.int32),
                response_mask=np.ones(tokens, np.bool_),
            )
            for index in range(GROUP_SIZE)
        ]
        groups.append(Group(task=TASK, group_id=n, states=states))
    return groups


def measure_checkpoint(folder: Path, args: argparse.Namespace) -> Figures:
    """Save and restore a full buffer, beside writing and reading the same bytes."""
    times: dict[str, list[float]] = defaultdict(list)
    buffer = ReplayBuffer({TASK: TaskLimits(None)})
    for first in range(0, args.groups, PUT_GROUPS):
        packed: PackedGroups = pack_groups(made(first, min(PUT_GROUPS, args.groups - first), args.tokens))
        asyncio.run(buffer.put(packed, args.groups))
    size = 0
    for number in range(ROUNDS):
        checkpoints = CheckpointDir(folder / "checkpoints", 1, {})
        begin = time.perf_counter()
        path = checkpoints.begin(number)
        save_state(path, "producer", asyncio.run(buffer.state_dict()))
        times["save_s"].append(time.perf_counter() - begin)
        checkpoints.commit(number)
        times["save_and_commit_s"].append(time.perf_counter() - begin)
        begin, restored = time.perf_counter(), ReplayBuffer({TASK: TaskLimits(None)})
        latest = checkpoints.latest()
        assert latest is not None
        asyncio.run(restored.load_state_dict(load_state(latest[1], "producer")))
        times["load_s"].append(time.perf_counter() - begin)
        assert len(restored.groups) == args.groups
        size = sum(file.stat().st_size for file in latest[1].iterdir())
        times["plain_copy_s"].append(timed(_copy, latest[1] / "producer.npy", folder / "copy"))
    return {"groups": args.groups, "bytes_per_group": size / args.groups, **spreads(times)}


def measure_stall(folder: Path, args: argparse.Namespace) -> Figures:
    """Train with a checkpoint at every other sync; how long each kept production from going on."""
    options = {"hidden_size": 512, "num_heads": 8, "intermediate_size": 1024, "num_layers": 8, "steps": 20}
    command = [
        sys.executable,
        "-m",
        "jobs.run",
        "--config",
        "jobs/recipes/quickstart.yaml",
        "--name",
        "stall",
    ]
    command += ["--runs-dir", str(folder), f"model.options={json.dumps(options)}", "checkpoint.interval=2"]
    command += ["checkpoint.every_s=null", "train.num_steps=14", "train.batch_size=4", "eval.num_prompts=0"]
    command += ["sync.pause_mode=abort", "train.step_timeout_s=120", "model.cache_dir=/tmp/rp-bench-models"]
    subprocess.run(command, check=True, timeout=600, stdout=subprocess.DEVNULL)
    times: dict[str, list[float]] = defaultdict(list)
    begin, saved = 0.0, False
    for told, _ in JournalReader(folder / "stall" / LEDGER_FILE).lines():
        if told["event"] == LedgerEvent.PAUSING and not begin:
            begin, saved = told["time"], False
        elif told["event"] == LedgerEvent.SAVED:
            saved = True
        elif told["event"] == LedgerEvent.RESUMED and begin:
            times["with_checkpoint_s" if saved else "sync_alone_s"].append(told["time"] - begin)
            begin = 0.0
    newest = max((folder / "stall" / "checkpoints").glob("step-*"), key=lambda path: path.stat().st_mtime)
    size = sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())
    return {"checkpoint_mb": size / 1e6, **spreads(times)}


def _copy(source: Path, target: Path) -> None:
    target.write_bytes(source.read_bytes())


def measure_ledger(folder: Path, args: argparse.Namespace) -> Figures:
    """Write the ledger of a run with so many groups, trained or filtered, and ask it."""
    facts = [group_facts(group) for group in made(0, 64, 16)]
    rng, ledger, step = random.Random(1), Ledger(folder / LEDGER_FILE, attempt="bench"), 0
    batch: list[tuple[str, int]] = []
    begin = time.perf_counter()
    for n in range(args.ledger_groups):
        key = (TASK, n)
        ledger.sampled(key)
        told = {**facts[n % 64], "tokens": [rng.randrange(8, 384) for _ in range(GROUP_SIZE)]}
        if n % 8 == 0:
            ledger.dropped(key, Status.FILTERED, why="all rewards are equal", **told)
            continue
        ledger.stored(key, Status.COMPLETED, staleness=1, **told)
        batch.append(key)
        if len(batch) == BATCH:
            step += 1
            ledger.leased(batch, step, [1] * BATCH)
            ledger.trained(step)
            ledger.note(LedgerEvent.PAUSED, mode="abort", version=step)
            ledger.note(LedgerEvent.RESUMED, version=step)
            ledger.flush()
            batch = []
    saved = ledger.state_dict()
    ledger.flush()
    written_s = time.perf_counter() - begin
    config = _save_run(folder, step)
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(ROUNDS):
        times["python_s"].append(timed(_command, "--help"))
        times["status_s"].append(timed(_command, "status", str(folder)))
        times["explain_run_s"].append(timed(_command, "explain", str(folder)))
        group = str(rng.randrange(args.ledger_groups))
        times["explain_group_s"].append(timed(_command, "explain", str(folder), group))
        times["report_s"].append(timed(_command, "report", str(folder)))
        times["checked_before_a_start_s"].append(timed(run_dir_problems, config))
        times["after_a_death_s"].append(timed(continued, folder / LEDGER_FILE, "bench"))
        shutil.copytree(folder, resumed := folder.with_suffix(".resumed"))
        ledger = Ledger(resumed / LEDGER_FILE, attempt="again")
        times["resumed_s"].append(timed(ledger.load_state_dict, saved))
        shutil.rmtree(resumed)
    size = sum((folder / name).stat().st_size for name in (LEDGER_FILE, CLOSED_FILE, SPANS))
    return {
        "groups": args.ledger_groups,
        "bytes_per_group": size / args.ledger_groups,
        "written_us_per_group": written_s / args.ledger_groups * 1e6,
        **spreads(times),
    }


def _save_run(folder: Path, steps: int) -> Config:
    """Write what a run has beside its ledger: configuration, figures of every step, and spans of a step a second."""
    recipe = Path(__file__).parents[1] / "jobs" / "recipes" / "quickstart.yaml"
    config = load_config(recipe, [f"name={folder.name}", f"runs_dir={folder.parent}", "trackers=[]"])
    writer = RunWriter(folder, config, 1e9)
    figures = {f"figure/{n}": n + 0.5 for n in range(40)}
    for step in range(1, steps + 1):
        writer.write_step(step, {"staleness": [1] * BATCH, **figures})
        if step % 2 == 0:  # telemetry asks every two seconds
            writer.write_spans([span for second in (step - 1, step) for span in _spans(1e9 + second)])
    return config


def _spans(second: float) -> list[Span]:
    busy = [("rollout-0", "rollout"), ("rollout-0", "rollout"), ("producer", "pause"), ("broadcaster", "sync"),
            ("trainer-0", "sync"), ("trainer-0", "train")]  # fmt: skip
    return [
        Span(actor=actor, kind=cast(SpanKind, kind), start_s=second + n / 7, end_s=second + n / 7 + 0.123)
        for n, (actor, kind) in enumerate(busy)
    ]


def _command(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "raypost", *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"raypost {' '.join(arguments)} ended with {done.returncode}: {done.stderr}")


def measure_rows(folder: Path, args: argparse.Namespace) -> Figures:
    """Open a source of JSON Lines with and without its index, beside json.loads of every line."""
    path, rng = folder / "rows.jsonl", random.Random(1)
    words = ["how", "many", "apples", "are", "in", "the", "basket", "when", "each", "child", "takes", "two"]
    with open(path, "w") as file:
        for n in range(args.rows):
            question = f"Question {n}: {' '.join(rng.choice(words) for _ in range(40))}?"
            file.write(
                json.dumps({"prompt": question, "answer": str(n), "level": n % 5, "from": "bench"}) + "\n"
            )
    os.utime(path, (1e9, 1e9))
    judge = JudgeConfig(kind="exact")
    times: dict[str, list[float]] = defaultdict(list)
    for number in range(ROUNDS):
        source = SourceConfig(kind="jsonl", dataset=str(path), index_dir=folder / f"index-{number}")
        task = TaskConfig(source=source, judge=judge)
        times["first_start_s"].append(timed(build_source, task, 0))
        times["later_start_s"].append(timed(build_source, task, 0))
        times["json_loads_s"].append(timed(_loads, path))
    return {"rows": args.rows, **spreads(times)}


def _loads(path: Path) -> None:
    with open(path, "rb") as file:
        for line in file:
            json.loads(line)


def timed(work: Callable[..., Any], *arguments: Any) -> float:
    """Return the seconds that a call takes."""
    begin = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - begin


def spreads(times: dict[str, list[float]]) -> Figures:
    """Return the spread of each."""
    return {name: spread(values) for name, values in times.items()}


def measure_fsync(folder: Path, args: argparse.Namespace) -> Figures:
    """Put, lease and end batches in a buffer with a journal, for each setting of checkpoint.fsync, in turn."""
    batches = [pack_groups(made(BATCH * n, BATCH, args.tokens)) for n in range(100)]
    modes: tuple[Fsync, ...] = ("off", "interval", "every")
    times: dict[str, list[float]] = defaultdict(list)
    for number in range(ROUNDS):
        for mode in modes:
            place = folder / f"{mode}-{number}"
            journal = BufferJournal(place, "bench", fsync=mode)
            buffer = ReplayBuffer({TASK: TaskLimits(None)}, journal=journal)
            begin = time.perf_counter()
            for step, packed in enumerate(batches, start=1):
                asyncio.run(buffer.put(packed, step))
                asyncio.run(buffer.lease(step, {TASK: BATCH}))
                asyncio.run(buffer.acknowledge(step))
            times[f"{mode}_us_per_group"].append((time.perf_counter() - begin) / len(batches) / BATCH * 1e6)
            journal.close()
            shutil.rmtree(place)
    return spreads(times)


PARTS: dict[str, Callable[[Path, argparse.Namespace], Figures]] = {
    "checkpoint": measure_checkpoint,
    "stall": measure_stall,
    "ledger": measure_ledger,
    "fsync": measure_fsync,
    "rows": measure_rows,
}


def main() -> None:
    """Measure the parts that were asked for and print them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["checkpoint", "ledger", "rows"])
    parser.add_argument("--groups", type=int, default=20_000, help="groups in the buffer")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a response in the buffer")
    parser.add_argument("--ledger-groups", type=int, default=1_000_000)
    parser.add_argument("--rows", type=int, default=200_000)
    args = parser.parse_args()
    found: Figures = {"bench": "store", "rounds": ROUNDS, "load": [os.getloadavg()[0]]}
    for name in args.parts:
        folder = Path(tempfile.mkdtemp(prefix=f"rp-{name}-"))
        try:
            found[name] = PARTS[name](folder, args)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        print(f"{name}:", ", ".join(f"{figure} {value}" for figure, value in found[name].items()), flush=True)
    found["load"].append(os.getloadavg()[0])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
