"""A renderer of the package `renderers` behind Renderer: what it renders, parses and bridges, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from raypost.chat.packaged import PackagedRenderer
from raypost.chat.record import SessionRecord, message_of
from raypost.chat.renderer import task_renderer
from raypost.config import AgentLoopConfig, TaskConfig
from raypost.data.tokenizer import Tokenizer
from raypost.errors import ConfigError
from raypost.types import IntArray
from tests.unit.scripted_generator import result
from tests.unit.tokenizers import write_tokenizer

TAGS = ("think", "tool_call", "tool_response")
TOKENS = ["<|endoftext|>", *(f"<{end}{tag}>" for tag in TAGS for end in ("", "/"))]
"""Qwen3's own."""
TOOL: Any = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
}
ASKED = [{"role": "user", "content": "What is it?"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = write_tokenizer(tmp_path_factory.mktemp("qwen"))
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.add_tokens([AddedToken(token, special=False) for token in TOKENS])
    backend.no_truncation()
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def renderer(tokenizer: Tokenizer) -> PackagedRenderer:
    pytest.importorskip("renderers", reason="the extra renderers is not installed")
    return PackagedRenderer(tokenizer, "qwen3", variables={"enable_thinking": True})


def ids(tokenizer: Tokenizer, text: str) -> IntArray:
    return tokenizer.encode(text, add_special_tokens=False)


def test_it_renders_tools_and_leaves_the_turn_to_the_policy(
    tokenizer: Tokenizer, renderer: PackagedRenderer
) -> None:
    text = tokenizer.decode(renderer.render(ASKED, tools=[TOOL]), skip_special_tokens=False)
    assert '"name": "add"' in text and "What is it?" in text
    assert text.endswith("<|im_start|>assistant\n")
    assert renderer.renders_tools() and renderer.proves(["tool"], True)


def test_calls_reasoning_and_their_ends_are_told(tokenizer: Tokenizer, renderer: PackagedRenderer) -> None:
    prompt = renderer.render(ASKED, tools=[TOOL])

    def parsed(text: str) -> Any:
        return renderer.parse(ids(tokenizer, text), prompt_ids=prompt, tools=[TOOL])

    one = parsed(
        '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call><|im_end|>'
    )
    assert (one.reasoning_content, one.complete) == ("hm", True)
    assert [(call.name, call.arguments, call.error) for call in one.tool_calls] == [("add", '{"a": 3}', None)]
    assert one.text.startswith("<think>") and not one.text.endswith("<|im_end|>")
    [broken] = parsed('<tool_call>\n{"name": "add", \n</tool_call><|im_end|>').tool_calls
    assert "invalid_json" in str(broken.error)
    assert not parsed('<tool_call>\n{"name": "add"').complete
    assert not parsed("<think>\nhm").complete


@pytest.mark.parametrize("end", ["<|im_end|>", ""], ids=["ended", "cut by its length"])
def test_a_bridge_appends_to_the_very_ids_that_were_sampled(
    tokenizer: Tokenizer, renderer: PackagedRenderer, end: str
) -> None:
    # "It" and " is" in single bytes: no text would be encoded so.
    said = np.concatenate([ids(tokenizer, letter) for letter in "It is."] + [ids(tokenizer, end)])
    before = np.concatenate([renderer.render(ASKED, tools=[TOOL]), said])
    results = [{"role": "tool", "content": "7", "tool_call_id": "1", "name": "add"}]
    behind = renderer.bridge(before, results, tools=[TOOL])
    assert behind is not None
    text = tokenizer.decode(behind, skip_special_tokens=False)
    assert text.startswith("\n<|im_start|>user" if end else "<|im_end|>")
    assert "<tool_response>\n7\n</tool_response>" in text and text.endswith("<|im_start|>assistant\n")
    assert renderer.bridge(before, [{"role": "assistant", "content": "No."}]) is None
    assert renderer.bridge(ids(tokenizer, "No turn."), results) is None


def test_a_session_goes_on_with_what_was_sampled(tokenizer: Tokenizer, renderer: PackagedRenderer) -> None:
    record = SessionRecord(renderer)
    first = record.prepare(ASKED, [TOOL])
    call = '<tool_call>\n{"name":   "add", "arguments": {"a": 3}}\n</tool_call><|im_end|>'  # three spaces
    record.commit(first, result(ids(tokenizer, call).tolist()))
    replied = message_of(first.turn)
    answer = {"role": "tool", "content": "7", "tool_call_id": replied["tool_calls"][0]["id"]}
    second = record.prepare([*ASKED, replied, answer], [TOOL])
    assert second.turn.parent is first.turn
    text = tokenizer.decode(second.token_ids, skip_special_tokens=False)
    assert '{"name":   "add"' in text and "<tool_response>\n7\n</tool_response>" in text


def test_a_task_names_it(tokenizer: Tokenizer, renderer: PackagedRenderer) -> None:
    task = TaskConfig.model_validate(
        {
            "source": {"kind": "jsonl", "dataset": "x"},
            "judge": {"kind": "exact"},
            "agent_loop": {"kind": "session", "agent": "a:b", "renderer": "qwen3"},
        }
    )
    assert isinstance(task_renderer(task, tokenizer), PackagedRenderer)
    with pytest.raises(ConfigError, match=r"agent_loop.renderer 'qwen-33' does not fit"):
        PackagedRenderer(tokenizer, "qwen-33")
    with pytest.raises(ConfigError, match="does not fit"):
        PackagedRenderer(tokenizer, "qwen3", variables={"enable_thoughts": True})


def test_without_the_package_the_extra_is_named(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "renderers", None)
    with pytest.raises(ConfigError, match=r"agent_loop.renderer 'qwen3' needs .* raypost\[renderers\]"):
        PackagedRenderer(tokenizer, "qwen3")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"kind": "single_turn"}, "renderer 'qwen3' is not used by kind 'single_turn'"),
        ({"kind": "tools", "tools": ["a:b"], "tool_call_parser": "hermes"}, "has parsers of its own"),
    ],
)
def test_it_is_refused_where_it_does_nothing(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        AgentLoopConfig.model_validate({**options, "renderer": "qwen3"})


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_with_the_package_in_a_folder_of_its_own_none_of_these_is_skipped(tmp_path: Path) -> None:
    """It is in no lock: its own requirements are few, and the rest is here."""
    wanted = ["renderers>=0.1.12,<0.2", "openai-harmony", "prime-pydantic-config", "tiktoken"]
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path), *wanted]
    subprocess.run(pip, check=True, timeout=300)
    again = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", __file__]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(again, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0 and "passed" in done.stdout and "skipped" not in done.stdout, done.stdout
