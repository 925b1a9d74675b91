"""What a run waits for, on snapshots that are constructed: the graph of waits, its root, and the text."""

from __future__ import annotations

import pytest

from raypost.doctor import stacks, text
from raypost.doctor.diagnosis import Child, Seen, SeenWait, Severity, diagnose
from raypost.doctor.watch import Silence, Stalls
from raypost.observe import waits


def wait(what: str, age_s: float = 30.0, outside: str | None = None, group: str | None = None) -> SeenWait:
    return SeenWait(what, age_s, 60.0, outside, group)


def seen(name: str, *waits_: SeenWait, **rest: object) -> Seen:
    return Seen(name, pid=hash(name) % 1000 + 1, host="node-1", waits=waits_, **rest)  # type: ignore[arg-type]


DRIVER = seen("driver", SeenWait("producer.run", 900.0), wait("producer.take_batch"))
PRODUCER = seen(
    "producer",
    wait("the batch of step 7"),
    wait("agent-loop-0.run", 29.0, group="sums/40"),
    wait("replay-buffer.put", 0.1),
)
AGENT = seen("agent-loop-0", wait("judge-0.judge", 28.0, group="sums/40"))
JUDGE = seen("judge-0", wait("http://judge:80/score", 27.0, "judge", "sums/40"))
BUFFER = seen("replay-buffer")
ROLLOUT = seen("rollout-0")
OTHERS = (BUFFER, ROLLOUT, seen("rollout-controller"), seen("telemetry"), seen("evaluator"))


def test_a_judge_that_never_answers_is_named_with_its_group_and_address() -> None:
    found = diagnose([DRIVER, PRODUCER, AGENT, JUDGE, *OTHERS])
    assert found.cause.severity is Severity.OUTSIDE
    assert [step.name for step in found.cause.chain] == ["driver", "producer", "agent-loop-0", "judge-0"]
    assert found.headline == (
        "the judge does not answer: judge-0, group sums/40 has waited 27 of at most 60 s for http://judge:80/score"
    )
    assert found.waited_s == 30


def test_an_environment_that_hangs_is_named_with_its_group() -> None:
    agent = seen("agent-loop-0", wait("Maze.step", 25.0, "environment", "maze/3"))
    found = diagnose([DRIVER, PRODUCER, agent, *OTHERS])
    assert "the environment does not answer: agent-loop-0, group maze/3 has waited 25" in found.headline


@pytest.mark.parametrize("name", ["agent-loop-0", "judge-0", "producer"])
def test_a_stopped_process_on_the_way_is_the_root_whatever_else_is_waited_for(name: str) -> None:
    world = {one.name: one for one in (DRIVER, PRODUCER, AGENT, JUDGE, *OTHERS)}
    stopped = Seen(name, 4711, "node-1", state="stopped", waits=world[name].waits, silent_s=40.0)
    found = diagnose([*({**world, name: stopped}.values())])
    assert found.headline == f"{name} is stopped by a signal (process 4711 on node-1)"
    assert found.cause.fix == "kill -CONT 4711 lets it go on; kill -9 4711 ends it"


def test_a_stopped_process_that_nobody_waits_for_is_told_beside_the_cause() -> None:
    evaluator = Seen("evaluator", 9, "node-1", state="stopped")
    found = diagnose([DRIVER, PRODUCER, AGENT, JUDGE, evaluator, BUFFER, ROLLOUT])
    assert found.cause.severity is Severity.OUTSIDE
    assert [one.text for one in found.also] == ["evaluator is stopped by a signal (process 9 on node-1)"]


def test_a_stopped_process_is_the_cause_where_the_chain_ends_with_somebody_who_is_merely_busy() -> None:
    """A rank reads its batch from the process that stored it, which no wait names."""
    driver = seen("driver", wait("fit of trainer-0"))
    buffer = Seen("replay-buffer", 8, "node-1", state="stopped")
    assert diagnose([driver, seen("trainer-0"), buffer]).headline.startswith("replay-buffer is stopped")


def test_the_engine_of_a_worker_is_told_from_the_worker() -> None:
    agent = seen("agent-loop-0", wait("rollout-0 to generate sums/40/1/ab12", 28.0, group="sums/40"))
    worker = seen(
        "rollout-0", wait("its engine", 28.0, "engine"), children=(Child(77, "VLLM::EngineCor", "stopped"),)
    )
    found = diagnose([DRIVER, PRODUCER, agent, worker, BUFFER])
    assert found.headline == "the engine of rollout-0 is stopped by a signal (process 77, VLLM::EngineCor)"
    alive = seen("rollout-0", wait("its engine", 28.0, "engine"))
    found = diagnose([DRIVER, PRODUCER, agent, alive, BUFFER])
    assert (
        found.headline
        == "the engine does not answer: rollout-0, group sums/40 has waited 28 of at most 60 s for its engine"
    )


def test_a_role_without_a_process_is_named_with_what_it_needs() -> None:
    driver = seen("driver", wait("the engine of rollout-1 to start"))
    absent = Seen("rollout-1", state="absent", silent_s=31.0, resources={"GPU": 8})
    found = diagnose([driver, ROLLOUT, absent])
    assert found.headline == "rollout-1 has no process after 31 s: no node has given it 8 GPU"
    assert diagnose([seen("driver", wait("2 x {'CPU': 9} for trainer", 30, "node"))]).headline == (
        "no node has what is asked for: driver has waited 30 of at most 60 s for 2 x {'CPU': 9} for trainer"
    )


def test_a_process_of_another_machine_that_fell_silent_is_named_with_its_node() -> None:
    judge = Seen("judge-0", 5, "node-9", state="far", silent_s=44.0, waits=JUDGE.waits)
    found = diagnose([DRIVER, PRODUCER, AGENT, judge])
    assert found.headline == "judge-0, or its node gave no sign of life for 44 s (process 5 on node-9)"


def test_a_file_system_that_hangs_is_named_by_its_file() -> None:
    writes = wait("/runs/a/ledger.jsonl to take what is written", 20.0, "file system")
    producer = seen("producer", *PRODUCER.waits, writes, blocked_s=20.0)
    found = diagnose([DRIVER, producer, AGENT, JUDGE])
    assert found.headline == (
        "the file system does not answer producer: /runs/a/ledger.jsonl to take what is written, for 20 s"
    )


def test_a_blocked_event_loop_is_named_with_the_place() -> None:
    frames = (
        stacks.Frame("sleep", "/usr/lib/python3.11/time.py", 3),
        stacks.Frame("score", "/home/me/rewards.py", 9),
    )
    judge = seen("judge-0", blocked_s=12.0, blocked_in=frames)
    found = diagnose([DRIVER, PRODUCER, AGENT, judge])
    assert "judge-0 is blocked for 12 s" in found.headline
    assert found.headline.endswith("at score (me/rewards.py:9), in sleep (python3.11/time.py:3)")


def rank(number: int, *frames: str) -> Seen:
    listed = "\n".join(f"    {one}" for one in frames)
    stack = f'Thread 0x7f (active): "MainThread"\n{listed}\n    fit (/x/actors/training/worker.py:150)\n'
    return seen(f"trainer-{number}", stack=stack)


ALL_REDUCE = (
    "wait (/v/torch/distributed/c10d.py:1)",
    "all_reduce (/v/torch/distributed/c10d.py:9)",
    "step (/x/raypost/trainer/engine.py:7)",
)
BARRIER = ("barrier (/v/torch/distributed/c10d.py:5)", "save (/x/raypost/trainer/rank.py:8)")
FITTING = seen("driver", wait("fit of trainer-0, trainer-1"))


def test_the_rank_that_does_not_come_to_a_collective_is_the_root() -> None:
    found = diagnose([FITTING, rank(0, *ALL_REDUCE), rank(1, "loss (/home/me/loss.py:3)")])
    assert found.headline == (
        "trainer-1 does not come to the collective that trainer-0 (all_reduce) waits in: it is at loss (me/loss.py:3)"
    )


def test_what_is_waited_for_in_the_background_comes_after_what_the_step_waits_for() -> None:
    driver = seen("driver", SeenWait("producer.run", 900.0), wait("fit of trainer-0, trainer-1"))
    ranks = [rank(0, *ALL_REDUCE), rank(1, "loss (/home/me/loss.py:3)")]
    assert diagnose([driver, PRODUCER, AGENT, JUDGE, *ranks]).headline.startswith("trainer-1 does not come")


def test_ranks_in_different_collectives_wait_for_each_other() -> None:
    found = diagnose([FITTING, rank(0, *ALL_REDUCE), rank(1, *BARRIER)])
    assert found.headline == (
        "all ranks wait in different collectives for each other: trainer-0 is in the collective all_reduce, called by "
        "step (trainer/engine.py:7); trainer-1 is in the collective barrier, called by save (trainer/rank.py:8)"
    )


def test_the_rank_in_another_collective_than_the_others_is_the_root() -> None:
    driver = seen("driver", wait("fit of trainer-0, trainer-1, trainer-2"))
    found = diagnose([driver, rank(0, *ALL_REDUCE), rank(1, *BARRIER), rank(2, *ALL_REDUCE)])
    assert found.headline.startswith(
        "trainer-1 is in another collective than the other ranks (all_reduce): trainer-1 is in the collective barrier, "
        "called by save (trainer/rank.py:8); trainer-0 is in the collective all_reduce"
    )
    assert found.concerned[0] == "trainer-1"


def test_a_full_object_store_is_named_with_who_puts_into_it() -> None:
    putting = (
        "Worker.put_object (/v/ray/_private/worker.py:800)",
        "publish (/x/actors/training/worker.py:200)",
    )
    found = diagnose([seen("driver", wait("publish of trainer-0")), rank(0, *putting)])
    assert found.headline == (
        "the object store has no room: trainer-0 is in a put of the object store, called by publish "
        "(training/worker.py:200)"
    )


def test_ray_itself_is_named_first_when_it_is_stopped() -> None:
    found = diagnose(
        [DRIVER, PRODUCER, AGENT, JUDGE], ["Ray's GCS is stopped by a signal (process 3 on node-1)"]
    )
    assert found.headline == "Ray's GCS is stopped by a signal (process 3 on node-1)"


def test_a_driver_that_is_stopped_is_the_root_and_an_ended_run_has_none() -> None:
    driver = Seen("driver", 2, "node-1", state="stopped", waits=DRIVER.waits)
    assert (
        diagnose([driver, PRODUCER, AGENT, JUDGE]).headline
        == "driver is stopped by a signal (process 2 on node-1)"
    )
    gone = Seen("driver", 2, "node-1", state="gone")
    assert "driver is gone" in diagnose([gone, PRODUCER]).headline
    assert diagnose([gone, Seen("producer", 3, "n", state="gone")]).headline == (
        "the run has ended: none of its 2 processes is there"
    )


def test_waits_in_a_circle_end() -> None:
    a, b = seen("a-0", wait("b-0.work")), seen("b-0", wait("a-0.work"))
    found = diagnose([seen("driver", wait("a-0.start")), a, b])
    assert found.cause.severity >= Severity.BUSY


def test_names_are_found_whole() -> None:
    driver = seen("driver", wait("rollout-10.start"))
    found = diagnose(
        [driver, Seen("rollout-1", 1, "n", state="stopped"), Seen("rollout-10", 2, "n", state="stopped")]
    )
    assert found.headline.startswith("rollout-10 is stopped")
    other = Seen("loop-0", 1, "n", state="stopped")
    found = diagnose([seen("driver", wait("agent-loop-0.run"), wait("judge-0.judge", 9.0)), JUDGE, other])
    assert found.cause.severity is Severity.OUTSIDE


def test_the_report_has_the_answer_the_chain_and_the_evidence() -> None:
    world = [DRIVER, PRODUCER, AGENT, JUDGE]
    evidence = {"judge-0": text.Evidence("process 5 on node-1", "Thread 1\n  File x", ("last words",))}
    lines = text.report(diagnose(world), world, evidence).splitlines()
    assert lines[0].startswith("the driver has waited 30 s; the judge does not answer")
    assert [line.strip(" └─").split(" ")[0] for line in lines[2:6]] == [
        "driver",
        "producer",
        "agent-loop-0",
        "judge-0",
    ]
    assert "group sums/40" in lines[3]
    assert lines[-3:] == ["  File x", "---- its log ends with", "last words"]


@pytest.mark.parametrize(
    "printed",
    [
        'Thread 0x01 (most recent call first):\n  File "/a/b/c.py", line 7 in f\n  File "/a/b/d.py", line 8 in g',
        'Thread 12 (idle): "MainThread"\n    f (/a/b/c.py:7)\n    g (/a/b/d.py:8)',
    ],
)
def test_stacks_of_both_kinds_are_read(printed: str) -> None:
    (frames,) = stacks.threads(printed)
    assert [str(one) for one in frames] == ["f (b/c.py:7)", "g (b/d.py:8)"]
    assert stacks.doing(stacks.working(printed)) == "at f (b/c.py:7)"


def test_open_waits_have_their_group_and_close_whatever_happens() -> None:
    waits.working_for.set("sums/1")
    with pytest.raises(KeyError), waits.waiting("x", 3.0, "judge"):
        (one,) = [found for found in waits.open_waits() if found.what == "x"]
        assert (one.limit_s, one.outside, one.group) == (3.0, "judge", "sums/1")
        raise KeyError
    assert not [found for found in waits.open_waits() if found.what == "x"]


def test_a_stall_is_told_once_and_not_of_what_usually_takes_long() -> None:
    stalls = Stalls(10.0, but=["evaluator."])
    assert stalls.new([("trainer-0.fit", 0.0, 60.0), ("producer.run", 0.0, None)], 9.0) == []
    assert stalls.new([("trainer-0.fit", 0.0, 60.0), ("evaluator.evaluate", 0.0, 60.0)], 11.0) == [
        "trainer-0.fit"
    ]
    assert stalls.new([("trainer-0.fit", 0.0, 60.0)], 12.0) == []
    assert stalls.new([], 13.0) == []
    assert stalls.new([("trainer-0.fit", 20.0, 60.0)], 50.0) == []  # three times 12 s
    assert stalls.new([("trainer-0.fit", 20.0, 60.0)], 57.0) == ["trainer-0.fit"]


def test_silence_is_told_once_until_it_ends() -> None:
    silence = Silence(10.0)
    assert silence.new({"a": 1, "b": 1}, 0.0) == []
    assert silence.new({"a": 2, "b": 1}, 11.0) == ["b"]
    assert silence.new({"a": 3, "b": 1}, 13.0) == []
    assert silence.new({"a": 4, "b": 2}, 14.0) == []
    assert silence.new({"a": 4, "b": 2}, 25.0) == ["a", "b"]


@pytest.mark.parametrize("step", [-3600, 3600])
def test_a_clock_that_is_set_makes_nobody_silent_and_hides_nobody_who_is(step: int) -> None:
    silence = Silence(10.0)
    assert silence.new({"a": 10_000, "b": 10_000}, 0.0) == []
    assert silence.new({"a": 10_002 + step, "b": 10_000}, 2.0) == []
    assert silence.new({"a": 10_011 + step, "b": 10_000}, 11.0) == ["b"]
