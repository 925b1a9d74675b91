"""Chat templates: Jinja of the model's or the user's, contained. Renders messages to text.

A template is foreign code. It runs in Jinja's sandbox, ends after MAX_STEPS turns of its loops and macros, and whatever
it does wrong is a ConfigError.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox

from raypost.errors import ConfigError

MAX_STEPS = 300_000
"""Turns of loops, and calls of macros, in one rendering: far more than any conversation needs."""

_STEP = "raypost_step"
_rendering = threading.local()


@jinja2.pass_context  # else the compiler would take it for a constant
def _step(context: jinja2.runtime.Context, value: None) -> str:
    _rendering.steps += 1
    if _rendering.steps > MAX_STEPS:
        raise jinja2.TemplateError(f"it loops: more than {MAX_STEPS} turns")
    return ""


def render_template(
    template: str, origin: str, variables: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]
) -> str:
    """Return the messages as the template writes them.

    Raises ConfigError, which names `origin`, when the template is no template, refuses the messages, or does not end.
    """
    _rendering.steps = 0
    try:
        return _compiled(template).render({**variables, "messages": messages})
    except RecursionError as error:
        raise ConfigError(
            f"chat template of {origin} failed: it nests too deeply, or calls itself"
        ) from error
    except Exception as error:  # foreign code raises whatever it likes
        what = error if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
        line = getattr(error, "lineno", None)
        place = f" (line {line})" if line else ""
        raise ConfigError(f"chat template of {origin} failed: {what}{place}") from error


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}`, with which templates mark the assistant's words; rendering ignores it."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    """With what chat templates may rely on; each turn of a loop and each call of a macro is counted."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    # Jinja's own tojson escapes for HTML, which would change the prompt.
    environment.filters["tojson"] = to_json
    environment.filters[_STEP] = _step
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    tree = environment.parse(template)
    counted: list[jinja2.nodes.For | jinja2.nodes.Macro] = []
    counted += tree.find_all(jinja2.nodes.For)
    counted += tree.find_all(jinja2.nodes.Macro)
    for node in counted:
        # A filter, because the sandbox looks at every call of a function.
        called = jinja2.nodes.Filter(jinja2.nodes.Const(None), _STEP, [], [], None, None)
        node.body.insert(0, jinja2.nodes.ExprStmt(called).set_lineno(node.lineno))
    compiled = environment.from_string(tree)
    # Each rendering reads all of them, which a chain of mappings makes several times as slow as a dict.
    compiled.globals = dict(compiled.globals)
    return compiled
