"""One rank of the critic's training: values of a batch's tokens, and a train step on their returns.

Owns the critic's loss on a micro-batch; the formula is in losses.py. A critic is a model of its own beside the
policy, in a trainer group of its own, whose configuration is `TrainConfig.for_critic`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from torch import Tensor

from raypost.config import Config
from raypost.errors import CheckpointError
from raypost.trainer.algorithm.losses import value_loss
from raypost.trainer.algorithm.statistics import ValueStatistics
from raypost.trainer.algorithm.token_advantages import CriticInputs, TokenValues
from raypost.trainer.batch.packing import MicroBatch
from raypost.trainer.batch.train_batch import Sample
from raypost.trainer.model.policy import Critic
from raypost.trainer.rank import Objective, Rank
from raypost.types.packed import PackedGroups


class CriticRank(Rank[CriticInputs, Tensor]):
    """One rank's share of the critic."""

    def __init__(self, config: Config, model_path: str, rank: int) -> None:
        """Load the model. Raises ConfigError if it cannot be trained as configured."""
        super().__init__(config, model_path, rank, "critic", Critic)

    def compute_values(self, packed: PackedGroups) -> TokenValues:
        """Return the value of the state in which each trained token was chosen, and after what was cut off.

        A collective.
        """
        batch = self._plan(packed)
        asked: list[Sample] = []
        more = 0
        for sample in batch.samples:
            start = sample.start + more
            asked.append(sample.with_one_more(start) if sample.cut_off else Sample(sample.state, start))
            more += sample.cut_off
        column = self._column(asked, batch.num_tokens + more, self._forward)
        values, after = np.zeros(batch.num_tokens, np.float32), np.zeros(batch.num_tokens, np.float32)
        for sample, one in zip(batch.samples, asked, strict=True):
            values[sample.places] = column[one.places[: sample.num_trained]]
            if sample.cut_off:
                after[sample.last] = column[one.last]
        return TokenValues(values, after)

    def _objective(self, packed: PackedGroups, step: int, inputs: CriticInputs | None) -> Objective:
        returns = None if inputs is None else inputs.advantages.returns
        if inputs is None or returns is None:
            raise ValueError("a critic learns returns, but there are none: use train.advantage.kind: gae")
        statistics, before = ValueStatistics(), inputs.values.values

        def loss_of(micro: MicroBatch, scales_T: Tensor) -> Tensor:
            values_T = self._forward(micro)
            before_T = self._tensor(before[micro.places_T])
            returns_T = self._tensor(returns[micro.places_T])
            terms = value_loss(values_T, before_T, returns_T, scales_T, self._train.loss.value_clip)
            statistics.add(values_T, returns_T, terms)
            return terms.loss

        return Objective(loss_of, statistics)

    def _forward(self, micro: MicroBatch) -> Tensor:
        return self._engine(self._tensor(micro.input_ids_BL), self._tensor(micro.index_T), micro.segments)

    def save_hf(self, path: Path, ema: bool = False) -> None:
        """Raise CheckpointError: a critic is no language model."""
        raise CheckpointError(f"{path}: a critic has no Hugging Face form; save it as a checkpoint")
