"""SkyRLEnvironment: an environment of skyrl-gym's, made for each prompt from its metadata.

Owns what of a prompt's metadata the environment is told. Turns and rewards are skyrl-gym's.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from raypost.agent_loop.episode import Observation, saying
from raypost.errors import ConfigError


class SkyRLEnvironment:
    """Plays `skyrl_gym.make(id)`."""

    def __init__(
        self,
        id: str,
        *,
        deterministic: bool = False,
        messages: bool = True,
        env_config: Mapping[str, Any] | None = None,
        **extras: Any,
    ) -> None:
        """`extras`: for the environment, besides the metadata and `reward_spec`, which has the prompt's answer.

        `deterministic`: it may be replayed. `messages` false: observe the contents as text, without a template.
        """
        try:
            self._gym: Any = importlib.import_module("skyrl_gym")
        except ImportError as error:
            raise ConfigError("skyrl-gym is not installed: install it: pip install skyrl-gym") from error
        if id not in self._gym.registry:
            raise ConfigError(
                f"skyrl-gym has no environment {id!r}: there are {', '.join(self._gym.registry)}"
            )
        self.deterministic = deterministic
        self._id, self._config, self._extras = id, dict(env_config or {}), extras
        self._messages = messages
        self._env: Any = None

    def reset(self, metadata: dict[str, Any]) -> Observation:
        """Make it with the prompt's metadata, and begin."""
        known = {"reward_spec": {"ground_truth": metadata.get("answer")}, "extra_info": {}}
        self._env = self._gym.make(
            self._id, env_config=self._config, extras={**known, **metadata, **self._extras}
        )
        prompt = metadata.get("messages") or [{"role": "user", "content": str(metadata.get("question", ""))}]
        begun, _ = self._env.init(list(prompt))
        if list(begun[: len(prompt)]) != list(prompt):
            raise ConfigError(
                f"{self._id} rewrites its prompt: do that in the data, it was rendered before {begun!r:.200}"
            )
        return self._seen(begun[len(prompt) :])

    def step(self, action: str) -> Observation:
        """Pass the policy's words on."""
        found = self._env.step(action)
        return self._seen(
            found["observations"],
            reward=float(found["reward"]),
            done=bool(found["done"]),
            info=found.get("metadata") or {},
        )

    def close(self) -> None:
        """Close skyrl-gym's."""
        if self._env is not None:
            self._env.close()

    def _seen(self, said: list[dict[str, Any]], **more: Any) -> Observation:
        if self._messages:
            return Observation(messages=said, **more)
        text = "\n".join(str(one["content"]) for one in said)
        return saying(text, messages=False, **more) if text else Observation(**more)
