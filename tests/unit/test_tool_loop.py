"""The loop of tools: what is called, what the policy is told, what is trained, and who is to blame."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest

from raypost.agent_loop.tools import CUT, ToolAgentLoop
from raypost.chat.renderer import TemplateRenderer
from raypost.config import AgentLoopConfig
from raypost.data.functions import FunctionTool
from raypost.errors import ConfigError, JudgeError, ToolError
from raypost.sandbox import tools as sandbox_tools
from raypost.types import GenerateResult, Group, RolloutState, SampleParams, Status
from raypost.types.turns import turns_of
from tests.unit.chat_templates import TEMPLATES, bpe
from tests.unit.sandboxes import needs_sandbox
from tests.unit.scripted_environments import AnswersInTurn, carried
from tests.unit.scripted_generator import Scorer, result

STOP = bpe().eos_ids[0]
CALLED: list[Any] = []


def add(a: int, b: int = 0) -> int:
    """Adds two numbers.

    Args:
        a: the first
        b: the second, which may be
            left out
    """
    CALLED.append((a, b))
    return a + b


async def divide(a: float, b: float, how: Literal["exact", "whole"] = "exact") -> float:
    """Divides."""
    CALLED.append((a, b))
    if b == 0:
        raise ToolError("b must not be 0")
    return a / b


def gives(value: Any) -> Callable[[], Any]:
    def f() -> Any:
        """Gives something."""
        if isinstance(value, BaseException):
            raise value
        return value() if callable(value) else value

    return f


def call(name: str = "add", **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def said(*texts: str, reason: str = "stop") -> list[GenerateResult]:
    encoded = [bpe().encode(text, add_special_tokens=False).tolist() for text in texts]
    return [result([*ids, STOP], reason) for ids in encoded]


def loop_of(
    engine: Any,
    *functions: Callable[..., Any],
    judge: Any = None,
    template: str = "chatml with tools",
    **options: Any,
) -> ToolAgentLoop:
    renderer = TemplateRenderer(bpe(), template=TEMPLATES[template])
    tools = [FunctionTool(function, "a tool") for function in functions or (add, divide)]
    config = AgentLoopConfig(kind="tools", tools=("a:b",), **options)
    return ToolAgentLoop(engine, judge or Scorer(), bpe(), renderer, tools, config)


def init(count: int = 1, max_tokens: int = 2000) -> Group:
    renderer = TemplateRenderer(bpe(), template=TEMPLATES["chatml with tools"])
    states = [
        RolloutState(
            task="default",
            group_id=0,
            sample_index=index,
            prompt_ids=renderer.render([{"role": "user", "content": "3 plus 4?"}]),
            sample_params=SampleParams(max_tokens=max_tokens, stop_token_ids=(STOP,)),
        )
        for index in range(count)
    ]
    return Group(task="default", group_id=0, states=states)


def play(*texts: str, functions: tuple[Callable[..., Any], ...] = (), **options: Any) -> RolloutState:
    CALLED.clear()
    engine = AnswersInTurn(*said(*texts))
    return asyncio.run(loop_of(engine, *functions, **options).run(init())).states[0]


def context(state: RolloutState) -> str:
    return bpe().decode(state.response_ids[~state.response_mask], skip_special_tokens=False)


# ---------------------------------------------------------------- the sandbox's tools


@needs_sandbox
@pytest.mark.parametrize(
    ("tool", "text", "told"),
    [
        (sandbox_tools.python, "print(6 * 7)", "42"),
        (sandbox_tools.python, "print(1); raise ValueError('no')", "1\nTraceback"),
        (sandbox_tools.python, "import sys; sys.exit(3)", "error: it ended with exit code 3"),
        (sandbox_tools.python, "open('/etc/passwd')", "FileNotFoundError"),
        (sandbox_tools.python, "while True: print('x' * 99999)", "error: it wrote too much"),
        (sandbox_tools.shell, "echo $((6 * 7)); ls /root", "42"),
    ],
)
def test_a_program_of_the_policys_runs_in_the_sandbox_and_its_end_is_told(
    tool: Any, text: str, told: str
) -> None:
    argument = "code" if tool is sandbox_tools.python else "command"
    program = call(tool.__name__, **{argument: text})
    one = play(program, "done", functions=(tool,), max_observation_tokens=400, observation_cut="start")
    assert one.status is Status.COMPLETED, one.error
    assert told in context(one)


# ---------------------------------------------------------------- turns


def test_the_policy_calls_until_it_answers_and_the_answer_is_judged() -> None:
    engine = AnswersInTurn(*said(f"I add.{call(a=3, b=4)}", "It is 7."))
    (one,) = asyncio.run(loop_of(engine).run(init())).states
    assert (one.status, one.reward, one.finish_reason) == (Status.COMPLETED, 1.0, "stop")
    assert one.response_text == "It is 7.", "not the observation, in which the answer stands too"
    assert context(one) == "\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n"
    trained = bpe().decode(one.response_ids[one.response_mask], skip_special_tokens=False)
    assert trained == f"I add.{call(a=3, b=4)}<|im_end|>It is 7.<|im_end|>"
    sent = engine.requests[1].token_ids.tolist()
    assert sent == [*one.prompt_ids, *one.response_ids][: len(sent)]
    first, last = turns_of(one)
    assert (first.calls[0]["name"], first.calls[0]["end"], last.done) == ("add", "returned", True)


def test_calls_of_a_turn_are_made_at_once_and_answered_in_their_order() -> None:
    together = threading.Barrier(2)

    def meet(who: str) -> str:
        """Meets."""
        together.wait(timeout=120)
        return who

    one = play(call("meet", who="x") + call("meet", who="y"), "done", functions=(meet,))
    assert one.status is Status.COMPLETED
    assert context(one).index("\nx<") < context(one).index("\ny<")


def test_the_last_of_max_turns_calls_nothing() -> None:
    one = play(call(a=1), call(a=2), call(a=3), max_turns=2)
    assert (one.status, one.finish_reason, CALLED) == (Status.COMPLETED, "length", [(1, 0)])


def test_a_result_that_does_not_fit_ends_the_trajectory_and_it_is_judged() -> None:
    engine = AnswersInTurn(*said(call(a=3, b=4)))
    (one,) = asyncio.run(loop_of(engine).run(init(max_tokens=70))).states
    assert (one.status, one.finish_reason, one.reward) == (Status.COMPLETED, "length", 1.0)
    assert one.num_tokens <= 70 and one.response_mask.all()


# ---------------------------------------------------------------- what the policy is told


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("<tool_call>{</tool_call>", "error: no call: it is no JSON"),
        (call("sub", a=1), "error: no tool 'sub': there are add, divide"),
        (call(b=1), "error: bad arguments for add: a: Field required"),
        (call(a="x"), "error: bad arguments for add: a: Input should be a valid integer"),
        (call(a=1, c=2), "error: bad arguments for add: c: Extra inputs"),
        (call("divide", a=1, b=1, how="not"), "Input should be 'exact' or 'whole'"),
        (call("divide", a=1, b=0), "error: b must not be 0"),
    ],
)
def test_what_the_policy_does_wrong_it_is_told(text: str, told: str) -> None:
    one = play(text, "well")
    assert one.status is Status.COMPLETED and told in context(one)


def test_calls_beyond_the_bound_are_not_made() -> None:
    one = play(call(a=1) + call(a=2) + call(a=3), "done", max_parallel_calls=2)
    assert sorted(CALLED) == [(1, 0), (2, 0)] and "at most 2 calls at once" in context(one)


@pytest.mark.parametrize(("side", "kept"), [("end", "A" * 8), ("start", "Z" * 8), ("middle", "A" * 8)])
def test_a_long_observation_is_cut_on_the_side_that_is_asked_for(side: str, kept: str) -> None:
    text = "A" * 50_000_000 + "Z" * 100
    one = play(call("f"), "done", functions=(gives(text),), max_observation_tokens=100, observation_cut=side)
    assert one.status is Status.COMPLETED and kept in context(one) and CUT in context(one)
    assert ("A" * 8 in context(one), "Z" * 8 in context(one)) == (side != "start", side != "end")
    assert int((~one.response_mask).sum()) < 150


def test_what_is_no_text_becomes_json() -> None:
    assert '{"a": [1, null]}' in context(play(call("f"), "x", functions=(gives(lambda: {"a": [1, None]}),)))
    assert play(call("f"), "x", functions=(gives(None),)).status is Status.COMPLETED


# ---------------------------------------------------------------- the world's failures


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (ValueError("no route"), "environment: tool f failed: ValueError('no route')"),
        (b"raw", "returned 3 bytes"),
        (lambda: object(), "neither text nor JSON"),
        (lambda: threading.Event().wait(30), "longer than step_timeout_s=0.2"),
    ],
)
def test_a_tools_failure_is_failed_by_name_and_no_observation(value: Any, why: str) -> None:
    limits: dict[str, Any] = {"step_timeout_s": 0.2} if "step_timeout_s" in why else {}
    one = play(call("f"), "x", functions=(gives(value),), **limits)
    assert one.status is Status.FAILED and why in str(one.error), one.error


def test_a_template_that_cannot_go_on_fails_with_a_hint() -> None:
    one = play(call(a=1), "x", template="counts messages")
    assert one.status is Status.FAILED and "raypost plan" in str(one.error)


# ---------------------------------------------------------------- pauses and judging


def test_a_call_that_runs_when_a_pause_comes_is_made_once() -> None:
    async def main() -> None:
        CALLED.clear()
        began, released = asyncio.Event(), asyncio.Event()

        async def slow() -> str:
            """Takes its time."""
            CALLED.append("slow")
            began.set()
            await released.wait()
            return "seven"

        engine = AnswersInTurn(*said(call("slow"), "It is."))
        loop = loop_of(engine, slow)
        loop._grace_s = 0.01
        running = asyncio.create_task(loop.run(init()))
        await began.wait()
        await loop.interrupt()
        paused = carried(await running)
        assert (paused.status, loop.num_parked) == (Status.ABORTED, 1)
        released.set()
        (one,) = (await loop.run(paused)).states
        assert one.status is Status.COMPLETED and "seven" in context(one) and CALLED == ["slow"]
        assert len(engine.requests) == 2

    asyncio.run(main())


def test_without_its_episode_a_trajectory_starts_again_and_is_counted() -> None:
    async def main() -> RolloutState:
        CALLED.clear()
        (first,) = said(call(a=1))
        paused = await loop_of(AnswersInTurn(first, result([], "abort"))).run(init())
        done = await loop_of(AnswersInTurn(first, *said("x"))).run(carried(paused))
        return done.states[0]

    one = asyncio.run(main())
    assert (one.status, one.num_restarts, CALLED) == (Status.COMPLETED, 1, [(1, 0)] * 2)


def test_finished_members_wait_for_their_siblings_and_are_then_judged_without_a_call() -> None:
    async def main() -> None:
        CALLED.clear()
        judge, engine = Scorer(), AnswersInTurn(*said("7"), result([], "abort"), *said("8"))
        loop = loop_of(engine, judge=judge)
        paused = await loop.run(init(2))
        assert paused.status is Status.ABORTED and judge.calls == []
        done = await loop.run(carried(paused))
        assert done.status is Status.COMPLETED and judge.calls == [[0, 1]] and len(engine.requests) == 3
        assert [one.response_text for one in done.states] == ["7", "8"]

    asyncio.run(main())


def test_a_judges_failure_keeps_the_answer_which_is_judged_again() -> None:
    async def main() -> None:
        judge = Scorer(rewards=JudgeError("away"))
        engine = AnswersInTurn(*said("7"))
        loop = loop_of(engine, judge=judge)
        (one,) = (await loop.run(init())).states
        assert one.status is Status.FAILED and one.error == "judge: away"
        one.status, judge.rewards = Status.ABORTED, [0.5]
        (one,) = (await loop.run(Group(task="default", group_id=0, states=[one]))).states
        assert (one.status, one.reward, len(engine.requests)) == (Status.COMPLETED, 0.5, 1)

    asyncio.run(main())


# ---------------------------------------------------------------- schemas


def test_a_schema_comes_from_signature_and_docstring() -> None:
    assert FunctionTool(add, "it").schema == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "the first"},
                    "b": {
                        "type": "integer",
                        "default": 0,
                        "description": "the second, which may be left out",
                    },
                },
                "required": ["a"],
            },
        },
    }


def _untyped(a) -> None:  # type: ignore[no-untyped-def]
    """No type."""


def _silent(a: int) -> None: ...


def _many(*a: int) -> None:
    """Any number."""


def _foreign(a: np.ndarray) -> None:
    """An array."""


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (_untyped, "no type for its parameter 'a'"),
        (_silent, "no docstring"),
        (_many, "only named ones"),
        (_foreign, "without schema"),
    ],
)
def test_a_function_without_a_schema_is_refused(function: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        FunctionTool(function, "it")


def test_calls_are_spans_of_the_host() -> None:
    loop = loop_of(AnswersInTurn(*said(call(a=1, b=2), "3")), add)
    assert asyncio.run(loop.run(init())).status is Status.COMPLETED
    (span,) = loop.spans.drain()
    assert span.kind == "tool" and span.end_s >= span.start_s


@needs_sandbox
def test_a_run_of_the_sandbox_is_a_span_of_its_own_within_the_calls() -> None:
    async def main() -> None:
        said_so = said(call("python", code="print(6 * 7)"), "42")
        loop = loop_of(AnswersInTurn(*said_so), sandbox_tools.python)
        assert (await loop.run(init())).status is Status.COMPLETED
        spans = {span.kind: span for span in loop.spans.drain()}
        assert set(spans) == {"tool", "sandbox"}
        outer, inner = spans["tool"], spans["sandbox"]
        assert outer.start_s <= inner.start_s < inner.end_s <= outer.end_s + 1e-3

    asyncio.run(main())
