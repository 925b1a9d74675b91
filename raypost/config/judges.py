"""The configuration of a judge: what scores a response, and how several do so together."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, model_validator

from raypost.config.embedded import read_text
from raypost.config.resources import ConfigModel


class JudgeConfig(ConfigModel):
    """How a response is scored."""

    kind: Literal["reasoning_gym", "exact", "math", "function", "reward_model", "composed"] = "reasoning_gym"
    """What scores a response: reasoning-gym's own scorer, equality with the answer (spaces around both are ignored) or
    with its meaning as mathematics, a function of yours, a reward model, or several of these together."""
    reward_model: str | None = None
    """Name of one of `reward_models`, with kind reward_model."""
    answer_pattern: str | None = None
    """Regular expression that finds the answer in a response: the first group of its last match. null: the answer is
    the whole response."""
    function: str | None = None
    """With kind function: `reward.py:score`, a file and a function in it, relative to the configuration's folder or
    absolute, or `module:function` of a module that is installed or lies in the job's working directory."""
    function_source: str | None = None
    """Text of that file. It is read when the configuration is loaded, so that judges on other nodes have it, and so
    that the run folder says what the run was rewarded for. null: the function is in a module."""
    timeout_s: Annotated[float, Field(gt=0)] = 30
    """Longest time that the function, or kind math, may take for one call, seconds. After it its process is ended."""
    parts: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,40}$")], PartConfig] = Field(
        default_factory=dict
    )
    """With kind composed: judges by name. Each is in the metrics under its name."""
    combine: Literal["sum", "product", "min"] = "sum"
    """How the parts' scores, each times its weight, become one reward: their sum, product or minimum."""

    @model_validator(mode="before")
    @classmethod
    def _read_function(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, dict) or data.get("function_source") is not None:
            return data
        file = function_file(data.get("function"))
        if file is None or data.get("kind") != "function":
            return data
        folder = Path((info.context or {}).get("folder", "."))
        what, instead = (
            f"function {data['function']!r}",
            "put it into a module, and name that as module:function",
        )
        return {**data, "function_source": read_text(folder / Path(file).expanduser(), what, instead)}

    @model_validator(mode="after")
    def _options_fit_the_kind(self) -> JudgeConfig:
        for kind, names in _JUDGE_OPTIONS.items():
            for name in names:
                field, value = type(self).model_fields[name], getattr(self, name)
                shared = name in _JUDGE_OPTIONS.get(self.kind, ())
                if not shared and value != field.get_default(call_default_factory=True, validated_data={}):
                    raise ValueError(
                        f"{name} {value!r:.80} is not used by kind {self.kind!r}: leave it out, or use kind {kind!r}"
                    )
        needed = {
            "reward_model": "name one of reward_models",
            "function": "name it as FILE.py:NAME or module:NAME",
        }
        if self.kind in needed and getattr(self, self.kind) is None:
            raise ValueError(f"kind is {self.kind!r}, but {self.kind} is null: {needed[self.kind]}")
        if self.kind == "composed" and not self.parts:
            raise ValueError("kind is 'composed', but parts is empty: give it judges by name")
        if self.function is not None and not _FUNCTION.fullmatch(self.function):
            raise ValueError(
                f"function {self.function!r} names no function: write FILE.py:NAME, such as reward.py:score, or "
                "module:NAME"
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

    def every(self, place: str = "judge") -> Iterator[tuple[str, JudgeConfig]]:
        """Yield this judge and all judges in it, each with its place in the configuration."""
        yield place, self
        for name, part in self.parts.items():
            yield from part.every(f"{place}.parts.{name}")


class PartConfig(JudgeConfig):
    """One judge of several."""

    weight: float = 1.0
    """What its score is multiplied by."""


JudgeConfig.model_rebuild()

_JUDGE_OPTIONS: dict[str, tuple[str, ...]] = {
    "exact": ("answer_pattern",),
    "reasoning_gym": ("answer_pattern",),
    "reward_model": ("reward_model",),
    "function": ("function", "function_source", "timeout_s"),
    "math": ("timeout_s",),
    "composed": ("parts", "combine"),
}
"""Which options a kind of judge has."""
_FUNCTION = re.compile(r"(?:.+\.py|[\w.]+):[A-Za-z_][\w.]*")


def function_file(function: object) -> str | None:
    """Return the file in `reward.py:score`; None for `module:function`, or what is neither."""
    file, colon, _ = function.rpartition(":") if isinstance(function, str) else ("", "", "")
    return file if colon and file.endswith(".py") else None
