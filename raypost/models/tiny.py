"""The tiny model: made here, and warmed up so far that it knows more than it does.

Owns a tokenizer for sums, small programs (programs.py) or calls of a calculator (calls.py), a Llama of some 0.3 million
parameters, and a short supervised warm-up. The warm-up, here on sums of one-digit numbers, shows both answers off the
top of the head and worked ones, the former ever more often:

    State the final answer to the following arithmetic problem: 4 + 3 - 9 + 5 =     4 + 3 - 9 + 5 =
     3                                                                              7 - 9 + 5 =
                                                                                    -2 + 5 =
                                                                                    3

So the model can work a sum out, or write a program step by step, mostly blurts, and is then mostly wrong: what
reinforcement learning has to find out is that working pays, and to make the working reliable.

Does not own where models are kept (resolve.py does). Invariant: no problem that is held out for evaluation
occurs in the warm-up.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypost.config import SourceConfig
from raypost.data.gym import gym_dataset
from raypost.data.prompt import is_held_out
from raypost.errors import ConfigError
from raypost.models import calls, programs

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

log = logging.getLogger(__name__)

REVISION = 2
"""Raised when the same recipe makes another model, so that cached ones are not taken for it."""

DATASET = "chain_sum"
"""The only reasoning-gym dataset that the model's vocabulary can read."""

MAX_POSITIONS = 256
"""Longest prompt and response together, tokens."""

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
SPECIAL_TOKENS = {"eos_token": EOS, "pad_token": PAD, "unk_token": UNKNOWN}

SUM = re.compile(r"State the final answer to the following arithmetic problem: \d+( [+-] \d+)* =")
"""A question of the dataset."""

_IGNORED = -100
"""Target that cross entropy leaves out."""


@dataclass(frozen=True, slots=True)
class TinyRecipe:
    """How the model is made. What is given under `model.options` replaces these."""

    hidden_size: int = 128
    intermediate_size: int = 256
    num_layers: int = 2
    num_heads: int = 4
    """Heads of `hidden_size / num_heads` dimensions: engines on CPU want 32, 64 or 128."""
    corpus: str = "sums"
    """What it is warmed up with: one of CORPORA."""
    terms: int = 4
    """Numbers in a sum, or operands of a program."""
    steps: int = 600
    """Optimizer steps of the warm-up."""
    batch_size: int = 64
    """Sums a step."""
    learning_rate: float = 3e-3
    """Highest rate; it rises over 20 steps and then falls linearly to almost nothing."""
    blurt_share: float = 0.9
    """Share of hasty answers, those without working, at the end of the warm-up; it grows from 0."""

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> TinyRecipe:
        """Return the recipe with these options. Raises ConfigError for one that is unknown or impossible."""
        defaults = {f.name: f.default for f in dataclasses.fields(cls)}
        for name, value in options.items():
            if name not in defaults:
                raise ConfigError(
                    f"model.options has no {name!r} for the tiny model: it has {', '.join(defaults)}"
                )
            if name == "corpus":
                if value not in CORPORA:
                    raise ConfigError(f"model.options.corpus is {value!r}: use {' or '.join(CORPORA)}")
                continue
            wanted = type(defaults[name])
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or (wanted is int and not isinstance(value, int)) or value < 0:
                raise ConfigError(
                    f"model.options.{name} must be a non-negative {wanted.__name__}, got {value!r}"
                )
        recipe = cls(**options)
        recipe._check()
        return recipe

    def _check(self) -> None:
        for name in ("hidden_size", "intermediate_size", "num_layers", "num_heads", "batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"model.options.{name} must be at least 1, got {getattr(self, name)}")
        if self.terms < 2:
            raise ConfigError(
                f"model.options.terms must be at least 2, got {self.terms}: one number is no sum"
            )
        if self.blurt_share > 1:
            raise ConfigError(f"model.options.blurt_share must be at most 1, got {self.blurt_share}")
        if self.hidden_size % self.num_heads or self.hidden_size // self.num_heads not in (32, 64, 128):
            raise ConfigError(
                f"model.options: hidden_size {self.hidden_size} / num_heads {self.num_heads} must be 32, 64 or 128"
            )


def make_tiny(recipe: TinyRecipe, seed: int, folder: Path) -> None:
    """Make and warm up the model, and write it with its tokenizer into `folder`. Takes under a minute."""
    tokenizer = build_tokenizer(recipe)
    model = _warm_up(recipe, seed, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def build_tokenizer(recipe: TinyRecipe) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose words are the corpus's numbers, and the pieces of text between them."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=_backend(recipe),
        **SPECIAL_TOKENS,
        clean_up_tokenization_spaces=False,
    )


def write_tokenizer(recipe: TinyRecipe, folder: Path) -> None:
    """Write the tokenizer's files into `folder`, for raypost's own Tokenizer, without importing transformers."""
    _backend(recipe).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(SPECIAL_TOKENS), encoding="utf-8")


def _backend(recipe: TinyRecipe) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    corpus = CORPORA[recipe.corpus]
    texts = [text for texts in itertools.islice(corpus.examples(recipe, 0), 1000) for text in texts]
    pieces = {piece for text in texts for piece in corpus.pieces.findall(text)} | set("0123456789")
    pieces -= {PAD, EOS, UNKNOWN}
    vocabulary = {token: i for i, token in enumerate([PAD, EOS, UNKNOWN, *sorted(pieces)])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(corpus.pieces.pattern), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return backend


def problems(recipe: TinyRecipe, seed: int) -> Iterator[dict[str, Any]]:
    """Yield sums of one-digit numbers without end, none of them held out."""
    params = {"min_terms": recipe.terms, "max_terms": recipe.terms, "min_digits": 1, "max_digits": 1}
    source = SourceConfig(kind="reasoning_gym", dataset=DATASET, params=params, size=10**9)
    dataset = gym_dataset(source, seed, part=2)
    for index in range(len(dataset)):
        entry = dataset[index]
        if not is_held_out(entry["question"]):
            yield entry


def blurted(entry: dict[str, Any]) -> str:
    """Return the answer without working."""
    return f" {entry['answer']}"


def worked(entry: dict[str, Any]) -> str:
    """Return the working: in each line the sum is one number shorter, until the answer is left."""
    first, *rest = entry["metadata"]["expression"].split()
    total, lines = int(first), []
    while rest:
        sign, number, *rest = rest
        total += int(number) if sign == "+" else -int(number)
        lines.append(" ".join([str(total), *rest]))
    return "\n" + " =\n".join(lines)


@dataclass(frozen=True, slots=True)
class Corpus:
    """What a model is warmed up with, and can read afterwards."""

    examples: Callable[[TinyRecipe, int], Iterator[tuple[str, str, str]]]
    """From a recipe and a seed: (prompt, hasty answer, careful answer) without end, no prompt held out."""
    pieces: re.Pattern[str]
    """The words in a text."""
    readable: re.Pattern[str]
    """What a prompt must look like to consist of words of the model."""
    about: str
    """Its prompts, in words."""


def _sums(recipe: TinyRecipe, seed: int) -> Iterator[tuple[str, str, str]]:
    return ((e["question"], blurted(e), worked(e)) for e in problems(recipe, seed))


CORPORA = {
    "sums": Corpus(
        _sums,
        # A digit is a token, and so is everything between two digits, such as " + ".
        re.compile(r"\d|\D+"),
        SUM,
        f"sums as reasoning-gym's {DATASET} writes them",
    ),
    "programs": Corpus(
        lambda recipe, seed: programs.examples(recipe.terms, seed),
        programs.PIECES,
        programs.READABLE,
        "programs as raypost.models.programs asks for them",
    ),
    "calls": Corpus(
        lambda recipe, seed: calls.examples(problems(recipe, seed)),
        calls.PIECES,
        SUM,
        f"sums as reasoning-gym's {DATASET} writes them, in the chat template of the recipe tools",
    ),
}
"""By their names in model.options.corpus."""


def _warm_up(recipe: TinyRecipe, seed: int, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    import torch

    stream = CORPORA[recipe.corpus].examples(recipe, seed)
    rng, start = random.Random(seed), time.monotonic()
    threads = torch.get_num_threads()
    # One thread: a second gains a quarter, but a busy neighbour then costs several times as much.
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = _new_model(recipe, tokenizer)
            optimizer = torch.optim.AdamW(
                model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.0
            )
            schedule = torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda step: min((step + 1) / 20, max(0.02, 1 - step / max(1, recipe.steps)))
            )
            for step in range(recipe.steps):
                blurts = recipe.blurt_share * step / recipe.steps
                texts = [
                    (prompt, hasty if rng.random() < blurts else careful)
                    for prompt, hasty, careful in itertools.islice(stream, recipe.batch_size)
                ]
                inputs_BL, targets_BL = _batch(tokenizer, texts)
                loss = model(input_ids=inputs_BL, labels=targets_BL, use_cache=False).loss
                optimizer.zero_grad()
                torch.autograd.backward(loss)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                if step % 100 == 0 or step == recipe.steps - 1:
                    spent = time.monotonic() - start
                    log.info(
                        "tiny: warm-up step %d of %d, loss %.3f, %.0f s",
                        step + 1,
                        recipe.steps,
                        loss.item(),
                        spent,
                    )
    finally:
        torch.set_num_threads(threads)
    return model


def _new_model(recipe: TinyRecipe, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_heads,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


def _batch(tokenizer: PreTrainedTokenizerFast, texts: list[tuple[str, str]]) -> tuple[Tensor, Tensor]:
    """Return inputs and targets [B, L] of (question, response) pairs; only responses are targets."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    prompts, responses = (
        [list(ids) for ids in tokenizer([t[i] for t in texts])["input_ids"]] for i in (0, 1)
    )
    rows, targets = [], []
    for prompt, response in zip(prompts, responses, strict=True):
        answer = [*response, tokenizer.eos_token_id]
        rows.append(torch.tensor(prompt + answer))
        targets.append(torch.tensor([_IGNORED] * len(prompt) + answer))
    return (
        pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id),
        pad_sequence(targets, batch_first=True, padding_value=_IGNORED),
    )
