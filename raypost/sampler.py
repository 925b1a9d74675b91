"""Sampler: turns a source of prompts into groups, one after the other, for ever.

Owns the order of the prompts and the position in it, which is saved and restored. Owns neither the prompts
(the source does) nor what becomes of a group. Invariants: `group_id` is the ordinal of the prompt among all
this task ever sampled, so it grows across epochs and is never given twice; the same seed gives the same
sequence; restored at position n, the sampler continues with exactly the n-th prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from raypost.config import TaskConfig
from raypost.errors import CheckpointError, ConfigError
from raypost.types import Group, IntArray, RolloutState, SampleParams


class Prompt(Protocol):
    """What a sampler needs of a prompt besides its tokens."""

    @property
    def text(self) -> str: ...

    @property
    def metadata(self) -> dict[str, Any]: ...


PromptT = TypeVar("PromptT", bound=Prompt)
PromptT_co = TypeVar("PromptT_co", bound=Prompt, covariant=True)


class Source(Protocol[PromptT_co]):
    """A fixed number of prompts, addressed by index."""

    def __len__(self) -> int: ...

    def sample(self, index: int) -> PromptT_co:
        """The prompt at `index`, the same one whenever asked."""
        ...


class Sampler(Generic[PromptT]):
    """The groups of one task, each epoch a different permutation of its source."""

    def __init__(
        self,
        task: TaskConfig,
        source: Source[PromptT],
        encode: Callable[[PromptT], IntArray],
        stop_token_ids: Sequence[int],
        seed: int,
    ) -> None:
        """`encode` gives the prompt's token ids. Raises ConfigError if the source is empty."""
        if len(source) < 1:
            raise ConfigError(f"task {task.name!r}: its source has no prompts; give it at least one")
        self._task, self._source, self._encode, self._seed = task, source, encode, seed
        self._params = SampleParams(
            max_tokens=task.max_tokens,
            temperature=task.temperature,
            top_p=task.top_p,
            top_k=task.top_k,
            stop_token_ids=tuple(stop_token_ids),
        )
        self._position = 0
        self._epoch = -1
        self._order: IntArray = np.empty(0, np.int32)

    @property
    def position(self) -> int:
        """How many groups were sampled so far: the `group_id` of the next one."""
        return self._position

    def sample(self) -> Group:
        """The next group: `group_size` INIT trajectories of one prompt.

        Raises ConfigError if the prompt is longer than `max_prompt_tokens`; it is never cut.
        """
        prompt = self._source.sample(self._index(self._position))
        prompt_ids = np.asarray(self._encode(prompt), np.int32)
        if not 1 <= len(prompt_ids) <= self._task.max_prompt_tokens:
            raise ConfigError(
                f"task {self._task.name!r}: prompt {prompt.text!r:.200} has {len(prompt_ids)} tokens, "
                f"allowed are 1 to {self._task.max_prompt_tokens}; raise max_prompt_tokens or change the source"
            )
        group_id = self._position
        self._position += 1
        states = [
            RolloutState(
                task=self._task.name,
                group_id=group_id,
                sample_index=index,
                prompt_ids=prompt_ids,
                sample_params=self._params,
                metadata=prompt.metadata,
            )
            for index in range(self._task.group_size)
        ]
        return Group(task=self._task.name, group_id=group_id, states=states)

    def state_dict(self) -> dict[str, Any]:
        """The position, and what tells whether it belongs to this sampler."""
        return {**self._identity(), "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the saved sampler stood. Raises CheckpointError if it is missing or foreign."""
        if not state or "position" not in state:
            raise CheckpointError(
                f"no sampler state for task {self._task.name!r}: the dataset would silently restart"
            )
        for name, mine in self._identity().items():
            if state.get(name) != mine:
                raise CheckpointError(
                    f"sampler state of task {self._task.name!r} was written with {name}={state.get(name)!r}, "
                    f"this run has {mine!r}: its position means other prompts; start a new run"
                )
        self._position = int(state["position"])

    def _identity(self) -> dict[str, Any]:
        return {"task": self._task.name, "seed": self._seed, "size": len(self._source)}

    def _index(self, position: int) -> int:
        epoch, offset = divmod(position, len(self._source))
        if epoch != self._epoch:
            rng = np.random.default_rng((self._seed, epoch))
            self._order = rng.permutation(len(self._source)).astype(np.int32)
            self._epoch = epoch
        return int(self._order[offset])
