"""Models beside the policy on real engines: a reward model against transformers, a reference against the trainer's."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray.actor import ActorHandle
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from actors.frozen.language_model import LanguageModelPool, LanguageModelWorker
from actors.frozen.reference import ReferenceGroup, ReferenceWorker, share
from actors.frozen.reward_model import RewardModelPool, RewardModelWorker, reward_engine
from actors.frozen.worker import FrozenWorker
from actors.judge import JudgeWorker
from actors.placement import spawn
from actors.remote import Remote
from actors.training.group import TrainerGroup
from actors.training.worker import CONCURRENCY_GROUPS, TrainerWorker
from raypost.config import AdvantageConfig, Config, JudgeConfig
from raypost.config.engine import EngineConfig
from raypost.data.tokenizer import Tokenizer
from raypost.errors import JudgeError, RaypostError
from raypost.trainer.batch.train_batch import Column, plan_batch
from raypost.types import Group, RolloutState, SampleParams, Status
from raypost.types.packed import PackedGroups, pack_groups
from tests.factories import CHAIN_SUM, make_config
from tests.unit.tokenizers import write_tokenizer

pytestmark = pytest.mark.usefixtures("local_ray")
REPOSITORY = Path(__file__).parents[2]
VOCAB = 20_000
"""So many that a step of the engine, bound by `logits_mb: 1`, is shorter than a sequence."""
MAX_TOKENS = 48
TOLERANCE = 1e-4
QUESTION = "What is 3 plus 4?"
TUTOR = "reward-tutor-0"


def llama(**changes: object) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        initializer_range=0.2,
        **changes,
    )


def frozen_config(folder: Path, **kl: object) -> Config:
    task = {"name": "sums", "source": CHAIN_SUM, "judge": {"kind": "reward_model", "reward_model": "tutor"}}
    return make_config(
        model={"name": str(folder)},
        tasks=[task | {"max_prompt_tokens": 16, "max_tokens": MAX_TOKENS - 16}],
        train={"num_steps": 9, "batch_size": 4, "learning_rate": 1e-3, "micro_batch_tokens": 512, "logits_mb": 1,
               "num_minibatches": 2, "step_timeout_s": 90, "loss": {"kl": {"coefficient": 0.1} | kl}},
        rollout={"max_num_seqs": 8, "kv_cache_gb": 0.1},
        reward_models=[{"name": "tutor", "model": str(folder), "max_model_len": 128}],
    )  # fmt: skip


def settings() -> dict[str, str]:
    return {"PYTHONPATH": str(REPOSITORY)}


def spawn_tutor(kind: type[FrozenWorker], folder: Path, config: Config) -> ActorHandle:
    engine = reward_engine(config, config.reward_models[0])
    return spawn(kind, TUTOR, str(folder), engine, name=TUTOR, max_restarts=-1, env=settings())


# ---------------------------------------------------------------- reward model


def answer(text: str, sample_index: int = 0) -> RolloutState:
    return RolloutState(
        task="sums",
        group_id=3,
        sample_index=sample_index,
        prompt_ids=np.zeros(2, np.int32),
        sample_params=SampleParams(max_tokens=8),
        metadata={"question": QUESTION},
        response_text=text,
    )


def logit(model: LlamaForSequenceClassification, folder: Path, text: str) -> float:
    """What transformers alone makes of the conversation."""
    messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": text}]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, return_tensors="pt")
    with torch.no_grad():
        return float(model(ids).logits.item())


async def test_reward_is_the_models_logit_also_from_a_worker_that_was_killed_meanwhile(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    write_tokenizer(tmp_path)
    config = llama(vocab_size=400, num_labels=1, pad_token_id=0, max_position_embeddings=128)
    model = LlamaForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    run = frozen_config(tmp_path)
    worker = spawn_tutor(RewardModelWorker, tmp_path, run)
    pool = RewardModelPool([TUTOR], timeout_s=90)
    judges = spawn(JudgeWorker, "judge-0", run.tasks, {"tutor": pool}, name="judge-0", env=settings())
    judge = Remote("judge-0", 120, many={"judge": 8})
    info = await asyncio.wait_for(worker.start.remote(), 240)

    texts = ["seven", "3 + 4 = 7", "", "no idea " * 5, "7\n" * 9]
    expected = [logit(model, tmp_path, text) for text in texts]
    assert min(expected) < 0 or max(expected) > 1, "no probability could be it"
    assert np.ptp(expected) > 100 * TOLERANCE
    rewards = await judge.judge([answer(text) for text in texts])
    assert np.max(np.abs(np.subtract(rewards, expected))) < TOLERANCE

    with pytest.raises(JudgeError, match=r"group 3, sample 5: reward model 'tutor': .*max_model_len 128"):
        await judge.judge([answer("seven"), answer("no idea " * 99, 5)])

    os.kill(info.pid, signal.SIGKILL)
    rewards = await judge.judge([answer(text) for text in texts])
    assert np.max(np.abs(np.subtract(rewards, expected))) < TOLERANCE
    assert (await worker.start.remote()).pid != info.pid
    await worker.shutdown.remote()
    ray.kill(worker)
    ray.kill(judges)


async def test_a_language_model_answers_as_transformers_does_and_a_judge_reads_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    write_tokenizer(tmp_path)
    model = LlamaForCausalLM(llama(vocab_size=400, pad_token_id=0, max_position_embeddings=128)).eval()
    model.save_pretrained(tmp_path)
    asked = {
        "kind": "generative",
        "reward_model": "tutor",
        "template": "{response}?",
        "verdict_tokens": 8,
        "answer_pattern": "(?s)(.+)",
        "retries": 0,
    }
    base = frozen_config(tmp_path)
    run = base.model_copy(
        update={
            "tasks": (base.tasks[0].model_copy(update={"judge": JudgeConfig.model_validate(asked)}),),
            "reward_models": (base.reward_models[0].model_copy(update={"generates": True}),),
        }
    )
    worker = spawn_tutor(LanguageModelWorker, tmp_path, run)
    pool = LanguageModelPool([TUTOR], timeout_s=90)
    judges = spawn(JudgeWorker, "judge-0", run.tasks, {}, {"tutor": pool}, name="judge-0", env=settings())
    judge = Remote("judge-0", 120, many={"judge": 8})
    await asyncio.wait_for(worker.start.remote(), 240)

    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("seven", "3 + 4 = 7"):
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": f"{text}?"}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            return_tensors="pt",
        )
        with torch.no_grad():
            expected = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :].tolist()
        said = await pool.answer(f"{text}?", 8, 0.0)
        assert said == Tokenizer.load(tmp_path).decode(np.asarray(expected, np.int32))
        # What a model with random weights says is no number: a failure with its words, and no score.
        with pytest.raises(JudgeError, match=r"judge: .*'tutor' gave no verdict in 1 answers, the last"):
            await judge.judge([answer(text)])
    with pytest.raises(JudgeError, match=r"128, leaves 120 beside judge\.verdict_tokens 8"):
        await judge.judge([answer("no idea " * 99)])
    await worker.shutdown.remote()
    ray.kill(worker)
    ray.kill(judges)


# ---------------------------------------------------------------- reference


def make_batch(**params: Any) -> PackedGroups:
    """Groups of all lengths that there can be, with tokens that are not trained and samples that are left out."""
    rng = np.random.default_rng(0)
    groups = []
    for group_id in range(4):
        prompt = rng.integers(0, VOCAB, 16 if group_id == 0 else rng.integers(1, 9)).astype(np.int32)
        states = []
        for index in range(4):
            length = (
                1 if (group_id, index) == (1, 0) else MAX_TOKENS - 16 if index == 0 else rng.integers(2, 30)
            )
            state = RolloutState(
                task="sums",
                group_id=group_id,
                sample_index=index,
                prompt_ids=prompt,
                sample_params=SampleParams(max_tokens=MAX_TOKENS - 16, **params),
                status=Status.FAILED if (group_id, index) == (2, 1) else Status.COMPLETED,
                reward=float(index % 2),
            )
            mask = rng.random(length) < 0.8
            mask[-1] = True
            state.append_segment(
                rng.integers(0, VOCAB, length).astype(np.int32),
                rng.normal(-9, 0.3, length).astype(np.float32),
                np.zeros(length, np.int32),
                mask,
            )
            states.append(state)
        groups.append(Group(task="sums", group_id=group_id, states=states))
    return pack_groups(groups)


def trainer(config: Config, folder: Path, name: str, reference: ReferenceGroup | None = None) -> TrainerGroup:
    rank = spawn(
        TrainerWorker,
        config,
        str(folder),
        0,
        name=name,
        concurrency_groups=CONCURRENCY_GROUPS,
        env=settings(),
    )
    return TrainerGroup([rank], config, reference=reference)


async def test_reference_on_engines_gives_the_column_and_the_step_that_the_trainers_own_gives(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    LlamaForCausalLM(llama(vocab_size=VOCAB, max_position_embeddings=MAX_TOKENS)).save_pretrained(tmp_path)
    batch = make_batch()
    batch_ref = ray.put(batch)
    config = frozen_config(tmp_path, pool={"name": "ref", "num_workers": 2})
    pool = config.train.loss.kl.pool
    assert pool is not None
    engine = EngineConfig.of(config, pool)
    workers = [
        spawn(
            ReferenceWorker, name, str(tmp_path), engine, config, name=name, max_restarts=-1, env=settings()
        )
        for name in ("reference-0", "reference-1")
    ]
    reference = ReferenceGroup(workers, start_timeout_s=120, step_timeout_s=90)
    own = trainer(frozen_config(tmp_path), tmp_path, "own")
    beside = trainer(config, tmp_path, "beside", reference)
    await asyncio.gather(own.start(), beside.start())
    expected: Column = ray.get(await own.compute_ref_logprobs(batch_ref))
    metrics = await own.fit(batch_ref)
    await own.shutdown()
    trained = np.concatenate([sample.places for sample in plan_batch(batch, AdvantageConfig(), 2).samples])
    assert len(trained) > 150 and (expected[trained] < -1).all(), "there is something to compare"
    column: Column = ray.get(await beside.compute_ref_logprobs(batch_ref))
    assert column.dtype == np.float32 and column.shape == expected.shape
    assert np.max(np.abs(column - expected)) < TOLERANCE
    assert np.array_equal(np.flatnonzero(column), np.sort(trained)), "what is not trained is 0"

    # A worker that is gone: the other computes its part.
    info = await workers[1].start.remote()
    os.kill(info.pid, signal.SIGKILL)
    again = await beside.fit(batch_ref)
    for name in ("reference_kl", "grad_norm", "entropy"):
        assert again[name] == pytest.approx(metrics[name], rel=1e-3, abs=1e-5), name

    with pytest.raises(ValueError, match=r"on the engines of train\.loss\.kl\.pool 'ref'"):
        await TrainerGroup(beside.workers, config).compute_ref_logprobs(batch_ref)
    with pytest.raises(RaypostError, match=r"group \('sums', 0\) sample 0 .*temperature 0\.7, top_p 1\.0"):
        await reference.compute_ref_logprobs(ray.put(make_batch(temperature=0.7)))
    spans = await workers[0].drain_spans.remote()  # the other one may still be restarting
    assert {span.actor for span in spans} >= {"reference-0"}
    await beside.shutdown()


def test_every_sample_is_in_one_part_and_parts_have_about_the_same_number_of_tokens() -> None:
    samples = plan_batch(make_batch(), AdvantageConfig(), 1).samples
    parts = [share(samples, part, 3) for part in range(3)]
    assert sorted(map(id, samples)) == sorted(id(one) for part in parts for one in part)
    loads = [sum(one.num_inputs for one in part) for part in parts]
    assert max(loads) - min(loads) < 20
    assert share(samples[:1], 1, 2) == []
