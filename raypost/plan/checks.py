"""Checks of a configuration against its model, its data and its run folder.

Each function gives all problems it finds, each with the value, the bound and the fix; none raises, or starts anything
that outlives it. None takes longer than about a second, but the first look at a large source, and a reward function.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path

from raypost.checkpoint import CHECKPOINTS
from raypost.config import Config, ModelConfig, TaskConfig, load_config
from raypost.config.identity import changed_settings, differences, run_identity
from raypost.data.gym import gym_factory
from raypost.data.prompt import Prompt
from raypost.data.task_source import check_source, evaluation_prompts
from raypost.data.tokenizer import Tokenizer
from raypost.errors import ConfigError
from raypost.files.owner import OF_NO_RUN, REPORTS, owner
from raypost.judges.code import try_code
from raypost.judges.reward_model import check_language_model, check_reward_model
from raypost.judges.trial import try_judges
from raypost.models import tiny
from raypost.models.resolve import SMOLLM2, TINY, check_model
from raypost.models.tensor_files import read_shapes
from raypost.plan.loops import loop_problems
from raypost.plan.models import problem
from raypost.plan.prompts import Surveys, known_tokenizer, length_problems
from raypost.report.damage import damage
from raypost.trainer.batch.sft import check_examples

CONFIG_FILE = "config.yaml"
"""The resolved configuration in a run folder; it tells which run the folder holds."""

NUM_TRIAL_PROMPTS = 3
"""Prompts that a reward function is tried on before a run."""

PROMPT_CHECK_S = 0.3
"""How long prompts of a task are tokenised before a run starts, at most."""


def composition_problems(config: Config) -> Iterator[str]:
    """Check what the placement can do, and the models beside the policy: critic, reference, reward models."""
    if config.placement == "colocate":
        yield from _colocate_problems(config)
    if config.sync.transport == "nccl":
        yield from _nccl_problems(config)
    yield from _reward_model_problems(config)
    if config.train.loss.kl.pool is not None:
        yield from _reference_problems(config)
    critic = config.train.critic
    if critic is not None and critic.name is not None:
        yield from problem(check_model, ModelConfig(name=critic.name))
    if critic is not None and config.train.batch_size % critic.num_workers:
        yield (
            f"train.batch_size is {config.train.batch_size} groups, not divisible by train.critic.num_workers "
            f"{critic.num_workers}: use a divisor of {config.train.batch_size}"
        )


def _nccl_problems(config: Config) -> Iterator[str]:
    if config.device == "cpu":
        yield "sync.transport is nccl, but device is cpu: use gloo, object_store or auto"
    elif config.placement == "colocate":
        yield (
            "sync.transport is nccl, but placement is colocate, where ranks and engines share GPUs, which NCCL does "
            "not connect: use object_store or auto"
        )


def _reward_model_problems(config: Config) -> Iterator[str]:
    """Check that reward models exist, can score, and are asked."""
    for task in config.tasks:
        for place, judge in task.judge.every():
            named = {
                "reward_model": judge.reward_model,
                "function": judge.function,
                "http": judge.url,
                "generative": judge.reward_model,
            }.get(judge.kind)
            if named is not None and task.agent_loop.kind == "environment":
                yield (
                    f"task {task.name!r}: {place}.{judge.kind} is {named!r}, but agent_loop.kind is environment, which "
                    "gives the rewards itself and asks no judge: leave the judge out, or use single_turn"
                )
    for model in config.reward_models:
        folder = Path(model.model).expanduser()
        if model.model in (TINY, SMOLLM2) and not model.generates:
            yield (
                f"reward_models {model.name!r}: {model.model} is a language model, which gives no score: use a "
                "sequence classifier with one output"
            )
        elif folder.is_dir():
            check = check_language_model if model.generates else check_reward_model
            yield from problem(check, model, folder) or problem(read_shapes, folder)
        else:
            yield from problem(check_model, ModelConfig(name=model.model))


def _reference_problems(config: Config) -> Iterator[str]:
    """Check that engines of a reference can compute its logprobs."""
    for task in config.tasks:
        sampling = (task.temperature, task.top_p, task.top_k, task.min_tokens)
        if sampling != (1.0, 1.0, 0, 0):
            yield (
                f"task {task.name!r}: temperature, top_p, top_k and min_tokens are {sampling}, but engines compute a "
                "reference's logprobs at 1, 1, 0 and 0 only: use those, or leave out train.loss.kl.pool, so that the "
                "ranks compute"
            )


def _colocate_problems(config: Config) -> Iterator[str]:
    rollout, train = config.rollout, config.train
    if rollout.autoscale is not None:
        yield (
            f"placement is colocate, where each engine shares a rank's device, but rollout.autoscale.max is "
            f"{rollout.autoscale.max}: remove rollout.autoscale, or use placement: separate"
        )
    if rollout.labels:
        yield "placement is colocate, where engines are on the ranks' nodes: set train.labels instead of rollout.labels"
    if rollout.reserve:
        yield (
            f"placement is colocate, where engines and ranks are reserved together, but rollout.reserve is "
            f"{rollout.reserve}: remove it, or use placement: separate"
        )
    if rollout.standby:
        yield (
            f"placement is colocate, where engines share the ranks' devices, but rollout.standby is {rollout.standby}: "
            "set it to 0, or use placement: separate"
        )
    if rollout.pools:
        names = ", ".join(pool.name for pool in rollout.pools)
        yield (
            f"placement is colocate, where engines share the ranks' devices, but rollout.pools has {names}: remove "
            "them, or use placement: separate"
        )
    if config.eval.pool is not None:
        yield (
            f"placement is colocate, where evaluation uses production's engines, but eval.pool is "
            f"{config.eval.pool.name!r}: remove it, or use placement: separate"
        )
    if config.device == "cpu":
        return
    if rollout.tensor_parallel_size > 1:
        yield (
            f"rollout.tensor_parallel_size is {rollout.tensor_parallel_size}, but a colocated engine shares one GPU "
            "with one rank: use 1, or placement: separate"
        )
    ranks = {"rollout.num_workers": rollout.num_workers, "train.num_workers": train.num_workers}
    if train.critic is not None:
        ranks["train.critic.num_workers"] = train.critic.num_workers
    if len(set(ranks.values())) > 1:
        numbers = ", ".join(f"{name} {number}" for name, number in ranks.items())
        yield f"placement is colocate, one engine and one rank a GPU, but {numbers}: use equal numbers"


def source_problems(
    config: Config, *, tried: bool = False, offline: bool = False, surveys: Surveys | None = None
) -> Iterator[str]:
    """Check that sources exist, are well-formed, and give prompts that are not too long; try the judges.

    `tried`: they were tried already. `offline`: no service is asked. What was found in the sources is entered into
    `surveys`.
    """
    tokenizer = known_tokenizer(config)
    seen: Surveys = {} if surveys is None else surveys
    if (sft := config.train.sft) is not None:
        yield from problem(check_examples, sft, tokenizer, config.max_model_len, PROMPT_CHECK_S)
    for task in config.tasks:
        try:
            yield from (
                _unknown_gym_names(task)
                or _prompt_problems(task, config, tokenizer, seen)
                or _unreadable(task, config)
                or ([] if tried else list(_trials(task, config, tokenizer, offline)))
            )
        except ConfigError as error:
            yield str(error)


def _trials(task: TaskConfig, config: Config, tokenizer: Tokenizer | None, offline: bool) -> Iterator[str]:
    """Try what is the user's own: agent loop, environment, judges."""
    yield from loop_problems(task, config, tokenizer)
    yield from _judge_problems(task, config, offline)
    yield from _code_problems(task, config)


def _judge_problems(task: TaskConfig, config: Config, offline: bool) -> Iterator[str]:
    """Check that the task's functions and services score the first prompts."""
    tried = any(judge.kind in ("function", "math", "http") for _, judge in task.judge.every())
    if (tried or task.judge.combine == "function") and task.agent_loop.kind != "environment":
        yield from try_judges(task, _trial_prompts(task, config), offline=offline)


def _trial_prompts(task: TaskConfig, config: Config) -> list[Prompt]:
    return check_source(task, config.seed, known_tokenizer(config))[:NUM_TRIAL_PROMPTS]


def _code_problems(task: TaskConfig, config: Config) -> Iterator[str]:
    """Check that there is a sandbox, that the first prompts have tests, and that those of some of them can be run."""
    judges = [(place, judge) for place, judge in task.judge.every() if judge.kind == "code"]
    if not judges or task.agent_loop.kind == "environment":
        return
    prompts = check_source(task, config.seed, known_tokenizer(config))
    for place, judge in judges:
        if (problem := try_code(judge, prompts, NUM_TRIAL_PROMPTS)) is not None:
            yield f"task {task.name!r}: {place}.kind is 'code': {problem}"


def _unreadable(task: TaskConfig, config: Config) -> list[str]:
    """Check that the model `tiny`, if that is trained, has words for the source's text."""
    if config.model.name != TINY:
        return []
    corpus = tiny.CORPORA[tiny.TinyRecipe.from_options(config.model.options).corpus]
    for one in filter(None, (task, config.evaluated(task))):
        unread = [p for p in check_source(one, config.seed) if not corpus.readable.fullmatch(p.text)]
        if unread:
            return [
                f"task {task.name!r}: the model {TINY!r} can read nothing but {corpus.about}, and the source "
                f"{one.source.dataset!r} has the prompt {unread[0].text!r:.80}: use such prompts, or another model"
            ]
    return []


def _own_prompts(task: TaskConfig, config: Config) -> list[Prompt]:
    """Return the first prompts of the source that evaluates the task, if there is one."""
    own = config.evaluated(task)
    return check_source(own, config.seed) if own is not None else []


def _unknown_gym_names(task: TaskConfig) -> list[str]:
    """Check that reasoning-gym has the dataset and its parameters; if not, name what it has."""
    source = task.source
    if source.kind != "reasoning_gym":
        return []
    datasets = gym_factory().DATASETS
    if source.dataset not in datasets:
        near = get_close_matches(source.dataset, datasets, n=3)
        fix = f"did you mean {' or '.join(near)}?" if near else "its names are in its gallery"
        return [f"task {task.name!r}: reasoning-gym has no dataset {source.dataset!r}: {fix}"]
    fields = dataclasses.fields(datasets[source.dataset][1])
    known = [field.name for field in fields if field.name not in ("seed", "size")]
    unknown = [name for name in source.params if name not in known]
    if unknown:
        return [
            f"task {task.name!r}: reasoning-gym's {source.dataset} has no parameter {', '.join(unknown)}: "
            f"it has {', '.join(known)}"
        ]
    return []


def _prompt_problems(
    task: TaskConfig, config: Config, tokenizer: Tokenizer | None, found: Surveys
) -> list[str]:
    """Check that the source gives prompts, held-out ones too, and that all of them fit."""
    problems = length_problems(task, config, tokenizer, found)
    if not problems:
        check_source(task, config.seed, tokenizer)
        _own_prompts(task, config)
        if config.eval.num_prompts and task.source.kind != "reasoning_gym":
            evaluation_prompts(config, task, 1, tokenizer)
    return problems


def run_dir_problems(config: Config) -> list[str]:
    """Check that the run's files can be written, over nothing but this run's own."""
    run_dir = config.run_dir
    if (system := run_dir.absolute().parts[1:2]) and system[0] in ("proc", "sys", "dev"):
        return [f"run folder {run_dir} lies in /{system[0]}, which keeps no files: choose another runs_dir="]
    existing = next(folder for folder in (run_dir, *run_dir.parents) if folder.exists())
    if not existing.is_dir():
        return [
            f"run folder {run_dir} cannot be made: {existing} is a file; choose another runs_dir= or name="
        ]
    if not os.access(existing, os.W_OK | os.X_OK):
        return [
            f"run folder {run_dir} cannot be written: no permission in {existing}; choose another runs_dir="
        ]
    file = run_dir / CONFIG_FILE
    fix = f"choose another name=, or delete {run_dir}"
    if (living := owner(run_dir)) is not None:
        return [f"run folder {run_dir} belongs to {living}: wait for it, stop it, or choose another name="]
    if damaged := damage(run_dir):
        return damaged
    if file.exists():
        try:
            before = load_config(file)
        except ConfigError as error:
            return [
                f"run folder {run_dir} holds a run whose {CONFIG_FILE} cannot be read ({error}): {_unread(run_dir)}"
            ]
        different = differences(run_identity(before), run_identity(config))
        if different:
            return [f"run folder {run_dir} holds another run ({'; '.join(different[:4])}): {fix}"]
    elif existing == run_dir and not _has_checkpoint(run_dir):
        named = {path.name for path in run_dir.iterdir() if not path.match(REPORTS)}
        others = sorted(named - OF_NO_RUN)
        return (
            [f"run folder {run_dir} holds files of no run ({', '.join(others[:4])}): {fix}"] if others else []
        )
    return []


def _has_checkpoint(run_dir: Path) -> bool:
    return any(run_dir.glob(f"{CHECKPOINTS}/step-*"))


def _unread(run_dir: Path) -> str:
    """Return the way on for a run whose configuration cannot be read."""
    if _has_checkpoint(run_dir):
        return "remove that file; the run's checkpoints tell whether the configuration is their own"
    return f"it has no checkpoint: choose another name=, or delete {run_dir}"


def continued_with(config: Config) -> Iterator[str]:
    """Yield how the run in the folder goes on with other settings than it had."""
    file = config.run_dir / CONFIG_FILE
    if file.exists():
        for change in changed_settings(load_config(file), config):
            yield f"the run continues with another setting: {change}"
