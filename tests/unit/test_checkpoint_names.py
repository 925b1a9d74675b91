"""What is published under which name: exactly what transformers writes into a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPTNeoXConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from raypost.config import LoraConfig
from raypost.errors import ConfigError
from raypost.trainer.model.lora import (
    adapter_factors,
    adapter_scales,
    add_adapters,
    base_weights,
    merged_weights,
)
from raypost.weights.low_rank import merged
from raypost.weights.manifest import DOWN, UP
from raypost.weights.names import CheckpointNames, named_weights
from tests.unit.model_sizes import SIZES

NAMELESS = {"bos_token_id": None, "eos_token_id": None}
SMALL_GPT2 = {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, **NAMELESS}
CONFIGS = {
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=3),
    "qwen3 moe": lambda: Qwen3MoeConfig(**SIZES, num_experts=3, moe_intermediate_size=24, head_dim=8),
    "gpt neox": lambda: GPTNeoXConfig(**{k: v for k, v in SIZES.items() if k != "num_key_value_heads"}),
    "gpt2, tied": lambda: GPT2Config(**SMALL_GPT2),
    "phi3": lambda: Phi3Config(**SIZES),
}


def make_model(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name]())


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_names_shapes_and_values_are_those_of_the_checkpoint(name: str, loaded: Any, tmp_path: Path) -> None:
    model = make_model(name)
    model.save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    if loaded:
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
    names = CheckpointNames(model)
    got = {}
    for own, tensor in named_weights(model):
        for stored, part in names.stored(own, tensor.detach()):
            assert stored not in got
            got[stored] = part
    assert names.shapes == {stored: tuple(tensor.shape) for stored, tensor in got.items()}
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[stored], expected[stored]) for stored in got)


@pytest.mark.parametrize("name", ["phi3", "gpt2, tied"])
def test_base_and_factors_make_the_merged_weights_bit_for_bit_and_the_adapted_model(name: str) -> None:
    model = make_model(name).eval()
    plain = {own: tensor.detach().clone() for own, tensor in named_weights(model)}
    add_adapters(model, LoraConfig(rank=4, alpha=6))
    for own, parameter in model.named_parameters():
        if "lora_" in own:
            torch.nn.init.normal_(parameter, std=0.2)
    base = {own: weight.value() for own, weight in base_weights(model)}
    assert base.keys() == plain.keys() and all(torch.equal(base[own], plain[own]) for own in base)
    factors = {own: weight.value() for own, weight in adapter_factors(model)}
    scales = adapter_scales(model)
    assert set(scales.values()) == {1.5} and len(factors) == 2 * len(scales)
    whole = {own: weight.value() for own, weight in merged_weights(model)}
    again = make_model(name).eval()
    for own, parameter in again.named_parameters():
        if own in scales:
            parameter.data = merged(base[own], factors[own + DOWN], factors[own + UP], scales[own])
            assert not torch.equal(parameter, base[own])
        assert torch.equal(parameter, whole[own])
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert (again(ids).logits - model(ids).logits).abs().max() < 1e-4


def test_all_linear_layers_are_neither_routers_nor_experts_nor_the_head() -> None:
    model = make_model("mixtral")
    add_adapters(model, LoraConfig())
    assert {name.split(".", 4)[-1] for name in adapter_scales(model)} == {
        f"{one}_proj.weight" for one in "qkvo"
    }


@pytest.mark.parametrize(
    ("name", "target", "why"),
    [
        ("mixtral", "gate", "MixtralTopKRouter"),
        ("gpt2, tied", "lm_head", "tied to the embedding"),
        ("phi3", "embed_tokens", "Embedding"),
        ("phi3", "no_such_layer", "no_such_layer"),
    ],
)
def test_layers_whose_adapters_engines_cannot_add_are_refused_by_name(
    name: str, target: Any, why: str
) -> None:
    with pytest.raises(ConfigError, match=rf"train\.lora.*{why}"):
        add_adapters(make_model(name), LoraConfig(target_modules=(target,)))
