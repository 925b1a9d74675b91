"""The language model as the trainer sees it: token ids in, logprobs of chosen tokens out.

Owns building the Hugging Face model, restricting its head to the trained positions, and the names its
weights have in a checkpoint. Knows nothing of DeepSpeed, ranks or losses.

Axes: B sequences, L positions, T chosen tokens, V vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from raypost.errors import ConfigError
from raypost.losses import chosen_logprobs

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_model(model_path: str, dtype: str, gradient_checkpointing: bool = False) -> PreTrainedModel:
    """A causal LM with dropout off: a policy must give a token one logprob, whoever computes it."""
    transformers_logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(model_path)
    for name in vars(config):
        if "dropout" in name and isinstance(getattr(config, name), float):
            setattr(config, name, 0.0)
    model = AutoModelForCausalLM.from_pretrained(model_path, config=config, dtype=DTYPES[dtype])
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


class Policy(nn.Module):
    """A causal LM whose head runs on chosen positions only.

    The rows are picked in front of the head, inside the model's own forward: scaling or capping of logits
    that a model does afterwards stays in force.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        head = model.get_output_embeddings()
        if head is None:
            raise ConfigError(f"{type(model).__name__} has no output head: use a causal language model")
        self.model = model
        self._index_T: Tensor | None = None
        head.register_forward_pre_hook(self._pick_rows)

    def _pick_rows(self, _: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden_BLH = args[0]
        return (hidden_BLH.flatten(0, 1).index_select(0, self._index_T)[None], *args[1:])

    def forward(
        self, input_ids_BL: Tensor, index_T: Tensor, targets_T: Tensor, temperatures_T: Tensor
    ) -> tuple[Tensor, Tensor]:
        """logprobs_T and entropy_T (nats, no gradient) of `targets_T`.

        Target t is predicted at `index_T[t]` = b * L + position. Rows are padded on the right, so that causal
        attention needs no mask. `temperatures_T` divides the logits.
        """
        self._index_T = index_T
        logits_TV = self.model(input_ids=input_ids_BL, use_cache=False).logits[0]
        self._index_T = None
        return chosen_logprobs(logits_TV, targets_T, temperatures_T)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters and saved buffers under their names in a Hugging Face checkpoint, tied ones once."""
        yield from self.model.named_parameters()
        parameters = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if name not in parameters:
                yield name, tensor
