"""`raypost init`: a project of a user's own, which runs as it is written."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

from raypost.errors import ConfigError

TEMPLATE = {"config.yaml": "config.yaml", "reward.py": "reward.py", "README.md": "README.md"} | {
    # A file of this name in the package would be read as one.
    ".gitignore": "gitignore"
}
NUM_ROWS = 2000
NUM_TERMS = 4


def write_project(folder: Path) -> list[str]:
    """Write the project into `folder`, which must be empty or not exist; return the names of its files.

    Raises ConfigError for a folder with files in it, one that cannot be made, or a name that no run can have.
    """
    name = folder.resolve().name
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise ConfigError(
            f"{name!r} names the run too: use 1 to 64 letters, digits, '.', '_' or '-', starting with one"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if others := sorted(path.name for path in folder.iterdir()):
            raise ConfigError(
                f"{folder} has files ({', '.join(others[:4])}): name a folder that is new, or empty"
            )
        for target, source in TEMPLATE.items():
            text = files("raypost.cli").joinpath("template", source).read_text()
            (folder / target).write_text(text.replace("NAME", name))
        (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in _sums(NUM_ROWS)))
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}") from error
    return [*TEMPLATE, "data.jsonl"]


def _sums(count: int) -> Iterator[dict[str, str]]:
    """Yield sums of one-digit numbers, all different, as the model `tiny` can read them."""
    drawn, seen = random.Random(0), set[str]()
    while len(seen) < count:
        text, total = "", 0
        for n in range(NUM_TERMS):
            digit, sign = drawn.randrange(10), drawn.choice("+-") if n else "+"
            text += f" {sign} {digit}" if n else str(digit)
            total += digit if sign == "+" else -digit
        if text not in seen:
            seen.add(text)
            yield {
                "prompt": f"State the final answer to the following arithmetic problem: {text} =",
                "answer": str(total),
            }
