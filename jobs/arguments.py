"""The part of the command line that all jobs share: a recipe, the run's name and folder, and overrides."""

from __future__ import annotations

import argparse
from pathlib import Path

from raypost.config import Config, load_config


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of `--config`, `--name`, `--runs-dir` and `key=value` overrides."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--config", type=Path, required=True, help="YAML file, for instance jobs/recipes/quickstart.yaml"
    )
    made.add_argument("--name", help="name of the run folder")
    made.add_argument("--runs-dir", type=Path, help="folder of all runs")
    made.add_argument("overrides", nargs="*", metavar="key=value", help="for instance train.num_steps=10")
    return made


def config_of(args: argparse.Namespace) -> Config:
    """Return the configuration that the arguments describe, with an absolute `runs_dir`. Raises ConfigError."""
    named = [("name", args.name), ("runs_dir", args.runs_dir)]
    config = load_config(args.config, [*args.overrides, *(f"{key}={value}" for key, value in named if value)])
    return config.model_copy(update={"runs_dir": config.runs_dir.expanduser().resolve()})
