"""The light tokenizer gives the ids, the text and the chat prompts that transformers gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raypost.data.tokenizer import Tokenizer
from raypost.errors import ConfigError
from tests.unit.tokenizers import TEXTS, write_tokenizer


def test_ids_text_and_chat_prompt_equal_those_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = write_tokenizer(tmp_path)
    messages = [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": "3 + 4 = <?> & 'x'"},
    ]
    theirs, tokenizer = AutoTokenizer.from_pretrained(folder), Tokenizer.load(folder)
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert tokenizer.encode(text).tolist() == ids
        bare = theirs(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.encode(text, add_special_tokens=False).tolist() == bare
        assert tokenizer.decode(tokenizer.encode(text)) == theirs.decode(ids, skip_special_tokens=True)
    prompt = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.chat(messages) == prompt
    assert (tokenizer.eos_ids, tokenizer.pad_id) == ((theirs.eos_token_id,), theirs.pad_token_id)
    assert tokenizer.vocab_size == len(theirs)


def test_importing_it_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, raypost.data.tokenizer; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=240, check=False).returncode == 0


def test_ids_are_int32_and_a_saved_length_limit_does_not_cut(tmp_path: Path) -> None:
    ids = Tokenizer.load(write_tokenizer(tmp_path)).encode("What is 3 plus 4, and 5, and 6?")
    assert ids.dtype == np.int32
    assert len(ids) > 4


def test_decode_takes_arrays_and_leaves_out_special_tokens_only(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path))
    assert tokenizer.decode(tokenizer.encode("7<|im_end|><note><pad>")) == "7<note>"
    assert tokenizer.decode(np.empty(0, np.int32)) == ""


def test_every_source_of_an_end_token_counts_once_the_models_own_first(tmp_path: Path) -> None:
    folder = write_tokenizer(
        tmp_path, generation_config={"eos_token_id": [7, 3]}, config={"eos_token_id": 9, "pad_token_id": 5}
    )
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.eos_ids == (7, 3, 9)
    assert tokenizer.pad_id == 0


def test_without_a_pad_token_padding_is_the_end_token(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, {"eos_token": "<|im_end|>"}))
    assert tokenizer.pad_id == 3


@pytest.mark.parametrize("settings", [{}, {"eos_token": None}, {"eos_token": "<not in the vocabulary>"}])
def test_tokenizer_without_end_token_is_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    folder = write_tokenizer(tmp_path, settings, config={"eos_token_id": None})
    with pytest.raises(ConfigError, match=r"no end-of-sequence token.*set eos_token") as caught:
        Tokenizer.load(folder)
    assert str(folder) in str(caught.value)


def test_folder_without_tokenizer_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer.json: save it with the fast tokenizer"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", ["{", "[1]"])
def test_damaged_file_is_refused_by_name(tmp_path: Path, name: str, content: str) -> None:
    (write_tokenizer(tmp_path) / name).write_text(content)
    with pytest.raises(ConfigError) as caught:
        Tokenizer.load(tmp_path)
    assert name in str(caught.value)


def test_chat_without_a_template_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, {"eos_token": "<|im_end|>"}))
    assert not tokenizer.has_chat_template
    with pytest.raises(ConfigError, match="no chat template: set chat: false"):
        tokenizer.chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("template", "rendered"),
    [
        ("{{ messages | tojson }}", '[{"role": "user", "content": "<é>"}]'),
        ("{{ eos_token }}{% generation %}{{ messages[0].content }}{% endgeneration %}", "<|im_end|><é>"),
        ("{% for m in messages %}{{ m.role }}{% break %}{% endfor %}", "user"),
    ],
)
def test_templates_find_what_transformers_gives_them(tmp_path: Path, template: str, rendered: str) -> None:
    folder = write_tokenizer(tmp_path)
    (folder / "chat_template.jinja").write_text(template)
    assert Tokenizer.load(folder).chat([{"role": "user", "content": "<é>"}]) == rendered


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('no system role') }}", "{{ ''.__class__.__mro__ }}", "{% if %}", "{{ a.b.c }}"],
)
def test_failing_or_escaping_template_is_refused(tmp_path: Path, template: str) -> None:
    folder = write_tokenizer(tmp_path)
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(ConfigError, match="chat template of"):
        Tokenizer.load(folder).chat([{"role": "user", "content": "hi"}])
