"""Separated placement: rollout and training on separate devices, both running all the time.

    dataset -> producer -> agent loops -> rollout workers (vLLM)
                  |             |
                  |           judges
                  v
            replay buffer --take_batch--> trainer (DeepSpeed) --broadcast--> rollout workers

The driver owns the clock and nothing else: a batch passes through it as a ref that it never opens.

    ray job submit --working-dir . -- python -m jobs.train --config jobs/recipes/quickstart.yaml
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a file: the repository root is not on the path yet
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from jobs.driver import main
from jobs.wiring import spawn
from raypost.config import Config
from raypost.types import ProduceBatchStatus


async def train(cfg: Config, stop: asyncio.Event) -> None:
    """Run the main loop. Ends after `train.num_steps`, or at the next pause once `stop` is set."""
    async with spawn(cfg, stop) as roles:
        step = await roles.restore()  # 0 on a fresh run
        await roles.broadcast(version=step)
        if step == 0:
            await roles.evaluate(step)
        await roles.resume(version=step)
        roles.produce()
        while not roles.finished(step):
            status, batch_ref = await roles.take_batch(step + 1)  # raises what ends production
            if batch_ref is not None:
                step += 1
                metrics = await roles.trainer.fit(batch_ref, step)
                await roles.acknowledge(step)
                await roles.log(step, status, metrics)
            expired = batch_ref is None or status.status == ProduceBatchStatus.EXPIRED_BATCH
            if expired or cfg.sync_due(step) or stop.is_set():
                if roles.swaps(step):  # nothing else is due
                    await roles.swap(version=step)
                    continue
                await roles.prepare(version=step)  # production goes on meanwhile
                await roles.pause(step)
                await roles.broadcast(version=step)
                if roles.save_due(step):
                    await roles.save(step)
                if cfg.eval_due(step):
                    await roles.evaluate(step)
                if not roles.finished(step):
                    await roles.resume(version=step)


if __name__ == "__main__":
    sys.exit(main(train))
