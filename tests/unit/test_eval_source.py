"""eval.source: evaluation problems of their own, and a training source of which nothing is held out then."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from raypost.config import Config, parse_config
from raypost.config.identity import run_digest
from raypost.data import row_index
from raypost.data.task_source import build_source, evaluation_prompts, held_out
from raypost.errors import ConfigError
from raypost.plan.plan import check
from tests.factories import plain_config

QUESTION = "State the final answer to the following arithmetic problem: {} + {} ="


def write(path: Path, numbers: range) -> str:
    rows = [{"prompt": QUESTION.format(n, n), "answer": str(2 * n)} for n in numbers]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
        os.utime(path, (1e9, 1e9))  # an index belongs to a file that was not written just now
    return str(path)


def config(folder: Path, trained: range, evaluated: range | None, **changes: Any) -> Config:
    source = {
        "kind": "jsonl",
        "dataset": write(folder / "data.jsonl", trained),
        "index_dir": str(folder / "index"),
    }
    judge = {"kind": "exact"}
    plain = plain_config(
        tasks=[{"name": "sums", "source": source, "judge": judge}], runs_dir=str(folder / "runs")
    )
    if evaluated is not None:
        plain["eval"] = {"source": {"kind": "jsonl", "dataset": write(folder / "eval.jsonl", evaluated)}}
    plain["eval"] = {"num_prompts": 128, **plain.get("eval", {}), **changes.pop("eval", {})}
    return parse_config({**plain, **changes})


def questions(cfg: Config) -> set[str]:
    source = build_source(cfg.tasks[0], cfg.seed)
    return {source.sample(n).metadata["question"] for n in range(len(source))}  # type: ignore[arg-type, union-attr]


def test_without_it_a_tenth_is_held_out_and_with_it_all_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = 1000
    monkeypatch.setattr(row_index, "MIN_ROWS", rows)  # so that an index is kept
    for _ in range(2):  # the second time from the index, which knows both
        plain, own = (
            config(tmp_path, range(rows), None),
            config(tmp_path, range(rows), range(rows, rows + 40)),
        )
        held = {p.metadata["question"] for p in evaluation_prompts(plain, plain.tasks[0], rows)}
        assert rows / 20 < len(held) < rows / 5 and len(questions(plain)) == rows - len(held)
        assert not held & questions(plain)
        assert len(questions(own)) == rows
        assert list((tmp_path / "index").glob("*.index"))
    found = evaluation_prompts(own, own.tasks[0], 128)
    assert [p.metadata["answer"] for p in found] == [str(2 * n) for n in range(rows, rows + 40)]
    assert len(evaluation_prompts(own, own.tasks[0], 7)) == 7
    assert run_digest(plain) != run_digest(own)


def test_hold_out_that_is_set_stays_set(tmp_path: Path) -> None:
    cfg = config(tmp_path, range(300), range(300, 340))
    task = cfg.tasks[0].model_dump(mode="json") | {
        "source": {**cfg.tasks[0].source.model_dump(mode="json"), "hold_out": True}
    }
    again = parse_config({**cfg.model_dump(mode="json"), "tasks": [task]})
    assert again.tasks[0].source.hold_out
    assert len(questions(again)) == 300 - len(held_out(again.tasks[0], 0))


def test_plan_shows_the_counts_and_warns_of_what_is_trained_too(tmp_path: Path) -> None:
    plan = check(config(tmp_path, range(300), range(300, 340)))
    assert dict(plan.batch)["evaluation"] == f"sums: 40 prompts x 1, {tmp_path / 'eval.jsonl'}"
    assert not any("eval.source" in text for text in plan.warnings)
    plan = check(config(tmp_path, range(300), range(290, 340)))
    assert any("10 of the 50 prompts of eval.source are trained on too" in text for text in plan.warnings)
    plan = check(config(tmp_path, range(300), None))
    assert "prompts x 1, held out of" in dict(plan.batch)["evaluation"]


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"eval": {"task": "other"}}, r"eval.task is 'other'.*name one of \['sums'\]"),
        ({"eval": {"source": None, "task": "sums"}}, "set eval.source, or leave it out"),
    ],
)
def test_what_names_no_task_is_refused(tmp_path: Path, changes: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        config(tmp_path, range(30), range(30, 40), **changes)


def test_several_tasks_need_the_name_of_the_one_and_the_others_hold_out_theirs(tmp_path: Path) -> None:
    one = config(tmp_path, range(300), range(300, 340)).model_dump(mode="json")
    source = {**one["tasks"][0]["source"], "hold_out": True}
    tasks = [{**one["tasks"][0], "source": source}, {**one["tasks"][0], "name": "more", "source": source}]
    with pytest.raises(ConfigError, match=r"evaluates one task, and there are \['sums', 'more'\]"):
        parse_config({**one, "tasks": tasks})
    named = parse_config({**one, "tasks": tasks, "eval": {**one["eval"], "task": "more"}})
    assert [bool(named.evaluated(task)) for task in named.tasks] == [False, True]
    for task in tasks:
        task["source"] = {**source, "hold_out": False}
    with pytest.raises(ConfigError, match=r"task 'sums': source.hold_out is false"):
        parse_config({**one, "tasks": tasks, "eval": {**one["eval"], "task": "more"}})


def test_evaluation_prompts_that_cannot_be_are_refused_by_plan(tmp_path: Path) -> None:
    cfg = config(tmp_path, range(300), range(300, 340))
    (tmp_path / "eval.jsonl").write_text('{"prompt": "What is love?", "answer": "2"}\n')
    with pytest.raises(ConfigError, match=r"can read nothing but sums.*What is love"):
        check(cfg)
    (tmp_path / "eval.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"eval\.jsonl"):
        check(cfg)
