"""Random sessions against a generator that logs what it was sent, and the check that nothing else is trained."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raypost.chat.messages import PROBE_TOOL
from raypost.chat.record import Prepared, RecordedTurn, SessionRecord, message_of
from raypost.chat.renderer import TemplateRenderer
from raypost.data.tokenizer import Tokenizer
from raypost.types import NO_VERSION, GenerateResult, IntArray, RolloutState, SampleParams
from tests.unit.chat_templates import TEMPLATES

CALL = '<tool_call>\n{"name": "look", "arguments": {"x": "3 + 4"}}\n</tool_call>'
WORDS = ["four", " 4", "\n\n", "naïve", "東京", "🙂", "{}", "  two", "3 + 4", "<|im_end|>", ""]


class LoggingGenerator:
    """Samples at random, and remembers each token with what stood before it: by its logprob, which no other has."""

    def __init__(self, rng: random.Random, tokenizer: Tokenizer) -> None:
        self.rng = rng
        self.tokenizer = tokenizer
        self.sampled: dict[float, tuple[IntArray, int, int]] = {}
        """By logprob: (ids before the token, the token, its version)."""

    def generate(self, sent: IntArray, left: int, said: str | None, reason: str) -> GenerateResult:
        """`said` None: ids at random, as a policy that is no good gives them."""
        if said is None:
            ids = [self.rng.randrange(self.tokenizer.vocab_size) for _ in range(left)]
            ids = [one for one in ids if one not in self.tokenizer.eos_ids]
        else:
            ids = self.tokenizer.encode(said, add_special_tokens=False).tolist()
        if reason == "stop":
            ids.append(self.tokenizer.eos_ids[0])
        version, logprobs = self.rng.randrange(9), []
        for place, token in enumerate(ids):
            logprob = -float(len(self.sampled) + 1)
            before = np.concatenate([sent, np.asarray(ids[:place], np.int32)])
            self.sampled[logprob] = (before, token, version)
            logprobs.append(logprob)
        return GenerateResult(
            response_ids=np.asarray(ids, np.int32),
            logprobs=np.asarray(logprobs, np.float32),
            policy_versions=np.full(len(ids), version, np.int32),
            finish_reason=reason,
            worker="w",
        )


@dataclass
class Session:
    """A client that keeps conversations, extends them, rewrites them, and hangs up."""

    rng: random.Random
    record: SessionRecord
    generator: LoggingGenerator
    tools: list[Any]
    length: int
    conversations: list[list[dict[str, Any]]] = field(default_factory=list)
    unfinished: list[tuple[Prepared, list[dict[str, Any]]]] = field(default_factory=list)
    dropped: set[float] = field(default_factory=set)

    def play(self, turns: int) -> None:
        for _ in range(turns):
            if self.unfinished and self.rng.random() < 0.5:
                self._answer(*self.unfinished.pop(self.rng.randrange(len(self.unfinished))))
            else:
                messages = self._messages()
                self._answer(self.record.prepare(messages, self.tools), messages)

    def _messages(self) -> list[dict[str, Any]]:
        asked: dict[str, Any] = {"role": "user", "content": self._words()}
        if not self.conversations or self.rng.random() < 0.1:
            system = [{"role": "system", "content": self._words()}] if self.rng.random() < 0.5 else []
            return [*system, asked]
        messages = [*self.rng.choice(self.conversations)]
        if self.rng.random() < 0.15:  # history rewritten
            place = self.rng.randrange(len(messages))
            messages[place] = {**messages[place], "content": self._words()}
        calls = messages[-1].get("tool_calls", [])
        results = [{"role": "tool", "tool_call_id": c["id"], "content": self._words()} for c in calls]
        return [*messages, *results, *([] if results and self.rng.random() < 0.8 else [asked])]

    def _answer(self, prepared: Prepared, messages: list[dict[str, Any]]) -> None:
        said = self.rng.choice(
            [None, None, CALL, f"<think>{self._words()}</think>{self._words()}{CALL}{CALL}"]
        )
        reason = self.rng.choice(["stop", "stop", "length", "abort"])
        result = self.generator.generate(prepared.token_ids, self.rng.randint(1, self.length), said, reason)
        self.record.commit(prepared, result)
        if reason == "abort":
            self.unfinished.append((prepared, messages))
        elif self.rng.random() < 0.05:  # the client hung up
            self.record.drop(prepared.turn)
            self._drop(prepared.turn)
        else:
            self.conversations.append([*messages, message_of(prepared.turn)])

    def _drop(self, turn: RecordedTurn) -> None:
        self.dropped.update(float(one) for _, logprobs, _ in turn.segments for one in logprobs)

    def _words(self) -> str:
        return "".join(self.rng.choices(WORDS, k=self.rng.randint(1, 4)))


def drifted(
    seed: int,
    template: str,
    tokenizer: Tokenizer,
    length: int = 12,
    make: type[SessionRecord] = SessionRecord,
) -> int:
    """Play a random session; return how many trained tokens stand behind ids that the engine was not sent.

    Asserts all that holds beside: versions, masks, each token once.
    """
    rng = random.Random(seed)
    record = make(TemplateRenderer(tokenizer, template=TEMPLATES[template]))
    session = Session(rng, record, LoggingGenerator(rng, tokenizer), rng.choice([[], [PROBE_TOOL]]), length)
    session.play(rng.randint(1, 12))
    trained: list[float] = []
    wrong = 0
    for one in record.trajectories(state_of()):
        one.check_aligned()
        ids = np.concatenate([one.prompt_ids, one.response_ids])
        context = ~one.response_mask
        assert not one.logprobs[context].any() and (one.policy_versions[context] == NO_VERSION).all()
        for place in np.flatnonzero(one.response_mask).tolist():
            before, token, version = session.generator.sampled[float(one.logprobs[place])]
            assert (one.response_ids[place], one.policy_versions[place]) == (token, version)
            wrong += not np.array_equal(ids[: len(one.prompt_ids) + place], before)
            trained.append(float(one.logprobs[place]))
    unfinished = {
        float(x) for p, _ in session.unfinished for _, logprobs, _ in p.turn.segments for x in logprobs
    }
    expected = set(session.generator.sampled) - session.dropped - unfinished
    assert len(trained) == len(set(trained)) and set(trained) == expected, "each sampled token once"
    return wrong


def state_of() -> RolloutState:
    return RolloutState(
        task="t",
        group_id=0,
        sample_index=0,
        prompt_ids=np.zeros(0, np.int32),
        sample_params=SampleParams(max_tokens=10_000),
    )
