"""The tests that tests/README.md names, and those that a test module has."""

from __future__ import annotations

import ast
import re
from pathlib import Path

README = Path(__file__).resolve().parent / "README.md"
REFERENCE = re.compile(r"`([\w/]+\.py)::(\w+)(?:\[N(\d+)\])?`")
"""(file below tests/, test, number of a row of test_numbers.py or nothing) as the README names it."""


def names_of(file: str) -> set[str]:
    """Tests that a module below tests/ defines, or names as its own; none if there is no such module."""
    path, names = Path(__file__).resolve().parent / file, set[str]()
    for node in ast.parse(path.read_text()).body if path.is_file() else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {name for name in names if name.lower().startswith("test")}
