"""Parsers by vLLM's names, on the real package, which only those who name one import."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from raypost.chat.renderer import TemplateRenderer
from raypost.chat.vllm_parsers import VllmParsers
from raypost.data.tokenizer import Tokenizer
from raypost.errors import ConfigError
from tests.factories import make_config
from tests.unit.chat_templates import TEMPLATES
from tests.unit.test_tool_task import problems
from tests.unit.tokenizers import write_tokenizer

vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            },
        },
    }
]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    """With tokens for reasoning, and in a folder that is there: vLLM's parsers want transformers' own."""
    file = write_tokenizer(tmp_path / "model") / "tokenizer.json"
    backend = Backend.from_file(str(file))
    backend.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    backend.save(str(file))
    return Tokenizer.load(file.parent)


def test_raypost_imports_no_parser_of_vllms_unless_one_is_named() -> None:
    code = "import sys, actors.agent_loop; sys.exit(any(name.startswith('vllm.') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@vllm
def test_replies_are_read_by_the_parsers_and_those_that_do_not_fit_are_refused(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    # One test, so that vLLM is imported once.
    parsers = VllmParsers(tokenizer, "pythonic", "deepseek_r1")
    renderer = TemplateRenderer(tokenizer, template=TEMPLATES["chatml with tools"], parsers=parsers)

    def parsed(text: str) -> tuple[str, str | None, list[tuple[str, str, str | None]]]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        found = renderer.parse(ids, prompt_ids=ids[:0], tools=TOOLS)
        assert found.text == text
        return (
            found.content,
            found.reasoning_content,
            [(call.name, call.arguments, call.error) for call in found.tool_calls],
        )

    called = ("", "two numbers", [("add", '{"a": 1, "b": 2}', None)])
    assert parsed("<think>two numbers</think>[add(a=1, b=2)]") == called
    assert parsed("<think>no need</think>It is 3.") == ("It is 3.", "no need", [])
    assert parsed("<think>x</think>[add(a=1,") == ("[add(a=1,", "x", []), "what is no call is what was said"

    for names, why in [
        (("no_such", None), "tool_call_parser is 'no_such', which vLLM has not"),
        ((None, "no_such"), "reasoning_parser is 'no_such', which vLLM has not"),
        (("llama3_json", None), "could not locate the bot token '<|python_tag|>' in the tokenizer"),
    ]:
        with pytest.raises(ConfigError, match=re.escape(why)):
            VllmParsers(tokenizer, *names)

    named = "{{kind: tools, tools: ['mine.py:look'], tool_call_parser: {}}}"
    assert problems(tmp_path / "a", named.format("hermes")) == []
    (problem,) = problems(tmp_path / "b", named.format("hermez"))
    assert "agent_loop.tool_call_parser is 'hermez'" in problem and "hermes" in problem


def test_kinds_without_calls_have_no_parser() -> None:
    with pytest.raises(ConfigError, match="tool_call_parser 'hermes' is not used by kind 'single_turn'"):
        make_config(tasks__0__agent_loop={"tool_call_parser": "hermes"})
