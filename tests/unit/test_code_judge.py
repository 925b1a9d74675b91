"""The judge `code`: what a program is worth by its tests, whose fault it is, and programs that would rather cheat."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from raypost.config import Config, JudgeConfig, load_config
from raypost.errors import Boundary, ConfigError, JudgeError, boundary_of
from raypost.judges import TaskJudge, code_child
from raypost.judges.code import CodeJudge, extract_code, read_tests, same_output, try_code
from raypost.plan.plan import check
from raypost.sandbox import Outcome, why_not
from raypost.types import Score
from tests.factories import plain_config, refusal_of
from tests.unit.cheating_programs import CHEATS
from tests.unit.reward_functions import state_of, task_of
from tests.unit.sandboxes import needs_sandbox

DOUBLE = "def f(x):\n    return 2 * x\n"
ASSERTS = ["assert f(2) == 4", "assert f(3) == 6", "assert f([1]) == [1, 1]"]


def code_config(**changes: Any) -> JudgeConfig:
    return JudgeConfig(kind="code", **{"cpu_s": 5, **changes})


def judged(given: object, *programs: str, row: dict[str, Any] | None = None, **changes: Any) -> list[Score]:
    """Scores of programs by these tests."""
    judge = CodeJudge(code_config(**changes))
    states = [state_of(program, n, **{"tests": given, **(row or {})}) for n, program in enumerate(programs)]
    scores = asyncio.run(judge.judge(states))
    assert all(isinstance(score, Score) for score in scores)
    return scores  # type: ignore[return-value]


# ---------------------------------------------------------------- which program, which tests


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("f = 1", "f = 1"),
        ("Here:\n```python\nf = 1\n```\nDone.", "f = 1\n"),
        ("```\nfirst\n```\nand\n```py\nlast\n```", "last\n"),
        ("```python\nf = '```'\n```", "f = '```'\n"),
        ("  ```python\nf = 1\n  ```", "f = 1\n"),
        ("```python\nnever ended", "```python\nnever ended"),
        ("```\n```", ""),
    ],
)
def test_the_last_fenced_block_is_the_program_or_the_whole_response(response: str, code: str) -> None:
    assert extract_code(response) == code


@pytest.mark.parametrize(
    ("kind", "column", "tests"),
    [
        ("python", "assert f(1) == 1", "assert f(1) == 1"),
        ("python", ["x = 1", "assert f(x) == 1"], "x = 1\nassert f(x) == 1"),
        ("python", '["assert f(1)", "assert f(2)"]', "assert f(1)\nassert f(2)"),
        ("stdio", [{"input": "1", "output": "2"}], [("1", "2")]),
        ("stdio", '[{"input": "1", "output": "2"}]', [("1", "2")]),
        ("stdio", {"inputs": ["1", "2"], "outputs": ["3", "4"]}, [("1", "3"), ("2", "4")]),
    ],
)
def test_tests_are_read_in_the_forms_that_data_has(kind: Any, column: object, tests: object) -> None:
    assert read_tests(code_config(tests=kind), {"tests": column}) == tests


@pytest.mark.parametrize(
    ("kind", "column", "text"),
    [
        ("python", 3, "must be a text of Python or a list of them, got 3"),
        ("python", [{"input": "", "output": ""}], "for inputs and outputs set tests: stdio"),
        ("python", "assert f(", "the tests are no Python: '(' was never closed"),
        ("python", "x = f(2)", "no assert and no function test_"),
        ("python", "", "no assert"),
        ("python", "import unittest\nclass T(unittest.TestCase): pass", "class T of unittest"),
        ("stdio", [], "not empty"),
        ("stdio", [{"input": 1, "output": "2"}], "must be a list of"),
        ("stdio", [{"input": "1"}], "must be a list of"),
        ("stdio", "[{", "tests is no JSON"),
        ("stdio", {"inputs": ["1"], "outputs": []}, "must be a list of"),
    ],
)
def test_what_holds_no_tests_is_refused(kind: Any, column: object, text: str) -> None:
    with pytest.raises(JudgeError) as caught:
        read_tests(code_config(tests=kind), {"tests": column})
    assert text in str(caught.value)
    with pytest.raises(JudgeError, match="has no 'cases', only tests: tests_field names"):
        read_tests(code_config(tests=kind, tests_field="cases"), {"tests": column})


def test_outputs_are_compared_without_spaces_that_nobody_sees() -> None:
    assert same_output("1 \n2\n\n", "1\n2") and same_output("a\r\n", "a")
    assert not same_output("1\n\n2", "1\n2") and not same_output(" 1", "1") and not same_output("", "0")


@pytest.mark.parametrize(
    ("text", "names", "modules"),
    [
        ("assert f(2) == 4", {"f"}, set()),
        ("def g(x): return x\nassert g(f(2)) == h", {"f", "h"}, set()),
        ("assert math.isclose(f(2), 4) and abs(f(2)) < len('a')", {"f"}, {"math"}),
        ("import math\nassert math.floor(f(2)) == 4", {"f"}, set()),
        ("def test_a():\n    x = f(2)\n    assert all(g(y) for y in [x])", {"f", "g"}, set()),
        ("assert select([1]) == 1", {"select"}, set()),
        ("from solution import f\nassert f(1)", set(), set()),
        ("assert __import__('os') and isinstance(f(1), int)", {"f"}, set()),
    ],
)
def test_names_that_tests_or_python_define_are_never_the_submissions(
    text: str, names: set[str], modules: set[str]
) -> None:
    assert code_child.wanted_names(text) == (names, modules)


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, -(2**80), 0.5, "ä\n\ud800", [1, (2, "x"), {3}, frozenset({4})], {(1, 2): [None], "k": {}},
        b"\xff", 1 + 2j, [], (), [10**6000],
    ],
)  # fmt: skip
def test_plain_values_arrive_as_they_are(value: object) -> None:
    def never(_: object) -> int:
        raise AssertionError

    sent = json.loads(json.dumps(code_child.encode(value, never)))
    found = code_child.decode(sent, never)
    assert found == value and type(found) is type(value)


# ---------------------------------------------------------------- scores


@needs_sandbox
def test_a_program_that_passes_all_tests_is_right_and_one_that_fails_some_has_a_share() -> None:
    right, wrong, none = judged(ASSERTS, DOUBLE, "def f(x): return 4", "no code at all")
    assert (right, right.parts, right.words) == (1.0, {"passed": 1.0, "solved": 1.0}, "")
    assert wrong == 0.0 and wrong.parts == {"passed": pytest.approx(1 / 3), "solved": 0.0}
    assert wrong.words.startswith("line 2: AssertionError")
    assert none == 0.0 and "SyntaxError" in none.words
    (share,) = judged(ASSERTS, "def f(x): return 4", partial_credit=True)
    assert share == pytest.approx(1 / 3)


@needs_sandbox
def test_a_response_in_a_fence_is_placed_in_the_program() -> None:
    body = "Sure.\n```python\n    return 2 * x\n```"
    program = "# {question}\ndef f(x):\n{code}"
    assert judged(ASSERTS, body, "```\n\n```", program=program) == [1.0, 0.0]
    kept = "def f(x):\n    return 2 * x if '{question}' == '{' + 'question}' else 0"
    assert judged(ASSERTS, kept) == [1.0]


@needs_sandbox
def test_a_test_file_has_functions_helpers_imports_and_exceptions() -> None:
    tests = """
import math
from solution import Account, f

def close(a, b):
    return math.isclose(a, b)

def test_values():
    assert close(f(0.1), 0.2) and f(2) != 5

def test_objects():
    account = Account(3)
    account.pay(4)
    assert account.total == 7 and account.pay(amount=1) is None

def test_errors():
    try:
        f(None)
    except TypeError as error:
        assert "unsupported" in str(error)
    else:
        raise AssertionError("no error")

def test_that_fails():
    assert f(2) == 5
"""
    program = (
        DOUBLE
        + "class Account:\n def __init__(self, n): self.total = n\n def pay(self, amount): self.total += amount"
    )
    (score,) = judged(tests, DOUBLE + program, partial_credit=True)
    assert score == 0.75 and score.words.startswith("test_that_fails: AssertionError")


@needs_sandbox
def test_check_of_an_entry_point_is_a_test() -> None:
    tests = "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(0) == 0\n"
    assert judged(tests, DOUBLE, "def f(x): return 4", row={"entry_point": "f"}) == [1.0, 0.0]
    assert judged(tests + "check(f)", DOUBLE, "def f(x): return 4") == [1.0, 0.0]


@needs_sandbox
def test_cases_of_input_and_output() -> None:
    cases = [{"input": "1 2\n", "output": "3"}, {"input": "5 5\n", "output": "10\n"}]
    add = "print(sum(map(int, input().split())))"
    right, wrong, crash = judged(cases, add, "print(3)", add + "\nraise SystemExit(1)", tests="stdio")
    assert (right, wrong, crash) == (1.0, 0.0, 0.0)
    assert wrong.words == "case 2: wrote '3\\n'" and "exit code 1" in crash.words
    assert judged(cases, "print(3)", tests="stdio", partial_credit=True) == [0.5]


@needs_sandbox
def test_what_a_program_does_wrong_is_a_low_score(tmp_path: Path) -> None:
    programs = {
        "raise ValueError('at import')": "ValueError: at import",
        "def f(x): raise KeyError('no')": "KeyError",
        "def f(x):\n    while True: pass": "took too long",
        "import time\ndef f(x): time.sleep(60)": "took too long",
        "def f(x): return f(x)": "RecursionError",
        "def f(x): return bytearray(10**10)": "MemoryError",
        "def f(x): print('x' * 10**7)": "wrote too much",
        "def f(x): return 'x' * 2**21": "longer than",
        "import sys\ndef f(x): sys.exit(0)": "SystemExit",
        "def g(x): return 4": "name 'f' is not defined",
        "f = 4": "TypeError",
    }
    scores = judged("assert f(2) == 4", *programs, cpu_s=1)
    for score, (program, words) in zip(scores, programs.items(), strict=True):
        assert score == 0.0 and words in score.words, (program, score.words)


@needs_sandbox
def test_what_tests_do_with_a_programs_value_is_its_fault() -> None:
    (score,) = judged("assert sum(range(f(2))) == 4", "def f(x): return 10**15", cpu_s=1)
    assert score == 0.0 and "the tests took too long" in score.words
    (score,) = judged("assert [0] * f(2) == [0]", "def f(x): return 10**10")
    assert score == 0.0 and "MemoryError" in score.words


def test_a_verdict_that_was_cut_off_counts_up_to_there() -> None:
    told = b'{"tests": 2}\n{"touched": true}\n{"passed": true, "words": ""}\n{"pas'
    ended = {"exit_code": None, "signal": 9, "timed_out": True, "out_of_memory": False, "truncated": False}
    outcome = Outcome(stdout=told, stderr=b"", wall_s=1.0, **ended)  # type: ignore[arg-type]
    score = CodeJudge(code_config())._verdict(outcome)
    assert score.parts == {"passed": 0.5, "solved": 0.0} and score.words == "the tests took too long"


@needs_sandbox
def test_equal_programs_of_a_group_are_run_once() -> None:
    # The clock differs from run to run.
    tests, clock = "assert f() == str(f())", "import time\ndef f(): raise ValueError(time.time_ns())"
    first, second, other = judged(tests, clock, clock, clock + "\n")
    assert first.words == second.words != other.words


# ---------------------------------------------------------------- cheats


CHEATED = """
assert math.isclose(f(1), 2) and f(1) == 2 and abs(f(1) - 2) < 1
assert all(f(x) == y for x, y in [(1, 2), (2, 4)]) and isinstance(f(1), int) and f(1) != 0
assert not list(map(f, [1])) != [2]
"""


@needs_sandbox
def test_no_cheat_passes_a_test() -> None:
    scores = judged(CHEATED, DOUBLE, *CHEATS.values(), cpu_s=2)
    assert scores[0] == 1.0
    for score, name in zip(scores[1:], CHEATS, strict=True):
        assert score.parts["passed"] == 0.0 and score.words, (name, score.words, score.parts)


@needs_sandbox
@pytest.mark.parametrize(
    "test", ["f(1) != 5", "not f(1) == 5", "f(1)", "f(1) in [1]", "f(1) not in [1]", "len(f(1))"]
)
def test_an_object_of_the_programs_own_passes_no_comparison(test: str) -> None:
    own = """
class E:
    __bool__ = __eq__ = __ne__ = __contains__ = lambda *a: True
    __len__ = lambda s: 1
def f(x): return E()
"""
    (score,) = judged(f"assert {test}", own)
    assert score == 0.0 and any(part in score.words for part in ("of its own", "has no len", "not iterable"))


@needs_sandbox
def test_a_program_that_raises_ends_no_loop_of_the_tests() -> None:
    ends = [f"def f(x): raise {name}" for name in ("StopIteration", "StopAsyncIteration", "GeneratorExit")]
    for test in ("assert all(map(f, [1, 2]))", "for _ in map(f, [1]):\n    assert False"):
        assert judged(test, "def f(x): return x", *ends)[1:] == [0.0] * len(ends)


@needs_sandbox
def test_what_tests_print_is_no_verdict() -> None:
    (score,) = judged("print('[1]')\nprint('x')\nassert f(2) == 4\nprint(f(1))", DOUBLE)
    assert score == 1.0, score.words


@needs_sandbox
def test_no_cheat_passes_a_case_of_input_and_output() -> None:
    assert judged([{"input": "", "output": "2"}], *CHEATS.values(), tests="stdio") == [0.0] * len(CHEATS)


@needs_sandbox
def test_a_program_sees_no_test_and_none_of_another_program() -> None:
    look = """
import glob, os
found = sorted(glob.glob('/tmp/*')) + sorted(os.environ)
def f(x): return found
"""
    (score,) = judged("assert f(1) == ['/tmp/main.py', '/tmp/solution.py', 'LC_CTYPE', 'PWD']", look)
    assert score == 1.0, score.words


# ---------------------------------------------------------------- whose fault


@needs_sandbox
@pytest.mark.parametrize(
    ("tests", "text"),
    [
        (
            "import nosuchmodule\nassert f(2) == 4",
            "fail before they ask for the submission: ModuleNotFoundError",
        ),
        ("assert 1 == 2", "fail before they ask for the submission: AssertionError"),
        ("assert f(lambda: 3) == 4", "the tests give the submission a function: arguments are plain values"),
        ("while True: pass\nassert f(2)", "the process of the tests took too long"),
        ("import os\nos._exit(0)\nassert f(2)", "the process of the tests"),
    ],
)
def test_broken_tests_are_a_failure_and_no_score(tests: str, text: str) -> None:
    with pytest.raises(JudgeError) as caught:
        judged(tests, DOUBLE, cpu_s=1)
    assert text in str(caught.value) and "group 7" in str(caught.value)


@pytest.mark.parametrize("kind", ["python", "stdio"])
async def test_a_sandbox_that_breaks_is_a_failure_by_its_name(
    kind: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    judge = TaskJudge(task_of(code_config(tests=kind)))
    tests: Any = "assert f(2) == 4" if kind == "python" else [{"input": "", "output": "4"}]
    with pytest.raises(JudgeError, match="bubblewrap") as caught:
        await judge.judge([state_of(DOUBLE, tests=tests)])
    assert boundary_of(str(caught.value)) is Boundary.SANDBOX
    figures = judge.drain_figures()
    assert figures is not None and figures.failed == 1


# ---------------------------------------------------------------- before a run


def configured(folder: Path, *rows: dict[str, Any], **judge: Any) -> Config:
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    raw = plain_config(tasks__0__judge={"kind": "code", **judge}, runs_dir=str(folder / "runs"))
    raw["tasks"][0]["source"] = {"kind": "jsonl", "dataset": str(folder / "rows.jsonl"), "index_dir": None}
    raw["eval"] = {"num_prompts": 0}
    raw["model"] = {"name": "smollm2-135m"}
    (folder / "config.yaml").write_text(yaml.safe_dump(raw))
    return load_config(folder / "config.yaml")


def rows_with(tests: object) -> list[dict[str, Any]]:
    return [{"prompt": f"Write f, number {n}.", "answer": "", "tests": tests} for n in range(8)]


def refused(config: Config) -> str:
    with pytest.raises(ConfigError) as caught:
        check(config)
    return str(caught.value)


@needs_sandbox
def test_tests_are_read_and_tried_before_anything_starts(tmp_path: Path) -> None:
    good = check(configured(tmp_path, *rows_with(ASSERTS)))
    assert not any("sandbox" in warning for warning in good.warnings)
    text = refused(configured(tmp_path, *rows_with("import nosuch\nassert f(1)")))
    assert "judge.kind is 'code'" in text and "No module named 'nosuch' (prompt 1)" in text
    text = refused(configured(tmp_path, *rows_with(ASSERTS)[:4], *rows_with("assert f(")))
    assert "the tests are no Python" in text
    assert "only answer, question" in refused(configured(tmp_path, {"prompt": "a", "answer": "b"}))


def test_without_bubblewrap_a_run_is_refused_unless_that_is_written_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    why_not.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    try:
        text = refused(configured(tmp_path, *rows_with(ASSERTS)))
        assert "bubblewrap" in text and "apt-get install bubblewrap" in text
        config = configured(tmp_path, *rows_with(ASSERTS), unsafe_no_sandbox=True)
        (warning,) = (one for one in check(config).warnings if "sandbox" in one)
        assert "judge runs programs of the policy with the rights of this run" in warning
        assert try_code(code_config(), [], 0) is not None
    finally:
        why_not.cache_clear()


def test_without_a_sandbox_a_program_is_judged_the_same() -> None:
    assert judged(ASSERTS, DOUBLE, "import os; os._exit(0)", unsafe_no_sandbox=True) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("judge", "part"),
    [
        ({"kind": "exact", "unsafe_no_sandbox": True}, "unsafe_no_sandbox True is not used by kind 'exact'"),
        ({"kind": "code", "program": "f = 1"}, "lacks {code}"),
        ({"kind": "code", "cpu_s": 0}, "cpu_s"),
        ({"kind": "code", "memory_mb": 1}, "memory_mb"),
        ({"kind": "code", "tests": "unittest"}, "tests"),
    ],
)
def test_settings_that_cannot_be_are_refused(judge: dict[str, Any], part: str) -> None:
    raw = plain_config(tasks__0__judge=judge)
    raw["tasks"][0]["source"] = {"kind": "jsonl", "dataset": "rows.jsonl"}
    assert part in refusal_of(raw)
