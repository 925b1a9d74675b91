"""The cause of an engine that did not start, out of what its processes wrote."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from actors.engine.cause import last_error

LOG = """
INFO 11-22 09:00:00 [core.py:114] Initializing a V1 LLM engine
(EngineCore pid=7) ERROR 11-22 09:00:02 [core.py:900] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-22 09:00:02 [core.py:900]   File "cpu_attn.py", line 62, in __init__
(EngineCore pid=7) ERROR 11-22 09:00:02 [core.py:900] ValueError: Head size 16 is not supported. Use 32, 64 or 128.
Process EngineCore:
Traceback (most recent call last):
ValueError: Head size 16 is not supported. Use 32, 64 or 128.
Traceback (most recent call last):
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
(MainProcess pid=26580) ERROR 11-22 10:04:00 [async_llm.py:906] vllm.v1.engine.exceptions.EngineDeadError: EngineCore \
encountered an issue. See stack trace (above) for the root cause.
"""


def test_cause_is_the_error_of_the_engine_not_that_of_the_process_that_waits() -> None:
    assert last_error(LOG.splitlines()) == "ValueError: Head size 16 is not supported. Use 32, 64 or 128."
    assert last_error(["pydantic_core._pydantic_core.ValidationError: 1 error"]) == "ValidationError: 1 error"
    assert last_error(["WARNING: an Error is not named", "nothing: here", "INFO [x] Error"]) is None


def test_only_what_was_written_since_counts_and_only_in_files(tmp_path: Path) -> None:
    program = """
import os, subprocess, sys
from actors.engine.cause import Outputs
print("KeyError: of before", flush=True)
outputs = Outputs()
print(outputs.cause(), file=sys.stderr, flush=True)
subprocess.run([sys.executable, "-c", "raise LookupError('in a child')"])
print(outputs.cause(), file=sys.stderr, flush=True)
"""
    out, err = tmp_path / "out", tmp_path / "err"
    with open(out, "w") as stdout, open(err, "w") as stderr:
        subprocess.run([sys.executable, "-c", program], stdout=stdout, stderr=stderr, check=True, timeout=240)
    lines = err.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("None", "LookupError: in a child")
    piped = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert piped.stderr.splitlines()[-1] == "None"
