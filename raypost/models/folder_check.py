"""Whether a Hugging Face folder is a whole language model: its configuration, its weights and its tokenizer agree.

Reads small files and headers only, never a weight, and imports neither torch nor transformers.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from raypost.data.tokenizer import Tokenizer
from raypost.errors import ConfigError
from raypost.models.tensor_files import Shapes, read_shapes

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Dimensions of an attention head that vLLM computes on CPU."""

_CAUSAL = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_NAMES = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
}
"""Names of sizes in configurations."""


def check_folder(folder: Path, *, weights: bool = True) -> None:
    """Raise ConfigError, with all that is found, unless the folder is a causal language model with a tokenizer.

    Without `weights`, theirs may still be missing.
    """
    config = read_config(folder)
    if problems := [*_architecture_problems(folder, config)]:
        raise ConfigError("\n  ".join(problems))
    shapes = read_shapes(folder) if weights else None
    sizes = sizes_of(config)
    problems = [] if shapes is None else [*_weight_problems(folder, sizes, shapes)]
    problems += _tokenizer_problems(folder, sizes, Tokenizer.load(folder))
    if problems:
        raise ConfigError("\n  ".join(problems))


def read_config(folder: Path) -> dict[str, Any]:
    """Return the model's configuration. Raises ConfigError if there is none or it is damaged."""
    file = folder / "config.json"
    if not file.is_file():
        raise ConfigError(f"model folder {folder} has no config.json: it is no Hugging Face model")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file} must hold a mapping, got {type(config).__name__}")
    return config


def sizes_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the language model's part of a configuration, with `hidden`, `layers`, `heads` and `head_dim` if known."""
    text = config.get("text_config")
    sizes: dict[str, Any] = {**config, **(text if isinstance(text, dict) else {})}
    for name, others in _NAMES.items():
        sizes[name] = next((sizes[other] for other in others if isinstance(sizes.get(other), int)), None)
    # Where keys are compressed, heads are no slices of the hidden state.
    if not sizes.get("head_dim") and sizes["hidden"] and sizes["heads"] and not sizes.get("kv_lora_rank"):
        sizes["head_dim"] = sizes["hidden"] // sizes["heads"]
    return sizes


def linear_layers(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the matrices that an adapter can be put on, by the names of their layers."""
    found = {
        name.removesuffix(".weight"): shape for name, shape in shapes.items() if name.endswith(".weight")
    }
    return {
        name: shape
        for name, shape in found.items()
        if len(shape) == 2 and not re.search(r"embed|wte|wpe", name)
    }


def _architecture_problems(folder: Path, config: Mapping[str, Any]) -> Iterator[str]:
    names, kind, causal = config.get("architectures"), config.get("model_type"), _causal_models()
    file = folder / "config.json"
    if not isinstance(names, list) or not names:
        yield f"{file} has no architectures, so no engine knows what to build: save it with model.save_pretrained"
    elif not causal or set(names) & set(causal.values()):
        return
    elif config.get("auto_map"):
        yield (
            f"{file} has architectures {names}, whose code is in the folder (auto_map): raypost runs no code that "
            "comes with a model; use an architecture that transformers has itself"
        )
    elif kind in causal:
        yield (
            f"{file} has architectures {names}, which do not write text one token after the other; for model_type "
            f"{kind!r} {causal[kind]} does: use a model of that"
        )
    else:
        yield (
            f"{file} has architectures {names} of model_type {kind!r}, which is no causal language model of the "
            "installed transformers: use one whose architecture ends in ForCausalLM"
        )


@functools.cache
def _causal_models() -> dict[str, str]:
    """Return the causal language models of the installed transformers by model_type; empty if it has no such list."""
    # Read and not imported: that takes seconds, and torch.
    try:
        spec = importlib.util.find_spec("transformers")
        places = spec.submodule_search_locations if spec is not None else None
        if not places:
            return {}
        tree = ast.parse(Path(places[0], "models", "auto", "modeling_auto.py").read_text(encoding="utf-8"))
        for node in tree.body:
            names = [getattr(one, "id", "") for one in node.targets] if isinstance(node, ast.Assign) else []
            if _CAUSAL in names and isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                return dict(ast.literal_eval(node.value.args[0]))
    except (OSError, SyntaxError, ValueError, TypeError, IndexError):
        return {}
    return {}


def _weight_problems(folder: Path, sizes: Mapping[str, Any], shapes: Shapes) -> Iterator[str]:
    """Compare the weights with the configuration's numbers, where their names say what they are."""
    if not shapes:
        yield f"model folder {folder} has weight files without a tensor: save the model again"
    layers = {int(found.group(1)) for name in shapes if (found := _LAYER.search(name))}
    if layers and sizes["layers"] is not None and layers != set(range(sizes["layers"])):
        yield (
            f"{folder} has weights of {len(layers)} layers, config.json says {sizes['layers']} (num_hidden_layers): "
            "they are of two models; copy both files from one"
        )
    if "quantization_config" in sizes:
        return
    lacking = sizes.get("tie_word_embeddings") is False and not any("lm_head" in name for name in shapes)
    if lacking and any("embed_tokens" in name for name in shapes):
        yield (
            f"{folder} has no weights of lm_head, config.json says that it is not the embedding (tie_word_embeddings: "
            "false): save the whole model"
        )
    for name, shape in shapes.items():
        expected = _expected_shape(name, sizes)
        if len(shape) == 2 and expected is not None and shape != expected:
            yield (
                f"{folder} has {name} of shape {list(shape)}, config.json means {list(expected)}: they are of two "
                "models; copy both files from one"
            )
            return


def _expected_shape(name: str, sizes: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return what the configuration makes of a matrix's shape; None where it does not say."""
    hidden, heads, head_dim, vocab = (sizes.get(key) for key in ("hidden", "heads", "head_dim", "vocab_size"))
    keys = sizes.get("num_key_value_heads") or heads
    inner = None if "expert" in name else sizes.get("intermediate_size")
    rows = {
        "embed_tokens.weight": vocab,
        "wte.weight": vocab,
        "lm_head.weight": vocab,
        "q_proj.weight": heads and head_dim and heads * head_dim,
        "k_proj.weight": keys and head_dim and keys * head_dim,
        "gate_proj.weight": inner,
    }
    last = ".".join(name.split(".")[-2:])
    size = rows.get(last)
    return (int(size), int(hidden)) if size and hidden else None


def _tokenizer_problems(folder: Path, sizes: Mapping[str, Any], tokenizer: Tokenizer) -> Iterator[str]:
    vocab = sizes.get("vocab_size")
    if not isinstance(vocab, int):
        return
    if tokenizer.largest_id >= vocab:
        yield (
            f"{folder} has a tokenizer with ids up to {tokenizer.largest_id}, config.json a vocab_size of {vocab}: "
            "resize the model's embedding (model.resize_token_embeddings), or use the model's own tokenizer"
        )
    if outside := [one for one in tokenizer.eos_ids if not 0 <= one < vocab]:
        yield (
            f"{folder} has the eos_token_id {outside[0]}, outside of the vocabulary of {vocab} (vocab_size): no "
            "response would ever end; correct it in generation_config.json or config.json"
        )
