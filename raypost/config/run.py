"""Config: the whole configuration of a run; load.py reads it.

Owns the checks that need nothing but the configuration (ranges, products, intervals). What needs a cluster, a folder
or a model is checked in plan/. Derived values are properties.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from raypost.config.evaluation import EvalConfig
from raypost.config.judges import POLICY, JudgeConfig
from raypost.config.models import ModelConfig, RewardModelConfig
from raypost.config.resources import ConfigModel
from raypost.config.rollout import CPU_BLOCK, RolloutConfig
from raypost.config.sync import SyncConfig
from raypost.config.tasks import TaskConfig
from raypost.config.trackers import TrackerKind
from raypost.config.train import TrainConfig
from raypost.files.disk import Fsync
from raypost.types.pause import PauseMode

Device = Literal["cpu", "cuda"]


class BufferConfig(ConfigModel):
    """The replay buffer."""

    max_groups: Annotated[int, Field(ge=1)] | None = None
    """Groups in the buffer from which production starts only what the next batch lacks; null: no bound in groups."""
    max_gb: Annotated[float, Field(gt=0)] = 4.0
    """Size of the stored token arrays from which production starts only what the next batch lacks, GiB."""
    journal: bool = True
    """Write what is stored to the run folder too, so that nothing is lost when the buffer's process dies."""


class CheckpointConfig(ConfigModel):
    """When the whole run is saved, and what a new one begins with."""

    interval: Annotated[int, Field(ge=0)] = 0
    """Train steps between checkpoints; 0: by time, at the end and when the run is stopped."""
    every_s: Annotated[float, Field(gt=0)] | None = 60
    """Seconds after which the next sync writes a checkpoint too, wherever `interval` stands; at least 20 times what the
    last one took, so that writing takes a twentieth of the time at most. null: never by time."""
    fallback: bool = False
    """Continue from the checkpoint before where the newest is damaged; else such a run is refused."""
    retry_s: Annotated[float, Field(ge=0)] = 300
    """How long a run whose disk refuses to be written (full, a quota, read-only) tries again before it ends, seconds.
    Steps are trained meanwhile, until the next checkpoint is due or production stands still, since its journals are
    not written either. 0: it ends at once."""
    fsync: Fsync = "off"
    """When the journals of buffer and ledger, written between checkpoints, go to the disk itself. off: when the system
    does so; they survive the death of a process. interval: once a second. every: with each write; they survive the
    machine."""
    start_from: Path | None = None
    """A checkpoint of another run (`RUN/checkpoints/step-N`) with whose weights a new run begins; the model must be the
    same. Data, steps and buffer begin anew, and a reference stays the model's folder. The command's `--from`."""
    start_optimizer: bool = False
    """Take the optimizer's moments from there too. The command's `--from-optimizer`."""
    keep: Annotated[int, Field(ge=1)] = 2
    """Number of newest checkpoints that are kept."""
    keep_best: bool = True
    """Keep the checkpoint with the best held-out score too, whatever its age."""
    hf: bool = True
    """Write the model as a Hugging Face folder into each checkpoint."""


class FaultsConfig(ConfigModel):
    """When a role that dies again and again ends the run."""

    max_failures: Annotated[int, Field(ge=0)] = 3
    """Failures of one role within `window_s` after which it is brought back; the next one ends the run. 0: the first
    does."""
    window_s: Annotated[float, Field(gt=0)] = 600
    """Time in which the failures of a role are counted, seconds."""


class Config(ConfigModel):
    """One run."""

    name: str = "run"
    """Name of the run folder below `runs_dir`."""
    runs_dir: Path = Path("runs")
    """Folder of all run folders."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of everything random: the order of prompts, sampling, new weights."""
    device: Device = "cpu"
    """Where engines and trainer ranks compute."""
    placement: Literal["separate", "colocate"] = "separate"
    """separate: engines and trainer ranks have their own devices and work at the same time (jobs/train.py). colocate:
    they share devices and take turns (jobs/colocate.py)."""
    autoscaling: bool = False
    """Whether the cluster adds nodes on demand: a run then waits for what the cluster lacks instead of being
    refused."""
    model: ModelConfig
    """The model that is trained."""
    tasks: Annotated[tuple[TaskConfig, ...], Field(min_length=1)]
    """Sources of prompts, with what is made of them; each batch has its share of each."""
    rollout: RolloutConfig = RolloutConfig()
    """The engines that generate."""
    train: TrainConfig
    """The trainer and its algorithm."""
    task_weights: str | None = None
    """`module:function` that is given a train step and the tasks' weights, and returns those of that step's batch;
    null: the tasks' own."""
    buffer: BufferConfig = BufferConfig()
    """The replay buffer between production and training."""
    reward_models: tuple[RewardModelConfig, ...] = ()
    """Models that score responses, for the tasks that name them."""
    sync: SyncConfig = SyncConfig()
    """When and how weights go from the trainer to the engines."""
    eval: EvalConfig = EvalConfig()
    """Evaluation on held-out prompts."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When the run is saved, and what is kept."""
    faults: FaultsConfig = FaultsConfig()
    """How often a role that dies is brought back within the run."""
    keep_samples: Annotated[int, Field(ge=0, le=1000)] = 2
    """Groups of each batch whose trajectories are kept for looking at (`raypost samples`); 0: none."""
    stall_s: Annotated[float, Field(gt=0)] = 120
    """Seconds of waiting, or of silence of one of its processes, after which a run writes what it waits for into
    `doctor-<time>.txt`, as `raypost doctor` shows it; at least three times what the same wait has taken before."""
    trackers: tuple[TrackerKind, ...] = ("tensorboard",)
    """Where metrics go beside the run folder's own files: tensorboard and mlflow in the run folder, wandb, trackio.
    All but tensorboard are extras of the package: `pip install 'raypost[wandb]'`."""

    @property
    def run_dir(self) -> Path:
        """Folder of this run's files."""
        return self.runs_dir.expanduser() / self.name

    @property
    def job(self) -> str:
        """Module of jobs/ that composes this placement."""
        return "colocate" if self.placement == "colocate" else "train"

    @property
    def max_model_len(self) -> int:
        """Longest prompt and response together, tokens."""
        return max(task.max_prompt_tokens + task.max_tokens for task in self.tasks)

    @property
    def policy_judges(self) -> list[JudgeConfig]:
        """Judges that ask the policy itself."""
        judges = (judge for task in self.tasks for _, judge in task.judge.every())
        return [one for one in judges if one.context_tokens is not None]

    @property
    def engine_model_len(self) -> int:
        """Longest sequence of the policy's engines, tokens: of a trajectory, or of what a judge asks the policy."""
        return max(self.max_model_len, *(judge.context_tokens or 0 for judge in self.policy_judges), 0)

    @property
    def staleness_bound(self) -> int:
        """Largest staleness, in train steps, at which a group of any task may be trained."""
        interval = self.sync.sync_weights_interval
        return max(task.strategy.stale_threshold(interval) for task in self.tasks) - 1

    @property
    def generates_in_turn(self) -> bool:
        """Whether nothing is generated while a batch is trained: it would be too old, or has no devices."""
        return self.placement == "colocate" or self.staleness_bound == 0

    @property
    def publish_timeout_s(self) -> float:
        """Longest time until a version is published and brought to the engines."""
        return self.train.step_timeout_s + self.sync.timeout_s

    @property
    def take_timeout_s(self) -> float:
        """Longest time a batch may take to collect: a generation, and an engine's restart before it."""
        return self.rollout.request_timeout_s + self.rollout.start_timeout_s

    def sync_due(self, step: int) -> bool:
        """Return whether weights are synced after `step`; always after the last."""
        return step % self.sync.sync_weights_interval == 0 or step >= self.train.num_steps

    def save_due(self, step: int) -> bool:
        """Return whether a checkpoint is written after `step`; always after the last."""
        every = self.checkpoint.interval
        return step > 0 and (step >= self.train.num_steps or (every > 0 and step % every == 0))

    def eval_due(self, step: int) -> bool:
        """Return whether held-out problems are evaluated after `step`; always after the last."""
        if self.eval.num_prompts == 0:
            return False
        return step >= self.train.num_steps or (self.eval.interval > 0 and step % self.eval.interval == 0)

    @property
    def num_agent_loops(self) -> int:
        """Agent-loop actors: evaluation on engines of its own has one of its own too."""
        return self.rollout.agent_workers + (self.eval.pool is not None)

    def sharing(self, task: TaskConfig) -> list[TaskConfig]:
        """Return the tasks that have `max_concurrent` together with this one, which is among them; else none."""
        name = task.agent_loop.max_concurrent_of
        return [one for one in self.tasks if name is not None and one.agent_loop.max_concurrent_of == name]

    def evaluated_at_once(self, task: TaskConfig) -> int:
        """Return how many groups of a task an evaluation starts at once: no more than can play."""
        most = task.agent_loop.max_concurrent
        if most is None:
            return max(1, self.eval.num_prompts)
        playing = most // self.num_agent_loops if self.eval.pool is not None else most
        return max(1, playing // self.eval.samples)

    @property
    def eval_timeout_s(self) -> float:
        """Longest time that an evaluation may take: that of a round, as often as its slowest task needs."""
        at_once = map(self.evaluated_at_once, self.tasks)
        return self.eval.timeout_s * max(-(-max(1, self.eval.num_prompts) // groups) for groups in at_once)

    def pause_mode(self, step: int, *, saving: bool = False) -> PauseMode:
        """Return how production is paused after `step`: "keep" only where what is frozen can stay, and go on.

        `saving`: whether a checkpoint follows.
        """
        taken = self.placement == "colocate" or (self.eval_due(step) and self.eval.pool is None)
        leaves = saving or self.save_due(step) or taken or not all(t.strategy.continues for t in self.tasks)
        return "abort" if leaves and self.sync.pause_mode == "keep" else self.sync.pause_mode

    def evaluated(self, task: TaskConfig) -> TaskConfig | None:
        """Return the task with the source that evaluates it; None if that is what its own holds out."""
        source = self.eval.source
        if source is None or self.eval.task not in (None, task.name):
            return None
        return task.model_copy(update={"source": source.model_copy(update={"hold_out": False})})

    @model_validator(mode="before")
    @classmethod
    def _train_on_all(cls, data: Any) -> Any:
        """Hold nothing out of a task that has evaluation problems of its own, unless the configuration says so."""
        options, tasks = (data.get("eval"), data.get("tasks")) if isinstance(data, dict) else (None, None)
        if not (isinstance(options, dict) and options.get("source") and isinstance(tasks, list | tuple)):
            return data

        def trained(task: Any) -> Any:
            names = (None, task.get("name", "default")) if isinstance(task, dict) else ()
            if options.get("task") not in names or not isinstance(task.get("source"), dict):
                return task
            return {**task, "source": {"hold_out": False, **task["source"]}}

        return {**data, "tasks": [trained(task) for task in tasks]}

    @model_validator(mode="after")
    def _parts_agree(self) -> Config:
        problems = [
            *self._name_problems(),
            *self._eval_problems(),
            *self._interval_problems(),
            *self._batch_problems(),
            *self._block_problems(),
        ]
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _block_problems(self) -> list[str]:
        own = self.rollout.block_size
        if self.device == "cpu" and own is not None and own % CPU_BLOCK:
            return [f"rollout.block_size is {own}, and on CPU engines take multiples of {CPU_BLOCK}: use one"]
        return []

    def _name_problems(self) -> list[str]:
        problems = []
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", self.name):
            problems.append(
                f"name {self.name!r} must be 1 to 64 letters, digits, '.', '_' or '-', starting with one"
            )
        names = [task.name for task in self.tasks]
        if len(set(names)) != len(names):
            problems.append(f"tasks need different names, got {names}: rename one")
        if sum(task.weight for task in self.tasks) <= 0:
            problems.append("the tasks' weights sum to 0: give at least one task a positive weight")
        return problems + self._turn_problems() + self._reward_model_problems()

    def _turn_problems(self) -> list[str]:
        problems = []
        for task in self.tasks:
            most = [one.agent_loop.max_concurrent for one in self.sharing(task)]
            if most and len({*most, task.agent_loop.max_concurrent}) > 1:
                problems.append(
                    f"task {task.name!r}: agent_loop.max_concurrent is {task.agent_loop.max_concurrent}, but the tasks "
                    f"with max_concurrent_of {task.agent_loop.max_concurrent_of!r} have {most}: give all the same"
                )
        return problems[:1]

    def _eval_problems(self) -> list[str]:
        options, names, problems = self.eval, [task.name for task in self.tasks], []
        if options.task is not None and (options.source is None or options.task not in names):
            fix = "set eval.source, or leave it out" if options.source is None else f"name one of {names}"
            problems.append(f"eval.task is {options.task!r}, which needs eval.source and a task: {fix}")
        if options.source is not None and options.task is None and len(names) > 1:
            problems.append(f"eval.source evaluates one task, and there are {names}: name it by eval.task")
        for task in self.tasks:
            judged = {judge.kind for _, judge in task.judge.every()} if self.evaluated(task) else set()
            if options.source and options.source.kind != "reasoning_gym" and "reasoning_gym" in judged:
                problems.append(
                    f"task {task.name!r}: judge.kind is 'reasoning_gym', but eval.source.kind is "
                    f"{options.source.kind!r}, which has no scorer: use eval.source.kind 'reasoning_gym'"
                )
            if options.num_prompts and not task.source.hold_out and self.evaluated(task) is None:
                problems.append(
                    f"task {task.name!r}: source.hold_out is false, so there is nothing to evaluate it on: set "
                    "eval.source, or eval.num_prompts: 0"
                )
        return problems

    def _reward_model_problems(self) -> list[str]:
        problems = []
        models = [model.name for model in self.reward_models]
        if POLICY in models:
            problems.append(
                f"reward_models has {POLICY!r}, which stands for the model that is trained: rename it"
            )
        named = [
            (
                f"task {task.name!r}: {place}",
                judge.reward_model,
                judge.kind == "generative",
                f"the judge's kind is {judge.kind}",
            )
            for task in self.tasks
            for place, judge in task.judge.every()
            if judge.reward_model and judge.context_tokens is None
        ]
        named += [
            (f"task {task.name!r}: agent_loop", name, True, "an environment asks it")
            for task in self.tasks
            if (name := task.agent_loop.reward_model)
        ]
        if len(set(models)) != len(models):
            problems.append(f"reward_models need different names, got {models}: rename one")
        problems += [
            f"{place}.reward_model is {name!r}, but reward_models has {models}: name one of these"
            for place, name, *_ in named
            if name not in models
        ]
        generates = {model.name: model.generates for model in self.reward_models}
        problems += [
            f"{place}.reward_model is {name!r}, whose generates is {str(generates[name]).lower()}, but "
            f"{use}: change one of them"
            for place, name, speaks, use in named
            if generates.get(name, speaks) != speaks
        ]
        problems += [
            f"reward_models has {name!r}, which no task's judge.reward_model or agent_loop.reward_model names: "
            "remove it"
            for name in models
            if name not in {one for _, one, *_ in named}
        ]
        return problems

    def _interval_problems(self) -> list[str]:
        sync, problems = self.sync.sync_weights_interval, []
        for name in ("eval", "checkpoint"):
            value = getattr(self, name).interval
            if value % sync:
                problems.append(
                    f"{name}.interval is {value}, no multiple of sync.sync_weights_interval {sync}: it runs "
                    f"in the pause of a sync; use {max(sync, round(value / sync) * sync)}"
                )
        return problems

    def _batch_problems(self) -> list[str]:
        ranks, problems = self.train.num_workers, []
        per_step = self.train.batch_size
        if per_step % ranks:
            problems.append(
                f"train.batch_size is {per_step} groups, not divisible by train.num_workers {ranks}: use "
                f"{(per_step // ranks + 1) * ranks}"
            )
        if per_step % self.train.num_minibatches:
            problems.append(
                f"train.batch_size is {per_step} groups, not divisible by train.num_minibatches "
                f"{self.train.num_minibatches}: use a divisor of {per_step}"
            )
        for task in self.tasks:
            advantage = self.train.advantage
            if task.group_size < advantage.smallest_group:
                problems.append(
                    f"task {task.name!r}: group_size is {task.group_size}, but the advantage {advantage.kind!r} "
                    f"compares a group's members: use {advantage.smallest_group} or more"
                )
            smallest = task.strategy.min_group_size
            if smallest is not None and not advantage.smallest_group <= smallest <= task.group_size:
                problems.append(
                    f"task {task.name!r}: strategy.min_group_size is {smallest}, but the advantage "
                    f"{advantage.kind!r} and group_size {task.group_size} allow {advantage.smallest_group} to "
                    f"{task.group_size}"
                )
            if advantage.overlong_buffer > task.max_tokens:
                problems.append(
                    f"task {task.name!r}: max_tokens is {task.max_tokens}, less than "
                    f"train.advantage.overlong_buffer {advantage.overlong_buffer}: use a smaller buffer"
                )
        if self.train.micro_batch_tokens < self.max_model_len:
            problems.append(
                f"train.micro_batch_tokens is {self.train.micro_batch_tokens}, but one trajectory may have "
                f"{self.max_model_len} tokens (max_prompt_tokens + max_tokens): use at least that"
            )
        return problems
