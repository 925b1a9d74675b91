"""Invariants 1 to 4 and 9 of the design under random interleavings: production, takes, acknowledgements,
pauses, syncs, hosts that die, groups that fail, hang or are filtered, checkpoints, crashes, and deaths of the producer
at any call that it makes, those included by which it comes back.

The machine plays the driver, on a virtual clock that runs only inside a rule. Its model is the list of groups
each surviving model has trained.
"""

from __future__ import annotations

import asyncio
import copy
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from raypost.audit.account import Account
from raypost.audit.audit import read_ledger
from raypost.audit.findings import Findings
from raypost.buffer.replay_buffer import ReplayBuffer
from raypost.errors import LedgerError
from raypost.ledger.ledger import LEDGER_FILE, Ledger
from raypost.ledger.replay import continued
from raypost.production.producer import Producer
from raypost.types import BufferBounds, Group, GroupKey, Status, TakeStatus
from raypost.types.packed import PackedGroups, unpack_groups
from raypost.types.pause import PauseMode
from tests.thorough import examples
from tests.unit.production import Mortal, Pool, VirtualClockLoop, World, task_config, virtual

Call = Callable[[Producer[PackedGroups]], Coroutine[Any, Any, Any]]
FATES = ("ok", "ok", "ok", "ok", "uniform", "failed", "died", "hang", "stubborn")


class Fates:
    """What becomes of a group, by its id and how often it was started: the same in every run."""

    def __init__(self, seed: int) -> None:
        self.seed, self.starts, self.last = seed, dict[GroupKey, int](), dict[str, str]()

    def seconds(self, group: Group) -> int:
        return 1 + (group.group_id * 7 + self.seed) % 6

    def __call__(self, group: Group) -> str:
        start = self.starts[group.key] = self.starts.get(group.key, 0) + 1
        fate = FATES[hash((group.group_id, start, self.seed)) % len(FATES)]
        self.last[f"group {group.task}/{group.group_id}"] = fate
        return fate


class ProducerMachine(RuleBasedStateMachine):
    """A driver that does things in any order that the protocol allows."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualClockLoop()
        self.runner = asyncio.Runner(loop_factory=lambda: self.loop)
        self.paused = True
        self.frozen = False
        self.step = 0
        self.version = 0
        self.batch: tuple[int, list[GroupKey]] | None = None
        self.trained: list[GroupKey] = []
        self.num_acknowledged = 0
        self.saved: Any = None
        self.folder = tempfile.TemporaryDirectory()
        self.attempt = self.ticks = 0
        self.incarnation = 0
        self.fuses: list[tuple[int, bool]] = []
        self.orphans: list[asyncio.Task[Any]] = []
        self.asked: dict[str, int] = {}
        """Targets of the producers that died, of this attempt and of what it was restored from."""
        self.world: World
        self.running: asyncio.Task[None]
        self.reviving: asyncio.Task[None] | None = None

    def teardown(self) -> None:
        try:
            self.a_batch_comes_in_the_end()
        finally:
            self.do(self.end())
            self.runner.close()
            self.audit()
            self.folder.cleanup()

    def audit(self) -> None:
        """An account that shares no code with the ledger's finds nothing wrong in its journal."""
        if not self.journal.exists():
            return
        strategies, findings = self.world.strategies.items(), Findings()
        thresholds = {name: one.limits.stale_threshold for name, one in strategies}
        account = Account({name: one for name, one in thresholds.items() if one is not None}, findings)
        read_ledger(self.journal.parent, account, findings)
        assert not findings.contradictions, findings.texts
        assert list(account.missing()) == []

    def a_batch_comes_in_the_end(self) -> None:
        """Whatever happened: a driver that syncs when it is told to gets its next batches."""
        for _ in range(2):
            before = self.step
            for _ in range(20):
                if self.batch is not None:
                    self.train(acknowledge=True, repeated=False)
                self.pause(impatient=False, mode="abort")
                self.resume(sync=True)
                self.take(patience_s=60.0)
                if self.step > before:
                    break
            assert self.step == before + 1, self.world.producer.progress.state_dict()

    def do(self, work: Any) -> Any:
        # Runner.run would handle SIGINT anew each time: of 20,000 calls, a third of the time.
        return self.runner.get_loop().run_until_complete(work)

    async def ask(self, call: Call) -> Any:
        """Call the producer; if it dies before it answers, call the one that comes after it."""
        while True:
            if self.mortal.died.is_set() and self.reviving is None:
                self.reviving = asyncio.create_task(self.revive(), name="revive")
            if self.reviving is not None:
                await asyncio.shield(self.reviving)
                self.reviving = None
            asked = await self.unless_it_dies(call)
            if asked is not None:
                return asked.result()

    async def unless_it_dies(self, call: Call) -> asyncio.Task[Any] | None:
        """Return the call that has ended, None if the producer died before."""
        mortal, asked = self.mortal, asyncio.ensure_future(call(self.world.producer))
        died = asyncio.ensure_future(mortal.died.wait())
        try:
            await asyncio.wait({asked, died}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            asked.cancel()
            await asyncio.wait({asked, died}, return_when=asyncio.FIRST_COMPLETED)
            raise
        finally:
            if not self.loop.is_closed():
                died.cancel()
            # Of those that died nobody wants to know.
            asked.add_done_callback(lambda one: one.cancelled() or one.exception())
        return None if mortal.died.is_set() else asked

    async def revive(self) -> None:
        """Start the producer again, as often as it dies while it comes back."""
        while self.mortal.died.is_set():
            self.running.cancel()
            self.incarnation += 1
            ledger = continued(self.journal, str(self.attempt), self.tick)
            for name, target in self.world.producer.progress.target.items():
                self.asked[name] = max(target, self.asked.get(name, 0))
            self.make_world(ledger, self.world.buffer, self.world.pool)
            rebuilt = await self.unless_it_dies(lambda producer: producer.rebuild(self.incarnation))
            if rebuilt is None:
                continue
            rebuilt.result()
            # What of the dead one's still runs hangs: its own deadline ends it.
            for task in self.orphans:
                hangs = self.fates.last[task.get_name()] in ("hang", "stubborn")
                # One that was cancelled and went on is stubborn, whatever became of its group since.
                assert task.done() or task.cancelling() or hangs, task
                for _ in range(2):
                    task.cancel()
                    await asyncio.sleep(0)
            self.orphans = []
            self.running = self.world.start()

    @initialize(
        staleness=st.integers(0, 2),
        interval=st.sampled_from([1, 2]),
        over=st.sampled_from([0.0, 1.0]),
        trigger=st.sampled_from([-1, 0, 2]),
        kind=st.sampled_from(["async", "async", "sync"]),
        num_slots=st.sampled_from([None, 4]),
        tries=st.sampled_from([None, 1, 2]),
        mixed=st.booleans(),
        bounded=st.booleans(),
        retries=st.sampled_from([0, 2]),
        on_failed=st.sampled_from(["drop_group", "drop_member"]),
        num_tasks=st.integers(1, 2),
        buffer_call_s=st.sampled_from([0.0, 0.2]),
        mortal=st.booleans(),
        seed=st.integers(0, 1000),
    )
    def begin(
        self, seed: int, num_tasks: int, interval: int, staleness: int, over: float, **rest: Any
    ) -> None:
        strategy: dict[str, Any] = {
            "max_staleness": staleness,
            "over_sample_threshold": over,
            "tail_batch_trigger_size": rest["trigger"],
            "tail_batch_max_tries": rest["tries"] if rest["trigger"] >= 0 else None,
            "drop_uniform_rewards": True,
            "max_retries": rest["retries"],
            "on_failed_member": rest["on_failed"],
        }
        if rest["kind"] == "sync":
            strategy["kind"] = "sync"
        self.tasks = [task_config("task0", **strategy)]
        if num_tasks == 2:
            # Beside it the same again, or one that may run further ahead.
            other = {"max_staleness": staleness + 2} if rest["mixed"] else strategy
            self.tasks.append(task_config("task1", **{"drop_uniform_rewards": True, **other}))
        self.bounds = BufferBounds(max_groups=6 if rest["bounded"] else None, low_water=0.5)
        self.buffer_call_s, self.num_slots = rest["buffer_call_s"], rest["num_slots"]
        self.is_mortal = rest["mortal"]
        self.interval, self.fates = interval, Fates(seed)
        self.thresholds: dict[str, int | None] = {}
        self.do(self.make())

    @property
    def journal(self) -> Path:
        return Path(self.folder.name) / LEDGER_FILE

    def tick(self) -> float:
        """Return a time for the journal that no other line has."""
        self.ticks += 1
        return 1.7e9 + self.ticks / 1000

    async def make(self) -> None:
        pool = Pool()
        pool.fate, pool.seconds = self.fates, self.fates.seconds
        self.attempt, self.incarnation = self.attempt + 1, 0
        self.orphans, self.asked = [], {}
        ledger = Ledger(self.journal, self.tick, attempt=str(self.attempt)) if self.is_mortal else Ledger()
        self.make_world(ledger, None, pool)
        strategies = self.world.strategies
        self.thresholds = {name: one.limits.stale_threshold for name, one in strategies.items()}
        self.running = self.world.start()
        self.paused, self.frozen = True, False

    def make_world(self, ledger: Ledger, buffer: ReplayBuffer | None, pool: Pool) -> None:
        calls, carried_out = self.fuses.pop(0) if self.fuses else (None, False)
        self.mortal = Mortal(calls, carried_out=carried_out)
        self.orphans += [one for one in self.loop.alive if one.get_name().startswith("group")]
        self.world = World(
            *self.tasks,
            batch_size=3,
            interval=self.interval,
            pause_timeout_s=15,
            size=7,
            pool=pool,
            ledger=ledger,
            buffer_call_s=self.buffer_call_s,
            bounds=self.bounds,
            num_slots=self.num_slots,
            buffer=buffer,
            mortal=self.mortal if self.is_mortal else None,
        )

    async def end(self) -> None:
        self.fuses, self.mortal.calls = [], None
        await self.ask(lambda one: one.counts())
        self.running.cancel()
        await asyncio.wait([self.running])
        await self.world.producer.close()
        # A stubborn group ignores the first cancellation, not the second.
        rest = [one for one in self.loop.alive if one is not asyncio.current_task()]
        for one in rest:
            one.cancel()
        if rest:
            await asyncio.wait(rest)

    # ---------------------------------------------------------------- what a driver does

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 3.0, 10.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.do(asyncio.sleep(seconds))

    @precondition(lambda self: self.batch is None)
    @rule(patience_s=st.sampled_from([0.5, 2.0, 30.0]))
    def take(self, patience_s: float) -> None:
        async def attempt() -> tuple[TakeStatus, PackedGroups | None] | None:
            try:
                step = self.step + 1
                return await asyncio.wait_for(self.ask(lambda one: one.take_batch(step)), patience_s)
            except TimeoutError:
                return None

        taken = self.do(attempt())
        if taken is None:
            return
        status, packed = taken
        if packed is None:
            assert status.status == "expired_batch" and self.step > self.version
            return
        self.step += 1
        groups = unpack_groups(packed)
        self.check_batch(status, groups)
        self.batch = (self.step, [one.key for one in groups])

    def check_batch(self, status: TakeStatus, groups: list[Group]) -> None:
        assert status.num_groups == len(groups) == 3
        for age, one in zip(status.staleness, groups, strict=True):
            assert one.status is Status.COMPLETED
            oldest = min(int(v) for member in one.states for v in member.policy_versions)
            assert age == self.step - 1 - oldest
            threshold = self.thresholds[one.task]
            assert threshold is None or age < threshold
            assert all(member.reward is not None for member in one.states)
            assert len({member.reward for member in one.states}) > 1

    @precondition(lambda self: self.batch is not None)
    @rule()
    def take_again(self) -> None:
        assert self.batch is not None
        step = self.batch[0]
        _, packed = self.do(self.ask(lambda one: one.take_batch(step)))
        assert [one.key for one in unpack_groups(packed)] == self.batch[1]

    @precondition(lambda self: self.batch is not None)
    @rule(acknowledge=st.booleans(), repeated=st.booleans())
    def train(self, acknowledge: bool, repeated: bool) -> None:
        assert self.batch is not None
        step, keys = self.batch
        self.trained += keys
        self.batch = None
        for _ in range((1 + repeated) * acknowledge):
            self.do(self.ask(lambda one: one.acknowledge(step)))
            self.num_acknowledged = len(self.trained)

    @rule(impatient=st.booleans(), mode=st.sampled_from(["abort", "abort", "keep", "wait"]))
    def pause(self, impatient: bool, mode: PauseMode = "abort") -> None:
        async def attempt() -> bool:
            try:
                await asyncio.wait_for(self.ask(lambda one: one.pause(mode)), 3.0 if impatient else None)
                return True
            except TimeoutError:
                return False

        if self.do(attempt()):
            # A pause is never softened: what was aborted stays so.
            self.frozen = mode == "keep" and (self.frozen or not self.paused)
            self.paused = True

    @precondition(lambda self: self.paused)
    @rule(sync=st.booleans())
    def resume(self, sync: bool) -> None:
        if sync and self.batch is None:
            self.version = self.step
        self.do(self.ask(lambda one: one.resume(self.version)))
        self.paused = self.frozen = False

    @precondition(lambda self: not self.paused and self.batch is None)
    @rule()
    def swap(self) -> None:
        self.version = self.step
        self.do(self.ask(lambda one: one.swap(self.version, self.mortal.of(self.world.pool).swap)))

    @precondition(lambda self: self.paused and not self.frozen)
    @rule()
    def save(self) -> None:
        trained_step = self.step if self.batch is None else self.step - 1
        state = self.do(self.ask(lambda one: one.state_dict(model_step=trained_step)))
        self.num_acknowledged = len(self.trained)
        self.saved = copy.deepcopy((state, trained_step, self.trained, self.asked))

    @precondition(lambda self: self.saved is not None)
    @rule()
    def crash_and_restore(self) -> None:
        self.do(self.end())
        self.do(self.make())
        state, self.step, self.trained, self.asked = copy.deepcopy(self.saved)
        self.num_acknowledged = len(self.trained)
        self.batch, self.version = None, max(self.step, state["version"] or 0)
        self.do(self.ask(lambda one: one.load_state_dict(state)))

    @precondition(lambda self: self.is_mortal and not self.fuses and self.mortal.calls is None)
    @rule(fuses=st.lists(st.tuples(st.integers(0, 12), st.booleans()), min_size=1, max_size=3))
    def let_the_producer_die(self, fuses: list[tuple[int, bool]]) -> None:
        """After some more calls; and the ones after it, perhaps before they came back."""
        (self.mortal.calls, self.mortal.carried_out), *self.fuses = fuses

    @precondition(lambda self: self.is_mortal)
    @rule()
    def kill_the_producer_now(self) -> None:
        self.mortal.kill()

    # ---------------------------------------------------------------- what must always be true

    @invariant()
    def every_group_is_accounted_for(self) -> None:
        counts = self.do(self.ask(lambda one: one.counts()))
        assert counts.lost == 0, counts
        assert counts.trained == self.num_acknowledged
        positions = sum(one.position for one in self.world.samplers.values())
        assert counts.sampled == positions if self.paused else counts.sampled <= positions

    @invariant()
    def nothing_is_trained_twice(self) -> None:
        assert len(set(self.trained)) == len(self.trained)

    @invariant()
    def nothing_runs_while_paused(self) -> None:
        if self.paused and not self.frozen:
            assert self.do(self.ask(lambda one: one.counts())).in_flight == 0
            stubborn = sum(task.get_name().startswith("group") for task in self.loop.alive)
            assert self.world.pool.generating == stubborn
            for task in self.loop.alive:
                assert not task.get_name().startswith("group") or task.cancelling()

    @invariant()
    def production_stays_within_its_horizon(self) -> None:
        """What was ever finished for training, or may still be, is bounded by the version alone."""
        groups = self.do(self.world.buffer.counts()).groups
        in_flight = self.world.producer.pending
        for task in self.tasks:
            name, strategy = task.name, self.world.strategies[task.name]
            progress = self.world.producer.progress
            assert progress.target_upto[name] <= self.version + strategy.horizon
            share = max(progress.allocation(step)[name] for step in range(1, progress.target_upto[name] + 2))
            ahead = progress.consumed[name] + groups[name].get(Status.COMPLETED, 0) + in_flight.num_of(name)
            # A producer that came back has not asked anew yet for what the dead one had asked for.
            assert ahead <= max(progress.target[name], self.asked.get(name, 0)) + share

    @invariant()
    def production_is_well(self) -> None:
        if self.running.done() and not self.running.cancelled() and not self.mortal.died.is_set():
            error = self.running.exception()
            assert not isinstance(error, LedgerError), error
            raise AssertionError(f"production ended: {error!r}") from error


TestProduction = pytest.mark.timeout(300)(ProducerMachine.TestCase)
TestProduction.settings = settings(max_examples=examples(30), stateful_step_count=40, deadline=None)


# ---------------------------------------------------------------- nothing is made in vain


@st.composite
def strategies_of_a_task(draw: st.DrawFn) -> dict[str, Any]:
    staleness = draw(st.integers(0, 3))
    tokens = draw(st.none() | st.integers(0, staleness - 1)) if staleness else None
    return {
        "max_staleness": staleness,
        "max_token_staleness": tokens,
        "drop_uniform_rewards": True,
        "tail_batch_trigger_size": draw(st.sampled_from([-1, 0, 2])),
    }


@example(  # a finished group that began under an older version than it ended under
    tasks=[
        {
            "max_staleness": 3,
            "max_token_staleness": 2,
            "drop_uniform_rewards": True,
            "tail_batch_trigger_size": -1,
        }
    ],
    interval=1,
    mode="abort",
    num_slots=None,
    max_groups=None,
    train_s=0.0,
    longest_s=6,
    seed=1,
)
@settings(max_examples=examples(30), deadline=None)
@given(
    tasks=st.lists(strategies_of_a_task(), min_size=1, max_size=2),
    interval=st.integers(1, 3),
    mode=st.sampled_from(["abort", "keep", "swap"]),
    num_slots=st.sampled_from([None, 2, 12]),
    max_groups=st.sampled_from([None, 8]),
    train_s=st.sampled_from([0.0, 1.0, 7.0]),
    longest_s=st.sampled_from([1, 6, 40]),
    seed=st.integers(0, 1000),
)
def test_what_is_generated_is_trained_whatever_the_bounds_and_however_long_it_takes(
    tasks: list[dict[str, Any]],
    interval: int,
    mode: PauseMode | Literal["swap"],
    num_slots: int | None,
    max_groups: int | None,
    train_s: float,
    longest_s: int,
    seed: int,
) -> None:
    """Nothing but a pause interrupts a group, and what it interrupts is trained too, every token of it.

    So no group grows too old, and none is masked: not with a slow trainer, nor with a few groups that take as long as
    many steps, nor with bounds on tokens nearer than those on groups.
    """

    async def main() -> None:
        pool = Pool()
        pool.seconds = lambda one: longest_s if hash((one.group_id, seed)) % 5 == 0 else 1
        pool.fate = lambda one: "uniform" if hash((one.group_id, seed)) % 7 == 0 else "ok"
        world = World(
            *(task_config(f"task{n}", **one) for n, one in enumerate(tasks)),
            batch_size=4,
            interval=interval,
            size=500,
            pool=pool,
            bounds=BufferBounds(max_groups=max_groups),
            num_slots=num_slots,
        )
        await world.producer.resume(0)
        running = world.start()
        step = 0
        while step < 12:
            status, packed = await asyncio.wait_for(world.producer.take_batch(step + 1), 1000)
            if packed is not None:
                step += 1
                groups = unpack_groups(packed)
                assert all(member.response_mask.all() for one in groups for member in one.states)
                assert status.metrics.expired_groups == 0
                await asyncio.sleep(train_s)
                await world.producer.acknowledge(step)
            if packed is None or status.status == "expired_batch" or step % interval == 0:
                if mode == "swap":
                    await world.producer.swap(step, pool.swap)
                    continue
                await world.producer.pause(mode)
                await world.producer.resume(step)
        assert not running.done()
        assert (await world.producer.counts()).expired == 0
        running.cancel()
        await asyncio.wait([running])
        await world.producer.close()

    virtual(main())
