"""GymnasiumEnvironment: an environment of gymnasium's with a choice of actions, played in words.

Owns how its state is described and how an action is read from a text. What the environment does is gymnasium's.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from typing import Any

from raypost.agent_loop.episode import Observation, saying
from raypost.errors import ConfigError

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
INSTALL = "install it: pip install gymnasium"


class GymnasiumEnvironment:
    """Plays `gymnasium.make(id)`. Subclass it for other descriptions of a state, or other readings of an action."""

    deterministic = True
    """Gymnasium's environments answer the same actions after the same seed in the same way."""

    def __init__(
        self,
        id: str,
        *,
        actions: Sequence[str] = (),
        illegal_reward: float = 0.0,
        messages: bool = False,
        **options: Any,
    ) -> None:
        """`actions`: their names, in the order of their numbers; none: the policy says a number.

        `illegal_reward`: of a turn without an action, after which the policy is asked again. `messages`: describe
        states as messages of the user, not as text. `options` go to `gymnasium.make`. Raises ConfigError.
        """
        try:
            gymnasium = importlib.import_module("gymnasium")
        except ImportError as error:
            raise ConfigError(f"gymnasium is not installed: {INSTALL}") from error
        # Imported with it, some environments are registered.
        self._env: Any = gymnasium.make(id, **{"render_mode": "ansi"} | options)
        count = getattr(self._env.action_space, "n", None)
        if count is None:
            raise ConfigError(
                f"{id} has the actions {self._env.action_space}: only a choice of actions can be said"
            )
        if actions and len(actions) != count:
            raise ConfigError(f"{id} has {count} actions, and actions names {len(actions)}: {list(actions)}")
        self._first = int(self._env.action_space.start)
        self._names = [name.lower() for name in actions] or [
            str(self._first + place) for place in range(int(count))
        ]
        self._illegal_reward = illegal_reward
        self._messages = messages

    def reset(self, metadata: dict[str, Any], *, seed: int) -> Observation:
        """Begin; all siblings of a group begin alike."""
        observation, info = self._env.reset(seed=seed)
        return saying(self.describe(observation), messages=self._messages, info=info)

    def step(self, action: str) -> Observation:
        """Take the action that the text says."""
        chosen = self.read(action)
        if chosen is None:
            told = f"Say one of: {', '.join(self._names)}"
            return saying(told, messages=self._messages, reward=self._illegal_reward)
        observation, reward, ended, cut, info = self._env.step(chosen)
        return saying(
            self.describe(observation),
            messages=self._messages,
            reward=float(reward),
            done=bool(ended or cut),
            info=info,
        )

    def close(self) -> None:
        """Close gymnasium's."""
        self._env.close()

    def describe(self, observation: Any) -> str:
        """Return a state as the policy reads it: as the environment writes it, else the observation."""
        written = self._env.render() if self._env.render_mode == "ansi" else None
        return _COLOURS.sub("", written) if isinstance(written, str) else str(observation)

    def read(self, text: str) -> int | None:
        """Return the number of the action that a text names last; None if it names none."""
        names = "|".join(re.escape(name) for name in sorted(self._names, key=len, reverse=True))
        found = re.findall(rf"(?<![\w-])({names})(?!\w)", text.lower())
        return self._first + self._names.index(found[-1]) if found else None
