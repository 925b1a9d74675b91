"""The command line, `raypost COMMAND`: what its commands do, without Ray."""

from __future__ import annotations

import os
import sys

from raypost.cli.commands import app

__all__ = ["app", "main"]


def main() -> None:
    """Run the command line as `python -m raypost` does: modules of the current folder can be imported."""
    sys.path.insert(0, os.getcwd())
    app()
