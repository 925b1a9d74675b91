"""The configuration of a judge: what scores a response, and how several do so together."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, ValidationInfo, model_validator

from raypost.config.embedded import read_text
from raypost.config.resources import ConfigModel


class JudgeConfig(ConfigModel):
    """How a response is scored."""

    kind: Literal[
        "reasoning_gym", "exact", "math", "function", "http", "reward_model", "generative", "code", "composed"
    ] = "reasoning_gym"
    """What scores a response: reasoning-gym's own scorer, equality with the answer (spaces around both are ignored) or
    with its meaning as mathematics, a function or an HTTP service of yours, a reward model, the verdict of a
    language model, tests of the program in it, or several of these together."""
    reward_model: str | None = None
    """Name of one of `reward_models`, with kind reward_model or generative; with the latter also `policy`, the model
    that is trained, on its own engines and with the weights of the moment."""
    answer_pattern: str | None = None
    """Regular expression that finds the answer in a response: the first group of its last match. null: the answer is
    the whole response. With kind generative: finds the score, a number, in the verdict."""
    context_tokens: Annotated[int, Field(ge=1)] | None = None
    """With `reward_model: policy`: longest message and verdict, tokens. The policy's engines are started for as many,
    if that is more than prompts and responses have."""
    template: str | None = None
    """With kind generative: what the model is asked, in its own chat template. `{prompt}`, `{response}` and `{answer}`
    are replaced."""
    choices: dict[str, float] = Field(default_factory=dict)
    """With kind generative: scores by the words that the verdict may say, such as {yes: 1, no: 0}; the last one that it
    says counts, whatever its case. Otherwise `answer_pattern` finds a number."""
    verdict_tokens: Annotated[int, Field(ge=1)] = 32
    """With kind generative: longest verdict, tokens."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """With kind generative: sampling temperature of the verdict; 0: greedy."""
    function: str | None = None
    """With kind function, and with `combine: function`: `reward.py:score`, a file and a function in it, relative to
    the configuration's folder or absolute, or `module:function` of a module that is installed or lies in the job's
    working directory."""
    function_source: str | None = None
    """Text of that file. It is read when the configuration is loaded, so that judges on other nodes have it, and so
    that the run folder says what the run was rewarded for. null: the function is in a module."""
    timeout_s: Annotated[float, Field(gt=0)] = 30
    """Longest time that the function, kind math, or one request to the service may take, seconds. After it the
    function's process is ended."""
    tests: Literal["python", "stdio"] = "python"
    """With kind code, what the tests of a prompt are. python: a text, or a list of them, with asserts or functions
    `test_...` that call the program's functions. stdio: a list of `{"input": ..., "output": ...}`, each a run of the
    program."""
    tests_field: str = "tests"
    """Column of the data that holds them; a text of JSON is read as what it says."""
    program: str = "{code}"
    """What is tested: `{code}` is the last fenced block of the response, or the whole response without one, and
    `{question}` the data's question."""
    partial_credit: bool = False
    """Give the share of tests that pass as reward; otherwise 1 if all pass, else 0."""
    cpu_s: Annotated[float, Field(gt=0, le=3600)] = 5
    """CPU time of a program, seconds: for all tests in Python together, or for one case of stdio. By the clock it may
    take three times as long, and what it waited for a processor that others had, up to twelve times in all."""
    memory_mb: Annotated[int, Field(ge=64)] = 512
    """Memory of each process of a program, MiB."""
    unsafe_no_sandbox: bool = False
    """Run programs that the policy wrote with the rights of this run: its files, its network, its token. Only where
    bubblewrap cannot be had, and nothing on the machine is of worth."""
    url: str | None = None
    """With kind http: where a group's responses are sent, such as `http://host:8000/score`."""
    api_key_file: Path | None = None
    """With kind http: a file with a key, which is sent as a bearer token. Each judge reads it on its own node; the key
    is in no configuration and no log. null: none is sent."""
    retries: Annotated[int, Field(ge=0)] = 3
    """With kind http: how often a request is made again, after 0.5 s, 1 s, 2 s and so on, before it has failed. With
    kind generative: how often a verdict that cannot be read is asked for again, at temperature 1."""
    concurrency: Annotated[int, Field(ge=1)] = 16
    """With kind http: most requests of a judge actor at a time."""
    parts: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,40}$")], PartConfig] = Field(
        default_factory=dict
    )
    """With kind composed: judges by name. Each is in the metrics under its name."""
    combine: Literal["sum", "product", "min", "function"] = "sum"
    """How the parts' scores, each times its weight, become one reward: their sum, product or minimum, or what
    `function` makes of them, which is given them by name, without weights, as `scores`."""
    route_by: str | None = None
    """With kind composed: a column of the data. Each response is then scored by one part alone, the one with the name
    that its row has there, or else the one named `default`."""

    @model_validator(mode="before")
    @classmethod
    def _read_function(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, dict):
            return data
        folder = Path((info.context or {}).get("folder", "."))
        if isinstance(data.get("api_key_file"), str):
            data = {
                **data,
                "api_key_file": str((folder / Path(data["api_key_file"]).expanduser()).absolute()),
            }
        if data.get("function_source") is not None:
            return data
        file = function_file(data.get("function"))
        if file is None or data.get("kind") not in ("function", "composed"):
            return data
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
            "http": "set it to the address of a service",
            "generative": "name one of reward_models, with generates: true",
        }
        name = {"http": "url", "generative": "reward_model"}.get(self.kind, self.kind)
        if self.kind in needed and getattr(self, name) is None:
            raise ValueError(f"kind is {self.kind!r}, but {name} is null: {needed[self.kind]}")
        if self.kind == "composed" and not self.parts:
            raise ValueError("kind is 'composed', but parts is empty: give it judges by name")
        if "{code}" not in self.program:
            raise ValueError(
                f"program {self.program!r:.80} lacks {{code}}: every response would be the same program"
            )
        if self.function is not None and not _FUNCTION.fullmatch(self.function):
            raise ValueError(
                f"function {self.function!r} names no function: write FILE.py:NAME, such as reward.py:score, or "
                "module:NAME"
            )
        return self

    @model_validator(mode="after")
    def _parts_combine(self) -> JudgeConfig:
        if (self.combine == "function") != (self.function is not None) and self.kind == "composed":
            raise ValueError(
                f"combine is {self.combine!r} and function {self.function!r}: use both combine 'function' and a "
                "function, or neither"
            )
        if self.route_by is not None and self.combine != "sum":
            raise ValueError(
                f"route_by is {self.route_by!r}, so each response has one score, and combine {self.combine!r} is not "
                "used: leave it out"
            )
        return self

    @model_validator(mode="after")
    def _verdict_is_read(self) -> JudgeConfig:
        if self.kind != "generative":
            return self
        if self.template is None or "{response}" not in self.template:
            raise ValueError(
                f"template is {self.template!r:.80}, without {{response}}: say what the model is asked "
                "about the response"
            )
        if bool(self.choices) == (self.answer_pattern is not None):
            raise ValueError(
                f"choices are {self.choices} and answer_pattern is {self.answer_pattern!r}: give one of them, so "
                "that a score can be read"
            )
        if (self.reward_model == POLICY) != (self.context_tokens is not None):
            raise ValueError(
                f"reward_model is {self.reward_model!r} and context_tokens {self.context_tokens}: give the policy, "
                "and it alone, the tokens of its longest message and verdict, for instance 1024"
            )
        if self.context_tokens is not None and self.context_tokens <= self.verdict_tokens:
            raise ValueError(
                f"context_tokens {self.context_tokens} leave none for the message beside verdict_tokens "
                f"{self.verdict_tokens}: use more"
            )
        folded = [choice.lower() for choice in self.choices]
        if len(set(folded)) != len(folded) or not all(
            choice.strip() == choice != "" for choice in self.choices
        ):
            raise ValueError(
                f"choices {sorted(self.choices)} must differ by more than case, without spaces around them"
            )
        return self

    @model_validator(mode="after")
    def _url_is_an_address(self) -> JudgeConfig:
        if self.url is None:
            return self
        try:
            parts = urlsplit(self.url)
            known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError as error:
            raise ValueError(f"url {self.url!r:.200} is no address: {error}") from None
        if "@" in parts.netloc:
            raise ValueError(
                "url holds a user or password, which would be in logs: leave it out, use api_key_file"
            )
        if not known:
            raise ValueError(
                f"url {self.url!r:.200} is no address: write http://HOST:PORT/PATH, or https://..."
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
    "code": (
        "tests",
        "tests_field",
        "program",
        "partial_credit",
        "cpu_s",
        "memory_mb",
        "unsafe_no_sandbox",
    ),
    "generative": (
        "reward_model",
        "context_tokens",
        "template",
        "choices",
        "answer_pattern",
        "verdict_tokens",
        "temperature",
        "retries",
    ),
    "http": ("url", "api_key_file", "timeout_s", "retries", "concurrency"),
    "composed": ("parts", "combine", "route_by", "function", "function_source", "timeout_s"),
}
"""Which options a kind of judge has."""
POLICY = "policy"
"""Stands for the model that is trained where a judge names a model."""
UNSANDBOXED = "runs programs of the policy with the rights of this run (unsafe_no_sandbox)"
"""What is said of such a judge before a run and in its report."""
_FUNCTION = re.compile(r"(?:.+\.py|[\w.]+):[A-Za-z_][\w.]*")


def function_file(function: object) -> str | None:
    """Return the file in `reward.py:score`; None for `module:function`, or what is neither."""
    file, colon, _ = function.rpartition(":") if isinstance(function, str) else ("", "", "")
    return file if colon and file.endswith(".py") else None
