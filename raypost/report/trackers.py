"""Trackers: TensorBoard, Weights & Biases, trackio and MLflow, given the metrics of a run as they come.

Owns what each service is told and the names under which a run is continued there. Each tracker works in a thread of its
own, behind a queue with a bound: one that is slow, hangs or raises costs the run nothing but its own figures, and is
named among the report's problems.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from raypost.config import Config
from raypost.config.trackers import TrackerKind
from raypost.report import files
from raypost.types import RunStatus

PROJECT = "raypost"
"""What runs are filed under, unless the service's own environment variable says otherwise."""
QUEUE = 1000
"""Records that wait for a tracker at most."""
FINISH_S = 20.0
"""Longest time that all trackers together may take to end."""
FLUSH_S = 10
PARAMS_AT_ONCE, PARAM_CHARACTERS = 100, 500
"""Bounds of MLflow on parameters."""


class Tracker(Protocol):
    """One service. Made, used and finished in one thread."""

    run_id: str
    """What the service knows the run as; "" if a folder is all it needs."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Record scalars of a train step. After a resume a step may come again."""
        ...

    def finish(self, status: RunStatus | None, attached: Sequence[Path]) -> None:
        """End the session, with these files. `status` None: the session was not ended by a report."""
        ...


# ---------------------------------------------------------------- services


class TensorBoard:
    """Scalars in the run folder."""

    def __init__(self, config: Config, run_dir: Path, run_id: str | None) -> None:
        """Open an event file."""
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.run_id = "tensorboard"
        self._resumed = run_id is not None
        self._writer = EventFileWriter(str(run_dir / files.TENSORBOARD), flush_secs=FLUSH_S)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write one summary."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._resumed:
            # TensorBoard then forgets what an earlier session showed from here on.
            restart = Event(wall_time=time.time(), step=step, session_log=SessionLog(status=SessionLog.START))
            self._writer.add_event(restart)
            self._resumed = False
        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def finish(self, status: RunStatus | None, attached: Sequence[Path]) -> None:
        """Flush and close the file."""
        self._writer.close()


class WeightsAndBiases:
    """A run of wandb; WANDB_MODE=offline needs no network, and `wandb sync` sends it later."""

    def __init__(self, config: Config, run_dir: Path, run_id: str | None) -> None:
        """Begin or continue the run."""
        import wandb

        self.run_id = run_id or uuid.uuid4().hex[:8]
        self._wandb = wandb
        self._run_dir = run_dir.absolute()
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=config.name,
            id=self.run_id,
            resume="allow",
            dir=str(self._run_dir),
            config=config.model_dump(mode="json"),
            settings=wandb.Settings(console="off", silent=True),
        )
        # Its own step must not go back, which a resumed run's does.
        self._run.define_metric("*", step_metric="train_step")

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Log one row."""
        self._run.log({**scalars, "train_step": step})

    def finish(self, status: RunStatus | None, attached: Sequence[Path]) -> None:
        """Attach the files and end the session."""
        for path in attached:
            self._run.save(str(path.absolute()), base_path=str(self._run_dir), policy="now")
        self._run.finish(exit_code=int(status in (None, "failed")))
        # Its process writes on after `finish`, and ends with this one.
        self._wandb.teardown()


class Trackio:
    """A run of trackio, in its own local database: TRACKIO_DIR says where."""

    def __init__(self, config: Config, run_dir: Path, run_id: str | None) -> None:
        """Begin or continue the run, which trackio knows by its name."""
        import trackio

        self.run_id = run_id or f"{config.name}-{uuid.uuid4().hex[:8]}"
        self._run = trackio.init(
            project=PROJECT, name=self.run_id, config=config.model_dump(mode="json"), resume="allow", embed=False,
            auto_log_cpu=False, auto_log_gpu=False,
        )  # fmt: skip
        self._trackio = trackio

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Log one row."""
        self._run.log(dict(scalars), step=step)

    def finish(self, status: RunStatus | None, attached: Sequence[Path]) -> None:
        """Attach the files and end the session."""
        for path in attached:
            self._trackio.log_artifact(path, name=f"{self.run_id}-{path.name}", type="report")
        self._run.finish()


class MLflow:
    """A run of MLflow, in the run folder's mlflow.db, or where MLFLOW_TRACKING_URI points."""

    def __init__(self, config: Config, run_dir: Path, run_id: str | None) -> None:
        """Begin or continue the run."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient

        folder = run_dir.absolute()
        own = os.environ.get("MLFLOW_TRACKING_URI")
        self._client = MlflowClient(tracking_uri=own or f"sqlite:///{folder / 'mlflow.db'}")
        if run_id is not None:
            self.run_id = run_id
            self._client.update_run(run_id, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(PROJECT)
        place = None if own else (folder / "mlflow-artifacts").as_uri()
        experiment = (
            found.experiment_id if found else self._client.create_experiment(PROJECT, artifact_location=place)
        )
        self.run_id = str(self._client.create_run(experiment, run_name=config.name).info.run_id)
        params = [
            (name, str(value)[:PARAM_CHARACTERS]) for name, value in _flat(config.model_dump(mode="json"))
        ]
        for first in range(0, len(params), PARAMS_AT_ONCE):
            self._batch(params=params[first : first + PARAMS_AT_ONCE])

    def _batch(
        self,
        params: Sequence[tuple[str, str]] = (),
        step: int = 0,
        scalars: Mapping[str, float] | None = None,
    ) -> None:
        from mlflow.entities import Metric, Param

        now_ms = int(time.time() * 1000)
        values = [Metric(mlflow_name(name), value, now_ms, step) for name, value in (scalars or {}).items()]
        self._client.log_batch(self.run_id, metrics=values, params=[Param(*one) for one in params])

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Log one row."""
        self._batch(step=step, scalars=scalars)

    def finish(self, status: RunStatus | None, attached: Sequence[Path]) -> None:
        """Attach the files and say how the session ended."""
        for path in attached:
            self._client.log_artifact(self.run_id, str(path))
        ends = {"finished": "FINISHED", "stopped": "KILLED"}
        self._client.set_terminated(self.run_id, "FAILED" if status is None else ends.get(status, "FAILED"))


def mlflow_name(name: str) -> str:
    """Return a metric's name with what MLflow allows: letters, digits, and -_./: and spaces."""
    return "".join(one if one.isalnum() or one in "-_./: " else "_" for one in name)


def _flat(plain: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(plain, Mapping) and plain:
        for name, value in plain.items():
            yield from _flat(value, f"{place}.{name}".lstrip("."))
    elif isinstance(plain, list) and plain:
        for number, value in enumerate(plain):
            yield from _flat(value, f"{place}.{number}")
    else:
        yield mlflow_name(place), plain


Make = Callable[[Config, Path, str | None], Tracker]
TRACKERS: dict[TrackerKind, Make] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
    "mlflow": MLflow,
}


# ---------------------------------------------------------------- all of a run's


class Trackers:
    """The trackers of one session."""

    def __init__(self, config: Config, run_dir: Path, make: Mapping[TrackerKind, Make] = TRACKERS) -> None:
        """Start one thread each, which begins the run there, or continues the one of an earlier session."""
        self._file = run_dir / files.TRACKERS
        self._ids = _read_ids(self._file)
        self._lock = threading.Lock()
        self._problems: list[str] = []
        self._queues: dict[str, queue.Queue[Callable[[Tracker], None] | None]] = {}
        self._threads = []
        for kind in config.trackers:
            self._queues[kind] = queue.Queue(QUEUE)
            begin = _bound(make[kind], config, run_dir, self._ids.get(kind))
            thread = threading.Thread(
                target=self._serve, args=(kind, begin), name=f"tracker {kind}", daemon=True
            )
            thread.start()
            self._threads.append((kind, thread))

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Hand scalars to all trackers. Does not wait."""
        for kind, waiting in self._queues.items():
            try:
                waiting.put_nowait(lambda tracker: tracker.log(step, scalars))
            except queue.Full:
                self._problem(f"tracker {kind} is too slow: it lacks steps")

    def finish(self, status: RunStatus | None, attached: Sequence[Path]) -> None:
        """End all of them, with these files, within FINISH_S."""
        until = time.monotonic() + FINISH_S
        there = [path for path in attached if path.exists()]
        for waiting in self._queues.values():
            for last in (lambda tracker: tracker.finish(status, there), None):
                try:
                    waiting.put(last, timeout=max(0.0, until - time.monotonic()))
                except queue.Full:
                    break
        for kind, thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                self._problem(
                    f"tracker {kind} did not end within {FINISH_S:.0f} s: it may lack what came last"
                )
        self._queues.clear()

    def problems(self) -> list[str]:
        """Return what went wrong since the last call."""
        with self._lock:
            found, self._problems = self._problems, []
        return found

    def _problem(self, text: str) -> None:
        with self._lock:
            if text not in self._problems:
                self._problems.append(text)

    def _serve(self, kind: str, begin: Callable[[], Tracker]) -> None:
        tasks = self._queues[kind]
        try:
            tracker = begin()
            self._remember(kind, tracker.run_id)
            while (task := tasks.get()) is not None:
                task(tracker)
        # A supervision boundary: whatever a service raises, the run goes on without it.
        except Exception as error:
            self._problem(
                f"tracker {kind} failed and was left out from then on: {type(error).__name__}: {error!s:.300}"
            )
            while tasks.get() is not None:
                pass

    def _remember(self, kind: str, run_id: str) -> None:
        with self._lock:
            self._ids[kind] = run_id
            files.write_json(self._file, self._ids)


def _bound(make: Make, config: Config, run_dir: Path, run_id: str | None) -> Callable[[], Tracker]:
    return lambda: make(config, run_dir, run_id)


def _read_ids(path: Path) -> dict[str, str]:
    """Return the ids of earlier sessions; none if the file says none: the run then begins anew there."""
    try:
        found = json.loads(path.read_text())
        return {str(kind): str(run_id) for kind, run_id in found.items()}
    except (OSError, ValueError, AttributeError):
        return {}
