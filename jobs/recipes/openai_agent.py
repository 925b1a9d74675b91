"""The agent of the recipe `agent`, made with the package openai-agents (OpenAI's Agents SDK).

Nothing in here belongs to raypost: with the address and the key of another endpoint it runs as it is.
"""

from __future__ import annotations

from typing import Any, Protocol

from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelBehaviorError,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_default_openai_api,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

set_default_openai_api("chat_completions")
set_tracing_disabled(True)
CLIENT = AsyncOpenAI(base_url="http://127.0.0.1/v1", api_key="none")
"""Its connections are shared: making a client takes longer than an answer of the tiny model."""


class Endpoint(Protocol):
    """Where the policy is, and what it is asked."""

    messages: list[dict[str, Any]]
    base_url: str
    api_key: str


@function_tool
def calculate(expression: str) -> int:
    """Works out a sum.

    Args:
        expression: numbers with + or - between them
    """
    terms = expression.replace("- ", "-").replace("+ ", "").split()
    return sum(int(term) for term in terms)


async def solve(session: Endpoint) -> None:
    """Answer the question; the judge scores the last reply."""
    client = CLIENT.with_options(base_url=session.base_url, api_key=session.api_key)
    model = OpenAIChatCompletionsModel(model="policy", openai_client=client)
    agent = Agent(name="solver", model=model, tools=[calculate])
    try:
        await Runner.run(agent, input=list(session.messages), max_turns=3)  # type: ignore[arg-type]
    except (MaxTurnsExceeded, ModelBehaviorError):
        return  # what the policy did wrong is judged as it stands
