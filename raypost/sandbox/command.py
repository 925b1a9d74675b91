"""The command line of the sandbox: bubblewrap's, with what is seen and what is limited inside.

    setpriv (if root: become nobody) -> bwrap (namespaces, mounts) -> prlimit (limits) -> the program

Owns where bwrap and Python are found, and why the sandbox cannot be had. Owns no process.
"""

from __future__ import annotations

import functools
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from raypost.sandbox.limits import MIB, Limits

NOBODY = 65534
INSTALL = "install it on every node that judges (Debian, Ubuntu: apt-get install bubblewrap)"
PROBE_S = 10.0


def find_bwrap() -> str | None:
    """Return the path of bubblewrap's program: of the PATH, or beside this Python."""
    beside = Path(sys.prefix) / "bin"
    return shutil.which("bwrap") or shutil.which("bwrap", path=str(beside))


@functools.cache
def python() -> tuple[str, tuple[str, ...]]:
    """Return the Python for programs in the sandbox, and the folders outside /usr that must be seen there for it.

    It is that of this process, without the packages of its venv, or that of /usr where this one lies in a folder that
    others than root cannot enter.
    """
    prefix = Path(sys.base_prefix).resolve()
    own = prefix / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    if own.exists() and (prefix == Path("/usr") or Path("/usr") in prefix.parents):
        return str(own), ()
    if own.exists() and (os.geteuid() != 0 or _enterable(prefix)):
        return str(own), (str(prefix),)
    return "/usr/bin/python3", ()


def _enterable(folder: Path) -> bool:
    """Return whether everybody may enter and read this folder."""
    return bool(folder.stat().st_mode & 0o004) and all(
        one.stat().st_mode & 0o001 for one in (folder, *folder.parents)
    )


def limited(argv: Sequence[str], limits: Limits) -> list[str]:
    """Return the command that runs `argv` within the limits that the kernel keeps."""
    cpu_s = math.ceil(limits.cpu_s)
    return [
        "/usr/bin/prlimit",
        # At the first number it gets SIGXCPU, at the second SIGKILL.
        f"--cpu={cpu_s}:{cpu_s + 1}",
        f"--as={limits.memory_mb * MIB}",
        f"--fsize={limits.file_mb * MIB}",
        f"--nofile={limits.open_files}",
        f"--nproc={limits.processes}",
        "--core=0",
        "--",
        *argv,
    ]


def sandboxed(
    argv: Sequence[str],
    limits: Limits,
    *,
    bwrap: str,
    status_fd: int,
    files: dict[str, int],
    see: Sequence[str],
    filter_fd: int | None = None,
) -> list[str]:
    """Return the command that runs `argv` in the sandbox.

    `status_fd`: where bubblewrap says how it went. `files`: open files that are copied into /tmp, by name. `see`:
    folders that are seen read-only, besides /usr. `filter_fd`: an open file with a filter of system calls.
    """
    # Of a user's processes the kernel counts those of this sandbox alone; of root's it counts none.
    root = ["/usr/bin/setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    command = [*(root if os.geteuid() == 0 else []), bwrap]
    command += ["--unshare-user", "--unshare-all", "--disable-userns", "--die-with-parent", "--new-session"]
    command += ["--uid", str(NOBODY), "--gid", str(NOBODY), "--hostname", "sandbox", "--cap-drop", "ALL"]
    command += ["--json-status-fd", str(status_fd)]
    command += [] if filter_fd is None else ["--seccomp", str(filter_fd)]
    command += _system()
    command += ["--proc", "/proc", "--dev", "/dev", "--size", str(limits.tmp_mb * MIB), "--tmpfs", "/tmp"]
    for folder in see:
        command += ["--ro-bind", folder, folder]
    for name, fd in files.items():
        command += ["--perms", "0644", "--file", str(fd), f"/tmp/{name}"]
    # Both are file systems in memory, of no bounded size.
    command += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--"]
    return [*command, *limited(argv, limits)]


@functools.cache
def _system() -> tuple[str, ...]:
    """Return the arguments that show the system's programs and libraries, and nothing else of this machine."""
    shown = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        folder = Path("/", name)
        if folder.is_symlink():
            shown += ["--symlink", os.readlink(folder), str(folder)]
        elif folder.is_dir():
            shown += ["--ro-bind", str(folder), str(folder)]
    return tuple(shown)


@functools.cache
def why_not(limits: Limits) -> str | None:
    """Return why programs cannot be run in the sandbox on this machine, with what to do about it; None: they can."""
    bwrap = find_bwrap()
    if sys.platform != "linux":
        return f"the sandbox needs Linux, and this is {sys.platform}"
    if bwrap is None:
        return f"bubblewrap (bwrap) is not installed: {INSTALL}"
    for tool in ("/usr/bin/prlimit", "/usr/bin/setpriv"):
        if not Path(tool).exists():
            return f"{tool} is missing: install util-linux"
    if not Path(python()[0]).exists():
        return (
            f"no Python for the sandbox: that of this run lies in {sys.base_prefix}, which others than root cannot "
            "enter, and /usr/bin/python3 is missing: install python3 there, or run as another user than root"
        )
    return _probe(bwrap, limits)


def _probe(bwrap: str, limits: Limits) -> str | None:
    # Two processes in a pipe: the limit on processes must let them be.
    trial = [python()[0], "-I", "-S", "-c", "import os; os.waitpid(os.fork() or os._exit(0), 0)"]
    read, write = os.pipe()
    try:
        command = sandboxed(trial, limits, bwrap=bwrap, status_fd=write, files={}, see=python()[1])
        done = subprocess.run(command, capture_output=True, timeout=PROBE_S, pass_fds=(write,), env={})
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bubblewrap cannot run: {error}"
    finally:
        os.close(read)
        os.close(write)
    if done.returncode == 0:
        return None
    said = done.stderr.decode(errors="replace").strip()[-300:] or f"exit code {done.returncode}"
    return (
        f"bubblewrap cannot make a sandbox here ({said}): it needs user namespaces (sysctl "
        "kernel.unprivileged_userns_clone=1, on Ubuntu kernel.apparmor_restrict_unprivileged_userns=0; in Docker "
        "--security-opt seccomp=unconfined --security-opt apparmor=unconfined) and Linux 5.14"
    )
