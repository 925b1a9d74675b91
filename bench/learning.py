"""Does it learn as well as TRL does, and what does staleness cost? The study of docs/learning.md.

    python -m bench.learning                        all runs, then table and figures; continues where it was cut
    python -m bench.learning one trl 0              one configuration with one seed
    python -m bench.learning draw                   table and figures of the runs there are

A run leaves `<results>/<configuration>-<seed>.json`; what is there is not run again. Seeds go by turns, so that a
cut leaves whole rows. Each run has a process of its own, with a deadline; a run that fails is named and passed over,
and is tried again next time.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.learning_runs import CONFIGURATIONS, ROOT, run
from bench.learning_view import draw

RUN_TIMEOUT_S = 1200
"""Longest time one run may take; it takes two to five minutes on two cores, by what else they do."""
STOP_WAIT_S = 90
"""Time a run has to end its actors."""


def main() -> int:
    """Run a command; return 0 if all runs that were asked for are there."""
    args = _arguments()
    args.results.mkdir(parents=True, exist_ok=True)
    match args.command:
        case "one":
            return one(args.configuration, args.seed, args.results)
        case "draw":
            draw(args.results, args.figures)
            return 0
    return everything(args)


def one(name: str, seed: int, results: Path) -> int:
    """Run one configuration with one seed in this process, and write its result."""
    folder = Path(tempfile.mkdtemp(prefix="learning-"))
    try:
        result = run(name, seed, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    target = result_file(results, name, seed)
    partial = target.with_suffix(".partial")
    partial.write_text(json.dumps(result))
    partial.replace(target)
    last = result["points"][-1]
    print(
        f"{name} seed {seed}: score {last['score']:.3f}, steps {result['loop_s']:.0f} s, {target}", flush=True
    )
    return 0


def everything(args: argparse.Namespace) -> int:
    """All runs that are missing, then table and figures."""
    wanted = [(name, seed) for seed in range(args.seeds) for name in args.only or CONFIGURATIONS]
    missing = [one for one in wanted if not result_file(args.results, *one).exists()]
    print(f"{len(wanted)} runs, {len(missing)} of them missing, into {args.results}", flush=True)
    failed = []
    for n, (name, seed) in enumerate(missing):
        if result_file(args.results, name, seed).exists():
            continue  # someone else ran it meanwhile
        print(f"[{time.strftime('%H:%M:%S')}] {n + 1}/{len(missing)} {name} seed {seed}", flush=True)
        command = [sys.executable, "-m", "bench.learning", "--results", str(args.results.resolve())]
        log = args.results / f"{name}-{seed}.log"
        code = _run_apart([*command, "one", name, str(seed)], log)
        if code != 0:
            failed.append(f"{name} seed {seed}")
            print(f"  {'took too long' if code is None else f'exit code {code}'}: see {log}", flush=True)
    if failed:
        print(f"not run: {', '.join(failed)}", flush=True)
    draw(args.results, args.figures)
    return 1 if failed else 0


def _run_apart(command: list[str], log: Path) -> int | None:
    """Return the exit code of a process of its own; None if it took too long."""
    with log.open("w") as lines:
        process = subprocess.Popen(command, cwd=ROOT, stdout=lines, stderr=subprocess.STDOUT)
        try:
            return process.wait(RUN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(STOP_WAIT_S)
                except subprocess.TimeoutExpired:
                    process.kill()


def result_file(results: Path, name: str, seed: int) -> Path:
    """Where a run's result lies."""
    return results / f"{name}-{seed}.json"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=Path("runs/learning"), help="folder of the results")
    parser.add_argument("--figures", type=Path, help="folder of the figures; the results' own otherwise")
    parser.add_argument(
        "--seeds", type=int, default=5, choices=range(1, 11), metavar="N", help="seeds 0 to N - 1, at most 10"
    )
    parser.add_argument("--only", nargs="+", choices=CONFIGURATIONS, help="these configurations alone")
    commands = parser.add_subparsers(dest="command")
    single = commands.add_parser("one", help="one run")
    single.add_argument("configuration", choices=CONFIGURATIONS)
    single.add_argument("seed", type=int)
    commands.add_parser("draw", help="table and figures of what is there")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
