"""Plays a task of a verifiers taskset with the null harness: the program that raypost runs for each trajectory.

python play.py TASKSET            plays the task that the session names, and leaves its reward
python play.py TASKSET --rows     prints the taskset as rows for raypost
"""

import asyncio
import json
import os
import sys
from pathlib import Path

import verifiers.v1 as vf


async def play(tasks: vf.Taskset) -> None:
    """Play one task against the session's endpoint; verifiers streams, retries and scores."""
    row = json.loads(Path(os.environ["RAYPOST_SESSION"]).read_text())["metadata"]
    task = next(iter(tasks.include(idx=[f"{row['idx']}:{row['idx'] + 1}"])))
    config = vf.AgentConfig(
        harness={"id": "null"},
        runtime=vf.SubprocessConfig(),
        client=vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY"),
        model=os.environ["OPENAI_MODEL"],
    )
    trace = await vf.make_agent(config).run(task)
    if not trace.ok:
        raise SystemExit(f"the rollout failed: {trace.last_error}")
    Path(os.environ["RAYPOST_REWARD"]).write_text(str(trace.reward))


if __name__ == "__main__":
    # The harness runs its own program with uv, which lies beside this interpreter.
    os.environ["PATH"] = f"{Path(sys.prefix) / 'bin'}:{os.environ.get('PATH', '')}"
    taskset = vf.load_taskset(vf.TasksetConfig(id=sys.argv[1]))
    if "--rows" in sys.argv:
        for each in taskset:
            answer = str(getattr(each.data, "answer", "none"))
            print(json.dumps({"prompt": each.data.prompt_text, "answer": answer, "idx": each.data.idx}))
    else:
        asyncio.run(play(taskset))
