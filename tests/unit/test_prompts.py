"""What a row becomes: a question or a conversation, its metadata, and the very text that an engine reads."""

from __future__ import annotations

import importlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raypost.config import Config, parse_config
from raypost.data.prompt import Prompt, reserved_names, text_for_engine
from raypost.data.task_source import build_source, check_source, held_out
from raypost.data.tokenizer import Tokenizer
from raypost.errors import ConfigError
from raypost.judges.function import try_function
from raypost.types import SESSION
from raypost.types.turns import TURNS
from tests.factories import plain_config
from tests.unit.tokenizers import TEMPLATE, write_tokenizer

SYSTEM = {"role": "system", "content": "Be short."}


def conversation(n: int, *before: dict[str, Any]) -> list[dict[str, Any]]:
    return [*before, {"role": "user", "content": f"What is {n}?"}]


def rows(count: int = 60, *before: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    return [{"messages": conversation(n, *before), "answer": n, "level": n % 3, **more} for n in range(count)]


def write(kind: str, folder: Path, data: list[dict[str, Any]]) -> str:
    path = folder / "rows"
    if kind == "parquet":
        table = importlib.import_module("pyarrow").Table.from_pylist(data)
        importlib.import_module("pyarrow.parquet").write_table(table, path)
    elif kind == "hf_disk":
        importlib.import_module("datasets").Dataset.from_list(data).save_to_disk(str(path))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in data))
    return str(path)


def config_of(folder: Path, data: list[dict[str, Any]], kind: str = "jsonl", **task: Any) -> Config:
    source = {"kind": kind, "dataset": write(kind, folder, data), "index_dir": None}
    source |= task.pop("source", {"messages_field": "messages"})
    one = {"source": source, "judge": {"kind": "exact"}, **task}
    return parse_config(plain_config(tasks=[one]), folder=folder)


def refusal(ask: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        ask()
    return str(caught.value)


def prompts(config: Config) -> list[Prompt]:
    source: Any = build_source(config.tasks[0], 0)
    return [source.sample(n) for n in range(len(source))]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer.load(write_tokenizer(tmp_path / "model"))


# ---------------------------------------------------------------- conversations


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "hf_disk"])
def test_a_conversation_in_the_data_is_rendered_whatever_file_it_lies_in(
    kind: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    # Columnar files give every message all keys, with None where a row has none.
    data = rows(60, SYSTEM)
    data[0]["messages"][1]["name"] = "ada"
    config = config_of(tmp_path, data, kind)
    task = config.tasks[0]
    found = prompts(config)
    assert len(found) + len(held_out(task, 0)) == 60
    assert set(found[1].metadata) == {"question", "answer", "level", "messages"}
    for prompt in found:
        assert prompt.metadata["messages"][0] == SYSTEM
        last = prompt.metadata["messages"][-1]["content"]
        expected = f"<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\n{last}<|im_end|>\n"
        assert text_for_engine(prompt, tokenizer, task) == expected + "<|im_start|>assistant\n"


def test_a_conversation_of_one_message_is_split_as_its_question_is(tmp_path: Path) -> None:
    plain = [{"prompt": f"What is {n}?", "answer": n} for n in range(60)]
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    said = held_out(config_of(tmp_path / "a", rows()).tasks[0], 0)
    asked = held_out(config_of(tmp_path / "b", plain, source={}).tasks[0], 0)
    assert [p.metadata["question"] for p in said] == [p.metadata["question"] for p in asked]


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ("hello", "got 'hello'"),
        ([], "got []"),
        ([{"content": "x"}], "message 1 has no role"),
        ([{"role": "user", "content": None}], "which is no text"),
        ([{"role": "user", "content": [{"type": "image"}]}], "multimodal is out of scope"),
        ([{"role": "user", "content": " "}], "nothing is said"),
        (
            [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
            "cut the last message off",
        ),
    ],
)
def test_what_is_no_conversation_is_refused_with_its_row(messages: Any, problem: str, tmp_path: Path) -> None:
    data = rows()
    data[40]["messages"] = messages
    text = refusal(partial(build_source, config_of(tmp_path, data).tasks[0], 0))
    assert "rows line 41: 'messages' must be a conversation" in text and problem in text


def test_a_list_in_the_question_field_is_told_about_messages_field(tmp_path: Path) -> None:
    data = [{"prompt": conversation(1), "answer": 1}]
    text = refusal(partial(build_source, config_of(tmp_path, data, source={}).tasks[0], 0))
    assert "source.messages_field: prompt" in text


def test_judges_see_the_conversation(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(
        "def score(turns, prompt, messages, level):\n"
        "    assert [t['role'] for t in turns] == ['system', 'user', 'assistant'], turns\n"
        "    assert messages == turns[1:2] and prompt == messages[0]['content'] and level in (0, 1, 2)\n"
        "    return 1.0\n"
    )
    judge = {"kind": "function", "function": "reward.py:score"}
    config = config_of(tmp_path, rows(), judge=judge, system_prompt="Be short.")
    task = config.tasks[0]
    assert try_function(task, task.judge, check_source(task, 0)[:2]) is None


# ---------------------------------------------------------------- the chat template


def rendered(config: Config, tokenizer: Tokenizer) -> str:
    return text_for_engine(prompts(config)[0], tokenizer, config.tasks[0])


def test_a_system_prompt_stands_first_and_gives_way_to_the_conversations_own(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    config = config_of(tmp_path, rows(), system_prompt="Think.")
    assert config.tasks[0].chat
    assert rendered(config, tokenizer).startswith("<|im_start|>system\nThink.<|im_end|>\n<|im_start|>user\n")
    config = config_of(tmp_path, rows(60, SYSTEM), system_prompt="Think.")
    assert rendered(config, tokenizer).startswith(
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\n"
    )
    plain = [{"prompt": f"{n}", "answer": n} for n in range(20)]
    config = config_of(tmp_path, plain, source={}, system_prompt="Think.", prompt_template="Q {question}")
    assert "Think.<|im_end|>\n<|im_start|>user\nQ " in rendered(config, tokenizer)


def test_a_template_of_ones_own_has_its_variables_and_tools_and_travels_with_the_configuration(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    template = tmp_path / "own.jinja"
    template.write_text(
        "{{ messages[0].content }}|{{ enable_thinking }}|{{ tools[0].name }}|{{ eos_token }}"
        "|{{ add_generation_prompt }}"
    )
    config = config_of(
        tmp_path, rows(), chat_template="own.jinja", chat_template_kwargs={"enable_thinking": False},
        tools=[{"name": "add"}],
    )  # fmt: skip
    template.unlink()
    again = parse_config(config.model_dump(mode="json"))
    assert again == config
    text = rendered(again, tokenizer)
    assert text.startswith("What is ") and text.endswith("?|False|add|<|im_end|>|True")


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "it loops"),
        ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "calls itself"),
        (
            "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
            "it loops",
        ),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "nests too deeply"),
        ("{% for m in messages %}" * 40 + "{% endfor %}" * 40, "too many statically nested blocks"),
        ("{{ range(10**9) | list }}", "OverflowError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% if %}", "Expected an expression"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ raise_exception('no user here') }}", "no user here"),
    ],
)
def test_a_template_that_cannot_be_rendered_is_an_error_by_name(
    template: str, problem: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    (tmp_path / "own.jinja").write_text(template)
    config = config_of(tmp_path, rows(), chat_template="own.jinja")
    text = refusal(partial(rendered, config, tokenizer))
    assert text.startswith("chat template of the task failed: ") and problem in text


def test_a_template_is_counted_afresh_for_every_prompt(tokenizer: Tokenizer) -> None:
    template = "{% for a in range(90000) %}{% endfor %}" + TEMPLATE
    for _ in range(5):
        assert "hello" in tokenizer.chat([{"role": "user", "content": "hello"}], template=template)


@pytest.mark.parametrize(
    ("task", "problem"),
    [
        ({"chat": False}, "source.messages_field is set, but chat is false"),
        ({"chat": False, "source": {}, "system_prompt": "x"}, "system_prompt is set, but chat is false"),
        ({"prompt_template": "Q {question}"}, "is not used beside source.messages_field"),
        ({"chat_template": "absent.jinja"}, "absent.jinja cannot be read (No such file"),
        ({"chat_template_kwargs": {"tools": []}}, "which raypost gives the template itself"),
        ({"source": {"messages_field": "a", "question_field": "b"}}, "leave one of them out"),
        ({"source": {"messages_field": "answer"}}, "messages_field and answer_field are both 'answer'"),
        ({"source": {"ignore_fields": ["prompt"]}}, "which the prompt is made of"),
        ({"source": {"answer_field": None}}, "the judge compares responses with the answer"),
        ({"source": {"kind": "reasoning_gym", "messages_field": "m"}}, "has no fields"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    task: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    assert problem in refusal(partial(config_of, tmp_path, rows(), **task))


# ---------------------------------------------------------------- answers and further columns


def test_an_answer_is_needed_where_the_judge_compares_it_or_the_field_is_named(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def score(response): return 1.0")
    judge = {"kind": "function", "function": "reward.py:score"}
    data = [{"prompt": f"Count to {n}"} for n in range(60)]
    assert "must be like" in refusal(partial(prompts, config_of(tmp_path, data, source={})))
    for source in ({}, {"answer_field": None}):
        found = prompts(config_of(tmp_path, data, source=source, judge=judge))
        assert "answer" not in found[0].metadata
    named = config_of(tmp_path, data, source={"answer_field": "solution"}, judge=judge)
    assert '"solution": "..."' in refusal(partial(prompts, named))
    environment = {"kind": "environment", "environment": "a:b"}
    assert prompts(config_of(tmp_path, data, source={}, agent_loop=environment))


@pytest.mark.parametrize("name", [SESSION, TURNS, "question", "messages"])
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "hf_disk"])
def test_a_column_that_raypost_would_take_for_its_own_is_refused(
    kind: str, name: str, tmp_path: Path
) -> None:
    data = [{"prompt": f"What is {n}?", "answer": n, "level": 1, name: None} for n in range(60)]
    data[30][name] = "mine"
    text = refusal(partial(build_source, config_of(tmp_path, data, kind, source={}).tasks[0], 0))
    assert f"has '{name}', which raypost uses itself" in text and f"ignore_fields: ['{name}']" in text
    if kind == "jsonl":
        assert "line 31" in text
    (tmp_path / "b").mkdir()
    left_out = config_of(tmp_path / "b", data, kind, source={"ignore_fields": [name, "level"]})
    assert all(set(prompt.metadata) == {"question", "answer"} for prompt in prompts(left_out))


def test_what_a_conversation_is_rendered_from_is_what_its_tokens_say(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    config = config_of(tmp_path, rows())
    assert "question" in reserved_names(config.tasks[0].source)
    text = rendered(config, tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids.dtype == np.int32 and ids[0] == tokenizer.encode("<|im_start|>", add_special_tokens=False)[0]
