"""deploy/slurm.sh, with stand-ins for Slurm's commands and for the job, and a real Ray of two nodes on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "deploy" / "slurm.sh"
pytestmark = pytest.mark.slow

SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
trap 'kill $(jobs -p)' TERM
for SLURM_NODEID in 0 1; do SLURM_NODEID=$SLURM_NODEID "$@" & done
wait
"""
RAY = f"""#!/bin/bash
[[ $* == *--head* ]] && set -- "$@" --temp-dir "$SHORT"
exec {sys.executable} -m ray.scripts.scripts "$@" --num-cpus 1
"""
PYTHON = f"""#!/bin/bash
[[ $* == "-m jobs.train --config recipe.yaml --name trial" ]] || exit 9
exec {sys.executable} - <<'END'
import signal, sys, time, ray
ray.init(logging_level="ERROR")
while ray.cluster_resources().get("rollout", 0) < 8:
    time.sleep(0.2)
def save(number, frame):
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
roles = [[node["Resources"].get(role, 0) for role in ("trainer", "rollout")] for node in ray.nodes()]
print("nodes", sorted(roles), flush=True)
time.sleep(120)
END
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a Slurm job whose two nodes are this machine."""
    stand_ins = {"srun": SRUN, "python": PYTHON, "hostname": "#!/bin/bash\necho 127.0.0.1\n"}
    stand_ins["ray"] = RAY
    for name, text in stand_ins.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": str(os.getpid()), "SLURM_GPUS_ON_NODE": "8"}
    # Ray's sockets need a short path.
    with tempfile.TemporaryDirectory(prefix="slurm", dir="/tmp") as short:
        yield {**os.environ, **job, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SHORT": short}


def test_a_cluster_by_role_is_started_and_the_job_saves_when_its_time_is_over(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    command = ["bash", str(SCRIPT), "recipe.yaml", "--name", "trial"]
    with log.open("w") as output:
        job = subprocess.Popen(command, env=slurm, stdout=output, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + 240
        while "nodes" not in log.read_text() and time.monotonic() < end and job.poll() is None:
            time.sleep(0.5)
        assert "nodes [[0, 8.0], [8.0, 0]]" in log.read_text(), log.read_text()
        children = psutil.Process(job.pid).children(recursive=True)
        job.send_signal(signal.SIGTERM)
        assert job.wait(240) == 0, log.read_text()
        assert "saved" in log.read_text()
        assert psutil.wait_procs(children, timeout=240)[1] == []
    finally:
        for process in [*psutil.Process(job.pid).children(recursive=True), job] if job.poll() is None else []:
            process.kill()


def test_it_says_how_it_is_called(slurm: dict[str, str]) -> None:
    called = subprocess.run(
        ["bash", str(SCRIPT)], env=slurm, capture_output=True, text=True, check=False, timeout=240
    )
    assert (called.returncode, "usage: sbatch" in called.stderr) == (2, True)
