"""Prefetch: items that torch's DataLoader reads ahead in worker processes, handed out in order.

Owns the worker processes and the thread that waits for them. Imports torch only once it starts.

    worker processes --chunks, in order--> one thread --a chunk ahead--> next()

Invariants: items come in the order of their positions, whatever the number of workers; no worker outlives
`close`; `next` ends within its deadline, also when a worker was killed.
"""

from __future__ import annotations

import itertools
import pickle
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any, Generic, Protocol, TypeVar, cast

from raypost.errors import ConfigError, ProductionError, WaitTimeoutError

CHUNK = 8
"""Items a worker reads at once: what crossing a process costs is shared by so many."""

CHUNKS_AHEAD = 4
"""Chunks a worker is ahead of what was handed out."""

CLOSE_S = 2.0
"""Longest time workers may take to end by themselves before they are killed."""

KILLED_S = 15.0
"""Longest time torch may take to notice that it has no workers left; it looks every 5 seconds."""

ItemT = TypeVar("ItemT")
ItemT_co = TypeVar("ItemT_co", covariant=True)


class Reader(Protocol[ItemT_co]):
    """Reads the items at growing positions. Can be sent to a process before it has read any."""

    def __getitem__(self, position: int) -> ItemT_co:
        """Return the item at `position`."""
        ...


class Prefetch(Generic[ItemT]):
    """The items of a reader from `start` on, without end."""

    def __init__(
        self, reader: Reader[ItemT], start: int, num_workers: int, *, owner: str, timeout_s: float
    ) -> None:
        """Start the workers and return at once. `owner` names who waits, for messages."""
        self._reader = reader
        self._start = start
        self._num_workers = num_workers
        self._owner = owner
        self._timeout_s = timeout_s
        self._context = _Spawn()
        # A thread, because starting workers and waiting for them would stop an event loop, and because torch
        # installs a signal handler when its loader is used in the main thread.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._loader: Iterator[list[ItemT]] | None = None
        self._chunk: deque[ItemT] = deque()
        self._pending: Future[list[ItemT]] = self._thread.submit(self._advance)

    def next(self) -> ItemT:
        """Return the next item.

        Raises what reading it raised; ProductionError if a worker died, WaitTimeoutError if nothing came
        within the deadline, ConfigError if the reader cannot be sent to a process. Then only `close` is left.
        """
        if not self._chunk:
            self._chunk.extend(self._result())
            self._pending = self._thread.submit(self._advance)
        return self._chunk.popleft()

    def close(self) -> None:
        """End the workers. Returns when none is left."""
        ended = self._thread.submit(self._drop)
        self._thread.shutdown(wait=False)
        # Twice, because the thread may just be starting workers.
        for seconds in (CLOSE_S, KILLED_S):
            wait([ended], seconds)
            for process in self._context.processes:
                if process.pid is not None and process.is_alive():
                    process.kill()
                    process.join(KILLED_S)

    def _result(self) -> list[ItemT]:
        wait([self._pending], self._timeout_s)
        if not self._pending.done():
            raise WaitTimeoutError(
                f"{self._owner} waited {self._timeout_s:g} s for its {self._num_workers} worker process(es) to read "
                f"{CHUNK} prompts: the source is too slow or hangs; raise source.num_workers or mend the source"
            )
        try:
            return self._pending.result()
        except RuntimeError as error:
            dead = [
                f"{one.pid} (exit code {one.exitcode})" for one in self._context.processes if one.exitcode
            ]
            if not dead:
                raise
            raise ProductionError(
                f"{self._owner} lost its worker process {', '.join(dead)}; a negative code is the signal that "
                "killed it, and -9 often means that memory ran out: lower source.num_workers or give it more"
            ) from error

    def _advance(self) -> list[ItemT]:
        if self._loader is None:
            self._loader = self._load()
        return next(self._loader)

    def _load(self) -> Iterator[list[ItemT]]:
        try:
            pickle.dumps(self._reader)
        except Exception as error:  # an object that cannot be pickled raises whatever it likes
            raise ConfigError(
                f"{self._owner} cannot send its source to a worker process: {type(error).__name__}: {error}; set "
                "source.num_workers to 0"
            ) from error
        # Imported here: torch takes two seconds and much memory, which only those with workers should pay.
        import torch
        from torch.utils.data import DataLoader, Dataset

        firsts = itertools.count(self._start, CHUNK)
        loader: DataLoader[ItemT] = DataLoader(
            cast("Dataset[ItemT]", self._reader),  # torch wants the class, and uses its __getitem__ alone
            batch_sampler=(list(range(first, first + CHUNK)) for first in firsts),
            num_workers=self._num_workers,
            prefetch_factor=CHUNKS_AHEAD,
            collate_fn=list,
            multiprocessing_context=self._context,
            generator=torch.Generator(),
        )
        found: Iterator[list[ItemT]] = iter(loader)
        return found

    def _drop(self) -> None:
        # Without its last reference the loader ends its workers.
        self._loader = None


class _Spawn(SpawnContext):
    """Starts processes afresh (forking a process with threads can deadlock), and remembers them."""

    def __init__(self) -> None:
        self.processes: list[SpawnProcess] = []

    def Process(self, *args: Any, **kwargs: Any) -> SpawnProcess:  # type: ignore[override]
        process = SpawnProcess(*args, **kwargs)
        self.processes.append(process)
        return process
