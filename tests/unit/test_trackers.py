"""Trackers: what each service is told, that a run goes on there, and that none of them can harm a run."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from raypost import cli
from raypost.config import Config
from raypost.config.trackers import TrackerKind
from raypost.report import files, plots, trackers
from raypost.report.trackers import Trackers, mlflow_name
from raypost.report.writer import RunWriter
from raypost.types import RunStatus
from tests import synthetic_run as run
from tests.factories import plain_config


class Service:
    """Remembers what it is told; fails or hangs where a test says so."""

    def __init__(self, run_id: str | None, fails_at: int = 0, hangs: threading.Event | None = None) -> None:
        self.run_id = run_id or "made-1"
        self.known = run_id
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.ended: tuple[RunStatus | None, list[str]] | None = None
        self._fails_at, self._hangs = fails_at, hangs

    def log(self, step: int, scalars: Any) -> None:
        if self._hangs is not None:
            self._hangs.wait(60)
        if step == self._fails_at:
            raise ConnectionError("the service is gone")
        self.rows.append((step, dict(scalars)))

    def finish(self, status: RunStatus | None, attached: Sequence[Path]) -> None:
        self.ended = status, [path.name for path in attached]


def made_of(folder: Path, config: Config, **options: Any) -> tuple[Trackers, list[Service]]:
    services: list[Service] = []

    def make(config: Config, run_dir: Path, run_id: str | None) -> Service:
        services.append(Service(run_id, **options))
        return services[-1]

    folder.mkdir(exist_ok=True)
    return Trackers(config, folder, {"wandb": make, "tensorboard": make}), services


def config_of(*kinds: TrackerKind) -> Config:
    return run.config(trackers=list(kinds))


def test_a_tracker_is_told_all_and_a_resumed_run_goes_on_under_its_id(tmp_path: Path) -> None:
    for known in (None, "made-1"):
        told, services = made_of(tmp_path, config_of("wandb"))
        for step in (1, 2):
            told.log(step, {"train/loss": step})
        report = tmp_path / "report.html"
        report.touch()
        told.finish("finished", [report, tmp_path / "not there"])
        (service,) = services
        assert service.known == known
        assert service.rows == [(1, {"train/loss": 1}), (2, {"train/loss": 2})]
        assert service.ended == ("finished", ["report.html"])
        assert json.loads((tmp_path / files.TRACKERS).read_text()) == {"wandb": "made-1"}
        assert told.problems() == []


def test_a_tracker_that_fails_is_left_out_and_the_others_go_on(tmp_path: Path) -> None:
    broken, sound = Service(None, fails_at=2), Service(None)
    told = Trackers(
        config_of("wandb", "tensorboard"),
        tmp_path,
        {"wandb": lambda *_: broken, "tensorboard": lambda *_: sound},
    )
    for step in (1, 2, 3):
        told.log(step, {"train/loss": 1.0})
    told.finish("finished", [])
    assert [step for step, _ in broken.rows] == [1] and broken.ended is None
    assert [step for step, _ in sound.rows] == [1, 2, 3] and sound.ended is not None
    assert told.problems() == [
        "tracker wandb failed and was left out from then on: ConnectionError: the service is gone"
    ]


def test_a_tracker_that_hangs_holds_up_neither_steps_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "FINISH_S", 0.2)
    monkeypatch.setattr(trackers, "QUEUE", 5)
    hangs = threading.Event()
    told, _ = made_of(tmp_path, config_of("wandb"), hangs=hangs)
    for step in range(20):
        told.log(step, {"train/loss": 1.0})
    told.finish("finished", [])
    hangs.set()
    slow, late = told.problems()
    assert slow == "tracker wandb is too slow: it lacks steps"
    assert late.startswith("tracker wandb did not end within")


def test_what_a_tracker_could_not_do_stands_in_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site").mkdir()
    text = "class Settings:\n    def __init__(self, **_): pass\ndef init(**_): raise OSError('no key')\n"
    (tmp_path / "site" / "wandb.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(plots, "draw", lambda *_: plots.Drawn({}, b"", b""))
    recorder = RunWriter(tmp_path / "run", config_of("tensorboard", "wandb"))
    recorder.write_step(1, run.metrics(1))
    report = recorder.finish("finished", None, run.counts())
    assert report["status"] == "finished"
    assert report["problems"] == ["tracker wandb failed and was left out from then on: OSError: no key"]
    assert "no key" in (tmp_path / "run" / files.REPORT_HTML).read_text()
    del sys.modules["wandb"]


def test_a_tracker_whose_package_is_not_installed_is_refused_with_the_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    path = tmp_path / "config.yaml"
    path.write_text(
        json.dumps(plain_config(trackers=["tensorboard", "wandb", "tensorboard"], runs_dir=str(tmp_path)))
    )
    result = CliRunner().invoke(cli.app, ["plan", "--config", str(path)])
    assert result.exit_code == 2
    assert (
        "trackers has 'wandb', but wandb cannot be imported here: pip install 'raypost[wandb]'"
        in result.stderr
    )
    assert "trackers names one twice" in result.stderr


def test_no_tracker_at_all_is_a_choice(tmp_path: Path) -> None:
    recorder = RunWriter(tmp_path, config_of())
    recorder.write_step(1, run.metrics(1))
    recorder.close()
    assert not (tmp_path / files.TENSORBOARD).exists() and not (tmp_path / files.TRACKERS).exists()


def test_names_of_metrics_fit_mlflow() -> None:
    assert mlflow_name("eval/pass@16/sums") == "eval/pass_16/sums"


# ---------------------------------------------------------------- the services themselves, where installed


def two_sessions(folder: Path, kind: TrackerKind) -> None:
    """A run that is stopped after two steps and continued after the first of them, with its report."""
    for steps in ((1, 2), (2, 3)):
        recorder = RunWriter(folder, config_of(kind))
        for step in steps:
            recorder.write_step(step, {"loss": 10.0 * step, "raw_reward_mean/sums": 0.5})
        recorder.write_eval(steps[-1], {"held_out": 0.5, "pass@2": 0.75})
        report = recorder.finish("finished", None, run.counts())
        assert report["problems"] == []


def test_wandb_offline_needs_no_network_and_goes_on_with_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    two_sessions(tmp_path, "wandb")
    run_id = json.loads((tmp_path / files.TRACKERS).read_text())["wandb"]
    sessions = sorted((tmp_path / "wandb").glob(f"offline-run-*-{run_id}"))
    assert sessions and all((one / f"run-{run_id}.wandb").stat().st_size > 0 for one in sessions)
    assert (sessions[-1] / "files" / files.REPORT_HTML).exists()
    assert b"train/loss" in (sessions[-1] / f"run-{run_id}.wandb").read_bytes()


def test_mlflow_has_metrics_parameters_and_the_report_in_a_local_folder(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    two_sessions(tmp_path, "mlflow")
    run_id = json.loads((tmp_path / files.TRACKERS).read_text())["mlflow"]
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    history = client.get_metric_history(run_id, "train/loss")
    assert [(one.step, one.value) for one in history] == [(1, 10.0), (2, 20.0), (2, 20.0), (3, 30.0)]
    found = client.get_run(run_id)
    assert (found.info.status, found.data.params["train.num_steps"]) == ("FINISHED", "80")
    assert "eval/pass_2" in found.data.metrics and "train/raw_reward_mean/sums" in found.data.metrics
    attached = {one.path for one in client.list_artifacts(run_id)}
    assert attached == {files.REPORT_HTML, files.REPORT_JSON, files.CONFIG}
    assert len(client.search_runs([found.info.experiment_id])) == 1, "the same run was continued"


def test_trackio_has_the_rows_of_both_sessions_in_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    two_sessions(tmp_path / "run", "trackio")
    run_id = json.loads((tmp_path / "run" / files.TRACKERS).read_text())["trackio"]
    from trackio.sqlite_storage import SQLiteStorage

    rows = SQLiteStorage.get_logs(trackers.PROJECT, run_id)
    assert [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row] == [
        (1, 10.0), (2, 20.0), (2, 20.0), (3, 30.0),
    ]  # fmt: skip
    assert SQLiteStorage.get_runs(trackers.PROJECT) == [run_id]
