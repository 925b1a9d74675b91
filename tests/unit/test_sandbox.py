"""The sandbox: what a program is given, what it may take, how its end is told, and what attacks come to.

Where it can be done, an attack is tried without the sandbox too, where it must succeed: a test that it fails in the
sandbox would otherwise pass for an attack that never works.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from raypost.errors import SandboxError
from raypost.sandbox import MOST, python, run, why_not
from raypost.sandbox.run import waited_s
from raypost.sandbox.seccomp import refused_calls
from tests.unit.sandboxes import LIMITS, needs_sandbox, run_python

pytestmark = needs_sandbox
GONE_S = 120.0
PATIENCE_S = 120.0
"""Far more than a slow machine needs for a second of CPU time."""


def processes_with(text: str) -> list[psutil.Process]:
    """Living processes that have this text in their command."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        given, status = process.info["cmdline"] or [], process.info["status"]
        if any(text in part for part in given) and status != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


async def gone(text: str) -> bool:
    """Whether no process with this text is left, or soon will be: the kernel may be about to end it."""
    deadline = time.monotonic() + GONE_S
    while processes_with(text):
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.02)
    return True


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


# ---------------------------------------------------------------- what it is given, and how its end is told


async def test_a_program_has_its_files_its_input_and_nothing_of_the_environment() -> None:
    os.environ["RAYPOST_TEST_SECRET"] = "s3cret"
    try:
        outcome = await run_python(
            "import os; print(open(0).read(), open('/tmp/a.txt').read(), sorted(os.environ), os.getuid(), os.getcwd())",
            stdin=b"in",
            files={"a.txt": b"file"},
        )
    finally:
        del os.environ["RAYPOST_TEST_SECRET"]
    # Python itself sets the locale.
    assert outcome.stdout == b"in file ['LC_CTYPE', 'PWD'] 65534 /tmp\n", outcome
    assert outcome.ok and (outcome.exit_code, outcome.signal) == (0, None) and outcome.wall_s > 0


async def test_exit_codes_signals_and_both_outputs_are_told() -> None:
    outcome = await run_python("import sys; print('e', file=sys.stderr); sys.exit(3)")
    assert (outcome.exit_code, outcome.signal, outcome.ok, outcome.stderr) == (3, None, False, b"e\n")
    outcome = await run_python("import os; os.kill(os.getpid(), 11)")
    assert (outcome.exit_code, outcome.signal, outcome.ok) == (None, signal.SIGSEGV, False)
    outcome = await run(["/nosuch"])
    assert outcome.exit_code == 127 and b"No such file" in outcome.stderr


async def test_a_sandbox_that_cannot_be_made_is_an_error_and_no_outcome(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(SandboxError, match=r"made no sandbox.*nosuchfolder"):
        await run_python("print(1)", see=["/nosuchfolder"])
    for name in ("a/b", "..", "", "/etc/passwd"):
        with pytest.raises(SandboxError, match="is no name"):
            await run([python()[0]], files={name: b""})
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    with pytest.raises(SandboxError, match="apt-get install bubblewrap"):
        await run_python("print(1)")
    why_not.cache_clear()
    assert "apt-get install bubblewrap" in (why_not(LIMITS) or "")
    why_not.cache_clear()


async def test_open_files_can_be_handed_in() -> None:
    read, write = os.pipe()
    outcome = await run_python(f"import os; os.write({write}, b'over')", fds=[write])
    assert outcome.ok and os.read(read, 10) == b"over"
    os.close(read)
    with pytest.raises(OSError):
        os.fstat(write)


async def test_no_open_file_of_this_process_is_left() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        await run_python("print(1)", files={"a": b"", "b": b""})
        await run_python("import time; time.sleep(600)", dataclasses.replace(LIMITS, wall_s=0.2))
    assert len(os.listdir("/proc/self/fd")) == before


async def test_a_folder_that_is_to_be_seen_is_seen_read_only(open_folder: Path) -> None:
    (open_folder / "data").write_text("seen")
    source = f"""
        print(open("{open_folder}/data").read())
        open("{open_folder}/new", "w")
    """
    outcome = await run_python(source, see=[str(open_folder)])
    assert outcome.stdout == b"seen\n" and b"Read-only" in outcome.stderr
    assert os.listdir(open_folder) == ["data"]


def test_the_python_of_the_run_is_taken_where_the_sandbox_can_see_it(
    monkeypatch: pytest.MonkeyPatch, open_folder: Path
) -> None:
    own = open_folder / "bin" / f"python3.{sys.version_info[1]}"
    own.parent.mkdir()
    own.touch()
    monkeypatch.setattr("sys.base_prefix", str(open_folder))
    python.cache_clear()
    assert python() == (str(own), (str(open_folder),))
    open_folder.chmod(0o700)
    python.cache_clear()
    assert python() == (("/usr/bin/python3", ()) if os.geteuid() == 0 else (str(own), (str(open_folder),)))
    monkeypatch.undo()
    python.cache_clear()


# ---------------------------------------------------------------- what it may take


async def test_a_loop_ends_by_the_cpu_and_a_sleep_by_the_clock() -> None:
    loop = await run_python("while True: pass", dataclasses.replace(LIMITS, cpu_s=1, wall_s=PATIENCE_S))
    assert loop.timed_out and loop.signal == signal.SIGXCPU and loop.wall_s < PATIENCE_S
    for wall_s in (0.5, PATIENCE_S / 2):
        limits = dataclasses.replace(LIMITS, wall_s=wall_s)
        sleep = await run_python("print(1, flush=True); import time; time.sleep(600)", limits)
        if sleep.stdout:
            break  # else this machine takes longer to start it
    assert sleep.timed_out and sleep.stdout == b"1\n" and wall_s <= sleep.wall_s < 600 and not sleep.ok


async def test_time_in_which_others_have_the_processor_is_not_the_programs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits, (read, write) = dataclasses.replace(LIMITS, wall_s=0.2), os.pipe()

    def waited_s(pid: int) -> float:
        """Let the program end, which has had its time."""
        os.write(write, b"go")
        return 1e6

    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["raypost.sandbox.run"], "waited_s", waited_s)
        patch.setattr(sys.modules["raypost.sandbox.run"], "MOST", PATIENCE_S / limits.wall_s)
        outcome = await run_python(f"import os; print(os.read({read}, 2))", limits, fds=[read])
    os.close(write)
    assert outcome.ok and outcome.stdout == b"b'go'\n" and outcome.wall_s >= limits.wall_s, outcome
    monkeypatch.setattr(sys.modules["raypost.sandbox.run"], "waited_s", lambda pid: 1e6)
    outcome = await run_python("import time; time.sleep(600)", limits)
    assert outcome.timed_out and outcome.wall_s >= limits.wall_s * MOST


TWO_ON_ONE = """
import os, subprocess, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
both = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
both[0].wait()
"""


def test_the_wait_for_a_processor_is_that_of_the_longest_waiting_below() -> None:
    with subprocess.Popen([sys.executable, "-c", TWO_ON_ONE], start_new_session=True) as one:
        try:
            deadline = time.monotonic() + PATIENCE_S
            while waited_s(one.pid) < 0.2 and time.monotonic() < deadline:
                time.sleep(0.05)
            assert 0.2 <= waited_s(one.pid) < PATIENCE_S
        finally:
            os.killpg(one.pid, signal.SIGKILL)


async def test_a_program_that_ignores_its_end_is_ended() -> None:
    source = "import signal\nfor n in set(range(1, 32)) - {9, 19}: signal.signal(n, signal.SIG_IGN)\nwhile True: pass"
    outcome = await run_python(source, dataclasses.replace(LIMITS, cpu_s=1, wall_s=PATIENCE_S))
    assert outcome.signal == signal.SIGKILL and outcome.wall_s < PATIENCE_S


async def test_memory_is_bounded() -> None:
    source = "x = bytearray(200 * 2**20); print(len(x))"
    outcome = await run_python(source, dataclasses.replace(LIMITS, memory_mb=128))
    assert outcome.out_of_memory and outcome.exit_code == 1 and outcome.stdout == b""
    assert (await run_python(source, dataclasses.replace(LIMITS, memory_mb=512))).ok


async def test_memory_that_the_limit_does_not_see_is_refused() -> None:
    source = """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        print(libc.shmget(0, 2**20, 0o1600) >= 0)
        try: os.memfd_create("x"); print(True)
        except PermissionError: print(False)
    """
    assert refused_calls("x86_64") is not None and refused_calls("vax") is None
    assert (await run_python(source)).stdout == b"False\nFalse\n"
    assert (await run_python("import os; os.memfd_create('x')", unsafe=True)).ok


async def test_output_is_bounded_and_ends_the_program() -> None:
    for stream in ("stdout", "stderr"):
        source = f"import sys\nfor _ in range(10 * 2**10): sys.{stream}.write('x' * 2**20)"
        outcome = await run_python(source)
        assert outcome.truncated and not outcome.ok and len(getattr(outcome, stream)) == 2**20
    exact = await run_python("print('x' * (2**20 - 1))")
    assert exact.ok and len(exact.stdout) == 2**20


async def test_files_are_bounded_each_and_all_together() -> None:
    each = await run_python("f = open('a', 'wb')\nfor _ in range(32): f.write(bytes(2**20))")
    assert not each.ok and (each.signal == signal.SIGXFSZ or b"File too large" in each.stderr)
    together = await run_python("for n in range(64): open(str(n), 'wb').write(bytes(2**20))")
    assert b"No space left" in together.stderr and together.exit_code == 1


async def test_a_fork_bomb_ends_and_nothing_of_it_is_left() -> None:
    mark = secrets.token_hex(8)
    bomb = f"""
        import os, time  # {mark}
        while True:
            try: os.fork()
            except OSError: time.sleep(0.01)
    """
    outcome = await run_python(bomb, dataclasses.replace(LIMITS, wall_s=1))
    assert outcome.timed_out and await gone(mark)
    count = """
        import os, time
        n = 1
        try:
            while os.fork(): n += 1
            time.sleep(600)
        except OSError: print(n, flush=True)
        os._exit(0)
    """
    outcome = await run_python(count, dataclasses.replace(LIMITS, processes=12))
    assert 4 <= int(outcome.stdout) <= 12


async def test_sandboxes_at_once_do_not_count_each_others_processes() -> None:
    source = "import os, time\nos.fork()\ntime.sleep(0.3)"
    few = dataclasses.replace(LIMITS, processes=5)
    outcomes = await asyncio.gather(*(run_python(source, few) for _ in range(6)))
    assert all(outcome.ok for outcome in outcomes), outcomes


# ---------------------------------------------------------------- ways out


async def test_there_is_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        source = f"""
            import socket
            socket.create_connection(("127.0.0.1", {server.getsockname()[1]}), 5); print("connected")
        """
        assert (await run_python(source, unsafe=True)).stdout == b"connected\n"
        outcome = await run_python(source)
    assert outcome.stdout == b"" and b"refused" in outcome.stderr
    outcome = await run_python("import socket; print([name for _, name in socket.if_nameindex()])")
    assert outcome.stdout == b"['lo']\n"


async def test_abstract_unix_sockets_of_the_machine_are_not_reached() -> None:
    name = f"raypost-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0{name}")
        server.listen()
        source = f"import socket; socket.socket(socket.AF_UNIX).connect('\\0{name}'); print('connected')"
        assert (await run_python(source, unsafe=True)).stdout == b"connected\n"
        assert (await run_python(source)).stdout == b""


async def test_no_file_of_the_machine_is_read_not_by_a_link_either(open_folder: Path) -> None:
    token = open_folder / "token"
    token.write_text("s3cret")
    token.chmod(0o644)
    for path in (
        str(token),
        "link",
        f"/proc/1/root{token}",
        f"/proc/self/root{token}",
        f"/proc/1/cwd{token}",
    ):
        source = f"import os; os.symlink('{token}', 'link'); print(open('{path}').read())"
        outcome = await run_python(source)
        assert b"s3cret" not in outcome.stdout and outcome.exit_code == 1, (path, outcome)
    unsafe = await run_python(
        f"import os; os.symlink('{token}', 'link'); print(open('link').read())", unsafe=True
    )
    assert unsafe.stdout == b"s3cret\n"
    seen = await run_python(
        "import os; print(sorted(os.listdir('/')), os.path.exists('/home'), os.listdir('/tmp'))"
    )
    for name in (b"home", b"root", b"etc", b"var", b"run", b"work"):
        assert b"'" + name + b"'" not in seen.stdout, seen.stdout
    assert seen.stdout.endswith(b"False []\n")


async def test_a_link_out_of_tmp_is_not_followed_when_files_are_given(open_folder: Path) -> None:
    victim = open_folder / "victim"
    victim.write_text("whole")
    victim.chmod(0o666)
    outcome = await run_python(f"import os; os.symlink('{victim}', 'l'); open('l', 'w').write('broken')")
    assert outcome.exit_code == 1 and victim.read_text() == "whole"


async def test_nothing_can_be_written_but_in_tmp_and_nothing_of_it_stays() -> None:
    source = """
        for path in ("/new", "/usr/new", "/dev/new", "/dev/shm/new", "/proc/new", "/tmp/new"):
            try:
                open(path, "x"); print(path)
            except OSError: pass
    """
    for _ in range(2):
        assert (await run_python(source)).stdout == b"/tmp/new\n"


async def test_other_processes_are_not_seen_nor_signalled() -> None:
    source = """
        import os
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        print(max(pids) < 10 and len(pids))
        try: os.kill(PID, 0); print("signalled")
        except OSError: print("none")
    """.replace("PID", str(os.getpid()))
    outcome = await run_python(source)
    number, signalled = outcome.stdout.split()
    assert 1 <= int(number) <= 3 and signalled == b"none", outcome
    environ = await run_python("print(b'PATH=' in open('/proc/1/environ', 'rb').read())")
    assert environ.stdout != b"True\n"
    parent = f"print(open('/proc/{os.getpid()}/cmdline').read() != '')"
    assert (await run_python(parent, unsafe=True)).stdout == b"True\n"
    assert (await run_python(parent)).exit_code == 1


async def test_a_daemon_does_not_outlive_its_program() -> None:
    mark = secrets.token_hex(8)
    source = f"""
        import os, sys, time  # {mark}
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                for n in range(3): os.close(n)
                time.sleep(600)
            os._exit(0)
        os.wait()
    """
    try:
        assert (await run_python(source, unsafe=True)).ok and processes_with(mark)
    finally:
        for process in processes_with(mark):
            with suppress(psutil.NoSuchProcess):
                process.kill()
    assert await gone(mark)
    assert (await run_python(source)).ok and await gone(mark)


async def test_a_run_that_is_cancelled_leaves_nothing() -> None:
    mark = secrets.token_hex(8)
    task = asyncio.create_task(run_python(f"import time; time.sleep(600)  # {mark}"))
    for _ in range(500):
        if processes_with(mark):
            break
        await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await gone(mark)


def test_a_sandbox_does_not_outlive_whoever_ran_it() -> None:
    mark, pid = secrets.token_hex(8), os.fork()
    if pid == 0:
        with suppress(BaseException):
            asyncio.run(run_python(f"import time; time.sleep(600)  # {mark}"))
        os._exit(0)
    try:
        deadline = time.monotonic() + GONE_S
        while not processes_with(mark) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert processes_with(mark)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert asyncio.run(gone(mark))


async def test_what_bubblewrap_tells_cannot_be_forged() -> None:
    source = """
        import os
        for fd in range(3, 64):
            for told in (b'{"exit-code": 0}', b'{"child-pid": 1}'):
                try: os.write(fd, told)
                except OSError: pass
        os._exit(9)
    """
    assert (await run_python(source)).exit_code == 9


async def test_no_right_is_gained_by_another_namespace_or_a_setuid_program() -> None:
    source = """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        print([libc.unshare(flag) for flag in (0x10000000, 0x20000, 0x40000000)])
        status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
        print(int(status["CapEff"], 16), status["NoNewPrivs"].strip(), status["Uid"].split())
    """
    outcome = await run_python(source)
    lines = outcome.stdout.decode().splitlines()
    assert lines == ["[-1, -1, -1]", "0 1 ['65534', '65534', '65534', '65534']"], outcome
