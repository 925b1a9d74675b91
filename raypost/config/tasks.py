"""The configuration of one task: its source, judge and strategy. Part of config.py's schema."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from raypost.config.resources import ConfigModel
from raypost.staleness import stale_threshold


class SourceConfig(ConfigModel):
    """Where prompts come from."""

    kind: Literal["reasoning_gym", "jsonl", "parquet", "hf_disk", "python"]
    dataset: str | Annotated[tuple[str, ...], Field(min_length=1)]
    """reasoning_gym: name of the dataset. jsonl, parquet: path or glob pattern of the files, or a list of them,
    read in that order. hf_disk: folder that a Hugging Face dataset's save_to_disk wrote. python:
    `module:function`, called with `params`, that returns a sequence of dicts, or an iterable of them without a
    length; whenever it is called, the same ones in the same order."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the reasoning-gym dataset or of the function; for hf_disk `split`, where it has several."""
    question_field: str = "prompt"
    """Field, or column, of the question."""
    answer_field: str = "answer"
    """Field, or column, of the answer; all others become metadata of the prompt."""
    size: Annotated[int, Field(ge=1)] | None = None
    """Problems in one epoch; later epochs repeat them in another order, those of an iterable without a length
    in the same one. null: all; 100,000 of reasoning-gym, which never end."""
    num_workers: Annotated[int, Field(ge=0)] = 0
    """Processes that read and tokenise prompts ahead; 0: the producer does so itself, when it needs one."""

    @model_validator(mode="after")
    def _options_fit_the_kind(self) -> SourceConfig:
        kind = self.kind
        if not isinstance(self.dataset, str) and kind not in ("jsonl", "parquet"):
            raise ValueError(
                f"dataset is a list of {len(self.dataset)}, which kind {kind!r} cannot have: name one, or use kind "
                "'jsonl' or 'parquet'"
            )
        if kind == "python" and not re.fullmatch(r"[\w.]+:[\w.]+", str(self.dataset)):
            raise ValueError(f"dataset {self.dataset!r} is no import path: write it as module:function")
        known = {"jsonl": set(), "parquet": set(), "hf_disk": {"split"}}.get(kind, set(self.params))
        if unknown := sorted(set(self.params) - known):
            raise ValueError(
                f"params has {', '.join(unknown)}, which kind {kind!r} does not use: "
                + ("it has split alone" if known else "leave params out")
            )
        if self.question_field == self.answer_field:
            raise ValueError(
                f"question_field and answer_field are both {self.question_field!r}: the answer would be in the prompt"
            )
        if kind == "reasoning_gym" and (self.question_field, self.answer_field) != ("prompt", "answer"):
            raise ValueError(
                f"kind 'reasoning_gym' has no fields {self.question_field!r} and {self.answer_field!r}: leave "
                "question_field and answer_field out"
            )
        return self


class StrategyConfig(ConfigModel):
    """How groups are scheduled. `sync` is `async` with max_staleness 0 and nothing sampled ahead."""

    kind: Literal["async", "sync"] = "async"
    admission: Literal["horizon", "capacity"] = "horizon"
    """horizon: production runs at most `max_staleness` ahead, and what still grew too old is expired. capacity:
    production is paced so that the mean staleness keeps the bound, and nothing is expired unless
    `hard_max_staleness` says so."""
    max_staleness: Annotated[int, Field(ge=0)] = 1
    """Sync periods, beyond the current one, that trained data may be old; 0: on-policy up to the interval."""
    hard_max_staleness: Annotated[int, Field(ge=0)] | None = None
    """With admission `capacity`: sync periods from which a group is expired after all; null: never."""
    max_token_staleness: Annotated[int, Field(ge=0)] | None = None
    """Sync periods, beyond the current one, that a single trained token may be old; older ones are masked when
    the batch is taken. null: no token is."""
    max_pending: Annotated[int, Field(ge=0)] = 0
    """Groups in flight at most; 0: no limit of their own."""
    over_sample_threshold: Annotated[float, Field(ge=0)] = 0.0
    """Groups started beyond a batch, as a fraction of it."""
    enable_partial_rollout: bool = True
    """Continue an interrupted trajectory from its tokens after a sync; otherwise it starts again."""
    tail_batch_trigger_size: Annotated[int, Field(ge=-1)] = 0
    """0: an expired group is generated again at once. N: N of them are collected first, for a round that
    generates them before anything else and samples nothing beyond the batch. -1: it is dropped."""
    tail_batch_max_tries: Annotated[int, Field(ge=1)] | None = None
    """Interruptions of one trajectory after which its group waits for the tail batch; null: no limit."""
    drop_uniform_rewards: bool = False
    """Filter groups whose rewards are all equal: they carry no group-relative advantage (DAPO)."""
    is_valid: str | None = None
    """`module:function` that is given a judged group and says whether it is trained; null: all are."""
    should_continue: str | None = None
    """`module:function` of (completed, target) groups that says whether a round goes on; only where
    production is called once a step, since it would starve a consumer that waits. null: completed < target."""

    @property
    def bound_periods(self) -> int | None:
        """Sync periods, beyond the current one, after which a group is expired; None: no group ever is."""
        if self.kind == "sync":
            return 0
        return self.hard_max_staleness if self.admission == "capacity" else self.max_staleness

    @property
    def bound_name(self) -> str:
        """The key that sets `bound_periods`."""
        return "hard_max_staleness" if self.admission == "capacity" else "max_staleness"

    def stale_threshold(self, sync_weights_interval: int) -> int | None:
        """Staleness in train steps from which a group is expired; None: no group ever is."""
        periods = self.bound_periods
        return None if periods is None else stale_threshold(periods, sync_weights_interval)


class JudgeConfig(ConfigModel):
    """How a response is scored."""

    kind: Literal["reasoning_gym", "exact", "reward_model"] = "reasoning_gym"
    """reasoning-gym's own scorer, equality with the answer after stripping spaces, or a reward model's score."""
    reward_model: str | None = None
    """With kind reward_model: which of `reward_models`."""
    answer_pattern: str | None = None
    """Regular expression whose last match's first group is the answer; the whole response when absent."""

    @model_validator(mode="after")
    def _reward_model_is_named(self) -> JudgeConfig:
        if self.kind != "reward_model":
            if self.reward_model is not None:
                raise ValueError(
                    f"reward_model {self.reward_model!r} is not used by kind {self.kind!r}: leave it out, or use "
                    "kind 'reward_model'"
                )
            return self
        if self.reward_model is None:
            raise ValueError("kind is 'reward_model', but reward_model is null: name one of reward_models")
        if self.answer_pattern is not None:
            raise ValueError(
                f"answer_pattern {self.answer_pattern!r} is not used by kind 'reward_model', which scores whole "
                "responses: leave it out"
            )
        return self

    @model_validator(mode="after")
    def _pattern_compiles(self) -> JudgeConfig:
        if self.answer_pattern is not None:
            try:
                groups = re.compile(self.answer_pattern).groups
            except re.error as error:
                raise ValueError(
                    f"answer_pattern {self.answer_pattern!r} is no regular expression: {error}"
                ) from None
            if groups < 1:
                raise ValueError(
                    f"answer_pattern {self.answer_pattern!r} needs a group: put the answer in (...)"
                )
        return self


class AgentLoopConfig(ConfigModel):
    """How a prompt becomes a trajectory."""

    kind: Literal["single_turn", "environment"] = "single_turn"
    """One response, scored by the judge; or turns with an environment, which gives the rewards."""
    environment: str | None = None
    """`module:function`, called with `params` for every trajectory, that returns an environment with
    `reset(metadata)` and `step(action)`."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Arguments of that function."""
    max_turns: Annotated[int, Field(ge=1)] = 16
    """Actions of a trajectory at most."""
    max_turn_tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens of one action at most; null: what is left of the task's max_tokens, which counts observations too."""
    step_timeout_s: Annotated[float, Field(gt=0)] = 60
    """Longest time an environment may take to answer."""

    @model_validator(mode="after")
    def _environment_is_named(self) -> AgentLoopConfig:
        if self.kind == "environment" and self.environment is None:
            raise ValueError("kind 'environment' needs `environment`: name its function as module:function")
        if self.kind == "single_turn" and self.environment is not None:
            raise ValueError(
                f"environment {self.environment!r} is not used by kind 'single_turn': use 'environment'"
            )
        return self


class TaskConfig(ConfigModel):
    """One weighted source of prompts with its own agent loop, judge and strategy."""

    name: str = "default"
    weight: Annotated[float, Field(ge=0)] = 1.0
    """Share of each batch, relative to the other tasks'."""
    weight_schedule: dict[Annotated[int, Field(ge=1)], Annotated[float, Field(ge=0)]] = Field(
        default_factory=dict
    )
    """Weight from a train step on, for instance {100: 0.5}; before the first entry `weight` holds."""
    source: SourceConfig
    agent_loop: AgentLoopConfig = AgentLoopConfig()
    judge: JudgeConfig = JudgeConfig()
    strategy: StrategyConfig = StrategyConfig()
    prompt_template: str = "{question}"
    """Text of a prompt; `{question}` is replaced."""
    chat: bool = False
    """Wrap the prompt in the tokenizer's chat template as one user message."""
    group_size: Annotated[int, Field(ge=1)] = 8
    """Trajectories a prompt."""
    max_prompt_tokens: Annotated[int, Field(ge=1)] = 64
    """A longer prompt is an error: it is never cut."""
    max_tokens: Annotated[int, Field(ge=1)] = 64
    """Tokens a response."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    """0 means all tokens."""

    @model_validator(mode="after")
    def _prompt_and_judge_fit(self) -> TaskConfig:
        if "{question}" not in self.prompt_template:
            raise ValueError(
                f"prompt_template {self.prompt_template!r} lacks {{question}}: no prompt would differ"
            )
        if self.judge.kind == "reasoning_gym" and self.source.kind != "reasoning_gym":
            raise ValueError(
                f"judge.kind is 'reasoning_gym', but source.kind is {self.source.kind!r}, which has no "
                "scorer: set judge.kind to 'exact'"
            )
        return self
