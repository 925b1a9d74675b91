"""A journal that became long: a snapshot and a record for each group that ended say what its lines came to."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path

import pytest

from raypost.errors import ConfigError, LedgerError
from raypost.files import jsonl
from raypost.ledger.closed import CLOSED_FILE, Closed, read_records
from raypost.ledger.events import LedgerEvent
from raypost.ledger.facts import MAX_NAMES, OTHER, RECORD, LiveGroup, Names, group_of, record_of
from raypost.ledger.journal import TAIL_BYTES, JournalReader
from raypost.ledger.ledger import LEDGER_FILE, Ledger, group_facts
from raypost.ledger.life import group_life
from raypost.ledger.replay import continued
from raypost.ledger.summary import ledger_summary
from raypost.report.explain_terminal import life_text
from raypost.types import GroupKey, Status
from tests.unit.production import group
from tests.unit.test_explain import Clock, text_of


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raypost.ledger.journal.TAIL_BYTES", 1)


def journal_of(folder: Path) -> list[dict[str, object]]:
    return list(jsonl.read_lines(folder / LEDGER_FILE))


def num_records(folder: Path) -> int:
    snapshot = JournalReader(folder / LEDGER_FILE).snapshot
    assert snapshot is not None
    return sum(map(len, read_records(folder / CLOSED_FILE, Closed(*snapshot["closed"]))))


def store(ledger: Ledger, key: GroupKey, status: Status = Status.COMPLETED) -> None:
    made = group(key[1], [3, 4], [3], status=status, task=key[0], rewards=(0.0, 1.0))
    for state in made.states:
        state.worker, state.finish_reason = "rollout-1", "stop"
    ledger.stored(key, status, staleness=1, **group_facts(made))


def train(ledger: Ledger, group_id: int, step: int) -> None:
    key = ("sums", group_id)
    ledger.sampled(key)
    store(ledger, key)
    ledger.leased([key], step, [1])
    ledger.trained(step)


def test_what_a_long_journal_says_of_all_groups_is_what_its_lines_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summaries = []
    for name, tail_bytes in (("long", TAIL_BYTES), ("short", 1)):
        monkeypatch.setattr("raypost.ledger.journal.TAIL_BYTES", tail_bytes)
        ledger = Ledger(tmp_path / name / LEDGER_FILE, Clock())
        for n in range(12):
            train(ledger, n, n + 1)
            ledger.note(LedgerEvent.PAUSED, mode="abort", version=n)
            ledger.flush()
        ledger.sampled(("sums", 12))
        store(ledger, ("sums", 12), Status.EXPIRED)
        ledger.sampled(("other", 0))
        ledger.dropped(("other", 0), Status.FILTERED, why="uniform", tokens=[2])
        ledger.flush()
        summaries.append({**ledger_summary(tmp_path / name).as_dict(), "run": ""})
    assert 2 * len(journal_of(tmp_path / "short")) < len(journal_of(tmp_path / "long"))
    assert summaries[0] == summaries[1] and summaries[0]["problems"] == []


def test_the_life_of_an_ended_group_names_its_step_lengths_rewards_and_engine(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / LEDGER_FILE, Clock())
    ledger.sampled(("sums", 7))
    store(ledger, ("sums", 7), Status.ABORTED)
    ledger.continued(("sums", 7))
    store(ledger, ("sums", 7))
    ledger.leased([("sums", 7)], 5, [1])
    ledger.trained(5)
    ledger.flush()
    assert len(journal_of(tmp_path)) == 1
    life = group_life(tmp_path, "7")
    assert life.end == "trained"
    title, *rows = text_of(life_text(life)).splitlines()
    assert title == f"group sums/7 of {tmp_path}: trained in step 5, staleness 1"
    assert [(row.split()[0], row.split()[2]) for row in rows] == [
        ("+1.00", "sampled"), ("+4.00", "stored"), ("+5.00", "leased"), ("+6.00", "trained")
    ]  # fmt: skip
    assert rows[1].split(maxsplit=3)[3].strip() == (
        "into the buffer as completed; 2 responses of 1 to 2 tokens, mean 1.50; versions 3 to 4; on rollout-1; "
        "rewards 0 to 1, mean 0.500; continued 1x"
    )


def test_a_dropped_group_keeps_its_reason_and_a_living_one_its_place(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / LEDGER_FILE, Clock())
    ledger.sampled(("sums", 1))
    ledger.dropped(("sums", 1), Status.FAILED, why="the judge said no", tokens=[3, 5])
    ledger.sampled(("sums", 2))
    store(ledger, ("sums", 2))
    ledger.sampled(("sums", 3))
    ledger.flush()
    said = [text_of(life_text(group_life(tmp_path, f"sums/{n}"))) for n in (1, 2, 3)]
    assert "dropped as failed: the judge said no" in said[0] and "3 to 5 tokens, mean 4" in said[0]
    assert "in the buffer as completed" in said[1] and "in flight" in said[2]
    ledger.leased([("sums", 2)], 1, [0])
    ledger.trained(1)
    ledger._journal.flush()  # type: ignore[union-attr]  # lines behind a snapshot, as while a run goes on
    assert [line["event"] for line in journal_of(tmp_path)] == ["snapshot", "leased", "trained"]
    life = group_life(tmp_path, "2")
    assert [line["event"] for line in life.lines] == ["sampled", "stored", "leased", "trained"]
    with pytest.raises(ConfigError, match=r"no group '9' was sampled yet; the nearest are sums/3"):
        group_life(tmp_path, "9")


def test_a_restore_goes_back_behind_a_snapshot(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / LEDGER_FILE, Clock())
    train(ledger, 0, 1)
    ledger.sampled(("sums", 1))
    store(ledger, ("sums", 1))
    ledger.leased([("sums", 1)], 2, [0])
    state = json.loads(json.dumps(ledger.state_dict()))
    ledger.trained(2)
    train(ledger, 2, 3)
    ledger.flush()
    assert ledger_summary(tmp_path).counts.trained == 3
    again = Ledger(tmp_path / LEDGER_FILE, Clock(2000.0))
    again.load_state_dict(state)
    again._journal.flush()  # type: ignore[union-attr]
    summary = ledger_summary(tmp_path)
    assert (summary.counts.trained, summary.counts.buffered, summary.problems) == (1, 1, [])
    assert summary.events == {"started": 1, "saved": 1, "restored": 1}
    assert ": in the buffer as completed" in text_of(life_text(group_life(tmp_path, "1")))
    assert group_life(tmp_path, "0").end == "trained"
    with pytest.raises(ConfigError, match="no group '2' was sampled yet"):
        group_life(tmp_path, "2")
    again.leased([("sums", 1)], 2, [4])
    again.trained(2)
    train(again, 2, 4)
    again.flush()
    assert [group_life(tmp_path, str(n)).end for n in range(3)] == ["trained"] * 3
    assert ledger_summary(tmp_path).problems == []
    again._put_snapshot()
    assert num_records(tmp_path) == 3


def test_production_that_begins_anew_makes_a_snapshot_void(tmp_path: Path) -> None:
    first = Ledger(tmp_path / LEDGER_FILE, Clock())
    train(first, 0, 1)
    first.flush()
    second = Ledger(tmp_path / LEDGER_FILE, Clock(2000.0))
    second.sampled(("sums", 0))
    second._journal.flush()  # type: ignore[union-attr]
    summary = ledger_summary(tmp_path)
    assert (summary.counts.sampled, summary.counts.in_flight, summary.problems) == (1, 1, [])
    life = group_life(tmp_path, "0")
    assert [line["event"] for line in life.lines] == ["sampled"] and life.void[-1]["event"] == "trained"
    second.flush()
    assert ledger_summary(tmp_path).counts == summary.counts
    assert group_life(tmp_path, "0").end is None


def test_a_start_that_fails_before_it_did_anything_voids_no_history(tmp_path: Path) -> None:
    first = Ledger(tmp_path / LEDGER_FILE, Clock())
    train(first, 0, 1)
    first.flush()
    Ledger(tmp_path / LEDGER_FILE, Clock(2000.0)).flush()
    assert ledger_summary(tmp_path).counts.trained == 1 and group_life(tmp_path, "0").end == "trained"


@pytest.mark.parametrize("part", ["write", "rename"])
def test_a_death_while_a_snapshot_is_made_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    ledger = Ledger(tmp_path / LEDGER_FILE, Clock())
    train(ledger, 0, 1)
    state = json.loads(json.dumps(ledger.state_dict()))
    train(ledger, 1, 2)
    ledger._journal.flush()  # type: ignore[union-attr]
    before = ledger_summary(tmp_path)

    def die(*_: object) -> int:
        raise OSError("dead")

    with monkeypatch.context() as patch:
        if part == "write":
            patch.setattr(os, "write", die)
        else:
            patch.setattr(jsonl.LineFile, "replace", die)
        with pytest.raises(OSError, match="dead"):
            ledger.flush()
    assert ledger_summary(tmp_path).as_dict() == before.as_dict()
    assert [group_life(tmp_path, str(n)).end for n in (0, 1)] == ["trained", "trained"]
    again = Ledger(tmp_path / LEDGER_FILE, Clock(2000.0))
    again.load_state_dict(state)
    train(again, 1, 2)
    again.flush()
    summary = ledger_summary(tmp_path)
    assert (summary.counts.trained, summary.problems) == (2, [])
    assert [group_life(tmp_path, str(n)).end for n in (0, 1)] == ["trained", "trained"]


def test_a_snapshot_that_failed_is_made_later_without_a_group_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(tmp_path / LEDGER_FILE, Clock())
    train(ledger, 0, 1)
    with monkeypatch.context() as patch:
        patch.setattr(jsonl.LineFile, "replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
        with pytest.raises(OSError, match="full"):
            ledger.flush()
    train(ledger, 1, 2)
    ledger.flush()
    assert num_records(tmp_path) == 2
    assert ledger_summary(tmp_path).counts.trained == 2 and group_life(tmp_path, "1").end == "trained"


def test_records_that_are_damaged_are_refused_by_name_and_the_counts_still_stand(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / LEDGER_FILE, Clock())
    train(ledger, 0, 1)
    ledger.sampled(("sums", 1))
    ledger.flush()
    closed = tmp_path / CLOSED_FILE
    closed.write_bytes(b"\x09" + closed.read_bytes()[1:])
    with pytest.raises(
        ConfigError, match=r"ledger\.closed is damaged at byte 0: it does not begin with the 1 records"
    ):
        group_life(tmp_path, "0")
    assert group_life(tmp_path, "1").end is None
    assert ledger_summary(tmp_path).counts.trained == 1
    state = {**ledger.snapshot(), "format": 3, "journal_bytes": 0, "totals": {"trained": 1}, "sampled": 2}
    again = Ledger(tmp_path / LEDGER_FILE, Clock(2000.0))
    again.load_state_dict(state)
    train(again, 2, 3)
    again.flush()
    assert ledger_summary(tmp_path).counts.trained == 2 and group_life(tmp_path, "2").end == "trained"


def test_a_snapshot_of_another_format_is_refused(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / LEDGER_FILE, Clock())
    train(ledger, 0, 1)
    ledger.flush()
    (snapshot,) = journal_of(tmp_path)
    (tmp_path / LEDGER_FILE).write_text(jsonl.sealed(json.dumps({**snapshot, "format": 9})))
    with pytest.raises(LedgerError, match="snapshot of format 9, this version reads format 2"):
        ledger_summary(tmp_path)
    with pytest.raises(LedgerError, match="snapshot of format 9"):
        Ledger(tmp_path / LEDGER_FILE)


def test_disk_and_memory_of_ended_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raypost.ledger.journal.TAIL_BYTES", 20_000)
    ledger = Ledger(tmp_path / LEDGER_FILE)
    train(ledger, 0, 1)
    tracemalloc.start()
    try:
        for n in range(1, 1000):
            train(ledger, n, n + 1)
            ledger.flush()
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used < 60_000
    assert num_records(tmp_path) > 900
    assert (tmp_path / CLOSED_FILE).stat().st_size <= 1000 * RECORD.size / 2
    assert (tmp_path / LEDGER_FILE).stat().st_size < 25_000
    assert group_life(tmp_path, "17").end == "trained"


def test_a_record_gives_a_living_group_back() -> None:
    names = Names()
    one = LiveGroup(
        sampled_s=1e9, stored_s=1e9 + 2, status="expired", engine="e", aborts=99_999, is_expired=True
    )
    one.learn({"tokens": [3, 4], "rewards": [0.5, None]})
    key, back = group_of(record_of(("a/b", 2**40), one, names), names)
    one.aborts = 0xFFFF
    assert (key, back) == (("a/b", 2**40), one)


def test_texts_beyond_the_limit_are_told_as_others() -> None:
    names = Names()
    numbers = [names.number(f"reason {n}") for n in range(MAX_NAMES + 5)]
    assert (
        max(numbers) < MAX_NAMES
        and names.texts[numbers[-1]] == OTHER
        and names.texts[numbers[0]] == "reason 0"
    )


def test_a_ledger_that_is_continued_writes_the_records_that_the_dead_one_wrote(tmp_path: Path) -> None:
    """Else a checkpoint of the dead one's names records that the file no longer has, and they are lost."""
    clock = Clock()
    ledger = Ledger(tmp_path / LEDGER_FILE, clock, attempt="a")
    keys = [("sums", group_id) for group_id in range(4)]
    for key in keys:
        ledger.sampled(key)
        store(ledger, key)
    ledger.leased(keys[:3], 1, [1, 1, 1])
    ledger.trained(1, {keys[0]: "not finite"})
    ledger.dropped(keys[3], Status.EXPIRED)
    saved = ledger.state_dict()["closed"]
    again = continued(tmp_path / LEDGER_FILE, "a", clock)
    assert again.snapshot()["closed"] == saved
