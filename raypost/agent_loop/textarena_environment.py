"""TextArenaEnvironment: a game of TextArena's for one player.

Owns what the policy is told of the game: what happened since its last move. The game is TextArena's, which seeds the
random numbers of its whole process: each game has a process of its own.
"""

from __future__ import annotations

import importlib
from typing import Any

from raypost.agent_loop.episode import Observation, saying
from raypost.errors import ConfigError


class TextArenaEnvironment:
    """Plays `textarena.make(id)`. The reward comes at the end, as the game gives it."""

    isolation = "process"
    preload = ("textarena",)
    deterministic = True
    """In a process of its own, a game answers the same moves after the same seed in the same way."""

    def __init__(self, id: str, *, messages: bool = False, **options: Any) -> None:
        """`messages`: observe messages of the user, not text. `options` go to `textarena.make`. Raises ConfigError."""
        try:
            textarena = importlib.import_module("textarena")
        except ImportError as error:
            raise ConfigError("textarena is not installed: install it: pip install textarena") from error
        try:
            env: Any = textarena.make(id, **options)
        except (ValueError, TypeError, AttributeError, ModuleNotFoundError) as error:
            raise ConfigError(f"textarena cannot make {id!r} with {options!r:.200}: {error}") from error
        # Its wrappers tell the whole game again at every move.
        while isinstance(env, textarena.Wrapper):
            env = env.env
        self._env = env
        self._id = id
        self._messages = messages
        self._own_move = textarena.ObservationType.PLAYER_ACTION

    def reset(self, metadata: dict[str, Any], *, seed: int) -> Observation:
        """Begin; all siblings of a group begin alike."""
        try:
            self._env.reset(num_players=1, seed=seed)
        except (AssertionError, ValueError) as error:
            raise ConfigError(f"{self._id} is no game for one player: {error}") from error
        return self._seen(done=False)

    def step(self, action: str) -> Observation:
        """Make the move that the text says; brackets are put around one that has none."""
        move = action.strip()
        done, info = self._env.step(move if "[" in move and "]" in move else f"[{move}]")
        return self._seen(done=bool(done), info=info)

    def _seen(self, *, done: bool, info: dict[str, Any] | None = None) -> Observation:
        _, news = self._env.get_observation()
        text = "\n".join(words.strip() for _, words, kind in news if kind is not self._own_move)
        rewards, _ = self._env.close() if done else (None, None)
        reward = float((rewards or {}).get(0, 0.0))
        return saying(text, messages=self._messages, reward=reward, done=done, info=info or {})
