"""Checks of a task's prompts, all of them: readable, short enough, different; and how the first of them look.

What is found is kept in `source.index_dir`, so that a job that begins does not look again at what a plan has seen.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from raypost.config import Config, TaskConfig
from raypost.data.prompt import render, text_for_engine
from raypost.data.survey import Survey, survey_source
from raypost.data.task_source import build_source, first_prompts
from raypost.data.tokenizer import Tokenizer
from raypost.errors import ConfigError
from raypost.models import tiny
from raypost.models.resolve import TINY, made_folder
from raypost.plan.models import local_folder
from raypost.plan.schedule import horizon, shares

Surveys = dict[str, Survey]
"""What was found, by the names of the sources: a task's, or `eval.source`."""


@dataclass(frozen=True, slots=True)
class ShownPrompt:
    """A prompt as an engine is given it."""

    place: str
    """Where it stands, as far as that is known."""
    text: str
    """What its tokens say, special ones included; before them, where no tokenizer is at hand."""
    num_tokens: int | None
    special_tokens: tuple[str, ...] = ()
    """Texts in it that may be tokens of their own."""


def length_problems(
    task: TaskConfig, config: Config, tokenizer: Tokenizer | None, found: Surveys
) -> list[str]:
    """Look at all prompts of a task, those that evaluate it too, and enter what is found into `found`."""
    problems = []
    own = config.evaluated(task)
    for name, one in {
        f"task {task.name!r}": task,
        **({"eval.source": own} if own is not None else {}),
    }.items():
        survey = found[name] = survey_source(one, config.seed, tokenizer)
        if survey.num_long and one.on_long_prompt == "refuse":
            more = f", and {survey.num_long - len(survey.long)} more" * (survey.num_long > len(survey.long))
            problems.append(
                f"{name}: {survey.num_long} of {survey.read} prompts do not fit max_prompt_tokens "
                f"{one.max_prompt_tokens}: {'; '.join(survey.long)}{more}; raise it, or set on_long_prompt: drop"
            )
        elif survey.num_long and not survey.trained:
            problems.append(
                f"{name}: all prompts are dropped: none fits max_prompt_tokens {one.max_prompt_tokens}, such as "
                f"{survey.long[0]}; raise it"
            )
    return problems


def prompt_lines(config: Config, found: Surveys) -> Iterator[tuple[str, str]]:
    """Yield (what, how many and how long) of every source that was looked at."""
    limits = {f"task {task.name!r}": task.max_prompt_tokens for task in config.tasks}
    for name, survey in found.items():
        text = (
            f"{survey.trained} to train of {survey.read}"
            if survey.whole
            else f"the first {survey.read} looked at"
        )
        if name == "eval.source":
            text = f"{survey.read} {'in all' if survey.whole else 'looked at'}"
        if len(survey.tokens):
            limit = limits.get(name, max(limits.values()))
            text += f"; {survey.tokens.mean():.1f} tokens on average, {survey.tokens.max()} at most, allowed {limit}"
        dropped = f"; {survey.num_long} dropped" * bool(survey.num_long)
        yield f"prompts of {name}", text + dropped


def prompt_warnings(config: Config, found: Surveys) -> Iterator[str]:
    """Yield what is odd about the prompts, but may be meant."""
    for name, survey in found.items():
        if survey.num_long:
            yield _dropped(name, survey)
        if survey.findings.twins:
            yield f"{name}: {survey.findings.twins} prompts are there more than once: {survey.twin}"
    for task in config.tasks:
        if (found_of := found.get(f"task {task.name!r}")) is None:
            continue
        blank = found_of.findings.blank_answers
        if blank and task.compares_answers:
            yield (
                f"task {task.name!r}: {blank} rows have an empty answer, which no response equals: the first is "
                f"{found_of.blank_answer}"
            )
        prompts = found_of.trained if found_of.whole else task.source.size
        groups = shares(config)[task.name] * horizon(task, config)
        if prompts is not None and prompts < groups:
            yield (
                f"task {task.name!r}: its source has {prompts} prompts for {groups} groups at work: a prompt comes "
                "several times in a batch"
            )


def dropped_prompts(config: Config, tokenizer: Tokenizer) -> list[str]:
    """Return what is dropped of each source. Raises ConfigError for prompts that do not fit and are not dropped.

    For a job whose model has just been fetched or made: before that, a plan had no tokenizer.
    """
    found: Surveys = {}
    problems = [text for task in config.tasks for text in length_problems(task, config, tokenizer, found)]
    if problems:
        raise ConfigError("\n  ".join([f"{len(problems)} problem(s)", *problems]))
    return [_dropped(name, survey) for name, survey in found.items() if survey.num_long]


def _dropped(name: str, survey: Survey) -> str:
    return (
        f"{name}: {survey.num_long} of {survey.read} prompts do not fit max_prompt_tokens and are dropped: "
        f"{'; '.join(survey.long)}{' ...' if survey.num_long > len(survey.long) else ''}"
    )


def shown_prompts(task: TaskConfig, config: Config, count: int) -> list[ShownPrompt]:
    """Return the first `count` prompts of a task as an engine is given them. Raises ConfigError."""
    tokenizer = known_tokenizer(config)
    source, shown = build_source(task, config.seed, tokenizer), []
    for number, prompt in enumerate(itertools.islice(first_prompts(source), count)):
        place_of = getattr(source, "place", None)
        place = place_of(number) if place_of is not None else f"prompt {number + 1}"
        if tokenizer is None:
            shown.append(ShownPrompt(place, prompt.text, None))
            continue
        ids, text = render(prompt, tokenizer, task), text_for_engine(prompt, tokenizer, task)
        read = tokenizer.decode(ids, skip_special_tokens=False)
        # What decoders do to spaces is no news; what became another token is.
        text = text if "".join(read.split()) == "".join(text.split()) else read
        shown.append(ShownPrompt(place, text, len(ids), tuple(tokenizer.special_tokens)))
    return shown


def known_tokenizer(config: Config) -> Tokenizer | None:
    """Return the model's tokenizer if it can be read here; for `tiny`, which may yet be made, the one it will have."""
    try:
        folder = local_folder(config) or made_folder(config.model, config.seed)
        if folder is not None:
            return Tokenizer.load(folder)
        if config.model.name != TINY:
            return None
        return _tiny_tokenizer(tiny.TinyRecipe.from_options(config.model.options))
    except ConfigError:
        return None


@functools.cache
def _tiny_tokenizer(recipe: tiny.TinyRecipe) -> Tokenizer:
    with tempfile.TemporaryDirectory() as made:
        tiny.write_tokenizer(recipe, Path(made))
        return Tokenizer.load(made)
