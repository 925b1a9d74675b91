"""Tokens a second of two turns of 64 tokens, 64 conversations at once, against bare AsyncLLM, on one engine in one run.

    python -m bench.agents [--at-once 64] [--waves 3] [--rounds 3]

The engine is a real one, with random weights of a third of a million parameters: the faster it is, the more counts what
stands before it. Bare asks the same AsyncLLM for the same tokens: a prompt, then that with what was sampled and what a
template puts behind it. Three ways of raypost's ask through it: an environment of two turns (the native loop, which
that of tools shares), an agent with the session's in-process client, and one over HTTP, whose client, like the server,
lives in this process, which has what actors have: uvloop, and few searches for garbage. There is no Ray between, of
which bench.rollout tells. Rounds take turns.

The last line is one JSON object: tokens a second of each, and its share of bare's, and milliseconds of this process's
CPU time a request, which a busy machine changes less; medians of the rounds with their range.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch
import uvloop
from transformers import LlamaConfig, LlamaForCausalLM

from actors.placement import GC_ALLOCATIONS
from bench.figures import Foreign, spread
from raypost import Observation
from raypost.agent_loop.environment import EnvironmentAgentLoop
from raypost.agent_loop.session import Session
from raypost.agent_loop.session_loop import SessionAgentLoop
from raypost.chat.renderer import TemplateRenderer
from raypost.config import AgentLoopConfig, RolloutConfig, TaskConfig
from raypost.config.engine import EngineConfig
from raypost.data.tokenizer import Tokenizer
from raypost.models.tiny import TinyRecipe, write_tokenizer
from raypost.types import Group, IntArray, RolloutState, SampleParams, Status
from raypost.weights.manifest import pack

TEMPLATE = Path(__file__).resolve().parents[1] / "jobs" / "recipes" / "tools.jinja"
ASKED = "State the final answer to the following arithmetic problem: 4 + 3 - 9 + 5 ="
AGAIN = {"role": "user", "content": ASKED}
TURN_TOKENS, MOST = 64, 400
DEADLINE_S = 300.0


class Twice:
    """An environment that asks twice."""

    def reset(self, metadata: dict[str, Any]) -> Observation:
        """Begin with the prompt."""
        self._asked = False
        return Observation()

    async def step(self, action: str) -> Observation:
        """Ask again, once."""
        done, self._asked = self._asked, True
        return Observation(reward=0.0, done=True) if done else Observation(messages=[AGAIN])


class Nothing:
    """A judge to whom everything is worth nothing."""

    async def judge(self, states: list[RolloutState]) -> list[float]:
        """Return zeros."""
        return [0.0] * len(states)


async def in_process(session: Session) -> float:
    """Talk with the policy without HTTP."""
    messages: list[Mapping[str, Any]] = [*session.messages]
    for _ in range(2):
        reply = await session.complete(messages, max_tokens=TURN_TOKENS)
        messages += [reply["choices"][0]["message"], AGAIN]
    return 0.0


class Subjects:
    """The ways of asking one engine."""

    def __init__(self, folder: Path, at_once: int) -> None:
        """Start the engine, with a random model in `folder`."""
        write_tokenizer(TinyRecipe(corpus="calls"), folder)
        self._tokenizer = Tokenizer.load(folder)
        self._renderer = TemplateRenderer(self._tokenizer, template=TEMPLATE.read_text())
        self._rollout = RolloutConfig(max_num_seqs=at_once, kv_cache_gb=0.5)
        self._model = _model(folder)
        config = EngineConfig(
            device="cpu", dtype="float32", max_model_len=512, seed=0, sleep_mode=False, rollout=self._rollout
        )
        os.environ.update(config.environment())
        from actors.rollout.vllm_engine import RolloutEngine

        self._engine = RolloutEngine(str(folder), config)
        self._at_once, self._made = at_once, 0
        self._client: aiohttp.ClientSession | None = None
        encode = self._tokenizer.encode
        environment = AgentLoopConfig(
            kind="environment", environment="bench.agents:Twice", max_turn_tokens=TURN_TOKENS
        )
        native = EnvironmentAgentLoop(
            self._engine,
            Twice,
            lambda text: encode(text, add_special_tokens=False),
            self._tokenizer.decode,
            environment,
            rollout=self._rollout,
            renderer=self._renderer,
        )
        self.loops: dict[str, EnvironmentAgentLoop | SessionAgentLoop] = {
            "native": native,
            "in_process": self._sessions(in_process),
            "http": self._sessions(self._over_http),
        }

    def _sessions(self, agent: Callable[[Session], Awaitable[float]]) -> SessionAgentLoop:
        loop = {"kind": "session", "agent": "bench.agents:in_process"}
        source = {"kind": "jsonl", "dataset": "none"}
        task = TaskConfig.model_validate({"source": source, "agent_loop": loop, "judge": {"kind": "exact"}})
        return SessionAgentLoop(
            self._engine, Nothing(), self._tokenizer, self._renderer, task, agent, rollout=self._rollout
        )

    async def _over_http(self, session: Session) -> float:
        """Talk with the policy over HTTP."""
        assert self._client is not None, "opened with the weights"
        messages: list[Mapping[str, Any]] = [*session.messages]
        headers = {"Authorization": f"Bearer {session.api_key}"}
        for _ in range(2):
            body = {"model": "policy", "messages": messages, "max_tokens": TURN_TOKENS}
            url = f"{session.base_url}/chat/completions"
            async with self._client.post(url, json=body, headers=headers) as response:
                reply = await response.json()
            messages += [reply["choices"][0]["message"], AGAIN]
        return 0.0

    async def load(self) -> None:
        """Bring version 0 into the engine."""
        tensors = (
            (name, weight.detach().numpy().reshape(-1).view(np.uint8), "float32", tuple(weight.shape))
            for name, weight in self._model.named_parameters()
        )
        manifest, buckets = pack(0, tensors, 256 << 20)
        await self._engine.warm_up()
        await self._engine.stage(manifest, buckets)
        await self._engine.load(manifest)
        await self._engine.resume()
        self._client = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    def _states(self) -> list[RolloutState]:
        self._made += 1
        return [
            RolloutState(
                task="default",
                group_id=self._made,
                sample_index=index,
                prompt_ids=self._renderer.render([AGAIN]),
                sample_params=SampleParams(max_tokens=MOST),
                metadata={"question": ASKED, "answer": "3"},
            )
            for index in range(self._at_once)
        ]

    async def bare(self) -> int:
        """Have AsyncLLM make the same tokens; return how many."""
        from vllm.inputs.engine import tokens_input

        from actors.engine.vllm_base import last_of
        from actors.rollout.vllm_engine import _result, _sampling

        llm, params = self._engine.llm, _sampling(SampleParams(max_tokens=TURN_TOKENS))

        async def ask(ids: IntArray, name: str) -> IntArray:
            final = await last_of(llm.generate(tokens_input(ids.tolist()), params, name))
            return _result(final.outputs[0], name).response_ids

        async def one(state: RolloutState) -> int:
            name = f"{state.group_id}/{state.sample_index}"
            first = await ask(state.prompt_ids, name)
            second = await ask(np.concatenate([state.prompt_ids, first, between]), f"{name}/2")
            return len(first) + len(second)

        between = self._renderer.bridge(np.zeros(1, np.int32), [AGAIN])
        assert between is not None, "the template gives one"
        return sum(await asyncio.gather(*map(one, self._states())))

    async def through(self, name: str) -> int:
        """Play a group through one of raypost's loops; return how many tokens were sampled."""
        states = self._states()
        group = await self.loops[name].run(Group(task="default", group_id=self._made, states=states))
        wrong = [state.error for state in group.states if state.status is not Status.COMPLETED]
        assert not wrong and len(group.states) == self._at_once, (
            wrong[:1] or "a branch: the bridge did not hold"
        )
        return sum(int(state.response_mask.sum()) for state in group.states)

    async def close(self) -> None:
        """End the engine."""
        if self._client is not None:
            await self._client.close()
        for loop in self.loops.values():
            await loop.close()
        self._engine.llm.shutdown()


def _model(folder: Path) -> LlamaForCausalLM:
    size = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    config = LlamaConfig(
        vocab_size=len(size), hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=512, tie_word_embeddings=True,
    )  # fmt: skip
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


async def measure(at_once: int, waves: int, rounds: int) -> dict[str, Any]:
    """Return what is printed."""
    rates: dict[str, list[float]] = {}
    spent_ms: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        subjects = Subjects(Path(folder), at_once)
        await subjects.load()
        ways: dict[str, Callable[[], Awaitable[int]]] = {"bare": subjects.bare}
        ways |= {name: lambda name=name: subjects.through(name) for name in subjects.loops}  # type: ignore[misc]
        for way in ways.values():
            await way()
        gc.set_threshold(GC_ALLOCATIONS)
        gc.freeze()
        others = Foreign()
        for turn in range(rounds):
            for name in list(ways)[turn % len(ways) :] + list(ways)[: turn % len(ways)]:
                begin, begin_cpu, tokens = time.perf_counter(), time.process_time(), 0
                for _ in range(waves):
                    async with asyncio.timeout(DEADLINE_S):
                        tokens += await ways[name]()
                assert tokens == waves * at_once * 2 * TURN_TOKENS, f"{name}: {tokens} tokens"
                rates.setdefault(name, []).append(tokens / (time.perf_counter() - begin))
                cpu_ms = 1000 * (time.process_time() - begin_cpu) / (waves * at_once * 2)
                spent_ms.setdefault(name, []).append(cpu_ms)
        report: dict[str, Any] = {"others_cores": round(others.cores(), 2), "at_once": at_once}
        await subjects.close()
    for name, values in rates.items():
        report[f"{name}_tokens_per_s"] = spread(values)
        report[f"{name}_cpu_ms_per_request"] = spread(spent_ms[name])
        report[f"{name}_over_bare"] = spread(a / b for a, b in zip(values, rates["bare"], strict=True))
    return report


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--waves", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print(json.dumps(uvloop.run(measure(args.at_once, args.waves, args.rounds))))


if __name__ == "__main__":
    main()
