"""Whether a run can begin with the weights of another run's checkpoint; said before any engine starts."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from raypost.config import Config
from raypost.errors import CheckpointError
from raypost.trainer.model.lora import add_adapters
from raypost.trainer.model.policy import Policy
from raypost.trainer.state_files import StoredState


def check_start(config: Config, checkpoint: Path, model_path: str) -> None:
    """Raise CheckpointError unless a checkpoint has the weights that the policy trains, of the same shapes.

    Reads no weights, neither the checkpoint's nor the model's.
    """
    stored = StoredState(checkpoint)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_path))
        if config.train.lora is not None:
            add_adapters(model, config.train.lora)
        policy = Policy(model)
    shapes = {name: one.shape for name, one in policy.named_parameters() if one.requires_grad}
    try:
        stored.check_shapes(shapes)
    except CheckpointError as error:
        raise CheckpointError(
            f"checkpoint.start_from: {error}; begin with the model that it was trained from and the same train.lora, "
            f"or set model.name={checkpoint / 'hf'}"
        ) from error
