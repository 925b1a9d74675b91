"""The sandbox: programs that nobody trusts, run by bubblewrap without a network, files of the machine, or a way out.

reaper.py ends programs that run outside of it with all that they started.
"""

from raypost.sandbox.command import python, why_not
from raypost.sandbox.limits import MOST, Limits, Outcome
from raypost.sandbox.run import run

__all__ = ["MOST", "Limits", "Outcome", "python", "run", "why_not"]
