"""`raypost audit`: nothing to say of good runs, and each kind of contradiction that was planted is found."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
import yaml
from typer.testing import CliRunner

from raypost import cli
from raypost.audit.account import Account
from raypost.audit.audit import Audit, audit, read_ledger
from raypost.audit.buffer_log import _FRAME
from raypost.audit.findings import Check, Findings
from raypost.buffer.journal import BufferJournal
from raypost.buffer.kept import KeptBatches
from raypost.checkpoint import CheckpointDir, load_state, save_state
from raypost.files.jsonl import parsed, sealed
from raypost.ledger.events import LedgerEvent
from raypost.ledger.ledger import LEDGER_FILE, Ledger
from raypost.report.files import abandon_steps
from raypost.types import GroupKey, Status
from raypost.types.packed import PackedGroups, slice_groups
from tests.unit.production import World, fate, task_config, virtual

STEPS, SAVED = 6, 4
Fields = dict[str, Any]


class Run:
    """A run folder as a driver makes it, but without actors."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoints = CheckpointDir(folder / "checkpoints", 2, {})
        self.kept = KeptBatches(folder / "batches")
        self.attempts = 0
        folder.mkdir(exist_ok=True)
        task = task_config(max_staleness=1, tail_batch_trigger_size=0)
        (folder / "config.yaml").write_text(
            yaml.safe_dump({"sync_weights_interval": 1, "tasks": [task.model_dump(mode="json")]})
        )

    def world(self) -> World:
        self.attempts += 1
        self.kept.clear()
        self.write("events.jsonl", {"event": "start", "time_s": self.now})
        journal = BufferJournal(self.folder / "buffer", f"attempt {self.attempts}")
        ledger = Ledger(self.folder / LEDGER_FILE)
        world = World(task_config(max_staleness=1, tail_batch_trigger_size=0), ledger=ledger, journal=journal)
        world.pool.fate = fate(failed={3})
        return world

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def write(self, name: str, line: Fields) -> None:
        with (self.folder / name).open("a") as file:
            file.write(sealed(json.dumps(line)))

    async def train(self, world: World, steps: Iterable[int], forget_at: int = 0) -> None:
        """Train these steps; after `forget_at` the buffer loses what it holds, as one without journal that dies."""
        await world.producer.resume(world.producer._context.version or 0)
        running = world.start()
        for step in steps:
            status, packed = await world.take(step)
            self.record(step, status.staleness, packed)
            self.kept.keep(step, packed)
            assert self.kept.settle(step)
            await world.producer.acknowledge(step)
            await world.producer.pause()
            if step == forget_at:
                world.buffer._commit({"gone": list(world.buffer.state.groups)})
            if step == SAVED:
                await self.save(world, step)
                self.kept.forget(step)
            if step != STEPS:
                await world.producer.resume(step)
        running.cancel()
        await asyncio.wait([running])

    def record(self, step: int, staleness: Iterable[int], packed: PackedGroups) -> None:
        tokens = float(len(packed.response_ids))
        record = {"staleness": list(staleness), "num_samples": float(packed.num_samples)}
        self.write("metrics.jsonl", {"step": step, "time_s": self.now, "response_tokens": tokens, **record})

    async def save(self, world: World, step: int) -> None:
        folder = self.checkpoints.begin(step)
        save_state(folder, "producer", await world.producer.state_dict(step))
        self.checkpoints.commit(step)

    async def finish(self, world: World) -> None:
        groups = (await world.producer.counts()).as_dict()
        report = {"status": "finished", "steps": STEPS, "groups": groups}
        (self.folder / "report.json").write_text(json.dumps(report))
        await self.close(world)

    async def close(self, world: World) -> None:
        await world.producer.close()
        journal = world.buffer._journal
        assert journal is not None
        journal.close()


async def one_attempt(folder: Path) -> None:
    run = Run(folder)
    world = run.world()
    await run.train(world, range(1, STEPS + 1))
    await run.finish(world)


async def two_attempts(folder: Path) -> None:
    """The first goes on after its checkpoint and dies; the second begins at the checkpoint."""
    run = Run(folder)
    world = run.world()
    await run.train(world, range(1, SAVED + 2))
    world.ledger.flush()
    await run.close(world)
    await asyncio.sleep(10)
    world = run.world()
    found = run.checkpoints.latest()
    assert found is not None
    abandon_steps(folder / "metrics.jsonl", SAVED + 1)
    await world.producer.load_state_dict(load_state(found[1], "producer"))
    await run.train(world, range(SAVED + 1, STEPS + 1))
    await run.finish(world)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good") / "run"
    virtual(one_attempt(folder))
    return folder


@pytest.fixture
def folder(tmp_path: Path, good: Path) -> Path:
    """A copy of a good run."""
    return Path(shutil.copytree(good, tmp_path / "run", symlinks=True))


def found_in(folder: Path) -> Audit:
    return audit(folder)


# ---------------------------------------------------------------- good runs


@pytest.mark.parametrize("attempts", [one_attempt, two_attempts])
def test_a_good_run_has_no_contradiction_and_everything_was_compared(
    tmp_path: Path, attempts: Callable[[Path], Any]
) -> None:
    virtual(attempts(tmp_path))
    found = found_in(tmp_path)
    assert found.num_contradictions == 0, dict(found.findings.texts)
    assert found.findings.notes == []
    assert all(found.findings.compared[check] for check in Check)
    assert found.figures["trained"] == 2 * STEPS and found.figures["failed"] == 1
    assert found.figures["last_step"] == STEPS and found.figures["checkpoints"] == [SAVED]
    assert found.figures["twice"] == found.figures["lost"] == 0


def test_a_journal_whose_beginning_is_a_snapshot_is_counted_with_the_records_of_the_groups_that_ended(
    tmp_path: Path,
) -> None:
    virtual(long_run(tmp_path))
    assert json.loads((tmp_path / LEDGER_FILE).read_text().splitlines()[0])["event"] == "snapshot"
    found = found_in(tmp_path)
    assert found.num_contradictions == 0, dict(found.findings.texts)
    assert (found.figures["sampled"], found.figures["trained"], found.figures["stored"]) == (3000, 2998, 2)
    assert found.figures["last_step"] == 1499


async def long_run(folder: Path) -> None:
    run = Run(folder)
    ledger = Ledger(folder / LEDGER_FILE)
    for step in range(1, 1501):
        keys: list[GroupKey] = [("default", 2 * step - 2), ("default", 2 * step - 1)]
        for key in keys:
            ledger.sampled(key)
            facts: Fields = {
                "tokens": [9] * 8,
                "versions": {str(step - 1): 72},
                "engines": ["long name " * 80],
            }
            ledger.stored(key, Status.COMPLETED, staleness=0, **facts)
        if step < 1500:
            ledger.leased(keys, step, [0, 0])
            ledger.trained(step)
            run.write("metrics.jsonl", {"step": step, "staleness": [0, 0], "time_s": 0.0})
    ledger.flush()


def test_a_run_that_was_killed_has_notes_and_no_contradiction(folder: Path) -> None:
    (folder / "report.json").unlink()
    lines = (folder / LEDGER_FILE).read_text().splitlines(keepends=True)
    (folder / LEDGER_FILE).write_text("".join(lines[:-2]) + '{"time": 1, "ev')
    found = found_in(folder)
    assert found.num_contradictions == 0, dict(found.findings.texts)
    assert len(found.findings.notes) == 2


def test_a_journal_without_a_move_begins_where_a_report_of_nothing_says(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / LEDGER_FILE, attempt="a")
    ledger.note(LedgerEvent.RESUMED, version=0)
    ledger.flush()
    account = Account({}, Findings())
    read_ledger(tmp_path, account, account.findings)
    assert account.moments == {(0, 0, 0, 0, 0)}


def test_an_abandoned_line_is_no_second_step(folder: Path) -> None:
    edit("metrics.jsonl", repeated({"abandoned": True}, step=3))(folder)
    assert found_in(folder).num_contradictions == 0


async def forgetful(folder: Path) -> None:
    run = Run(folder)
    world = run.world()
    await run.train(world, range(1, STEPS + 1), forget_at=SAVED - 1)
    await run.finish(world)


def test_a_buffer_that_comes_back_without_its_journal_loses_groups_and_the_audit_finds_them(
    tmp_path: Path,
) -> None:
    virtual(forgetful(tmp_path))
    lost = found_in(tmp_path).findings.texts[Check.LOST]
    assert any("its buffer lacks groups that live" in text for text in lost)
    assert any("the report itself counts" in text for text in lost)


def test_a_step_that_the_driver_had_not_recorded_when_it_died_is_a_note(tmp_path: Path) -> None:
    virtual(two_attempts(tmp_path))
    edit("metrics.jsonl", without(step=SAVED))(tmp_path)
    found = found_in(tmp_path)
    assert found.num_contradictions == 0 and f"step {SAVED} was trained and saved" in found.findings.notes[0]


# ---------------------------------------------------------------- planted contradictions


def lines_of(file: Path) -> list[Fields]:
    return [parsed(line) for line in file.read_bytes().splitlines(keepends=True)]


def edit(name: str, change: Callable[[list[Fields]], list[Fields]]) -> Callable[[Path], None]:
    """Change the lines of a file."""

    def plant(folder: Path) -> None:
        lines = lines_of(folder / name)
        (folder / name).write_text("".join(sealed(json.dumps(line)) for line in change(lines)))

    return plant


def without(**fields: Any) -> Callable[[list[Fields]], list[Fields]]:
    return lambda lines: [line for line in lines if any(line.get(k) != v for k, v in fields.items())]


def but(update: Fields, **fields: Any) -> Callable[[list[Fields]], list[Fields]]:
    """Change the first line with these fields."""

    def change(lines: list[Fields]) -> list[Fields]:
        one = next(line for line in lines if all(line.get(k) == v for k, v in fields.items()))
        one |= update
        return lines

    return change


def repeated(update: Fields, **fields: Any) -> Callable[[list[Fields]], list[Fields]]:
    """Write the first line with these fields once more, changed, behind it."""

    def change(lines: list[Fields]) -> list[Fields]:
        at = next(n for n, line in enumerate(lines) if all(line.get(k) == v for k, v in fields.items()))
        return [*lines[: at + 1], lines[at] | update, *lines[at + 1 :]]

    return change


def report(**counts: int) -> Callable[[Path], None]:
    def plant(folder: Path) -> None:
        found = json.loads((folder / "report.json").read_text())
        found["groups"] |= {name: found["groups"][name] + by for name, by in counts.items()}
        (folder / "report.json").write_text(json.dumps(found))

    return plant


def logged(change: Callable[[Path], Fields]) -> Callable[[Path], None]:
    """Append a change to the buffer's log."""

    def plant(folder: Path) -> None:
        body = json.dumps({"change": change(folder)}).encode()
        length = xxhash.xxh32_intdigest(len(body).to_bytes(4, "little"))
        with (folder / "buffer" / "log").open("ab") as file:
            file.write(_FRAME.pack(len(body), length, xxhash.xxh3_64_intdigest(body)) + body)

    return plant


def stored_group(folder: Path) -> GroupKey:
    """A group that ends in the buffer."""
    lines = lines_of(folder / LEDGER_FILE)
    last = {line["group"]: line["event"] for line in lines if "group" in line}
    return "default", next(one for one, event in last.items() if event == "stored")


def saved_state(change: Callable[[Fields], None]) -> Callable[[Path], None]:
    """Change production's state in the checkpoint, and make its manifest right again."""

    def plant(folder: Path) -> None:
        root = folder / "checkpoints"
        state = load_state(root / f"step-{SAVED}", "producer")
        change(state)
        checkpoints = CheckpointDir(root, 2, {})
        save_state(checkpoints.begin(SAVED), "producer", state)
        checkpoints.commit(SAVED)

    return plant


def lose_one_of_the_buffer(state: Fields) -> None:
    groups = state["buffer"]["groups"]
    groups["group_ids"] = groups["group_ids"].copy()
    groups["group_ids"][0] = 99


def fewer_tokens(lines: list[Fields]) -> list[Fields]:
    """Take a token from each group of the last step."""
    last = {line["group"] for line in lines if line["event"] == "leased" and line["step"] == STEPS}
    for line in lines:
        if line.get("group") in last and line.get("tokens"):
            line["tokens"][0] -= 1
    return lines


def kept_as(
    step: int, change: Callable[[PackedGroups, PackedGroups], PackedGroups]
) -> Callable[[Path], None]:
    """Put a batch made of those of the last two steps in place of that of `step`."""

    def plant(folder: Path) -> None:
        kept = KeptBatches(folder / "batches")
        batch = change(kept.read(STEPS - 1), kept.read(STEPS))
        kept.forget(step) if step == STEPS - 1 else (folder / "batches" / f"step-{step:08d}").unlink()
        kept.keep(step, batch)
        kept.settle(step)

    return plant


def backwards(packed: PackedGroups) -> PackedGroups:
    """Every trajectory in two runs, the second one of an older version."""
    lengths = packed.run_lengths
    return dataclasses.replace(
        packed,
        run_lengths=np.stack([lengths - 1, np.ones_like(lengths)], 1).ravel(),
        run_versions=np.stack([packed.run_versions, packed.run_versions - 1], 1).ravel(),
        run_masks=np.repeat(packed.run_masks, 2),
        run_offsets=2 * packed.run_offsets,
    )


def flip_a_byte(folder: Path) -> None:
    file = folder / "checkpoints" / f"step-{SAVED}" / "producer.npy"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def forget_the_last_stored(folder: Path) -> None:
    edit(LEDGER_FILE, without(group=stored_group(folder)[1]))(folder)


LEDGER = LEDGER_FILE
PLANTED: list[tuple[Check, str, Callable[[Path], None]]] = [
    (Check.FILES, "1 lines of .* damaged", lambda f: _garbage(f / LEDGER, at=-2)),
    (Check.FILES, "the record at byte", lambda f: _garbage(f / "buffer" / "log", at=40)),
    (Check.MOVES, "was sampled twice", edit(LEDGER, repeated({}, event="sampled", group=1))),
    (Check.MOVES, "never sampled", edit(LEDGER, without(event="sampled", group=1))),
    (Check.MOVES, "was stored after it had ended",
     edit(LEDGER, repeated({"event": "stored"}, event="trained", group=1))),
    (Check.MOVES, "was trained while it was stored", edit(LEDGER, without(event="leased", group=1))),
    (Check.MOVES, "is leased for steps 1 and 2", edit(LEDGER, repeated({"step": 2}, event="leased", group=1))),
    (Check.LOST, "does not know: default/1", edit(LEDGER, without(group=1))),
    (Check.TWICE, "was trained at step 1, and is trained at step 2",
     edit(LEDGER, repeated({"step": 2}, event="trained", group=1))),
    (Check.TWICE, "had been dropped, and is trained",
     edit(LEDGER, repeated({"event": "trained", "step": 2}, event="failed"))),
    (Check.STEPS, r"no group was trained at steps \[2\]", edit(LEDGER, without(event="trained", step=2))),
    (Check.STALENESS, "booked with staleness 7", edit(LEDGER, but({"staleness": 7}, event="leased", step=3))),
    (Check.STALENESS, "threshold is 2", edit(LEDGER, but({"staleness": 2}, event="leased", step=3))),
    (Check.VERSIONS, "version 0 after version 4", edit(LEDGER, but({"version": 0}, event="resumed", version=5))),
    (Check.VERSIONS, "which that step's training makes",
     edit(LEDGER, but({"versions": {"0": 2, "9": 2}}, event="stored", group=1))),
    (Check.TOKENS, "tokens were trained", edit("metrics.jsonl", but({"response_tokens": 1.0}, step=3))),
    (Check.METRICS, "samples were trained", edit("metrics.jsonl", but({"num_samples": 3.0}, step=3))),
    (Check.METRICS, r"no line for steps \[3\]", edit("metrics.jsonl", without(step=3))),
    (Check.METRICS, "groups of staleness", edit("metrics.jsonl", but({"staleness": [0]}, step=3))),
    (Check.METRICS, "step 3 is in metrics.jsonl twice", edit("metrics.jsonl", repeated({"loss": 9.0}, step=3))),
    (Check.METRICS, "step 3 is in metrics.jsonl twice", edit("metrics.jsonl", lambda lines: [*lines, lines[2]])),
    (Check.REPORT, "which the journal never came to", report(trained=1, buffered=-1)),
    (Check.REPORT, "groups sampled, .* by place", report(buffered=1)),
    (Check.LOST, "counts 1 groups as lost", report(buffered=-1, lost=1)),
    (Check.CHECKPOINT, "the checkpoint is damaged", flip_a_byte),
    (Check.CHECKPOINT, "which the journal never came to", saved_state(lambda s: s["ledger"].update(sampled=99))),
    (Check.CHECKPOINT, "samplers that handed out", saved_state(lambda s: s["samplers"]["default"].update(position=1))),
    (Check.CHECKPOINT, "takes step 9 next", saved_state(lambda s: s["progress"].update(next_consumer_step=9))),
    (Check.CHECKPOINT, "the journal says that", edit(LEDGER, but({"sampled": 3}, event="saved"))),
    (Check.LOST, "its buffer lacks groups that live", saved_state(lose_one_of_the_buffer)),
    (Check.CHECKPOINT, "groups that do not live: default/99", saved_state(lose_one_of_the_buffer)),
    (Check.TWICE, "holds groups that were trained",
     saved_state(lambda s: s["buffer"]["trained"].update(default=[[0, 99]]))),
    (Check.LOST, "that its journal lacks", logged(lambda f: {"gone": [stored_group(f)]})),
    (Check.BUFFER, "holds groups that the ledger does not have",
     logged(lambda f: {"put": [[["default", 99], 99, "completed", 0, 0, 0]]})),
    (Check.BUFFER, "holds groups that the ledger does not have", forget_the_last_stored),
    (Check.FILES, "batch of step 6 cannot be trained", lambda f: _garbage(f / "batches" / "step-00000006", at=-9)),
    (Check.BATCHES, "batch of step 6 has groups that it did not train", kept_as(6, lambda five, six: five)),
    (Check.BATCHES, "batch of step 6 lacks groups", kept_as(6, lambda five, six: slice_groups(six, 0, 1))),
    (Check.TWICE, "is in the batches of steps 5 and 6", kept_as(6, lambda five, six: five)),
    (Check.VERSIONS, "batch of step 5 has tokens of version 5", kept_as(5, lambda five, six: six)),
    (Check.VERSIONS, "trajectories that go on with an older version", kept_as(6, lambda five, six: backwards(six))),
    (Check.TOKENS, "batch of step 6 has .* tokens, the ledger", edit(LEDGER, fewer_tokens)),
    (Check.TWICE, "saw groups trained twice",
     logged(lambda f: {"lease": [9, [["default", 1]], [0]], "ack": 9})),
    (Check.TWICE, "the buffer holds groups that were trained: default/1",
     logged(lambda f: {"put": [[["default", 1], 99, "completed", 0, 0, 0]]})),
]  # fmt: skip


def _garbage(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    place = at % len(data)
    data[place] = ord("#")
    file.write_bytes(data)


@pytest.mark.parametrize(("check", "words", "plant"), PLANTED, ids=[f"{c}: {w}" for c, w, _ in PLANTED])
def test_a_planted_contradiction_is_found(
    folder: Path, check: Check, words: str, plant: Callable[[Path], None]
) -> None:
    plant(folder)
    texts = found_in(folder).findings.texts[check]
    assert any(re.search(words, text) for text in texts), texts


def test_every_kind_of_contradiction_was_planted() -> None:
    assert {check for check, _, _ in PLANTED} == set(Check)


def test_more_contradictions_than_can_be_shown_are_counted(folder: Path) -> None:
    edit(LEDGER, without(event="sampled"))(folder)
    findings = found_in(folder).findings
    assert len(findings.texts[Check.MOVES]) == 10 < findings.contradictions[Check.MOVES]


# ---------------------------------------------------------------- the command


def test_the_command_exits_with_0_for_a_good_run_and_with_1_for_a_contradiction(folder: Path) -> None:
    run = CliRunner()
    good = run.invoke(cli.app, ["audit", str(folder)])
    assert good.exit_code == 0, good.output
    edit(LEDGER, without(group=1))(folder)
    bad = run.invoke(cli.app, ["audit", str(folder)])
    assert bad.exit_code == 1 and "default/1" in bad.output
    plain = run.invoke(cli.app, ["audit", str(folder), "--json"])
    assert plain.exit_code == 1
    assert json.loads(plain.output)["contradictions"]["lost"] == 1


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    refused = CliRunner().invoke(cli.app, ["audit", str(tmp_path)])
    assert refused.exit_code == 2 and LEDGER_FILE in refused.output
