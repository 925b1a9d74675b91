"""What the README quotes is what the code says."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_readme_quotes_the_main_loop_as_it_is() -> None:
    code = (ROOT / "jobs" / "train.py").read_text()
    loop = code[code.index("async def train(") : code.index("\n\nif __name__")].rstrip()
    assert loop in (ROOT / "README.md").read_text()


def test_every_picture_of_the_readme_exists() -> None:
    text = (ROOT / "README.md").read_text()
    pictures = [part.split(")")[0] for part in text.split("](")[1:] if part.split(")")[0].endswith(".png")]
    assert pictures and all((ROOT / picture).is_file() for picture in pictures)
