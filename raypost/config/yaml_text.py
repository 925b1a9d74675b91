"""YAML as a person writes it: one value a key, and no larger than it looks. Reads text into plain data."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import yaml
from yaml._yaml import CParser
from yaml.composer import Composer
from yaml.constructor import SafeConstructor
from yaml.resolver import Resolver

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
        # libyaml takes a fifth of the time; what it does not read is read again, for PyYAML's words show the line.
        with suppress(yaml.YAMLError, ValueError):
            return _data(_FastLoader(text))
        return _data(_Loader(text))
    except _RefusedError as error:
        raise ConfigError(f"{origin} {error}") from None
    # PyYAML raises ValueError for dates and numbers that are none.
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{origin} is no YAML: {error}") from error


def _data(loader: _Loader | _FastLoader) -> Any:
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


class _RefusedError(Exception):
    """What a text has too much of."""


class _Bounded(Composer, SafeConstructor, Resolver):
    """Composes nodes of what a parser beside it reads, with an eye on their number."""

    _depth = 0

    def __init__(self) -> None:
        Composer.__init__(self)
        SafeConstructor.__init__(self)
        Resolver.__init__(self)
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        parser: Any = self
        line: int = parser.peek_event().start_mark.line + 1
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _RefusedError(
                f"nests deeper than {MAX_DEPTH} levels at line {line}: no configuration does, so take some out"
            )
        alias: bool = parser.check_event(yaml.AliasEvent)
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


class _Loader(_Bounded, yaml.SafeLoader):
    def __init__(self, text: str) -> None:
        yaml.SafeLoader.__init__(self, text)
        _Bounded.__init__(self)


class _FastLoader(_Bounded, CParser):
    def __init__(self, text: str) -> None:
        CParser.__init__(self, text)
        _Bounded.__init__(self)


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
