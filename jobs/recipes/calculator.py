"""The tool of the recipe `tools`."""

import re

from raypost import ToolError


def calculate(expression: str) -> int:
    """Works out a sum.

    Args:
        expression: numbers with + or - between them
    """
    if not re.fullmatch(r"-?\d{1,9}( [+-] \d{1,9}){0,20}", expression):
        raise ToolError("no sum")
    return sum(int(term) for term in re.findall(r"-?\d+", expression.replace("- ", "-")))
