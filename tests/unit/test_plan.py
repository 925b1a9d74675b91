"""What cannot work is refused before anything starts, with both numbers and the fix; what can is laid out."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from raypost.config import AgentLoopConfig, Config, load_config, parse_config
from raypost.config.identity import MAY_CHANGE, MUST_STAY, flat, run_digest, run_identity
from raypost.errors import ClusterError, ConfigError
from raypost.plan import plan
from raypost.plan.cluster import ClusterResources, bundles, place, shared_devices, shortages
from raypost.production.build import task_limits
from tests.factories import everything_below, make_config, plain_config
from tests.unit.model_folders import write_model
from tests.unit.sandboxes import needs_sandbox

RECIPES = Path(__file__).resolve().parents[2] / "jobs" / "recipes"
GPU_NODES = [{"CPU": 96, "GPU": 8, "trainer": 8}, *[{"CPU": 96, "GPU": 8, "rollout": 8}] * 2]
BIG = ClusterResources([{"CPU": 64.0, "GPU": 8.0, "node:10.0.0.1": 1.0}])


def config_of(tmp_path: Path, **places: Any) -> Config:
    return make_config(**{"runs_dir": str(tmp_path / "runs"), **places})


def gpu_config(tmp_path: Path, **places: Any) -> Config:
    defaults = {"device": "cuda", "rollout__num_workers": 2, "rollout__tensor_parallel_size": 2}
    return config_of(tmp_path, **{**defaults, "train__num_workers": 4, **places})


def refusal(config: Config, cluster: ClusterResources | None = None) -> str:
    with pytest.raises((ConfigError, ClusterError)) as caught:
        plan.check(config, cluster=cluster)
    return str(caught.value)


# ---------------------------------------------------------------- what is refused


def jsonl(path: Path, *lines: str) -> dict[str, Any]:
    path.write_text("\n".join(lines))
    return {"source": {"kind": "jsonl", "dataset": str(path)}, "judge": {"kind": "exact"}}


def no_permission(tmp_path: Path) -> Config:
    (tmp_path / "locked").mkdir(mode=0o500)
    return config_of(tmp_path, runs_dir=str(tmp_path / "locked"))


def with_model(tmp_path: Path, settings: dict[str, Any] | None = None, **model: Any) -> Config:
    folder = write_model(tmp_path / "model", **model)
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return config_of(tmp_path, model__name=str(folder), tasks=[jsonl(tmp_path / "data.jsonl", *ROWS)])


def other_run(tmp_path: Path, **places: Any) -> Config:
    mine = config_of(tmp_path)
    mine.run_dir.mkdir(parents=True)
    theirs = config_of(tmp_path, **places).model_dump(mode="json")
    (mine.run_dir / "config.yaml").write_text(yaml.safe_dump(theirs))
    return mine


def foreign_folder(tmp_path: Path) -> Config:
    mine = config_of(tmp_path)
    mine.run_dir.mkdir(parents=True)
    (mine.run_dir / "thesis.tex").write_text("mine")
    return mine


def damaged_run(tmp_path: Path) -> Config:
    mine = other_run(tmp_path)
    (mine.run_dir / "config.yaml").write_text("a: [")
    return mine


def file_as_folder(tmp_path: Path) -> Config:
    (tmp_path / "runs").write_text("")
    return config_of(tmp_path)


def dataset(name: str, **params: Any) -> Callable[[Path], Config]:
    source = {"kind": "reasoning_gym", "dataset": name, "params": params}
    return lambda tmp_path: config_of(tmp_path, tasks__0__source=source)


def lines(*text: str) -> Callable[[Path], Config]:
    return lambda tmp_path: config_of(tmp_path, tasks=[jsonl(tmp_path / "data.jsonl", *text)])


ROWS = [json.dumps({"prompt": f"{n} + 1 =", "answer": str(n + 1)}) for n in range(60)]
BAD: dict[str, tuple[Callable[[Path], Config], list[str]]] = {
    "missing model": (lambda p: config_of(p, model__name=str(p / "absent")), ["absent"]),
    "tokenizer without end token": (
        lambda p: with_model(p, settings={"pad_token": "<pad>"}),
        ["no end-of-sequence token", "set eos_token"],
    ),
    "model too short": (
        lambda p: with_model(p, max_position_embeddings=100),
        ["is 128", "100 positions", "lower max_tokens"],
    ),
    "NCCL on cpu": (
        lambda p: config_of(p, sync__transport="nccl"),
        ["sync.transport is nccl", "device is cpu", "use gloo"],
    ),
    "NCCL between those that share a GPU": (
        lambda p: config_of(p, sync__transport="nccl", placement="colocate", device="cuda"),
        ["sync.transport is nccl", "placement is colocate", "use object_store"],
    ),
    "tensor parallel on cpu": (
        lambda p: config_of(p, rollout__tensor_parallel_size=2),
        ["tensor_parallel_size is 2", "device is cpu", "use 1"],
    ),
    "unknown dataset": (dataset("chain_sums"), ["'default'", "'chain_sums'", "did you mean chain_sum"]),
    "text the tiny model cannot read": (
        dataset("spell_backward"),
        ["'tiny'", "chain_sum", "'spell_backward'", "another model"],
    ),
    "prompts too long for a tiny model that is not made yet": (
        lambda p: config_of(p, tasks__0__max_prompt_tokens=5, model__cache_dir=str(p / "cache")),
        ["prompts do not fit max_prompt_tokens 5", "on_long_prompt: drop"],
    ),
    "tiny model too short": (
        lambda p: config_of(p, tasks__0__max_tokens=400),
        ["is 464", "256 positions", "lower max_tokens"],
    ),
    "unknown parameter": (dataset("chain_sum", max_term=3), ["max_term", "it has", "max_terms"]),
    "impossible parameter": (
        dataset("chain_sum", min_terms=5, max_terms=2),
        ["chain_sum", "refuses", "max_terms"],
    ),
    "missing file": (
        lambda p: config_of(
            p, tasks=[{**jsonl(p / "x"), "source": {"kind": "jsonl", "dataset": str(p / "y")}}]
        ),
        ["'default'", "cannot read", "No such file"],
    ),
    "empty dataset": (lines(), ["holds 0 prompts", "at least one line"]),
    "wrong keys": (
        lines('{"question": "1", "answer": "2"}'),
        ["line 1", '{"prompt": "...", "answer": "..."}'],
    ),
    "no JSON": (lines(ROWS[0], "prompt: 1"), ["line 2", "prompt: 1"]),
    "nothing held out": (lines(ROWS[0]), ["held out", "more"]),
    "runs_dir is a file": (file_as_folder, ["runs is a file", "choose another runs_dir="]),
    "another run": (
        lambda p: other_run(p, train__batch_size=16, seed=3),
        [
            "holds another run",
            "seed: 3 there, 0 here",
            "train.batch_size: 16 there, 8 here",
            "another name=",
            "delete",
        ],
    ),
    "files of no run": (foreign_folder, ["files of no run (thesis.tex)", "choose another name="]),
    "unreadable run": (damaged_run, ["config.yaml cannot be read", "is no YAML", "delete"]),
    "CPU as custom resource": (
        lambda p: config_of(p, rollout__resources={"CPU": 2}),
        ["rollout.resources names CPU", "set rollout.num_cpus"],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_with_value_bound_and_fix(name: str, tmp_path: Path) -> None:
    make, parts = BAD[name]
    config = make(tmp_path)
    before = everything_below(tmp_path)
    text = refusal(config, BIG)
    assert [part for part in parts if part not in text] == [], text
    assert "1 problem(s)" in text
    assert everything_below(tmp_path) == before


def test_folder_without_permission_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = no_permission(tmp_path)
    if os.geteuid() == 0:  # permissions do not bind root, so the system's answer is given for it
        monkeypatch.setattr(os, "access", lambda path, mode: "locked" not in str(path))
    text = refusal(config)
    assert "no permission in" in text
    assert "choose another runs_dir=" in text


def test_all_problems_come_at_once(tmp_path: Path) -> None:
    config = config_of(
        tmp_path,
        model__name=str(tmp_path / "absent"),
        tasks__0__source__dataset="chain_sums",
        rollout__num_workers=100,
    )
    text = refusal(config, BIG)
    assert "3 problem(s)" in text
    assert all(part in text for part in ("absent", "did you mean chain_sum", "needs 101 CPU"))


def test_prompts_longer_than_allowed_are_refused_with_their_length(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    task = {**jsonl(tmp_path / "data.jsonl", *ROWS), "max_prompt_tokens": 3, "max_tokens": 8}
    text = refusal(config_of(tmp_path, model__name=str(folder), tasks=[task]))
    assert "60 of 60 prompts do not fit max_prompt_tokens 3: " in text
    assert (
        "data.jsonl line 1 (8 tokens); " in text
        and "and 57 more; raise it, or set on_long_prompt: drop" in text
    )


def test_chat_without_a_template_is_refused(tmp_path: Path) -> None:
    config = with_model(tmp_path, settings={"eos_token": "<|im_end|>"})
    chat = config.tasks[0].model_copy(update={"chat": True, "max_prompt_tokens": 128})
    text = refusal(config.model_copy(update={"tasks": (chat,)}))
    assert "no chat template: set chat: false" in text


# ---------------------------------------------------------------- reward functions


def with_function(tmp_path: Path, text: str, **judge: Any) -> Config:
    (tmp_path / "reward.py").write_text(text)
    one = {"kind": "function", "function": f"{tmp_path}/reward.py:score", **judge}
    return config_of(tmp_path, tasks__0__judge=one)


def test_a_reward_function_is_tried_before_anything_starts(tmp_path: Path) -> None:
    tried = f"open({str(tmp_path / 'tried')!r}, 'a').write(prompt.split(':')[1] + '|' + response + ',')"
    text = f"def score(prompt, response, answer):\n  {tried}\n  return float(response == answer)"
    assert plan.check(with_function(tmp_path, text))
    calls = (tmp_path / "tried").read_text().strip(",").split(",")
    assert len(calls) == 6 and len({call.split("|")[0] for call in calls}) == 3
    assert [bool(call.split("|")[1]) for call in calls] == [True, False] * 3


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("import nosuchmodule", ["cannot be imported: ModuleNotFoundError", "'nosuchmodule' (line 1 of"]),
        (
            "def score(solution): return 1",
            ["'solution', which is none of", "answer", "response", "on prompt 1"],
        ),
        ("async def score(samples): return [1.0]", ["returned 1 scores for 2 responses", "on prompt 1"]),
        ("def score(response): return 'good'", ["returned 'good', a str: a score must be a number"]),
        ("def score(response): return response[0]", ["raised IndexError", "an empty response"]),
    ],
)
def test_a_reward_function_that_does_not_work_is_refused(tmp_path: Path, text: str, parts: list[str]) -> None:
    config = with_function(tmp_path, text)
    before = everything_below(tmp_path)
    found = refusal(config, BIG)
    wanted = [
        "1 problem(s)",
        "'default': judge.function: ",
        "reward.py:score",
        "a wrong answer is a low score",
        *parts,
    ]
    assert [part for part in wanted if part not in found] == [], found
    assert everything_below(tmp_path) == before


def test_every_part_of_a_composed_judge_is_tried(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def good(response): return 1\ndef bad(response): return None")
    parts = {n: {"kind": "function", "function": f"{tmp_path}/reward.py:{n}"} for n in ("good", "bad")}
    found = refusal(config_of(tmp_path, tasks__0__judge={"kind": "composed", "parts": parts}))
    assert "1 problem(s)" in found and "judge.parts.bad.function" in found


def test_a_reward_function_that_nobody_would_ask_is_refused(tmp_path: Path) -> None:
    config = with_function(tmp_path, "def score(response): return 1.0")
    task = config.tasks[0].model_copy(
        update={"agent_loop": AgentLoopConfig(kind="environment", environment="a:b")}
    )
    assert "which gives the rewards itself and asks no judge" in refusal(
        config.model_copy(update={"tasks": (task,)})
    )


@pytest.mark.parametrize("name", ["own-reward", pytest.param("code-judge", marks=needs_sandbox)])
def test_the_example_is_accepted(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(RECIPES.parents[1])
    assert plan.check(load_config(Path(f"examples/{name}/config.yaml"), [f"runs_dir={tmp_path}"]))


# ---------------------------------------------------------------- resources


def test_too_few_cores_are_refused_with_both_numbers(tmp_path: Path) -> None:
    config = config_of(tmp_path, rollout__num_workers=3, rollout__num_cpus=2)
    with pytest.raises(ClusterError) as caught:
        plan.check(config, cluster=ClusterResources([{"CPU": 4}]))
    text = str(caught.value)
    assert "needs 7 CPU (3 rollout_worker x 2, 1 trainer_worker x 1), the cluster has 4" in text
    assert "lower rollout.num_workers" in text


def test_a_job_that_fills_the_cluster_exactly_is_accepted_and_one_more_is_not(tmp_path: Path) -> None:
    cluster = ClusterResources([{"CPU": 2}, {"CPU": 1}])
    assert shortages(config_of(tmp_path, rollout__num_workers=2), cluster) == []
    assert len(shortages(config_of(tmp_path, rollout__num_workers=3), cluster)) == 1


def test_an_engine_larger_than_any_node_is_refused(tmp_path: Path) -> None:
    config = gpu_config(tmp_path, rollout__tensor_parallel_size=4)
    cluster = ClusterResources([{"CPU": 16, "GPU": 3}] * 8)
    [problem] = shortages(config, cluster)
    assert "each rollout_worker needs 1 CPU, 4 GPU on one node" in problem
    assert "16 CPU, 3 GPU" in problem


def test_missing_gpus_and_custom_resources_are_named_with_their_fix(tmp_path: Path) -> None:
    config = gpu_config(tmp_path, rollout__resources={"rollout": 1})
    gpu, custom = shortages(config, ClusterResources([{"CPU": 16}]))
    assert "needs 8 GPU (2 rollout_worker x 2, 4 trainer_worker x 1), the cluster has 0" in gpu
    assert "needs 2 rollout (2 rollout_worker x 1), the cluster has 0" in custom
    assert """start nodes with --resources '{"rollout": 1}'""" in custom


def test_on_a_growing_cluster_a_shortage_is_a_warning(tmp_path: Path) -> None:
    found = plan.check(
        config_of(tmp_path, rollout__num_workers=3), cluster=ClusterResources([{"CPU": 1}], True)
    )
    assert any("must grow first: the placement needs 4 CPU" in warning for warning in found.warnings)


def test_resources_that_suffice_only_in_sum_are_warned_of(tmp_path: Path) -> None:
    config = gpu_config(tmp_path, rollout__num_workers=3, train__num_workers=1)
    found = plan.check(
        config, cluster=ClusterResources([{"CPU": 16, "GPU": 3}] * 2 + [{"CPU": 16, "GPU": 1}])
    )
    assert any("rollout-2 may find no node" in warning for warning in found.warnings)


@settings(max_examples=60, deadline=None)
@given(
    nodes=st.lists(st.tuples(st.integers(0, 16), st.integers(0, 8)), min_size=1, max_size=4),
    workers=st.integers(1, 6),
    ranks=st.sampled_from([1, 2, 4]),
    width=st.integers(1, 4),
)
def test_what_is_placed_never_exceeds_a_node_and_what_fits_is_no_shortage(
    nodes: list[tuple[int, int]], workers: int, ranks: int, width: int
) -> None:
    raw = plain_config(device="cuda", rollout__num_workers=workers, rollout__tensor_parallel_size=width)
    raw["train"]["num_workers"] = ranks
    config = parse_config(raw)
    cluster = ClusterResources([{"CPU": cpu, "GPU": gpu} for cpu, gpu in nodes])
    homes = place(bundles(config), cluster)
    for number, (cpu, gpu) in enumerate(nodes, 1):
        here = [b.resources for b in bundles(config) if homes.get(b.name) == f"node {number}"]
        assert sum(r["CPU"] for r in here) <= cpu
        assert sum(r["GPU"] for r in here) <= gpu
    if len(homes) == workers + ranks:
        assert shortages(config, cluster) == []


def test_cluster_file_counts_every_node_type_at_its_largest(tmp_path: Path) -> None:
    head, rollout = {"resources": {"CPU": 4}}, {"resources": {"CPU": 8, "rollout": 1}, "max_workers": 3}
    content = {"head_node_type": "head", "max_workers": 3}
    path = tmp_path / "cluster.yaml"
    content["available_node_types"] = {"head": {**head, "max_workers": 0}, "rollout": rollout}
    path.write_text(yaml.safe_dump(content))
    cluster = ClusterResources.of_cluster_file(path)
    assert (len(cluster.nodes), cluster.total("CPU"), cluster.total("rollout")) == (4, 28, 3)


@pytest.mark.parametrize(
    "content", ["a: 1", "- 1", "a: [", "head_node_type: h\navailable_node_types: {h: {}}"]
)
def test_file_that_describes_no_cluster_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "cluster.yaml").write_text(content)
    with pytest.raises(ConfigError, match="is no Ray cluster file"):
        ClusterResources.of_cluster_file(tmp_path / "cluster.yaml")
    with pytest.raises(ConfigError, match="cannot read cluster file"):
        ClusterResources.of_cluster_file(tmp_path / "absent.yaml")


# ---------------------------------------------------------------- what is accepted


def test_good_configuration_passes_and_nothing_is_written(tmp_path: Path) -> None:
    found = plan.check(config_of(tmp_path), cluster=ClusterResources([{"CPU": 2}]))
    assert (found.resumes, found.warnings) == (False, ())
    assert list(tmp_path.iterdir()) == []


def test_good_model_and_file_pass(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    config = config_of(tmp_path, model__name=str(folder), tasks=[jsonl(tmp_path / "data.jsonl", *ROWS)])
    assert plan.check(config, cluster=BIG).warnings == ()


def test_the_same_run_is_resumed_wherever_its_folder_lies(tmp_path: Path) -> None:
    mine = other_run(tmp_path, model__cache_dir=str(tmp_path / "cache"), name="other-name")
    assert plan.check(mine).resumes
    places = {"name": "b", "tasks__0__source__index_dir": None}
    assert plan.check(mine).run_digest == run_digest(config_of(tmp_path / "elsewhere", **places))


def test_a_run_goes_on_with_what_its_own_errors_recommend_and_says_so(tmp_path: Path) -> None:
    was = {"train__micro_batch_tokens": 4096, "train__learning_rate": 1e-3, "rollout__request_timeout_s": 30}
    was |= {"train__zero_stage": 0, "train__num_workers": 2, "checkpoint__interval": 7}
    plan_now = plan.check(other_run(tmp_path, **was))
    assert plan_now.resumes
    said = "the run continues with another setting: train.micro_batch_tokens: 4096 there, 8192 here"
    assert said in plan_now.warnings
    assert sum("continues with another setting" in text for text in plan_now.warnings) == len(was)


def test_settings_that_may_change_are_settings() -> None:
    """Each is one of a configuration that has everything, and what decides the reward is none of them."""
    parts = {"a": {"kind": "exact", "weight": 2.0}, "b": {"kind": "http", "url": "http://127.0.0.1:1/"}}
    task = {"source": {"kind": "jsonl", "dataset": "x"}, "judge": {"kind": "composed", "parts": parts}}
    eval_config = {"source": {"kind": "jsonl", "dataset": "y"}}
    gae = {"advantage": {"kind": "gae"}, "critic": {}, "num_steps": 2, "batch_size": 2}
    config = make_config(tasks=[task], eval=eval_config, train=gae)
    places = flat(config.model_dump(mode="json"))
    assert [one for one in MAY_CHANGE + MUST_STAY if not any(fnmatchcase(p, one) for p in places)] == []
    stays = run_identity(config)
    assert {
        "tasks.0.judge.parts.a.weight",
        "tasks.0.judge.parts.b.kind",
        "eval.source.dataset",
    } <= stays.keys()
    assert not {"tasks.0.judge.parts.b.url", "tasks.0.weight", "train.learning_rate"} & stays.keys()


@pytest.mark.parametrize("place", ["seed", "train__batch_size", "tasks__0__group_size", "model__name"])
def test_digest_of_a_run_changes_with_whatever_changes_the_run(tmp_path: Path, place: str) -> None:
    value = "smollm2-135m" if place == "model__name" else 77
    assert run_digest(config_of(tmp_path)) != run_digest(config_of(tmp_path, **{place: value}))


def test_an_empty_run_folder_is_a_new_run(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    config.run_dir.mkdir(parents=True)
    assert not plan.check(config).resumes


def test_placement_lists_every_role_with_what_it_reserves_and_where(tmp_path: Path) -> None:
    reserved = {"rollout__agent_cpus": 1.5, "rollout__judge_cpus": 0.5}
    config = gpu_config(tmp_path, rollout__resources={"rollout": 1}, rollout__judge_workers=2, **reserved)
    cluster = ClusterResources(
        [{"CPU": 8, "GPU": 8, "node:10.0.0.1": 1}, {"CPU": 8, "GPU": 4, "rollout": 4, "node:10.0.0.2": 1}]
    )
    rows = {row.role: row for row in plan.check(config, cluster=cluster).placement}
    assert (rows["rollout_worker"].actors, rows["rollout_worker"].count) == ("rollout-0 .. rollout-1", 2)
    assert (rows["rollout_worker"].resources, rows["rollout_worker"].nodes) == (
        "1 CPU, 2 GPU, 1 rollout",
        "10.0.0.2",
    )
    assert (rows["trainer_worker"].resources, rows["trainer_worker"].nodes) == ("1 CPU, 1 GPU", "10.0.0.1")
    assert (rows["judge"].count, rows["judge"].resources) == (2, "0.5 CPU")
    assert (rows["agent_loop"].resources, rows["producer"].resources) == ("1.5 CPU", "shared time")
    assert len(rows) == 10


def test_bundles_are_named_once_each_and_reserve_no_gpu_on_cpu(tmp_path: Path) -> None:
    config = config_of(tmp_path, rollout__num_workers=3, train__num_workers=2, rollout__agent_workers=2)
    names = [bundle.name for bundle in plan.bundles(config)]
    assert len(names) == len(set(names))
    assert [b.resources for b in plan.bundles(config) if b.resources] == [{"CPU": 1.0}] * 5


@pytest.mark.parametrize(
    ("strategy", "interval", "threshold", "retry", "oldest"),
    [
        ({"max_staleness": 0, "tail_batch_trigger_size": -1}, 1, 1, False, "staleness 0: on-policy"),
        ({"max_staleness": 2}, 1, 3, True, "staleness 2: 2 steps old"),
        ({"max_staleness": 1, "tail_batch_trigger_size": 0}, 4, 8, True, "staleness 7: 7 steps old"),
        (
            {"kind": "sync"},
            3,
            3,
            True,
            "staleness 2: 2 steps old",
        ),
        (
            {"kind": "sync", "tail_batch_trigger_size": 4, "max_staleness": 3},
            1,
            1,
            True,
            "staleness 0: on-policy",
        ),
    ],
)
def test_staleness_bound_is_what_the_buffer_is_told(
    tmp_path: Path, strategy: dict[str, Any], interval: int, threshold: int, retry: bool, oldest: str
) -> None:
    config = config_of(tmp_path, tasks__0__strategy=strategy, sync__sync_weights_interval=interval)
    [bound] = plan.check(config).staleness
    assert (bound.threshold, bound.oldest) == (threshold, oldest)
    assert bound.rule.endswith(f"+ 1) x sync_weights_interval {interval}")
    assert bound.beyond == ("generated again" if retry else "dropped")
    limits = task_limits(config)["default"]
    assert (limits.stale_threshold, limits.retry) == (threshold, retry)


def test_batch_arithmetic_counts_tasks_samples_and_requests(tmp_path: Path) -> None:
    easy = plain_config()["tasks"][0] | {
        "name": "easy",
        "weight": 3,
        "strategy": {"over_sample_threshold": 0.5},
    }
    hard = plain_config()["tasks"][0] | {"name": "hard", "group_size": 4, "max_tokens": 100}
    config = config_of(tmp_path, tasks=[easy, hard], train__num_minibatches=2, train__num_workers=2)
    batch = dict(plan.check(config).batch)
    assert batch["groups a train step"] == "8 (6 of easy x 8, 2 of hard x 4)"
    assert batch["trajectories a train step"] == "56, at most 3872 response tokens"
    assert batch["groups a rank"] == "4 on 2 rank(s)"
    assert batch["optimizer steps a train step"] == "2 of 4 groups"
    assert batch["requests in flight"].startswith("the staleness bound allows 136, for 64 slots")
    assert batch["groups produced ahead"] == "at most 16 (2 batch(es))"


@pytest.mark.parametrize(
    ("places", "part"),
    [
        ({"tasks__0__strategy": {"enable_partial_rollout": False}}, "without partial rollout"),
        ({"tasks__0__strategy": {"over_sample_threshold": 2}}, "starts 16 groups beyond the staleness bound"),
        (
            {"tasks__0__strategy": {"tail_batch_trigger_size": 9}},
            "tail_batch_trigger_size 9 exceeds its 8 groups",
        ),
        ({"tasks__0__strategy": {"kind": "sync", "max_staleness": 2}}, "'sync' does not use max_staleness"),
        (
            {"rollout__max_num_seqs": 1024},
            "896 of the engines' 1024 slots stay empty: the staleness bound allows 128 requests",
        ),
        ({"train__correction": {"weight": None}}, "stays uncorrected"),
        ({"train__threads": 99}, "use 100 threads on 64 cores"),
        ({"device": "cuda"}, "float32 on GPUs"),
    ],
)
def test_what_works_but_badly_is_warned_of(tmp_path: Path, places: dict[str, Any], part: str) -> None:
    found = plan.check(config_of(tmp_path, **places), cluster=BIG)
    assert any(part in warning for warning in found.warnings), found.warnings


def test_a_task_too_light_for_any_group_is_warned_of(tmp_path: Path) -> None:
    rare = plain_config()["tasks"][0] | {"name": "rare", "weight": 0.001}
    found = plan.check(config_of(tmp_path, tasks=[plain_config()["tasks"][0], rare]), cluster=BIG)
    assert any("'rare': its weight is so small" in warning for warning in found.warnings)


def test_without_a_cluster_the_plan_says_that_none_was_looked_at(tmp_path: Path) -> None:
    found = plan.check(config_of(tmp_path))
    assert any("no cluster was looked at" in warning for warning in found.warnings)
    assert {row.nodes for row in found.placement} == {"any"}


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(path, marks=needs_sandbox if path.stem == "code" else ())
        for path in sorted(RECIPES.glob("*.yaml"))
    ],
    ids=lambda path: path.stem,
)
def test_every_recipe_can_be_planned(recipe: Path, tmp_path: Path) -> None:
    config = load_config(recipe, [f"runs_dir={tmp_path}"])
    found = plan.check(
        config, cluster=ClusterResources(GPU_NODES if config.device == "cuda" else [{"CPU": 2}])
    )
    assert [text for text in found.warnings if "is not on this machine" not in text] == []


def colocated(tmp_path: Path, **places: Any) -> Config:
    return config_of(tmp_path, placement="colocate", **places)


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ({"rollout__pools": [{"name": "far"}]}, ["rollout.pools has far", "placement: separate"]),
        ({"eval__pool": {"name": "exam"}}, ["eval.pool is 'exam'", "placement: separate"]),
        (
            {"device": "cuda", "rollout__num_workers": 2},
            ["rollout.num_workers 2, train.num_workers 1", "equal numbers"],
        ),
        (
            {"device": "cuda", "rollout__tensor_parallel_size": 2},
            ["tensor_parallel_size is 2", "shares one GPU", "use 1"],
        ),
        (
            {
                "device": "cuda",
                "train__advantage": {"kind": "gae"},
                "train__critic": {"num_workers": 2},
            },
            ["train.critic.num_workers 2", "equal numbers"],
        ),
    ],
)
def test_what_cannot_share_devices_is_refused(
    tmp_path: Path, places: dict[str, Any], words: list[str]
) -> None:
    text = refusal(colocated(tmp_path, **places))
    assert all(word in text for word in words), text


def test_a_round_may_end_early_only_where_nothing_waits_for_whole_batches(tmp_path: Path) -> None:
    early = {"tasks__0__strategy": {"kind": "sync", "should_continue": "operator:lt"}}
    assert "would starve" in refusal(config_of(tmp_path, **early))
    plan.check(colocated(tmp_path, **early))


def test_engine_rank_and_critic_share_a_gpu_that_is_counted_once(tmp_path: Path) -> None:
    config = colocated(
        tmp_path,
        device="cuda",
        rollout__num_workers=2,
        train__num_workers=2,
        train__advantage={"kind": "gae"},
        train__critic={"num_workers": 2},
    )
    shared = [bundle for bundle in plan.bundles(config) if bundle.shares == 1]
    assert [bundle.name for bundle in shared] == ["rollout-1", "trainer-1", "critic-1"]
    assert sum(bundle.resources["GPU"] for bundle in shared) <= 1
    assert shared_devices(config) == [{"CPU": 3.0, "GPU": 1.0}] * 2
    plan.check(config, cluster=ClusterResources([{"CPU": 3, "GPU": 1}] * 2))
    text = refusal(config, ClusterResources([{"CPU": 2, "GPU": 1}] * 3))
    assert "each shared device needs 3 CPU, 1 GPU on one node" in text
    assert "needs 2 GPU" in refusal(config, ClusterResources([{"CPU": 8, "GPU": 1}]))


def test_pools_and_evaluation_have_engines_of_their_own(tmp_path: Path) -> None:
    pools = [{"name": "far", "num_workers": 2, "resources": {"far": 1}}]
    config = config_of(tmp_path, rollout__pools=pools, eval__pool={"name": "exam", "num_cpus": 2})
    engines = {b.name: b for b in plan.bundles(config) if b.role in ("rollout_worker", "evaluation_worker")}
    assert list(engines) == ["rollout-0", "rollout-far-0", "rollout-far-1", "rollout-exam-0"]
    assert engines["rollout-far-1"].resources == {"CPU": 1.0, "far": 1.0}
    assert (engines["rollout-exam-0"].role, engines["rollout-exam-0"].resources) == (
        "evaluation_worker",
        {"CPU": 2.0},
    )
    assert config.rollout.num_engines == 3
    assert shared_devices(config) == []
    assert "needs 2 far" in refusal(config, ClusterResources([{"CPU": 8, "far": 1}]))
    assert "each evaluation_worker needs 2 CPU on one node" in refusal(
        config, ClusterResources([{"CPU": 1, "far": 1}] * 7)
    )


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ({"rollout__pools": [{"name": "far"}, {"name": "far"}]}, "different names"),
        ({"rollout__pools": [{"name": "far"}], "eval__pool": {"name": "far"}}, "different names"),
        ({"rollout__pools": [{"name": "far", "resources": {"CPU": 1}}]}, "set rollout.pools.0.num_cpus"),
    ],
)
def test_pools_that_cannot_be_told_apart_or_placed_are_refused(
    tmp_path: Path, places: dict[str, Any], words: str
) -> None:
    assert words in refusal(config_of(tmp_path, **places))


def test_a_critic_that_does_not_fit_the_run_is_refused(tmp_path: Path) -> None:
    gae: dict[str, Any] = {"train__advantage": {"kind": "gae"}}
    plan.check(config_of(tmp_path, **gae, train__critic={}))
    missing = config_of(tmp_path, **gae, train__critic={"name": str(tmp_path / "none")})
    assert "does not exist" in refusal(missing)
    uneven = config_of(tmp_path, **gae, train__critic={"num_workers": 3})
    assert "not divisible by train.critic.num_workers 3" in refusal(uneven)


def test_a_reward_model_that_cannot_score_is_refused(tmp_path: Path) -> None:
    judge = {"kind": "reward_model", "reward_model": "helpful"}
    chatty = write_model(tmp_path / "chatty")
    model = {"name": "helpful", "model": str(chatty), "max_model_len": 64}
    wrong = config_of(tmp_path, tasks__0__judge=judge, reward_models=[model])
    assert "ForSequenceClassification" in refusal(wrong)
    scorer = write_model(tmp_path / "scorer", architectures=["LlamaForSequenceClassification"], num_labels=1)
    right = config_of(tmp_path, tasks__0__judge=judge, reward_models=[model | {"model": str(scorer)}])
    assert [b.name for b in plan.bundles(right) if b.role == "reward_worker"] == ["reward-helpful-0"]
    plan.check(right)
    loop = {"kind": "environment", "environment": "tests.jobs.playground:AskTwice"}
    unasked = config_of(
        tmp_path,
        tasks__0__judge=judge,
        tasks__0__agent_loop=loop,
        reward_models=[model | {"model": str(scorer)}],
    )
    assert "asks no judge" in refusal(unasked)
    (scorer / "model.safetensors").write_bytes(b"")
    assert "model.safetensors is empty" in refusal(right)
    language = config_of(tmp_path, tasks__0__judge=judge, reward_models=[model | {"model": "tiny"}])
    assert "gives no score" in refusal(language)
    wide = model | {"model": str(scorer), "tensor_parallel_size": 2}
    assert "reward_models.0.tensor_parallel_size is 2" in refusal(
        config_of(tmp_path, tasks__0__judge=judge, reward_models=[wide])
    )


def test_engines_of_a_reference_are_refused_where_they_cannot_answer(tmp_path: Path) -> None:
    kl = {"coefficient": 0.1, "pool": {"name": "frozen"}}
    right = config_of(tmp_path, train__loss={"kl": kl})
    assert [b.name for b in plan.bundles(right) if b.role == "reference_worker"] == ["reference-frozen-0"]
    plan.check(right)
    warm = config_of(tmp_path, train__loss={"kl": kl}, tasks__0__temperature=0.7)
    assert "(0.7, 1.0, 0, 0)" in refusal(warm)
    longer = config_of(tmp_path, train__loss={"kl": kl}, tasks__0__min_tokens=2)
    assert "(1.0, 1.0, 0, 2)" in refusal(longer)


def test_supervised_examples_that_cannot_be_read_are_refused_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "examples.jsonl"
    path.write_text('{"prompt": "1 + 1 =", "response": "2"}\n{"prompt": "1 + 2 ="}\n')
    config = config_of(tmp_path, train__sft={"path": str(path), "samples": 1})
    assert f"{path}:2" in refusal(config)
    path.write_text('{"prompt": "1 + 1 =", "response": "2"}\n')
    plan.check(config)
