"""Who watches over the producer and the controllers: a death is recorded, a call that was lost is none."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError

import jobs.light_roles as module
from jobs.light_roles import LightRoles
from raypost.faults import Failure, Incident
from tests.unit.test_recovery import Record, supervisor


class Role:
    """Loses calls, and at some of them its process."""

    def __init__(self, *dies: bool) -> None:
        self.dies, self.restarts = list(dies), 0
        self.again = [False, True, False]
        """Whether it dies while it comes back."""

    async def lives(self) -> None:
        if not self.dies:
            await asyncio.Event().wait()
        self.restarts += self.dies.pop(0)
        raise ActorUnavailableError("the call was lost", b"0" * 16)


def test_a_lost_call_is_no_death_and_each_death_is_recorded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NOTICED_S", 0.01)
    role, record = Role(False, True, False, False, True), Record()
    failure = lambda role, actor, cause, at_s: Failure(role=role, actor=actor, cause=cause, at_s=at_s)  # noqa: E731
    census: Any = SimpleNamespace(restarts=lambda _: role.restarts, failure=failure, look=lambda: None)

    async def back() -> dict[str, Any]:
        role.restarts += role.again.pop(0)
        return {}

    async def main() -> None:
        light = LightRoles(supervisor(record, 5), census)
        watching = asyncio.create_task(light._watch("producer", "producer", role, back))
        while role.dies or len(record.incidents) < 6:
            await asyncio.sleep(0.01)
        watching.cancel()

    asyncio.run(asyncio.wait_for(main(), 120))
    assert record.counts() == {Incident.ROLE_DIED: 3, Incident.ROLE_RESTARTED: 3}
