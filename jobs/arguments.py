"""The part of the command line that all jobs share: a recipe, the run's name and folder, and overrides."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import raypost
from raypost.config import Config, load_config

TRIED = "--tried"
"""Given to a driver by what has tried the configuration's functions already: they are not tried again."""


def parser(
    description: str | None, prog: str | None = None, *, trains: bool = True
) -> argparse.ArgumentParser:
    """Return a parser of `--config`, `--name`, `--runs-dir`, `key=value` overrides, and what training begins with."""
    made = argparse.ArgumentParser(
        prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--config", type=Path, default=Path("config.yaml"), help="YAML file; config.yaml if absent"
    )
    made.add_argument("--name", help="name of the run folder")
    made.add_argument("--runs-dir", type=Path, help="folder of all runs")
    if trains:
        made.add_argument(
            "--from", dest="start_from", metavar="CHECKPOINT", help="begin a new run with another's weights"
        )
        made.add_argument("--from-optimizer", action="store_true", help="and with its optimizer's moments")
        made.add_argument(
            "--fallback",
            action="store_true",
            help="where the newest checkpoint is damaged, take the one before",
        )
    made.add_argument(TRIED, action="store_true", help=argparse.SUPPRESS)
    made.add_argument("overrides", nargs="*", metavar="key=value", help="for instance train.num_steps=10")
    return made


def python_path(folder: Path) -> str:
    """Return the PYTHONPATH of a run whose working directory is `folder`: modules there, then raypost's own."""
    home = Path(raypost.__file__).resolve().parents[1]
    return os.pathsep.join([str(folder), str(home), *filter(None, [os.environ.get("PYTHONPATH")])])


def settings_of(args: argparse.Namespace) -> dict[str, str | None]:
    """Return the settings that have options of their own; None where the option is not given, or not there."""
    given = vars(args)
    return {
        "checkpoint.start_from": given.get("start_from"),
        "checkpoint.start_optimizer": "true" if given.get("from_optimizer") else None,
        "checkpoint.fallback": "true" if given.get("fallback") else None,
    }


def config_of(args: argparse.Namespace) -> Config:
    """Return the configuration that the arguments describe, with an absolute `runs_dir`. Raises ConfigError."""
    named = {"name": args.name, "runs_dir": args.runs_dir, **settings_of(args)}
    given = [f"{key}={value}" for key, value in named.items() if value]
    config = load_config(args.config, [*args.overrides, *given])
    changes: dict[str, object] = {"runs_dir": config.runs_dir.expanduser().resolve()}
    if (start := config.checkpoint.start_from) is not None:
        # Ranks work in folders of their own.
        absolute = {"start_from": start.expanduser().absolute()}
        changes["checkpoint"] = config.checkpoint.model_copy(update=absolute)
    return config.model_copy(update=changes)
