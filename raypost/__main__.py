"""`python -m raypost`, where the package's scripts are not installed."""

from raypost.cli import app

app()
