"""What `plan` says of memory and of pace: sizes from headers, the arithmetic of ZeRO, and the way into the command."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from raypost.cli.commands import app
from raypost.config import Config
from raypost.errors import ConfigError
from raypost.models.tensor_files import read_shapes
from raypost.plan import plan
from raypost.plan.cluster import ClusterResources
from raypost.plan.memory import (
    GIB,
    ModelSizes,
    engine_memory,
    estimates,
    memory_lines,
    memory_warnings,
    model_sizes,
    rank_memory,
)
from raypost.plan.pace import pace_lines, rates_of
from tests.factories import make_config, plain_config
from tests.unit.model_folders import write_model

LARGE = ModelSizes(
    7_000_000_000, 28, 3584, 512, 152_064, {"layers.0.q_proj": (3584, 3584), "lm_head": (152_064, 3584)}
)


def large(**places: Any) -> Config:
    return make_config(
        **{"device": "cuda", "model__dtype": "bfloat16", "train__micro_batch_tokens": 1024, **places}
    )


def test_sizes_come_from_the_headers_of_the_weights(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    shapes = read_shapes(folder)
    sizes = model_sizes(make_config(model__name=str(folder)))
    assert shapes is not None and sizes is not None
    assert sizes.weights == sum(map(math.prod, shapes.values()))
    assert sizes.linear


def test_the_tiny_model_is_as_large_as_it_will_be() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = model_sizes(make_config())
    assert sizes is not None
    made = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=sizes.hidden,
            intermediate_size=2 * sizes.hidden,
            num_hidden_layers=sizes.layers,
            num_attention_heads=4,
            vocab_size=64,
            tie_word_embeddings=True,
        )
    )
    assert made.num_parameters() == pytest.approx(sizes.weights, rel=0.05)


@pytest.mark.parametrize(
    ("places", "weights", "gradients", "optimizer"),
    [
        ({"train__zero_stage": 0, "model__dtype": "float32"}, 28, 28, 56),
        ({"train__zero_stage": 1}, 14, 28, 84),
        ({"train__zero_stage": 1, "train__num_workers": 4}, 14, 28, 21),
        ({"train__zero_stage": 2, "train__num_workers": 4}, 14, 3.5, 21),
        ({"train__zero_stage": 3, "train__num_workers": 4}, 3.5, 3.5, 21),
        ({"train__zero_stage": 3, "train__num_workers": 4, "train__ema_decay": 0.9}, 3.5, 3.5, 28),
        ({"train__zero_stage": 2, "train__offload_optimizer": True}, 14, 14, 0),
    ],
)
def test_what_zero_splits_is_counted_once(
    places: dict[str, Any], weights: float, gradients: float, optimizer: float
) -> None:
    """In units of 10^9 bytes, for 7 billion weights: bfloat16 of 2, float32 of 4, two moments of 8 bytes."""
    config = large(train__batch_size=8, **places)
    parts = rank_memory(config, LARGE).parts
    found = [parts[name] / 1e9 for name in ("weights", "gradients", "optimizer")]
    assert found == pytest.approx([weights, gradients, optimizer])


def test_an_adapter_needs_gradients_for_itself_alone() -> None:
    config = large(train__lora={"rank": 16})
    parts = rank_memory(config, LARGE).parts
    trained = 16 * (3584 + 3584)
    assert parts["gradients"] == 4 * trained
    assert parts["optimizer"] == 12 * trained
    assert parts["weights"] == 2 * LARGE.weights


def test_a_critic_has_ranks_of_its_own() -> None:
    config = large(
        train__advantage={"kind": "gae"},
        train__critic={"zero_stage": 3, "num_workers": 2},
        train__batch_size=8,
    )
    rank, critic = (one for one in estimates(config, LARGE) if "rank" in one.of)
    assert critic.of == "rank of the critic"
    assert critic.parts["weights"] == rank.parts["weights"] / 2


def test_checkpointed_activations_are_the_inputs_of_layers_and_one_layer() -> None:
    kept, again = (
        rank_memory(one, LARGE).parts["activations"]
        for one in (large(), large(train__gradient_checkpointing=True))
    )
    assert kept / again == pytest.approx((17 * 28 + 17) / (28 + 17))


def test_a_gpu_that_is_too_small_is_warned_of_and_a_larger_one_is_not() -> None:
    config = large(rollout__max_num_seqs=1024)

    def warned(gpu: str) -> list[str]:
        cluster = ClusterResources([{"CPU": 8, "GPU": 8, f"accelerator_type:{gpu}": 1}])
        return list(memory_warnings(config, LARGE, cluster))

    rank, engine = warned("T4")
    assert "rank" in rank and "16 GiB" in rank and "zero_stage" in rank
    assert "engine" in engine and "tensor_parallel_size" in engine
    assert not warned("H200")
    assert not warned("unheard-of")


def test_what_an_engine_holds_is_split_over_its_ranks() -> None:
    one, four = (engine_memory(large(rollout__tensor_parallel_size=n), LARGE) for n in (1, 4))
    assert one.nbytes == pytest.approx(4 * four.nbytes)


def test_a_cache_that_holds_less_than_its_requests_is_warned_of() -> None:
    token = 2 * LARGE.layers * LARGE.kv_width * 4
    config = make_config(rollout__kv_cache_gb=1.0, rollout__max_num_seqs=512)
    (some_wait,) = memory_warnings(config, LARGE, None)
    assert str(int(GIB / token)) in some_wait and "wait" in some_wait
    (none_fits,) = memory_warnings(make_config(rollout__kv_cache_gb=0.001), LARGE, None)
    assert "will not start" in none_fits
    node = ClusterResources([{"CPU": 8, "memory": 4.0 * GIB}])
    assert any("no node has more than 4" in text for text in memory_warnings(config, LARGE, node))


def test_a_model_that_is_not_here_is_said_to_be_unknown() -> None:
    config = make_config(model__name="nobody/nothing-of-the-kind")
    assert model_sizes(config) is None
    assert dict(memory_lines(config, None)) == {"all": "not known before the model is fetched"}
    assert not list(memory_warnings(config, None, None))


def test_the_plan_shows_each_of_them(tmp_path: Path) -> None:
    model = str(write_model(tmp_path / "model", max_position_embeddings=1024))
    config = make_config(runs_dir=str(tmp_path), model__name=model, tasks__0__max_prompt_tokens=256)
    shown = dict(plan.check(config).memory)
    sizes = model_sizes(config)
    assert sizes is not None
    assert {"each rank", "each engine", "object store", "a weight sync"} == set(shown)
    assert shown["each rank"] == estimates(config, sizes)[0].text()


# ---------------------------------------------------------------- pace


def finished_run(folder: Path, **report: Any) -> Path:
    """A run of one engine and one rank: 10 s of 20 produced 1,000 tokens, 5 s trained 500."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(plain_config()))
    written = {
        "window_s": 20.0,
        "rollout_idle_fraction": 0.5,
        "trainer_idle_fraction": 0.75,
        "tokens_generated": 1000,
        "tokens_produced": 500,
        "sync_s_median": 0.5,
        "trained_tokens_mean": 10.0,
    }
    (folder / "report.json").write_text(json.dumps(written | report))
    return folder


def test_a_step_takes_as_long_as_its_longer_half_or_both(tmp_path: Path) -> None:
    rates = rates_of(finished_run(tmp_path / "run"))
    assert (rates.engine_tokens_s, rates.rank_tokens_s) == (100.0, 100.0)
    config = make_config(train__batch_size=10, rollout__num_workers=2, tasks__0__group_size=8)
    # 80 trajectories of 10 tokens: 4 s on two engines, 8 s on a rank.
    ahead = dict(pace_lines(config, rates))
    assert ahead["a train step"].startswith("8.5 s: 4 s to produce, 8 s to train, at once")
    assert ahead["engines that keep the ranks busy"].startswith("1;")
    sizes = model_sizes(config)
    assert sizes is not None and config.model.dtype == "float32"
    # Four bytes a weight to each of two engines, in the half second of the other run's syncs.
    mib_s = 4 * sizes.weights * 2 / 0.5 / 2**20
    assert f"to 2 engine(s): {mib_s:.3g} MiB/s" in ahead["bandwidth of a sync"]
    turns = dict(pace_lines(config.model_copy(update={"placement": "colocate"}), rates))
    assert turns["a train step"].startswith("12.5 s")
    assert turns["idle"] == "engines 68%, ranks 36%"


@pytest.mark.parametrize(
    "report", [{"tokens_generated": None}, {"window_s": 0.0}, {"rollout_idle_fraction": 1.0}]
)
def test_a_run_without_rates_is_refused(tmp_path: Path, report: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="no rates"):
        rates_of(finished_run(tmp_path, **report))
    with pytest.raises(ConfigError, match="that ended"):
        rates_of(tmp_path / "nothing")


def test_the_command_forecasts_from_a_run(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run")
    command = ["plan", "--config", str(run / "config.yaml"), "--cluster", "none", f"runs_dir={tmp_path}"]
    shown = CliRunner().invoke(app, [*command, "--like", str(run)])
    assert shown.exit_code == 0, shown.output
    assert "Memory, estimated" in shown.output and "engines that keep the ranks busy" in shown.output
