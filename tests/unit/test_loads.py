"""Which worker a request goes to: by the room of each, its speed, what others have there, and where its prefix is."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from actors.rollout.loads import AMPLE, OVERLOAD, REPORT_S, Loads, Room
from raypost.types import Work

ROOM = Room(64, 0)


@dataclass(frozen=True)
class Worker:
    worker: str
    room: Room = ROOM
    share: float = 1.0


rooms = st.builds(Room, st.integers(1, 256), st.one_of(st.just(0), st.integers(100, 100_000)))
pools = st.lists(st.tuples(rooms, st.sampled_from([1.0, 1.0, 0.5, 0.1])), min_size=1, max_size=6).map(
    lambda many: [Worker(f"rollout-{n}", room, share) for n, (room, share) in enumerate(many)]
)
requests = st.lists(
    st.tuples(st.integers(1, 2000), st.sampled_from(["", "a", "b", "c"]), st.booleans()), max_size=120
)


@settings(max_examples=60, deadline=None)
@given(pools, requests)
def test_no_worker_is_picked_beside_an_idler_one_but_a_home_that_is_not_overloaded(
    pool: list[Worker], asked: list[tuple[int, str, bool]]
) -> None:
    loads, homes, running = Loads(), dict[str, str](), list[tuple[str, int]]()
    for now, (tokens, trajectory, ends) in enumerate(asked):
        if ends and running:
            loads.end(*running.pop(0))
        full = {one.worker: loads.load(one, tokens, now) for one in pool}
        picked = loads.pick(pool, trajectory, tokens, now)
        least = min(full.values())
        if full[picked.worker] > least:
            assert homes[trajectory] == picked.worker
            assert full[picked.worker] <= max(AMPLE, OVERLOAD * least)
        if trajectory in homes and full[homes[trajectory]] <= max(AMPLE, OVERLOAD * least):
            assert picked.worker == homes[trajectory], "its prefix is there"
        if trajectory:
            homes[trajectory] = picked.worker
        loads.begin(picked.worker, tokens)
        running.append((picked.worker, tokens))
    for worker, tokens in running:
        loads.end(worker, tokens)
    assert {loads.own(one.worker) for one in pool} == {(0, 0)}


def spread(pool: list[Worker], count: int, tokens: int = 100) -> dict[str, int]:
    loads = Loads()
    for _ in range(count):
        loads.begin(loads.pick(pool, "", tokens, 0).worker, tokens)
    return {one.worker: loads.own(one.worker).requests for one in pool}


def test_engines_get_requests_by_their_slots_and_by_the_keys_and_values_that_they_hold() -> None:
    small, large = Worker("small", Room(16, 0)), Worker("large", Room(64, 0))
    assert spread([small, large], 80) == {"small": 16, "large": 64}
    little, much = Worker("little", Room(64, 1_000)), Worker("much", Room(64, 3_000))
    assert spread([little, much], 40) == {"little": 10, "much": 30}, "slots are not what lacks"
    assert spread([little, much], 40, tokens=1) == {"little": 20, "much": 20}, "nor is there a lack of these"


def test_what_other_routers_have_at_a_worker_counts_until_it_is_old_news() -> None:
    pool = [Worker("a"), Worker("b")]
    loads = Loads()
    loads.begin("a", 100)
    loads.heard("a", Work(31, 3100), now_s=10.0)
    assert loads.load(pool[0], 100, 11.0) == 32 / 64
    for _ in range(30):
        picked = loads.pick(pool, "", 100, 11.0)
        assert picked.worker == "b", "a has 30 requests of others, and one of ours"
        loads.begin("b", 100)
    assert loads.pick(pool, "", 100, 11.0 + REPORT_S).worker == "a", "nobody knows any more"


def test_a_trajectory_returns_to_its_prefix_while_there_is_room_and_moves_for_good_when_there_is_not() -> (
    None
):
    pool, loads = [Worker("a"), Worker("b")], Loads()
    home = loads.pick(pool, "t/1", 100, 0).worker
    other = {"a": "b", "b": "a"}[home]
    for _ in range(int(AMPLE * 64) - 1):
        loads.begin(home, 100)
    assert loads.pick(pool, "t/1", 100, 0).worker == home, "b is idle, but a has ample room"
    loads.begin(home, 100)
    for _ in range(4):
        loads.begin(other, 100)
    assert loads.pick(pool, "t/1", 100, 0).worker == home, "b is not half as full"
    loads.end(other, 100)
    assert loads.pick(pool, "t/1", 100, 0).worker == other
    while loads.own(home).requests:
        loads.end(home, 100)
    assert loads.pick(pool, "t/1", 100, 0).worker == other, "its prefix is there from then on"


def test_routers_that_begin_at_once_with_a_request_each_do_not_all_begin_with_the_same_worker() -> None:
    pool = [Worker(f"rollout-{n}") for n in range(8)]
    assert len({Loads().pick(pool, "", 1, 0).worker for _ in range(64)}) > 2
