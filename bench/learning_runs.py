"""The two sides of the learning study: one run of raypost's main job, one of TRL's GRPOTrainer, scored alike.

Both sides start from the same folder, train on the same prompts in the same order with the same judge, and take
their settings from one configuration: the quickstart's recipe. Every `SCORE_EVERY` steps a Hugging Face folder is
written; afterwards `score` decodes the same held-out problems greedily with each of them, whoever wrote it.

A lag is real: before a batch is taken, production is let run to its staleness bound, so that the batch is made of
weights exactly `lag` steps old from step `lag + 1` on, whatever the speed of the machine.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raypost.config import Config, load_config
from raypost.data.prompt import Prompt, render
from raypost.data.sampler import Sampler
from raypost.data.task_source import build_source, held_out
from raypost.data.tokenizer import Tokenizer
from raypost.judges import build_judge
from raypost.models.resolve import resolve_model
from raypost.types import Judge, RolloutState, SampleParams

if TYPE_CHECKING:
    from jobs.roles import Roles

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "jobs" / "recipes" / "quickstart.yaml"
MODEL_SEED = 0
"""Of the model and of the held-out problems, the same for all runs; a run's own seed decides prompts and samples."""
HELD_OUT = 1024
SCORE_EVERY = 10
PRODUCE_TIMEOUT_S = 300
"""Longest time production may take to reach its staleness bound."""
TICK_S = 0.02

_UNCORRECTED = ("train.correction.weight=null",)
"""With one optimizer step a batch and recomputed proximal logprobs the loss's ratio is 1: nothing is left that
knows of the lag."""


@dataclass(frozen=True)
class Configuration:
    """One way to train; everything that is not said here is the recipe's."""

    about: str
    lag: int = 0
    """Steps that a batch's weights are older than the newest."""
    overrides: tuple[str, ...] = ()
    every: int = 1
    """Steps between productions; with `lag + 1` all batches of a production are of the same weights."""
    trl: bool = False


CONFIGURATIONS = {
    "staleness-0": Configuration("raypost, staleness 0"),
    "trl": Configuration("TRL GRPOTrainer", trl=True),
    "staleness-2": Configuration("raypost, staleness 2, corrected", 2),
    "staleness-2-uncorrected": Configuration("raypost, staleness 2, uncorrected", 2, _UNCORRECTED),
    "staleness-8": Configuration("raypost, staleness 8, corrected", 8),
    "staleness-8-uncorrected": Configuration("raypost, staleness 8, uncorrected", 8, _UNCORRECTED),
    "cycle-8": Configuration(
        "raypost, staleness 0 to 8 in turn, PPO's clip on the ratio to the sampling policy",
        8,
        ("train.correction.proximal=rollout",),
        every=9,
    ),
    "trl-staleness-2-uncorrected": Configuration("TRL, generating with weights 2 steps old", 2, trl=True),
}


# ---------------------------------------------------------------- what both sides share


def model_folder(config: Config) -> Path:
    """Return the folder of the model that every run starts from."""
    return resolve_model(config.model, MODEL_SEED, config.model.cache_dir)


def recipe(name: str, seed: int) -> tuple[Config, list[str]]:
    """Return the configuration of a run, and the overrides that make it of the recipe."""
    chosen = CONFIGURATIONS[name]
    folder = model_folder(load_config(RECIPE))
    overrides = [
        f"seed={seed}",
        f"model.name={folder}",
        "eval.num_prompts=0",
        "eval.interval=0",
        # TRL's, so that advantages are the same.
        "train.advantage.std_eps=1e-4",
        f"tasks.0.strategy.max_staleness={chosen.lag}",
        *chosen.overrides,
    ]
    return load_config(RECIPE, overrides), overrides


def judged(judge: Judge, texts: list[str], metadata: list[dict[str, Any]]) -> list[float]:
    """Scores of the responses."""
    states = [
        RolloutState(
            task="sums",
            group_id=n,
            sample_index=0,
            prompt_ids=np.empty(0, np.int32),
            sample_params=SampleParams(max_tokens=1),
            metadata=of_prompt,
            response_text=text,
        )
        for n, (text, of_prompt) in enumerate(zip(texts, metadata, strict=True))
    ]
    return asyncio.run(judge.judge(states))


def score(folder: Path, config: Config, problems: list[Prompt]) -> dict[str, float]:
    """Decode greedily with transformers: return the mean score, the share of right answers and the tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    task, tokenizer = config.tasks[0], Tokenizer.load(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    texts: list[str] = []
    tokens = 0
    for start in range(0, len(problems), 256):
        rows = [render(one, tokenizer, task) for one in problems[start : start + 256]]
        width = max(map(len, rows))
        ids_BP = torch.full((len(rows), width), tokenizer.pad_id)
        mask_BP = torch.zeros_like(ids_BP)
        for b, row in enumerate(rows):
            ids_BP[b, width - len(row) :], mask_BP[b, width - len(row) :] = torch.from_numpy(row), 1
        with torch.inference_mode():
            out = model.generate(
                ids_BP, attention_mask=mask_BP, do_sample=False, max_new_tokens=task.max_tokens,
                eos_token_id=list(tokenizer.eos_ids), pad_token_id=tokenizer.pad_id,
            )[:, width:]  # fmt: skip
        tokens += int((out != tokenizer.pad_id).sum())
        texts += [tokenizer.decode(row.numpy()) for row in out]
    scores = np.asarray(judged(build_judge(task), texts, [one.metadata for one in problems]))
    return {
        "score": float(scores.mean()),
        "right": float((scores >= config.eval.pass_threshold).mean()),
        "tokens": tokens / len(problems),
    }


def run(name: str, seed: int, folder: Path) -> dict[str, Any]:
    """Train and score one run. `folder` takes what it writes."""
    config, overrides = recipe(name, seed)
    started_s, load = time.time(), os.getloadavg()[0]
    train = train_trl if CONFIGURATIONS[name].trl else train_raypost
    steps, loop_s = train(name, config, overrides, folder)
    problems = held_out(config.tasks[0], MODEL_SEED, HELD_OUT)
    points = [{"step": 0} | score(model_folder(load_config(RECIPE)), config, problems)]
    for step in range(SCORE_EVERY, config.train.num_steps + 1, SCORE_EVERY):
        points.append({"step": step} | score(folder / "hf" / f"checkpoint-{step}", config, problems))
    return {
        "configuration": name,
        "about": CONFIGURATIONS[name].about,
        "seed": seed,
        "points": points,
        "loop_s": loop_s,
        "whole_s": time.time() - started_s,
        "load_before": load,
        "load_after": os.getloadavg()[0],
        "overrides": overrides,
        "steps": steps,
    }


# ---------------------------------------------------------------- raypost


def train_raypost(
    name: str, config: Config, overrides: list[str], folder: Path
) -> tuple[list[dict[str, Any]], float]:
    """Run the main job's loop on a Ray of its own; return its metrics a step and the seconds its steps took."""
    from jobs.driver import main

    job = functools.partial(_main_loop, chosen=CONFIGURATIONS[name], folder=folder)
    argv = ["--config", str(RECIPE), "--name", "run", "--runs-dir", str(folder), *overrides]
    if code := main(job, argv):
        raise RuntimeError(f"{name} ended with exit code {code}; its log says why")
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    if len(steps) != config.train.num_steps:
        raise RuntimeError(f"{name} left {len(steps)} steps, not {config.train.num_steps}")
    return steps, float((folder / "loop_s").read_text())


async def _main_loop(config: Config, stop: asyncio.Event, *, chosen: Configuration, folder: Path) -> None:
    """jobs/train.py, but that production is let run to its bound before a batch is taken."""
    from jobs.wiring import spawn

    async with spawn(config, stop) as roles:
        step, started_s = 0, time.monotonic()
        roles.produce()
        while not roles.finished(step):
            if step % chosen.every == 0:
                await roles.broadcast(version=step)
                await roles.producer.resume(version=step)
                await roles.while_producing(_at_its_bound(roles, step, chosen.lag))
                # Open and at its bound, production would have the take ask for newer weights.
                await roles.pause(step)
            status, batch_ref = await roles.take_batch(step + 1)
            if batch_ref is None:
                raise RuntimeError(f"step {step + 1} has no batch: {status}")
            step += 1
            metrics = await roles.trainer.fit(batch_ref, step)
            await roles.acknowledge(step)
            await roles.log(step, status, metrics)
            if step % SCORE_EVERY == 0:
                await roles.trainer.save_hf(folder / "hf" / f"checkpoint-{step}")
        (folder / "loop_s").write_text(str(time.monotonic() - started_s))


async def _at_its_bound(roles: Roles, step: int, lag: int) -> None:
    """Return once nothing is in flight and the buffer holds all that the engines' weights may be used for."""
    wanted, deadline = (lag + 1) * roles.cfg.train.batch_size, time.monotonic() + PRODUCE_TIMEOUT_S
    while not roles.stop.is_set():
        counts = await roles.producer.counts()
        if counts.in_flight == 0 and counts.buffered >= wanted:
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"before step {step + 1}, {wanted} groups did not come: {counts}")
        await asyncio.sleep(TICK_S)


# ---------------------------------------------------------------- TRL


def train_trl(
    name: str, config: Config, overrides: list[str], folder: Path
) -> tuple[list[dict[str, Any]], float]:
    """TRL's GRPOTrainer with the settings of `config`, generation by transformers. Metrics a step, seconds."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # A second thread gains little with a model of this size, and loses much beside a busy neighbour.
    torch.set_num_threads(config.train.threads)
    task, path = config.tasks[0], config.model.name
    prompts, metadata = training_prompts(config)
    judge = build_judge(task)

    def reward(completions: list[str], problem: list[int], **_: Any) -> list[float]:
        return judged(judge, completions, [metadata[n] for n in problem])

    from datasets import Dataset

    tokenizer = AutoTokenizer.from_pretrained(path)
    trainer = trl_trainer(CONFIGURATIONS[name].lag)(
        model=AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        args=trl_config(config, folder / "hf"),
        processing_class=tokenizer,
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": prompts, "problem": list(range(len(prompts)))}),
    )
    started_s = time.monotonic()
    trainer.train()
    loop_s = time.monotonic() - started_s
    steps = [row for row in trainer.state.log_history if "reward" in row]
    for row in steps:
        row |= {"reward_mean": row["reward"], "response_tokens_mean": row["completions/mean_length"]}
    return steps, loop_s


def trl_trainer(lag: int) -> Any:
    """TRL's trainer; with a lag, one that generates with the weights of so many steps ago.

    TRL then knows of no other policy than the current one: its ratio is 1, and nothing is corrected.
    """
    from trl import GRPOTrainer

    class Stale(GRPOTrainer):  # type: ignore[misc]  # TRL has no types
        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            now = {name: one.clone() for name, one in self.model.state_dict().items()}
            self.versions: list[dict[str, Any]] = [*getattr(self, "versions", []), now][-lag - 1 :]
            self.model.load_state_dict(self.versions[0])
            try:
                return super()._generate_single_turn(*args, **kwargs)
            finally:
                self.model.load_state_dict(now)

    return Stale if lag else GRPOTrainer


def training_prompts(config: Config) -> tuple[list[str], list[dict[str, Any]]]:
    """Texts and metadata of the prompts that raypost's sampler hands out, in its order, for all steps."""
    task, tokenizer = config.tasks[0], Tokenizer.load(config.model.name)
    texts: list[str] = []

    def encode(prompt: Prompt) -> Any:
        texts.append(prompt.text)
        return render(prompt, tokenizer, task)

    sampler = Sampler(task, build_source(task, config.seed), encode, tokenizer.eos_ids, config.seed)
    count = config.train.num_steps * config.train.batch_size
    groups = [sampler.sample() for _ in range(count)]
    return texts[:count], [group.states[0].metadata for group in groups]


def trl_config(config: Config, folder: Path) -> Any:
    """Return the same hyper-parameters in TRL's words."""
    from trl import GRPOConfig

    task, train = config.tasks[0], config.train
    return GRPOConfig(
        output_dir=str(folder),
        seed=config.seed,
        use_cpu=True,
        bf16=False,
        report_to=[],
        disable_tqdm=True,
        gradient_checkpointing=False,
        # The data: so many prompts a step, in the given order, each so many times, all in one micro-batch.
        max_steps=train.num_steps,
        per_device_train_batch_size=train.batch_size * task.group_size,
        num_generations=task.group_size,
        shuffle_dataset=False,
        max_completion_length=task.max_tokens,
        temperature=task.temperature,
        top_p=task.top_p,
        top_k=task.top_k,
        # The algorithm: GRPO's advantage, clip with DAPO's upper bound, mean over the batch's tokens, no KL.
        loss_type="dapo",
        scale_rewards="group",
        epsilon=train.loss.clip_low,
        epsilon_high=train.loss.clip_high,
        beta=train.loss.kl.coefficient,
        num_iterations=1,
        # The optimizer.
        learning_rate=train.learning_rate,
        lr_scheduler_type=train.lr_schedule,
        warmup_steps=train.warmup_steps,
        weight_decay=train.weight_decay,
        max_grad_norm=train.max_grad_norm,
        logging_steps=1,
        save_strategy="steps",
        save_steps=SCORE_EVERY,
        save_only_model=True,
    )
