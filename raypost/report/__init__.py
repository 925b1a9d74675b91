"""The run folder: what is written while a run goes on, and the report made of it."""

from raypost.report.writer import RunStatus, RunWriter, rebuild

__all__ = ["RunStatus", "RunWriter", "rebuild"]
