"""Chat templates of the kinds that the field uses, and a tokenizer for them."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from raypost.data.tokenizer import Tokenizer
from tests.unit.tokenizers import write_tokenizer

_TOOLS = (
    "{%- if tools %}{{- '<|im_start|>system\\n' }}{%- for t in tools %}{{- t['function'] | tojson }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- endif %}"
)
_CALLS = (
    "{%- for c in m.tool_calls or [] %}{{- '\\n<tool_call>\\n' + ({'name': c.function.name, 'arguments': "
    "c.function.arguments} | tojson) + '\\n</tool_call>' }}{%- endfor %}"
)
_SPEAKS = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"


def _body(role: str = "m.role", content: str = "m.content") -> str:
    return f"{{{{- '<|im_start|>' + {role} + '\\n' + {content} }}}}{_CALLS}{{{{- '<|im_end|>\\n' }}}}"


TEMPLATES = {
    "chatml with tools": _TOOLS + "{%- for m in messages %}" + _body() + "{%- endfor %}" + _SPEAKS,
    # As SmolLM2's: a system message before any conversation that has none, contents trimmed, no tools.
    "default system": (
        "{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\\nYou are Smol.<|im_end|>\\n' }}{%- endif %}"
        "{%- for m in messages %}" + _body(content="m.content") + "{%- endfor %}" + _SPEAKS
    ),
    # As Qwen3's: reasoning before the last question is stripped.
    "strips thinking": (
        _TOOLS + "{%- set ns = namespace(last=0) %}{%- for m in messages %}{%- if m.role == 'user' %}"
        "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}{%- for m in messages %}"
        "{%- set words = m.content if loop.index0 > ns.last else m.content.split('</think>')[-1].lstrip('\\n') %}"
        + _body(content="words")
        + "{%- endfor %}"
        + _SPEAKS
    ),
    # One result after another in one turn of the user, as Qwen's.
    "results together": (
        _TOOLS + "{%- for m in messages %}{%- if m.role == 'tool' %}"
        "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
        "{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
        "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}"
        "{%- else %}" + _body() + "{%- endif %}{%- endfor %}" + _SPEAKS
    ),
    # No token ends a turn: nothing can be bridged.
    "no end of turn": "{%- for m in messages %}{{- m.role + ': ' + m.content + '\\n' }}{%- endfor %}"
    "{{- 'assistant: ' }}",
    # The number of messages stands at the beginning: what was said before never stays as it was.
    "counts messages": "{{- messages | length }}{%- for m in messages %}"
    + _body()
    + "{%- endfor %}"
    + _SPEAKS,
}


@functools.cache
def bpe() -> Tokenizer:
    """Byte-level, with merges: one text has many ids."""
    with tempfile.TemporaryDirectory() as folder:
        return Tokenizer.load(write_tokenizer(Path(folder)))


@functools.cache
def metaspace() -> Tokenizer:
    """Words begin with the blank before them; merges go over whole words."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        backend = Backend.from_file(f"{folder}/tokenizer.json")
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Metaspace(prepend_scheme="first"),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        assert isinstance(backend.model, models.BPE)
        backend.save(f"{folder}/tokenizer.json")
        return Tokenizer.load(folder)
