"""The policy loss and its logprobs against loops in float64 and against finite differences."""

import math

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from raypost.losses import chosen_logprobs, policy_loss
from raypost.policy import Policy

CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def random_tokens(num_tokens=200, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    proximal = -torch.rand(num_tokens, generator=g, dtype=dtype) * 4
    logprobs = proximal + 0.4 * torch.randn(num_tokens, generator=g, dtype=dtype)
    advantages = torch.randn(num_tokens, generator=g, dtype=dtype)
    weights = torch.rand(num_tokens, generator=g, dtype=dtype) * 2
    return logprobs, proximal, advantages, weights


def naive_loss(logprobs, proximal, advantages, weights, normaliser, clip_low, clip_high):
    total, clipped = 0.0, 0
    for new, old, a, w in zip(logprobs, proximal, advantages, weights, strict=True):
        ratio = math.exp(new - old)
        bounded = min(max(ratio, 1 - clip_low), 1 + clip_high)
        total -= w * min(ratio * a, bounded * a)
        clipped += bounded * a < ratio * a
    return total / normaliser, clipped


def test_policy_loss_is_the_formula():
    tokens = random_tokens()
    expected, clipped = naive_loss(*(t.tolist() for t in tokens), 77.0, 0.2, 0.28)
    loss, sums = policy_loss(*tokens, normaliser=77.0, **CLIP)
    assert loss.item() == pytest.approx(expected, abs=1e-12)
    ratio = (tokens[0] - tokens[1]).exp()
    assert (sums.num_tokens, sums.clipped) == (200, clipped) and 0 < clipped < 200
    assert sums.ratio == pytest.approx(ratio.sum().item())
    assert (sums.ratio_min, sums.ratio_max) == (ratio.min().item(), ratio.max().item())


def test_float32_loss_is_within_1e6_of_float64():
    tokens = random_tokens()
    exact, _ = policy_loss(*tokens, normaliser=200.0, **CLIP)
    single, _ = policy_loss(*(t.float() for t in tokens), normaliser=200.0, **CLIP)
    assert single.item() == pytest.approx(exact.item(), abs=1e-6)


def test_upper_and_lower_clip_are_different():
    def gradient(ratio, advantage):
        logprob = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
        one = torch.ones(1, dtype=torch.float64)
        policy_loss(logprob, 0 * one, advantage * one, one, normaliser=1, **CLIP)[0].backward()
        return logprob.grad.item()

    assert gradient(1.27, 1.0) == pytest.approx(-1.27) and gradient(1.29, 1.0) == 0
    assert gradient(0.81, -1.0) == pytest.approx(0.81) and gradient(0.79, -1.0) == 0
    # Outside the clip, but on the side that the objective pulls back from.
    assert gradient(0.5, 1.0) == pytest.approx(-0.5) and gradient(2.0, -1.0) == pytest.approx(2.0)


def test_losses_of_any_split_sum_to_the_loss_of_the_whole():
    tokens = random_tokens()
    whole, _ = policy_loss(*tokens, normaliser=200.0, **CLIP)
    parts = [policy_loss(*(t[a:b] for t in tokens), normaliser=200.0, **CLIP)[0] for a, b in
             [(0, 3), (3, 3), (3, 150), (150, 200)]]  # fmt: skip
    assert sum(parts).item() == pytest.approx(whole.item(), abs=1e-12)


def test_only_the_logprobs_get_a_gradient():
    tokens = [t.requires_grad_() for t in random_tokens()]
    policy_loss(*tokens, normaliser=1.0, **CLIP)[0].backward()
    assert tokens[0].grad is not None and all(t.grad is None for t in tokens[1:])


@pytest.mark.parametrize("normaliser", [0, -1, float("nan")])
def test_a_normaliser_that_is_not_positive_is_refused(normaliser):
    with pytest.raises(ValueError, match="normaliser"):
        policy_loss(*random_tokens(), normaliser=normaliser, **CLIP)


def test_chosen_logprobs_and_their_gradient_are_those_of_log_softmax():
    g = torch.Generator().manual_seed(1)
    logits = torch.randn(13, 11, generator=g, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 11, (13,), generator=g)
    temperatures = 0.5 + torch.rand(13, generator=g, dtype=torch.float64)
    pull = torch.randn(13, generator=g, dtype=torch.float64)
    log_p = torch.log_softmax(logits / temperatures[:, None], -1)
    expected = log_p.gather(-1, targets[:, None])[:, 0]
    (expected_grad,) = torch.autograd.grad((expected * pull).sum(), logits)
    got, entropy = chosen_logprobs(logits, targets, temperatures)
    (got_grad,) = torch.autograd.grad((got * pull).sum(), logits)
    assert torch.allclose(got, expected, rtol=0, atol=1e-12)
    assert torch.allclose(got_grad, expected_grad, rtol=0, atol=1e-12)
    assert torch.allclose(entropy, -(log_p.exp() * log_p).sum(-1), rtol=0, atol=1e-12)
    assert not entropy.requires_grad


def test_impossible_tokens_and_no_tokens_are_no_nan():
    logits = torch.tensor([[0.0, float("-inf"), 0.0]])
    logprobs, entropy = chosen_logprobs(logits, torch.tensor([0]), torch.ones(1))
    assert logprobs.item() == pytest.approx(-math.log(2)) and entropy.item() == pytest.approx(math.log(2))
    logprobs, entropy = chosen_logprobs(torch.empty(0, 3), torch.empty(0, dtype=torch.long), torch.empty(0))
    assert len(logprobs) == len(entropy) == 0


def tiny_policy():
    torch.manual_seed(0)
    # Llama normalises in float32 whatever its type; GPT-2 computes all of itself in float64.
    config = GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=2, n_head=2, initializer_range=0.5,
                        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)  # fmt: skip
    return Policy(GPT2LMHeadModel(config).double())


def padded_batch():
    ids = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 0, 0]])
    index = torch.tensor([1, 2, 4, 5 + 0, 5 + 2])
    targets = torch.tensor([3, 4, 9, 7, 10])
    return ids, index, targets, torch.tensor([1.0, 1.0, 1.0, 0.7, 0.7], dtype=torch.float64)


def test_policy_computes_the_models_logprobs_at_the_chosen_positions_despite_padding():
    policy = tiny_policy()
    ids, index, targets, temperatures = padded_batch()
    got, _ = policy(ids, index, targets, temperatures)
    direct = GPT2LMHeadModel(policy.model.config).double()
    direct.load_state_dict(policy.model.state_dict())
    first = torch.log_softmax(direct(ids[:1]).logits[0], -1)
    second = torch.log_softmax(direct(ids[1:, :3]).logits[0] / 0.7, -1)
    expected = [first[1, 3], first[2, 4], first[4, 9], second[0, 7], second[2, 10]]
    assert torch.allclose(got, torch.stack(expected), rtol=0, atol=1e-12)


def test_gradient_of_the_loss_on_a_model_is_that_of_finite_differences():
    policy, batch = tiny_policy(), padded_batch()
    proximal = policy(*batch)[0].detach() + torch.tensor([0.05, -0.05, 0.5, -0.5, 0.0]).double()
    advantages = torch.tensor([1.0, -1.0, 0.5, -2.0, 1.5]).double()
    weights = torch.tensor([1.0, 0.3, 2.0, 1.0, 0.7]).double()

    def loss():
        return policy_loss(policy(*batch)[0], proximal, advantages, weights, normaliser=5.0, **CLIP)[0]

    loss().backward()
    g, step = torch.Generator().manual_seed(3), 1e-6
    for name, parameter in policy.named_parameters():
        direction = torch.randn(parameter.shape, generator=g, dtype=torch.float64)
        with torch.no_grad():
            parameter += step * direction
            above = loss()
            parameter -= 2 * step * direction
            below = loss()
            parameter += step * direction
        slope = ((above - below) / (2 * step)).item()
        assert (parameter.grad * direction).sum().item() == pytest.approx(slope, rel=1e-5, abs=1e-8), name


def test_weights_have_the_names_of_a_checkpoint_and_tied_ones_come_once():
    for tied, count in ((True, 0), (False, 1)):
        config = LlamaConfig(vocab_size=11, hidden_size=8, intermediate_size=12, num_hidden_layers=1,
                             num_attention_heads=2, tie_word_embeddings=tied)  # fmt: skip
        names = [name for name, _ in Policy(LlamaForCausalLM(config)).named_weights()]
        assert len(names) == len(set(names)) and "model.embed_tokens.weight" in names
        assert names.count("lm_head.weight") == count
