"""Environments of TextArena, skyrl-gym and reasoning-gym, on the real packages."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bench.pauses import play
from raypost.agent_loop.isolated import EnvironmentProcesses, environment_maker
from raypost.agent_loop.reasoning_gym_environment import ReasoningGymEnvironment
from raypost.agent_loop.skyrl_environment import SkyRLEnvironment
from raypost.agent_loop.textarena_environment import TextArenaEnvironment
from raypost.agent_loop.user_simulator import UserSimulator
from raypost.config import Config
from raypost.data.gym import gym_factory
from raypost.errors import ConfigError
from raypost.plan.user_code import UserCode, trial
from tests.factories import make_config

ROOM = "raypost.agent_loop."


def config_of(environment: str, **loop: Any) -> Config:
    settings = {"kind": "environment", "environment": ROOM + environment, **loop}
    return make_config(tasks__0__agent_loop=settings)


@pytest.mark.parametrize(
    ("environment", "loop", "why"),
    [
        ("gymnasium_environment:GymnasiumEnvironment", {"params": {"id": "FrozenLake-v1"}}, None),
        ("textarena_environment:TextArenaEnvironment", {"params": {"id": "Blackjack-v0"}}, None),
        ("textarena_environment:TextArenaEnvironment", {"params": {"id": "TicTacToe-v0"}}, "for one player"),
        ("skyrl_environment:SkyRLEnvironment", {"params": {"id": "gsm8k_multi_turn"}}, None),
        ("skyrl_environment:SkyRLEnvironment", {"params": {"id": "gsm9k"}}, "has no environment 'gsm9k'"),
        ("reasoning_gym_environment:ReasoningGymEnvironment", {}, None),
        ("reasoning_gym_environment:ReasoningGymEnvironment", {"params": {"max_tries": 0}}, "max_tries 0"),
    ],
)
def test_the_plan_tries_them_with_the_first_prompt(
    environment: str, loop: dict[str, Any], why: str | None
) -> None:
    config = config_of(environment, **loop)
    found = trial(UserCode("agent_loop.environment", ROOM + environment, "environment"), config)
    assert found is None if why is None else found is not None and found[1] and why in found[0]


def test_textarena_has_processes_without_being_asked_and_others_when_they_are() -> None:
    game: dict[str, Any] = {"params": {"id": "Blackjack-v0"}}
    process: dict[str, Any] = {"isolation": "process"}
    cases: list[tuple[str, dict[str, Any], bool]] = [
        ("textarena_environment:TextArenaEnvironment", game, True),
        ("textarena_environment:TextArenaEnvironment", {**game, "isolation": "thread"}, False),
        ("reasoning_gym_environment:ReasoningGymEnvironment", process, True),
        ("reasoning_gym_environment:ReasoningGymEnvironment", {}, False),
    ]
    for environment, loop, isolated in cases:
        made = environment_maker(config_of(environment, **loop).tasks[0])
        assert isinstance(made, EnvironmentProcesses) is isolated
    with pytest.raises(ConfigError, match="isolation 'process' is not used by kind 'single_turn'"):
        make_config(tasks__0__agent_loop={"isolation": "process"})


# ---------------------------------------------------------------- TextArena


def blackjack(**options: Any) -> TextArenaEnvironment:
    pytest.importorskip("textarena")
    return TextArenaEnvironment("Blackjack-v0", **options)


def test_a_game_tells_what_is_new_and_rewards_at_its_end() -> None:
    game = blackjack(messages=True)
    first = game.reset({}, seed=3)
    assert "Hand 1/5" in str(first.messages[0]["content"]) and not first.done
    seen = game.step("I'll [Hit] once more")
    told = str(seen.messages[0]["content"])
    # Neither the rules again nor the policy's own words.
    assert "Your hand" in told and "You are playing" not in told and "once more" not in told
    while not seen.done:
        assert seen.reward == 0.0
        seen = game.step("stand")
    assert "All 5 hands complete" in str(seen.messages[0]["content"]) and 0.0 < seen.reward <= 1.0


def test_the_same_seed_is_the_same_game_and_another_one_is_not() -> None:
    def played(seed: int) -> list[str]:
        game = blackjack()
        return [game.reset({}, seed=seed).text, *(game.step("[Stand]").text for _ in range(3))]

    assert played(1) == played(1) != played(2)


def test_what_is_no_game_for_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot make 'NoSuchGame'"):
        TextArenaEnvironment("NoSuchGame")
    with pytest.raises(ConfigError, match="is no game for one player"):
        TextArenaEnvironment("TicTacToe-v0").reset({}, seed=1)


def test_games_under_many_pauses_lose_nothing_and_make_no_move_twice() -> None:
    pytest.importorskip("textarena")
    found = asyncio.run(play(groups=3, members=3, probability=0.2))
    assert found["aborts"] > 5
    assert (found["completed"], found["failed"], found["restarted"]) == (9, 0, 0), found["errors"]
    assert (found["moves_twice"], found["groups_whose_siblings_began_differently"]) == (0, 0)


# ---------------------------------------------------------------- skyrl-gym


def test_skyrl_gym_plays_several_turns_with_the_prompts_answer() -> None:
    pytest.importorskip("skyrl_gym")
    one = SkyRLEnvironment("gsm8k_multi_turn", max_turns=3)
    row = {"question": "1 + 2?", "answer": "3"}
    assert not one.reset(row).messages
    told = one.step("#### 4")
    assert told.messages[0]["role"] == "user" and 0 < told.reward < 0.2 and not told.done
    right = one.step("so it is #### 3")
    assert (right.reward, right.done, right.messages) == (1.0, True, [])
    one.close()
    text = SkyRLEnvironment("gsm8k_multi_turn", messages=False)
    text.reset(row)
    assert "#### ANSWER" in text.step("four").text


def test_an_environment_that_skyrl_gym_has_not_is_refused() -> None:
    pytest.importorskip("skyrl_gym")
    with pytest.raises(ConfigError, match="no environment 'gsm9k': there are aime"):
        SkyRLEnvironment("gsm9k")


# ---------------------------------------------------------------- reasoning-gym


def problem() -> dict[str, Any]:
    (entry,) = gym_factory().create_dataset("chain_sum", size=1, seed=1)
    return {"entry": entry, "question": entry["question"], "answer": entry["answer"]}


def test_a_wrong_answer_may_be_corrected_and_is_worth_less() -> None:
    row = problem()
    one = ReasoningGymEnvironment(answer_pattern="<a>(.*?)</a>", discount=0.5)
    assert one.reset(row).text == ""
    wrong = one.step("<a>1</a> or <a>12345</a>")
    assert ("wrong" in wrong.text, wrong.reward, wrong.done) == (True, 0.0, False)
    right = one.step(f"then <a>{row['answer']}</a>")
    assert (right.reward, right.done) == (0.5, True)


def test_the_last_try_ends_it() -> None:
    one = ReasoningGymEnvironment(max_tries=2, messages=True)
    one.reset(problem())
    assert one.step("no idea").messages[0]["content"].startswith("That is wrong")
    last = one.step("12345")
    assert last.done and last.reward < 0.5


def test_a_prompt_of_another_source_and_senseless_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"set source\.kind"):
        ReasoningGymEnvironment().reset({"question": "?", "answer": "3"})
    with pytest.raises(ConfigError, match="max_tries 0"):
        ReasoningGymEnvironment(max_tries=0)


# ---------------------------------------------------------------- a user


class Customer:
    """A model that plays the user; it wants two answers."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def answer(self, message: str, max_tokens: int, temperature: float) -> str:
        self.asked.append(message)
        return " And then? " if len(self.asked) < 2 else "Thanks. [DONE]"


def test_a_frozen_model_plays_the_user_and_hears_the_whole_conversation() -> None:
    async def main() -> None:
        model = Customer()
        one = UserSimulator(model=model, persona="You are in a hurry.")
        assert not one.reset({"question": "Where is my {persona}?"}).messages
        seen = await one.step("On {done} its way.")
        assert seen.messages == [{"role": "user", "content": "And then?"}] and not seen.done
        last = await one.step("It arrives.")
        assert (last.done, last.reward) == (True, 1.0)
        # What was said is no part of the template.
        heard = "User: Where is my {persona}?\n\nAssistant: On {done} its way."
        assert (
            heard in model.asked[0] and "You are in a hurry." in model.asked[0] and "[DONE]" in model.asked[0]
        )
        assert f"{heard}\n\nUser: And then?\n\nAssistant: It arrives." in model.asked[1]

    asyncio.run(main())


def test_a_function_plays_the_user_and_another_says_what_it_was_worth() -> None:
    def user(said: list[dict[str, Any]], metadata: dict[str, Any]) -> str | None:
        return None if metadata["answer"] in said[-1]["content"] else "No."

    async def worth(said: list[dict[str, Any]], metadata: dict[str, Any]) -> float:
        return 1.0 / len([one for one in said if one["role"] == "assistant"])

    async def main() -> None:
        one = UserSimulator(user=user, reward=worth, messages=False, max_turns=3)
        for answers, reward in [(["6", "7"], 0.5), (["4", "5", "6"], 1 / 3)]:
            one.reset({"question": "3 + 4?", "answer": "7"})
            seen = [await one.step(answer) for answer in answers]
            assert [(one.text, one.done) for one in seen[:-1]] == [("\nNo.\n", False)] * (len(answers) - 1)
            assert (seen[-1].done, seen[-1].reward) == (True, reward)

    asyncio.run(main())


def test_a_user_comes_from_the_configuration_or_is_refused() -> None:
    path = "user_simulator:UserSimulator"
    talks = {"kind": "environment", "environment": ROOM + path, "reward_model": "customer"}
    models = [{"name": "customer", "model": "x", "generates": True}]
    config = make_config(tasks__0__agent_loop=talks, reward_models=models)
    made: Any = environment_maker(config.tasks[0], {"customer": Customer()})()
    assert isinstance(made, UserSimulator) and isinstance(made._model, Customer)
    one = UserCode("agent_loop.environment", ROOM + path, "environment")
    assert trial(one, config) is None
    found = trial(one, config_of(path))
    assert found is not None and "either by a function" in found[0]
    for loop, all_models, why in [
        (talks, [], "agent_loop.reward_model is 'customer', but reward_models has \\[\\]"),
        (talks, [models[0] | {"generates": False}], "whose generates is false, but an environment asks it"),
        (talks | {"isolation": "process"}, models, "in the agent loop's own process"),
    ]:
        with pytest.raises(ConfigError, match=why):
            make_config(tasks__0__agent_loop=loop, reward_models=all_models)
