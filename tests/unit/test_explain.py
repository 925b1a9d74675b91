"""`raypost explain`: the life of a group and the summary of a run, from nothing but the ledger's journal."""

from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner, Result

from raypost import cli
from raypost.errors import ConfigError
from raypost.files.jsonl import sealed
from raypost.ledger.events import LedgerEvent
from raypost.ledger.ledger import LEDGER_FILE, REGENERATED, Ledger, group_facts
from raypost.ledger.life import find_run, group_life
from raypost.ledger.summary import ledger_summary, length_bias
from raypost.report.explain_terminal import ledger_text, life_text
from raypost.types import GroupCounts, GroupKey, Status
from tests.unit.production import group

KEY = ("sums", 7)


class Clock:
    """A second passes whenever it is asked."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / LEDGER_FILE, Clock())


def text_of(renderable: Any) -> str:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(renderable)
    return console.export_text()


def life_of(folder: Path, name: str = "7") -> str:
    return text_of(life_text(group_life(folder, name)))


def train(ledger: Ledger, key: GroupKey, step: int, tokens: list[int], staleness: int = 0) -> None:
    ledger.sampled(key)
    ledger.stored(key, Status.COMPLETED, staleness=staleness, tokens=tokens)
    ledger.leased([key], step, [staleness])
    ledger.trained(step)


def live_through_a_sync(ledger: Ledger) -> None:
    """Group 7: interrupted by a sync, continued elsewhere under newer weights, trained."""
    ledger.sampled(KEY)
    ledger.note(LedgerEvent.PAUSED, mode="abort", version=3)
    half = group(7, [3, 3], [3], status=Status.ABORTED, task="sums")
    for state in half.states:
        state.worker, state.num_aborts = "rollout-0", 1
    ledger.stored(KEY, Status.ABORTED, staleness=0, **group_facts(half))
    ledger.note(LedgerEvent.RESUMED, version=4)
    ledger.continued(KEY)
    whole = group(7, [3, 3, 4], [3, 4], task="sums", rewards=(0.0, 1.0))
    for state in whole.states:
        state.worker, state.finish_reason = "rollout-1", "stop"
    ledger.stored(KEY, Status.COMPLETED, staleness=1, **group_facts(whole))
    ledger.leased([KEY], 5, [1])
    ledger.trained(5)
    ledger.note(LedgerEvent.PAUSED, mode="abort", version=4)
    ledger.flush()


def test_the_life_of_a_group_names_engines_versions_pauses_reward_and_staleness(
    ledger: Ledger, tmp_path: Path
) -> None:
    live_through_a_sync(ledger)
    rows = [line.split(maxsplit=3) for line in life_of(tmp_path).splitlines()[1:]]
    assert [(row[0], row[2]) for row in rows] == [
        ("+1.00", "sampled"), ("+2.00", "paused"), ("+3.00", "stored"), ("+4.00", "resumed"),
        ("+5.00", "continued"), ("+6.00", "stored"), ("+7.00", "leased"), ("+8.00", "trained"),
    ]  # fmt: skip
    said = [row[3].strip() for row in rows]
    assert said[0] == "left the dataset"
    assert said[1] == "mode abort; version 3"
    assert said[2] == (
        "into the buffer as aborted; 2 responses of 1 to 2 tokens, mean 1.50; tokens 3 by version 3; on rollout-0; "
        "2 interruptions so far; staleness 0"
    )
    assert said[4] == "from the buffer, to be continued"
    assert said[5] == (
        "into the buffer as completed; 2 responses of 2 to 3 tokens, mean 2.50; tokens 3 by version 3, 2 by version 4; "
        "on rollout-1; rewards 0 1, mean 0.500; ended by stop 2x; staleness 1"
    )
    assert said[6] == "in the batch of step 5; staleness 1"
    first = life_of(tmp_path).splitlines()[0]
    assert first == f"group sums/7 of {tmp_path}: trained in step 5, staleness 1"


@pytest.mark.parametrize(
    ("move", "verdict"),
    [
        (lambda one: None, "in flight, 1.00 s after the start, where the journal ends"),
        (lambda one: one.stored(KEY, Status.ABORTED), "in the buffer as aborted, 2.00 s after the start"),
        (lambda one: one.dropped(KEY, Status.FILTERED, why="uniform"), "dropped as filtered: uniform"),
        (lambda one: one.dropped(KEY, Status.EXPIRED, staleness=9), "dropped as expired"),
        (lambda one: one.dropped(KEY, Status.FAILED, why="[b]judge[/b]"), "dropped as failed: [b]judge[/b]"),
    ],
)
def test_where_a_group_is_or_why_it_was_dropped_comes_first(
    ledger: Ledger, tmp_path: Path, move: Callable[[Ledger], None], verdict: str
) -> None:
    ledger.sampled(KEY)
    move(ledger)
    ledger.flush()
    assert f": {verdict}" in life_of(tmp_path).splitlines()[0]


def test_a_group_that_expired_and_stayed_is_generated_again(ledger: Ledger, tmp_path: Path) -> None:
    ledger.sampled(KEY)
    ledger.stored(KEY, Status.COMPLETED)
    ledger.stored(KEY, Status.EXPIRED)
    ledger.note(LedgerEvent.RESUMED, version=4)
    ledger.continued(KEY)
    ledger.stored(KEY, Status.ABORTED, put_back=True)
    ledger.continued(KEY)
    ledger.flush()
    said = life_of(tmp_path)
    assert "from the buffer, to be generated again" in said
    assert "put back as it was when it started" in said
    assert said.rstrip().endswith("from the buffer, to be continued")


def test_many_pauses_in_the_buffer_are_one_line(ledger: Ledger, tmp_path: Path) -> None:
    ledger.sampled(KEY)
    ledger.stored(KEY, Status.COMPLETED)
    for version in range(1, 9):
        ledger.note(LedgerEvent.PAUSING, mode="keep", version=version)
        ledger.note(LedgerEvent.RESUMED, version=version + 1)
    ledger.flush()
    said = life_of(tmp_path)
    assert "8 pauses in 15.0 s, versions 1 to 9" in said
    assert len(said.splitlines()) == 4


def test_a_group_sampled_again_after_a_restore_has_the_life_that_survived(tmp_path: Path) -> None:
    first = Ledger(tmp_path / LEDGER_FILE, Clock())
    train(first, ("sums", 6), 1, [1])
    state = first.state_dict()
    train(first, KEY, 2, [50])
    first.sampled(("sums", 8))
    first.flush()
    second = Ledger(tmp_path / LEDGER_FILE, Clock(2000.0))
    second.load_state_dict(json.loads(json.dumps(state)))
    second.sampled(KEY)
    second.dropped(KEY, Status.FILTERED, why="uniform")
    second.flush()
    said = life_of(tmp_path).splitlines()
    assert said[0].endswith("dropped as filtered: uniform")
    kept = said[1 : said.index("undone by a restore, which went back to an earlier checkpoint:")]
    assert [row.split()[2] for row in kept] == ["sampled", "filtered"]
    assert [row.split()[2] for row in said[len(kept) + 2 :]] == ["sampled", "stored", "leased", "trained"]
    assert "not sampled again since a restore" in life_of(tmp_path, "8")
    summary = ledger_summary(tmp_path)
    assert summary.problems == []
    assert (summary.counts.sampled, summary.counts.trained, summary.counts.filtered) == (2, 1, 1)
    assert summary.tasks["sums"]["trained"].tokens_mean == 1.0


def test_a_leased_group_is_in_the_buffer_again_after_a_restore(tmp_path: Path) -> None:
    first = Ledger(tmp_path / LEDGER_FILE, Clock())
    first.sampled(KEY)
    first.stored(KEY, Status.COMPLETED)
    first.leased([KEY], 1, [0])
    state = first.state_dict()
    assert "leased for step 1, which is not trained yet" in life_of(tmp_path)
    second = Ledger(tmp_path / LEDGER_FILE, Clock(2000.0))
    second.load_state_dict(state)
    second.flush()
    assert ": in the buffer as completed" in life_of(tmp_path).splitlines()[0]
    second.leased([KEY], 1, [3])
    second.trained(1)
    second.flush()
    assert life_of(tmp_path).splitlines()[0].endswith("trained in step 1, staleness 3")
    assert ledger_summary(tmp_path).tasks["sums"]["trained"].staleness_mean == 3.0
    assert ledger_summary(tmp_path).problems == []


# ---------------------------------------------------------------- which group, which run


def test_a_number_alone_is_enough_where_one_task_has_it(ledger: Ledger, tmp_path: Path) -> None:
    for key in (("sums", 7), ("sums", 8), ("sums", 80), ("a/b", 7)):
        ledger.sampled(key)
    ledger.flush()
    assert group_life(tmp_path, "8").key == ("sums", 8)
    assert [line["group"] for line in group_life(tmp_path, "8").lines] == [8]
    assert group_life(tmp_path, "a/b/7").key == ("a/b", 7)
    with pytest.raises(ConfigError, match=r"several tasks have a group 7: give one of a/b/7, sums/7"):
        group_life(tmp_path, "7")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sums/50", r"no group 'sums/50' was sampled yet; the nearest are sums/9 and sums/100"),
        ("200", r"the nearest are sums/100"),
        ("sum/7", r"no task 'sum' in this run, it has sums; did you mean sums\?"),
        ("sums/", "must read TASK/NUMBER"),
        ("-1", "must read TASK/NUMBER"),
        ("sums/x", "must read TASK/NUMBER"),
    ],
)
def test_an_unknown_group_is_refused_with_its_neighbours(
    ledger: Ledger, tmp_path: Path, name: str, message: str
) -> None:
    for group_id in (*range(10), 100):
        ledger.sampled(("sums", group_id))
    ledger.flush()
    with pytest.raises(ConfigError, match=message):
        group_life(tmp_path, name)


def test_a_run_without_a_group_yet_says_so(ledger: Ledger, tmp_path: Path) -> None:
    ledger.note(LedgerEvent.RESUMED, version=0)
    ledger.flush()
    with pytest.raises(ConfigError, match="no group was sampled yet"):
        group_life(tmp_path, "0")


def test_a_run_is_found_by_its_folder_or_its_name(tmp_path: Path) -> None:
    for name in ("alpha", "beta"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / LEDGER_FILE).touch()
    (tmp_path / "runs" / "empty").mkdir()
    runs = tmp_path / "runs"
    assert find_run("alpha", runs) == find_run(str(runs / "alpha")) == runs / "alpha"
    with pytest.raises(ConfigError, match=r"holds no ledger\.jsonl: no run sampled a group there yet"):
        find_run("empty", runs)
    with pytest.raises(ConfigError, match=r"no run 'alpa'.*holds alpha"):
        find_run("alpa", runs)
    with pytest.raises(ConfigError, match="holds none"):
        find_run("alpha", tmp_path / "nowhere")


# ---------------------------------------------------------------- the whole run


def test_the_summary_counts_every_group_once_with_its_length_and_staleness(
    ledger: Ledger, tmp_path: Path
) -> None:
    train(ledger, ("a", 0), 1, [10, 20], staleness=1)
    train(ledger, ("a", 1), 2, [30, 30], staleness=2)
    ledger.sampled(("a", 2))
    ledger.dropped(("a", 2), Status.FILTERED, tokens=[4, 6])
    ledger.sampled(("b", 0))
    ledger.stored(("b", 0), Status.COMPLETED, tokens=[100], staleness=0)
    ledger.dropped(("b", 0), Status.EXPIRED, staleness=3)
    ledger.sampled(("b", 1))
    ledger.note(LedgerEvent.PAUSED, mode="abort")
    ledger.flush()
    summary = ledger_summary(tmp_path)
    assert summary.problems == []
    assert summary.counts == ledger.believed()
    found = {
        (task, kind): (stats.groups, stats.tokens_mean, stats.staleness_mean)
        for task, kinds in summary.tasks.items()
        for kind, stats in kinds.items()
    }
    assert found == {
        ("a", "trained"): (2, 22.5, 1.5),
        ("a", "filtered"): (1, 5.0, None),
        ("b", "expired"): (1, 100.0, 3.0),
        ("b", "in_flight"): (1, None, None),
    }
    assert summary.events == {"started": 1, "paused": 1}
    said = text_of(ledger_text(summary))
    assert "5 sampled = 2 trained + 1 filtered + 1 expired + 1 in flight" in said
    assert "every move in the journal is a legal one" in said


def test_what_the_ledger_would_refuse_is_a_problem(ledger: Ledger, tmp_path: Path) -> None:
    train(ledger, ("a", 0), 1, [1])
    ledger.flush()
    with open(tmp_path / LEDGER_FILE, "a") as file:
        for fields in (
            {"event": "trained", "task": "a", "group": 0, "step": 1},  # said again by a mere repetition
            {"event": "leased", "task": "a", "group": 0, "step": 2, "staleness": 0},
            {"event": "stored", "task": "a", "group": 9, "status": "completed"},
            {"event": "stored", "task": "a", "group": 9},
        ):
            file.write(sealed(json.dumps({"time": 1.0, **fields})))
        file.write("{torn}\n")
    summary = ledger_summary(tmp_path)
    assert [problem.split(":")[0] for problem in summary.problems] == [
        "leased", "stored", "stored", "1 damaged lines of ledger.jsonl were skipped",
    ]  # fmt: skip
    assert "has ended already" in summary.problems[0]
    assert summary.counts.trained == 1
    assert "problem: leased" in text_of(ledger_text(summary))


def test_a_journal_that_is_not_the_checkpoints_is_named(tmp_path: Path) -> None:
    elsewhere = Ledger()
    train(elsewhere, ("a", 0), 1, [1])
    ledger = Ledger(tmp_path / LEDGER_FILE)
    ledger.load_state_dict(elsewhere.state_dict())
    ledger.flush()
    assert "it is not the journal of that checkpoint" in ledger_summary(tmp_path).problems[0]


@pytest.mark.parametrize("tail_bytes", [4 << 20, 3000, 400])
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(seed=6610, moves=10)
@given(seed=st.integers(0, 2**32), moves=st.integers(10, 120))
def test_the_journal_gives_the_ledgers_own_counts_after_any_run(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    tail_bytes: int,
    seed: int,
    moves: int,
) -> None:
    """Random legal moves, kills between flushes, snapshots and restores of any earlier checkpoint."""
    monkeypatch.setattr("raypost.ledger.journal.TAIL_BYTES", tail_bytes)
    rng, journal = random.Random(seed), tmp_path_factory.mktemp("run") / LEDGER_FILE
    ledger, following, step = Ledger(journal), 0, 0
    saved: list[tuple[dict[str, Any], int, int]] = []
    known: list[int] = []  # checkpoints of this history, the undone ones left out
    straight = True
    for _ in range(moves):
        live = list(ledger.live())
        act = rng.choice(("sample", "sample", "move", "move", "move", "take", "save", "kill"))
        if act == "sample":
            ledger.sampled((rng.choice("ab"), following))
            following += 1
        elif act == "move" and live:
            key, place = rng.choice(live)
            if place == "buffered" and rng.random() < 0.5:
                ledger.continued(key)
            elif place != "leased" and rng.random() < 0.7:
                ledger.stored(key, rng.choice((Status.COMPLETED, Status.EXPIRED)), tokens=[rng.randrange(9)])
            elif place != "leased":
                ledger.dropped(key, rng.choice((Status.FILTERED, Status.EXPIRED, Status.FAILED)))
        elif act == "take":
            step += 1
            ledger.leased([key for key, place in live if place == "buffered"][:3], step, [0] * min(
                3, sum(place == "buffered" for _, place in live)
            ))  # fmt: skip
            ledger.trained(step - rng.randrange(2))
        elif act == "save" and all(place != "in_flight" for _, place in live):
            known.append(len(saved))
            saved.append((json.loads(json.dumps(ledger.state_dict())), following, step))
        elif act == "kill" and saved and rng.random() < 0.5:
            if rng.random() < 0.5:
                ledger.flush()
            ledger = Ledger(journal)
            chosen = rng.randrange(len(saved))
            straight &= chosen in known
            known = [one for one in known if one <= chosen]
            state, following, step = saved[chosen]
            ledger.load_state_dict(state)
        if rng.random() < 0.2:
            ledger.flush()
    ledger.flush()
    if not journal.exists():
        # Killed before anything was flushed, and not gone on since.
        assert ledger.believed() == GroupCounts()
        return
    summary = ledger_summary(journal.parent)
    assert summary.problems == []
    assert summary.counts == ledger.believed()
    assert {task: kinds for task, kinds in ledger.stats.items() if kinds} == {
        task: kept
        for task, kinds in summary.tasks.items()
        if (kept := {kind: stats for kind, stats in kinds.items() if kind not in ("in_flight", "buffered")})
    }
    assert summary.events == dict(ledger.events)
    living = {key for key, _ in ledger.live()}
    for key in [("ab"[n % 2], n // 2) for n in rng.sample(range(2 * following), min(6, 2 * following))]:
        if straight and ledger.knows(key):
            life = group_life(journal.parent, f"{key[0]}/{key[1]}")
            assert (life.end is None) == (key in living) and life.lines


# ---------------------------------------------------------------- length bias


def test_length_bias_compares_what_age_took_with_what_was_trained(ledger: Ledger, tmp_path: Path) -> None:
    for n in range(4):
        train(ledger, ("a", n), n + 1, [10, 10])
    ledger.sampled(("a", 4))
    ledger.stored(("a", 4), Status.COMPLETED, tokens=[20, 20])
    ledger.dropped(("a", 4), Status.EXPIRED)
    ledger.sampled(("a", 5))
    ledger.stored(("a", 5), Status.COMPLETED, tokens=[30, 30])
    ledger.stored(("a", 5), Status.EXPIRED)
    ledger.continued(("a", 5))
    ledger.stored(("a", 5), Status.COMPLETED, tokens=[10, 10])
    ledger.leased([("a", 5)], 9, [0])
    ledger.trained(9)
    ledger.flush()
    bias = ledger_summary(tmp_path).length_bias
    assert (bias.trained.groups, bias.trained.tokens_mean) == (5, 10.0)
    assert (bias.dropped.groups, bias.dropped.tokens_mean) == (1, 20.0)
    assert (bias.regenerated.groups, bias.regenerated.tokens_mean) == (1, 30.0)
    assert (bias.ratio, bias.share) == (2.5, 2 / 7)
    assert "29 % of the groups grew too old, 2.50 times as long as trained ones" in text_of(
        ledger_text(ledger_summary(tmp_path))
    )


def test_length_bias_compares_within_a_task(ledger: Ledger, tmp_path: Path) -> None:
    """A task of long answers that expires often is no bias towards short ones within any task."""
    train(ledger, ("short", 0), 1, [10])
    train(ledger, ("long", 0), 2, [100])
    for n in range(1, 6):
        ledger.sampled(("long", n))
        ledger.dropped(("long", n), Status.EXPIRED, tokens=[100])
    ledger.sampled(("never", 0))
    ledger.dropped(("never", 0), Status.EXPIRED, tokens=[5000])
    ledger.flush()
    summary = ledger_summary(tmp_path)
    assert summary.length_bias.ratio == 1.0
    assert length_bias({"never": summary.tasks["never"]}).ratio is None
    assert length_bias({}).share == 0


def test_a_group_expires_once_however_often_it_is_put_back(ledger: Ledger, tmp_path: Path) -> None:
    ledger.sampled(KEY)
    ledger.stored(KEY, Status.EXPIRED, tokens=[5])
    ledger.stored(KEY, Status.EXPIRED)
    ledger.continued(KEY)
    ledger.stored(KEY, Status.EXPIRED, put_back=True, tokens=[5])
    ledger.flush()
    assert ledger_summary(tmp_path).tasks["sums"][REGENERATED].groups == 1
    ledger.continued(KEY)
    ledger.stored(KEY, Status.EXPIRED, tokens=[7])
    ledger.flush()
    again = ledger_summary(tmp_path).tasks["sums"][REGENERATED]
    assert (again.groups, again.tokens_mean) == (2, 6.0)


def test_a_group_that_was_interrupted_too_often_did_not_grow_too_old(ledger: Ledger, tmp_path: Path) -> None:
    ledger.sampled(KEY)
    ledger.stored(KEY, Status.EXPIRED, tokens=[7], too_old=False)
    ledger.flush()
    assert ledger_summary(tmp_path).length_bias.num_expired == 0
    assert "interrupted too often" in life_of(tmp_path)


# ---------------------------------------------------------------- size, and the command


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4,000 groups, 16 at a time, with a line for each move."""
    folder = tmp_path_factory.mktemp("long")
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr("raypost.ledger.journal.TAIL_BYTES", 1 << 30)
    ledger = Ledger(folder / LEDGER_FILE)
    for step in range(1, 251):
        keys = [("sums", (step - 1) * 16 + n) for n in range(16)]
        for key in keys:
            ledger.sampled(key)
            ledger.stored(key, Status.COMPLETED, staleness=0, tokens=[5, 6])
        ledger.leased(keys, step, [0] * 16)
        ledger.trained(step)
        ledger.note(LedgerEvent.RESUMED, version=step)
    ledger.flush()
    monkeypatch.undo()
    return folder


def test_memory_is_that_of_the_living_groups_not_of_the_journal(long_run: Path) -> None:
    tracemalloc.start()
    try:
        assert ledger_summary(long_run).counts.trained == 4000
        assert group_life(long_run, "3999").end == "trained"
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 500_000


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, ["explain", *(str(argument) for argument in arguments)])


def test_the_command_tells_of_a_group_of_the_run_and_prints_json(ledger: Ledger, tmp_path: Path) -> None:
    live_through_a_sync(ledger)
    result = run(tmp_path, "sums/7")
    assert result.exit_code == 0, result.output
    assert "trained in step 5, staleness 1" in result.stdout
    result = run(tmp_path)
    assert "1 sampled = 1 trained" in result.stdout
    life = json.loads(run(tmp_path, "7", "--json").stdout)
    assert (life["end"], life["group"], len(life["lines"])) == ("trained", 7, 8)
    summary = json.loads(run(tmp_path, "--json").stdout)
    assert summary["groups"]["trained"] == 1 and summary["problems"] == []
    assert summary["length_bias"]["trained"] == {"groups": 1, "tokens_mean": 2.5}


def test_the_command_finds_a_run_by_its_name(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live_through_a_sync(ledger)
    (tmp_path / "runs" / "trial").mkdir(parents=True)
    (tmp_path / LEDGER_FILE).rename(tmp_path / "runs" / "trial" / LEDGER_FILE)
    monkeypatch.chdir(tmp_path)
    assert "group sums/7 of runs/trial" in run("trial", "7").stdout


def test_the_command_refuses_in_one_message(ledger: Ledger, tmp_path: Path) -> None:
    live_through_a_sync(ledger)
    for arguments, part in (((tmp_path, "8"), "the nearest are sums/7"), (("nowhere",), "no run 'nowhere'")):
        result = run(*arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.startswith("refused: ") and part in result.stderr
