"""Real DeepSpeed ranks on a local Ray: exactness across ranks and stages, weights out, state in and out."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import queue
from collections.abc import Iterator
from itertools import count, pairwise
from logging.handlers import QueueHandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from actors.placement import spawn
from actors.training.group import TrainerGroup
from actors.training.worker import CONCURRENCY_GROUPS, TrainerWorker
from raypost.config import AdvantageConfig, Config, LossConfig
from raypost.data.tokenizer import Tokenizer as RaypostTokenizer
from raypost.errors import BatchMemoryError, CheckpointError, LedgerError, RaypostError, WaitTimeoutError
from raypost.observe.spans import Span
from raypost.trainer.algorithm.losses import LossTokens
from raypost.trainer.batch.sft import SftExamples
from raypost.trainer.batch.train_batch import plan_batch
from raypost.trainer.start import check_start
from raypost.types import Group, RolloutState, SampleParams, Status
from raypost.types.packed import PackedGroups, pack_groups, unpack_groups
from raypost.weights.manifest import verify, views
from tests.actors.failing_ranks import FailingRank
from tests.factories import CHAIN_SUM, make_config
from tests.present import present

pytestmark = pytest.mark.usefixtures("local_ray")
VOCAB = 24
Weights = dict[str, np.ndarray]
GROUPS = count()
"""Tells the groups apart in the names of their actors."""


def train_config(**train: object) -> Config:
    dtype = train.pop("dtype", "float32")
    defaults = {"num_steps": 100, "batch_size": 4, "learning_rate": 1e-3, "micro_batch_tokens": 512}
    if "importance_cap" in train:
        train["correction"] = {"weight": {"upper": train.pop("importance_cap")}}
    return make_config(
        model__dtype=dtype,
        tasks=[{"source": CHAIN_SUM, "max_prompt_tokens": 16, "max_tokens": 32}],
        train=defaults | {"step_timeout_s": 60} | train,
    )


def make_batch(
    step: int, num_groups: int = 4, size: int = 4, status: Status = Status.COMPLETED
) -> PackedGroups:
    """Responses of random length; the more often a sample says token 5, the higher its reward."""
    rng = np.random.default_rng(step)
    groups = []
    for group_id in range(num_groups):
        prompt = rng.integers(0, VOCAB, rng.integers(2, 9)).astype(np.int32)
        states = []
        for index in range(size):
            length = int(rng.integers(1, 20))
            ids = np.where(rng.random(length) < index / size, 5, rng.integers(0, VOCAB, length)).astype(
                np.int32
            )
            state = RolloutState(
                task="task",
                group_id=group_id,
                sample_index=index,
                prompt_ids=prompt,
                sample_params=SampleParams(max_tokens=32, temperature=0.8),
                status=status,
                reward=float((ids == 5).mean()),
            )
            logprobs = rng.normal(-3.2, 0.3, length).astype(np.float32)
            state.append_segment(ids, logprobs, np.full(length, max(0, step - 1 - index % 2), np.int32))
            states.append(state)
        groups.append(Group(task="task", group_id=group_id, states=states))
    return pack_groups(groups)


class Probe(TrainerWorker):
    """A rank that can also build engines of other configurations in its process."""

    def setup(self, master_addr: str, master_port: int) -> dict[str, object]:
        facts = super().setup(master_addr, master_port)
        # ZeRO 3 collects garbage once an engine: most of its time, if it looks at a million objects of libraries.
        gc.collect()
        gc.freeze()
        return facts

    def weights_after(
        self, config: Config, steps: int, resume: str = "", save_at: int = 0, folder: str = ""
    ) -> tuple[Weights | None, list[dict[str, float]]]:
        """Train from the start (or from `resume`) up to `steps`; weights on rank 0, metrics of each step."""
        from raypost.trainer.policy_rank import PolicyRank

        engine = PolicyRank(config, self._model_path, self._rank)
        start = engine.load(Path(resume)) if resume else 0
        metrics = []
        for step in range(start + 1, steps + 1):
            metrics.append(engine.train(make_batch(step), step))
            if step == save_at:
                engine.save(Path(folder))
        weights = {}
        for name, tensor in engine.gather_weights():
            weights[name] = tensor.clone().float().numpy()
        return weights or None, metrics

    def averaged(
        self, config: Config, batches: list[PackedGroups], resume: str = "", folder: str = ""
    ) -> tuple[list[Weights], Weights]:
        """Weights before each step and after the last, and their moving average; on rank 0. Saved to `folder`."""
        from raypost.trainer.policy_rank import PolicyRank

        rank = PolicyRank(config, self._model_path, self._rank)
        start = rank.load(Path(resume)) if resume else 0

        def values(weights: Iterator[Any]) -> Weights:
            return {name: tensor.clone().float().numpy() for name, tensor in weights}

        seen = [values(rank.gather_weights())]
        for step, batch in enumerate(batches, start + 1):
            rank.train(batch, step)
            seen.append(values(rank.gather_weights()))
        average = values(rank.gather_average())
        # What was exchanged for it is back in its place.
        again = values(rank.gather_weights())
        assert all(np.array_equal(again[name], seen[-1][name]) for name in again)
        if folder:
            rank.save(Path(folder))
        return seen, average

    def begun(
        self, config: Config, start: str, optimizer: bool
    ) -> tuple[int, Weights, Weights, Weights | None]:
        """A new rank that begins with other weights: its step, those, those after a step, and its average before."""
        from raypost.trainer.policy_rank import PolicyRank

        rank = PolicyRank(config, self._model_path, self._rank)
        rank.begin_from(Path(start), optimizer=optimizer)

        def values(weights: Iterator[Any]) -> Weights:
            return {name: tensor.clone().float().numpy() for name, tensor in weights}

        begin, step = values(rank.gather_weights()), rank.step
        average = values(rank.gather_average()) if config.train.ema_decay else None
        rank.train(make_batch(step + 1), step + 1)
        return step, begin, values(rank.gather_weights()), average

    def poisoned(self, config: Config) -> tuple[list[Weights], list[dict[str, float]], list[str]]:
        """Weights before and after each of a good step, one whose loss overflows and a good one; their metrics; and
        what was logged."""
        from raypost.trainer.policy_rank import PolicyRank

        engine = PolicyRank(config, self._model_path, self._rank)
        bad = make_batch(2)
        bad.columns[2][:] = -300.0

        def weights() -> Weights:
            return {name: tensor.clone().numpy() for name, tensor in engine.gather_weights()}

        seen, metrics = [weights()], []
        lines: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
        handler, log = QueueHandler(lines), logging.getLogger("raypost.trainer.rank")
        log.addHandler(handler)
        for step, batch in enumerate((make_batch(1), bad, make_batch(3)), start=1):
            metrics.append(engine.train(batch, step))
            seen.append(weights())
        log.removeHandler(handler)
        return seen, metrics, [lines.get().getMessage() for _ in range(lines.qsize())]

    def bfloat16_drift(self, config: Config, steps: int) -> float:
        """Mean distance of the weights from the start after `steps` small steps on one batch."""
        from raypost.trainer.policy_rank import PolicyRank

        rank = PolicyRank(config, self._model_path, self._rank)

        def weights() -> torch.Tensor:
            return torch.cat([tensor.flatten().float() for _, tensor in rank.gather_weights()])

        before = weights()
        for step in range(1, steps + 1):
            rank.train(make_batch(1), step)
        return float((weights() - before).abs().mean())

    def offloading(self, config: Config, steps: int) -> tuple[Weights | None, list[int]]:
        """Train with the device offloaded before every step and after the last; weights on rank 0, and the bytes that
        the tensors made for it hold each time."""
        from raypost.trainer.policy_rank import PolicyRank

        left = []
        gc.collect()
        gc.freeze()
        rank = PolicyRank(config, self._model_path, self._rank)
        for step in range(1, steps + 2):
            rank.offload()
            rank.offload()
            left.append(bytes_of_tensors())
            rank.reload()
            rank.reload()
            if step <= steps:
                rank.train(make_batch(step), step)
        weights = {name: tensor.clone().float().numpy() for name, tensor in rank.gather_weights()}
        return weights or None, left

    def renew(self, config: Config | None = None) -> None:
        """As if it had just been set up, with its own configuration or another."""
        from raypost.trainer.policy_rank import PolicyRank

        self._trained = PolicyRank(config or self._config, self._model_path, self._rank)
        self._published.clear()
        self._base, self._base_gathered = None, False
        self._spans.drain()

    def num_published(self) -> int:
        return len(self._published)


def bytes_of_tensors() -> int:
    """Of all tensors since the last `gc.freeze` that can be freed: not of copies, which are bytes, and
    not of files that are mapped, as weights on the CPU may be."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    storages = [one.untyped_storage() for one in tensors if one.dtype != torch.uint8]
    return sum({one.data_ptr(): one.nbytes() for one in storages if one.resizable()}.values())


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
                         tie_word_embeddings=True, initializer_range=0.2)  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    backend = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, "w0"))
    backend.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="w1").save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def sft(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Seven supervised examples of 1 to 7 words, of which a step takes three."""
    path = tmp_path_factory.mktemp("sft") / "examples.jsonl"
    rows = [{"prompt": f"w{i} w2", "response": " ".join(["w6"] * i)} for i in range(1, 8)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return {"path": str(path), "samples": 3, "coefficient": 0.3}


async def each(group: TrainerGroup, method: str, *args: object) -> list[Any]:
    """Call a method of all ranks."""
    return await asyncio.gather(*(getattr(worker, method).remote(*args) for worker in group.workers))


async def drained(group: TrainerGroup) -> list[Span]:
    """Spans of all ranks since the last call."""
    return [span for spans in await each(group, "drain_spans") for span in spans]


def make_group(model_path: str, config: Config, cls: type = Probe, *kind: str) -> TrainerGroup:
    number = next(GROUPS)
    workers = [
        spawn(
            cls,
            config,
            model_path,
            rank,
            *kind,
            name=f"trainer-{rank}-of-{number}",
            concurrency_groups=CONCURRENCY_GROUPS,
        )
        for rank in range(config.train.num_workers)
    ]
    return TrainerGroup(workers, config)


@pytest.fixture(scope="module")
def solo_and_pair(local_ray: None, model_path: str) -> Iterator[list[TrainerGroup]]:
    """Started at once: most of it is imports, on one core each."""
    configs = train_config(), train_config(num_workers=2, zero_stage=3)
    groups = [make_group(model_path, config) for config in configs]

    async def each(call: str) -> None:
        await asyncio.gather(*(getattr(group, call)() for group in groups))

    asyncio.run(each("start"))
    yield groups
    asyncio.run(each("shutdown"))


@pytest.fixture(scope="module")
def solo(solo_and_pair: list[TrainerGroup]) -> TrainerGroup:
    return solo_and_pair[0]


@pytest.fixture(scope="module")
def pair(solo_and_pair: list[TrainerGroup]) -> TrainerGroup:
    return solo_and_pair[1]


@pytest.fixture
async def fresh(solo: TrainerGroup) -> TrainerGroup:
    """`solo` without any step; starting a process for every test would take most of their time."""
    await each(solo, "renew")
    return TrainerGroup(solo.workers, train_config())


@pytest.fixture
async def fresh_pair(pair: TrainerGroup) -> TrainerGroup:
    """`pair` without any step."""
    await each(pair, "renew")
    return TrainerGroup(pair.workers, train_config(num_workers=2, zero_stage=3))


async def fit(group: TrainerGroup, step: int) -> dict[str, float]:
    return await group.fit(ray.put(make_batch(step)), step)


def largest_difference(a: Weights, b: Weights) -> float:
    assert a.keys() == b.keys()
    return max(float(np.abs(a[name] - b[name]).max()) for name in a)


async def trained(group: TrainerGroup, **train: object) -> tuple[Weights, list[dict[str, float]]]:
    config = train_config(num_workers=len(group.workers), **train)
    first: tuple[Weights, list[dict[str, float]]] = (await each(group, "weights_after", config, 3))[0]
    return first


@pytest.mark.parametrize("minibatches", [1, 2])
async def test_update_depends_neither_on_ranks_nor_on_micro_batches_nor_on_zero_stage(
    solo: TrainerGroup, pair: TrainerGroup, sft: dict[str, object], minibatches: int
) -> None:
    # With two minibatches, supervised examples are mixed in: three for two optimizer steps.
    base: dict[str, Any] = {"num_minibatches": minibatches, "sft": sft if minibatches == 2 else None}
    reference, expected = await trained(solo, zero_stage=0, **base)
    variants: dict[str, tuple[TrainerGroup, dict[str, Any]]] = {
        f"1 rank, stage {s}": (solo, {"zero_stage": s}) for s in (1, 2, 3)
    }
    variants["1 rank, stage 1, small"] = (solo, {"zero_stage": 1, "micro_batch_tokens": 48})
    variants["1 rank, unpacked"] = (solo, {"packing": False})
    variants["2 ranks, prompts not shared"] = (pair, {"share_prompts": "off", "micro_batch_tokens": 48})
    variants["1 rank, checkpointed"] = (solo, {"gradient_checkpointing": True, "micro_batch_tokens": 48})
    variants |= {f"2 ranks, stage {s}": (pair, {"zero_stage": s}) for s in range(4)}
    variants |= {
        f"2 ranks, stage {s}, small": (pair, {"zero_stage": s, "micro_batch_tokens": 48}) for s in range(4)
    }
    variants |= {
        f"{ranks} rank(s), stage {s}, optimizer on the CPU": (
            group,
            {"zero_stage": s, "offload_optimizer": True},
        )
        for ranks, group in enumerate((solo, pair), start=1)
        for s in (1, 2, 3)
    }
    for name, (group, train) in variants.items():
        weights, metrics = await trained(group, **base, **train)
        assert largest_difference(weights, reference) < 1e-5, name
        for got, want in zip(metrics, expected, strict=True):
            assert got.keys() == want.keys(), name
            for key in want.keys() - {"step_s", "tokens_per_s"}:
                assert got[key] == pytest.approx(want[key], rel=1e-4, abs=1e-5), (name, key)
    assert expected[0]["num_samples"] == 16 and expected[0]["grad_norm"] > 0
    assert ("logprob_mismatch_max" in expected[1]) and ("logprob_mismatch_max_lag1" in expected[1])
    if minibatches == 2:
        assert expected[0]["ratio_max"] > 1.0


OFFLOADED: dict[str, tuple[int, dict[str, Any]]] = {
    "stage 0": (1, {"zero_stage": 0}),
    "stage 1, adapters": (1, {"zero_stage": 1, "lora": {"rank": 2}}),
    "stage 2, reference and average": (
        1, {"zero_stage": 2, "loss": {"kl": {"coefficient": 0.1}}, "ema_decay": 0.9}
    ),
    "stage 3, optimizer on the CPU": (1, {"zero_stage": 3, "offload_optimizer": True}),
    "2 ranks, stage 1, bfloat16": (2, {"zero_stage": 1, "dtype": "bfloat16"}),
    "2 ranks, stage 3, adapters": (2, {"zero_stage": 3, "lora": {"rank": 2}}),
    "2 ranks, stage 3, reference and average": (
        2, {"zero_stage": 3, "loss": {"kl": {"coefficient": 0.1}}, "ema_decay": 0.9}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OFFLOADED)
async def test_what_is_offloaded_between_steps_comes_back_as_it_was(
    solo: TrainerGroup, pair: TrainerGroup, name: str
) -> None:
    ranks, options = OFFLOADED[name]
    group = (solo, pair)[ranks - 1]
    expected, _ = await trained(group, **options)
    config = train_config(num_workers=ranks, **options)
    answers = await each(group, "offloading", config, 3)
    # What stays is constants of the model's code, nothing of the size of its weights.
    assert max(nbytes for _, left in answers for nbytes in left) < 4096
    weights = answers[0][0]
    assert weights.keys() == expected.keys()
    assert all((weights[one] == expected[one]).all() for one in expected)


async def test_a_rank_that_is_offloaded_refuses_everything_but_to_reload(fresh: TrainerGroup) -> None:
    await fit(fresh, 1)
    manifest, published = await fresh.publish(1)
    await fresh.offload()
    for call in (fit(fresh, 2), fresh.publish(2), fresh.canary(np.arange(4)), fresh.save("/nowhere")):
        with pytest.raises(RaypostError, match=r"trainer-0 is offloaded: call TrainerGroup\.reload first"):
            await call
    assert await drained(fresh)
    again, buckets = await fresh.publish(1)
    assert again == manifest and buckets == published, "the same objects, for a broadcaster that died"
    await fresh.reload()
    prompt = np.arange(6, dtype=np.int32)
    logprobs = await fresh.canary(prompt)
    await fresh.offload()
    assert (await fresh.canary(prompt) == logprobs).all()
    with pytest.raises(RaypostError, match="is offloaded"):
        await fresh.canary(prompt[::-1].copy())
    await fresh.reload()
    assert (await fresh.publish(1))[0].digest == manifest.digest
    await fit(fresh, 2)
    await fresh.offload()


ALGORITHMS: dict[str, dict[str, Any]] = {
    "one update": {},
    "updates and reference": {
        "num_minibatches": 2, "num_epochs": 2, "loss": {"kl": {"coefficient": 0.1}, "entropy_coefficient": 0.01},
    },
    "reference in the reward": {"loss": {"kl": {"coefficient": 0.1, "place": "reward"}}},
}  # fmt: skip


@pytest.mark.parametrize("name", ALGORITHMS)
async def test_fit_is_the_composition_of_its_calls_bit_for_bit(
    solo: TrainerGroup, pair: TrainerGroup, name: str
) -> None:
    results = {}
    for group in (solo, pair):
        config = train_config(num_workers=len(group.workers), zero_stage=3, **ALGORITHMS[name])
        digests, metrics = [], []
        for spelled_out in (False, True):
            await each(group, "renew", config)
            trainer = TrainerGroup(group.workers, config)
            for step in (1, 2):
                batch_ref = ray.put(make_batch(step))
                fit = compose(trainer, config, batch_ref) if spelled_out else trainer.fit(batch_ref)
                metrics.append(await fit)
            digests.append((await trainer.publish(2))[0].digest)
        assert digests[0] == digests[1]
        for got, want in zip(metrics[2:], metrics[:2], strict=True):
            assert {**got, "step_s": 0, "tokens_per_s": 0} == {**want, "step_s": 0, "tokens_per_s": 0}
        results[len(group.workers)] = metrics[1]
    for key, value in results[1].items():
        if key not in ("step_s", "tokens_per_s"):
            assert results[2][key] == pytest.approx(value, rel=1e-4, abs=1e-5), key
    if name == "updates and reference":
        assert results[1]["reference_kl"] > 0


async def compose(trainer: TrainerGroup, config: Config, batch_ref: ray.ObjectRef) -> dict[str, float]:
    """A step as a driver spells it out."""
    old = await trainer.compute_old_logprobs(batch_ref) if config.train.needs_old_logprobs else None
    ref = await trainer.compute_ref_logprobs(batch_ref) if config.train.needs_ref_logprobs else None
    advantages = await trainer.compute_advantages(batch_ref, old, ref)
    assert all(isinstance(one, ray.ObjectRef) for one in (old, ref, advantages) if one is not None)
    return await trainer.train(batch_ref, advantages, old, ref)


async def test_logprobs_of_a_batch_are_those_of_the_model(
    fresh: TrainerGroup, fresh_pair: TrainerGroup, model_path: str
) -> None:
    batch = make_batch(1)
    expected = np.zeros(len(batch.columns[1]), np.float32)
    model = AutoModelForCausalLM.from_pretrained(model_path)
    for sample in plan_batch(batch, AdvantageConfig(), 1).samples:
        state = sample.state
        ids = torch.from_numpy(np.concatenate([state.prompt_ids, state.response_ids]).astype(np.int64))
        with torch.no_grad():
            log_p = torch.log_softmax(model(ids[None]).logits[0] / 0.8, -1)
        log_p = log_p[:-1].gather(1, ids[1:, None])[len(state.prompt_ids) - 1 :, 0]
        expected[sample.places] = log_p.numpy()
    for group in (fresh, fresh_pair):
        got = ray.get(await group.compute_old_logprobs(ray.put(batch)))
        assert np.abs(got - expected).max() < 1e-5
    with pytest.raises(ValueError, match="there is no reference"):
        await fresh.compute_ref_logprobs(ray.put(batch))


async def test_without_the_old_logprobs_several_updates_are_refused(solo: TrainerGroup) -> None:
    config = train_config(num_minibatches=2)
    await each(solo, "renew", config)
    trainer, batch_ref = TrainerGroup(solo.workers, config), ray.put(make_batch(1))
    advantages = await trainer.compute_advantages(batch_ref)
    with pytest.raises(ValueError, match="need the logprobs before the first"):
        await trainer.train(batch_ref, advantages)


async def test_a_critic_learns_beside_the_policy_and_is_saved_with_it(
    solo: TrainerGroup, model_path: str, tmp_path: Path
) -> None:
    config = train_config(advantage={"kind": "gae"}, critic={"learning_rate": 1e-2}, num_epochs=2)
    of_critic = config.model_copy(update={"train": config.train.for_critic})
    critic = make_group(model_path, of_critic, TrainerWorker, "critic")
    await critic.start()
    await each(solo, "renew", config)
    trainer = TrainerGroup(solo.workers, config, critic)
    metrics = [await trainer.fit(ray.put(make_batch(step))) for step in (1, 2, 3)]
    assert metrics[0]["value_mean"] != 0.0 and metrics[2]["value_loss"] < metrics[0]["value_loss"]
    assert metrics[0]["critic_lr"] == 1e-2 and metrics[0]["lr"] == 1e-3
    await trainer.save(tmp_path / "trainer")
    values = ray.get(await critic.compute_values(ray.put(make_batch(4))))
    assert not values.after.any()
    first = await trainer.fit(ray.put(make_batch(4)))
    assert await trainer.load(tmp_path / "trainer") == 3 == critic.step
    again = ray.get(await critic.compute_values(ray.put(make_batch(4))))
    assert np.array_equal(again.values, values.values)
    again = await trainer.fit(ray.put(make_batch(4)))
    assert {k: v for k, v in again.items() if not k.endswith("_s")} == {
        k: v for k, v in first.items() if not k.endswith("_s")
    }
    await check_values_after_a_cut(critic)
    with pytest.raises(CheckpointError, match="saved with kind policy, this run has critic"):
        await critic.load(tmp_path / "trainer")
    with pytest.raises(RaypostError, match="critic-0 is no policy"):
        await critic.canary(np.asarray([1, 2], np.int32))
    with pytest.raises(RaypostError, match="trainer-0 is no critic"):
        await trainer.compute_values(ray.put(make_batch(4)))
    await critic.shutdown()


async def check_values_after_a_cut(critic: TrainerGroup) -> None:
    """Of a response that was cut off, the value after its last token is the one that a further token would have."""
    whole = unpack_groups(make_batch(5))
    cut = [state for group in unpack_groups(make_batch(5)) for state in group.states if state.num_tokens > 1]
    groups = [
        Group(task=g.task, group_id=g.group_id, states=[s for s in cut if s.group_id == g.group_id])
        for g in whole
    ]
    for state in cut[::2]:
        for name in ("response_ids", "logprobs", "policy_versions", "response_mask"):
            setattr(state, name, getattr(state, name)[:-1])
        state.finish_reason = "length"
    batches = pack_groups(whole), pack_groups(groups)
    full, got = [ray.get(await critic.compute_values(ray.put(batch))) for batch in batches]
    everything, shorter = (plan_batch(batch, AdvantageConfig(kind="gae"), 1) for batch in batches)
    by_key = {(s.key, s.state.sample_index): s for s in everything.samples}
    expected, values = np.zeros_like(got.after), np.zeros_like(got.values)
    for sample in shorter.samples:
        other = by_key[sample.key, sample.state.sample_index]
        values[sample.places] = full.values[other.places[: sample.num_trained]]
        if sample.cut_off:
            expected[sample.last] = full.values[other.last]
    assert np.count_nonzero(expected) == len(cut[::2]) > 4
    assert np.abs(got.after - expected).max() < 1e-5 and np.abs(got.values - values).max() < 1e-5


@pytest.mark.parametrize("stage", [1, 3])
async def test_adapters_are_trained_alone_published_merged_and_the_reference_is_without_them(
    solo: TrainerGroup, pair: TrainerGroup, model_path: str, tmp_path: Path, stage: int
) -> None:
    loss = {"kl": {"coefficient": 0.1}}
    losses = []
    for group in (solo, pair):
        config = train_config(
            num_workers=len(group.workers),
            zero_stage=stage,
            lora={"rank": 4, "sync": "merged"},
            loss=loss,
            learning_rate=1e-2,
            ema_decay=1e-6,
        )
        await each(group, "renew", config)
        trainer = TrainerGroup(group.workers, config)
        start, buckets = await trainer.publish(0)
        plain = AutoModelForCausalLM.from_pretrained(model_path).state_dict()
        for entry, data in views(start, ray.get(buckets)):
            assert np.array_equal(data.view(np.float32), plain[entry.name].numpy().ravel()), entry.name
        batch_ref = ray.put(make_batch(1))
        before = ray.get(await trainer.compute_old_logprobs(batch_ref))
        for step in (1, 2):
            metrics = await fit(trainer, step)
        assert metrics["reference_kl"] > 0
        assert np.array_equal(ray.get(await trainer.compute_ref_logprobs(batch_ref)), before)
        assert not np.array_equal(ray.get(await trainer.compute_old_logprobs(batch_ref)), before)
        manifest, buckets = await trainer.publish(2)
        changed = {e.name for e, d in views(manifest, ray.get(buckets))
                   if not np.array_equal(d.view(np.float32), plain[e.name].numpy().ravel())}  # fmt: skip
        assert len(changed) == 14 and all("_proj" in name for name in changed)
        ids = np.arange(1, 13, dtype=np.int32)
        expected = await trainer.canary(ids)
        await trainer.save_hf(tmp_path / "merged")
        await trainer.save_hf(tmp_path / "average", ema=True)
        average = AutoModelForCausalLM.from_pretrained(tmp_path / "average").state_dict()
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        # With next to no decay, the average is where the weights are.
        assert all((average[n] - value).abs().max() < 1e-6 for n, value in model.state_dict().items())
        with torch.no_grad():
            log_p = torch.log_softmax(model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0], -1)
        got = log_p[:-1].gather(1, torch.from_numpy(ids[1:].astype(np.int64))[:, None])[:, 0].numpy()
        assert np.abs(got - expected).max() < 1e-5
        losses.append(metrics["loss"])
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
async def test_bfloat16_weights_move_by_less_than_they_can_hold(solo: TrainerGroup, stage: int) -> None:
    # In bfloat16 itself, a step of 1e-5 would be lost on nearly every weight.
    config = train_config(dtype="bfloat16", zero_stage=stage, learning_rate=1e-5)
    (moved,) = await each(solo, "bfloat16_drift", config, 40)
    assert 2e-4 < moved < 6e-4


async def test_supervised_examples_are_learned_beside_a_batch_and_without_one(
    solo: TrainerGroup, sft: dict[str, object], model_path: str
) -> None:
    """Where no advantage is left, the gradient is that of the examples' mean cross entropy, times its coefficient."""
    config = train_config(sft=sft, micro_batch_tokens=48)
    await each(solo, "renew", config)
    trainer = TrainerGroup(solo.workers, config)
    examples = SftExamples(
        present(config.train.sft), RaypostTokenizer.load(model_path), 0, config.max_model_len
    )
    model = AutoModelForCausalLM.from_pretrained(model_path).double()
    total, count = torch.zeros((), dtype=torch.float64), 0
    for sample in examples.of_step(1):
        prompt, response = sample.state.prompt_ids, sample.state.response_ids
        ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
        log_p = torch.log_softmax(model(ids[None]).logits[0], -1)
        total = total - log_p[:-1].gather(1, ids[1:, None])[len(prompt) - 1 :].sum()
        count += len(response)
    gradient = torch.autograd.grad(total / count, list(model.parameters()))
    norm = float(torch.cat([one.ravel() for one in gradient]).norm())
    metrics = await trainer.fit(ray.put(make_batch(1, status=Status.FAILED)), 1)
    assert (
        metrics["sft_loss"] == pytest.approx(total.item() / count, abs=1e-5)
        and metrics["sft_tokens"] == count
    )
    assert metrics["loss"] == pytest.approx(0.3 * total.item() / count, abs=1e-5)
    assert metrics["grad_norm"] == pytest.approx(0.3 * norm, rel=1e-5) and metrics["skipped_steps"] == 0
    losses = [(await fit(trainer, step))["sft_loss"] for step in range(2, 30)]
    assert sum(losses[-7:]) < 0.8 * sum(losses[:7])


async def test_published_weights_are_those_of_the_hugging_face_model(
    fresh: TrainerGroup, fresh_pair: TrainerGroup, model_path: str, tmp_path: Path
) -> None:
    for group in (fresh, fresh_pair):
        manifest, refs = await group.publish(0)
        buckets = ray.get(refs)
        verify(manifest, buckets)
        expected = AutoModelForCausalLM.from_pretrained(model_path).state_dict()
        got = dict(views(manifest, buckets))
        assert {entry.name for entry in got} == expected.keys() - {"lm_head.weight"}
        for entry, data in got.items():
            assert entry.dtype == "float32" and entry.shape == tuple(expected[entry.name].shape)
            assert np.array_equal(data.view(np.float32), expected[entry.name].numpy().ravel())


async def test_versions_differ_after_a_step_and_only_two_are_kept(
    fresh: TrainerGroup, model_path: str
) -> None:
    digests = [(await fresh.publish(0))[0].digest]
    for step in (1, 2, 3):
        await fit(fresh, step)
        manifest, _ = await fresh.publish(step)
        assert manifest.version == step
        digests.append(manifest.digest)
        assert await each(fresh, "num_published") == [min(2, step + 1)]
    assert len(set(digests)) == 4
    assert (await fresh.publish(4))[0].digest == digests[-1]


async def test_exported_model_gives_the_logprobs_of_the_trainer(
    fresh: TrainerGroup, fresh_pair: TrainerGroup, tmp_path: Path
) -> None:
    for group in (fresh, fresh_pair):
        await fit(group, group.step + 1)
        path = tmp_path / f"export-{len(group.workers)}"
        await group.save_hf(path)
        with pytest.raises(ValueError, match=r"there is no average of the weights: .* train\.ema_decay"):
            await group.save_hf(path, ema=True)
        assert AutoTokenizer.from_pretrained(path).eos_token == "w1"
        ids = np.arange(1, 13, dtype=np.int32)
        model = AutoModelForCausalLM.from_pretrained(path)
        with torch.no_grad():
            log_p = torch.log_softmax(model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0], -1)
        expected = log_p[:-1].gather(1, torch.from_numpy(ids[1:].astype(np.int64))[:, None])[:, 0].numpy()
        got = await group.canary(ids)
        assert got.dtype == np.float32 and np.abs(got - expected).max() < 1e-5


@pytest.mark.parametrize("stage", [0, 1, 3])
async def test_a_restored_run_goes_on_bit_for_bit(
    solo: TrainerGroup, sft: dict[str, object], tmp_path: Path, stage: int
) -> None:
    noisy = {"kind": "tests.actors.random_loss:random_loss"}
    config, folder = train_config(zero_stage=stage, sft=sft, loss=noisy), str(tmp_path)
    straight, _ = (await each(solo, "weights_after", config, 4, "", 2, folder))[0]
    resumed, _ = (await each(solo, "weights_after", config, 4, folder))[0]
    assert largest_difference(straight, resumed) == 0.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_run_goes_on_with_other_ranks_and_another_zero_stage(
    solo: TrainerGroup, pair: TrainerGroup, tmp_path: Path, dtype: str
) -> None:
    for source, stage, target, other in (
        (solo, 1, pair, 3), (pair, 3, solo, 2), (pair, 2, solo, 0), (solo, 0, pair, 2), (pair, 0, solo, 3),
    ):  # fmt: skip
        folder = tmp_path / f"{len(source.workers)}-{stage}-{len(target.workers)}-{other}"
        configs = [
            train_config(dtype=dtype, zero_stage=s, num_workers=len(group.workers), weight_decay=0.1)
            for group, s in ((source, stage), (target, other))
        ]
        straight, _ = (await each(source, "weights_after", configs[0], 4, "", 2, str(folder)))[0]
        resumed, metrics = (await each(target, "weights_after", configs[1], 4, str(folder)))[0]
        assert len(metrics) == 2
        tolerance = 1e-5 if dtype == "float32" else 2e-2
        worst = {n: float(np.abs(straight[n] - resumed[n]).max()) for n in straight}
        assert max(worst.values()) < tolerance, (folder.name, worst)


def running_average(seen: list[Weights], decay: float, start: Weights | None = None) -> Weights:
    average = {name: np.asarray(value, np.float64) for name, value in (start or seen[0]).items()}
    for weights in seen[1:]:
        average = {name: decay * value + (1 - decay) * weights[name] for name, value in average.items()}
    return average


async def test_the_moving_average_of_the_weights_is_its_formula_at_every_stage(
    solo: TrainerGroup, pair: TrainerGroup
) -> None:
    batches = [make_batch(1), make_batch(2, status=Status.FAILED), make_batch(3), make_batch(4)]
    for group, stage, dtype in (
        *((solo, s, "float32") for s in range(4)), *((pair, s, "float32") for s in (0, 2, 3)),
        (solo, 0, "bfloat16"), (pair, 3, "bfloat16"),
    ):  # fmt: skip
        config = train_config(
            dtype=dtype, zero_stage=stage, num_workers=len(group.workers), ema_decay=0.7, learning_rate=1e-2
        )
        seen, average = (await each(group, "averaged", config, batches))[0]
        assert largest_difference(seen[1], seen[2]) == 0.0, "the second batch has nothing to train"
        expected = running_average([*seen[:2], *seen[3:]], 0.7)
        tolerance = 1e-6 if dtype == "float32" else 1e-2
        assert largest_difference(average, expected) < tolerance, (len(group.workers), stage, dtype)
        assert largest_difference(average, seen[-1]) > 4e-3


async def test_the_moving_average_goes_on_with_other_ranks_and_another_stage(
    solo: TrainerGroup, pair: TrainerGroup, tmp_path: Path
) -> None:
    batches = [make_batch(step) for step in range(1, 5)]
    decay = {"ema_decay": 0.7, "learning_rate": 1e-2}
    configs = {
        group: train_config(zero_stage=stage, num_workers=len(group.workers), **decay)
        for group, stage in ((solo, 1), (pair, 3))
    }
    for source, target in ((pair, solo), (solo, pair)):
        folder = str(tmp_path / f"{len(source.workers)}")
        before, average = (await each(source, "averaged", configs[source], batches[:2], "", folder))[0]
        seen, resumed = (await each(target, "averaged", configs[target], batches[2:], folder))[0]
        assert largest_difference(before[-1], seen[0]) < 1e-6
        assert largest_difference(resumed, running_average(seen, 0.7, average)) < 1e-6
    without = str(tmp_path / "without")
    await each(solo, "weights_after", train_config(), 1, "", 1, without)
    with pytest.raises(CheckpointError, match=r"was saved without train\.ema_decay"):
        await each(solo, "averaged", configs[solo], [], without)


async def test_a_run_begins_with_the_weights_of_another_and_its_optimizer_if_asked(
    solo: TrainerGroup, pair: TrainerGroup, model_path: str, tmp_path: Path
) -> None:
    folder = str(tmp_path)
    trained, _ = (await each(pair, "weights_after", train_config(num_workers=2), 2, "", 2, folder))[0]
    config = train_config(zero_stage=0, ema_decay=0.5)
    check_start(config, tmp_path, model_path)
    with pytest.raises(
        CheckpointError, match=r"start_from: .*embed_tokens.* has shape \(24, 32\), this run's None"
    ):
        check_start(train_config(lora={"rank": 4}), tmp_path, model_path)
    after = []
    for optimizer in (True, False):
        step, begin, end, average = (await each(solo, "begun", config, folder, optimizer))[0]
        assert step == 0 and largest_difference(begin, trained) == 0.0
        assert average is not None and largest_difference(average, trained) == 0.0
        after.append(end)
    assert largest_difference(*after) > 1e-5, "with moments a step goes elsewhere"


async def test_a_damaged_checkpoint_is_refused_by_name(
    solo: TrainerGroup, pair: TrainerGroup, tmp_path: Path
) -> None:
    config = train_config()
    await each(solo, "weights_after", config, 1, "", 1, str(tmp_path))
    (state,) = tmp_path.glob("state-*")
    state.write_bytes(state.read_bytes()[: state.stat().st_size // 2])
    for group, other in ((solo, config), (pair, train_config(num_workers=2))):
        with pytest.raises(CheckpointError, match=r"state-0-of-1\.safetensors is damaged"):
            await each(group, "weights_after", other, 2, str(tmp_path))


async def test_group_restores_its_step_and_refuses_a_checkpoint_that_does_not_fit(
    fresh: TrainerGroup, solo: TrainerGroup, tmp_path: Path
) -> None:
    for step in (1, 2):
        await fit(fresh, step)
    taken = fresh.snapshot(tmp_path / "trainer")
    manifest, _ = await fresh.publish(2)
    await fit(fresh, 3)
    await taken
    assert not await fresh.write_snapshot(tmp_path / "another"), "nothing was taken for it"
    assert await fresh.write_snapshot(tmp_path / "trainer") and await fresh.write_snapshot(
        tmp_path / "trainer"
    )
    assert await fresh.load(tmp_path / "trainer") == fresh.step == 2
    assert (await fresh.publish(2))[0].digest == manifest.digest
    with pytest.raises(CheckpointError, match="saved with dtype float32, this run has bfloat16"):
        await each(solo, "weights_after", train_config(dtype="bfloat16"), 3, str(tmp_path / "trainer"))
    with pytest.raises(CheckpointError, match=r"trainer\.json"):
        await fresh.load(tmp_path / "nothing")


async def test_a_step_is_trained_once(fresh: TrainerGroup) -> None:
    first = await fit(fresh, 1)
    digest = (await fresh.publish(1))[0].digest
    assert await fit(fresh, 1) == first
    assert (await fresh.publish(1))[0].digest == digest
    await fit(fresh, 2)
    with pytest.raises(LedgerError, match="step 1 cannot be trained: step 2 was the last"):
        await fit(fresh, 1)
    assert (await fresh.fit(ray.put(make_batch(3))))["skipped_steps"] == 0 and fresh.step == 3


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
async def test_a_step_without_finite_gradient_changes_nothing_and_training_goes_on(
    solo: TrainerGroup, stage: int
) -> None:
    # Without a bound, weights of exp(300) overflow the loss.
    config = train_config(zero_stage=stage, correction={"weight": {"upper": None}})
    (skipped,) = await each(solo, "poisoned", config)
    weights, metrics, lines = skipped
    groups = ", ".join(f"('task', {g})" for g in range(4))
    assert lines == [
        f"step 2, rank 0: the loss of a micro-batch is not finite; its groups: {groups}",
        f"step 2: an optimizer step is skipped, the gradient is not finite; groups: {groups}",
    ]
    changes = [largest_difference(a, b) for a, b in pairwise(weights)]
    assert changes[0] > 0.0 and changes[1] == 0.0 and changes[2] > 0.0
    assert [m["skipped_steps"] for m in metrics] == [0.0, 1.0, 1.0]
    assert ["grad_norm" in m for m in metrics] == [True, False, True]
    assert all(np.isfinite(list(m.values())).all() for m in metrics)


async def test_a_batch_without_anything_trainable_is_skipped_and_counted(fresh: TrainerGroup) -> None:
    digest = (await fresh.publish(0))[0].digest
    metrics = await fresh.fit(ray.put(make_batch(1, status=Status.FAILED)))
    assert (metrics["skipped_steps"], metrics["num_samples"], metrics["left_out"]) == (1.0, 0.0, 20.0)
    assert (await fresh.publish(1))[0].digest == digest
    assert (await fit(fresh, 2))["skipped_steps"] == 1.0


async def test_bad_input_is_left_out_and_changes_nothing_for_the_rest(fresh: TrainerGroup) -> None:
    """Beside good groups, in a batch with every kind of it, down to groups of which nothing is left."""
    good, bad = unpack_groups(make_batch(1)), unpack_groups(make_batch(2, num_groups=6))
    for group in bad:
        group.group_id += 4
        for state in group.states:
            state.group_id += 4
            if group.group_id == 4:
                state.reward = float("nan")
            elif group.group_id == 5:
                state.response_mask = np.zeros(state.num_tokens, np.bool_)
            elif group.group_id == 6:
                state.logprobs = np.full(state.num_tokens, np.nan, np.float32)
            elif group.group_id == 7:
                state.logprobs = np.full(state.num_tokens, 3.0, np.float32)
            elif group.group_id == 8:
                state.response_ids = np.full(state.num_tokens, VOCAB, np.int32)
            else:
                state.prompt_ids = np.ones(60, np.int32)
    expected = await fresh.fit(ray.put(pack_groups(good)), 1)
    assert fresh.left_out == {}
    digest = (await fresh.publish(1))[0].digest
    await each(fresh, "renew")
    metrics = await fresh.fit(ray.put(pack_groups([bad[0], *good[:3], *bad[1:], good[3]])), 1)
    assert metrics["left_out"] == 6 * (4 + 1) and metrics["skipped_steps"] == 0
    assert sorted(number for _, number in fresh.left_out) == [4, 5, 6, 7, 8, 9]
    assert metrics["loss"] == expected["loss"] and (await fresh.publish(1))[0].digest == digest


def out_of_memory(tokens: LossTokens, config: LossConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """A policy loss that asks for a pebibyte."""
    return torch.empty(2**47, dtype=torch.float64), tokens.rows_T > 0


async def test_a_micro_batch_that_does_not_fit_the_memory_is_named_with_what_makes_it_smaller(
    solo: TrainerGroup,
) -> None:
    await each(
        solo, "renew", train_config(loss={"kind": f"{__name__}:out_of_memory"}, micro_batch_tokens=400)
    )
    with pytest.raises(BatchMemoryError) as failed:
        await solo.fit(ray.put(make_batch(1)), 1)
    text = str(failed.value)
    assert "step 1, rank 0: out of memory in a micro-batch of " in text and "('task', 0)" in text
    assert "Lower train.micro_batch_tokens" in text


async def test_training_raises_the_reward_of_what_is_sampled(fresh: TrainerGroup) -> None:
    ids = np.asarray([1, 5, 2, 5, 3, 5], np.int32)
    before = (await fresh.canary(ids))[::2].mean()
    for step in range(1, 11):
        await fit(fresh, step)
    assert (await fresh.canary(ids))[::2].mean() > before + 0.5


async def test_time_is_accounted_for_by_kind_and_actor(fresh: TrainerGroup, tmp_path: Path) -> None:
    await fit(fresh, 1)
    await fresh.publish(1)
    await fresh.save(tmp_path)
    spans = await drained(fresh)
    assert {(span.actor, span.kind) for span in spans} == {
        ("trainer-0", kind) for kind in ("train", "sync", "checkpoint")}  # fmt: skip
    assert all(span.end_s > span.start_s for span in spans)
    assert await drained(fresh) == []


async def test_a_broken_rank_is_not_waited_for_and_a_late_one_is_named() -> None:
    group = make_group("", train_config(num_workers=2, step_timeout_s=4), FailingRank)
    await asyncio.gather(*(worker.close.remote() for worker in group.workers))
    now = asyncio.get_running_loop().time
    start = now()
    with pytest.raises(CheckpointError, match="rank 1 is broken"):
        await group.fit(ray.put(1))
    assert now() - start < 1.5
    with pytest.raises(WaitTimeoutError, match=r"waited 4 s for fit of trainer-1$"):
        await group.fit(ray.put(1), 2)
    assert group.step == 0
    await group.shutdown()


async def test_ranks_find_each_other_at_the_nodes_address(pair: TrainerGroup) -> None:
    infos = await each(pair, "setup", "unused", 0)
    assert [info["rank"] for info in infos] == [0, 1] and len({info["pid"] for info in infos}) == 2
    address, port = (await each(pair, "rendezvous"))[0]
    assert address == ray.util.get_node_ip_address() and port > 0


def test_the_number_of_workers_must_be_that_of_the_configuration() -> None:
    with pytest.raises(ValueError, match=r"0 workers, but train\.num_workers is 1"):
        TrainerGroup([], train_config())
