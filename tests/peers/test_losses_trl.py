"""The losses, advantages and corrections against TRL's own code on shared random cases, in float64.

TRL's formulas live inside its trainers, so real GRPO and RLOO trainers are made, around a model that is never asked:
what they would generate, score and compute with it (tokens, rewards, logprobs, entropies) is fed to them. All that is
compared runs in TRL: `_generate_and_score_completions`, from rewards to advantages and importance ratios, and
`_compute_loss`, whose gradient by the logprobs is compared as well.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.trainer.utils import selective_log_softmax_and_entropy

from raypost.config import AdvantageConfig, CorrectionConfig, LossConfig
from raypost.trainer.algorithm.advantage import Scored, compute_advantages
from raypost.trainer.algorithm.corrections import Correction, correct
from raypost.trainer.algorithm.losses import LossTokens, policy_objective, sequence_scales
from raypost.trainer.algorithm.rewards import kl_rewards
from raypost.trainer.model.logprobs import chosen_logprobs

GROUPS, SIZE, LONGEST = 2, 4, 8
COUNT = GROUPS * SIZE


class Fed:
    """What a trainer is fed instead of what it would generate and compute."""

    model: torch.nn.Module

    def feed(self, case: Case) -> Fed:
        self.case = case
        self.current_gradient_accumulation_steps = 1
        self.use_vllm = case.use_vllm
        # The trainer would load a reference of its own for a coefficient in its configuration.
        self.beta, self.ref_model = case.beta, "reference"
        self.model.train()
        return self

    def _generate(self, prompts: Any) -> Any:
        case = self.case
        ids = [[1] * int(length) for length in case.lengths]
        masks = [
            row[: int(length)].int().tolist() for row, length in zip(case.mask, case.lengths, strict=True)
        ]
        rollout = [row[: int(n)].tolist() for row, n in zip(case.rollout, case.lengths, strict=True)]
        prompt_ids = [[2]] * COUNT
        if isinstance(self, RLOOTrainer):
            return prompt_ids, ids, [""] * COUNT
        return prompt_ids, ids, masks, [""] * COUNT, rollout, {}, None, [None] * COUNT

    def _calculate_rewards(self, *_: Any) -> Any:
        return self.case.rewards[:, None]

    def _get_per_token_logps_and_entropies(self, model: Any, *_: Any, **__: Any) -> Any:
        if model == "policy":
            return self.case.logprobs, self.case.entropy, None
        return (self.case.reference if model == "reference" else self.case.old), None, None


class FedGRPO(Fed, GRPOTrainer):  # type: ignore[misc]  # TRL has no types
    pass


class FedRLOO(Fed, RLOOTrainer):  # type: ignore[misc]  # TRL has no types
    pass


class Case:
    """Random padded tokens of two groups, with a mask of tool tokens inside the responses."""

    def __init__(self, seed: int, beta: float = 0.0, use_vllm: bool = False) -> None:
        g = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Any:
            return torch.rand(*shape, generator=g, dtype=torch.float64)

        self.beta, self.use_vllm = beta, use_vllm
        self.lengths = torch.randint(2, LONGEST + 1, (COUNT,), generator=g)
        self.lengths[seed % COUNT] = LONGEST
        inside = torch.arange(LONGEST)[None] < self.lengths[:, None]
        self.mask = inside & (random(COUNT, LONGEST) < 0.75)
        self.mask[:, 0] = True
        self.rewards = (random(COUNT) * 4).round() / 2
        self.old = -4 * random(COUNT, LONGEST)
        noise = [0.5 * torch.randn(COUNT, LONGEST, generator=g, dtype=torch.float64) for _ in range(3)]
        # TRL keeps what the engine reports in float32.
        self.rollout, self.reference = (self.old + noise[0]).float().double(), self.old + noise[1]
        self.logprobs = (self.old + noise[2]).requires_grad_()
        self.entropy = random(COUNT, LONGEST)


@pytest.fixture(scope="module")
def make_trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A trainer of TRL with these settings."""
    words = {f"w{i}": i for i in range(9)} | {"<pad>": 9, "<eos>": 10}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, "<pad>")), pad_token="<pad>", eos_token="<eos>"
    )
    model = GPT2LMHeadModel(GPT2Config(vocab_size=11, n_positions=16, n_embd=4, n_layer=1, n_head=1,
                                       bos_token_id=10, eos_token_id=10))  # fmt: skip

    def make(kind: Any = FedGRPO, **settings: Any) -> Any:
        config = {FedGRPO: GRPOConfig, FedRLOO: RLOOConfig}[kind](
            output_dir=str(tmp_path_factory.mktemp("trl")), use_cpu=True, bf16=False, report_to=[],
            per_device_train_batch_size=COUNT, num_generations=SIZE, max_completion_length=LONGEST,
            gradient_checkpointing=False, **settings,
        )  # fmt: skip
        return kind(
            model=model, args=config, processing_class=tokenizer, reward_funcs=lambda **_: [0.0] * COUNT,
            train_dataset=Dataset.from_dict({"prompt": ["w1"] * COUNT}),
        )  # fmt: skip

    return make


def scored_by_trl(trainer: Any, case: Case) -> Any:
    return trainer.feed(case)._generate_and_score_completions([{"prompt": "w1"}] * COUNT)


def trls_loss(trainer: Any, case: Case) -> Any:
    """TRL's loss and its gradient by the logprobs, and what it computed before."""
    batch = scored_by_trl(trainer, case)
    if "old_per_token_logps" not in batch:
        # Left out where a step is one update; the ratio would be 1 everywhere.
        batch["old_per_token_logps"] = case.old
    loss = trainer._compute_loss("policy", batch)
    (gradient,) = torch.autograd.grad(loss, case.logprobs)
    return loss.item(), gradient, batch


def our_loss(
    case: Case, batch: Any, aggregation: Any = "token", correction: Any = None, **fields: Any
) -> Any:
    """The same by raypost, from the same advantages."""
    lengths = case.mask.sum(-1)
    config = LossConfig(aggregation=aggregation, **fields)
    scales = torch.from_numpy(sequence_scales(aggregation, lengths.tolist(), LONGEST))
    tokens = LossTokens(
        logprobs_T=case.logprobs[case.mask],
        entropy_T=case.entropy[case.mask],
        proximal_T=case.old[case.mask],
        rollout_T=case.rollout[case.mask],
        advantages_T=batch["advantages"].repeat_interleave(lengths),
        rows_T=torch.arange(COUNT).repeat_interleave(lengths),
        num_rows=COUNT,
        reference_T=case.reference[case.mask] if case.beta else None,
    )
    given = correction(tokens) if correction else Correction.none(tokens.proximal_T)
    loss = policy_objective(tokens, given, scales.repeat_interleave(lengths), config).loss
    (gradient,) = torch.autograd.grad(loss, case.logprobs)
    return loss.item(), gradient


def check(trainer: Any, case: Case, **fields: Any) -> None:
    expected, expected_gradient, batch = trls_loss(trainer, case)
    loss, gradient = our_loss(case, batch, **fields)
    assert loss == pytest.approx(expected, rel=1e-6, abs=1e-9) and abs(expected) > 1e-6
    assert torch.allclose(gradient, expected_gradient, rtol=1e-6, atol=1e-9)
    assert gradient.abs().max() > 1e-3


SEEDS = range(5)


# ---------------------------------------------------------------- advantages


def advantages(case: Case, kind: str, token_rewards: Any = None, **fields: Any) -> Any:
    lengths = case.mask.sum(-1).numpy()
    scored = Scored(case.rewards.numpy(), lengths, [SIZE] * GROUPS, token_rewards_M=token_rewards)
    got = compute_advantages(scored, AdvantageConfig(kind=kind, **fields)).advantages_M
    return got[np.cumsum(lengths) - 1]


@pytest.mark.parametrize("kind, scale", [("grpo", "group"), ("dr_grpo", "none")])
def test_advantages_are_those_of_trls_grpo(make_trainer: Any, kind: str, scale: float) -> None:
    trainer = make_trainer(scale_rewards=scale)
    for seed in SEEDS:
        case = Case(seed)
        expected = scored_by_trl(trainer, case)["advantages"]
        assert np.allclose(advantages(case, kind, std_eps=1e-4), expected, rtol=1e-6, atol=1e-9)
        assert expected.abs().max() > 0.1


def test_advantages_are_those_of_trls_rloo(make_trainer: Any) -> None:
    trainer = make_trainer(FedRLOO, beta=0.0)
    for seed in SEEDS:
        case = Case(seed)
        expected = scored_by_trl(trainer, case)["advantages"]
        assert np.allclose(advantages(case, "rloo"), expected, rtol=1e-6, atol=1e-9)
        assert expected.abs().max() > 0.1


def test_the_divergence_in_the_reward_is_that_of_trls_rloo(make_trainer: Any) -> None:
    trainer = make_trainer(FedRLOO, beta=0.0)
    for seed in SEEDS:
        case = Case(seed, beta=0.3)
        case.mask = torch.arange(LONGEST)[None] < case.lengths[:, None]
        expected = scored_by_trl(trainer, case)["advantages"]
        penalties = kl_rewards("k1", case.old[case.mask], case.reference[case.mask], 0.3)
        assert np.allclose(advantages(case, "rloo", penalties), expected, rtol=1e-6, atol=1e-9)
        assert not np.allclose(advantages(case, "rloo"), expected, atol=1e-3)


# ---------------------------------------------------------------- losses


@pytest.mark.parametrize("loss_type, aggregation", [
    ("grpo", "sequence"), ("bnpo", "token"), ("dapo", "token"), ("dr_grpo", "constant"),
])  # fmt: skip
def test_the_clipped_loss_is_trls_under_every_aggregation(
    make_trainer: Any, loss_type: str, aggregation: Any
) -> None:
    trainer = make_trainer(loss_type=loss_type, epsilon=0.2, epsilon_high=0.28)
    for seed in SEEDS:
        check(trainer, Case(seed), aggregation=aggregation)


def test_the_dual_clip_is_trls_delta(make_trainer: Any) -> None:
    trainer = make_trainer(loss_type="dapo", epsilon=0.2, epsilon_high=0.28, delta=1.4)
    for seed in SEEDS:
        check(trainer, Case(seed), dual_clip=1.4)


def test_gspo_is_trls_sequence_level(make_trainer: Any) -> None:
    trainer = make_trainer(
        loss_type="grpo", importance_sampling_level="sequence", epsilon=0.1, epsilon_high=0.15
    )
    for seed in SEEDS:
        check(trainer, Case(seed), kind="gspo", aggregation="sequence", clip_low=0.1, clip_high=0.15)


def test_cispo_is_trls(make_trainer: Any) -> None:
    # TRL's epsilon_high is the cap itself.
    trainer = make_trainer(loss_type="cispo", epsilon_high=1.5)
    for seed in SEEDS:
        check(trainer, Case(seed), kind="cispo", clip_low=1.0, clip_high=0.5)


def sapo(tokens: LossTokens, config: Any) -> Any:
    """Soft gates in place of clips, arXiv 2511.20347: a loss of one's own."""
    ratio_T = torch.exp(tokens.logprobs_T - tokens.proximal_T)
    sharp_T = torch.where(tokens.advantages_T > 0, 1.0, 1.05)
    gate_T = torch.sigmoid(sharp_T * (ratio_T - 1)) * 4 / sharp_T
    return -gate_T * tokens.advantages_T, torch.zeros_like(tokens.rows_T, dtype=torch.bool)


def test_a_loss_by_import_path_is_trls_sapo(make_trainer: Any) -> None:
    trainer = make_trainer(loss_type="sapo", sapo_temperature_pos=1.0, sapo_temperature_neg=1.05)
    for seed in SEEDS:
        check(trainer, Case(seed), kind=f"{__name__}:sapo", aggregation="sequence")


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("loss_type, aggregation", [("grpo", "sequence"), ("dapo", "token")])
def test_the_divergence_in_the_loss_is_trls(
    make_trainer: Any, loss_type: str, aggregation: Any, unbiased: bool
) -> None:
    trainer = make_trainer(
        loss_type=loss_type, epsilon=0.2, epsilon_high=0.28, use_bias_correction_kl=unbiased
    )
    for seed in SEEDS:
        kl = {"coefficient": 0.3, "kind": "k3", "unbiased": unbiased}
        check(trainer, Case(seed, beta=0.3), aggregation=aggregation, kl=kl)


def test_the_entropy_bonus_is_trls(make_trainer: Any) -> None:
    trainer = make_trainer(loss_type="dapo", epsilon=0.2, epsilon_high=0.28, entropy_coef=0.05)
    for seed in SEEDS:
        check(trainer, Case(seed), entropy_coefficient=0.05)


# ---------------------------------------------------------------- corrections


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
@pytest.mark.parametrize("low, high", [(0.6, 1.5), (None, 2.0)])
def test_importance_sampling_is_trls(make_trainer: Any, mode: str, low: Any, high: Any) -> None:
    trainer = make_trainer(
        loss_type="dapo", epsilon=0.2, epsilon_high=0.28, vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode=mode, vllm_importance_sampling_clip_min=low,
        vllm_importance_sampling_clip_max=high,
    )  # fmt: skip
    level, action = mode.split("_")
    bounds = {"level": level, "lower": low, "upper": high}
    settings: dict[str, Any] = {"weight": bounds} if action == "truncate" else {
        "weight": {"level": level, "upper": None}, "reject": bounds,
    }  # fmt: skip
    config = CorrectionConfig(**settings)

    def correction(tokens: LossTokens) -> Any:
        staleness = torch.zeros_like(tokens.rows_T)
        return correct(config, tokens.proximal_T, tokens.rollout_T, tokens.rows_T, COUNT, staleness)

    for seed in SEEDS:
        check(trainer, Case(seed, use_vllm=True), correction=correction)


# ---------------------------------------------------------------- logprobs


def test_logprobs_and_entropy_and_their_gradients_are_trls() -> None:
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(50, 37, generator=g, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 37, (50,), generator=g)
    pulls = torch.randn(2, 50, generator=g, dtype=torch.float64)
    expected = selective_log_softmax_and_entropy(logits, targets, temperature=0.7)
    got = chosen_logprobs(logits, targets, torch.full((50,), 0.7, dtype=torch.float64), entropy_gradient=True)
    gradients = []
    for logprobs, entropy in (expected, got):
        total = (logprobs * pulls[0] + entropy * pulls[1]).sum()
        gradients.append(torch.autograd.grad(total, logits)[0])
    assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(got, expected, strict=True))
    assert torch.allclose(gradients[0], gradients[1], rtol=1e-9, atol=1e-12)
