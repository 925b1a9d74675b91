"""Functions and environments of the user's own, tried before a run starts.

Owns the process in which they are tried, what they are given there, and the words for what went wrong. Reward functions
and agent loops are tried where they are called from. Each is given what a run would give it, on a small scale: the
first prompt of its task, two groups of made-up rewards, six tokens.

    findings -> a process of its own: import, call, compare -> refused, or a warning
                  +- ends (sys.exit, a crash) -> refused; the rest is tried in another process
                  +- takes longer than TRIAL_S -> a warning; the rest is tried in another process
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, get_args

import numpy as np

from raypost.config import AdvantageKind, Config, LossKind, TaskConfig
from raypost.config.imports import load_function
from raypost.errors import ConfigError
from raypost.types import Group, RolloutState, SampleParams, Status

START_S = 60.0
"""Longest time for the process to start, to import torch where a loss needs it, and to read the prompts."""
TRIAL_S = 10.0
"""Longest time that one of them may take, its imports included."""


class UserCode(NamedTuple):
    """One function that a configuration names."""

    what: str
    """Where it is named, for messages."""
    path: str
    kind: str
    task: int = 0
    """Which task it is of."""
    source: str | None = None
    """Text of its file, if it is no module's."""


class Finding(NamedTuple):
    """What is to be said of one of them."""

    text: str
    refused: bool


class _Surprise(Exception):
    """It works, but not as one might think."""


def user_code(config: Config) -> list[UserCode]:
    """Return the functions of the user's own that `config` names, but for judges and agent loops."""
    named = [
        UserCode("train.loss.kind", config.train.loss.kind, "loss"),
        UserCode("train.advantage.kind", config.train.advantage.kind, "advantage"),
        UserCode("task_weights", config.task_weights or "", "task_weights"),
    ]
    for index, task in enumerate(config.tasks):
        place, strategy, source = f"task {task.name!r}: ", task.strategy, task.source
        named += [
            UserCode(place + "strategy.is_valid", strategy.is_valid or "", "is_valid", index),
            UserCode(place + "strategy.should_continue", strategy.should_continue or "", "should_continue"),
            UserCode(
                place + "agent_loop.environment",
                task.agent_loop.environment or "",
                "environment",
                index,
                task.agent_loop.file_source,
            ),
            UserCode(
                place + "source.dataset", str(source.dataset) if source.kind == "python" else "", "import"
            ),
        ]
    known = {*get_args(LossKind), *get_args(AdvantageKind), ""}
    return [one for one in named if one.path not in known]


def findings(config: Config) -> list[Finding]:
    """Try all of them, in a process of their own. Raises nothing that they raise, and leaves no process behind."""
    left, found = user_code(config), list[Finding]()
    while left:
        answers, exit_code = _tried(config, len(left))
        found += [Finding(*answer) for answer in answers if answer is not None]
        left = left[len(answers) :]
        if left:
            one = left.pop(0)
            found.append(
                Finding(f"{one.what} is {one.path!r}, {_ending(exit_code)}", refused=_refused(one, exit_code))
            )
    return found


def _ending(exit_code: int | None) -> str:
    if exit_code is not None:
        return f"which ended its process (exit code {exit_code}) when it was tried: it must return"
    return f"which did not return within {TRIAL_S:.0f} s when it was tried"


def _refused(one: UserCode, exit_code: int | None) -> bool:
    """Whether a trial without an answer is no mere warning: what the plan itself needs must load."""
    return exit_code is not None or one.kind not in ("loss", "advantage", "environment")


def _tried(config: Config, count: int) -> tuple[list[Any], int | None]:
    """Try the last `count` of them; return the answers that came, and the exit code of a process that ended itself."""
    child = subprocess.Popen(
        [sys.executable, "-m", "raypost.plan.user_code"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        start_new_session=True,
    )
    assert child.stdin is not None and child.stdout is not None
    lines: queue.Queue[bytes | None] = queue.Queue()
    stdout = child.stdout

    def read() -> None:
        for line in stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, name="read trials", daemon=True).start()
    answers: list[Any] = []
    try:
        child.stdin.write(pickle.dumps((config, count)))
        child.stdin.close()
        lines.get(timeout=START_S)  # it is ready
        while len(answers) < count:
            line = lines.get(timeout=TRIAL_S)
            if line is None:
                return answers, child.wait(TRIAL_S)
            answers.append(json.loads(line))
    except (queue.Empty, subprocess.TimeoutExpired):
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        stdout.close()
    return answers, None


# ---------------------------------------------------------------- in the process of its own


def main() -> None:
    """Read (configuration, count) from stdin; write one line of JSON for each of the last `count` functions."""
    config, count = pickle.load(sys.stdin.buffer)
    # What the functions print goes nowhere.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    todo = user_code(config)[-count:]
    # What takes seconds by itself is not counted against the functions.
    if any(one.kind in ("loss", "advantage") for one in todo):
        importlib.import_module("raypost.trainer.algorithm.losses")
    for index in {one.task for one in todo if one.kind in ("is_valid", "environment")}:
        if config.tasks[index].source.kind != "python":
            with contextlib.suppress(ConfigError):
                _first_metadata(config.tasks[index], config.seed)
    print(file=answers)
    for one in todo:
        print(json.dumps(trial(one, config)), file=answers)


def trial(one: UserCode, config: Config) -> tuple[str, bool] | None:
    """Try one in this process. Return (text, whether it is refused); None if there is nothing to say."""
    try:
        TRIALS[one.kind](one, config)
    except ConfigError as error:
        return str(error), True
    except _Surprise as error:
        return f"{one.what} is {one.path!r}: {error}", False
    # A supervision boundary: the user's code may raise anything, SystemExit too.
    except BaseException as error:
        return (
            f"{one.what} is {one.path!r}, which raised {type(error).__name__} when it was tried: {error}",
            True,
        )
    return None


def _loaded(one: UserCode, *args: object, **kwargs: object) -> Callable[..., Any]:
    """Return the function. Raises ConfigError unless it can be called with these arguments."""
    try:
        function = load_function(one.path, one.what, one.source)
    except SystemExit as error:
        raise ConfigError(f"{one.what} is {one.path!r}, whose import ends the process: {error!r}") from None
    _check_call(function, one, *args, **kwargs)
    return function


def _check_call(function: Callable[..., Any], one: UserCode, *args: object, **kwargs: object) -> None:
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except ValueError:
        return  # built in: it does not say what it takes
    except TypeError as error:
        names = [type(arg).__name__ for arg in args] + [
            f"{name}={value!r:.40}" for name, value in kwargs.items()
        ]
        call = f"{getattr(function, '__name__', 'it')}({', '.join(names)})"
        raise ConfigError(f"{one.what} is {one.path!r}, which cannot be called as {call}: {error}") from None


def _wrong(one: UserCode, wanted: str, got: object) -> ConfigError:
    if inspect.iscoroutine(got):
        got.close()
        return ConfigError(f"{one.what} is {one.path!r}, a coroutine function: it must be a plain one")
    return ConfigError(f"{one.what} is {one.path!r}, which must return {wanted}, got {got!r:.80}")


def _try_loss(one: UserCode, config: Config) -> None:
    # Imported here: torch takes seconds, which only those who name a loss should pay.
    import torch

    from raypost.trainer.algorithm.losses import LossTokens

    old = torch.tensor([-0.1, -1.0, -2.0, -0.5, -0.3, -4.0])
    tokens = LossTokens(
        logprobs_T=(old * 0.9).requires_grad_(),
        entropy_T=old.neg().requires_grad_(),
        proximal_T=old,
        rollout_T=old,
        advantages_T=torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0]),
        rows_T=torch.tensor([0, 0, 0, 1, 1, 1]),
        num_rows=2,
        reference_T=old if config.train.needs_ref_logprobs else None,
    )
    loss = _loaded(one, tokens, config.train.loss)
    found = loss(tokens, config.train.loss)
    if (
        not isinstance(found, tuple)
        or len(found) != 2
        or not all(isinstance(part, torch.Tensor) for part in found)
    ):
        raise _wrong(one, "two tensors (loss_T, clipped_T)", found)
    loss_T, clipped_T = found
    if loss_T.shape != old.shape or not torch.isfinite(loss_T).all() or not loss_T.requires_grad:
        raise _wrong(one, f"a finite loss with a gradient for each of {len(old)} tokens", loss_T)
    if clipped_T.shape != old.shape or clipped_T.dtype != torch.bool:
        raise _wrong(one, f"a bool for each of {len(old)} tokens as clipped_T", clipped_T)


def _try_advantage(one: UserCode, config: Config) -> None:
    from raypost.trainer.algorithm.advantage import Scored, compute_advantages

    scored = Scored(
        rewards_N=np.asarray([0.0, 1.0, 0.5, 1.0, 1.0, 0.0]),
        lengths_N=np.asarray([2, 3, 1, 4, 2, 5]),
        group_sizes=[3, 3],
    )
    _loaded(one, scored, config.train.advantage)
    try:
        compute_advantages(scored, config.train.advantage)
    except ValueError as error:
        raise ConfigError(f"train.{error}") from None


def _try_task_weights(one: UserCode, config: Config) -> None:
    from raypost.production.allocation import Allocation

    function = _loaded(one, 1, {task.name: task.weight for task in config.tasks})
    for step in (1, config.train.num_steps):
        Allocation(config.tasks, config.train.batch_size, function)(step)


def _try_should_continue(one: UserCode, config: Config) -> None:
    found = _loaded(one, 0, 4)(0, 4)
    if not isinstance(found, bool | np.bool_):
        raise _wrong(one, "True or False", found)


def _try_is_valid(one: UserCode, config: Config) -> None:
    task = config.tasks[one.task]
    metadata = _first_metadata(task, config.seed)
    passed = []
    for rewards in ([0.0, 1.0], [1.0, 1.0], [0.0, 0.0], [0.3, 0.7]):
        states = [
            RolloutState(
                task=task.name,
                group_id=0,
                sample_index=member,
                prompt_ids=np.arange(4, dtype=np.int32),
                sample_params=SampleParams(max_tokens=task.max_tokens),
                metadata=dict(metadata),
                status=Status.COMPLETED,
                finish_reason="stop",
                response_text="a made-up response",
                reward=rewards[member % len(rewards)],
            )
            for member in range(task.group_size)
        ]
        for state in states:
            state.append_segment(np.arange(3, dtype=np.int32), -np.ones(3, np.float32), np.zeros(3, np.int32))
        group = Group(task=task.name, group_id=0, states=states)
        function = _loaded(one, group)
        try:
            found = function(group)
        # It may read what a made-up group does not have.
        except Exception as error:
            raise _Surprise(f"it raised {type(error).__name__} for a made-up group: {error}") from None
        if inspect.iscoroutine(found):
            raise _wrong(one, "True or False", found)
        passed.append(bool(found))
    if not any(passed):
        raise _Surprise(
            f"none of {len(passed)} made-up groups passed it; a run in which none does never trains"
        )


class _Hums:
    """Stands for a frozen model."""

    async def answer(self, message: str, max_tokens: int, temperature: float) -> str:
        return "hm"


def _try_environment(one: UserCode, config: Config) -> None:
    from raypost.agent_loop.episode import Episode, takes_seed

    task = config.tasks[one.task]
    given = dict(task.agent_loop.params) | ({"model": _Hums()} if task.agent_loop.reward_model else {})
    environment = _loaded(one, **given)(**given)
    for method in ("reset", "step"):
        if not callable(getattr(environment, method, None)):
            raise ConfigError(
                f"{one.what} is {one.path!r}, whose {type(environment).__name__} has no method {method}: an "
                "environment has reset(metadata) and step(action), which return an Observation"
            )
    seed = {"seed": 0} if takes_seed(environment) else {}
    _check_call(environment.reset, one, {}, **seed)
    _check_call(environment.step, one, "")

    async def reset() -> None:
        episode = Episode("trial", TRIAL_S)
        episode.environment = environment
        try:
            await episode.ask("reset", _first_metadata(task, config.seed), **seed)
        except Exception as error:
            raise ConfigError(
                f"{one.what} is {one.path!r}, whose reset failed for the task's first prompt: {error!r:.300}"
            ) from None
        finally:
            await episode.close()

    asyncio.run(reset())


def _first_metadata(task: TaskConfig, seed: int) -> dict[str, Any]:
    """Return the metadata of the task's first prompt. Raises ConfigError if the source cannot be read."""
    # Imported here, as what it imports itself: some sources take a second.
    from raypost.data.task_source import check_source

    return check_source(task, seed)[0].metadata


def _try_import(one: UserCode, config: Config) -> None:
    load_function(one.path, one.what)


TRIALS: dict[str, Callable[[UserCode, Config], None]] = {
    "loss": _try_loss,
    "advantage": _try_advantage,
    "task_weights": _try_task_weights,
    "should_continue": _try_should_continue,
    "is_valid": _try_is_valid,
    "environment": _try_environment,
    "import": _try_import,
}


if __name__ == "__main__":
    main()
