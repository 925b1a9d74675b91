"""A model on disk: written complete, read back as the trainer would publish it; and the random state beside it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from raypost.data.tokenizer import Tokenizer
from raypost.errors import CheckpointError
from raypost.trainer.model.folder_model import FolderModel
from raypost.trainer.model.policy import load_model, save_model
from raypost.trainer.random_state import load_random_state, random_state, save_random_state
from raypost.weights.manifest import pack, verify
from raypost.weights.tensors import as_bytes
from tests.unit.tokenizers import write_tokenizer

CONTRADICTORY = {"do_sample": False, "temperature": 0.6, "eos_token_id": [7, 8]}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder with tied weights whose generation settings transformers reads but refuses to write."""
    folder = write_tokenizer(tmp_path / "source")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(CONTRADICTORY))
    return folder


@pytest.mark.parametrize("settings", [True, False])
def test_a_written_folder_is_complete_for_transformers_and_for_engines(
    source: Path, tmp_path: Path, settings: bool
) -> None:
    if not settings:
        (source / "generation_config.json").unlink()
    model, target = load_model(str(source), "float32"), tmp_path / "hf"
    weights = {name: tensor + 1 for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_model(model, weights, source, target)
    back = AutoModelForCausalLM.from_pretrained(target).state_dict()
    assert all(torch.equal(back[name], tensor) for name, tensor in weights.items())
    ours, theirs = Tokenizer.load(source), Tokenizer.load(target)
    ids = ours.encode("What is 3 plus 4?")
    assert np.array_equal(theirs.encode("What is 3 plus 4?"), ids)
    assert AutoTokenizer.from_pretrained(target).encode("What is 3 plus 4?") == ids.tolist()
    assert (theirs.eos_ids, theirs.pad_id, theirs.has_chat_template) == (ours.eos_ids, ours.pad_id, True)
    assert len({file.stat().st_mode for file in target.iterdir()}) == 1, "who may read one file may read all"
    if settings:
        assert json.loads((target / "generation_config.json").read_text()) == CONTRADICTORY
        assert model.generation_config.eos_token_id == [7, 8], "the model in memory is as it was"


def test_a_folders_weights_are_its_own_tied_ones_once_and_have_its_logprobs(source: Path) -> None:
    model = FolderModel(source, "float32")
    manifest, buckets = pack(3, as_bytes(model.weights()), bucket_bytes=10_000)
    verify(manifest, buckets)
    plain = AutoModelForCausalLM.from_pretrained(source)
    assert [entry.name for entry in manifest.tensors] == [name for name, _ in plain.named_parameters()]
    ids = np.arange(1, 12, dtype=np.int32)
    with torch.no_grad():
        log_p = torch.log_softmax(plain(torch.from_numpy(ids.astype(np.int64))[None]).logits[0, :-1], -1)
    expected = log_p.gather(1, torch.from_numpy(ids[1:].astype(np.int64))[:, None])[:, 0].numpy()
    assert np.abs(model.canary_logprobs(ids) - expected).max() < 1e-5
    halves, _ = pack(3, as_bytes(FolderModel(source, "bfloat16").weights()), bucket_bytes=10_000)
    assert {entry.dtype for entry in halves.tensors} == {"bfloat16"} and halves.digest != manifest.digest


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(()))


def test_every_generator_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    random.gauss(0, 1), np.random.standard_normal()  # both keep half of a pair for the next call
    save_random_state(tmp_path, 1, random_state())
    expected = [random.gauss(0, 1), np.random.standard_normal(), *draw()]
    draw()
    assert not load_random_state(tmp_path, rank=0), "there was no such rank"
    assert load_random_state(tmp_path, rank=1)
    assert [random.gauss(0, 1), np.random.standard_normal(), *draw()] == expected


def test_a_damaged_random_state_is_refused_by_name(tmp_path: Path) -> None:
    save_random_state(tmp_path, 0, random_state())
    file = tmp_path / "random-0.json"
    file.write_text(file.read_text().replace('"numpy"', '"nompy"'))
    with pytest.raises(CheckpointError, match="random-0"):
        load_random_state(tmp_path, rank=0)
