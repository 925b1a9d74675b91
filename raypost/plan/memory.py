"""How much memory a run takes, estimated from the sizes of its model: what a rank, an engine and the object store hold.

Owns the arithmetic only. Weights, gradients and optimizer states are exact but for padding; activations are the
count of Korthikanti et al., 2022 (arXiv:2205.05198), without the attention matrix, which no kernel here keeps;
what libraries take for themselves is measured, on CPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from raypost.config import Config, RolloutConfig
from raypost.models import tiny
from raypost.models.folder_check import linear_layers, read_config, sizes_of
from raypost.models.resolve import SMOLLM2, TINY
from raypost.models.tensor_files import read_shapes
from raypost.plan.cluster import ClusterResources
from raypost.plan.models import local_folder

MIB, GIB = 1 << 20, 1 << 30
_LAYER_BYTES = 17
"""Bytes that a layer keeps for the backward pass, for a token, a hidden dimension and a byte of an element."""
_RANK_PROCESS, _ENGINE_PROCESS = 0.9 * GIB, 1.1 * GIB
"""What torch, DeepSpeed and vLLM take in host memory before they hold a weight."""
_TINY_VOCABULARY = 128
"""Tokens of the model `tiny`, at most."""
_DEVICE_GIB = {"A10G": 24, "L4": 24, "L40S": 48, "T4": 16, "H100": 80, "H200": 141, "B200": 180}
"""Memory of accelerators that Ray names, where the name says it."""


@dataclass(slots=True, frozen=True)
class ModelSizes:
    """What memory depends on."""

    weights: int
    """All of them, a number each."""
    layers: int
    hidden: int
    kv_width: int
    """Numbers of a key, or of a value, that a layer keeps for a token."""
    vocabulary: int
    linear: Mapping[str, tuple[int, ...]]
    """Shapes of the matrices that an adapter can be put on."""


def model_sizes(config: Config) -> ModelSizes | None:
    """Return the sizes of the policy; None if they are not known before it is fetched or made."""
    if config.model.name == TINY:
        recipe = tiny.TinyRecipe.from_options(config.model.options)
        hidden, wide = recipe.hidden_size, recipe.intermediate_size
        layer = 4 * hidden * hidden + 3 * hidden * wide + 2 * hidden
        return ModelSizes(recipe.num_layers * layer, recipe.num_layers, hidden, hidden, _TINY_VOCABULARY, {})
    if config.model.name == SMOLLM2:
        return ModelSizes(134_515_008, 30, 576, 192, 49_152, {})
    folder = local_folder(config)
    if folder is None or not (shapes := read_shapes(folder)):
        return None
    sizes = sizes_of(read_config(folder))
    if not all(sizes.get(name) for name in ("layers", "hidden", "heads", "head_dim", "vocab_size")):
        return None
    kv_width = (sizes.get("num_key_value_heads") or sizes["heads"]) * sizes["head_dim"]
    weights = sum(map(math.prod, shapes.values()))
    linear = linear_layers(shapes)
    return ModelSizes(weights, sizes["layers"], sizes["hidden"], kv_width, sizes["vocab_size"], linear)


@dataclass(slots=True, frozen=True)
class Memory:
    """What one process holds, bytes by what for."""

    of: str
    place: str
    """Where: `GPU` or `host`."""
    parts: Mapping[str, float]

    @property
    def nbytes(self) -> float:
        """All of it."""
        return sum(self.parts.values())

    def text(self) -> str:
        """Return such as `about 2.1 GiB of a GPU: weights 1.0, optimizer 1.1`."""
        parts = ", ".join(f"{what} {_gib(size)}" for what, size in self.parts.items() if size >= 0.05 * GIB)
        place = "a GPU" if self.place == "GPU" else "host memory"
        return f"about {amount(self.nbytes)} of {place}{': ' * bool(parts)}{parts}"


def estimates(config: Config, sizes: ModelSizes) -> list[Memory]:
    """Return what each rank, each engine and the object store hold, at most."""
    found = [rank_memory(config, sizes)]
    for pool, rollout in config.rollout.by_pool().items():
        own = engine_memory(config, sizes, rollout)
        if not pool or own != found[1]:
            found.append(replace(own, of=f"engine of {pool}" if pool else "engine"))
    if config.train.offload_optimizer:
        found.append(Memory("rank, offloaded", "host", {"optimizer": _optimizer(config, sizes)}))
    if config.train.critic is not None:
        # As large as the policy, from which it starts unless it has a model of its own.
        critic = config.model_copy(update={"train": config.train.for_critic})
        found.append(replace(rank_memory(critic, sizes), of="rank of the critic"))
    # The version that engines may still read, and the one that is published.
    published = 2 * sizes.weights * _element(config)
    found.append(Memory("object store", "host", {"two versions of the weights": published}))
    return found


def rank_memory(config: Config, sizes: ModelSizes) -> Memory:
    """Return what one rank of the policy holds."""
    train, element, world = config.train, _element(config), config.train.num_workers
    trained, stage = _trained(config, sizes), train.zero_stage
    token = sizes.hidden * element
    kept = 1 if train.gradient_checkpointing else _LAYER_BYTES
    longest = train.batch_size * max(task.group_size for task in config.tasks) * config.max_model_len
    tokens = min(train.micro_batch_tokens, longest / world)
    activations = tokens * token * (kept * sizes.layers + _LAYER_BYTES)
    # Below stage 2 DeepSpeed sums the gradients of a bfloat16 model in float32.
    gradients = trained * (element if stage >= 2 else 4) / (world if stage >= 2 else 1)
    parts = {
        "weights": sizes.weights * element / (world if stage == 3 else 1),
        "gradients": gradients,
        "optimizer": 0.0 if train.offload_optimizer else _optimizer(config, sizes),
        "activations": activations,
        "logits": 2.0 * min(train.logits_mb * MIB, 4 * tokens * sizes.vocabulary),
        "buckets": 2.0 * min(train.bucket_mb * MIB, sizes.weights * element),
    }
    if config.device == "cpu":
        parts["process"] = _RANK_PROCESS
    return Memory("rank", "GPU" if config.device == "cuda" else "host", parts)


def engine_memory(config: Config, sizes: ModelSizes, rollout: RolloutConfig | None = None) -> Memory:
    """Return what one engine of a pool holds; on a GPU, what it needs there for all its requests at their longest."""
    rollout = rollout or config.rollout
    ranks = rollout.tensor_parallel_size
    weights = sizes.weights * _element(config) / ranks
    if config.device == "cpu":
        cache = rollout.kv_cache_gb * GIB
        parts = {"weights": weights, "the version that comes next": weights}
        return Memory("engine", "host", {**parts, "cache": cache, "process": _ENGINE_PROCESS})
    cache = rollout.max_num_seqs * config.engine_model_len * _cache_token(config, sizes) / ranks
    return Memory("engine", "GPU", {"weights": weights, "cache of max_num_seqs requests": cache})


def memory_lines(config: Config, sizes: ModelSizes | None) -> Iterator[tuple[str, str]]:
    """Yield (whose, how much) as `plan` shows it."""
    if sizes is None:
        yield "all", "not known before the model is fetched"
        return
    if standing := sum(one.standby for one in config.rollout.by_pool().values()):
        yield "standing by", f"{standing} engine(s), each as much as one that serves"
    yield from (
        (f"each {one.of}" if one.of != "object store" else one.of, one.text())
        for one in estimates(config, sizes)
    )
    carried, engines = sync_bytes(config, sizes), config.rollout.num_engines
    yield (
        "a weight sync",
        f"{amount(carried)} to each of {engines} engine(s), {amount(engines * carried)} in sum",
    )


def sync_bytes(config: Config, sizes: ModelSizes) -> int:
    """Return what a weight sync carries to one engine where every weight changed."""
    return sizes.weights * _element(config)


def memory_warnings(
    config: Config, sizes: ModelSizes | None, cluster: ClusterResources | None
) -> Iterator[str]:
    """Yield what is likely not to fit: a cache too small for its requests, and nodes too small for their processes."""
    if sizes is None:
        return
    for pool, rollout in config.rollout.by_pool().items():
        yield from _cache_warnings(config, sizes, rollout, pool or "rollout")
    if cluster is None:
        return
    rollout = config.rollout
    rank, engine = rank_memory(config, sizes), engine_memory(config, sizes)
    if config.device == "cuda":
        known = {name: size for node in cluster.nodes for name, size in _devices(node)}
        for name, size in known.items():
            shares = {"rank": 1.0, "engine": rollout.gpu_memory_utilization}
            for one in (rank, engine):
                if one.nbytes > shares[one.of] * size * GIB:
                    yield (
                        f"{one.of}: {one.text()} (estimated), and of {name}'s {size} GiB it may take "
                        f"{shares[one.of] * size:.0f}: {_FIX[one.of]}"
                    )
        return
    most = cluster.largest("memory")
    if most and max(rank.nbytes, engine.nbytes) > most:
        one = max(rank, engine, key=lambda memory: memory.nbytes)
        yield f"{one.of}: {one.text()} (estimated), and no node has more than {_gib(most)}: {_FIX[one.of]}"


def _cache_warnings(config: Config, sizes: ModelSizes, rollout: RolloutConfig, place: str) -> Iterator[str]:
    if config.device != "cpu":
        return
    held = int(rollout.kv_cache_gb * GIB / _cache_token(config, sizes))
    wanted = rollout.max_num_seqs * config.engine_model_len
    cache = f"{place}.kv_cache_gb {rollout.kv_cache_gb:g} holds {held} tokens"
    if held < config.engine_model_len:
        yield f"{cache}, less than one request of {config.engine_model_len}: engines will not start; raise it"
    elif held < wanted:
        yield (
            f"{cache}, and max_num_seqs {rollout.max_num_seqs} requests of {config.engine_model_len} have {wanted}: "
            f"when all are long, some wait; {_gib(wanted * _cache_token(config, sizes))} GiB hold them"
        )


_FIX = {
    "rank": "lower train.micro_batch_tokens, set train.gradient_checkpointing, raise train.zero_stage or "
    "train.num_workers",
    "engine": "lower rollout.max_num_seqs or max_tokens, or raise rollout.tensor_parallel_size",
}


def _devices(node: Mapping[str, float]) -> Iterator[tuple[str, int]]:
    for resource in node:
        name = resource.removeprefix("accelerator_type:")
        if name != resource and name in _DEVICE_GIB:
            yield name, _DEVICE_GIB[name]


def _trained(config: Config, sizes: ModelSizes) -> int:
    """Return how many weights have a gradient."""
    lora = config.train.lora
    if lora is None:
        return sizes.weights
    wanted = None if lora.target_modules == "all-linear" else lora.target_modules
    shapes = (
        shape
        for name, shape in sizes.linear.items()
        if "lm_head" not in name and (wanted is None or name.rpartition(".")[2] in wanted)
    )
    return lora.rank * sum(map(sum, shapes))


def _optimizer(config: Config, sizes: ModelSizes) -> float:
    """Return the bytes of two moments, of float32 weights where the forward pass has others, and of the average."""
    train = config.train
    own = 4 * (config.model.dtype != "float32" or train.zero_stage > 0)
    each = 8 + own + 4 * (train.ema_decay is not None)
    return _trained(config, sizes) * each / (train.num_workers if train.zero_stage else 1)


def _cache_token(config: Config, sizes: ModelSizes) -> int:
    return 2 * sizes.layers * sizes.kv_width * _element(config)


def _element(config: Config) -> int:
    return 2 if config.model.dtype == "bfloat16" else 4


def amount(nbytes: float) -> str:
    """Return such as `2.1 GiB` or `40 MiB`."""
    return f"{_gib(nbytes)} GiB" if nbytes >= 0.1 * GIB else f"{nbytes / MIB:.3g} MiB"


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.3g}" if nbytes < 100 * GIB else f"{nbytes / GIB:.0f}"
