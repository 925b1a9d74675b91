"""Space: what the driver does while the disk of a run refuses to be written: it says so.

The writers themselves wait (raypost/files/disk.py): what is put into the buffer is held back until its journal
has it, and so production stands still. Here that is noticed, said and recorded. Checkpoints wait by themselves
(saving.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from raypost.faults import Incident
from raypost.files.disk import probe

Tell = Callable[..., Awaitable[Any]]
PROBE_S = 5.0
"""Between two looks whether the run folder can be written."""
RETRY_S = 0.5


class Space:
    """Watches the run folder of one run."""

    def __init__(self, run_dir: Path, wait_s: float, say: Callable[[str], object], tell: Tell) -> None:
        """Look at nothing yet. `wait_s`: how long a run waits. `say` shows a line, `tell` records an incident."""
        self._run_dir = run_dir
        self._wait_s = wait_s
        self._say = say
        self._tell = tell

    async def watch(self) -> None:
        """Say, for ever, when the run folder cannot be written, and when it can again."""
        while True:
            if (refused := await asyncio.to_thread(probe, self._run_dir)) is not None:
                since = time.monotonic()
                self._say(f"production waits for its disk, up to {self._wait_s:.0f} s: {refused}")
                while await asyncio.to_thread(probe, self._run_dir) is not None:
                    await asyncio.sleep(RETRY_S)
                waited_s = round(time.monotonic() - since, 1)
                self._say(f"the disk takes data again after {waited_s} s: production goes on")
                await self._tell(Incident.DISK_REFUSED, cause=str(refused), seconds=waited_s)
            await asyncio.sleep(PROBE_S)
