"""The life of a group, and what the ledger forbids."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypost.errors import CheckpointError, LedgerError
from raypost.ledger import FLUSH_LINES, Ledger, OrdinalSet, Place
from raypost.types import Status


def key(group_id: int) -> tuple[str, int]:
    return ("t", group_id)


def trained(ledger: Ledger, group_id: int, step: int) -> None:
    ledger.sampled(key(group_id))
    ledger.stored(key(group_id), Status.COMPLETED)
    ledger.leased([key(group_id)], step, [0])
    assert ledger.trained(step) == [key(group_id)]


@settings(deadline=None)
@given(st.lists(st.integers(0, 30)), st.integers(0, 31))
def test_ordinal_set_is_a_set(ordinals: list[int], probe: int) -> None:
    ours = OrdinalSet()
    for ordinal in ordinals:
        ours.add(ordinal)
    assert (probe in ours) == (probe in set(ordinals))
    assert len(ours) == len(set(ordinals))
    ranges = ours.ranges()
    assert all(a[1] < b[0] for a, b in itertools.pairwise(ranges))
    assert len(OrdinalSet(ranges)) == len(ours)


def test_every_end_is_counted_under_its_name() -> None:
    ledger = Ledger()
    trained(ledger, 0, 1)
    for group_id, reason in ((1, Status.FILTERED), (2, Status.FAILED), (3, Status.EXPIRED)):
        ledger.sampled(key(group_id))
        ledger.dropped(key(group_id), reason)
    ledger.sampled(key(4))
    ledger.stored(key(4), Status.ABORTED)
    ledger.sampled(key(5))
    counts = ledger.counts(buffered=1, in_flight=1)
    assert counts.as_dict() == {
        "sampled": 6,
        "trained": 1,
        "filtered": 1,
        "failed": 1,
        "expired": 1,
        "buffered": 1,
        "in_flight": 1,
        "lost": 0,
    }
    assert (ledger.num_live(Place.BUFFERED), ledger.num_live(Place.IN_FLIGHT)) == (1, 1)


def test_lost_is_measured_against_what_really_is_there() -> None:
    ledger = Ledger()
    ledger.sampled(key(0))
    ledger.stored(key(0), Status.COMPLETED)
    assert ledger.counts(buffered=0, in_flight=0).lost == 1


def test_a_group_is_never_trained_twice() -> None:
    ledger = Ledger()
    trained(ledger, 0, 1)
    assert ledger.trained(1) == []
    with pytest.raises(LedgerError, match="ended already"):
        ledger.leased([key(0)], 2, [0])
    with pytest.raises(LedgerError, match="sampled twice"):
        ledger.sampled(key(0))


def test_a_leased_group_is_in_no_other_batch() -> None:
    ledger = Ledger()
    ledger.sampled(key(0))
    ledger.stored(key(0), Status.COMPLETED)
    ledger.leased([key(0)], 1, [0])
    ledger.leased([key(0)], 1, [0])
    with pytest.raises(LedgerError, match="leased for step 1 and for 2"):
        ledger.leased([key(0)], 2, [0])
    with pytest.raises(LedgerError, match="is leased"):
        ledger.dropped(key(0), Status.EXPIRED)


def test_forbidden_transitions_are_named() -> None:
    ledger = Ledger()
    with pytest.raises(LedgerError, match="never sampled"):
        ledger.stored(key(0), Status.COMPLETED)
    ledger.sampled(key(0))
    with pytest.raises(LedgerError, match="must be buffered"):
        ledger.continued(key(0))
    with pytest.raises(LedgerError, match="cannot be dropped as"):
        ledger.dropped(key(0), Status.COMPLETED)
    ledger.dropped(key(0), Status.FAILED)
    for transition in (
        lambda: ledger.continued(key(0)),
        lambda: ledger.stored(key(0), Status.COMPLETED),
        lambda: ledger.dropped(key(0), Status.FAILED),
    ):
        with pytest.raises(LedgerError, match="ended already"):
            transition()


def test_acknowledging_a_step_trains_the_steps_before_it() -> None:
    ledger = Ledger()
    for group_id in range(3):
        ledger.sampled(key(group_id))
        ledger.stored(key(group_id), Status.COMPLETED)
        ledger.leased([key(group_id)], group_id + 1, [0])
    assert ledger.trained(2) == [key(0), key(1)]
    assert ledger.open_leases() == {3: {"t": 1}}


def test_memory_does_not_grow_with_ended_groups() -> None:
    ledger = Ledger()
    for group_id in range(5000):
        trained(ledger, group_id, group_id + 1)
    state = ledger.state_dict()
    assert state["ended"] == {"t": [[0, 5000]]}
    assert len(json.dumps(state)) < 200


def test_journal_tells_the_life_of_a_group(tmp_path: Path) -> None:
    journal = tmp_path / "run" / "ledger.jsonl"
    ledger = Ledger(journal, clock=lambda: 12.0)
    trained(ledger, 7, 3)
    assert not journal.exists()
    ledger.flush()
    ledger.flush()
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["sampled", "stored", "leased", "trained"]
    assert {(line["task"], line["group"], line["time"]) for line in lines} == {("t", 7, 12.0)}
    assert lines[2]["step"] == 3 and lines[2]["staleness"] == 0


def test_journal_lines_do_not_pile_up_in_memory(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "j")
    for group_id in range(FLUSH_LINES + 1):
        ledger.sampled(key(group_id))
    assert len((tmp_path / "j").read_text().splitlines()) == FLUSH_LINES


def test_restored_ledger_knows_live_and_ended_groups() -> None:
    ledger, other = Ledger(), Ledger()
    trained(ledger, 0, 1)
    for group_id in (1, 2):
        ledger.sampled(key(group_id))
        ledger.stored(key(group_id), Status.COMPLETED)
    ledger.leased([key(1)], 2, [0])
    other.load_state_dict(ledger.state_dict())
    assert other.counts(2, 0).lost == 0
    assert other.open_leases() == {}
    other.leased([key(1), key(2)], 2, [0, 0])
    with pytest.raises(LedgerError, match="sampled twice"):
        other.sampled(key(0))


def test_state_with_groups_in_flight_is_refused() -> None:
    ledger = Ledger()
    ledger.sampled(key(0))
    with pytest.raises(LedgerError, match="pause before saving"):
        ledger.state_dict()


def test_damaged_or_misplaced_state_is_refused() -> None:
    ledger = Ledger()
    trained(ledger, 0, 1)
    state = ledger.state_dict()
    with pytest.raises(CheckpointError, match="restored over"):
        ledger.load_state_dict(state)
    with pytest.raises(CheckpointError, match="add up"):
        Ledger().load_state_dict({**state, "sampled": 2})
    with pytest.raises(CheckpointError, match="damaged"):
        Ledger().load_state_dict({"sampled": 1})
