"""How fast a run will be, forecast from the rates of another one: seconds a step, and who waits for whom.

Owns the arithmetic only. It assumes the same model, machines and lengths, and that engines and ranks add up; both are
said beside the figures.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from raypost.config import Config
from raypost.config.load import load_config
from raypost.errors import ConfigError
from raypost.plan.memory import amount, model_sizes, sync_bytes
from raypost.plan.schedule import shares


@dataclass(slots=True, frozen=True)
class Rates:
    """What an engine and a rank did while they worked."""

    engine_tokens_s: float
    rank_tokens_s: float
    sync_s: float
    response_tokens: float
    """Mean length of a trained response."""


def rates_of(run_dir: Path) -> Rates:
    """Return the rates of a run that ended. Raises ConfigError if its folder does not say them."""
    try:
        report = json.loads((run_dir / "report.json").read_text())
        config = load_config(run_dir / "config.yaml", None)
        rollout_s, train_s = (
            report["window_s"] * (1 - report[f"{who}_idle_fraction"]) for who in ("rollout", "trainer")
        )
        return Rates(
            report["tokens_generated"] / rollout_s / config.rollout.num_engines,
            report["tokens_produced"] / train_s / config.train.num_workers,
            report["sync_s_median"],
            report["trained_tokens_mean"],
        )
    except OSError as error:
        raise ConfigError(
            f"{error.filename} cannot be read ({error.strerror}): name the folder of a run that ended"
        ) from error
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise ConfigError(
            f"{run_dir}/report.json has no rates ({error!r}): name the folder of a run that trained a few steps"
        ) from error


def pace_lines(config: Config, rates: Rates) -> Iterator[tuple[str, str]]:
    """Yield (quantity, value) of the forecast."""
    groups, rollout, train = shares(config), config.rollout, config.train
    samples = sum(groups[task.name] * task.group_size for task in config.tasks)
    tokens = samples * rates.response_tokens
    rollout_s = tokens / (rates.engine_tokens_s * rollout.num_engines)
    train_s = tokens / (rates.rank_tokens_s * train.num_workers)
    sync_s = rates.sync_s / config.sync.sync_weights_interval
    at_once = config.staleness_bound > 0 and config.placement == "separate"
    step_s = (max(rollout_s, train_s) if at_once else rollout_s + train_s) + sync_s
    yield (
        "rates",
        (
            f"{rates.engine_tokens_s:.0f} tokens/s an engine and {rates.rank_tokens_s:.0f} a rank while they work, "
            f"{rates.response_tokens:.0f} tokens a response, {rates.sync_s:.2g} s a sync"
        ),
    )
    yield (
        "a train step",
        (
            f"{step_s:.3g} s: {rollout_s:.3g} s to produce, {train_s:.3g} s to train"
            f"{', at once' if at_once else ', one after the other'}, {sync_s:.2g} s to sync; "
            f"the run {step_s * train.num_steps / 3600:.2g} h"
        ),
    )
    if rates.sync_s and (sizes := model_sizes(config)) is not None:
        carried = rollout.num_engines * sync_bytes(config, sizes)
        yield (
            "bandwidth of a sync",
            (
                f"{amount(carried)} from the trainer to {rollout.num_engines} engine(s): "
                f"{amount(carried / rates.sync_s)}/s if it is to take as long"
            ),
        )
    yield "idle", f"engines {1 - rollout_s / step_s:.0%}, ranks {1 - train_s / step_s:.0%}"
    if at_once:
        enough = math.ceil(tokens / (rates.engine_tokens_s * train_s))
        yield "engines that keep the ranks busy", f"{enough}; the configuration has {rollout.num_engines}"
