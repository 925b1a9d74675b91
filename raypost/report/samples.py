"""Samples: some trajectories of each batch that was trained, kept for looking at.

    samples/step-000040.jsonl    a line for each member of the groups that were kept of step 40

A step that is trained again after a resume replaces its file; files of later steps are then of a history that did not
survive, and are removed.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from raypost.errors import ConfigError, RunFilesError
from raypost.files.jsonl import read_lines, sealed
from raypost.report import files
from raypost.types import SESSION, Group, GroupKey, IntArray, RolloutState
from raypost.types.packed import PackedGroups, slice_groups, unpack_groups
from raypost.types.staleness import trajectory_staleness
from raypost.types.turns import recorded_turns

FOLDER = files.SAMPLES
LOGPROB_DIGITS = 6

Decode = Callable[[IntArray], str]


# ---------------------------------------------------------------- writing


class SampleWriter:
    """Writes the samples of one session."""

    def __init__(self, run_dir: Path, num_groups: int, decode: Decode) -> None:
        """Keep `num_groups` groups a step, at most. `decode` turns ids into text."""
        self._folder = run_dir / FOLDER
        self._num_groups = num_groups
        self._decode = decode
        self._begun = False

    def write(self, step: int, batch: PackedGroups) -> None:
        """Keep some groups of the batch of `step`. Raises OSError."""
        if not self._begun:
            self._folder.mkdir(parents=True, exist_ok=True)
            for known, path in _steps(self._folder):
                if known > step:
                    path.unlink()
            self._begun = True
        lines = [
            sealed(files.to_line(self._sample(step, staleness, state)))
            for group in chosen(batch, step, self._num_groups)
            for staleness in [max(trajectory_staleness(state, step) for state in group.states)]
            for state in group.states
        ]
        files.write_atomically(_file(self._folder, step), "".join(lines))

    def _sample(self, step: int, staleness: int, state: RolloutState) -> dict[str, Any]:
        return {
            "step": step,
            "task": state.task,
            "group": state.group_id,
            "sample": state.sample_index,
            "staleness": staleness,
            "reward": state.reward,
            "reward_parts": {
                name: value for name, value in state.reward_parts.items() if math.isfinite(value)
            },
            "judge_words": state.judge_words,
            "judge_s": round(state.judge_s, 3),
            "judge_retries": state.judge_retries,
            "retries": state.num_retries,
            "status": state.status.value,
            "error": state.error,
            "finish_reason": state.finish_reason,
            "aborts": state.num_aborts,
            "restarts": state.num_restarts,
            "worker": state.worker,
            "answer": plain_text(state.metadata.get("answer")),
            "prompt": self._decode(state.prompt_ids),
            "response": state.response_text or self._decode(state.response_ids),
            "segments": list(self._segments(state)),
            "session": state.metadata.get(SESSION),
            "turns": list(self._turns(state)),
            "prompt_ids": state.prompt_ids,
            "response_ids": state.response_ids,
            "logprobs": [
                round(one, LOGPROB_DIGITS) if math.isfinite(one) else None for one in state.logprobs.tolist()
            ],
            "policy_versions": state.policy_versions,
            "response_mask": state.response_mask,
        }

    def _turns(self, state: RolloutState) -> Iterator[dict[str, Any]]:
        """Yield what was said and observed in each turn, and the calls in it; nothing where there is but one."""
        for turn in recorded_turns(state):
            said, observed = (
                state.response_ids[turn.start : turn.end],
                state.response_ids[turn.end : turn.next],
            )
            yield {
                "said": self._decode(said),
                "observed": self._decode(observed),
                "reward": turn.reward,
                "done": turn.done,
                "calls": turn.calls,
                "info": turn.info,
                "trained": bool(state.response_mask[turn.start : turn.end].any()),
            }

    def _segments(self, state: RolloutState) -> Iterator[dict[str, Any]]:
        """Yield the response's stretches of one version and one mask: what a reader must know to tell them apart."""
        versions, mask = state.policy_versions, state.response_mask
        begins = np.flatnonzero((np.diff(versions) != 0) | np.diff(mask)) + 1
        for start, end in zip([0, *begins], [*begins, len(versions)], strict=True):
            if end > start:
                text = self._decode(state.response_ids[start:end])
                yield {"version": int(versions[start]), "trained": bool(mask[start]), "text": text}


def chosen(batch: PackedGroups, step: int, number: int) -> list[Group]:
    """Return up to `number` groups of the batch: of each task in turn, drawn by the step alone."""
    places = list(range(batch.num_groups))
    random.Random(step).shuffle(places)
    turns: dict[str, int] = {}
    ranked = list[tuple[int, int, int]]()
    for place in places:
        task = batch.tasks[place]
        turns[task] = turns.get(task, -1) + 1
        ranked.append((turns[task], len(ranked), place))
    return [unpack_groups(slice_groups(batch, at, at + 1))[0] for _, _, at in sorted(ranked)[:number]]


def plain_text(value: object) -> str | None:
    """Return a value of metadata as text, None for None."""
    return None if value is None else str(value)


def _file(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}.jsonl"


def _steps(folder: Path) -> list[tuple[int, Path]]:
    found = ((re.fullmatch(r"step-(\d+)\.jsonl", path.name), path) for path in folder.glob("step-*.jsonl"))
    return sorted((int(match[1]), path) for match, path in found if match)


# ---------------------------------------------------------------- reading


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The samples of one step."""

    step: int
    steps: tuple[int, ...]
    """All steps of which the run has samples."""
    samples: list[dict[str, Any]]


_SHOWN: Mapping[str, type | tuple[type, ...]] = {
    "task": str, "group": int, "sample": int, "reward": (int, float, type(None)), "reward_parts": dict, "prompt": str,
    "response": str, "segments": list, "logprobs": list, "staleness": int, "judge_words": str,
}  # fmt: skip
"""What a line must have, and of which type."""


def kept_samples(run_dir: Path, step: int | None = None, task: str | None = None) -> Kept:
    """Return the samples of a step, the last that has some if None, of one task or of all.

    Raises ConfigError if there are none, naming the steps and tasks that there are; RunFilesError for a damaged file.
    """
    known = dict(_steps(run_dir / FOLDER))
    if not known:
        raise ConfigError(f"{run_dir} has no samples: keep_samples is 0, or no step was trained yet")
    wanted = max(known) if step is None else step
    if wanted not in known:
        near = sorted(known, key=lambda one: abs(one - wanted))[:3]
        raise ConfigError(
            f"step {wanted} has no samples; {len(known)} steps have, the nearest {sorted(near)}"
        )
    samples = [_checked(line, known[wanted]) for line in read_lines(known[wanted])]
    tasks = sorted({one["task"] for one in samples})
    if task is not None and task not in tasks:
        raise ConfigError(
            f"no sample of task {task!r} was kept of step {wanted}: there are some of {', '.join(tasks)}"
        )
    of_task = [one for one in samples if task in (None, one["task"])]
    return Kept(step=wanted, steps=tuple(sorted(known)), samples=of_task)


def samples_of_group(run_dir: Path, key: GroupKey, step: int) -> list[dict[str, Any]]:
    """Return what was kept of a group that `step` trained; nothing if it was not among those that are kept.

    Raises RunFilesError for a damaged file.
    """
    path = dict(_steps(run_dir / FOLDER)).get(step)
    found = [_checked(line, path) for line in read_lines(path)] if path is not None else []
    return [one for one in found if (one["task"], one["group"]) == key]


def _checked(line: dict[str, Any], path: Path) -> dict[str, Any]:
    for name, kind in _SHOWN.items():
        if not isinstance(line.get(name), kind):
            raise RunFilesError(
                f"{path} is damaged: {name} is {line.get(name)!r:.80} in one of its lines; remove the file"
            )
    return line


def ranked(samples: Sequence[dict[str, Any]], best: int, worst: int) -> list[dict[str, Any]]:
    """Return the samples with the highest rewards, best first, and those with the lowest; one is never there twice.

    Samples without a reward are none of them.
    """
    scored = sorted((one for one in samples if one["reward"] is not None), key=lambda one: -one["reward"])
    first = scored[:best]
    rest = scored[len(first) :]
    return [*first, *(rest[-worst:] if worst else [])]
