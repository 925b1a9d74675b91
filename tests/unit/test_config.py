"""A configuration that a single file shows to be wrong is refused with the place, the value and the fix."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from raypost.config import ConfigModel, load_config, parse_config
from raypost.config.engine import EngineConfig
from raypost.config.sentences import field_sentences
from raypost.errors import ConfigError
from raypost.plan.plan import check
from tests.factories import SMALLEST, make_config, plain_config, refusal_of

TASK = SMALLEST["tasks"][0]
BAD = [
    # what is wrong; what the message must hold: place, value, bound or fix
    (plain_config(train__num_step=5), ["train.num_step", "unknown key", "did you mean num_steps?", "got 5"]),
    (
        plain_config(tasks__0__strategy__max_stale=1),
        ["tasks.0.strategy.max_stale", "did you mean max_staleness?"],
    ),
    (
        plain_config(tasks__0__judge__zzz=1),
        ["tasks.0.judge.zzz", "known: kind, reward_model, answer_pattern"],
    ),
    (plain_config(zzz=1), ["zzz: unknown key", "known: name, runs_dir, seed"]),
    (plain_config(train__resources={"trainer": 0}), ["train.resources.trainer", "greater than 0", "got 0"]),
    (plain_config(eval__pool={"name": "a", "resources": {"x": 0}}), ["eval.pool.resources.x", "got 0"]),
    (plain_config(train__batch_size="many"), ["train.batch_size", "valid integer", "got 'many'"]),
    (plain_config(train__batch_size=2.5), ["train.batch_size", "2.5"]),
    (plain_config(train=None), ["train", "got None"]),
    (plain_config(train={"batch_size": 8}), ["train.num_steps", "required", "set it"]),
    (plain_config(tasks=[]), ["tasks", "at least 1 item", "got []"]),
    (plain_config(device="tpu"), ["device", "'cpu' or 'cuda'", "got 'tpu'"]),
    (plain_config(train__learning_rate=float("inf")), ["train.learning_rate", "finite", "got inf"]),
    (plain_config(train__learning_rate=float("nan")), ["train.learning_rate", "got nan"]),
    (plain_config(train__zero_stage=4), ["train.zero_stage", "less than or equal to 3", "got 4"]),
    (
        plain_config(tasks__0__strategy__max_staleness=-1),
        ["max_staleness", "greater than or equal to 0", "got -1"],
    ),
    (
        plain_config(tasks__0__strategy__tail_batch_trigger_size=-2),
        ["tail_batch_trigger_size", "equal to -1", "-2"],
    ),
    (plain_config(tasks__0__top_p=1.5), ["tasks.0.top_p", "less than or equal to 1", "got 1.5"]),
    (
        plain_config(train__num_workers=3),
        ["batch_size is 8", "not divisible by train.num_workers 3", "use 9"],
    ),
    (
        plain_config(rollout__max_num_batched_tokens=16),
        ["rollout", "max_num_batched_tokens is 16", "max_num_seqs 64", "raise it"],
    ),
    (plain_config(rollout__block_size=48), ["rollout.block_size is 48", "multiples of 32"]),
    (plain_config(train__num_minibatches=3), ["batch_size is 8", "num_minibatches 3", "divisor of 8"]),
    (plain_config(tasks__0__group_size=1), ["'default'", "group_size is 1", "'grpo'", "use 2 or more"]),
    (
        plain_config(train__advantage={"kind": "dr_grpo"}, tasks__0__group_size=1),
        ["group_size is 1", "'dr_grpo'", "use 2 or more"],
    ),
    (
        plain_config(train__advantage={"kind": "pass_at_k", "k": 8}),
        ["group_size is 8", "'pass_at_k'", "use 9 or more"],
    ),
    (plain_config(train__advantage={"kind": "gpo"}), ["train.advantage", "'gpo'", "there are grpo, dr_grpo"]),
    (plain_config(train__advantage={"kind": "gae"}), ["train: ", "'gae'", "critic is null"]),
    (plain_config(train__critic={}), ["critic is set", "'grpo' gives it nothing to learn from"]),
    (
        plain_config(train__advantage__overlong_buffer=999),
        ["max_tokens", "overlong_buffer 999", "smaller buffer"],
    ),
    (plain_config(train__loss__kind="ppo2"), ["train.loss", "'ppo2'", "there are ppo, gspo, cispo"]),
    (plain_config(train__loss={"kl": {"place": "reward", "unbiased": True}}), ["train.loss.kl", "unbiased"]),
    (plain_config(train__correction={"weight": {"lower": 0.5}}), ["train.correction.weight.upper", "set it"]),
    (
        plain_config(sync__sync_weights_interval=4, eval__interval=6),
        ["eval.interval is 6", "sync_weights_interval 4", "use 8"],
    ),
    (
        plain_config(sync__sync_weights_interval=4, checkpoint__interval=1),
        ["checkpoint.interval is 1", "sync_weights_interval 4", "use 4"],
    ),
    (
        plain_config(train__micro_batch_tokens=100),
        ["micro_batch_tokens is 100", "128 tokens", "at least that"],
    ),
    (plain_config(name="../other"), ["name '../other'", "1 to 64 letters"]),
    (plain_config(name=""), ["name ''", "1 to 64 letters"]),
    (plain_config(tasks=[TASK, TASK]), ["different names", "['default', 'default']", "rename one"]),
    (plain_config(tasks__0__min_tokens=65), ["tasks.0", "min_tokens is 65", "max_tokens 64", "lower it"]),
    (plain_config(tasks__0__min_tokens=-1), ["tasks.0.min_tokens", "greater than or equal to 0", "got -1"]),
    (
        plain_config(tasks__0__min_tokens=2, tasks__0__ignore_eos=True),
        ["tasks.0", "min_tokens is 2", "ignore_eos", "leave one of them out"],
    ),
    (plain_config(tasks__0__weight=0), ["weights sum to 0", "positive weight"]),
    (plain_config(tasks__0__weight=-1), ["tasks.0.weight", "greater than or equal to 0", "got -1"]),
    (plain_config(tasks__0__prompt_template="Solve"), ["tasks.0", "'Solve' lacks {question}"]),
    (plain_config(tasks__0__judge__answer_pattern="(a"), ["tasks.0.judge", "'(a' is no regular expression"]),
    (plain_config(tasks__0__judge__answer_pattern="a+"), ["'a+' needs a group", "put the answer in (...)"]),
    (
        plain_config(tasks__0__source={"kind": "jsonl", "dataset": "x.jsonl"}),
        ["tasks.0", "judge.kind is 'reasoning_gym'", "'jsonl'", "set judge.kind to 'exact'"],
    ),
]


@pytest.mark.parametrize(("raw", "parts"), BAD, ids=[parts[0] for _, parts in BAD])
def test_bad_configuration_is_refused_with_place_value_and_fix(raw: dict[str, Any], parts: list[str]) -> None:
    text = refusal_of(raw)
    assert [part for part in parts if part not in text] == []


@pytest.mark.parametrize(
    "place",
    [
        "train__advantage__unbiased_std",
        "train__advantage__min_group_size",
        "train__loss__constant_length",
        "buffer__low_water",
        "eval__confidence",
        "eval__pass_k",
    ],
)
def test_a_key_that_was_removed_is_refused_with_its_place(place: str) -> None:
    assert f"{place.replace('__', '.')}: unknown key" in refusal_of(plain_config(**{place: 1}))


def test_every_field_of_the_configuration_has_a_sentence() -> None:
    def fields(model: type[BaseModel]) -> Iterator[tuple[str, str]]:
        sentences = field_sentences(model)
        for name in model.model_fields:
            yield f"{model.__name__}.{name}", sentences.get(name, "")
        for part in model.__subclasses__():
            yield from fields(part)

    found = dict(fields(ConfigModel))
    assert len(found) > 200 and [name for name, said in found.items() if not said.endswith(".")] == []


def test_good_configuration_is_accepted_and_frozen() -> None:
    config = make_config()
    assert config.max_model_len == 128
    with pytest.raises(ValueError, match="frozen"):
        config.train.num_steps = 5


def test_all_problems_are_listed_at_once_one_a_line() -> None:
    text = refusal_of(plain_config(train__num_workers=3, train__num_minibatches=3, tasks__0__group_size=1))
    assert "3 problem(s)" in text
    assert len(text.splitlines()) == 4
    text = refusal_of(plain_config(train__num_stepz=3, device="tpu", tasks__0__top_k="x"))
    assert "3 problem(s)" in text
    assert len(text.splitlines()) == 4


@pytest.mark.parametrize("interval", [1, 2, 3, 5])
@pytest.mark.parametrize("times", [0, 1, 4])
def test_any_multiple_of_the_sync_interval_is_accepted(interval: int, times: int) -> None:
    raw = plain_config(sync__sync_weights_interval=interval, eval__interval=interval * times)
    raw["checkpoint"] = {"interval": interval * times}
    assert parse_config(raw).eval.interval == interval * times


def test_schedules_always_include_the_last_step() -> None:
    raw = plain_config(
        sync__sync_weights_interval=2, eval__interval=2, checkpoint__interval=2, train__num_steps=5
    )
    config = parse_config(raw)
    assert [step for step in range(1, 6) if config.sync_due(step)] == [2, 4, 5]
    assert [step for step in range(6) if config.save_due(step)] == [2, 4, 5]
    assert [step for step in range(6) if config.eval_due(step)] == [0, 2, 4, 5]
    rare = make_config(train__num_steps=3)
    assert [step for step in range(4) if rare.save_due(step)] == [3]
    assert [step for step in range(4) if rare.eval_due(step)] == [3]


@pytest.mark.parametrize(
    ("places", "kept"),
    [
        ({}, [1, 3, 5]),
        ({"eval__pool": {"name": "exam"}}, [1, 2, 3, 5]),
        ({"tasks__0__strategy": {"kind": "sync"}}, [1, 3, 5]),
        ({"tasks__0__strategy": {"max_staleness": 0}}, []),
        ({"tasks__0__strategy": {"enable_partial_rollout": False}}, []),
        ({"placement": "colocate"}, []),
    ],
)
def test_requests_freeze_only_where_they_can_stay_and_go_on(places: dict[str, Any], kept: list[int]) -> None:
    due = {"eval__interval": 2, "eval__num_prompts": 1, "checkpoint__interval": 4, "train__num_steps": 6}
    config = make_config(sync__pause_mode="keep", **due, **places)
    assert [step for step in range(1, 7) if config.pause_mode(step) == "keep"] == kept
    assert {config.pause_mode(step, saving=True) for step in range(7)} == {"abort"}
    gentle = make_config(sync__pause_mode="wait", **due, **places)
    assert {gentle.pause_mode(step, saving=stop) for step in range(7) for stop in (True, False)} == {"wait"}


TURNS = {"kind": "environment", "environment": "module:function"}


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({"tasks__0__max_prompt_tokens": 32}, None),
        ({"tasks__0__max_prompt_tokens": 33}, 32),
        ({"tasks__0__max_prompt_tokens": 8, "tasks__0__agent_loop": TURNS}, 32),
        ({"tasks__0__max_prompt_tokens": 8, "tasks__0__max_tokens": 16, "tasks__0__agent_loop": TURNS}, None),
        ({"tasks__0__max_prompt_tokens": 33, "rollout__block_size": 128}, 128),
        ({"tasks__0__max_prompt_tokens": 33, "device": "cuda"}, None),
        ({"rollout__block_size": 16, "device": "cuda"}, 16),
    ],
)
def test_blocks_are_small_where_siblings_on_cpu_can_share_one(
    options: dict[str, Any], size: int | None
) -> None:
    config = make_config(**options)
    assert EngineConfig.of(config).block_size == size


@pytest.mark.parametrize(("size", "shown"), [(None, "the engine's own (vLLM: 128)"), (64, "64")])
def test_the_plan_says_by_what_siblings_share_their_prompt(size: int | None, shown: str) -> None:
    config = make_config(tasks__0__max_prompt_tokens=32, rollout__block_size=size)
    assert dict(check(config).batch)["prompts of a group"].endswith(f"block_size {shown}")


def test_evaluation_is_never_due_without_prompts() -> None:
    config = make_config(eval__num_prompts=0, eval__interval=1)
    assert not any(config.eval_due(step) for step in range(5))


def write(folder: Path, raw: Any) -> Path:
    path = folder / "config.yaml"
    path.write_text(raw if isinstance(raw, str) else yaml.safe_dump(raw))
    return path


def test_overrides_reach_nested_values_lists_and_sections_that_the_file_lacks(tmp_path: Path) -> None:
    overrides = ["train.num_steps=9", "tasks.0.group_size=4", "sync.canary_tolerance=null", "seed=7"]
    config = load_config(write(tmp_path, plain_config()), [*overrides, "rollout.resources={rollout: 1}"])
    assert (config.train.num_steps, config.tasks[0].group_size, config.seed) == (9, 4, 7)
    assert config.sync.canary_tolerance is None
    assert config.rollout.resources == {"rollout": 1}


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("train.num_steps", "must read key=value"),
        ("=3", "must read key=value"),
        ("tasks.x.group_size=4", "does not fit"),
        ("tasks.7.group_size=4", "does not fit"),
        ("seed.x=4", "does not fit"),
        ("train.num_steps=[1", "is no YAML"),
        ("train.num_stepz=1", "did you mean num_steps?"),
        ("train.num_steps=none", "got 'none'"),
    ],
)
def test_bad_override_is_refused_by_name(tmp_path: Path, override: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, plain_config(seed=1)), [override])
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("content", "part"),
    [("a: [", "is no YAML"), ("- 1", "must hold a mapping, got list"), ("", "got NoneType")],
)
def test_file_that_is_no_mapping_is_refused(tmp_path: Path, content: str, part: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(ConfigError, match=part) as caught:
        load_config(path)
    assert str(path) in str(caught.value)


def test_missing_folder_and_binary_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read configuration .*: No such file"):
        load_config(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match=r"cannot read configuration .*: Is a directory"):
        load_config(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(ConfigError, match="is no YAML"):
        load_config(tmp_path / "binary")


def test_configuration_written_as_yaml_reads_back_equal(tmp_path: Path) -> None:
    config = make_config(train__learning_rate=1e-6, sync__canary_tolerance=None, name="a-1")
    path = write(tmp_path, config.model_dump(mode="json"))
    assert load_config(path) == config


# ---------------------------------------------------------------- YAML

BOMB = "a0: &a0 [1, 1]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("seed: 1\nname: a\nseed: 2\n", ["the key 'seed' twice", "at lines 1 and 3"]),
        ("train:\n  lora: {rank: 1, rank: 2}\n", ["the key 'rank' twice", "at lines 2 and 2"]),
        (BOMB, ["more than 50000 values at line 15", "aliases"]),
        ("a: " + "[" * 5000 + "]" * 5000, ["nests deeper than 100 levels at line 1"]),
        ("a: &a [*a]", ["stands inside what it names"]),
        ("a: 2026-99-99", ["is no YAML", "month"]),
        ("a: {b: }}", ["is no YAML"]),
        ("a: b\x00", ["is no YAML", "unacceptable character #x0000", "position 4"]),
    ],
)
def test_yaml_that_is_more_than_it_looks_is_refused(tmp_path: Path, text: str, parts: list[str]) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "config.yaml")
    assert [part for part in ["config.yaml", *parts] if part not in str(caught.value)] == [], caught.value


def test_aliases_that_are_no_bomb_and_merged_keys_are_read(tmp_path: Path) -> None:
    raw = yaml.safe_dump(plain_config())
    text = raw + "rollout: &pool {num_workers: 2}\neval: {pool: {<<: *pool, name: e, num_workers: 3}}\n"
    (tmp_path / "config.yaml").write_text(text)
    config = load_config(tmp_path / "config.yaml")
    assert (
        config.rollout.num_workers == 2 and config.eval.pool is not None and config.eval.pool.num_workers == 3
    )


@pytest.mark.parametrize(
    "place", ["train__num_steps", "train__learning_rate", "seed", "tasks__0__source__size"]
)
def test_a_truth_value_is_no_number(place: str) -> None:
    assert f"{place.replace('__', '.')}: must be a number, got True" in refusal_of(
        plain_config(**{place: True})
    )
    assert make_config(train__packing=False).train.packing is False


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_that_some_generator_refuses_is_refused(seed: int) -> None:
    assert f"seed: Input should be {'greater' if seed < 0 else 'less'}" in refusal_of(plain_config(seed=seed))
