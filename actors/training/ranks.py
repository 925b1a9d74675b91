"""Ranks: the actors of one gang, called together, and their processes.

Owns the deadlines of calls to them, who of them is late or gone, and how they get new processes. What they are called
for is the TrainerGroup's (group.py).

A call that was lost on its way, or its answer, is made again while the rank's process lives; ranks know calls by their
numbers (once.py), so each runs once. For that a caller has one call under way at a time: the next waits for its end.

Invariants: all ranks get the same calls in the same order; every wait names the ranks that are late or gone.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle

from actors.remote import ACTOR_ERRORS, asked, is_still, repeated, within
from actors.training.answers import RankFacts
from raypost.config import Config
from raypost.errors import RankLostError, RanksLateError, WaitTimeoutError
from raypost.observe.waits import waiting

FACTS_S = 10.0
"""Longest time a rank that works may take to say so: it answers on a thread of its own."""
POLL_S = 0.2


class Ranks:
    """The ranks of one model, in order."""

    def __init__(self, workers: Sequence[ActorHandle | str], config: Config, name: str) -> None:
        """`workers`: actors of TrainerWorker, or their names. `name`: begins the names of the others."""
        self._given = list(workers)
        self._name = name
        self._config = config
        self._timeout_s = config.train.step_timeout_s
        self._caller, self._numbers = uuid.uuid4().hex, itertools.count(1)
        self._turn = asyncio.Lock()
        """Held from a call of ranks until they answered."""
        self._pids: dict[int, int] = {}
        """Process of each rank that was called."""

    @functools.cached_property
    def workers(self) -> list[ActorHandle]:
        """The actors of the ranks; a handle stays valid when its actor is started again."""
        return [ray.get_actor(one) if isinstance(one, str) else one for one in self._given]

    def _rank_name(self, rank: int) -> str:
        given = self._given[rank]
        return given if isinstance(given, str) else f"{self._name}-{rank}"

    def _names(self, ranks: int) -> str:
        return ", ".join(map(self._rank_name, range(ranks)))

    # ---------------------------------------------------------------- processes

    async def lost_ranks(self) -> dict[str, str]:
        """Return why ranks are not fit for work, by their names; {} if all are."""
        lost: dict[str, str] = {}
        for rank, facts in enumerate(await asyncio.gather(*map(self._facts, range(len(self._given))))):
            if isinstance(facts, str):
                lost[self._rank_name(rank)] = facts
            elif not facts.ready:
                lost[self._rank_name(rank)] = "it died, and its process was started again"
        return lost

    async def rank_processes(self) -> dict[str, RankFacts]:
        """Return the process of every rank that answers, by name."""
        facts = await asyncio.gather(*map(self._facts, range(len(self._given))))
        return {self._rank_name(rank): one for rank, one in enumerate(facts) if not isinstance(one, str)}

    async def _facts(self, rank: int) -> RankFacts | str:
        """Return the facts of a rank, or why it gives none."""
        try:
            return await asked(lambda: self._ask(rank, FACTS_S))
        except ACTOR_ERRORS as error:
            return f"it died ({type(error).__name__})"
        except WaitTimeoutError as error:
            return str(error)

    async def _ask(self, rank: int, timeout_s: float) -> RankFacts:
        facts: RankFacts = await within(
            self.workers[rank].facts.remote(), timeout_s, f"{self._rank_name(rank)} to say that it is alive"
        )
        return facts

    async def renew(self) -> None:
        """Bring every rank into a new process."""
        self._pids.clear()
        deadline = time.monotonic() + self._config.rollout.start_timeout_s
        await asyncio.gather(*(self._renew_rank(rank, deadline) for rank in range(len(self._given))))

    async def _renew_rank(self, rank: int, deadline: float) -> None:
        facts = await self._facts(rank)
        if isinstance(facts, str) or facts.ready:
            ray.kill(self.workers[rank], no_restart=False)
        while isinstance(facts, str) or facts.ready:
            if time.monotonic() > deadline:
                raise RankLostError(
                    f"{self._rank_name(rank)} did not come back in {self._config.rollout.start_timeout_s:.0f} s "
                    f"(rollout.start_timeout_s): {facts if isinstance(facts, str) else 'it does not end'}"
                )
            await asyncio.sleep(POLL_S)
            facts = await self._facts(rank)

    # ---------------------------------------------------------------- calls

    async def each(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        """Call a method of all ranks at once and return their answers in order; fails as `_outcomes` does."""
        return await self.submitted(method, *args, timeout_s=timeout_s)

    def submitted(self, method: str, *args: Any, timeout_s: float | None = None) -> asyncio.Task[list[Any]]:
        """Call a method of all ranks at once, before whatever is called later; returns their answers."""
        calling = self._in_turn(method, args, len(self._given), 1, timeout_s)
        return asyncio.create_task(calling, name=f"{method} of all ranks")

    async def first(self, method: str, *args: Any) -> Any:
        """Call rank 0 alone, and return its answer. Fails as `_outcomes` does."""
        return (await self._in_turn(method, args, 1, 1))[0]

    async def result_of(self, method: str, *args: Any, ranks: int | None = None) -> ray.ObjectRef:
        """Call the first `ranks` ranks, or all, at once; return the ref of rank 0's second return once all are done."""
        return (await self._in_turn(method, args, ranks or len(self._given), 2))[0]

    async def beside(self, method: str, *args: Any) -> list[Any]:
        """Call a method of all ranks that has a thread of its own and may run twice; fails as `_outcomes` does."""

        async def answer(rank: int) -> Any:
            return await getattr(self.workers[rank], method).remote(*args)

        calls = [functools.partial(answer, rank) for rank in range(len(self._given))]
        return await self._outcomes(method, calls, self._timeout_s)

    async def _in_turn(
        self, method: str, args: Sequence[Any], ranks: int, returns: int, timeout_s: float | None = None
    ) -> list[Any]:
        """Call the first `ranks` ranks once the call before has ended; of two returns the second one's ref is given."""
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        try:
            await within(self._turn.acquire(), limit_s, f"{method} of {self._names(ranks)}")
        except WaitTimeoutError as error:
            raise RanksLateError(f"{error}, which have not ended the call before") from error
        try:
            number = next(self._numbers)

            async def answer(rank: int) -> Any:
                call = self.workers[rank].once.options(num_returns=returns)
                refs = call.remote(self._caller, number, method, *args)
                done, *others = refs if returns > 1 else [refs]
                value = await done
                return others[0] if others else value

            calls = [functools.partial(answer, rank) for rank in range(ranks)]
            return await self._outcomes(method, calls, deadline - time.monotonic())
        finally:
            self._turn.release()

    async def _repeated(self, rank: int, call: Callable[[], Awaitable[Any]]) -> Any:
        """Make a call, again while it is lost and the rank's process is the one that was called."""
        if rank not in self._pids:
            # As long as the call itself would wait for the process.
            self._pids[rank] = (await asked(lambda: self._ask(rank, self._timeout_s))).pid

        async def who() -> int:
            return (await self._ask(rank, FACTS_S)).pid

        try:
            return await repeated(call, functools.partial(is_still, self._pids[rank], who))
        except ACTOR_ERRORS:
            self._pids.pop(rank, None)
            raise

    async def _outcomes(
        self, method: str, calls: Sequence[Callable[[], Awaitable[Any]]], timeout_s: float
    ) -> list[Any]:
        """Return the answers of the ranks, the first of which is that of rank 0.

        The first failure is raised at once: the other ranks may be waiting for the failed one. Raises RankLostError
        naming a rank that died, RanksLateError naming those that are late.
        """
        made = [asyncio.create_task(self._repeated(rank, call)) for rank, call in enumerate(calls)]
        try:
            with waiting(f"{method} of {self._names(len(made))}", timeout_s):
                done, late = await asyncio.wait(made, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
            for rank, call in enumerate(made):
                if call in done and isinstance(error := call.exception(), ACTOR_ERRORS):
                    raise RankLostError(
                        f"{self._rank_name(rank)} died during {method} ({type(error).__name__})"
                    ) from error
            for call in done:
                call.result()
            if late:
                names = ", ".join(self._rank_name(rank) for rank, call in enumerate(made) if call in late)
                raise RanksLateError(f"waited {timeout_s:.0f} s for {method} of {names}")
            return [call.result() for call in made]
        finally:
            for call in made:
                call.cancel()
