"""The life of a group, and what the ledger forbids."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from raypost.errors import CheckpointError, LedgerError
from raypost.files.jsonl import read_lines
from raypost.ledger.events import NOTES, LedgerEvent
from raypost.ledger.ledger import MAX_WHY, Ledger, group_facts
from raypost.ledger.ordinals import OrdinalSet
from raypost.types import NO_VERSION, Status
from tests.thorough import examples
from tests.unit.production import group


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


def test_a_group_that_was_dropped_is_no_trained_step() -> None:
    ledger = Ledger()
    ledger.sampled(key(0))
    ledger.dropped(key(0), Status.FILTERED)
    assert ledger.trained_step == 0
    trained(ledger, 1, 3)
    assert ledger.trained_step == 3


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
    assert (ledger.believed().buffered, ledger.believed().in_flight) == (1, 1)


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
    transitions: tuple[Callable[[], None], ...] = (
        lambda: ledger.continued(key(0)),
        lambda: ledger.stored(key(0), Status.COMPLETED),
        lambda: ledger.dropped(key(0), Status.FAILED),
    )
    for transition in transitions:
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
    assert len(json.dumps(state)) < 500


def lines(journal: Path) -> list[dict[str, Any]]:
    return list(read_lines(journal))


def test_journal_tells_the_life_of_a_group(tmp_path: Path) -> None:
    journal = tmp_path / "run" / "ledger.jsonl"
    ledger = Ledger(journal, clock=lambda: 12.0)
    trained(ledger, 7, 3)
    assert not journal.exists()
    ledger.flush()
    ledger.flush()
    begin, *life = lines(journal)
    assert begin == {"time": 12.0, "event": "started"}
    assert [line["event"] for line in life] == ["sampled", "stored", "leased", "trained"]
    assert {(line["task"], line["group"], line["time"]) for line in life} == {("t", 7, 12.0)}
    assert life[2]["step"] == 3 and life[2]["staleness"] == 0


def test_facts_are_written_beside_the_move_whatever_number_type_they_have(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "j")
    ledger.sampled(key(0))
    ledger.stored(key(0), Status.ABORTED, staleness=np.int64(2), tokens=np.arange(2), odd=Path("x"))
    ledger.dropped(key(0), Status.FAILED, why="x" * 9999)
    ledger.flush()
    _, _, stored, failed = lines(tmp_path / "j")
    assert (stored["status"], stored["staleness"], stored["tokens"]) == ("aborted", 2, [0, 1])
    assert len(failed["why"]) == MAX_WHY


def test_a_note_is_about_no_group_and_moves_none(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "j", clock=lambda: 1.0)
    ledger.note(LedgerEvent.PAUSED, mode="keep", version=3)
    ledger.flush()
    assert lines(tmp_path / "j")[1] == {"time": 1.0, "event": "paused", "mode": "keep", "version": 3}
    for own in set(LedgerEvent) - set(NOTES):
        with pytest.raises(LedgerError, match=f"{own} is for the ledger itself to write"):
            ledger.note(own)


def test_facts_of_a_group_count_its_tokens_by_version_engine_and_end() -> None:
    one = group(4, [2, 2, 3], [NO_VERSION, 3, NO_VERSION, 3], rewards=(1.0, float("nan")))
    one.states[0].worker, one.states[1].worker = "rollout-1", "rollout-0"
    one.states[0].finish_reason, one.states[1].num_aborts = "stop", 2
    assert group_facts(one) == {
        "tokens": [3, 4],
        "versions": {"-1": 2, "2": 2, "3": 3},
        "engines": ["rollout-0", "rollout-1"],
        "rewards": [1.0, None],
        "finish": {"stop": 1},
        "aborts": 2,
    }
    json.dumps(group_facts(one), allow_nan=False)


def test_facts_of_a_group_that_was_never_generated_are_its_size_alone() -> None:
    assert group_facts(group(0, [], [], status=Status.INIT)) == {"tokens": [0, 0]}


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(-1, 4), max_size=6), min_size=1, max_size=4))
def test_tokens_by_version_add_up_to_the_tokens(members: list[list[int]]) -> None:
    facts = group_facts(group(0, *members))
    expected = Counter(str(version) for versions in members for version in versions)
    assert facts.get("versions", {}) == expected
    assert sum(facts["tokens"]) == expected.total()


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
        Ledger().load_state_dict({"format": 3, "sampled": 1})
    with pytest.raises(CheckpointError, match="damaged"):
        Ledger().load_state_dict({**state, "live": "AAAA"})
    with pytest.raises(CheckpointError, match="saved in format 1, this version reads format 3"):
        Ledger().load_state_dict({name: value for name, value in state.items() if name != "format"})


def test_a_refused_lease_moves_none_of_its_groups() -> None:
    ledger = Ledger()
    for group_id in (0, 1):
        ledger.sampled(key(group_id))
    ledger.stored(key(0), Status.COMPLETED)
    with pytest.raises(LedgerError, match="is in_flight"):
        ledger.leased([key(0), key(1)], 1, [0, 0])
    ledger.stored(key(1), Status.COMPLETED)
    with pytest.raises(ValueError, match="shorter"):
        ledger.leased([key(0), key(1)], 1, [0])
    assert ledger.open_leases() == {}
    assert ledger.believed().buffered == 2


def test_a_state_names_how_far_the_journal_was_and_that_much_is_on_the_disk(tmp_path: Path) -> None:
    journal = tmp_path / "j"
    ledger = Ledger(journal)
    trained(ledger, 0, 1)
    state = ledger.state_dict()
    assert state["journal_bytes"] == journal.stat().st_size > 0
    again = Ledger(journal)
    again.load_state_dict(state)
    again.flush()
    assert lines(journal)[-1]["offset"] == state["journal_bytes"]
    assert Ledger().state_dict()["journal_bytes"] == 0


# ---------------------------------------------------------------- the state machine


class Model:
    """What a ledger should know, said the simplest way: the place of every group, ended ones included."""

    def __init__(self) -> None:
        self.place: dict[int, str] = {}
        self.step: dict[int, int] = {}

    def allows(self, move: str, group_id: int, step: int) -> bool:
        at = self.place.get(group_id)
        return {
            "sampled": at is None,
            "continued": at == "buffered",
            "stored": at in ("in_flight", "buffered"),
            "filtered": at in ("in_flight", "buffered"),
            "expired": at in ("in_flight", "buffered"),
            "failed": at in ("in_flight", "buffered"),
            "leased": at == "buffered" or (at == "leased" and self.step[group_id] == step),
        }[move]

    def do(self, move: str, group_id: int, step: int) -> None:
        to = {"sampled": "in_flight", "continued": "in_flight", "stored": "buffered"}.get(move, move)
        self.place[group_id] = to
        if to == "leased":
            self.step[group_id] = step

    def train(self, step: int) -> set[int]:
        ids = {one for one, at in self.place.items() if at == "leased" and self.step[one] <= step}
        self.place.update(dict.fromkeys(ids, "trained"))
        return ids

    def restore(self) -> None:
        for one, at in self.place.items():
            if at == "leased":
                self.place[one] = "buffered"


class LedgerMachine(RuleBasedStateMachine):
    """Any sequence of moves, legal or not, with saves and restores in between, against the model."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger, self.model = Ledger(), Model()

    @rule(
        move=st.sampled_from(
            [
                "sampled",
                "sampled",
                "stored",
                "stored",
                "continued",
                "leased",
                *["filtered", "expired", "failed"],
            ]
        ),
        group_id=st.integers(0, 7),
        step=st.integers(1, 4),
    )
    def move(self, move: str, group_id: int, step: int) -> None:
        one = key(group_id)
        moves: dict[str, Callable[[], None]] = {
            "sampled": lambda: self.ledger.sampled(one),
            "continued": lambda: self.ledger.continued(one),
            "stored": lambda: self.ledger.stored(one, Status.COMPLETED),
            "leased": lambda: self.ledger.leased([one], step, [0]),
        }
        do = moves.get(move) or (lambda: self.ledger.dropped(one, Status(move)))
        if self.model.allows(move, group_id, step):
            do()
            self.model.do(move, group_id, step)
        else:
            with pytest.raises(LedgerError):
                do()

    @rule(step=st.integers(1, 4))
    def train(self, step: int) -> None:
        assert {group_id for _, group_id in self.ledger.trained(step)} == self.model.train(step)
        assert self.ledger.trained(step) == []

    @precondition(lambda self: "in_flight" not in self.model.place.values())
    @rule()
    def save_and_restore(self) -> None:
        state = json.loads(json.dumps(self.ledger.state_dict()))
        self.ledger = Ledger()
        self.ledger.load_state_dict(state)
        self.model.restore()

    @precondition(lambda self: "in_flight" in self.model.place.values())
    @rule()
    def save_too_early(self) -> None:
        with pytest.raises(LedgerError, match="pause before saving"):
            self.ledger.state_dict()

    @invariant()
    def counts_add_up_and_equal_the_model(self) -> None:
        counts, places = self.ledger.believed(), Counter(self.model.place.values())
        assert counts.lost == 0
        assert counts.sampled == len(self.model.place)
        assert (counts.in_flight, counts.buffered) == (
            places["in_flight"],
            places["buffered"] + places["leased"],
        )
        for end in ("trained", "filtered", "failed", "expired"):
            assert getattr(counts, end) == places[end]
        assert {group_id: str(place) for (_, group_id), place in self.ledger.live()} == {
            one: at for one, at in self.model.place.items() if at in ("in_flight", "buffered", "leased")
        }
        leased = Counter(self.model.step[one] for one, at in self.model.place.items() if at == "leased")
        assert {step: tasks.total() for step, tasks in self.ledger.open_leases().items()} == leased


LedgerMachine.TestCase.settings = settings(max_examples=examples(50), stateful_step_count=40, deadline=None)
test_no_sequence_of_moves_breaks_the_ledger = LedgerMachine.TestCase
