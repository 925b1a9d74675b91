"""The configuration of one task: its source, judge and strategy. Part of config.py's schema."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class ConfigModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class SourceConfig(ConfigModel):
    """Where prompts come from."""

    kind: Literal["reasoning_gym", "jsonl"]
    dataset: str
    """Name of the reasoning-gym dataset, or path of a JSONL file ({"prompt": ..., "answer": ...} a line)."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the reasoning-gym dataset."""
    size: Annotated[int, Field(ge=1)] = 100_000
    """Problems in one epoch; later epochs repeat them in another order."""


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


class JudgeConfig(ConfigModel):
    """How a response is scored."""

    kind: Literal["reasoning_gym", "exact"] = "reasoning_gym"
    """reasoning-gym's own scorer, or equality with the answer after stripping spaces."""
    answer_pattern: str | None = None
    """Regular expression whose last match's first group is the answer; the whole response when absent."""

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
