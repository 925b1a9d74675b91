"""The scripted job with a replay buffer that forgets its leases (forgetful_job.py)."""

from __future__ import annotations

import sys

from tests.chaos.forgetful_job import LeaselessBuffer, run

if __name__ == "__main__":
    sys.exit(run(LeaselessBuffer))
