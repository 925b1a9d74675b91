"""What a local run shows of its driver's log."""

from __future__ import annotations

import pytest

from jobs.run import DriverLog

SETUP = "2026-01-02 11:22:58,454\tINFO job_manager.py:581 -- Runtime env is setting up.\n"
ENTRYPOINT = "Running entrypoint for job a: cd /x && exec python -m jobs.train\n"


@pytest.mark.parametrize(
    "log",
    [
        SETUP + ENTRYPOINT + "step 1\nstep 2\n",
        # Ray writes its line when the driver runs already.
        SETUP + "step 1\n" + ENTRYPOINT + "step 2\n",
        "step 1\nstep 2\n" + SETUP + ENTRYPOINT,
    ],
)
def test_all_that_the_driver_writes_is_shown_whenever_ray_writes(
    log: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = DriverLog()
    for line in log.splitlines(keepends=True):
        shown.feed(line)
    assert capsys.readouterr().out == "step 1\nstep 2\n"
    assert list(shown.tail) == ["step 1", "step 2"] and shown.seen == len(log)


def test_what_ray_says_is_the_cause_of_a_driver_that_never_ran(capsys: pytest.CaptureFixture[str]) -> None:
    shown = DriverLog()
    shown.feed(SETUP)
    assert capsys.readouterr().out == "" and shown.tail[-1].endswith("Runtime env is setting up.")
