"""Text to token ids and back, from a Hugging Face folder, without torch or transformers.

Owns encoding, decoding, the chat template and which ids end a response. Does not own prompts or limits on
their length. Reads `tokenizer.json` through the `tokenizers` library, because importing transformers costs
each process seconds and hundreds of megabytes.

Invariants: ids equal those of transformers' AutoTokenizer; a tokenizer always has an end-of-sequence id.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from raypost.data.chat_template import render_template
from raypost.errors import ConfigError
from raypost.types import IntArray

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Names of the special tokens that tokenizer_config.json may give and chat templates may use."""


class Tokenizer:
    """A loaded tokenizer. Make it with `load`."""

    def __init__(
        self,
        backend: Backend,
        *,
        eos_ids: tuple[int, ...],
        pad_id: int,
        special_tokens: dict[str, str],
        chat_template: str | None,
        origin: str,
        digest: str = "",
    ) -> None:
        """Raise ConfigError without an end-of-sequence id."""
        if not eos_ids:
            raise ConfigError(
                f"tokenizer in {origin} has no end-of-sequence token, so no response would ever end: set "
                "eos_token in tokenizer_config.json or eos_token_id in generation_config.json"
            )
        self._backend = backend
        self._special_tokens = special_tokens
        self._chat_template = chat_template
        self.origin = origin
        """The folder that it was loaded from."""
        self.eos_ids = eos_ids
        """Ids that end a response, the model's own first."""
        self.pad_id = pad_id
        self.digest = digest
        """Of what makes ids of a text, the chat template included."""

    @classmethod
    def load(cls, model_path: Path | str) -> Tokenizer:
        """Return the tokenizer of a Hugging Face model folder.

        Raises ConfigError without a tokenizer.json, without an end-of-sequence token, or when a file is
        damaged.
        """
        folder = Path(model_path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(
                f"{folder} has no tokenizer.json: save it with the fast tokenizer "
                "(AutoTokenizer.from_pretrained(...).save_pretrained(folder))"
            )
        try:
            backend = Backend.from_file(str(file))
        except Exception as error:  # the library raises plain Exception for any damage
            raise ConfigError(
                f"{file} is no tokenizer: {error}; save it again with save_pretrained"
            ) from error
        # A saved length limit or padding would change ids without a word.
        backend.no_truncation()
        backend.no_padding()
        generation, model, own = (
            _read_json(folder / name)
            for name in ("generation_config.json", "config.json", "tokenizer_config.json")
        )
        special = _special_tokens({**_read_json(folder / "special_tokens_map.json"), **own})
        known = [text for text in special.values() if backend.token_to_id(text) is not None]
        backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in known])
        from_configs = [*_as_ids(generation.get("eos_token_id")), *_as_ids(model.get("eos_token_id"))]
        eos_ids = tuple(dict.fromkeys([*from_configs, *_token_id(backend, special.get("eos_token"))]))
        pads = [*_token_id(backend, special.get("pad_token")), *_as_ids(model.get("pad_token_id")), *eos_ids]
        return cls(
            backend,
            eos_ids=eos_ids,
            pad_id=pads[0] if pads else 0,
            special_tokens=special,
            chat_template=(template := _chat_template(folder, own)),
            origin=str(folder),
            digest=_digest(file.read_bytes(), json.dumps([special, template], sort_keys=True).encode()),
        )

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included. A model's embedding may have more rows, never fewer."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def largest_id(self) -> int:
        """Largest id of a token."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=0)

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` works."""
        return self._chat_template is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> IntArray:
        """Return the ids of the text, shape [T].

        Plain text gets what the tokenizer's own post-processor adds; text that `chat` rendered already contains its
        special tokens: pass add_special_tokens=False.
        """
        return np.asarray(self._backend.encode(text, add_special_tokens=add_special_tokens).ids, np.int32)

    def lengths(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> IntArray:
        """Return how many ids each text has, as `encode` gives them; many at once are read by all cores."""
        found = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return np.fromiter(map(len, found), np.int32, len(texts))

    def decode(self, ids: Sequence[int] | IntArray, *, skip_special_tokens: bool = True) -> str:
        """Return the text of the ids, special tokens left out unless they are asked for."""
        return str(self._backend.decode(np.asarray(ids).tolist(), skip_special_tokens=skip_special_tokens))

    @property
    def special_tokens(self) -> list[str]:
        """Texts of the tokens that are no text."""
        added = self._backend.get_added_tokens_decoder().values()
        return [token.content for token in added if token.special]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template: str | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the messages ({"role": ..., "content": ...}) in a chat template: `template`, or the model's own.

        The text ends where the assistant speaks, or without `add_generation_prompt` with the last message. `tools` are
        schemas and `variables` further names that the template may use. Raises ConfigError without a template, or when
        the template refuses the messages.
        """
        text = self._chat_template if template is None else template
        if text is None:
            raise ConfigError(
                f"tokenizer in {self.origin} has no chat template: set chat: false for its tasks, name one with "
                "chat_template, or add chat_template.jinja to the folder"
            )
        given = {
            **self._special_tokens,
            **(variables or {}),
            "tools": list(tools) or None,
            "add_generation_prompt": add_generation_prompt,
        }
        return render_template(text, self.origin if template is None else "the task", given, messages)


def _read_json(file: Path) -> dict[str, Any]:
    """Return the file's mapping; empty when there is no such file. Raises ConfigError when it is damaged."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} must hold a mapping, got {type(content).__name__}")
    return content


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in SPECIAL_TOKENS:
        value = settings.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
    return tokens


def _as_ids(value: Any) -> list[int]:
    """Return one id, several, or none, as a list."""
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int)]


def _digest(*parts: bytes) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _token_id(backend: Backend, text: str | None) -> list[int]:
    return [] if text is None else _as_ids(backend.token_to_id(text))


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """Return the default chat template; a file of its own wins over tokenizer_config.json, as in transformers."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = {item["name"]: item["template"] for item in template}.get("default")
    return template if isinstance(template, str) else None
