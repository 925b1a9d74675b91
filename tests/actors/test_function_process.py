"""Reward functions in their own process: what hangs, dies, forks, raises and prints, and what is left of it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from actors.judge import JudgeWorker
from raypost.config import JudgeConfig
from raypost.data.prompt import Prompt
from raypost.errors import JudgeError
from raypost.judges.function import try_function
from raypost.types import EVALUATION_PRIORITY, Score
from tests.unit.reward_functions import config_of, state_of, task_of

Make = Callable[..., JudgeWorker]
RIGHT = "def score(response, answer): return float(response == answer)"


@pytest.fixture
async def worker() -> AsyncIterator[Make]:
    """Makes judge workers, and checks that they leave no process behind."""
    made: list[JudgeWorker] = []

    def make(source: str, **judge: Any) -> JudgeWorker:
        made.append(JudgeWorker("judge-0", (task_of(config_of(source, **judge)),)))
        return made[-1]

    yield make
    for one in made:
        await one.shutdown()
    assert not children()


def children() -> list[str]:
    found = psutil.Process().children(recursive=True)
    return [line for line in (" ".join(one.cmdline()) for one in found) if "function_child" in line]


async def failure(worker: JudgeWorker, response: str) -> str:
    with pytest.raises(JudgeError) as caught:
        await worker.judge([state_of(response)])
    return str(caught.value)


async def test_a_group_is_scored_by_a_process_that_stays(worker: Make) -> None:
    judge = worker("import os\ndef score(response): return os.getpid()")
    first = await judge.judge([state_of("a"), state_of("b")])
    assert first == [*await judge.judge([state_of("c")])] * 2 and first[0] != os.getpid()


async def test_what_it_prints_does_not_disturb_the_answers(
    worker: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    judge = worker("import os\ndef score(response):\n  print('hello')\n  os.system('echo there')\n  return 1")
    assert await judge.judge([state_of("a")]) == [1.0]
    await judge.shutdown()
    assert "there" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("return float('nan')", "returned nan: a score must be finite"),
        ("return None", "returned None, a NoneType"),
        ("return '1'", "returned '1', a str"),
        ("raise ValueError('no such word')", "raised ValueError: no such word (line 2 of reward.py)"),
        ("raise SystemExit(0)", "raised SystemExit: 0"),
    ],
)
@pytest.mark.parametrize("kind", ["def", "async def"])
async def test_a_failure_names_the_boundary_the_group_and_the_cause(
    worker: Make, kind: str, body: str, text: str
) -> None:
    judge = worker(f"{kind} score(response):\n  {body}")
    found = await failure(judge, "a")
    assert found.startswith("judge: task 'words', group 7: reward.py:score ") and text in found
    assert (await judge.drain_figures())["words"].failed == 1


async def test_too_few_scores_are_a_failure(worker: Make) -> None:
    judge = worker("def score(samples): return [1.0]")
    with pytest.raises(JudgeError, match=r"judge: .*returned 1 scores for 2 responses"):
        await judge.judge([state_of("a"), state_of("b")])


HANGS = "import time\ndef score(response):\n  time.sleep(3600 * (response == 'hang'))\n  return 1.0"
HANGS_AWAITED = """
    import asyncio
    async def score(response):
        await asyncio.sleep(3600 * (response == 'hang'))
        return 1.0
"""


@pytest.mark.parametrize("source", [HANGS, HANGS_AWAITED, HANGS.replace("def", "async def")])
async def test_a_call_that_hangs_fails_at_its_deadline_and_the_next_is_scored(
    worker: Make, source: str
) -> None:
    judge = worker(source, timeout_s=1)
    assert "took longer than judge.timeout_s 1 s" in await failure(judge, "hang")
    assert await judge.judge([state_of("a")]) == [1.0]


async def test_groups_behind_one_that_hangs_are_scored(worker: Make) -> None:
    judge = worker(HANGS, timeout_s=1)
    asked = [judge.judge([state_of(one)]) for one in ("a", "hang", "b", "hang", "c")]
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert [isinstance(one, JudgeError) for one in found] == [False, True, False, True, False]


async def test_coroutines_run_at_once_and_those_after_one_that_blocks_them_are_scored(
    worker: Make, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    source = f"""
        import asyncio, time
        running = 0
        async def score(response):
            global running
            running += 1
            while response == "meet" and running < 8:
                await asyncio.sleep(0.01)
            if response == "block":
                open({str(mark)!r}, "w").close()
                time.sleep(3600)
            return 1.0
    """
    judge = worker(source, timeout_s=5)
    assert await asyncio.gather(*[judge.judge([state_of("meet")]) for _ in range(8)]) == [[1.0]] * 8
    judge = worker(source, timeout_s=1)
    blocked = asyncio.create_task(failure(judge, "block"))
    async with asyncio.timeout(240):
        while not mark.exists():
            await asyncio.sleep(0.05)
    await asyncio.sleep(1)
    assert await judge.judge([state_of("a")]) == [1.0]
    assert "took longer" in await blocked
    assert (await judge.drain_figures())["words"].retries == 1


async def test_a_process_that_dies_is_tried_once_more_and_then_the_group_fails(
    worker: Make, tmp_path: Path
) -> None:
    once = f"""
        import os, pathlib
        def score(response):
            been = pathlib.Path({str(tmp_path / "been")!r})
            if response == "die" or not been.exists():
                been.touch()
                os._exit(3)
            return 1.0
    """
    judge = worker(once)
    (score,) = await judge.judge([state_of("a")])
    assert isinstance(score, Score) and (score, score.retries) == (1.0, 1)
    assert (await judge.drain_figures())["words"].retries == 1
    assert "its process died in two calls with it: exit code 3" in await failure(judge, "die")
    assert await judge.judge([state_of("a")]) == [1.0]


async def test_a_killed_process_is_started_again(worker: Make) -> None:
    judge = worker("import os, signal\ndef score(response):\n  os.kill(os.getpid(), signal.SIGKILL)")
    assert "died in two calls with it: signal 9" in await failure(judge, "a")


@pytest.mark.parametrize("kind", ["def", "async def"])
async def test_a_copy_that_it_forks_neither_answers_nor_stays(
    worker: Make, kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = f"""
        import os
        {kind} score(response):
            child = os.fork()
            if child:
                open({str(tmp_path / "pids")!r}, "a").write(f"{{child}} ")
                return 1.0
            return 0.0
    """
    judge = worker(source)
    for _ in range(3):
        assert await judge.judge([state_of("a"), state_of("b")]) == [1.0, 1.0]
    await judge.shutdown()
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) >= 6 and not any(map(lives, pids))
    assert "Traceback" not in capfd.readouterr().err


async def test_a_copy_that_stays_does_not_hide_that_the_process_died(worker: Make) -> None:
    judge = worker("import os, time\ndef score(response):\n  os.fork() or time.sleep(3600)\n  os._exit(3)")
    assert "died in two calls with it: exit code 3" in await failure(judge, "a")


async def test_what_it_started_ends_with_it(worker: Make, tmp_path: Path) -> None:
    source = f"""
        import subprocess, time
        def score(response):
            started = subprocess.Popen(["sleep", "3600"])
            open({str(tmp_path / "pid")!r}, "w").write(str(started.pid))
            time.sleep(3600)
    """
    assert "took longer" in await failure(worker(source, timeout_s=1), "a")
    assert not lives(int((tmp_path / "pid").read_text()))


def lives(pid: int) -> bool:
    """Whether a process runs; one that waits to be reaped does not."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return False
        except psutil.NoSuchProcess:
            return False
        time.sleep(0.05)
    return True


HOST = """
import asyncio, sys
from raypost.judges.function_child import FunctionSpec
from raypost.judges.function_process import FunctionProcess
from tests.unit.reward_functions import sample_of
source = "import os, time\\ndef score(response):\\n  open(%r, 'w').write(str(os.getpid()))\\n  time.sleep(3600)"
spec = FunctionSpec(function="reward.py:score", source=source, timeout_s=3600)
asyncio.run(FunctionProcess(spec).call([sample_of("a")]))
"""


def test_the_process_ends_when_its_actor_is_killed_however_busy_it_is(tmp_path: Path) -> None:
    pid, deadline = tmp_path / "pid", time.monotonic() + 240
    host = subprocess.Popen([sys.executable, "-c", HOST % str(pid)])
    try:
        while not (pid.exists() and pid.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        function = int(pid.read_text())
        assert psutil.Process(function).ppid() == host.pid
    finally:
        host.kill()
        host.wait(60)
    assert not lives(function)


async def test_a_caller_that_leaves_does_not_shorten_the_time_of_the_next(worker: Make) -> None:
    judge = worker("import time\ndef score(response):\n  time.sleep(2)\n  return 1.0", timeout_s=3.5)
    await judge.judge([state_of("a")])
    leaves = asyncio.create_task(judge.judge([state_of("a")]))
    await asyncio.sleep(0.05)
    leaves.cancel()
    assert await asyncio.gather(*[judge.judge([state_of("b")]) for _ in range(2)]) == [[1.0], [1.0]]


async def test_a_function_that_cannot_be_imported_fails_every_call_by_name(worker: Make) -> None:
    judge = worker("import nosuchmodule")
    for _ in range(2):
        assert "cannot be imported: ModuleNotFoundError: No module named 'nosuchmodule'" in await failure(
            judge, "a"
        )


async def test_parts_are_counted_for_training_and_not_for_evaluation(worker: Make) -> None:
    judge = worker("from raypost import Score\ndef score(response): return Score(1, {'long': len(response)})")
    evaluated = state_of("four")
    evaluated.priority = EVALUATION_PRIORITY
    await asyncio.gather(judge.judge([state_of("a"), state_of("bb")]), judge.judge([evaluated]))
    figures = (await judge.drain_figures())["words"]
    assert figures.part_means() == {"long": 1.5} and figures.calls == 2
    assert await judge.drain_figures() == {}


async def test_answers_are_compared_as_mathematics() -> None:
    pytest.importorskip("math_verify")
    judge = JudgeWorker("judge-0", (task_of(JudgeConfig(kind="math")),))
    fractions = ["0.5", "it is $\\boxed{\\frac{2}{4}}$", "so 1/2", "2", "", "no idea"]
    states = [state_of(one, answer="\\frac{1}{2}") for one in fractions]
    assert await judge.judge(states) == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    # Without being told where the formula is, math-verify would read 3.
    roots = [state_of(one, answer="3\\sqrt{2}") for one in ("3", "$\\sqrt{18}$")]
    assert await judge.judge(roots) == [0.0, 1.0]
    with pytest.raises(JudgeError, match="finds no mathematics in the answer ''"):
        await judge.judge([state_of("1", answer="")])
    await judge.shutdown()


# ---------------------------------------------------------------- tried before a run

PROMPTS = [Prompt(f"{n} + 1 =", {"question": f"{n} + 1 =", "answer": str(n + 1)}) for n in range(3)]


def trial(source: str, **judge: Any) -> str | None:
    config: JudgeConfig = config_of(source, **judge)
    found = try_function(task_of(config), config, PROMPTS)
    assert not children()
    return found


def test_a_function_that_works_passes_its_trial() -> None:
    assert trial(RIGHT) is None
    assert trial("async def score(samples): return [0.0] * len(samples)") is None


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("import nosuch", "reward.py:score cannot be imported: ModuleNotFoundError"),
        ("def score(solution): return 1", "has the parameter 'solution', which is none of"),
        ("async def score(samples): return [1.0]", "returned 1 scores for 2 responses"),
        ("def score(response): return None", "returned None, a NoneType"),
        (
            "def score(response): return response[0] == '1'",
            "raised IndexError: string index out of range (line 1",
        ),
        ("import os\nos._exit(1)", "its process ended with exit code 1 while it was imported"),
        ("import os\ndef score(response): os._exit(1)", "died in two calls with it: exit code 1"),
    ],
)
def test_what_a_function_does_wrong_is_found_before_a_run(source: str, text: str) -> None:
    found = trial(source)
    assert found is not None and text in found
    assert "cannot be" in found or "imported" in found or "on prompt 1" in found


def test_a_trial_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raypost.judges.function.TRIAL_S", 1.0)
    with monkeypatch.context() as brief:
        brief.setattr("raypost.judges.function.TRIAL_LOAD_S", 1.0)
        found = trial("import time\ntime.sleep(3600)")
    assert found == "reward.py:score was not imported within 1 s; its process was ended"
    found = trial("import time\ndef score(response): time.sleep(3600)")
    assert found is not None and "took longer than" in found
