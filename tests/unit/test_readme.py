"""What the README quotes is what the code says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from typer.main import get_command

from raypost.cli import app
from raypost.config import Config
from raypost.config.tasks import StrategyConfig

ROOT = Path(__file__).resolve().parents[2]


def test_readme_quotes_the_main_loop_as_it_is() -> None:
    code = (ROOT / "jobs" / "train.py").read_text()
    loop = code[code.index("async def train(") : code.index("\n\nif __name__")].rstrip()
    assert loop in (ROOT / "README.md").read_text()


def test_every_picture_of_the_readme_exists() -> None:
    text = (ROOT / "README.md").read_text()
    pictures = [part.split(")")[0] for part in text.split("](")[1:] if part.split(")")[0].endswith(".png")]
    assert pictures and all((ROOT / picture).is_file() for picture in pictures)


SETTING = re.compile(
    r"(?:tasks\.0|strategy|train|rollout|eval|checkpoint|model|sync)(?:\.[a-z_]+)+(?![a-z_]*[/(-])"
)


def is_setting(name: str) -> bool:
    """Whether the configuration has a setting of this name."""
    model: Any = StrategyConfig if name.startswith("strategy.") else Config
    for part in name.removeprefix("strategy.").replace("tasks.0", "tasks").split("."):
        if not (isinstance(model, type) and issubclass(model, BaseModel) and part in model.model_fields):
            return False
        inside = [model.model_fields[part].annotation]
        while inside and not (isinstance(inside[0], type) and issubclass(inside[0], BaseModel)):
            inside = [*get_args(inside[0]), *inside[1:]]
        model = inside[0] if inside else None
    return True


def test_settings_that_replace_those_of_others_exist() -> None:
    assert is_setting("train.loss.kl.coefficient") and is_setting("strategy.max_staleness")
    assert (
        not is_setting("train.loss.beta")
        and not is_setting("tasks.0.group")
        and not is_setting("eval.seed.x")
    )
    rows = [
        line.split(" | ", 1)[1]
        for line in (ROOT / "docs/coming-from.md").read_text().splitlines()
        if " | " in line
    ]
    named = {name for row in rows for name in SETTING.findall(row)}
    assert len(named) > 30
    assert [name for name in sorted(named) if not is_setting(name)] == []


def every_setting(model: type[BaseModel] = Config, place: str = "", depth: int = 6) -> Iterator[str]:
    """Yield the place of every setting: `train.loss.kl`, `tasks.judge.parts.weight`."""
    for name, field in model.model_fields.items():
        yield (here := f"{place}.{name}".lstrip("."))
        inside = [field.annotation]
        while inside and depth:
            one = inside.pop()
            if isinstance(one, type) and issubclass(one, BaseModel):
                yield from every_setting(one, here, depth - 1)
            inside += get_args(one)


def test_every_setting_that_a_page_names_is_one() -> None:
    ends = {
        ".".join(parts[n:])
        for parts in (place.split(".") for place in every_setting())
        for n in range(len(parts))
    }
    sections = "tasks|rollout|train|eval|checkpoint|buffer|faults|model|sync|source|strategy|judge|agent_loop"
    named = re.compile(rf"`((?:{sections})(?:\.[a-z_0-9]+)+)(?:[:=] ?[^`]*)?`")
    pages = [ROOT / "README.md", ROOT / "SECURITY.md", *(ROOT / "docs").glob("*.md")]
    theirs = {"rollout.tensor_model_parallel_size"}  # verl's
    found = {(page.name, name) for page in pages for name in named.findall(page.read_text())}
    assert len(found) > 80
    assert {one for one in found if re.sub(r"\.\d+\b", "", one[1]) not in ends | theirs} == set()


def test_every_option_of_a_command_that_a_page_names_is_one() -> None:
    commands: Any = get_command(app)
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    line = re.compile(
        r"raypost (plan|submit|status|scale|report|samples|checkpoints|explain|audit|doctor)\b([^`\n]*)"
    )
    found = {
        (page.name, command, option)
        for page in pages
        for command, rest in line.findall(page.read_text())
        for option in re.findall(r"--[a-z][a-z-]*", rest)
    }
    assert len(found) > 15
    there = {
        name: {opt for one in made.params for opt in one.opts} for name, made in commands.commands.items()
    }
    assert {one for one in found if one[2] not in there[one[1]]} == set()
