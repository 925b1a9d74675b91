"""A damaged run folder: each kind of damage is one sentence before anything starts, with file, place and way on."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from raypost.buffer.journal import BufferJournal
from raypost.checkpoint import CHECKPOINTS, CheckpointDir, load_state, save_state
from raypost.config import Config
from raypost.ledger.ledger import Ledger
from raypost.ledger.life import group_life
from raypost.ledger.summary import ledger_summary
from raypost.observe.spans import Span
from raypost.plan.checks import run_dir_problems
from raypost.report.writer import RunWriter
from raypost.types import Status
from tests.factories import make_config

LINES = ("metrics.jsonl", "events.jsonl", "spans.jsonl", "ledger.jsonl")
REPORTS = ("report.json", "report.html", "timeline.png", "curves.png", "trackers.json", "owner.json")
GARBAGE = random.Random(1).randbytes(5000)


def train(ledger: Ledger, first: int, last: int) -> None:
    for n in range(first, last):
        ledger.sampled(("sums", n))
        ledger.stored(("sums", n), Status.COMPLETED, tokens=[7, 9])
        ledger.leased([("sums", n)], n + 1, [0])
        ledger.trained(n + 1)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that saved after step 40 and was killed later."""
    made = make_config(name="hurt", runs_dir=str(tmp_path_factory.mktemp("runs")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raypost.ledger.journal.TAIL_BYTES", 2000)
        writer = RunWriter(made.run_dir, made)
        ledger = Ledger(made.run_dir / "ledger.jsonl")
        for step in range(1, 41):
            train(ledger, step - 1, step)
            ledger.flush()
            writer.write_step(step, {"loss": 0.5})
            writer.write_spans(
                [Span(actor="trainer-0", kind="train", start_s=1e9 + step, end_s=1e9 + step + 0.5)]
            )
        checkpoints = CheckpointDir(made.run_dir / CHECKPOINTS, 2, {})
        save_state(checkpoints.begin(40), "producer", {"ledger": ledger.state_dict()})
        checkpoints.commit(40)
        train(ledger, 40, 41)
        ledger.flush()
    BufferJournal(made.run_dir / "buffer", "first").close()
    for name in REPORTS:
        (made.run_dir / name).write_text("{}")
    return made.run_dir


@pytest.fixture
def config(run_dir: Path, tmp_path: Path) -> Config:
    """A copy of that run, still undamaged."""
    made = make_config(name="hurt", runs_dir=str(tmp_path))
    shutil.copytree(run_dir, made.run_dir, symlinks=True)
    assert run_dir_problems(made) == []
    return made


def flip(path: Path, share: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(share * (len(data) - 2))] ^= 0x10
    path.write_bytes(data)


def folder_instead(path: Path) -> None:
    path.unlink()
    (path / "below").mkdir(parents=True)


def pipe_instead(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link_to_itself(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


KINDS: dict[str, Callable[[Path], object]] = {
    "garbage": lambda path: path.write_bytes(GARBAGE),
    "garbage without a line": lambda path: path.write_bytes(GARBAGE.replace(b"\n", b" ")),
    "garbage behind": lambda path: path.write_bytes(path.read_bytes() + GARBAGE),
    "garbage before": lambda path: path.write_bytes(GARBAGE + path.read_bytes()),
    "text": lambda path: path.write_text("this is no line of a run\n"),
    "a line by hand": lambda path: path.write_bytes(
        path.read_bytes() + b'{"step": 1, "time": 1, "event": "x"}\n'
    ),
    "flip at the beginning": lambda path: flip(path, 0.0),
    "flip in the middle": lambda path: flip(path, 0.5),
    "flip at the end": lambda path: flip(path, 1.0),
    "zeros in the middle": lambda path: path.write_bytes(
        path.read_bytes()[:99] + bytes(40) + path.read_bytes()[139:]
    ),
    "folder in its place": folder_instead,
    "pipe in its place": pipe_instead,
    "link to itself": link_to_itself,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LINES)
def test_damage_of_a_file_of_lines_is_one_sentence_before_anything_starts(
    config: Config, name: str, kind: str
) -> None:
    path = config.run_dir / name
    KINDS[kind](path)
    [problem] = run_dir_problems(config)
    assert str(path) in problem and ("remove" in problem or "mend" in problem) and "\n" not in problem
    # The way on is one: without the file the run goes on.
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    assert run_dir_problems(config) == []


@pytest.mark.parametrize("kind", ["emptied", "cut in half", "of another run"])
def test_a_ledger_that_does_not_reach_its_checkpoint_is_one_sentence(
    config: Config, tmp_path: Path, kind: str
) -> None:
    path = config.run_dir / "ledger.jsonl"
    if kind == "of another run":
        other = Ledger(tmp_path / "other" / "ledger.jsonl")
        train(other, 0, 2)
        other._journal.flush()  # type: ignore[union-attr]
        shutil.copy(tmp_path / "other" / "ledger.jsonl", path)
    else:
        os.truncate(path, 0 if kind == "emptied" else path.stat().st_size // 2)
    [problem] = run_dir_problems(config)
    assert "the checkpoint of step 40 was saved at byte" in problem and "remove it" in problem


@pytest.mark.parametrize(
    "kind", ["garbage", "flip at the beginning", "flip in the middle", "emptied", "pipe in its place"]
)
def test_damaged_records_are_one_sentence(config: Config, kind: str) -> None:
    path = config.run_dir / "ledger.closed"
    if kind == "emptied":
        os.truncate(path, 0)
    else:
        KINDS[kind](path)
    [problem] = run_dir_problems(config)
    assert str(path) in problem and "remove" in problem


@pytest.mark.parametrize("name", [*REPORTS, "buffer/lock"])
def test_a_folder_in_the_place_of_what_is_written_later_is_one_sentence(config: Config, name: str) -> None:
    folder_instead(config.run_dir / name)
    [problem] = run_dir_problems(config)
    assert problem == f"{config.run_dir / name} is no file, though the run has one there: remove it"


@pytest.mark.parametrize("name", ["buffer", "checkpoints", "samples", "tensorboard"])
def test_a_file_in_the_place_of_a_folder_is_one_sentence(config: Config, name: str) -> None:
    path = config.run_dir / name
    shutil.rmtree(path, ignore_errors=True)
    path.write_text("")
    [problem] = run_dir_problems(config)
    assert problem == f"{path} is no folder, though the run has one there: remove it"


@pytest.mark.parametrize("damaged", [b"", GARBAGE, b"a: [", b"- 1", b"tasks: 3", b"\xff\xfe"])
def test_a_damaged_configuration_is_one_problem_whose_way_on_is_one(config: Config, damaged: bytes) -> None:
    path = config.run_dir / "config.yaml"
    path.write_bytes(damaged)
    [problem] = run_dir_problems(config)
    assert (
        "config.yaml cannot be read" in problem and "remove that file; the run's checkpoints tell" in problem
    )
    path.unlink()
    assert run_dir_problems(config) == []
    shutil.rmtree(config.run_dir / CHECKPOINTS)
    [problem] = run_dir_problems(config)
    assert "holds files of no run" in problem


def test_what_the_buffers_journal_holds_is_no_concern_of_the_next_start(config: Config) -> None:
    for path in (config.run_dir / "buffer").iterdir():
        path.write_bytes(GARBAGE)
    assert run_dir_problems(config) == []


def test_a_start_that_ended_before_its_configuration_was_written_keeps_no_other_out(tmp_path: Path) -> None:
    config = make_config(name="early", runs_dir=str(tmp_path))
    Ledger(config.run_dir / "ledger.jsonl").flush()
    BufferJournal(config.run_dir / "buffer", "first").close()
    (config.run_dir / "owner.json").write_text("")
    (config.run_dir / "traceback.txt").write_text("")
    (config.run_dir / "ray_logs").mkdir()
    assert run_dir_problems(config) == []


def go_on_without(config: Config, name: str, until: int) -> None:
    """Continue the run from its checkpoint to a group, one of its files gone."""
    state = load_state(config.run_dir / CHECKPOINTS / "step-40", "producer")["ledger"]
    (config.run_dir / name).unlink()
    ledger = Ledger(config.run_dir / "ledger.jsonl")
    ledger.load_state_dict(state)
    train(ledger, 40, until)
    ledger.flush()


def test_a_run_goes_on_without_its_ledger_and_counts_what_its_checkpoint_counted(config: Config) -> None:
    go_on_without(config, "ledger.jsonl", until=42)
    summary = ledger_summary(config.run_dir)
    assert (summary.counts.sampled, summary.counts.trained, summary.problems) == (42, 42, [])
    assert group_life(config.run_dir, "3").end == "trained"
    assert run_dir_problems(config) == []


def test_a_run_goes_on_without_its_records_and_says_what_it_cannot_explain(config: Config) -> None:
    go_on_without(config, "ledger.closed", until=90)
    assert ledger_summary(config.run_dir).counts.trained == 90
    assert group_life(config.run_dir, "60").end == "trained"
