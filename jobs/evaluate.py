"""Evaluate a model on a recipe's held-out problems: its engines, agent loops and judges, and no trainer.

    folder -> FolderWeights --broadcast--> rollout workers <- agent loops <- evaluator -> scores

    python -m jobs.evaluate --config jobs/recipes/quickstart.yaml --checkpoint runs/quickstart/checkpoints/best

`--checkpoint`: one of a run, saved with checkpoint.hf. `--model`: a Hugging Face folder. Without both: the model that
the recipe starts from. Prints a table, and writes the scores as JSON into the run folder, or to `--output`. Exit code:
0 done, or stopped (then there are no scores), 1 failed, 2 refused.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: the repository root is not on the path yet
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from rich.console import Console

from actors.remote import within
from jobs.arguments import config_of, parser
from jobs.driver import REFUSALS, connect, refused, run
from jobs.launch import CALL_TIMEOUT_S, Launcher
from jobs.models import prepare_models
from jobs.stopping import stopped, unless
from raypost.checkpoint import HF, verify_files
from raypost.config import Config
from raypost.config.identity import recipe_digest
from raypost.errors import ClusterError, ConfigError
from raypost.plan import plan
from raypost.plan.checks import source_problems
from raypost.plan.cluster import place
from raypost.plan.models import model_problems
from raypost.plan.node_types import describe
from raypost.report.files import write_json
from raypost.report.report_json import package_versions
from raypost.report.terminal import scores_table
from raypost.types import SyncReport

WIDTH = 120
"""Columns of the table where there is no terminal to ask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is evaluated, and where its scores go."""

    config: Config
    """Its model is the one to evaluate."""
    step: int
    """After which it was saved; 0 for a model that raypost did not train."""
    output: Path


async def evaluate(subject: Subject, stop: asyncio.Event) -> None:
    """Start everything, score, show, write, end everything. Raises StoppedError if `stop` comes first."""
    start = time.monotonic()
    sync, scores = await unless(
        _score(subject), stopped(stop, "stopped before the evaluation had ended: there are no scores")
    )
    _show(subject, scores)
    write_json(subject.output, _record(subject, sync, scores, time.monotonic() - start))
    _say(f"written to {subject.output}")


async def _score(subject: Subject) -> tuple[SyncReport, dict[str, float]]:
    cfg = subject.config
    _say(f"preparing model {cfg.model.name}")
    async with Launcher(cfg, await prepare_models(cfg), is_run=False) as launcher:
        pool = launcher.rollout_pool()
        agents = launcher.agents(launcher.judges())
        broadcaster = launcher.broadcaster(launcher.folder_weights(), pool)
        evaluator = launcher.evaluator(agents, pool)
        timeout_s = cfg.rollout.start_timeout_s + CALL_TIMEOUT_S
        engines = await within(launcher.start_engines(), timeout_s, "all engines to start")
        _say(f"engines: {len(engines)} ready")
        sync = await broadcaster.broadcast(subject.step)
        _say(f"weights {sync.digest[:12]} are in all engines; evaluating")
        return sync, await evaluator.evaluate(subject.step)


def _show(subject: Subject, scores: dict[str, float]) -> None:
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
    names = [task.name for task in subject.config.tasks]
    console.print(scores_table(scores, names, subject.config.eval))


def _record(subject: Subject, sync: SyncReport, scores: dict[str, float], seconds: float) -> dict[str, Any]:
    cfg = subject.config
    return {
        "model": cfg.model.name,
        "step": subject.step,
        "weights_digest": sync.digest,
        "recipe": cfg.name,
        "recipe_digest": recipe_digest(cfg),
        "seed": cfg.seed,
        "eval": cfg.eval.model_dump(mode="json"),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": seconds,
        "versions": package_versions(),
        "scores": scores,
    }


# ---------------------------------------------------------------- the command line


def main(argv: list[str] | None = None) -> int:
    """Validate, evaluate. Returns the exit code."""
    args = _arguments(argv)
    try:
        subject = _subject(args)
        _check(subject.config)
        _check_cluster(subject.config, connect(subject.config))
    except REFUSALS as error:
        return refused(error)
    stop = asyncio.Event()
    kept = subject.output.with_suffix(".traceback.txt")
    return run(evaluate(subject, stop), stop, "there will be no scores", kept)


def _subject(args: argparse.Namespace) -> Subject:
    config, step = config_of(args), 0
    # Nothing is trained: engines have devices of their own, and there is no critic.
    train = config.train.model_copy(update={"critic": None})
    config = config.model_copy(update={"placement": "separate", "train": train})
    folder = args.model
    output = config.runs_dir / f"evaluation-{Path(args.model or config.model.name).name}.json"
    if args.checkpoint is not None:
        checkpoint = args.checkpoint.resolve()
        if not checkpoint.is_dir():
            raise ConfigError(f"checkpoint {args.checkpoint} does not exist")
        step, folder = verify_files(checkpoint), checkpoint / HF
        if not folder.is_dir():
            raise ConfigError(f"{checkpoint} has no folder {HF}: it was saved with checkpoint.hf: false")
        home = checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else checkpoint.parent
        output = home / f"evaluation-step-{step}.json"
    if folder is not None:
        if not folder.is_dir():
            raise ConfigError(f"model folder {folder} does not exist")
        model = config.model.model_copy(update={"name": str(folder.resolve()), "options": {}})
        config = config.model_copy(update={"model": model})
    return Subject(config=config, step=step, output=args.output or output)


def _check(config: Config) -> None:
    problems = [*model_problems(config), *source_problems(config)]
    if config.eval.num_prompts == 0:
        problems.append("eval.num_prompts is 0, so there is nothing to evaluate: set eval.num_prompts=128")
    if problems:
        raise ConfigError("\n  ".join([f"{len(problems)} problem(s)", *problems]))


def _check_cluster(config: Config, cluster: plan.ClusterResources) -> None:
    engines = [b for b in plan.bundles(config) if b.role in ("rollout_worker", "reward_worker")]
    homeless = [bundle for bundle in engines if bundle.name not in place(engines, cluster)]
    if homeless and not cluster.elastic:
        wanted = describe(homeless[0].resources)
        raise ClusterError(
            f"{homeless[0].name} needs {wanted} on one node, and no node has that left: add nodes, or use fewer workers"
        )


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    made = parser(__doc__, "raypost evaluate", trains=False)
    subject = made.add_mutually_exclusive_group()
    subject.add_argument("--checkpoint", type=Path, help="for instance runs/NAME/checkpoints/best")
    subject.add_argument("--model", type=Path, help="a Hugging Face folder")
    made.add_argument("--output", type=Path, help="JSON file of the scores")
    return made.parse_intermixed_args(argv)


def _say(text: str) -> None:
    print(f"raypost: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
