"""A producer that dies, and the one that comes after it: what it trains is what an undisturbed one would have.

Random interleavings are in test_producer_invariants.py; here is what they do not compare.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypost.buffer.journal import BufferJournal
from raypost.buffer.replay_buffer import ReplayBuffer
from raypost.errors import CheckpointError, LedgerError, ProductionError
from raypost.ledger.events import LedgerEvent
from raypost.ledger.ledger import LEDGER_FILE, Ledger
from raypost.ledger.life import group_life
from raypost.ledger.replay import continued
from raypost.ledger.summary import ledger_summary
from raypost.production.producer import Producer
from raypost.types import GroupKey, Status
from raypost.types.packed import PackedGroups, unpack_groups
from tests.thorough import examples
from tests.unit.production import Mortal, Pool, World, fate, task_config, train_step, virtual

Call = Callable[[Producer[PackedGroups]], Coroutine[Any, Any, Any]]
FOREVER = 10**6


class Lives:
    """A producer, and those that come after it: calls that met a death are made again."""

    def __init__(self, folder: Path, fuses: list[tuple[int, bool]], **world: Any) -> None:
        self.journal, self.fuses, self.options = folder / LEDGER_FILE, fuses, world
        self.pool, self.configs = world.pop("pool", None) or Pool(), world.pop("configs", ())
        self.deaths = 0
        self.buffer: ReplayBuffer | None = None
        self.make(Ledger(self.journal, attempt="a"))

    def make(self, ledger: Ledger) -> None:
        calls, carried_out = self.fuses.pop(0) if self.fuses else (FOREVER, False)
        self.mortal = Mortal(calls, carried_out=carried_out)
        self.world = World(
            *self.configs,
            ledger=ledger,
            pool=self.pool,
            buffer=self.buffer,
            mortal=self.mortal,
            **self.options,
        )
        self.buffer = self.world.buffer

    async def ask(self, call: Call) -> Any:
        while True:
            if self.mortal.died.is_set():
                self.deaths += 1
                self.make(continued(self.journal, "a"))
                rebuilt = await self.once(lambda one: one.rebuild(self.deaths))
                if rebuilt is None:
                    continue
                rebuilt.result()
                self.world.start()
            answer = await self.once(call)
            if answer is not None:
                return answer.result()

    async def once(self, call: Call) -> asyncio.Task[Any] | None:
        work = asyncio.ensure_future(call(self.world.producer))
        died = asyncio.ensure_future(self.mortal.died.wait())
        await asyncio.wait({work, died}, return_when=asyncio.FIRST_COMPLETED)
        died.cancel()
        work.add_done_callback(lambda one: one.cancelled() or one.exception())
        return None if self.mortal.died.is_set() else work

    async def train(
        self,
        steps: int,
        before: Callable[[int], Coroutine[Any, Any, None]] | None = None,
        taken: bool = False,
    ) -> list[list[tuple[GroupKey, list[int]]]]:
        """Train synchronously; return each step's groups with their prompts.

        `before` is awaited before the batch of a step is taken; with `taken`, before it is trained.
        """
        await self.ask(lambda one: one.resume(0))
        self.world.start()
        batches = []
        for step in range(1, steps + 1):
            if before is not None and not taken:
                await before(step)
            _, packed = await self.ask(lambda one, step=step: one.take_batch(step))  # type: ignore[misc]
            if before is not None and taken:
                await before(step)
            groups = unpack_groups(packed)
            batches.append(sorted((one.key, one.states[0].prompt_ids.tolist()) for one in groups))
            await self.ask(lambda one, step=step: one.acknowledge(step))  # type: ignore[misc]
            await self.ask(lambda one: one.pause())
            await self.ask(lambda one, step=step: one.resume(step))  # type: ignore[misc]
        await self.ask(lambda one: one.pause())
        counts = await self.ask(lambda one: one.counts())
        assert counts.lost == 0 and counts.trained == sum(map(len, batches))
        return batches


@settings(max_examples=examples(20), deadline=None)
@given(
    fuses=st.lists(st.tuples(st.integers(0, 40), st.booleans()), min_size=1, max_size=6),
    uniform=st.sets(st.integers(0, 12), max_size=4),
)
def test_a_synchronous_run_trains_the_same_prompts_in_the_same_steps_however_often_its_producer_dies(
    tmp_path_factory: pytest.TempPathFactory, fuses: list[tuple[int, bool]], uniform: set[int]
) -> None:
    async def run(deaths: list[tuple[int, bool]]) -> list[Any]:
        pool = Pool()
        pool.fate = fate(uniform=uniform)
        task = task_config(kind="sync", drop_uniform_rewards=True)
        folder = tmp_path_factory.mktemp("run")
        lives = Lives(folder, deaths, pool=pool, configs=(task,), batch_size=3, size=9)
        return await lives.train(6)

    assert virtual(run(list(fuses))) == virtual(run([]))


class Cuts:
    """A buffer that dies before chosen steps, and comes back to a journal with a flipped bit."""

    def __init__(self, folder: Path, cuts: dict[int, float]) -> None:
        self.folder, self.cuts = folder, cuts
        self.found: list[str] = []

    def journal(self) -> BufferJournal:
        return BufferJournal(self.folder, "a")

    async def before(self, step: int, lives: Lives) -> None:
        if step not in self.cuts:
            return
        assert lives.buffer is not None and lives.buffer._journal is not None
        limits = lives.buffer._expiry._limits
        lives.buffer._journal.close()
        log = self.folder / "log"
        data = bytearray(log.read_bytes())
        data[120 + int(self.cuts[step] * (len(data) - 121))] ^= 1
        log.write_bytes(data)
        lives.buffer = ReplayBuffer(limits, journal=self.journal())
        self.found.append(lives.buffer.state.cut)
        # Its next call is refused, for which the producer's process ends itself.
        lives.mortal.kill()


@settings(max_examples=examples(10), deadline=None)
@given(
    cuts=st.dictionaries(st.integers(1, 6), st.floats(0, 1), min_size=1, max_size=3),
    take=st.booleans(),
    kind=st.sampled_from(["sync", "async"]),
)
def test_a_damaged_journal_of_the_buffer_loses_no_group_and_a_synchronous_run_trains_the_same_prompts(
    tmp_path_factory: pytest.TempPathFactory, cuts: dict[int, float], take: bool, kind: str
) -> None:
    async def run(at: dict[int, float]) -> list[Any]:
        folder = tmp_path_factory.mktemp("run")
        damage = Cuts(folder / "buffer", at)
        task = task_config(kind=kind) if kind == "sync" else task_config(max_staleness=2)
        lives = Lives(folder, [], configs=(task,), batch_size=3, size=9, journal=damage.journal())
        lives.options.pop("journal")
        batches = await lives.train(6, lambda step: damage.before(step, lives), taken=take)
        assert len(damage.found) == len(at) == lives.deaths and all("damaged" in one for one in damage.found)
        keys = [key for batch in batches for key, _ in batch]
        assert len(keys) == len(set(keys)) == 6 * 3
        return batches

    batches = virtual(run(cuts))
    assert kind == "async" or batches == virtual(run({}))


async def producing(folder: Path, **options: Any) -> Lives:
    lives = Lives(folder, [], **options)
    await lives.world.producer.resume(0)
    lives.world.start()
    return lives


def test_production_goes_on_by_itself_if_it_did_and_ends_what_the_dead_one_had_at_work(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        lives = await producing(tmp_path, configs=(task_config(max_pending=4),), batch_size=2)
        await asyncio.sleep(1.5)
        assert lives.pool.generating > 0
        before, interrupts = len(lives.pool.started), lives.pool.interrupts
        lives.mortal.kill()
        await lives.ask(lambda one: one.counts())
        assert lives.world.producer.pending.gate_open and lives.pool.pauses == 1
        assert lives.pool.interrupts == interrupts + 1, (
            "agent loops and judges, which know nothing of the death"
        )
        await asyncio.sleep(0.5)
        assert lives.pool.generating == len(lives.world.producer.pending)
        assert set(lives.pool.started[before:]) <= set(lives.pool.started[:before])

    virtual(main())


@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_a_producer_that_died_while_it_was_paused_stays_paused(tmp_path: Path, mode: Any) -> None:
    async def main() -> None:
        lives = await producing(tmp_path, batch_size=2)
        await asyncio.sleep(1.5)
        await lives.world.producer.pause(mode)
        pauses = lives.pool.pauses
        lives.mortal.kill()
        counts = await lives.ask(lambda one: one.counts())
        assert (counts.in_flight, counts.lost, lives.pool.generating) == (0, 0, 0)
        assert lives.pool.paused.is_set() and not lives.world.producer.pending.gate_open
        # Where nothing was left at work the pool is not asked: an evaluation may be using it.
        assert lives.pool.pauses == pauses + (mode == "keep")

    virtual(main())


def test_what_was_in_flight_goes_on_from_what_was_stored_of_it_and_is_told_by_its_life(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        pool = Pool()
        pool.seconds = lambda group: 6
        lives = await producing(tmp_path, pool=pool, configs=(task_config(max_pending=2),), batch_size=2)
        await asyncio.sleep(2.5)
        await lives.world.producer.pause()
        await lives.world.producer.resume(0)
        await asyncio.sleep(1.5)
        lives.mortal.kill()
        _, packed = await lives.ask(lambda one: one.take_batch(1))
        assert all(len(member.response_ids) == 6 for one in unpack_groups(packed) for member in one.states)
        lives.world.ledger.flush()
        events = [line["event"] for line in group_life(tmp_path, "0").lines]
        assert LedgerEvent.REBUILT in events
        (rebuilt,) = (
            line for line in group_life(tmp_path, "0").lines if line["event"] == LedgerEvent.REBUILT
        )
        assert (rebuilt["continued"], rebuilt["from_prompt"]) == (2, 0)

    virtual(main())


def test_a_batch_taken_before_the_death_is_the_one_that_is_given_again(tmp_path: Path) -> None:
    async def main() -> None:
        lives = await producing(tmp_path, batch_size=2)
        first, packed = await lives.world.take(1)
        lives.mortal.kill()
        again, same = await lives.ask(lambda one: one.take_batch(1))
        assert [one.key for one in unpack_groups(same)] == [one.key for one in unpack_groups(packed)]
        assert (again.num_groups, again.staleness, again.num_samples) == (
            2,
            first.staleness,
            first.num_samples,
        )
        assert again.metrics.produced_tokens == 0, "what was counted died"
        await lives.ask(lambda one: one.acknowledge(1))
        with pytest.raises(ProductionError, match="trained and gone"):
            await lives.ask(lambda one: one.take_batch(1))

    virtual(main())


def test_ledger_and_buffer_that_contradict_each_other_end_the_run(tmp_path: Path) -> None:
    async def main() -> None:
        lives = await producing(tmp_path, batch_size=2)
        await lives.world.take(1)
        await lives.world.producer.pause()
        lives.mortal.kill()
        lines = lives.journal.read_text().splitlines(keepends=True)
        kept = [line for line in lines if '"group": 0' not in line]
        lives.journal.write_text("".join(kept))
        with pytest.raises(
            (ProductionError, LedgerError), match=r"contradicts|ended or never were|never sampled"
        ):
            await lives.ask(lambda one: one.counts())

    virtual(main())


# ---------------------------------------------------------------- the ledger goes on as it was


def test_a_ledger_that_goes_on_writes_what_the_one_before_would_have_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raypost.ledger.journal.TAIL_BYTES", 900)
    records = {}
    for name in ("undisturbed", "died"):
        ticks = iter(range(FOREVER))
        path = tmp_path / name / LEDGER_FILE
        clock = lambda ticks=ticks: 1000 + next(ticks) / 7  # noqa: E731
        ledger = Ledger(path, clock, attempt="a")
        for n in range(40):
            ledger.sampled(("t", n))
            facts = {
                "tokens": [n, n + 1],
                "rewards": [0.1 * n, None],
                "engines": [f"e{n % 5}"],
                "versions": {"1": n + 1},
            }
            ledger.stored(("t", n), Status.COMPLETED, staleness=0, **facts)
            if n % 3 == 0:
                ledger.leased([("t", n)], n + 1, [1])
                ledger.trained(n + 1, {("t", n): "no finite reward"} if n % 6 == 0 else None)
            if n % 10 == 9:
                ledger.state_dict()
            ledger.flush()
            if name == "died" and n % 4 == 2:
                ledger = continued(path, "a", clock)
        ledger.flush()
        records[name] = ledger.snapshot()
        assert ledger_summary(path.parent).problems == []
    assert records["died"] == records["undisturbed"]
    assert records["died"]["closed"][0] == 14 and records["died"]["left_out"] == {"t": 7}


def test_a_journal_of_another_start_is_not_continued(tmp_path: Path) -> None:
    first = Ledger(tmp_path / LEDGER_FILE, attempt="a")
    first.sampled(("t", 0))
    first.flush()
    assert continued(tmp_path / LEDGER_FILE, "a").believed().sampled == 1
    assert continued(tmp_path / LEDGER_FILE, "b").believed().sampled == 0
    assert continued(tmp_path / "none" / LEDGER_FILE, "b").believed().sampled == 0


# ---------------------------------------------------------------- the account


def test_groups_that_the_trainer_left_out_end_as_failed_with_its_reason(tmp_path: Path) -> None:
    async def main() -> None:
        lives = await producing(tmp_path, batch_size=2)
        _, packed = await lives.world.take(1)
        keys = [one.key for one in unpack_groups(packed)]
        left_out = {keys[0]: "group x: 0 trainable of 2, 2 are needed"}
        for _ in range(2):
            await lives.ask(lambda one: one.acknowledge(1, left_out))
            lives.mortal.kill()
        counts = await lives.ask(lambda one: one.counts())
        assert (counts.trained, counts.failed, counts.lost) == (1, 1, 0)
        assert lives.world.producer.progress.consumed == {"default": 2}
        lives.world.ledger.flush()
        last = group_life(tmp_path, str(keys[0][1])).lines[-1]
        assert (last["event"], last["why"], last["step"]) == ("failed", left_out[keys[0]], 1)

    virtual(main())


def test_groups_to_be_generated_again_are_dropped_by_name_where_the_run_goes_on_without(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        again = task_config(max_staleness=1, tail_batch_trigger_size=0)
        before = World(again, batch_size=2)
        await before.producer.resume(0)
        before.start()
        await before.take(1)
        await before.producer.acknowledge(1)
        await before.producer.pause()
        await before.buffer.refresh(100)
        for key in [key for key, one in before.buffer.state.groups.items() if one.status is Status.EXPIRED]:
            before.ledger.stored(key, Status.EXPIRED)
        state = await before.producer.state_dict(model_step=1)
        expired = (await before.buffer.counts()).groups["default"][Status.EXPIRED]
        assert expired > 0
        after = World(task_config(max_staleness=1, tail_batch_trigger_size=-1), batch_size=2)
        await after.producer.load_state_dict(state)
        counts = await after.producer.counts()
        assert (counts.lost, counts.expired) == (0, expired)

    virtual(main())


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda state: state["samplers"]["default"].update(position=1, offset=1), "sampler and progress say 1"),
        (lambda state: state["progress"]["consumed"].update(default=1), "2 taken"),
        (lambda state: state["buffer"].update(groups=None, status=state["buffer"]["status"][:0],
            sequence=state["buffer"]["sequence"][:0]), "in one of them only"),
    ],
)  # fmt: skip
def test_a_restored_state_that_does_not_add_up_is_refused(damage: Callable[[Any], None], words: str) -> None:
    async def main() -> None:
        before = World(task_config(max_staleness=1), batch_size=2)
        await before.producer.resume(0)
        before.start()
        await train_step(before, 1)
        await asyncio.sleep(5)
        await before.producer.pause()
        state = await before.producer.state_dict(model_step=1)
        damage(state)
        with pytest.raises(CheckpointError, match=words):
            await World(task_config(max_staleness=1), batch_size=2).producer.load_state_dict(state)

    virtual(main())


def test_lines_are_in_the_journal_before_the_buffer_hears_of_a_group(tmp_path: Path) -> None:
    async def main() -> None:
        lives = Lives(tmp_path, [])
        put = lives.world.buffer.put
        seen: list[set[int]] = []

        async def spied(packed: PackedGroups, *rest: Any) -> Any:
            lines = [json.loads(line) for line in lives.journal.read_text().splitlines()]
            sampled = {line["group"] for line in lines if line["event"] == "sampled"}
            assert {number for _, number in packed.keys} <= sampled
            seen.append(sampled)
            return await put(packed, *rest)

        lives.world.buffer.put = spied  # type: ignore[method-assign,assignment]
        await lives.world.producer.resume(0)
        await lives.world.producer.produce_batch(1)
        assert seen

    virtual(main())
