"""UserSimulator: the policy talks with a user, whom a function of yours or a frozen model plays.

Owns the conversation as the user sees it, and when it ends. Owns neither the model (one of `reward_models`) nor what a
conversation is worth, unless nobody says: 1 if the user ended it content.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from raypost.agent_loop.episode import Observation, saying
from raypost.config.imports import load_function
from raypost.errors import ConfigError

TEMPLATE = """You play a user who talks with an assistant. {persona}

The conversation so far:

{conversation}

Write what the user says next, and nothing else. If the user has what they want, write {done}."""


class LanguageModel(Protocol):
    """A model that answers one message."""

    async def answer(self, message: str, max_tokens: int, temperature: float) -> str:
        """Return the text of an answer."""
        ...


class UserSimulator:
    """The prompt is what the user said first. The user's words are messages, or text."""

    def __init__(
        self,
        *,
        user: str | Callable[..., Any] | None = None,
        model: LanguageModel | None = None,
        reward: str | Callable[..., Any] | None = None,
        template: str = TEMPLATE,
        persona: str = "",
        done: str = "[DONE]",
        max_turns: int = 8,
        max_tokens: int = 128,
        temperature: float = 1.0,
        messages: bool = True,
    ) -> None:
        """Take either `user`, `module:function`, or a `model`, which `agent_loop.reward_model` gives.

        `user(conversation, metadata)` returns what the user says, None at the end; `reward(conversation, metadata)`
        what a conversation is worth; both may be async. `template`: what the model is asked, with {persona}, the
        prompt's own if its metadata has one, {conversation} and {done}, the word that ends it. `max_turns`: of the
        policy.
        Raises ConfigError.
        """
        if (user is None) == (model is None):
            raise ConfigError(
                "a user is played either by a function, params: {user: module:function}, or by a model, "
                "agent_loop.reward_model"
            )
        if "{conversation}" not in template:
            raise ConfigError(
                f"template {template!r:.80} lacks {{conversation}}: the user would not hear a word"
            )
        self._user = load_function(user, "params.user") if isinstance(user, str) else user
        self._reward = load_function(reward, "params.reward") if isinstance(reward, str) else reward
        self._model = model
        self._template, self._persona, self._done = template, persona, done
        self._max_turns, self._max_tokens, self._temperature = max_turns, max_tokens, temperature
        self._messages = messages

    def reset(self, metadata: dict[str, Any]) -> Observation:
        """Begin with the prompt as what the user said."""
        self._metadata = metadata
        self._said = list(
            metadata.get("messages") or [{"role": "user", "content": metadata.get("question", "")}]
        )
        self._turns = 0
        return Observation()

    async def step(self, action: str) -> Observation:
        """Have the user answer."""
        self._said.append({"role": "assistant", "content": action})
        self._turns += 1
        words = await self._speak()
        content = words is None or self._done in words
        if content or self._turns >= self._max_turns:
            return Observation(reward=await self._worth(content), done=True)
        self._said.append({"role": "user", "content": words})
        return saying(str(words), messages=self._messages)

    async def _speak(self) -> str | None:
        if self._user is not None:
            words = await _called(self._user, self._said, self._metadata)
            if words is not None and not isinstance(words, str):
                raise TypeError(f"the user said {words!r:.80}: it must be a text, or None at the end")
            return words
        assert self._model is not None
        persona = str(self._metadata.get("persona", self._persona))
        # One after the other would take what was said for a place of the template.
        before, _, after = self._template.partition("{conversation}")
        parts = [part.replace("{persona}", persona).replace("{done}", self._done) for part in (before, after)]
        heard = "\n\n".join(f"{_NAMES.get(one['role'], one['role'])}: {one['content']}" for one in self._said)
        answer = await self._model.answer(heard.join(parts), self._max_tokens, self._temperature)
        return answer.strip()

    async def _worth(self, content: bool) -> float:
        if self._reward is None:
            return float(content)
        found: float = await _called(self._reward, self._said, self._metadata)
        return found


_NAMES: Mapping[str, str] = {"user": "User", "assistant": "Assistant", "system": "Instructions"}


async def _called(function: Callable[..., Any], said: list[dict[str, Any]], metadata: dict[str, Any]) -> Any:
    ask = functools.partial(function, [dict(one) for one in said], metadata)
    # A plain function may take its time: it must not hold the loop of all trajectories.
    found = ask() if inspect.iscoroutinefunction(function) else await asyncio.to_thread(ask)
    return await found if inspect.isawaitable(found) else found
