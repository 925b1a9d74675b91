"""A policy loss with random parts, for tests of resuming: it draws from every generator a function may draw from."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor

from raypost.config import LossConfig
from raypost.trainer.algorithm.losses import LossTokens, ppo


def random_loss(tokens: LossTokens, config: LossConfig) -> tuple[Tensor, Tensor]:
    """`ppo`, scaled at random."""
    loss_T, clipped_T = ppo(tokens, config)
    return loss_T * (0.5 + random.random() + np.random.random() + torch.rand(())), clipped_T
