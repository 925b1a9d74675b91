"""Sampler: turns a source of prompts into groups, one after the other, for ever.

Owns the order of the prompts and the position in it, which is saved and restored. Owns neither the prompts
(the source does) nor what becomes of a group. Invariants: `group_id` is the ordinal of the prompt among all
this task ever sampled, so it grows across epochs and is never given twice; the order of an epoch is a pure
function of the seed and the epoch, so there is no random state to lose; the state counts what was handed
out, never what was read ahead; restored at position n, the sampler continues with exactly the n-th prompt,
with any number of worker processes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from raypost.config import TaskConfig
from raypost.data.prefetch import Prefetch, Reader
from raypost.data.prompt import Prompt
from raypost.data.sources import Source, Stream
from raypost.errors import CheckpointError, ConfigError
from raypost.types import Group, IntArray, RolloutState, SampleParams

PROMPT_TIMEOUT_S = 120.0
"""Longest time worker processes may take to start and to read a few prompts."""


class Cursor(NamedTuple):
    """Where a sampler stands: what it hands out next."""

    position: int = 0
    """Groups handed out so far."""
    epoch: int = 0
    offset: int = 0
    """Prompts handed out in this epoch."""
    last: str = ""
    """Digest of the prompt handed out last."""


class EncodedPrompt(NamedTuple):
    """One prompt, ready to become a group."""

    text: str
    prompt_ids: IntArray
    metadata: dict[str, Any]
    epoch: int
    offset: int


class Sampler:
    """The groups of one task: each epoch another permutation of its source, or a stream from start to end."""

    def __init__(
        self,
        task: TaskConfig,
        source: Source | Stream,
        encode: Callable[[Prompt], IntArray],
        eos_ids: Sequence[int],
        seed: int,
        *,
        timeout_s: float = PROMPT_TIMEOUT_S,
    ) -> None:
        """Make the sampler without reading anything; `encode`, which runs where the source is read, gives token ids.

        With `source.num_workers` > 0 source and encode are sent to worker processes. Raises ConfigError if
        the source is empty.
        """
        self._size = None if isinstance(source, Stream) else len(source)
        if self._size is not None and self._size < 1:
            raise ConfigError(f"task {task.name!r}: its source has no prompts; give it at least one")
        self._task = task
        self._source = source
        self._encode = encode
        self._seed = seed
        self._timeout_s = timeout_s
        self._params = SampleParams(
            max_tokens=task.max_tokens,
            temperature=task.temperature,
            top_p=task.top_p,
            top_k=task.top_k,
            stop_token_ids=task.stop_ids(eos_ids),
            min_tokens=task.min_tokens,
        )
        self._cursor = Cursor()
        self._reader: Reader[EncodedPrompt] | None = None
        self._prefetch: Prefetch[EncodedPrompt] | None = None
        self._item: EncodedPrompt | None = None

    @property
    def position(self) -> int:
        """Groups sampled so far: the `group_id` of the next one."""
        return self._cursor.position

    def start(self) -> None:
        """Read the next prompt and keep it; with workers, start them and wait for it.

        `sample` does it too; call this from a thread where an event loop must not wait so long. Raises what `sample`
        raises.
        """
        if self._item is None:
            try:
                self._item = self._read()
            except BaseException:
                # What was read ahead is lost, a generator that raised is over: the next call starts afresh.
                self.close()
                raise

    def sample(self) -> Group:
        """Return the next group: `group_size` INIT trajectories of one prompt.

        Raises ConfigError if the prompt is longer than `max_prompt_tokens`; it is never cut. After any error
        the position is what it was.
        """
        self.start()
        item = self._item
        assert item is not None
        if not 1 <= len(item.prompt_ids) <= self._task.max_prompt_tokens:
            raise ConfigError(
                f"task {self._task.name!r}: prompt {item.text!r:.200} has {len(item.prompt_ids)} tokens, "
                f"allowed are 1 to {self._task.max_prompt_tokens}; raise max_prompt_tokens or change the source"
            )
        group_id = self._cursor.position
        self._cursor = _behind(group_id, item)
        self._item = None
        return self._group(group_id, item)

    def continue_at(self, position: int, again: Sequence[int] = ()) -> list[Group]:
        """Stand where so many groups were sampled; return the groups with these numbers below it, as they were then.

        A stream is read from its start up to `position`, so this may take long. Raises what `sample` raises.
        """
        self.close()
        self._cursor = Cursor()
        numbers = sorted({*again, *([position - 1] if position else [])})
        assert not numbers or numbers[-1] < max(position, 1), "a group is sampled again that never was"
        reader, groups = self._new_reader(), []
        for number in numbers:
            item = reader[number]
            self._cursor = _behind(number, item)
            if number in again:
                groups.append(self._group(number, item))
        return groups

    def _group(self, group_id: int, item: EncodedPrompt) -> Group:
        states = [
            RolloutState(
                task=self._task.name,
                group_id=group_id,
                sample_index=index,
                prompt_ids=item.prompt_ids,
                sample_params=self._params,
                # Not one of them all: what an agent loop writes for one is its own.
                metadata=dict(item.metadata),
            )
            for index in range(self._task.group_size)
        ]
        return Group(task=self._task.name, group_id=group_id, states=states)

    def close(self) -> None:
        """End the worker processes, if any. Sampling again goes on where it stopped."""
        prefetch = self._prefetch
        self._prefetch = None
        self._reader = None
        self._item = None
        if prefetch is not None:
            prefetch.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor, and what tells whether it belongs to this sampler."""
        return {**self._identity(self._cursor.position), **self._cursor._asdict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the saved sampler stood. Raises CheckpointError if it is missing or foreign."""
        missing = [name for name in Cursor._fields if name not in (state or {})]
        if missing:
            raise CheckpointError(
                f"sampler state of task {self._task.name!r} lacks {', '.join(missing)}: the dataset would silently "
                "restart; restore a whole checkpoint"
            )
        cursor = Cursor(*(state[name] for name in Cursor._fields))
        for name, mine in self._identity(cursor.position).items():
            if state.get(name) != mine:
                raise CheckpointError(
                    f"sampler state of task {self._task.name!r} was written with {name}={state.get(name)!r}, "
                    f"this run has {mine!r}: its position means other prompts; restore what it was, or start a "
                    "new run"
                )
        self.close()
        self._cursor = cursor

    def _identity(self, position: int) -> dict[str, Any]:
        """Return what tells whether this process draws the same prompts in the same order at `position`."""
        identity = {
            "task": self._task.name,
            "seed": self._seed,
            "group_size": self._task.group_size,
            "size": self._size,
            "source": getattr(self._source, "identity", ""),
        }
        if self._size is not None:
            order = epoch_order(self._seed, position // self._size, self._size)
            identity["order"] = hashlib.blake2b(order.tobytes(), digest_size=8).hexdigest()
        return identity

    def _read(self) -> EncodedPrompt:
        if self._task.source.num_workers == 0:
            if self._reader is None:
                self._reader = self._new_reader()
            return self._reader[self._cursor.position]
        if self._prefetch is None:
            self._prefetch = Prefetch(
                self._new_reader(),
                self._cursor.position,
                self._task.source.num_workers,
                owner=f"the sampler of task {self._task.name!r}",
                timeout_s=self._timeout_s,
            )
        return self._prefetch.next()

    def _new_reader(self) -> Reader[EncodedPrompt]:
        if isinstance(self._source, Stream):
            return _StreamReader(self._source, self._encode, self._task.name, self._cursor)
        return _IndexReader(self._source, self._encode, self._seed)


def epoch_order(seed: int, epoch: int, size: int) -> IntArray:
    """Return the order of an epoch: a permutation of 0 to size - 1, shape [size]."""
    return np.random.default_rng((seed, epoch)).permutation(size).astype(np.int32)


class _IndexReader:
    """Reads a source with a length, each epoch in its own order."""

    def __init__(self, source: Source, encode: Callable[[Prompt], IntArray], seed: int) -> None:
        self._source = source
        self._encode = encode
        self._seed = seed
        self._epoch = -1
        self._order: IntArray = np.empty(0, np.int32)

    def __getitem__(self, position: int) -> EncodedPrompt:
        epoch, offset = divmod(position, len(self._source))
        if epoch != self._epoch:
            self._order = epoch_order(self._seed, epoch, len(self._source))
            self._epoch = epoch
        prompt = self._source.sample(int(self._order[offset]))
        return _item(prompt, self._encode, epoch, offset)


class _StreamReader:
    """Reads a stream, again and again. Positions may be left out: another process reads those."""

    def __init__(
        self, stream: Stream, encode: Callable[[Prompt], IntArray], task: str, cursor: Cursor
    ) -> None:
        self._stream = stream
        self._encode = encode
        self._task = task
        self._cursor = cursor
        self._prompts: Iterator[Prompt] | None = None

    def __getitem__(self, position: int) -> EncodedPrompt:
        prompt: Prompt | None = None
        while self._cursor.position <= position:
            prompt = self._next()
        assert prompt is not None, "positions grow"
        return _item(prompt, self._encode, self._cursor.epoch, self._cursor.offset - 1)

    def _next(self) -> Prompt:
        if self._prompts is None:
            self._prompts = self._continued()
        prompt = next(self._prompts, None)
        epoch, offset = self._cursor.epoch, self._cursor.offset
        if prompt is None and offset > 0:
            self._prompts = iter(self._stream.prompts())
            prompt, epoch, offset = next(self._prompts, None), epoch + 1, 0
        if prompt is None:
            raise ConfigError(
                f"task {self._task!r}: its source gave no prompt to train in epoch {epoch}; it must return all of "
                "them whenever it is called, at least one that is not held out"
            )
        self._cursor = Cursor(self._cursor.position + 1, epoch, offset + 1)
        return prompt

    def _continued(self) -> Iterator[Prompt]:
        """Return the stream from the cursor on. Raises CheckpointError if another prompt lies before that."""
        prompts, prompt = iter(self._stream.prompts()), None
        for number in range(self._cursor.offset):
            prompt = next(prompts, None)
            if prompt is None:
                raise CheckpointError(
                    f"task {self._task!r}: {self._cursor.offset} prompts of this epoch were sampled, and the source "
                    f"now gives {number}: restore the source it was, or start a new run"
                )
        if prompt is not None and _digest(prompt.text) != self._cursor.last:
            raise CheckpointError(
                f"task {self._task!r}: prompt {self._cursor.offset} of the source is {prompt.text!r:.120}, not the "
                "one that was sampled: restore the source it was, or start a new run"
            )
        return prompts


def _item(prompt: Prompt, encode: Callable[[Prompt], IntArray], epoch: int, offset: int) -> EncodedPrompt:
    return EncodedPrompt(prompt.text, np.asarray(encode(prompt), np.int32), prompt.metadata, epoch, offset)


def _behind(number: int, item: EncodedPrompt) -> Cursor:
    """Return the cursor once the prompt with this number was handed out."""
    return Cursor(number + 1, item.epoch, item.offset + 1, _digest(item.text))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
