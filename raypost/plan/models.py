"""Checks of a configuration against the model that it trains: its files, its sizes, and what adapters are put on.

Nothing is loaded: headers of weight files say what they hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ParamSpec

from raypost.config import Config
from raypost.errors import ConfigError
from raypost.models import tiny
from raypost.models.folder_check import CPU_HEAD_SIZES, linear_layers, read_config, sizes_of
from raypost.models.resolve import SMOLLM2, TINY, check_model, hub_folder
from raypost.models.tensor_files import read_shapes
from raypost.plan.cluster import engine_pools

P = ParamSpec("P")


def problem(check: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> list[str]:
    """Return the message of the ConfigError that a check raises, if any, as a list."""
    try:
        check(*args, **kwargs)
    except ConfigError as error:
        return [str(error)]
    return []


def model_problems(config: Config) -> list[str]:
    """Check that the model is whole, that the run fits it, and that its tokenizer can end a response."""
    problems = problem(check_model, config.model)
    if config.device == "cpu":
        problems += [
            f"{place}.tensor_parallel_size is {of.tensor_parallel_size}, but device is cpu, where an engine is one "
            "process: use 1"
            for place, of in engine_pools(config).items()
            if of.tensor_parallel_size > 1
        ]
    if problems:
        return problems
    if config.model.name == TINY:
        problems += _fit_problems(config, {"max_position_embeddings": tiny.MAX_POSITIONS})
        recipe = tiny.TinyRecipe.from_options(config.model.options)
        square, wide = (recipe.hidden_size,) * 2, (recipe.intermediate_size, recipe.hidden_size)
        layers = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), square)
        layers |= {"gate_proj": wide, "up_proj": wide, "down_proj": wide[::-1]}
        return [*problems, *_lora_problems(config, layers)]
    if (folder := local_folder(config)) is None:
        return problems
    problems += _fit_problems(config, sizes_of(read_config(folder)))
    shapes = read_shapes(folder) if Path(config.model.name).expanduser().is_dir() else None
    return problems if shapes is None else [*problems, *_lora_problems(config, linear_layers(shapes))]


def model_warnings(config: Config) -> Iterator[str]:
    """Yield what cannot be known of the model before the run."""
    if config.model.name not in (TINY, SMOLLM2) and local_folder(config) is None:
        yield (
            f"model {config.model.name!r} is not on this machine: it is fetched from the Hugging Face hub when the job "
            "starts; neither the model nor the length of prompts was checked"
        )


def local_folder(config: Config) -> Path | None:
    """Return the model's folder if the configuration names one, or a hub id that was fetched before."""
    if config.model.name in (TINY, SMOLLM2):
        return None
    folder = Path(config.model.name).expanduser()
    return folder if folder.is_dir() else hub_folder(config.model.name)


def _fit_problems(config: Config, sizes: Mapping[str, Any]) -> Iterator[str]:
    """Check the run against the sizes of the model."""
    positions, heads, head_dim = (
        sizes.get("max_position_embeddings"),
        sizes.get("heads"),
        sizes.get("head_dim"),
    )
    ranks = config.rollout.tensor_parallel_size
    if positions is not None and positions < config.max_model_len:
        yield (
            f"max_prompt_tokens + max_tokens is {config.max_model_len}, but model {config.model.name} has "
            f"{positions} positions (max_position_embeddings): lower max_tokens"
        )
    elif positions is not None and positions < config.engine_model_len:
        yield (
            f"judge.context_tokens is {config.engine_model_len}, but model {config.model.name} has {positions} "
            "positions (max_position_embeddings): lower it"
        )
    if heads is not None and heads % ranks:
        yield (
            f"rollout.tensor_parallel_size is {ranks}, but model {config.model.name} has {heads} attention "
            f"heads: use a divisor of {heads}"
        )
    if config.device == "cpu" and head_dim is not None and head_dim not in CPU_HEAD_SIZES:
        yield (
            f"model {config.model.name} has attention heads of {head_dim} dimensions (head_dim), but vLLM on CPU "
            f"computes {', '.join(map(str, CPU_HEAD_SIZES))}: use another model, or device: cuda"
        )


def _lora_problems(config: Config, layers: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Check that adapters find their layers, which are `layers` with their shapes, and are smaller than these."""
    lora = config.train.lora
    if lora is None:
        return
    wanted = {name: shape for name, shape in layers.items() if "lm_head" not in name}
    if lora.target_modules != "all-linear":
        wanted = {}
        for target in lora.target_modules:
            found = {n: shape for n, shape in layers.items() if n == target or n.endswith(f".{target}")}
            if not found:
                there = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
                yield (
                    f"train.lora.target_modules has {target!r}, which no linear layer of model {config.model.name} is "
                    f"called: it has {there}"
                )
            wanted |= found
    name, side = min(
        ((name, min(shape)) for name, shape in wanted.items()), key=lambda one: one[1], default=("", 0)
    )
    if wanted and lora.rank > side:
        yield (
            f"train.lora.rank is {lora.rank}, but {name} has a smaller side of {side}: an adapter as large as that is "
            f"no low-rank one; use at most {side}, such as 16"
        )
