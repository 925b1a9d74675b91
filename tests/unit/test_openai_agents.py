"""openai-agents over loopback, unchanged: the recipe's agent, and one that streams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from raypost.agent_loop.session import Session
from raypost.config.imports import load_function
from raypost.types import RolloutState, Status
from raypost.types.turns import turns_of
from tests.unit.chat_templates import bpe
from tests.unit.scripted_environments import AnswersInTurn
from tests.unit.test_session_loop import play
from tests.unit.test_tool_loop import call, context, said

RECIPE = Path(__file__).parents[2] / "jobs" / "recipes" / "openai_agent.py"


@pytest.fixture(autouse=True)
def agents() -> Any:
    """The package, imported where a test needs it and not by every worker that collects this file."""
    return pytest.importorskip("agents")


def played_twice(agent: Any) -> RolloutState:
    """One trajectory: a call of the agent's tool, and an answer."""
    first = call("calculate", expression="3 + 4")
    engine = AnswersInTurn(*said(first, "It is 7."))
    (one,) = play(engine, agent, max_prompt_tokens=2000, max_tokens=2000)
    assert (one.status, one.response_text) == (Status.COMPLETED, "It is 7."), one.error
    assert "tool\n7<" in context(one) and len(turns_of(one)) == 2
    trained = bpe().decode(one.response_ids[one.response_mask], skip_special_tokens=False)
    assert trained == f"{first}<|im_end|>It is 7.<|im_end|>", "what was sampled, and nothing else"
    sent = engine.requests[1].token_ids.tolist()
    assert sent == [*one.prompt_ids, *one.response_ids][: len(sent)], "no turn was rendered again"
    return one


def test_the_recipes_agent_is_one_trajectory_of_what_was_sampled() -> None:
    played_twice(load_function("openai_agent.py:solve", "the recipe", RECIPE.read_text()))


def test_an_agent_that_streams_is_the_same(agents: Any) -> None:
    def calculate(expression: str) -> int:
        """Works out a sum."""
        return sum(map(int, expression.split("+")))

    async def solve(session: Session) -> None:
        agents.set_tracing_disabled(True)
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
            model = agents.OpenAIChatCompletionsModel(model="policy", openai_client=client)
            agent = agents.Agent(name="solver", model=model, tools=[agents.function_tool(calculate)])
            running = agents.Runner.run_streamed(agent, input=list(session.messages), max_turns=3)
            kinds = {event.type async for event in running.stream_events()}
            assert "raw_response_event" in kinds and running.final_output == "It is 7."

    played_twice(solve)
