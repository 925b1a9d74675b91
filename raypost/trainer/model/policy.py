"""The language model as the trainer sees it: token ids in, logprobs of chosen tokens (or values) out.

Owns reading and writing the Hugging Face model, and running its head on the trained positions only. Knows nothing of
DeepSpeed, ranks or losses.

Axes: B sequences, L positions, T chosen tokens, V vocabulary, H hidden.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME
from transformers.utils import logging as transformers_logging

from raypost.checkpoint import share_weights
from raypost.errors import ConfigError
from raypost.trainer.batch.packing import Segment
from raypost.trainer.model.attention import ATTENTION, positions_of, row_attention
from raypost.trainer.model.head import ChunkedHead, LogitRule, Sampling, sampled_logprobs
from raypost.types import FloatArray, IntArray


def load_model(model_path: str, dtype: str, gradient_checkpointing: bool = False) -> PreTrainedModel:
    """Load a causal LM with dropout off: each token must have the same logprob wherever it is computed."""
    transformers_logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(model_path)
    for name in vars(config):
        if "dropout" in name and isinstance(getattr(config, name), float):
            setattr(config, name, 0.0)
    # PyTorch's fused attention would leave out what these models do to their scores, in silence.
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    model = AutoModelForCausalLM.from_pretrained(
        model_path,
        config=config,
        dtype=getattr(torch, dtype),
        attn_implementation="eager" if capped else None,
    )
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def save_model(model: PreTrainedModel, weights: Mapping[str, Tensor], source: Path, target: Path) -> None:
    """Write `target` as a complete Hugging Face folder.

    It holds `weights` under their checkpoint names (safetensors), and the configuration, generation settings and
    tokenizer of `source`, which the model was loaded from.
    """
    own, settings = model.generation_config, source / GENERATION_CONFIG_NAME
    try:
        if settings.is_file():
            # Many models come with settings that contradict each other, which transformers reads but does not write.
            model.generation_config = GenerationConfig()
        model.save_pretrained(str(target), state_dict=dict(weights), save_original_format=False)
        share_weights(target)
    finally:
        model.generation_config = own
    if settings.is_file():
        shutil.copyfile(settings, target / GENERATION_CONFIG_NAME)
    AutoTokenizer.from_pretrained(source).save_pretrained(target)


@torch.no_grad()
def canary_logprobs(
    forward: Callable[..., tuple[Tensor, Tensor]], token_ids: IntArray, device: torch.device
) -> FloatArray:
    """Return the logprob of every token but the first, given those before it, at temperature 1.

    `forward`: a Policy, or what wraps it.
    """
    ids = torch.from_numpy(np.asarray(token_ids, np.int64)).to(device)
    ones = Sampling(torch.ones(len(ids) - 1, device=device))
    logprobs_T, _ = forward(ids[None, :-1], torch.arange(len(ids) - 1, device=device), ids[1:], ones)
    result: FloatArray = logprobs_T.float().cpu().numpy()
    return result


def pair_cost(model: PreTrainedModel) -> float:
    """Return the arithmetic of one pair of tokens in all attention layers over one token's in all other layers."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    if not heads:
        return 0.0
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    embedding = model.get_input_embeddings().weight
    weights = sum(parameter.numel() for parameter in model.parameters()) - embedding.numel()
    return float(2 * width * config.num_hidden_layers / max(1, weights))


class _Model(nn.Module):
    """A Hugging Face model that reads rows of separate sequences, or packed ones once `set_packed` is called."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.packed = False
        self._own_attention = model.config._attn_implementation

    def set_packed(self, packed: bool) -> None:
        """Set whether rows are cut into segments. Raises ValueError if transformers cannot swap the attention."""
        wanted = ATTENTION if packed else self._own_attention
        self.model.set_attn_implementation(wanted)
        if self.model.config._attn_implementation != wanted:
            raise ValueError("transformers cannot replace its attention")
        self.packed = packed

    def _inputs(self, input_ids_BL: Tensor, segments: Sequence[Segment] | None) -> dict[str, Any]:
        if not self.packed:
            return {"input_ids": input_ids_BL, "use_cache": False}
        if segments is None:
            rows, length = input_ids_BL.shape
            segments = [Segment(row * length, length) for row in range(rows)]
        device = input_ids_BL.device
        return {
            "input_ids": input_ids_BL.reshape(1, -1),
            "position_ids": torch.from_numpy(positions_of(segments)).to(device)[None],
            "row": row_attention(segments, device),
            "use_cache": False,
        }


class Policy(_Model):
    """A causal LM whose head runs on chosen positions only.

    With `chunked`, the head's logits are made a few rows at a time from the hidden states (head.py). Else the
    rows are picked in front of the head, inside the model's own forward: whatever a model does to its logits
    afterwards stays in force.
    """

    def __init__(
        self, model: PreTrainedModel, max_logit_bytes: int = 2**28, entropy_gradient: bool = False
    ) -> None:
        """Take over a causal LM; its head makes at most `max_logit_bytes` of logits at a time.

        `entropy_gradient`: the entropy has a gradient, which takes a little more memory.
        """
        head = model.get_output_embeddings()
        if head is None:
            raise ConfigError(f"{type(model).__name__} has no output head: use a causal language model")
        super().__init__(model)
        self.chunked = isinstance(head, nn.Linear)
        self._index_T: Tensor | None = None
        head.register_forward_pre_hook(self._pick_rows)
        self._entropy_gradient = entropy_gradient
        if self.chunked:
            rule = LogitRule.of(model.config.get_text_config())
            self.head = ChunkedHead(head, rule, max_logit_bytes, entropy_gradient)

    def _pick_rows(self, _: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if self._index_T is None:
            return args
        hidden_BLH = args[0]
        return (hidden_BLH.flatten(0, 1).index_select(0, self._index_T)[None], *args[1:])

    def forward(
        self,
        input_ids_BL: Tensor,
        index_T: Tensor,
        targets_T: Tensor,
        sampling: Sampling,
        segments: Sequence[Segment] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return logprobs_T and entropy_T (nats) of `targets_T`.

        Target t is predicted at `index_T[t]` = b * L + position. Rows without `segments` are padded on the
        right, so that causal attention needs no mask.
        """
        inputs = self._inputs(input_ids_BL, segments)
        if self.chunked:
            hidden_BLH = self.model.base_model(**inputs)[0]
            hidden_TH = hidden_BLH.flatten(0, 1).index_select(0, index_T)
            results: tuple[Tensor, Tensor] = self.head(hidden_TH, targets_T, sampling)
            return results
        self._index_T = index_T
        try:
            logits_TV = self.model(**inputs).logits[0]
        finally:
            self._index_T = None
        return sampled_logprobs(logits_TV, targets_T, sampling, self._entropy_gradient)


class Critic(_Model):
    """A language model without head that gives each chosen position a value."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Put a value head, which gives 0 at first, on the model's body."""
        super().__init__(model.base_model)
        size = model.config.get_text_config().hidden_size
        self.value = nn.Linear(size, 1, dtype=model.dtype)
        # A critic that knows nothing expects nothing: its first targets are not blurred by noise.
        nn.init.zeros_(self.value.weight)
        nn.init.zeros_(self.value.bias)

    def forward(
        self, input_ids_BL: Tensor, index_T: Tensor, segments: Sequence[Segment] | None = None
    ) -> Tensor:
        """Return values_T, float32 or wider, of the positions `index_T` = b * L + position."""
        hidden_BLH = self.model(**self._inputs(input_ids_BL, segments))[0]
        values_T: Tensor = self.value(hidden_BLH.flatten(0, 1).index_select(0, index_T))[:, 0]
        return values_T.to(torch.promote_types(values_T.dtype, torch.float32))
