"""System calls that no program in the sandbox may make: a filter of the kernel (seccomp), as bubblewrap takes it.

Refused is memory that the limit on address space does not see (System V shared memory, files without a name), and doors
of the kernel that small programs have no use for. Numbers are those of the kernel's tables, by architecture.
"""

from __future__ import annotations

import errno
import platform
import struct

_X86_64 = {
    "shmget": 29, "semget": 64, "msgget": 68, "memfd_create": 319, "memfd_secret": 447, "add_key": 248,
    "request_key": 249, "keyctl": 250, "perf_event_open": 298, "bpf": 321, "userfaultfd": 323, "io_uring_setup": 425,
}  # fmt: skip
_AARCH64 = {
    "shmget": 194, "semget": 190, "msgget": 186, "memfd_create": 279, "memfd_secret": 447, "add_key": 217,
    "request_key": 218, "keyctl": 219, "perf_event_open": 241, "bpf": 280, "userfaultfd": 282, "io_uring_setup": 425,
}  # fmt: skip
_TABLES = {"x86_64": (0xC000003E, _X86_64), "aarch64": (0xC00000B7, _AARCH64)}
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM
_NUMBER, _ARCHITECTURE = 0, 4
"""Where the kernel's record of a call has them, bytes."""
_FOREIGN = 0x40000000
"""Calls of x86's third calling convention begin here; their numbers would pass by the list."""


def refused_calls(machine: str = platform.machine()) -> bytes | None:
    """Return the filter for this machine's architecture; None where its numbers are not known."""
    if machine not in _TABLES:
        return None
    architecture, calls = _TABLES[machine]
    count = len(calls)
    # (code, steps to jump if so, if not, operand)
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 0, count + 3, architecture),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, count + 1, 0, _FOREIGN),
        *((_EQUAL, count - place + 1, 0, number) for place, number in enumerate(calls.values())),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _KILL),
        (_RETURN, 0, 0, _REFUSE),
    ]
    return b"".join(struct.pack("HBBI", *step) for step in program)
