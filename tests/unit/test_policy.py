"""Packed rows, shared prompts and chunked logits give what single sequences give, gradients included."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from raypost.config import AdvantageConfig
from raypost.errors import ConfigError
from raypost.trainer.batch.packing import PackingRule, Segment, micro_batches
from raypost.trainer.batch.train_batch import TrainBatch, plan_batch
from raypost.trainer.model.attention import positions_of
from raypost.trainer.model.head import LogitRule, Sampling
from raypost.trainer.model.policy import Critic, Policy, load_model, pair_cost
from raypost.trainer.model.self_check import check_head, check_packing
from raypost.trainer.policy_rank import PolicyRank
from raypost.types import Group, RolloutState, SampleParams, Status
from raypost.types.packed import pack_groups
from tests.present import present
from tests.unit.model_sizes import SIZES, VOCAB

WINDOW = {"sliding_window": 5, "head_dim": 8}

ARCHITECTURES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen2 with window": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=1)
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8)),
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SIZES, **WINDOW, final_logit_softcapping=4.0, attn_logit_softcapping=2.0,
                     attn_implementation="eager")
    ),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, **WINDOW)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4)),
    "qwen3 moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8)
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=5)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**SIZES)),
    "olmo2": lambda: Olmo2ForCausalLM(Olmo2Config(**SIZES)),
    "granite": lambda: GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=2.0, attention_multiplier=0.2)),
    "gpt neox": lambda: GPTNeoXForCausalLM(
        GPTNeoXConfig(**{name: size for name, size in SIZES.items() if name != "num_key_value_heads"})
    ),
    "cohere": lambda: CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.3)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=128, initializer_range=0.3,
                   resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None)
    ),
}  # fmt: skip


def make_model(name: str = "llama") -> PreTrainedModel:
    torch.manual_seed(0)
    return ARCHITECTURES[name]().train()


def make_samples(num_groups: int = 3, size: int = 4, longest: int = 20) -> TrainBatch:
    rng = np.random.default_rng(0)
    groups = []
    for g in range(num_groups):
        prompt = rng.integers(0, VOCAB, rng.integers(1, 12)).astype(np.int32)
        states = []
        for i in range(size):
            length = int(rng.integers(1, longest)) if i else 1
            state = RolloutState(
                task="task",
                group_id=g,
                sample_index=i,
                prompt_ids=prompt,
                sample_params=SampleParams(max_tokens=64, temperature=0.7),
                status=Status.COMPLETED,
                reward=float(i),
            )
            ids = rng.integers(0, VOCAB, length).astype(np.int32)
            mask = rng.random(length) < 0.8
            mask[-1] = True
            state.append_segment(ids, np.full(length, -1.0, np.float32), np.zeros(length, np.int32), mask)
            states.append(state)
        groups.append(Group(task="task", group_id=g, states=states))
    return plan_batch(pack_groups(groups), AdvantageConfig(), 1)


def test_what_a_token_could_not_be_reaches_the_forward_pass() -> None:
    batch = make_samples(1, 2)
    for sample in batch.samples:
        sample.state.sample_params = SampleParams(max_tokens=64, min_tokens=1, stop_token_ids=(3,))
    (micro,) = micro_batches(batch.samples, 0, 1, single(batch))[:1]
    rank = SimpleNamespace(_tensor=torch.from_numpy, _engine=lambda *inputs: inputs[3])
    sampling: Any = PolicyRank._forward(rank, micro)  # type: ignore[arg-type]
    assert present(sampling.barred_TS).tolist() == present(micro.barred_TS).tolist()


def gradients(policy: Policy, batch: TrainBatch, rule: PackingRule, with_entropy: bool = False) -> Any:
    """Logprob column, entropy column and gradients of a weighted sum of them, through all micro-batches."""
    policy.zero_grad()
    columns = np.zeros((2, batch.num_tokens), np.float32)
    weights = np.random.default_rng(1).normal(size=batch.num_tokens).astype(np.float32)
    for micro in micro_batches(batch.samples, 0, 1, rule):
        logprobs_T, entropy_T = policy(
            torch.from_numpy(micro.input_ids_BL),
            torch.from_numpy(micro.index_T),
            torch.from_numpy(micro.targets_T),
            Sampling(torch.from_numpy(micro.temperatures_T)),
            micro.segments,
        )
        weights_T = torch.from_numpy(weights[micro.places_T])
        loss = (weights_T * (logprobs_T + 0.3 * entropy_T if with_entropy else logprobs_T)).sum()
        torch.autograd.backward(loss)
        columns[0, micro.places_T] = logprobs_T.detach()
        columns[1, micro.places_T] = entropy_T.detach()
    return columns, {n: p.grad.clone() for n, p in policy.model.named_parameters() if p.grad is not None}


def assert_equal(got: Any, expected: Any, tolerance: float = 1e-5) -> None:
    assert np.abs(got[0] - expected[0]).max() < tolerance
    assert got[1].keys() == expected[1].keys()
    for name, grad in got[1].items():
        scale = max(1.0, expected[1][name].abs().max().item())
        assert (grad - expected[1][name]).abs().max().item() < tolerance * scale, name


def single(batch: TrainBatch) -> Any:
    """A micro-batch for every sample: the truth."""
    return PackingRule(max(sample.num_inputs for sample in batch.samples), packed=False)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_packed_rows_and_shared_prompts_equal_single_sequences(name: str) -> None:
    batch, policy = make_samples(), Policy(make_model(name))
    policy.chunked = False
    expected = gradients(policy, batch, single(batch))
    policy.chunked = True
    policy.set_packed(True)
    rules = {
        "packed": PackingRule(150, share_prompts=False),
        "shared": PackingRule(400, pair_cost=pair_cost(policy.model)),
    }
    for rule in rules.values():
        assert_equal(gradients(policy, batch, rule), expected)
    shared = [
        m
        for m in micro_batches(batch.samples, 0, 1, rules["shared"])
        for s in present(m.segments)
        if s.prefix_length
    ]
    assert shared


def test_long_responses_after_short_prompts_and_the_reverse_are_equal_too() -> None:
    # The two ways to compute a response's attention: a mask over the prompt, or the prompt asking in vain.
    for prompt, longest in ((40, 6), (3, 60)):
        batch = make_samples(1, 5, longest)
        for sample in batch.samples:
            sample.state.prompt_ids = np.arange(prompt, dtype=np.int32)
        policy = Policy(make_model())
        expected = gradients(policy, batch, single(batch))
        policy.set_packed(True)
        assert_equal(gradients(policy, batch, PackingRule(400)), expected)


def test_gradient_checkpointing_changes_nothing() -> None:
    batch, policy, rule = make_samples(), Policy(make_model()), PackingRule(100, pair_cost=0.001)
    policy.set_packed(True)
    expected = gradients(policy, batch, rule)
    policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_equal(gradients(policy, batch, rule), expected, tolerance=1e-6)


def test_positions_go_on_from_the_prompt() -> None:
    segments = [Segment(0, 3), Segment(3, 2, 0, 3), Segment(5, 4, 0, 3), Segment(9, 2)]
    assert positions_of(segments).tolist() == [0, 1, 2, 3, 4, 3, 4, 5, 6, 0, 1]


# ---------------------------------------------------------------- the head


@pytest.mark.parametrize("name", ["llama", "gemma2", "cohere"])
@pytest.mark.parametrize("rows", [1, 7, 10_000])
def test_logits_in_chunks_equal_logits_as_a_whole(name: str, rows: int) -> None:
    batch = make_samples()
    model = make_model(name)
    policy = Policy(model, max_logit_bytes=4 * VOCAB * rows, entropy_gradient=True)
    chunked = gradients(policy, batch, PackingRule(400, packed=False), with_entropy=True)
    policy.chunked = False
    assert_equal(chunked, gradients(policy, batch, PackingRule(400, packed=False), with_entropy=True))


def test_the_head_never_makes_more_logits_than_allowed() -> None:
    policy, seen = Policy(make_model(), max_logit_bytes=4 * VOCAB * 6), []

    class Watch(LogitRule):
        def __call__(self, output_CV: Tensor) -> Tensor:
            seen.append(len(output_CV))
            return output_CV

    policy.head._rule = Watch()
    gradients(policy, make_samples(), PackingRule(400, packed=False))
    assert max(seen) == 6


def test_a_head_that_is_not_understood_runs_as_the_model_has_it(caplog: pytest.LogCaptureFixture) -> None:
    class Shifted(LlamaForCausalLM):  # type: ignore[misc]  # transformers has no types
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            result = super().forward(*args, **kwargs)
            result.logits = result.logits * torch.linspace(1, 2, VOCAB)
            return result

    torch.manual_seed(0)
    policy = Policy(Shifted(LlamaConfig(**SIZES)))
    with caplog.at_level(logging.INFO):
        check_head(policy, policy)
    assert not policy.chunked and "its logits are made whole" in caplog.text
    policy = Policy(make_model("cohere"))
    check_head(policy, policy)
    assert policy.chunked


# ---------------------------------------------------------------- the check at the start


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures_that_pack_pass_the_check(name: str) -> None:
    policy = Policy(make_model(name))
    check_packing(policy, policy, max_length=64)
    assert policy.packed and policy.training
    check_head(policy, policy)
    assert policy.chunked


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_critic_is_checked_too(name: str) -> None:
    critic = Critic(make_model(name))
    torch.nn.init.normal_(critic.value.weight)
    check_packing(critic, critic, max_length=64)
    assert critic.packed


def test_a_model_whose_state_runs_along_the_row_is_refused() -> None:
    torch.manual_seed(0)
    config = MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4)
    policy = Policy(MambaForCausalLM(config))
    with pytest.raises(
        ConfigError, match=r"MambaForCausalLM cannot train on packed rows: .*train.packing: false"
    ):
        check_packing(policy, policy, max_length=64)
    assert not policy.packed


def test_an_attention_that_ignores_the_segments_is_refused() -> None:
    policy = Policy(make_model())
    layer = policy.model.model.layers[1].self_attn
    forward = layer.forward

    def mixing(*args: Any, row: Any = None, **kwargs: Any) -> Any:
        from raypost.trainer.model.attention import row_attention

        whole = row_attention([Segment(0, kwargs["hidden_states"].shape[1])], torch.device("cpu"))
        return forward(*args, row=whole, **kwargs)

    layer.forward = mixing
    with pytest.raises(ConfigError, match=r"packed rows change its outputs by .*, more than 0\.001"):
        check_packing(policy, policy, max_length=64)


def test_a_window_that_is_not_respected_is_refused_if_a_sequence_could_exceed_it() -> None:
    torch.manual_seed(0)
    model = Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=20))
    for layer in model.model.layers:
        layer.self_attn.sliding_window = None
    policy = Policy(model)
    check_packing(policy, policy, max_length=20)
    policy.set_packed(False)
    with pytest.raises(ConfigError, match="packed rows change its outputs"):
        check_packing(policy, policy, max_length=64)


def test_scores_that_are_capped_are_capped_by_every_attention(tmp_path: Path) -> None:
    # The attention that transformers would choose leaves the cap out.
    make_model("gemma2").save_pretrained(tmp_path)
    ids_BL = torch.arange(24)[None]
    fused = Gemma2ForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa").eval()
    capped = load_model(str(tmp_path), "float32").eval()
    with torch.no_grad():
        assert (capped(ids_BL).logits - fused(ids_BL).logits).abs().max() > 0.1
    policy = Policy(capped)
    check_packing(policy, policy, max_length=64)
    assert policy.packed


def test_layers_of_a_foreign_type_are_refused_by_name() -> None:
    policy = Policy(make_model("qwen3"))
    policy.model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ConfigError, match="layers of type linear_attention"):
        check_packing(policy, policy, max_length=64)


# ---------------------------------------------------------------- the critic


def test_a_new_critic_expects_nothing_and_learns_from_packed_rows() -> None:
    batch, critic = make_samples(), Critic(make_model())
    rule = PackingRule(400, pair_cost=0.001)
    critic.set_packed(True)
    optimizer = torch.optim.Adam(critic.parameters(), lr=0.01)
    (micro,) = micro_batches(batch.samples, 0, 1, rule)
    targets_T = torch.from_numpy(micro.sample_T).float() % 3
    losses = []
    for _ in range(30):
        values_T = critic(
            torch.from_numpy(micro.input_ids_BL), torch.from_numpy(micro.index_T), micro.segments
        )
        losses.append((values_T - targets_T).square().mean())
        if len(losses) == 1:
            assert values_T.abs().max() == 0.0
        optimizer.zero_grad()
        torch.autograd.backward(losses[-1])
        optimizer.step()
    assert losses[-1] < 0.3 * losses[0]
