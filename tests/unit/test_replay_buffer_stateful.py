"""The buffer with its journal against a simple model, killed and restarted at arbitrary points.

Invariants 1, 2, 3 and 9 of the design, for the buffer's part: a group is in one place and ends once; nothing
trains twice; nothing at or above a threshold is leased; memory and disk are counted and bounded.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from raypost.buffer.journal import BufferJournal
from raypost.buffer.replay_buffer import ReplayBuffer
from raypost.types import BufferBounds, Group, GroupKey, Status, TaskLimits, group_status
from raypost.types.packed import pack_groups, unpack_groups
from raypost.types.staleness import oldest_version, staleness_of
from tests.thorough import examples
from tests.unit.buffer_groups import group, now

TASKS = ("default", "other")
KEPT = (Status.COMPLETED, Status.ABORTED, Status.EXPIRED)
MAX_GROUPS = 6
GROUP_BYTES = 2000
"""More than any group has."""


@dataclass
class Stored:
    """One group of the model: its members as records, and where it is."""

    group: Group
    status: Status
    sequence: int
    place: str = "stored"
    """stored, out, or leased."""
    claim: int = 0


@dataclass
class Model:
    """What the buffer must do, one group and one member at a time."""

    limits: TaskLimits
    groups: dict[GroupKey, Stored] = field(default_factory=dict)
    trained: set[GroupKey] = field(default_factory=set)
    leases: dict[int, list[GroupKey]] = field(default_factory=dict)
    sequence: int = 0
    claim: int = 0
    full: bool = False

    @property
    def max_tries(self) -> float:
        return float("inf") if self.limits.max_tries is None else self.limits.max_tries

    def expired_members(self, one: Group, step: int) -> list[bool]:
        found = []
        for state in one.states:
            oldest = oldest_version(state)
            threshold = self.limits.stale_threshold
            assert threshold is not None
            old = oldest is not None and staleness_of(oldest, step) >= threshold
            bound = self.limits.token_stale_threshold
            trained = [int(v) for v, m in zip(state.policy_versions, state.response_mask, strict=True) if m]
            masked = bound is not None and trained and all(staleness_of(v, step) >= bound for v in trained)
            found.append(old or bool(masked))
        return found

    def reset(self, one: Group, expired: list[bool]) -> None:
        for state, is_old in zip(one.states, expired, strict=True):
            if is_old:
                state.reset()
                state.status = Status.EXPIRED

    def put(self, one: Group, step: int) -> tuple[Status, bool]:
        past = self.groups.get(one.key)
        if one.key in self.trained or (past and past.place == "leased"):
            return Status.COMPLETED, True
        status = group_status(one.states)
        stored = status not in (Status.FAILED, Status.FILTERED)
        expired = self.expired_members(one, step)
        if stored and any(expired):
            status, stored = Status.EXPIRED, self.limits.retry
            self.reset(one, expired)
        elif status is Status.ABORTED and max(state.num_aborts for state in one.states) >= self.max_tries:
            status = Status.EXPIRED
        self.groups.pop(one.key, None)
        if stored:
            sequence = past.sequence if past else self.sequence
            self.sequence += past is None
            self.groups[one.key] = Stored(one, status, sequence)
        return status, stored

    def refresh(self, step: int) -> dict[GroupKey, bool]:
        report = {}
        for key, stored in list(self.groups.items()):
            expired = self.expired_members(stored.group, step)
            if stored.place != "stored" or not any(expired):
                continue
            if not any(state.status is Status.EXPIRED for state in stored.group.states):
                report[key] = self.limits.retry
            if self.limits.retry:
                stored.status = Status.EXPIRED
                self.reset(stored.group, expired)
            else:
                del self.groups[key]
        return report

    def stored(self, task: str, status: Status) -> list[GroupKey]:
        def order(key: GroupKey) -> tuple[int, int]:
            versions = [v for s in self.groups[key].group.states if (v := oldest_version(s)) is not None]
            return (min(versions, default=10**9), self.groups[key].sequence)

        there = (k for k, s in self.groups.items() if s.place == "stored" and s.status is status)
        return sorted((key for key in there if key[0] == task), key=order)

    def settle(self, high: int, low: float) -> None:
        held = sum(stored.place != "out" for stored in self.groups.values())
        self.full = held >= (high * low if self.full else high)


class BufferMachine(RuleBasedStateMachine):
    """Every call goes to both; what they answer is compared."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="rp-buffer-"))
        self.journal: BufferJournal | None = None
        self.step, self.following, self.refreshes = 1, 0, 0
        self.before: tuple[Model, bytes] | None = None

    @initialize(
        threshold=st.integers(1, 3),
        tokens=st.none() | st.integers(1, 2),
        retry=st.booleans(),
        max_tries=st.none() | st.integers(1, 2),
    )
    def begin(self, threshold: int, tokens: int | None, retry: bool, max_tries: int | None) -> None:
        limits = TaskLimits(threshold, tokens, retry, max_tries if retry else None)
        self.limits = dict.fromkeys(TASKS, limits)
        self.model = Model(limits)
        self.start("0")

    def start(self, attempt: str) -> None:
        self.attempt = attempt
        # Small enough that files are closed, emptied and rewritten in a few steps.
        self.journal = BufferJournal(
            self.folder, attempt, file_bytes=3000, garbage_bytes=3000, log_bytes=2000
        )
        bounds = BufferBounds(max_groups=MAX_GROUPS, low_water=0.5)
        self.buffer = ReplayBuffer(self.limits, bounds, self.journal)
        self.before = None

    def teardown(self) -> None:
        if self.journal is not None:
            self.journal.close()
        shutil.rmtree(self.folder)

    def begins(self) -> None:
        """Remember model and files as they are before a call."""
        saved = self.folder / "saved"
        shutil.rmtree(saved, ignore_errors=True)
        saved.mkdir()
        for path in self.folder.iterdir():
            if path.name.startswith("data-"):
                shutil.copyfile(path, saved / path.name)
        self.before = (copy.deepcopy(self.model), self.log.read_bytes())

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def ends(self) -> None:
        self.model.settle(MAX_GROUPS, 0.5)

    # ---------------------------------------------------------------- production's side

    @rule(
        made=st.lists(
            st.tuples(
                st.sampled_from(TASKS),
                st.lists(
                    st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=3), min_size=1, max_size=2
                ),
                st.sampled_from([*KEPT[:2], Status.FAILED, Status.COMPLETED]),
                st.integers(0, 2),
            ),
            max_size=3,
        ),
        again=st.booleans(),
    )
    def put_new(self, made: list[Any], again: bool) -> None:
        groups = []
        for task, members, status, aborts in made:
            versions = [[max(0, self.step - 1 - age) for age, _ in member] for member in members]
            masks = [[int(trained) for _, trained in member] for member in members]
            one = group(self.following, *versions, status=status, task=task, masks=masks, num_aborts=aborts)
            groups.append(one)
            self.following += 1
        self.put(groups)
        if again:
            self.put(groups)

    @precondition(lambda self: any(s.place == "out" for s in self.model.groups.values()))
    @rule(data=st.data(), status=st.sampled_from([Status.COMPLETED, Status.ABORTED, Status.FILTERED]))
    def put_back(self, data: st.DataObject, status: Status) -> None:
        key = data.draw(st.sampled_from(self.out()))
        one = copy.deepcopy(self.model.groups[key].group)
        for state in one.states:
            if state.status is not Status.COMPLETED or status is Status.FILTERED:
                state.status = status
        self.put([one])

    @rule(data=st.data())
    def put_a_known_one_again(self, data: st.DataObject) -> None:
        known = [*self.model.trained, *self.model.groups]
        if known:
            task, group_id = data.draw(st.sampled_from(known))
            self.put([group(group_id, [max(0, self.step - 1)], task=task)])

    def put(self, groups: list[Group]) -> None:
        self.begins()
        results = now(self.buffer.put(pack_groups(groups), self.step))
        expected = [self.model.put(copy.deepcopy(one), self.step) for one in groups]
        assert [(one.status, one.stored) for one in results] == expected
        self.ends()

    @rule(with_claim=st.booleans())
    def refresh(self, with_claim: bool) -> None:
        self.begins()
        self.refreshes += with_claim
        claim = self.refreshes if with_claim else 0
        report = now(self.buffer.refresh(self.step, claim))
        assert {one.key: one.stored for one in report} == self.model.refresh(self.step)
        if with_claim:
            assert now(self.buffer.refresh(self.step, claim)) == report
        self.ends()

    @rule(
        task=st.sampled_from(TASKS),
        sources=st.permutations(KEPT).map(lambda all_of_them: all_of_them[:2]),
        limit=st.integers(1, 3),
    )
    def pop(self, task: str, sources: list[Status], limit: int) -> None:
        self.begins()
        self.model.claim = claim = self.model.claim + 1
        packed = now(self.buffer.pop(task, sources, limit, claim))
        expected = [key for status in sources for key in self.model.stored(task, status)][:limit]
        assert list(packed.keys if packed is not None else ()) == expected
        for key in expected:
            stored = self.model.groups[key]
            stored.place, stored.claim = "out", claim
        self.same_groups(packed, expected)
        self.ends()

    @rule()
    def ask_again(self) -> None:
        held = [key for key in self.out() if self.model.groups[key].claim == self.model.claim]
        if not held:
            return
        again = now(self.buffer.pop("default", [Status.ABORTED], 1, self.model.claim))
        assert set(again.keys if again is not None else ()) == set(held)

    @precondition(lambda self: self.model.groups)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.begins()
        keys = data.draw(st.lists(st.sampled_from(list(self.model.groups)), max_size=2))
        now(self.buffer.drop(keys))
        for key in set(keys) & set(self.out()):
            del self.model.groups[key]
        self.ends()

    @rule()
    def reclaim(self) -> None:
        self.begins()
        self.model.claim = claim = self.model.claim + 1
        self.refreshes = max(self.refreshes, claim)
        for key in self.out():
            self.model.groups[key].place = "stored"
        contents = now(self.buffer.reclaim(claim))
        assert contents == now(self.buffer.reclaim(claim))
        places = {key: one.place for key, one in self.model.groups.items()}
        assert contents.groups.keys() == {key for key, place in places.items() if place == "stored"}
        assert {step: set(one.keys) for step, one in contents.leases.items()} == {
            step: set(keys) for step, keys in self.model.leases.items()
        }
        self.ends()

    # ---------------------------------------------------------------- the consumer's side

    @rule(wanted=st.dictionaries(st.sampled_from(TASKS), st.integers(1, 3), min_size=1))
    def lease(self, wanted: dict[str, int]) -> None:
        self.begins()
        lease = now(self.buffer.lease(self.step, wanted))
        if self.step not in self.model.leases:
            chosen: list[GroupKey] = []
            for task, count in wanted.items():
                waiting = self.model.stored(task, Status.COMPLETED)
                fresh = [
                    k
                    for k in waiting
                    if not any(self.model.expired_members(self.model.groups[k].group, self.step))
                ]
                if len(fresh) < count:
                    assert lease is None
                    return
                chosen += fresh[:count]
            self.model.leases[self.step] = chosen
            for key in chosen:
                self.model.groups[key].place = "leased"
        assert lease is not None and sorted(lease.keys) == sorted(self.model.leases[self.step])
        limits = self.model.limits
        assert limits.stale_threshold is not None and max(lease.staleness) < limits.stale_threshold
        assert list(lease.staleness) == sorted(lease.staleness, reverse=True)
        bound = limits.token_stale_threshold
        for version, trained in zip(lease.batch.versions.tolist(), lease.batch.masks.tolist(), strict=True):
            assert not trained or bound is None or staleness_of(version, self.step) < bound
        self.ends()

    @rule()
    def acknowledge_and_step(self) -> None:
        self.begins()
        keys = now(self.buffer.acknowledge(self.step))
        expected = self.model.leases.pop(self.step, [])
        assert sorted(keys) == sorted(expected) and not set(keys) & self.model.trained
        assert now(self.buffer.acknowledge(self.step)) == ()
        for key in expected:
            del self.model.groups[key]
            self.model.trained.add(key)
        self.ends()
        self.step += 1

    # ---------------------------------------------------------------- death and restart

    @rule()
    def die_between_calls(self) -> None:
        assert self.journal is not None
        self.journal.close()
        self.start(self.attempt)

    @precondition(lambda self: self.before is not None)
    @rule(part=st.floats(0, 1, exclude_max=True))
    def die_during_the_last_call(self, part: float) -> None:
        """Its data was written, and its record in part: nothing of the call has happened."""
        assert self.journal is not None and self.before is not None
        model, log = self.before
        after = self.log.read_bytes()
        written = after[len(log) :] if after.startswith(log) else b""
        self.journal.close()
        for path in self.folder.glob("data-*"):
            path.unlink()
        for path in (self.folder / "saved").iterdir():
            path.rename(self.folder / path.name)
        first = _first_record(written)
        self.log.write_bytes(log + first[: int(part * len(first))])
        leased, self.model = set(self.model.leases), model
        if self.step - 1 in self.model.leases and self.step - 1 not in leased:
            self.step -= 1
        self.start(self.attempt)

    @rule(fresh=st.booleans())
    def restore(self, fresh: bool) -> None:
        state = now(self.buffer.state_dict())
        assert self.journal is not None
        self.journal.close()
        self.start(str(int(self.attempt) + 1))
        if fresh:
            self.model = Model(self.model.limits, sequence=0)
            self.following, self.step = 0, 1
            return
        for _ in range(2):
            now(self.buffer.load_state_dict(state))
        for stored in self.model.groups.values():
            stored.place = "stored"
        self.model.leases.clear()
        self.model.claim, self.model.full = 0, False
        self.ends()

    # ---------------------------------------------------------------- invariants

    def out(self) -> list[GroupKey]:
        return [key for key, stored in self.model.groups.items() if stored.place == "out"]

    def same_groups(self, packed: Any, keys: list[GroupKey]) -> None:
        for one, key in zip(unpack_groups(packed) if packed is not None else [], keys, strict=True):
            expected = self.model.groups[key].group
            for mine, theirs in zip(one.states, expected.states, strict=True):
                assert (mine.status, mine.reward) == (theirs.status, theirs.reward)
                assert mine.policy_versions.tolist() == theirs.policy_versions.tolist()
                assert mine.response_mask.tolist() == theirs.response_mask.tolist()

    @invariant()
    def holds_exactly_what_it_must(self) -> None:
        if self.journal is None:
            return
        found = now(self.buffer.counts())
        for task in TASKS:
            expected: dict[Status, int] = {}
            for key, stored in self.model.groups.items():
                status = Status.ARCHIVED if stored.place == "leased" else stored.status
                if key[0] == task and stored.place != "out":
                    expected[status] = expected.get(status, 0) + 1
            assert found.groups[task] == expected
            for status in KEPT:
                assert list(self.buffer.state.index.keys(task, status)) == self.model.stored(task, status)
        assert found.is_full == self.model.full
        here = [stored.group for stored in self.model.groups.values() if stored.place == "stored"]
        for step in range(self.step + 5):
            expires = any(any(self.model.expired_members(one, step)) for one in here)
            assert expires == (step >= found.expires_at), "a refresh is not asked for without need"

    @invariant()
    def holds_no_group_that_ended(self) -> None:
        if self.journal is None:
            return
        state, groups = self.buffer.state, self.buffer.groups
        assert len(groups) == len(state.groups) == len(self.model.groups)
        assert all(groups.view(key).keys == (key,) for key in state.groups)
        sizes = [one.nbytes for one in state.groups.values()]
        assert groups.nbytes <= 2 * sum(sizes) + GROUP_BYTES * len(sizes)

    @invariant()
    def counts_its_bytes_and_bounds_its_files(self) -> None:
        if self.journal is None:
            return
        found = now(self.buffer.counts())
        held = [pack_groups([stored.group]).nbytes for stored in self.model.groups.values()]
        assert sum(n for task in found.nbytes.values() for n in task.values()) == sum(held)
        files = sum(path.stat().st_size for path in self.folder.iterdir() if path.is_file())
        assert files <= 4 * (sum(held) + 400 * len(held)) + 20_000


def _first_record(written: bytes) -> bytes:
    return written[: 16 + int.from_bytes(written[:4], "little")] if written else b""


TestBuffer = BufferMachine.TestCase
TestBuffer.settings = settings(
    max_examples=examples(50), stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
