"""A configuration from a YAML file and overrides, or from plain data; every problem with its place and value."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from raypost.config.run import Config
from raypost.config.yaml_text import parse_yaml
from raypost.errors import ConfigError


def load_config(path: Path, overrides: list[str] | None = None) -> Config:
    """Read a YAML file and apply `a.b=value` overrides (values are YAML). Raises ConfigError."""
    try:
        raw = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise ConfigError(f"cannot read configuration {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no YAML: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must hold a mapping, got {type(raw).__name__}")
    for override in overrides or []:
        _apply_override(raw, override)
    return parse_config(raw, origin=str(path), folder=path.parent)


def parse_config(raw: dict[str, Any], origin: str = "configuration", folder: Path | None = None) -> Config:
    """Validate plain data; files of functions are relative to `folder`, or to the current one.

    Raises ConfigError listing every problem with its place and value.
    """
    try:
        return Config.model_validate(raw, context={"folder": folder or Path()})
    except ValidationError as error:
        lines = [line for item in error.errors(include_url=False) for line in _problem_lines(item)]
        raise ConfigError("\n  ".join([f"{origin}: {len(lines)} problem(s)", *lines])) from None


def _problem_lines(item: ErrorDetails) -> list[str]:
    """Return what pydantic found at one place, a line for each problem."""
    place = ".".join(map(str, item["loc"]))
    if item["type"] == "extra_forbidden":
        return [f"{place}: unknown key{_suggestion(item['loc'])}, got {item['input']!r:.80}"]
    if item["type"] == "missing":
        return [f"{place}: required, but missing: set it"]
    if item["type"] == "too_short" and item["input"]:
        return []  # pydantic also counts items it refused for reasons of their own, listed beside this
    if item["type"] == "value_error":
        return [f"{place}: {line}".removeprefix(": ") for line in str(item["ctx"]["error"]).splitlines()]
    return [f"{place}: {item['msg']}, got {item['input']!r:.80}"]


def _suggestion(loc: tuple[int | str, ...]) -> str:
    """Return the known key of the same mapping that looks most like the unknown one, as a question."""
    model: Any = Config
    for part in loc[:-1]:
        if isinstance(part, str) and part in model.model_fields:  # else it is a key of a mapping
            model = model.model_fields[part].annotation
            model = next((inner for inner in get_args(model) if isinstance(inner, type)), model)
    near = get_close_matches(str(loc[-1]), model.model_fields, n=1)
    return f" (did you mean {near[0]}?)" if near else f" (known: {', '.join(model.model_fields)})"


def _apply_override(raw: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {override!r} must read key=value, for instance train.num_steps=10")
    node: Any = raw
    value = parse_yaml(text, f"override {override!r:.120}")
    parts = key.split(".")
    try:
        for part in parts[:-1]:
            node = node[int(part)] if isinstance(node, list) else node.setdefault(part, {})
        if isinstance(node, list):
            node[int(parts[-1])] = value
        else:
            node[parts[-1]] = value
    except (ValueError, IndexError, TypeError, AttributeError) as error:
        raise ConfigError(f"override {override!r} does not fit the configuration: {error}") from None
