"""Every wait has a deadline where it stands, or is known here with what ends it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.waiting_places import unbounded

ROOT = Path(__file__).resolve().parents[2]
WORK = "waits for work, not for somebody: its thread or loop has nothing else to do"
ENDED = "what it waits for has ended, or was killed"
OWN = "its caller has the deadline"
VARIABLE = "reads a context variable"

BOUNDED_ELSEWHERE = {
    "raypost/agent_loop/external.py ExternalSessions.play": f"{OWN}: session_timeout_s, by _first",
    "raypost/agent_loop/fork_server.py Hosted._called": f"{OWN}: step_timeout_s, in another process that ends this one",
    "raypost/agent_loop/fork_server.py Hosted._called.wait": f"{OWN}: Hosted._called",
    "raypost/agent_loop/group_loop.py GroupLoop._in_turn": "members that have deadlines; a pause cancels the wait",
    "raypost/agent_loop/user_simulator.py _called": f"{OWN}: Episode.ask",
    "raypost/data/mcp_tools.py McpConnection._serve": "waits for its own close; calls have deadlines",
    "actors/training/broadcaster.py WeightBroadcaster._prepare": "a call of the ranks, which has a deadline",
    "actors/training/sender.py GroupSender.send": "its own node's objects; the transport has a timeout",
    "jobs/recovery.py GangRecovery.start": "a start of the ranks: train.step_timeout_s; faults bound their number",
    "raypost/agent_loop/group_loop.py GroupLoop._until_interrupted": "judges and environments have their own",
    "raypost/agent_loop/threads.py SideThread.call": f"{OWN}: Episode.ask",
    "raypost/agent_loop/threads.py SideThread._work": WORK,
    "raypost/agent_loop/threads.py LoopThread._work": WORK,
    "raypost/cli/commands.py submit": "follows a job until it ends, or Ctrl-C",
    "raypost/agent_loop/session.py Session._sample": "opened by the pool's resume, or cancelled at session_timeout_s",
    "raypost/agent_loop/session.py Session.pause": "requests in engines that are stopped, which have deadlines",
    "raypost/agent_loop/session.py Session.end": ENDED,
    "raypost/agent_loop/session_loop.py SessionAgentLoop._go_on": f"{OWN}: session_timeout_s, by _first",
    "raypost/agent_loop/session_loop.py SessionAgentLoop._function": f"{OWN}: session_timeout_s, in _go_on",
    "raypost/agent_loop/program.py _run": f"{OWN}: session_timeout_s, in _go_on",
    "raypost/agent_loop/turn_loop.py _ended": f"{OWN}: the session's",
    "raypost/collector/gated_generator.py GatedGenerator.generate": f"{OWN}: GroupLoop._generate",
    "raypost/collector/gated_generator.py GatedGenerator.pause": f"{OWN}: Pausing._ask; each request has one too",
    "raypost/judges/code.py CodeJudge.examine": "both programs have limits.wall_s",
    "raypost/judges/function_child.py Server._awaited": f"{OWN}: Server._reply",
    "raypost/judges/function_child.py awaited": "the process is ended by its owner after judge.timeout_s",
    "raypost/judges/function_child.py awaited.wait": "the process is ended by its owner after judge.timeout_s",
    "raypost/judges/function_process.py FunctionProcess._once": "whoever has the turn has judge.timeout_s",
    "raypost/plan/user_code.py _tried": ENDED,
    "raypost/production/pending.py Signal.wait": f"{OWN}; production itself goes on for ever",
    "raypost/production/pending.py uninterrupted": "a step of the producer: calls of the buffer, which have deadlines",
    "raypost/report/trackers.py Trackers._serve": WORK,
    "raypost/sandbox/run.py _Program._end_all": ENDED,
    "raypost/observe/waits.py waiting.__enter__": VARIABLE,
    "actors/engine/life.py _end_with_owner.wait": "waits for the end of its owner, beside all else",
    "actors/engine/life.py EngineLife.alive": "rollout.liveness_timeout_s, and whoever called the worker",
    "actors/frozen/reference.py ReferenceGroup._call": f"{OWN}: compute_ref_logprobs",
    "actors/frozen/vllm_engine.py FrozenEngine.warm_up": f"{OWN}: rollout.start_timeout_s",
    "actors/many_calls.py CallBatches._answers": f"{OWN}: Remote._call",
    "actors/many_calls.py ManyCalls._exchange": f"{OWN}: Remote._call",
    "actors/remote.py Watched.lives": "waits for the end of its own process, beside all else",
    "actors/rollout/gate.py EngineGate._run_out": "asyncio.wait with run_out_s ends the task",
    "actors/rollout/vllm_engine.py RolloutEngine.prompt_logprobs": f"{OWN}: sync.timeout_s of the pool",
    "actors/telemetry/recorder.py Telemetry._ask": f"{OWN}: Telemetry._poll, which asks on later",
    "actors/training/ranks.py Ranks.beside.answer": f"{OWN}: Ranks._outcomes",
    "actors/training/ranks.py Ranks._in_turn.answer": f"{OWN}: Ranks._outcomes",
    "jobs/driver.py _seen": "the job itself",
    "jobs/driver.py _until_it_ends": "the job itself",
    "jobs/pool_load.py PoolLoad.take": f"{OWN}: take_batch has take_timeout_s",
    "jobs/roles.py Roles._batch": "a check of the broadcaster, which has a deadline",
    "jobs/roles.py Roles._prepared": "a call of the broadcaster, begun before, which has a deadline",
    "jobs/records.py Records._meanwhile": "calls of telemetry, which have deadlines",
    "jobs/records.py Records._served": "a call of the pool, which has a deadline",
    "jobs/records.py Records._step": "calls of broadcaster and producer, begun before, which have deadlines",
    "jobs/roles.py Roles._load_no_more": ENDED,
    "jobs/roles.py Roles._swap": "a call of the producer, which has a deadline",
    "jobs/roles.py Roles.acknowledge": "a call of the producer, which has a deadline",
    "jobs/saving.py Saver.save": "a snapshot of the ranks: train.step_timeout_s",
    "jobs/saving.py Saver.settle": ENDED,
    "jobs/saving.py Saver.written": "each attempt has deadlines, and checkpoint.retry_s bounds them all",
    "jobs/saving.py Saver._write": "a snapshot of the ranks: train.step_timeout_s",
    "jobs/stopping.py unless": "the work has deadlines of its own",
    "jobs/stopping.py watching": "waits for the death of a role beside the work",
    "jobs/stopping.py stopped": "waits for a signal beside the work",
    "jobs/stopping.py production_ended": "waits for the end of production beside the work",
}
"""What ends a wait that has no timeout where it stands."""


def test_no_wait_is_without_an_end() -> None:
    found = {
        f"{file.relative_to(ROOT)} {function}"
        for room in ("raypost", "actors", "jobs")
        for file in (ROOT / room).rglob("*.py")
        for function, _ in unbounded(file)
    }
    new, gone = found - BOUNDED_ELSEWHERE.keys(), BOUNDED_ELSEWHERE.keys() - found
    assert not new, (
        f"give these waits a timeout (actors.remote.within, asyncio.timeout), or say what ends them: {new}"
    )
    assert not gone, f"these waits are not there any more: {gone}"


@pytest.mark.parametrize(
    ("line", "is_bounded"),
    [
        ("await handle.fit.remote(1)", False),
        ("await within(handle.fit.remote(1), 3, 'x')", True),
        ("await ref", False),
        ("await other_coroutine()", True),
        ("async with asyncio.timeout(3):\n        await ref", True),
        ("async with asyncio.timeout(None):\n        await ref", False),
        ("ray.get(ref)", False),
        ("ray.get(ref, timeout=3)", True),
        ("process.wait()", False),
        ("process.wait(3)", True),
        ("await asyncio.wait(tasks)", False),
        ("await asyncio.wait(tasks, timeout=3)", True),
        ("queue.get()", False),
        ("values.get('x')", True),
        ("VARIABLE.get()", True),
        ("async with deadline:\n        await ref", True),
        ("', '.join(names)", True),
        ("thread.join()", False),
        ("fcntl.flock(file, fcntl.LOCK_EX)", False),
        ("fcntl.flock(file, kind | fcntl.LOCK_NB)", True),
        ("subprocess.run(command)", False),
        ("subprocess.run(command, timeout=3)", True),
        ("select.select([a], [], [])", False),
        ("lock.acquire(timeout=3)", True),
    ],
)
def test_waits_are_told_from_other_calls(tmp_path: Path, line: str, is_bounded: bool) -> None:
    (tmp_path / "x.py").write_text(f"async def f():\n    {line}\n")
    assert [one for one, _ in unbounded(tmp_path / "x.py")] == ([] if is_bounded else ["f"])
