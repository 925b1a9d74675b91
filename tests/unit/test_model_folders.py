"""A model that cannot be trained is refused by the plan: damaged files, another architecture, other sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from raypost.config import Config
from raypost.models.folder_check import CPU_HEAD_SIZES, check_folder
from raypost.models.tensor_files import read_shapes
from raypost.plan.models import model_problems, model_warnings
from tests.factories import make_config
from tests.unit.model_folders import shapes_of, write_model, write_weights
from tests.unit.tokenizers import write_tokenizer


def config_of(folder: Path, **places: Any) -> Config:
    return make_config(model__name=str(folder), **places)


def damaged(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return damage


def sharded(folder: Path, *missing: str) -> None:
    """Weights in two files, without some tensors, or a whole file."""
    (folder / "model.safetensors").unlink()
    shapes = shapes_of()
    parts = {f"part-{n}.safetensors": {name: shapes[name] for name in list(shapes)[n::2]} for n in (0, 1)}
    places = {name: part for part, those in parts.items() for name in those}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    for part, those in parts.items():
        if part not in missing:
            write_weights(folder / part, {n: shape for n, shape in those.items() if n not in missing})


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def torch_stub(folder: Path) -> None:
    without_weights(folder)
    (folder / "pytorch_model.bin").write_bytes(LFS)


def configured(**config: Any) -> Callable[[Path], None]:
    return lambda folder: (write_model(folder, **config), None)[1]


def weighted(**sizes: int) -> Callable[[Path], None]:
    return lambda folder: write_weights(folder / "model.safetensors", shapes_of(**sizes))


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 5\n"
WEIGHTS = "model.safetensors"
BAD: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "no weights": (without_weights, ["has no weights", "model.save_pretrained(folder)"]),
    "truncated": (damaged(WEIGHTS, lambda b: b[:-100]), ["model.safetensors is truncated", "copy it again"]),
    "too long": (damaged(WEIGHTS, lambda b: b + b"x"), ["longer than its header says"]),
    "empty": (damaged(WEIGHTS, lambda b: b""), ["model.safetensors is empty"]),
    "garbage": (damaged(WEIGHTS, lambda b: b"\xff" * 5000), ["is no safetensors file"]),
    "text": (damaged(WEIGHTS, lambda b: b"<html>404 not found</html>"), ["is no safetensors file"]),
    "header": (damaged(WEIGHTS, lambda b: b[:8] + b"[" + b[9:]), ["no safetensors header"]),
    "shape": (damaged(WEIGHTS, lambda b: b.replace(b"[320", b"[321", 1)), ["bytes for BF16", "copy it again"]),
    "git-lfs": (damaged(WEIGHTS, lambda b: LFS), ["is a git-lfs pointer", "git lfs pull"]),
    "git-lfs of torch": (torch_stub, ["pytorch_model.bin is a git-lfs pointer"]),
    "shard": (lambda f: sharded(f, "part-1.safetensors"), ["part-1.safetensors is missing"]),
    "tensor": (lambda f: sharded(f, "lm_head.weight"), ["'lm_head.weight' and 0 more tensors"]),
    "depth": (weighted(layers=3), ["weights of 3 layers, config.json says 2 (num_hidden_layers)"]),
    "width": (weighted(hidden=64), ["embed_tokens.weight of shape [320, 64], config.json means [320, 128]"]),
    "vocabulary": (weighted(vocab=400), ["[400, 128], config.json means [320, 128]"]),
    "mlp": (configured(intermediate_size=512), ["gate_proj.weight of shape [256, 128]", "means [512, 128]"]),
    "key heads": (configured(num_key_value_heads=4), ["k_proj.weight of shape [64, 128]", "means [128, 128]"]),
    "no head": (
        lambda f: write_weights(f / WEIGHTS, {n: s for n, s in shapes_of().items() if "lm_head" not in n}),
        ["no weights of lm_head", "tie_word_embeddings"],
    ),
    "encoder": (
        configured(architectures=["BertForMaskedLM"], model_type="bert"),
        ["'BertForMaskedLM'", "do not write text", "BertLMHeadModel does"],
    ),
    "unknown": (
        configured(architectures=["WhoForCausalLM"], model_type="who"),
        ["'WhoForCausalLM'", "model_type 'who'", "no causal language model of the installed transformers"],
    ),
    "remote code": (
        configured(architectures=["MyForCausalLM"], model_type="my", auto_map={"AutoModelForCausalLM": "m.M"}),
        ["auto_map", "runs no code that comes with a model"],
    ),
    "no architecture": (configured(architectures=None), ["has no architectures"]),
    "config": (damaged("config.json", lambda b: b[:-5]), ["config.json is no JSON"]),
    "config is a list": (damaged("config.json", lambda b: b"[]"), ["must hold a mapping"]),
    "small vocabulary": (
        lambda f: (write_model(f, shapes_of(vocab=290), vocab_size=290), None)[1],
        ["tokenizer with ids up to 300", "vocab_size of 290", "resize_token_embeddings"],
    ),
    "end outside": (
        configured(eos_token_id=[3, 5000]),
        ["eos_token_id 5000, outside of the vocabulary of 320", "generation_config.json"],
    ),
    "head_dim": (
        lambda f: (write_model(f, shapes_of(hidden=64), hidden_size=64, intermediate_size=128), None)[1],
        ["heads of 16 dimensions (head_dim)", "computes 32, 64"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_model_that_cannot_be_trained_is_refused(name: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    damage, parts = BAD[name]
    damage(folder)
    [text] = model_problems(config_of(folder))
    assert [part for part in parts if part not in text] == [], text


def test_whole_models_pass(tmp_path: Path) -> None:
    whole, parts = write_model(tmp_path / "whole"), write_model(tmp_path / "parts")
    sharded(parts)
    assert read_shapes(parts) == read_shapes(whole) == shapes_of()
    tied = write_model(tmp_path / "tied", tie_word_embeddings=True)
    write_weights(tied / WEIGHTS, {n: s for n, s in shapes_of().items() if "lm_head" not in n})
    for folder in (whole, parts, tied):
        assert model_problems(config_of(folder)) == []


@pytest.mark.parametrize("kind", ["llama", "tied", "gpt2"])
def test_what_transformers_saves_is_whole(kind: str, tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "model")
    if kind == "gpt2":
        config: Any = GPT2Config(
            n_embd=64, n_layer=2, n_head=2, vocab_size=301, eos_token_id=3, bos_token_id=1
        )
        GPT2LMHeadModel(config).save_pretrained(folder)
    else:
        config = LlamaConfig(
            vocab_size=301, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, tie_word_embeddings=kind == "tied",
        )  # fmt: skip
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="50KB")
    check_folder(folder)
    found = read_shapes(folder)
    assert found is not None and len(found) > 10


@pytest.mark.parametrize(
    ("lora", "parts"),
    [
        ({"target_modules": ["nosuch"]}, ["has 'nosuch'", "it has down_proj, gate_proj, k_proj"]),
        ({"target_modules": ["q_proj", "nosuch"]}, ["has 'nosuch'"]),
        ({"rank": 100_000}, ["rank is 100000", "smaller side of", "use at most"]),
        ({"rank": 65, "target_modules": ["k_proj"]}, ["rank is 65", "k_proj", "at most 64"]),
    ],
)
def test_adapters_without_a_place_or_larger_than_it_are_refused(
    lora: dict[str, Any], parts: list[str], tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "model")
    [text] = model_problems(config_of(folder, train__lora=lora))
    assert [part for part in parts if part not in text] == [], text
    if "65" not in text:
        assert len(model_problems(make_config(train__lora=lora))) == 1, "the model `tiny` has the same layers"


def test_adapters_that_fit_pass(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    for lora in ({"rank": 64}, {"rank": 128, "target_modules": ["q_proj", "self_attn.o_proj"]}):
        assert model_problems(config_of(folder, train__lora=lora)) == []


def test_a_name_that_is_nothing_is_refused_and_a_hub_id_warned_of() -> None:
    [text] = model_problems(make_config(model__name="nosuchmodel"))
    assert "'nosuchmodel' is neither a folder nor 'tiny'" in text and "OWNER/NAME" in text
    hub = make_config(model__name="nosuchowner/nosuchmodel")
    assert model_problems(hub) == []
    assert "not on this machine" in next(model_warnings(hub))


def test_checking_a_folder_loads_no_model_library(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    code = f"""
import sys, pathlib
from raypost.models.folder_check import check_folder
check_folder(pathlib.Path({str(folder)!r}))
assert not {{"torch", "transformers", "safetensors"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_head_sizes_are_those_of_the_installed_engine() -> None:
    file = Path(torch.__file__).parents[1] / "vllm" / "v1" / "attention" / "backends" / "cpu_attn.py"
    assert f"return {list(CPU_HEAD_SIZES)}" in file.read_text(), "read CPU_HEAD_SIZES again"
