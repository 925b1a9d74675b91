"""Where prompts come from, and which are held out."""

from __future__ import annotations

import importlib
import itertools
import json
import pickle
import sys
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from raypost.config import JudgeConfig, SourceConfig, TaskConfig
from raypost.data.prompt import Prompt, is_held_out, render
from raypost.data.rows import ParquetRows
from raypost.data.sources import StreamSource
from raypost.data.task_source import build_source, check_source, held_out
from raypost.data.tokenizer import Tokenizer
from raypost.errors import ConfigError
from tests.unit.prompts import rows


def built(task: TaskConfig, seed: int) -> Any:
    """The task's source, whichever kind it is."""
    return build_source(task, seed)


def first(task: TaskConfig, seed: int) -> Prompt:
    """The first prompt of the task's source."""
    prompt: Prompt = built(task, seed).sample(0)
    return prompt


def gym_task(**changes: Any) -> TaskConfig:
    params = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    source: dict[str, Any] = {
        "kind": "reasoning_gym",
        "dataset": "chain_sum",
        "params": params,
        "size": 2000,
    } | changes
    return TaskConfig(source=SourceConfig(**source))


def jsonl_task(path: Path, **changes: Any) -> TaskConfig:
    source = SourceConfig(kind="jsonl", dataset=str(path))
    return TaskConfig(source=source, judge=JudgeConfig(kind="exact"), **changes)


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"What is {n}?", "answer": n}) + "\n" for n in range(200)))
    return path


def test_the_same_seed_gives_the_same_prompts_and_another_seed_others() -> None:
    first, again, other = (built(gym_task(), seed) for seed in (1, 1, 2))
    texts = [[source.sample(i).text for i in range(50)] for source in (first, again, other)]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_no_held_out_question_is_ever_trained_on_though_all_two_digit_sums_are_seen() -> None:
    task = gym_task()
    held = {prompt.metadata["question"] for seed in (0, 1) for prompt in held_out(task, seed)}
    sources = [built(task, seed) for seed in (0, 1)]
    trained = {source.sample(i).metadata["question"] for source in sources for i in range(2000)}
    assert len(trained) > 150 and len(held) >= 10
    assert not trained & held
    assert all(is_held_out(question) for question in held)


def test_held_out_prompts_differ_from_each_other_and_stop_at_the_limit() -> None:
    questions = [
        prompt.metadata["question"] for prompt in held_out(gym_task(size=100_000), 0, num_prompts=12)
    ]
    assert len(questions) == len(set(questions)) == 12


def test_an_index_outside_the_source_is_refused() -> None:
    source = built(gym_task(size=10), 0)
    assert len(source) == 10
    source.sample(9)
    with pytest.raises(IndexError, match="index 10 of a source of 10"):
        source.sample(10)


def test_a_dataset_whose_library_is_imported_when_it_is_used_makes_problems() -> None:
    params = {"grid_size_x": 3, "grid_size_y": 3, "filled_cells": 2}
    prompt = first(gym_task(dataset="game_of_life", params=params), seed=1)
    board = json.loads(prompt.metadata["answer"])
    assert [len(row) for row in board] == [3, 3, 3] and "matplotlib" in sys.modules


def test_a_prompt_carries_the_answer_and_the_entry_its_scorer_needs() -> None:
    prompt = built(gym_task(), 0).sample(3)
    assert prompt.metadata["entry"]["answer"] == prompt.metadata["answer"]
    assert prompt.metadata["question"] == prompt.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dataset": "chain_sun"}, "no dataset 'chain_sun'"),
        ({"params": {"min_terms": 0}}, "min_terms"),
        ({"params": {"terms": 3}}, "terms"),
    ],
)
def test_an_unknown_dataset_or_parameter_is_a_config_error(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        built(gym_task(**change), 0)


def refusal(ask: Callable[[], object]) -> str:
    try:
        ask()
    except ConfigError as error:
        return str(error)
    return ""


def test_a_source_of_one_problem_is_refused_by_the_side_that_gets_none() -> None:
    task = gym_task(size=1)
    training = [refusal(partial(first, task, seed)) for seed in range(60)]
    evaluation = [refusal(partial(held_out, task, seed)) for seed in range(60)]
    assert 0 < sum("too few different ones" in text for text in training) < 30
    assert 30 < sum("no held-out problem" in text for text in evaluation) < 60


# ---------------------------------------------------------------- rows of any kind


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]], row_group_size: int = 64) -> Path:
    pyarrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=row_group_size)
    return path


def write_saved(path: Path, rows: list[dict[str, Any]]) -> Path:
    datasets = importlib.import_module("datasets")
    datasets.Dataset.from_list(rows).save_to_disk(str(path))
    return path


def task_of(kind: Any, dataset: Any, **changes: Any) -> TaskConfig:
    template = changes.pop("prompt_template", "{question}")
    source = SourceConfig(kind=kind, dataset=dataset, **changes)
    return TaskConfig(source=source, judge=JudgeConfig(kind="exact"), prompt_template=template)


KINDS = ("jsonl", "parquet", "hf_disk", "sequence", "stream")


def written(kind: str, folder: Path, count: int = 200, **changes: Any) -> TaskConfig:
    """A task on `count` rows of that kind."""
    match kind:
        case "jsonl":
            return task_of(kind, str(write_jsonl(folder / "rows.jsonl", rows(count))), **changes)
        case "parquet":
            return task_of(kind, str(write_parquet(folder / "rows.parquet", rows(count))), **changes)
        case "hf_disk":
            return task_of(kind, str(write_saved(folder / "saved", rows(count))), **changes)
        case _:
            return task_of("python", f"tests.unit.prompts:{kind}", params={"count": count}, **changes)


def every(source: Any) -> list[Prompt]:
    """All prompts of a source, in its own order."""
    if isinstance(source, StreamSource):
        return list(source.prompts())
    return [source.sample(i) for i in range(len(source))]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_split_once_and_for_all_between_training_and_evaluation(kind: str, tmp_path: Path) -> None:
    task = written(kind, tmp_path, prompt_template="Q: {question} {json}")
    trained, held = every(built(task, 0)), held_out(task, 7)
    assert len(trained) + len(held) == 200
    assert len(held) > 10
    assert not {p.text for p in trained} & {p.text for p in held}
    assert all(is_held_out(p.metadata["question"]) for p in held)
    assert trained[0].text.startswith("Q: What is ") and trained[0].text.endswith("? {json}")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_the_same_prompts_and_keeps_further_fields(kind: str, tmp_path: Path) -> None:
    prompts = every(built(written(kind, tmp_path), 0))
    expected = every(built(written("sequence", tmp_path), 0))
    assert prompts == expected
    assert prompts[5].metadata["level"] == int(prompts[5].metadata["answer"]) % 3
    assert set(prompts[5].metadata) == {"question", "answer", "level"}


@pytest.mark.parametrize("kind", KINDS)
def test_size_bounds_the_rows_of_both_sides(kind: str, tmp_path: Path) -> None:
    task = written(kind, tmp_path, size=50)
    numbers = {int(p.metadata["answer"]) for p in [*every(built(task, 0)), *held_out(task, 0)]}
    assert numbers == set(range(50))


@pytest.mark.parametrize("kind", KINDS)
def test_a_source_sent_to_another_process_reads_the_same(kind: str, tmp_path: Path) -> None:
    source = built(written(kind, tmp_path), 0)
    before = every(source)
    assert every(pickle.loads(pickle.dumps(source))) == before


@pytest.mark.parametrize("kind", KINDS)
def test_identity_tells_other_questions_apart_and_nothing_else(kind: str, tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    mine, same, other = (
        built(written(kind, tmp_path / name, count), 0).identity
        for name, count in (("a", 200), ("b", 200), ("c", 199))
    )
    assert mine == same != other


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_pattern_and_a_list_of_files_are_read_in_a_fixed_order(kind: str, tmp_path: Path) -> None:
    write = {"jsonl": write_jsonl, "parquet": write_parquet}[kind]
    paths = [
        write(tmp_path / f"{name}.{kind}", rows(30, start))
        for name, start in (("b", 30), ("a", 0), ("c", 60))
    ]
    whole = every(built(task_of(kind, str(write(tmp_path / "whole", rows(90)))), 0))
    assert every(built(task_of(kind, str(tmp_path / f"?.{kind}")), 0)) == whole
    listed = every(built(task_of(kind, [str(paths[1]), str(tmp_path / f"[bc].{kind}"), str(paths[0])]), 0))
    assert listed == whole
    backwards = every(built(task_of(kind, [str(paths[2]), str(paths[0]), str(paths[1])]), 0))
    assert backwards != whole and {p.text for p in backwards} == {p.text for p in whole}


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "hf_disk"])
def test_fields_may_have_other_names(kind: str, tmp_path: Path) -> None:
    named = [{"problem": row["prompt"], "solution": row["answer"], "answer": "no"} for row in rows(40)]
    write = {"jsonl": write_jsonl, "parquet": write_parquet, "hf_disk": write_saved}[kind]
    fields = {"question_field": "problem", "answer_field": "solution"}
    path = str(write(tmp_path / "rows", named))
    prompts = every(built(task_of(kind, path, **fields, ignore_fields=("answer",)), 0))
    assert prompts[0].metadata["answer"] in prompts[0].text
    text = refusal(partial(built, task_of(kind, path, **fields), 0))
    assert "'answer', which raypost uses itself" in text and "source.ignore_fields: ['answer']" in text


def test_parquet_keeps_no_more_row_groups_than_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = task_of("parquet", str(write_parquet(tmp_path / "rows", rows(200), row_group_size=10)))
    monkeypatch.setattr("raypost.data.rows.CACHE_BYTES", 1000)
    table = ParquetRows(task)
    assert [table.row(n)["answer"] for n in [*range(200), 3, 199, 4]] == [*range(200), 3, 199, 4]
    assert sum(one.nbytes for one in table._tables.values()) <= 1000


def test_jsonl_is_not_read_into_memory(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows", [{**row, "text": "x" * 10_000} for row in rows(1000)])
    tracemalloc.start()
    try:
        source = built(task_of("jsonl", str(path)), 0)
        source.sample(len(source) - 1)
        assert tracemalloc.get_traced_memory()[1] < 300_000
    finally:
        tracemalloc.stop()


def test_a_line_may_hold_any_character_json_allows(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_text(
        '\n{"prompt": "a\u2028b", "answer": "\x85"}\r\n  \n{"prompt": "c", "answer": 0}', encoding="utf-8"
    )
    prompts = every(built(task_of("jsonl", str(path)), 0))
    assert [(p.text, p.metadata["answer"]) for p in prompts] == [("a\u2028b", "\x85"), ("c", "0")]


def test_a_file_that_changes_under_the_run_is_an_error_where_it_is_opened_again(tmp_path: Path) -> None:
    task = written("jsonl", tmp_path)
    sent = pickle.dumps(built(task, 0))
    write_jsonl(tmp_path / "rows.jsonl", rows(200, 7))
    with pytest.raises(ConfigError, match="changed while the run reads it"):
        pickle.loads(sent).sample(0)
    (tmp_path / "rows.jsonl").unlink()
    with pytest.raises(ConfigError, match="changed while the run reads it"):
        pickle.loads(sent).sample(0)


def test_a_changed_file_is_read_again_by_a_new_source(tmp_path: Path) -> None:
    task = written("jsonl", tmp_path)
    before = len(built(task, 0)) + len(held_out(task, 0))
    write_jsonl(tmp_path / "rows.jsonl", rows(201))
    assert len(built(task, 0)) + len(held_out(task, 0)) == before + 1


def test_an_endless_stream_is_read_only_as_far_as_needed() -> None:
    task = task_of("python", "tests.unit.prompts:endless")
    assert len(held_out(task, 0, num_prompts=20)) == 20
    assert len(check_source(task, 0)) == 64
    first = itertools.islice(built(task, 0).prompts(), 100)
    assert not any(is_held_out(p.metadata["question"]) for p in first)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("kind", KINDS)
def test_check_source_gives_the_first_prompts(kind: str, tmp_path: Path) -> None:
    task = written(kind, tmp_path)
    assert check_source(task, 0) == every(built(task, 0))[:64]


def test_check_source_stops_at_its_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_jsonl(tmp_path / "rows", [*rows(500), {"prompt": "no answer"}])
    monkeypatch.setattr("raypost.data.task_source.CHECK_S", 0.0)
    assert len(check_source(task_of("jsonl", str(path)), 0)) == 1
    monkeypatch.setattr("raypost.data.task_source.CHECK_S", 60.0)
    with pytest.raises(ConfigError, match="line 501 must be like"):
        check_source(task_of("jsonl", str(path)), 0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "0 prompts"),
        ("\n\n", "0 prompts"),
        ('{"prompt": "a"}\n', "line 1 must be like"),
        ('\n{"prompt": "a", "answer": 1}\n[1]\n', r"line 3 must be a JSON object, got \[1\]"),
        ("no json\n", "line 1 must be a JSON object, got 'no json'"),
        ('{"prompt": "a", "answer": null}\n', 'line 1 must be like {"prompt": "...", "answer": "..."}, got'),
        ('{"prompt": ["a"], "answer": 1}\n', "line 1 must be like"),
        ('{"prompt": " ", "answer": 1}\n', "source.question_field and source.answer_field"),
        (b'{"prompt": "\xff", "answer": 1}\n', "line 1 must be a JSON object.*utf-8"),
    ],
)
def test_an_empty_or_malformed_jsonl_file_is_a_config_error(
    tmp_path: Path, content: str | bytes, message: str
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=message):
        check_source(jsonl_task(path), 0)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent", "'default': cannot read .*absent: No such file"),
        ("", "cannot read .*: Is a directory"),
        ("*.rows", r"no file matches .*\*\.rows: correct source.dataset"),
    ],
)
def test_a_missing_file_is_a_config_error(kind: str, name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        check_source(task_of(kind, str(tmp_path / name)), 0)


def test_a_file_that_is_no_parquet_file_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "rows").write_text("no parquet file, but long enough to be one")
    with pytest.raises(ConfigError, match="rows is no Parquet file"):
        check_source(task_of("parquet", str(tmp_path / "rows")), 0)


@pytest.mark.parametrize("kind", ["parquet", "hf_disk"])
def test_a_missing_column_is_named_with_those_there_are(kind: str, tmp_path: Path) -> None:
    write = {"parquet": write_parquet, "hf_disk": write_saved}[kind]
    task = task_of(kind, str(write(tmp_path / "rows", rows(20))), answer_field="solution")
    with pytest.raises(
        ConfigError, match=r"no column 'solution': it has prompt, answer, level; set source.answer_f"
    ):
        check_source(task, 0)


@pytest.mark.parametrize("kind", ["parquet", "hf_disk"])
def test_a_null_is_named_with_its_row(kind: str, tmp_path: Path) -> None:
    write = {"parquet": write_parquet, "hf_disk": write_saved}[kind]
    bad = [*rows(20), {"prompt": None, "answer": 1, "level": 1}]
    with pytest.raises(ConfigError, match=r"row 20.* must be like"):
        check_source(task_of(kind, str(write(tmp_path / "rows", bad))), 0)


def test_a_saved_dataset_with_splits_needs_one_of_them(tmp_path: Path) -> None:
    datasets = importlib.import_module("datasets")
    split = datasets.DatasetDict({"train": datasets.Dataset.from_list(rows(50))})
    split.save_to_disk(str(tmp_path / "saved"))
    path = str(tmp_path / "saved")
    assert len(every(built(task_of("hf_disk", path, params={"split": "train"}), 0))) > 30
    with pytest.raises(ConfigError, match=r"has the splits train, source.params.split is 'test'"):
        check_source(task_of("hf_disk", path, params={"split": "test"}), 0)
    with pytest.raises(ConfigError, match="has no splits"):
        check_source(task_of("hf_disk", str(tmp_path / "saved" / "train"), params={"split": "train"}), 0)
    with pytest.raises(ConfigError, match="cannot read"):
        check_source(task_of("hf_disk", str(tmp_path / "absent")), 0)


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("absent_module:rows", {}, "importing absent_module failed"),
        ("tests.unit.prompts:absent", {}, "has no 'absent'"),
        ("tests.unit.prompts:NOT_A_FUNCTION", {}, "is a int and no function"),
        ("tests.unit.prompts:paths", {}, "metadata holds a pathlib.PosixPath: it must be plain data"),
        ("tests.unit.prompts:sequence", {"cuont": 3}, "cannot be called with source.params {'cuont': 3}"),
        ("tests.unit.prompts:text", {}, "returned a str: it must return a sequence or an iterable"),
        ("tests.unit.prompts:sequence", {"count": 0}, "holds 0 prompts"),
        ("tests.unit.prompts:stream", {"count": 0}, "gives no prompt to train"),
        ("tests.unit.prompts:one_shot", {}, "returned the same iterator twice"),
        ("tests.unit.prompts:numbers", {}, "numbers: row 0 must be like"),
        ("tests.unit.prompts:raising", {}, "failed with OSError: the network is gone"),
    ],
)
def test_a_function_that_gives_no_rows_is_a_config_error(
    name: str, params: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_source(task_of("python", name, params=params), 0)


def test_a_sequence_that_differs_in_another_process_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = pickle.dumps(built(task_of("python", "tests.unit.prompts:sequence"), 0))
    monkeypatch.setattr("tests.unit.prompts.sequence", lambda: rows(99))
    with pytest.raises(ConfigError, match="returned 100 rows, and in another process 99"):
        pickle.loads(sent)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "csv"}, "'reasoning_gym', 'jsonl', 'parquet', 'hf_disk' or 'python'"),
        ({"kind": "hf_disk", "dataset": ["a", "b"]}, "a list of 2, which kind 'hf_disk' cannot have"),
        ({"dataset": []}, "at least 1 item"),
        ({"kind": "python", "dataset": "module.function"}, "no import path: write it as module:function"),
        (
            {"params": {"split": "train"}},
            "params has split, which kind 'jsonl' does not use: leave params out",
        ),
        ({"kind": "hf_disk", "params": {"name": 1}}, "params has name, .*: it has split alone"),
        ({"answer_field": "prompt"}, "both 'prompt': the answer would be in the prompt"),
        ({"kind": "reasoning_gym", "answer_field": "a"}, "kind 'reasoning_gym' has no fields"),
        ({"size": 0}, "greater than or equal to 1"),
        ({"num_workers": -1}, "greater than or equal to 0"),
    ],
)
def test_options_that_cannot_work_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SourceConfig(**({"kind": "jsonl", "dataset": "x.jsonl"} | changes))


# ---------------------------------------------------------------- token ids


def test_render_uses_plain_text_or_the_chat_template(tmp_path: Path, jsonl: Path) -> None:
    vocabulary = {"<eos>": 0, "<user>": 1, "What": 2, "<unk>": 3}
    _write_tokenizer(tmp_path, vocabulary, "{% for m in messages %}<user>{{ m.content }}{% endfor %}")
    tokenizer = Tokenizer.load(tmp_path)
    prompt = built(jsonl_task(jsonl), 0).sample(0)
    plain = render(prompt, tokenizer, jsonl_task(jsonl))
    chat = render(prompt, tokenizer, jsonl_task(jsonl, chat=True))
    assert plain[0] == 2
    assert chat[:2].tolist() == [1, 2]
    assert chat.tolist()[1:] == plain.tolist()


def _write_tokenizer(folder: Path, vocabulary: dict[str, int], template: str) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers

    backend = Backend(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<user>", "<eos>"])
    backend.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<eos>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
