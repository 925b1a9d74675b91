"""A small tokenizer in a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

TEMPLATE = (
    "{%- for m in messages %}\n"
    "{{- '<|im_start|>' + m['role'] + '\\n' + m['content'] | trim + '<|im_end|>\\n' }}\n"
    "{%- endfor %}\n{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n{%- endif %}"
)
TEXTS = ["", "What is 3 plus 4?", "  two  spaces\nand a line ", "naïve café, 東京 🙂", "a<|im_end|>b<pad>c"]


def write_tokenizer(folder: Path, settings: dict[str, Any] | None = None, **files: dict[str, Any]) -> Path:
    """A byte-level BPE tokenizer whose post-processor puts <bos> first, and the given JSON files."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    specials = ["<pad>", "<bos>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=specials, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator(TEXTS * 3, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    backend.add_tokens([AddedToken("<note>", special=False)])
    backend.enable_truncation(4)
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    default = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<|im_end|>",
        "pad_token": {"__type": "AddedToken", "content": "<pad>", "special": True},
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(default if settings is None else settings))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder
