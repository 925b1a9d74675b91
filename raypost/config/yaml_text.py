"""YAML as a person writes it: one value a key, and no larger than it looks. Reads text into plain data."""

from __future__ import annotations

from typing import Any

import yaml

from raypost.errors import ConfigError

MAX_CHARACTERS = 8_000_000
"""Longest text: a configuration with several files of functions inside."""
MAX_NODES = 50_000
"""Most values, those behind an alias counted wherever they stand."""
MAX_DEPTH = 100
"""Most mappings and lists inside each other."""


def parse_yaml(text: str, origin: str) -> Any:
    """Return the data in a text, which `origin` names.

    Raises ConfigError for what is no YAML, has a key twice in one mapping, nests deeper than MAX_DEPTH or has more than
    MAX_NODES values.
    """
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(
            f"{origin} has {len(text)} characters, at most {MAX_CHARACTERS} are read: shorten it"
        )
    try:
        # A control character is refused here already.
        loader = _Loader(text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except _RefusedError as error:
        raise ConfigError(f"{origin} {error}") from None
    # PyYAML raises ValueError for dates and numbers that are none.
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{origin} is no YAML: {error}") from error


class _RefusedError(Exception):
    """What a text has too much of."""


class _Loader(yaml.SafeLoader):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        line: int = self.peek_event().start_mark.line + 1  # type: ignore[no-untyped-call]
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _RefusedError(
                f"nests deeper than {MAX_DEPTH} levels at line {line}: no configuration does, so take some out"
            )
        alias: bool = self.check_event(yaml.AliasEvent)
        node: Any = super().compose_node(parent, index)
        self._depth -= 1
        if alias and id(node) not in self._sizes:
            raise _RefusedError(f"has an alias at line {line} that stands inside what it names: take it out")
        if isinstance(node, yaml.MappingNode):
            _refuse_twins(node)
        if not alias:
            self._sizes[id(node)] = 1 + sum(self._sizes[id(child)] for child in _children(node))
        if self._sizes[id(node)] > MAX_NODES:
            raise _RefusedError(
                f"has more than {MAX_NODES} values at line {line}, those that aliases (*name) repeat included: write "
                "less"
            )
        return node


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def _refuse_twins(node: yaml.MappingNode) -> None:
    lines: dict[tuple[str, str], int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        name, line = (key.tag, key.value), key.start_mark.line + 1
        if name in lines:
            raise _RefusedError(
                f"has the key {key.value!r} twice in one mapping, at lines {lines[name]} and {line}: remove one of them"
            )
        lines[name] = line
