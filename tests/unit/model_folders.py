"""A model folder that is whole as far as a plan looks into it: files and headers, and zeros for weights."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from tests.unit.tokenizers import write_tokenizer

Shapes = dict[str, tuple[int, ...]]

MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "eos_token_id": None,
}


def shapes_of(layers: int = 2, hidden: int = 128, vocab: int = 320) -> Shapes:
    """The tensors of a Llama."""
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)}
    for n in range(layers):
        layer = f"model.layers.{n}"
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        shapes |= {f"{layer}.self_attn.{p}_proj.weight": (hidden, hidden) for p in "qo"}
        shapes |= {f"{layer}.self_attn.{p}_proj.weight": (hidden // 2, hidden) for p in "kv"}
        shapes |= {f"{layer}.mlp.{p}_proj.weight": (2 * hidden, hidden) for p in ("gate", "up")}
        shapes[f"{layer}.mlp.down_proj.weight"] = (hidden, 2 * hidden)
    return shapes


def write_weights(path: Path, shapes: Shapes) -> None:
    """A safetensors file of zeros in bfloat16."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(at))


def write_model(folder: Path, shapes: Shapes | None = None, **config: Any) -> Path:
    """A Llama in a folder, with these values of its configuration."""
    write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({**MODEL, **config}))
    write_weights(folder / "model.safetensors", shapes_of() if shapes is None else shapes)
    return folder
