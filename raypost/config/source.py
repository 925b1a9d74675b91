"""The configuration of a source of prompts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from raypost.config.resources import ConfigModel


class SourceConfig(ConfigModel):
    """Where prompts come from."""

    kind: Literal["reasoning_gym", "jsonl", "parquet", "hf_disk", "python"]
    """What `dataset` names: a dataset of reasoning-gym, files of rows, a Hugging Face dataset on disk, or a
    function."""
    dataset: str | Annotated[tuple[str, ...], Field(min_length=1)]
    """reasoning_gym: name of the dataset. jsonl, parquet: path or glob pattern of the files, or a list of them, read in
    that order. hf_disk: folder that a Hugging Face dataset's save_to_disk wrote. python: `module:function`, called
    with `params`, that returns a sequence of dicts, or an iterable of them without a length; each call must give the
    same ones in the same order."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the reasoning-gym dataset or of the function; for hf_disk `split`, if it has several."""
    question_field: str = "prompt"
    """Name of the field, or column, that holds the question."""
    messages_field: str | None = None
    """Name of the field that holds a conversation instead: a list of messages, each with `role` and `content`, a text.
    It is rendered by the chat template. null: `question_field` holds one question."""
    answer_field: str | None = "answer"
    """Name of the field that holds the answer; all others become metadata of the prompt. A row may lack the field
    `answer` where the judge compares with none. null: the data has no answers."""
    ignore_fields: tuple[str, ...] = ()
    """Fields that do not become metadata."""
    size: Annotated[int, Field(ge=1)] | None = None
    """Problems in one epoch; later epochs repeat them in another order, or in the same order if `dataset` is an
    iterable without a length. null: all, and 100,000 of reasoning-gym, which has no end."""
    index_dir: Path | None = Path("~/.cache/raypost/index")
    """Folder that keeps what was found out about a source: where the rows of jsonl files are, and how long the prompts
    are in a model's tokens. What did not change is then read whole once, and not at every start. null keeps nothing."""
    hold_out: bool = True
    """Keep one question in ten, chosen by its text alone, from training, for evaluation. Where nothing else is said it
    is false for a task that `eval.source` evaluates."""
    num_workers: Annotated[int, Field(ge=0)] = 0
    """Processes that read and tokenise prompts ahead; 0: the producer does so itself when it needs one."""

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
        return self

    @model_validator(mode="after")
    def _fields_fit(self) -> SourceConfig:
        if self.prompt_field == self.answer_field:
            option = "question_field" if self.messages_field is None else "messages_field"
            raise ValueError(
                f"{option} and answer_field are both {self.answer_field!r}: the answer would be in the prompt"
            )
        if self.messages_field is not None and self.question_field not in ("prompt", self.messages_field):
            raise ValueError(
                f"question_field is {self.question_field!r} beside messages_field {self.messages_field!r}: a prompt is "
                "one question or a conversation, so leave one of them out"
            )
        if self.kind == "reasoning_gym" and (
            (self.question_field, self.answer_field) != ("prompt", "answer")
            or self.messages_field is not None
            or self.ignore_fields
        ):
            raise ValueError(
                f"kind 'reasoning_gym' has no fields, neither {self.prompt_field!r} nor {self.answer_field!r}: leave "
                "question_field, messages_field, answer_field and ignore_fields out"
            )
        if taken := {self.prompt_field, self.answer_field} & set(self.ignore_fields):
            raise ValueError(
                f"ignore_fields has {sorted(map(str, taken))}, which the prompt is made of: remove it"
            )
        return self

    @property
    def prompt_field(self) -> str:
        """Name of the field that a prompt is made of."""
        return self.question_field if self.messages_field is None else self.messages_field
