"""Sums for the tiny model and a calculator: a hasty answer, and one that asks the calculator.

    <tools>calculate<user>... problem: 4 + 3 - 9 + 5 =<eos><assistant> 3<eos>
    <tools>calculate<user>... problem: 4 + 3 - 9 + 5 =<eos><assistant><tool_call>{... "4 + 3 - 9 + 5"}</tool_call><eos>
    <tool>3<eos><assistant> 3<eos>

Owns how such conversations look, which is what jobs/recipes/tools.jinja renders. Imports neither torch nor pydantic.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

PIECES = re.compile(r"<[a-z_/]+>|\d|[^<\d]+")
"""A role is a token, a digit is one, and so is everything between two of these, such as " + "."""
EOS = "<eos>"


def examples(problems: Iterable[dict[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """Yield (prompt, hasty answer, answer with a call) for reasoning-gym's sums."""
    for entry in problems:
        expression, answer = entry["metadata"]["expression"], entry["answer"]
        call = json.dumps({"name": "calculate", "arguments": {"expression": expression}})
        prompt = f"<tools>calculate<user>{entry['question']}{EOS}<assistant>"
        asked = f"<tool_call>{call}</tool_call>{EOS}<tool>{answer}{EOS}<assistant> {answer}"
        yield prompt, f" {answer}", asked
