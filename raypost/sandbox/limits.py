"""What a program in the sandbox may take, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 2**20
MOST = 4
"""How many times `wall_s` a program may take that has to wait for a processor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one program may take. Every limit but the last three holds for each of its processes by itself."""

    cpu_s: float = 10.0
    """CPU time, seconds; rounded up to a whole one."""
    memory_mb: int = 512
    """Address space, MiB."""
    file_mb: int = 16
    """Largest file, MiB."""
    open_files: int = 64
    wall_s: float = 30.0
    """Time by the clock, seconds. What it waited for a processor that others had is added, up to MOST times in all."""
    processes: int = 16
    """Processes and threads at once."""
    output_kb: int = 1024
    """Standard output, and as much standard error, KiB; a program that writes more is ended."""
    tmp_mb: int = 32
    """All files in /tmp together, which are memory, MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a program ended, and what it wrote."""

    exit_code: int | None
    """None: a signal ended it."""
    signal: int | None
    """Number of that signal, by what a shell would say: a program can return it too."""
    timed_out: bool
    """It was ended for its time, by the clock or of the CPU."""
    out_of_memory: bool
    """It failed and said that it had no memory."""
    stdout: bytes
    stderr: bytes
    truncated: bool
    """It was ended for writing too much."""
    wall_s: float
    """From before its start until after its end, seconds."""

    @property
    def ok(self) -> bool:
        """Whether it ended by itself, with exit code 0."""
        return self.exit_code == 0 and not self.timed_out and not self.truncated
