"""How new weights reach the engines, and how what arrived is checked."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from raypost.config.resources import ConfigModel
from raypost.types.pause import PauseMode

Transport = Literal["object_store", "gloo", "nccl", "auto"]
"""How weights travel from the trainer to the engines."""
VerifyWeights = Literal["every", "first", "off"]
"""Which loads are read back from an engine's model."""


class SyncConfig(ConfigModel):
    """When weights reach the engines, and how what arrived is checked."""

    sync_weights_interval: Annotated[int, Field(ge=1)] = 1
    """Train steps between weight syncs."""
    pause_mode: PauseMode = "keep"
    """What a sync does to running requests. abort: partial trajectories come back and are continued later. keep:
    requests freeze in the engine and go on with the new weights; they are aborted where the engine is needed for an
    evaluation or given to the ranks, where a checkpoint is written, and where a task does not continue what a sync
    interrupts (`max_staleness` 0 or no `enable_partial_rollout`). wait: requests run to their end first."""
    recompute_kv_cache: bool = False
    """Whether requests that `keep` froze run their prompt and tokens so far through the new weights before they go on.
    false: they go on at once with the keys and values that the weights before made. In both cases each token's logprob
    is that which it was sampled with, and what begins after a sync uses nothing that older weights made."""
    timeout_s: Annotated[float, Field(gt=0)] = 300
    """Longest time that all workers may take to load and acknowledge one version, seconds."""
    transport: Transport = "auto"
    """How weights travel. object_store: by Ray's, which on one node is shared memory. gloo: broadcast by TCP from the
    trainer's rank 0 to all engines. nccl: the same from GPU to GPU; it has not been run. auto: the object store where
    trainer and engines share a node, else gloo. What a broadcast cannot bring comes by the object store, and is
    counted."""
    transport_timeout_s: Annotated[float, Field(gt=0)] = 30
    """Longest time that a broadcast waits for engines to join, and for each of its buckets, seconds."""
    canary_tolerance: Annotated[float, Field(gt=0)] | None = 1e-2
    """Largest difference of a logprob, in nats, between engine and trainer on a training prompt, which is checked
    after each sync; bfloat16 rounds to about 0.3. null: no check."""
    verify: VerifyWeights = "every"
    """Which loads are read back: digests of an engine's parameters, computed where it serves from, are compared with
    those of what the trainer sent. every: all. first: the first of each engine. off: none; what was received is
    verified at every sync in any case."""

    @property
    def keeps_kv_cache(self) -> bool:
        """Whether tokens may depend on keys and values that older weights made than those that sampled them."""
        return self.pause_mode == "keep" and not self.recompute_kv_cache
