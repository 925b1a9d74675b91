"""A train step against a bare PyTorch loop and against TRL's, on the same model and batch, in one run.

    python -m bench.trainer --hidden 576 --layers 30 --intermediate 1536 --heads 9 --kv-heads 3 --vocab 49152

Prints, for a batch of equal lengths and for a lognormal mix, trained response tokens per second of each way
(medians), their ratio to the bare loop, and the share of computed tokens that are useful; then what the head's
logits take at their peak, whole and in chunks.

The bare loop pads each micro-batch to its longest sequence, sorted by length, and computes logits of response
positions only; TRL's step is its loss, backward pass and optimizer step on the same micro-batches.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from torch.nn.functional import log_softmax
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from raypost.config import AdvantageConfig, parse_config
from raypost.trainer.batch.packing import PackingRule, micro_batches
from raypost.trainer.batch.train_batch import Sample, plan_batch
from raypost.types import Group, RolloutState, SampleParams, Status
from raypost.types.packed import PackedGroups, pack_groups

Step = Callable[[int], Any]
LONGEST = 1024


def make_batch(args: argparse.Namespace, lognormal: bool) -> PackedGroups:
    """`args.groups` groups of `args.group_size` responses, of equal length or lognormally distributed."""
    rng = np.random.default_rng(0)
    groups = []
    for group_id in range(args.groups):
        prompt = rng.integers(0, args.vocab, args.prompt).astype(np.int32)
        states = []
        for index in range(args.group_size):
            drawn = int(np.clip(rng.lognormal(np.log(args.response), 0.7), 4, LONGEST))
            length = drawn if lognormal else args.response
            state = RolloutState(
                task="bench",
                group_id=group_id,
                sample_index=index,
                prompt_ids=prompt,
                sample_params=SampleParams(max_tokens=LONGEST),
                status=Status.COMPLETED,
                reward=float(rng.normal()),
            )
            ids = rng.integers(0, args.vocab, length).astype(np.int32)
            logprobs = np.full(length, -np.log(args.vocab), np.float32)
            state.append_segment(ids, logprobs, np.zeros(length, np.int32))
            states.append(state)
        groups.append(Group(task="bench", group_id=group_id, states=states))
    return pack_groups(groups)


def make_model(args: argparse.Namespace) -> LlamaForCausalLM:
    """Make a Llama with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        max_position_embeddings=2 * LONGEST,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def fit_step(args: argparse.Namespace, folder: str, packed: PackedGroups, **train: Any) -> Step:
    """Raypost's step, in this process: one rank."""
    from raypost.trainer.policy_rank import PolicyRank

    config = parse_config({
        "model": {"name": "tiny"},
        "tasks": [{"source": {"kind": "reasoning_gym", "dataset": "chain_sum"}, "max_prompt_tokens": args.prompt,
                   "max_tokens": LONGEST}],
        "train": {"num_steps": 10**6, "batch_size": args.groups, "threads": args.threads,
                  "micro_batch_tokens": args.micro_batch_tokens, "zero_stage": args.zero_stage, **train},
    })  # fmt: skip
    rank = PolicyRank(config, folder, 0)
    return lambda step: rank.train(packed, step)


def padded(args: argparse.Namespace, samples: list[Sample]) -> list[tuple[list[Sample], Tensor]]:
    """Put samples by length into micro-batches that are padded on the right."""
    rule = PackingRule(args.micro_batch_tokens, packed=False)
    return [
        (list(micro.samples), torch.from_numpy(micro.input_ids_BL))
        for micro in micro_batches(samples, 0, 1, rule)
    ]


def bare_step(args: argparse.Namespace, packed: PackedGroups) -> Step:
    """Make the same update with nothing but PyTorch and transformers."""
    model = make_model(args).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0, fused=True)
    samples = plan_batch(packed, AdvantageConfig(), 1).samples
    advantages = {id(sample): sample.state.reward or 0.0 for sample in samples}
    total = sum(sample.num_trained for sample in samples)

    def step(_: int) -> None:
        for part, input_ids_BL in padded(args, samples):
            starts = [len(sample.state.prompt_ids) - 1 for sample in part]
            first = min(starts)
            # Prompts are equally long: the logits of the last `keep` positions are those of the responses.
            logits = model(
                input_ids=input_ids_BL, use_cache=False, logits_to_keep=input_ids_BL.shape[1] - first
            )
            logits_BLV = logits.logits
            loss = torch.zeros(())
            log_p_BLV = log_softmax(logits_BLV.float(), -1)
            for row, sample in enumerate(part):
                ids = torch.from_numpy(sample.state.response_ids.astype(np.int64))
                chosen_T = log_p_BLV[row, : len(ids)].gather(-1, ids[:, None])[:, 0]
                ratio_T = torch.exp(chosen_T - chosen_T.detach())
                gain_T = torch.minimum(ratio_T, ratio_T.clamp(0.8, 1.28)) * advantages[id(sample)]
                loss = loss - gain_T.sum() / total
            torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def trl_step(args: argparse.Namespace, packed: PackedGroups, folder: str) -> Step | None:
    """TRL's GRPO loss on the same micro-batches, or None if TRL is not installed."""
    try:
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer
    except ImportError:
        return None
    words = {f"w{i}": i for i in range(args.vocab)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, "w0")), eos_token="w1", pad_token="w2"
    )
    settings = GRPOConfig(
        output_dir=folder, use_cpu=True, bf16=False, beta=0.0, num_generations=args.group_size, report_to=[],
        per_device_train_batch_size=args.group_size, learning_rate=1e-6, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=make_model(args),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": ["w3"]}),
        processing_class=tokenizer,
    )
    trainer.current_gradient_accumulation_steps = 1
    model = trainer.model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0, fused=True)
    samples = plan_batch(packed, AdvantageConfig(), 1).samples

    def step(_: int) -> None:
        for part, _ids in padded(args, samples):
            longest = max(sample.state.num_tokens for sample in part)
            completion = torch.zeros(len(part), longest, dtype=torch.int64)
            mask = torch.zeros(len(part), longest, dtype=torch.int64)
            for row, sample in enumerate(part):
                ids = torch.from_numpy(sample.state.response_ids.astype(np.int64))
                completion[row, : len(ids)], mask[row, : len(ids)] = ids, 1
            prompts = torch.from_numpy(np.stack([s.state.prompt_ids for s in part]).astype(np.int64))
            loss = trainer._compute_loss(model, {
                "prompt_ids": prompts, "prompt_mask": torch.ones_like(prompts),
                "completion_ids": completion, "completion_mask": mask,
                "advantages": torch.tensor([s.state.reward or 0.0 for s in part]),
                "num_items_in_batch": torch.tensor(float(mask.sum())),
            })  # fmt: skip
            torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def compare(args: argparse.Namespace, lognormal: bool) -> None:
    """Time every way alternately, so that a busy machine slows all of them."""
    packed = make_batch(args, lognormal)
    samples = plan_batch(packed, AdvantageConfig(), 1).samples
    tokens = sum(sample.num_trained for sample in samples)
    with tempfile.TemporaryDirectory() as folder:
        make_model(args).save_pretrained(folder)
        steps: dict[str, Step | None] = {
            "bare loop": bare_step(args, packed),
            "TRL": trl_step(args, packed, folder),
            "fit, padded": fit_step(args, folder, packed, packing=False),
            "fit, packed": fit_step(args, folder, packed, share_prompts="off"),
            "fit, prompts shared": fit_step(args, folder, packed),
        }
        times: dict[str, list[float]] = {name: [] for name, step in steps.items() if step is not None}
        for number in range(1, args.repeat + 2):
            for name, step in steps.items():
                if step is not None:
                    begin = time.perf_counter()
                    step(number)
                    times[name].append(time.perf_counter() - begin)
    kind = "lognormal lengths" if lognormal else "equal lengths"
    print(f"{kind}: {len(samples)} responses, {tokens} response tokens, {args.prompt} prompt tokens each")
    bare = statistics.median(times["bare loop"][1:])
    for name, values in times.items():
        median = statistics.median(values[1:])
        print(f"  {name:20} {tokens / median:9.1f} tokens/s  {bare / median:5.2f} x the bare loop")
    useful = sum(sample.num_inputs for sample in samples)
    for name, rule in {
        "padded": PackingRule(args.micro_batch_tokens, packed=False),
        "packed": PackingRule(args.micro_batch_tokens, share_prompts=False),
        "prompts shared": PackingRule(args.micro_batch_tokens),
    }.items():
        computed = sum(micro.num_inputs for micro in micro_batches(samples, 0, 1, rule))
        print(f"  {name:20} {useful / computed:9.3f} useful tokens for each computed")


def head_peak(args: argparse.Namespace, max_bytes: int, pipe: Any) -> None:
    """Peak memory and time of the head's forward and backward pass, in a process of its own."""
    from raypost.trainer.model.head import ChunkedHead, LogitRule, Sampling

    torch.set_num_threads(args.threads)
    head = torch.nn.Linear(args.hidden, args.vocab, bias=False)
    chunked = ChunkedHead(head, LogitRule(), max_bytes)
    hidden = torch.randn(args.head_tokens, args.hidden, requires_grad=True)
    targets = torch.randint(args.vocab, (args.head_tokens,))
    sampling = Sampling(torch.ones(args.head_tokens))
    # Written to: memory that is only promised would count as the head's.
    head.weight.grad = torch.ones_like(head.weight)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    chunked(hidden, targets, sampling)[0].sum().backward()
    spent = time.perf_counter() - begin
    pipe.send((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, spent))


def compare_heads(args: argparse.Namespace) -> None:
    """Measure the head alone, whole and in chunks of several sizes."""
    context = multiprocessing.get_context("spawn")
    print(f"head of {args.vocab} tokens over {args.head_tokens} positions: peak above the start, time")
    for name, mib in (("whole", 10**6), ("256 MiB", 256), ("64 MiB", 64)):
        ours, theirs = context.Pipe()
        process = context.Process(target=head_peak, args=(args, mib * 2**20, theirs))
        process.start()
        theirs.close()
        peak_kib, spent = ours.recv()
        process.join()
        print(f"  {name:8} {peak_kib / 1024:8.0f} MiB  {spent:6.2f} s")


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in {
        "hidden": 256, "layers": 6, "intermediate": 768, "heads": 4, "kv-heads": 4, "vocab": 4096, "groups": 4,
        "group-size": 8, "prompt": 64, "response": 128, "micro-batch-tokens": 2048, "zero-stage": 1, "threads": 1,
        "repeat": 3, "head-tokens": 4096,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--part", choices=["all", "step", "head"], default="all")
    args = parser.parse_args()
    os.environ |= {"DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "LOCAL_SIZE": "1",
                   "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}  # fmt: skip
    torch.set_num_threads(args.threads)
    if args.part != "head":
        compare(args, lognormal=False)
        compare(args, lognormal=True)
    if args.part != "step":
        compare_heads(args)


if __name__ == "__main__":
    main()
