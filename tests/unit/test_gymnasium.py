"""Environments of gymnasium's, on the real package."""

from __future__ import annotations

from typing import Any

import pytest

from raypost.agent_loop.gymnasium_environment import GymnasiumEnvironment
from raypost.errors import ConfigError
from raypost.types import Status
from raypost.types.turns import turns_of
from tests.unit.scripted_environments import AnswersInTurn, carried, init, really
from tests.unit.scripted_generator import result

gymnasium: Any = pytest.importorskip("gymnasium")

STEPS = ["left", "down", "right", "up"]
WAY = [1, 1, 2, 2, 1, 2]
"""Through FrozenLake's standard map, which does not slip here."""


def lake(**options: Any) -> GymnasiumEnvironment:
    given: dict[str, Any] = {"actions": STEPS, "is_slippery": False, **options}
    return GymnasiumEnvironment("FrozenLake-v1", **given)


def test_a_way_through_the_lake_is_rewarded_at_its_end() -> None:
    one = lake()
    first = one.reset({}, seed=3)
    assert "SFFF" in first.text and "\x1b" not in first.text
    seen = [one.step(f"I go left... no, {STEPS[number]}!") for number in WAY]
    assert [(one.reward, one.done) for one in seen] == [(0.0, False)] * 5 + [(1.0, True)]
    assert "(Down)" in seen[0].text
    one.close()


def test_what_names_no_action_is_told_and_nothing_happens() -> None:
    one = lake(illegal_reward=-0.5, messages=True)
    one.reset({}, seed=3)
    seen = one.step("leftover")
    assert (seen.reward, seen.done) == (-0.5, False)
    assert seen.messages == [{"role": "user", "content": "Say one of: left, down, right, up"}]


def test_without_names_actions_are_numbers() -> None:
    newest = max(name for name in gymnasium.registry if name.startswith("Taxi-v"))
    one = GymnasiumEnvironment(newest)
    one.reset({}, seed=1)
    assert (one.read("I take 12, or 3"), one.read("7"), one.read("-1")) == (3, None, None)


def test_the_same_seed_begins_alike_and_may_be_replayed() -> None:
    def played() -> list[str]:
        one = lake(is_slippery=True)
        return [one.reset({}, seed=5).text, *(one.step(STEPS[number]).text for number in WAY[:3])]

    assert played() == played()


def test_it_plays_in_the_loop_and_is_replayed_where_its_worker_is_gone() -> None:
    moves = iter([*WAY[:3], -1, *WAY[3:]])

    def engine() -> Any:
        def answer(_: Any) -> Any:
            move = next(moves)
            return result([], "abort") if move < 0 else result([move, 2])

        found = AnswersInTurn(None)
        found.script = answer
        return found

    class Lake(GymnasiumEnvironment):
        def read(self, text: str) -> int | None:
            return int(text.split()[0])

        def describe(self, observation: Any) -> str:
            return str(60 + int(observation))

    def make() -> Any:
        return Lake("FrozenLake-v1", actions=STEPS, is_slippery=False)

    paused = really(engine(), make, init(max_tokens=100))
    assert paused.status is Status.ABORTED
    (one,) = really(engine(), make, carried(paused)).states
    assert (one.status, one.reward, one.num_restarts, len(turns_of(one))) == (Status.COMPLETED, 1.0, 0, 6)


@pytest.mark.parametrize(
    ("id", "options", "why"),
    [
        ("FrozenLake-v1", {"actions": ["left"]}, "has 4 actions, and actions names 1"),
        ("Pendulum-v1", {"render_mode": None}, "only a choice of actions"),
    ],
)
def test_what_cannot_be_played_in_words_is_refused(id: str, options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        GymnasiumEnvironment(id, **options)
