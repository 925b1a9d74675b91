"""States and configurations for tests of judges that ask a function."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import numpy as np

from raypost.config import JudgeConfig, SourceConfig, TaskConfig
from raypost.judges.function_child import Caller, FunctionSpec, load
from raypost.types import RolloutState, Sample, SampleParams


def task_of(judge: JudgeConfig, **changes: Any) -> TaskConfig:
    source = SourceConfig(
        kind="jsonl", dataset="rows.jsonl", answer_field=changes.pop("answer_field", "answer")
    )
    return TaskConfig(name="words", source=source, judge=judge, **changes)


def config_of(source: str, function: str = "reward.py:score", **changes: Any) -> JudgeConfig:
    """A judge whose function has this text."""
    text = textwrap.dedent(source)
    return JudgeConfig(kind="function", function=function, function_source=text, **changes)


def state_of(response: str, index: int = 0, **metadata: Any) -> RolloutState:
    return RolloutState(
        task="words",
        group_id=7,
        sample_index=index,
        prompt_ids=np.array([1, 2], np.int32),
        sample_params=SampleParams(max_tokens=8),
        metadata={"question": "2 + 2?", "answer": "4", "level": 3, **metadata},
        response_ids=np.arange(len(response), dtype=np.int32),
        logprobs=np.zeros(len(response), np.float32),
        policy_versions=np.zeros(len(response), np.int32),
        response_mask=np.ones(len(response), np.bool_),
        response_text=response,
    )


def sample_of(response: str, **metadata: Any) -> Sample:
    return Sample(
        prompt="2 + 2?",
        response=response,
        prompt_ids=np.array([1, 2], np.int32),
        response_ids=np.array([5, 6], np.int32),
        answer="4",
        metadata={"question": "2 + 2?", "answer": "4", "level": 3, **metadata},
        turns=[{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": response}],
    )


def called(source: str, *responses: str, name: str = "score", **spec: Any) -> list[float]:
    """The scores of a function with this text, called in this process."""
    made = FunctionSpec(
        function=f"reward.py:{name}", source=textwrap.dedent(source), **{"timeout_s": 60.0, **spec}
    )
    caller, samples = Caller(made, load(made)), [sample_of(one) for one in responses]
    return list(caller.scores(caller.results(samples), len(samples)))


def write(folder: Path, source: str) -> Path:
    """A file with this text."""
    path = folder / "reward.py"
    path.write_text(textwrap.dedent(source))
    return path
