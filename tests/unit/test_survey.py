"""All prompts of a source are looked at before a run: once, and what is long, twice there or empty is named."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from raypost.cli import app
from raypost.config import Config, parse_config
from raypost.data import lengths, row_index
from raypost.data.prompt import Prompt, render, text_for_engine
from raypost.data.sampler import Sampler
from raypost.data.survey import survey_source
from raypost.data.task_source import build_source, evaluation_prompts
from raypost.data.tokenizer import Tokenizer
from raypost.errors import ConfigError
from raypost.plan import plan
from raypost.plan.prompts import dropped_prompts
from raypost.report.prompt_terminal import prompt_text
from tests.factories import plain_config
from tests.unit.model_folders import write_model

LONG = "one two three four five six seven eight nine ten eleven twelve"


def rows(count: int = 60) -> list[dict[str, Any]]:
    return [{"prompt": f"{n} + 1 =", "answer": str(n + 1)} for n in range(count)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", tie_word_embeddings=True)


def raw(model: Path, data: list[dict[str, Any]], **task: Any) -> dict[str, Any]:
    folder = model.parent
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in data))
    os.utime(path, (1e9, 1e9))
    source = {"kind": "jsonl", "dataset": str(path), "index_dir": str(folder / "index")}
    source |= task.pop("source", {})
    one = {"source": source, "judge": {"kind": "exact"}, "max_prompt_tokens": 20, "max_tokens": 8, **task}
    return plain_config(
        model__name=str(model), tasks=[one], runs_dir=str(folder / "runs"), train__batch_size=4
    )


def config_of(model: Path, data: list[dict[str, Any]], **task: Any) -> Config:
    return parse_config(raw(model, data, **task))


def with_long(at: tuple[int, ...] = (41, 50), count: int = 60) -> list[dict[str, Any]]:
    data = rows(count)
    for n in at:
        data[n]["prompt"] = f"{LONG} {n}"
    return data


def command(model: Path, content: dict[str, Any], *options: str) -> tuple[int, str]:
    """Exit code and output of `raypost plan`."""
    path = model.parent / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    found = CliRunner().invoke(app, ["plan", "--config", str(path), "--cluster", "none", *options])
    return found.exit_code, found.output


# ---------------------------------------------------------------- long prompts


def test_a_long_prompt_anywhere_is_refused_with_its_row(model: Path) -> None:
    # Far beyond the prompts that a quick look would see.
    code, text = command(model, raw(model, with_long((1500,), 2000)))
    assert code == 2
    assert "1 of 2000 prompts do not fit max_prompt_tokens 20: " in text and "rows.jsonl line 1501 (" in text
    assert "raise it, or set on_long_prompt: drop" in text


def test_long_prompts_are_dropped_counted_and_never_handed_out(model: Path) -> None:
    code, text = command(model, raw(model, with_long(), on_long_prompt="drop"))
    assert code == 0
    said = " ".join(text.split())
    assert "2 of 60 prompts do not fit max_prompt_tokens and are dropped" in said and "line 42 (" in said
    assert "; 2 dropped" in said
    config = config_of(model, with_long(), on_long_prompt="drop")
    task, tokenizer = config.tasks[0], Tokenizer.load(model)
    source: Any = build_source(task, 0, tokenizer)
    sampler = Sampler(task, source, lambda one: render(one, tokenizer, task), tokenizer.eos_ids, 0)
    trained = {sampler.sample().states[0].metadata["question"] for _ in range(len(source))}
    evaluated = {p.metadata["question"] for p in evaluation_prompts(config, task, 60, tokenizer)}
    [lost] = dropped_prompts(config, tokenizer)
    assert "2 of 60 prompts" in lost and "line 42 (" in lost, "as the report says it"
    with pytest.raises(ConfigError, match="2 of 60 prompts do not fit"):
        dropped_prompts(config_of(model, with_long()), tokenizer)
    assert trained | evaluated == {row["prompt"] for row in with_long() if LONG not in row["prompt"]}


@pytest.mark.parametrize("name", ["sequence", "stream"])
def test_what_is_dropped_of_a_function_is_not_handed_out_either(name: str, model: Path) -> None:
    source = {"kind": "python", "dataset": f"tests.unit.prompts:{name}", "params": {"count": 40}}
    changes: dict[str, Any] = {"source": source, "prompt_template": "{question}" + "!" * 4}
    tokenizer = Tokenizer.load(model)
    sizes, short = [], len(tokenizer.encode("What is 5?!!!!"))
    for limit in (short, 300):
        config = config_of(model, rows(), max_prompt_tokens=limit, on_long_prompt="drop", **changes)
        task = config.tasks[0]
        made: Any = build_source(task, 0, tokenizer)
        found = list(made.prompts()) if name == "stream" else [made.sample(n) for n in range(len(made))]
        assert all(len(render(one, tokenizer, task)) <= limit for one in found)
        sizes.append(len(found))
    assert 0 < sizes[0] < sizes[1]


def test_a_source_that_is_dropped_whole_is_refused(model: Path) -> None:
    data = [{"prompt": f"{LONG} {n}", "answer": "1"} for n in range(60)]
    with pytest.raises(ConfigError, match="all prompts are dropped: none fits max_prompt_tokens 20"):
        plan.check(config_of(model, data, on_long_prompt="drop"))


def test_only_the_beginning_of_a_stream_is_looked_at_and_said_so(model: Path) -> None:
    source = {"kind": "python", "dataset": "tests.unit.prompts:endless"}
    config = config_of(model, rows(), source=source, max_prompt_tokens=60)
    lines = dict(plan.check(config).batch)
    assert lines["prompts of task 'default'"].startswith("the first 1000 looked at; ")


# ---------------------------------------------------------------- once


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_index, "MIN_ROWS", 20)


@pytest.mark.usefixtures("few")
def test_what_is_known_is_not_computed_again_until_something_changes(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []

    def counting(prompt: Prompt, tokenizer: Tokenizer, task: Any) -> str:
        counted.append(1)
        return text_for_engine(prompt, tokenizer, task)

    monkeypatch.setattr(lengths, "text_for_engine", counting)

    def look(data: list[dict[str, Any]], **task: Any) -> tuple[int, np.ndarray]:
        counted.clear()
        found = survey_source(config_of(model, data, **task).tasks[0], 0, Tokenizer.load(model))
        return len(counted), found.tokens

    first = look(rows())
    assert first[0] == 60 and first[1].min() > 0
    again = look(rows())
    assert again[0] == 0 and np.array_equal(again[1], first[1])
    assert look(rows(), max_prompt_tokens=5)[0] == 0, "the lengths are the same"
    other = rows()
    other[7]["prompt"] = "x"
    assert look(other)[0] == 60
    assert look(rows(), prompt_template="{question} ")[0] == 60
    assert look(rows(), system_prompt="x", max_prompt_tokens=90)[0] == 60
    assert look(rows(), source={"index_dir": None})[0] == 60
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**settings, "unk_token": "<unk>"}))
    assert look(rows())[0] == 60, "another tokenizer"


def test_lengths_are_those_of_the_ids(model: Path) -> None:
    config = config_of(model, with_long(), system_prompt="Think.", max_prompt_tokens=300)
    task, tokenizer = config.tasks[0], Tokenizer.load(model)
    found = survey_source(task, 0, tokenizer)
    expected = [
        len(render(Prompt(r["prompt"], {"question": r["prompt"]}), tokenizer, task)) for r in with_long()
    ]
    assert found.tokens.tolist() == expected


def test_a_row_that_a_template_refuses_is_named(model: Path) -> None:
    (model.parent / "own.jinja").write_text(
        "{% if '17 +' in messages[0].content %}{{ raise_exception('not that') }}{% endif %}{{ messages[0].content }}"
    )
    content = raw(model, rows(), chat_template=str(model.parent / "own.jinja"))
    code, text = command(model, content)
    assert code == 2 and "rows.jsonl line 18: chat template of the task failed: not that" in text


# ---------------------------------------------------------------- what is odd


def test_twins_empty_answers_and_few_prompts_are_warned_of(model: Path) -> None:
    data = rows(40)
    data[30]["prompt"] = data[35]["prompt"] = data[3]["prompt"]
    data[12]["answer"] = " "
    code, text = command(model, raw(model, data))
    said = " ".join(text.split())
    assert code == 0
    assert "2 prompts are there more than once: " in said
    assert "rows.jsonl line 31 repeats " in said and "rows.jsonl line 4" in said
    assert (
        "1 rows have an empty answer, which no response equals: the first is " in said and "line 13" in said
    )
    content = raw(model, [row for row in rows(60) if row["prompt"][:2] in ("4 ", "5 ", "6 ", "7 ")])
    content["eval"] = {"num_prompts": 0}
    code, text = command(model, content)
    assert code == 0 and "prompts for 8 groups at work: a prompt comes several times" in " ".join(
        text.split()
    )


# ---------------------------------------------------------------- a file that changes


@pytest.mark.parametrize("change", ["written", "replaced", "gone"])
def test_a_file_that_changes_under_the_run_is_named(change: str, model: Path) -> None:
    task = config_of(model, rows()).tasks[0]
    source: Any = build_source(task, 0)
    path = model.parent / "rows.jsonl"
    source.sample(0)
    if change == "written":
        with path.open("a") as file:
            file.write('{"prompt": "new", "answer": "1"}\n')
    else:
        path.rename(model.parent / "moved")
        if change == "replaced":
            path.write_text((model.parent / "moved").read_text().replace("+", "-"))
    with pytest.raises(ConfigError, match=r"rows\.jsonl changed while the run reads it"):
        source.sample(1)


# ---------------------------------------------------------------- shown


def test_prompts_are_shown_as_an_engine_is_given_them(model: Path) -> None:
    code, text = command(
        model, raw(model, rows(), system_prompt="Be\tshort. ", max_prompt_tokens=90), "--show-prompts", "2"
    )
    assert code == 0
    task, tokenizer = config_of(model, rows(), system_prompt="Be\tshort. ").tasks[0], Tokenizer.load(model)
    source: Any = build_source(task, 0)
    for number in (0, 1):
        prompt = source.sample(number)
        question = prompt.metadata["question"]
        assert (
            f"rows.jsonl line {int(question.split()[0]) + 1}, {len(render(prompt, tokenizer, task))} tokens"
            in text
        )
        shown = f"<|im_start|>system⏎\nBe⇥\tshort.<|im_end|>⏎\n<|im_start|>user⏎\n{question}<|im_end|>⏎\n"
        assert shown.replace("\t", "") in text.replace("\t", "").replace("      ", "").replace("     ", "")
    assert text.count("<|im_start|>assistant⏎") == 2


def test_a_token_that_only_the_tokenizer_adds_is_shown(model: Path) -> None:
    code, text = command(model, raw(model, rows()), "--show-prompts", "1")
    assert code == 0 and "<bos>" in text


def test_what_one_does_not_see_has_a_sign() -> None:
    shown = prompt_text("a  \n\u200bb\u00a0<pad>c \x00", ["<pad>"])
    assert shown.plain == "a··⏎\n⟨ZERO WIDTH SPACE⟩b⟨NO-BREAK SPACE⟩<pad>c ⟨U+0000⟩"
    assert [shown.plain[s.start : s.end] for s in shown.spans if s.style == "bold magenta"] == ["<pad>"]
