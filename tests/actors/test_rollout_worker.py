"""The rollout worker on a real engine, with random models small enough to compare with transformers."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio
import ray
import torch
from ray.actor import ActorHandle
from ray.exceptions import RayActorError
from transformers import LlamaForCausalLM

from actors.engine.life import OWNER, EngineInfo
from actors.placement import spawn
from actors.rollout.worker import RolloutWorker
from raypost.errors import NotStagedError, StaleWeightsError, WeightError
from raypost.types import GenerateRequest, SampleParams
from raypost.weights.delta import DeltaPacker
from raypost.weights.group import Host
from raypost.weights.manifest import DOWN, UP, Bytes, Manifest, pack, pack_adapters
from raypost.weights.seats import Member
from tests.actors.tiny_engine import (
    CONFIG,
    PROMPT,
    TOLERANCE,
    VOCAB,
    Bench,
    change,
    difference,
    expected_logprobs,
    flat_tensors,
    make_model,
    publish,
    request,
    started,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

one_engine = pytest.mark.parametrize("bench", ["tied"], indirect=True)
"""For what does not depend on how the model's head is stored."""


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["tied", "untied"])
async def bench(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Bench]:
    with pytest.MonkeyPatch.context() as patch:
        # For the functions that tests send to the engine's process.
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
        async with started(tmp_path_factory.mktemp(request.param), tied=request.param == "tied") as bench:
            yield bench


async def test_worker_without_weights_serves_nothing(bench: Bench) -> None:
    assert (await bench.worker.held()).version == -1
    with pytest.raises(StaleWeightsError, match="holds version -1"):
        await bench.worker.resume(0)
    result = await bench.worker.generate(request("early"))
    assert (result.finish_reason, len(result.response_ids)) == ("abort", 0)


def is_taken_apart(vllm_worker: Any) -> bool:
    """Return whether the last load went by vLLM's layerwise reload."""
    return bool(vllm_worker.weight_transfer_engine._is_taken_apart)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_logprobs_equal_transformers_before_and_after_an_update(
    bench: Bench, temperature: float
) -> None:
    for _ in range(2):
        await bench.sync()
        calls = (bench.worker.generate(request(f"r{i}", temperature=temperature)) for i in range(8))
        results = await asyncio.gather(*calls)
        assert max(difference(bench.model, result, temperature) for result in results) < TOLERANCE
        assert all(set(result.policy_versions) == {bench.version} for result in results)
        assert {(result.finish_reason, result.worker) for result in results} == {("length", "rollout-0")}
    assert await bench.llm.collective_rpc(is_taken_apart) == [False], "but for the first load"


async def test_canary_equals_transformers_whether_the_gate_is_open_or_closed(bench: Bench) -> None:
    await bench.sync()
    ids = np.arange(40, dtype=np.int32)
    expected = expected_logprobs(bench.model, ids)
    opened = await bench.worker.canary(ids)
    await bench.worker.pause()
    closed = await bench.worker.canary(ids)
    assert opened.shape == closed.shape == (39,)
    assert np.max(np.abs(opened - expected)) < TOLERANCE
    assert np.max(np.abs(closed - expected)) < TOLERANCE
    assert (await bench.worker.generate(request("still closed"))).finish_reason == "abort"


@one_engine
async def test_paused_requests_return_partials_and_continue_under_the_next_version(bench: Bench) -> None:
    await bench.sync()
    calls = [asyncio.create_task(bench.worker.generate(request(f"r{i}", 200))) for i in range(16)]
    await bench.progress(16)
    await bench.worker.pause()
    assert (await bench.worker.stats()).running == 0
    partials = await asyncio.wait_for(asyncio.gather(*calls), 60)
    assert {result.finish_reason for result in partials} == {"abort"}
    assert all(0 < len(result.response_ids) < 200 for result in partials)
    assert max(difference(bench.model, result) for result in partials) < TOLERANCE
    assert all(set(result.policy_versions) == {bench.version} for result in partials)

    await bench.sync()
    prefix = np.concatenate([PROMPT, partials[0].response_ids])
    rest = await bench.worker.generate(request("rest", 200 - len(partials[0].response_ids), prefix))
    assert set(rest.policy_versions) == {bench.version}
    expected = expected_logprobs(bench.model, np.concatenate([prefix, rest.response_ids]))[len(prefix) - 1 :]
    assert np.max(np.abs(expected - rest.logprobs)) < TOLERANCE


@one_engine
async def test_pause_and_resume_may_be_repeated(bench: Bench) -> None:
    await bench.sync()
    await bench.worker.resume(bench.version)
    await bench.assert_serves(bench.version)
    await bench.worker.pause()
    await bench.worker.pause()
    assert (await bench.worker.generate(request("paused"))).finish_reason == "abort"
    await bench.worker.resume(bench.version)
    await bench.assert_serves(bench.version)


@one_engine
async def test_request_that_slips_in_behind_the_abort_does_not_hang_the_pause(bench: Bench) -> None:
    await bench.sync()
    for _ in range(20):
        calls = [asyncio.create_task(bench.worker.generate(request(f"r{i}", 100))) for i in range(8)]
        await asyncio.sleep(0)
        await asyncio.wait_for(bench.worker.pause(), 60)
        results = await asyncio.wait_for(asyncio.gather(*calls), 60)
        assert {result.finish_reason for result in results} == {"abort"}
        await bench.worker.resume(bench.version)


@one_engine
async def test_stop_token_ends_a_response_and_is_part_of_it(bench: Bench) -> None:
    await bench.sync()
    everything = tuple(range(VOCAB))
    asked = GenerateRequest(
        request_id="stop",
        token_ids=PROMPT,
        sample_params=SampleParams(max_tokens=9, stop_token_ids=everything),
    )
    result = await bench.worker.generate(asked)
    assert (result.finish_reason, len(result.response_ids)) == ("stop", 1)


@one_engine
async def test_no_stop_token_comes_before_min_tokens_and_logprobs_are_of_what_could_come(
    bench: Bench,
) -> None:
    await bench.sync()
    all_but_7 = tuple(n for n in range(VOCAB) if n != 7)
    params: dict[str, Any] = {"min_tokens": 3, "stop_token_ids": all_but_7}
    results = await asyncio.gather(*(bench.worker.generate(request(f"m{n}", 9, **params)) for n in range(8)))
    for one in results:
        assert one.response_ids[:3].tolist() == [7, 7, 7] and np.allclose(one.logprobs[:3], 0, atol=1e-6)
    assert "stop" in {one.finish_reason for one in results}


@one_engine
async def test_without_stop_tokens_a_response_has_max_tokens(bench: Bench) -> None:
    await bench.sync()
    results = await asyncio.gather(*(bench.worker.generate(request(f"e{n}", 20)) for n in range(8)))
    assert {(one.finish_reason, len(one.response_ids)) for one in results} == {("length", 20)}


@one_engine
async def test_cancelled_call_leaves_no_request_in_the_engine(bench: Bench) -> None:
    await bench.sync()
    call = asyncio.create_task(bench.worker.generate(request("cancelled", 200)))
    await bench.progress(1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (await bench.worker.stats()).running == 0
    assert bench.llm.get_num_unfinished_requests() == 0
    await bench.assert_serves(bench.version)


@one_engine
@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (request("long", 252), "exceed max_model_len 256"),
        (request("empty", 4, np.empty(0, np.int32)), "at least 1"),
        (request("foreign", 4, np.asarray([VOCAB + 100], np.int32)), "exceed the vocabulary of 50"),
    ],
)
async def test_request_that_cannot_run_is_an_error_and_harms_no_other(
    bench: Bench, asked: GenerateRequest, why: str
) -> None:
    await bench.sync()
    result = await bench.worker.generate(asked)
    assert (result.finish_reason, len(result.response_ids)) == ("error", 0)
    assert result.error is not None and why in result.error
    await bench.assert_serves(bench.version)


async def test_flipped_byte_is_refused_by_name_and_the_old_weights_still_serve(bench: Bench) -> None:
    await bench.sync()
    await bench.worker.pause()
    before = await bench.worker.held()
    manifest, buckets = publish(bench.model, bench.version + 1)
    victim = manifest.tensors[7]
    buckets[victim.bucket][victim.offset + 5] ^= 1
    with pytest.raises(WeightError, match=f"{victim.name}.*old weights are untouched"):
        await bench.worker.load_weights(manifest, *buckets)
    assert await bench.worker.held() == before
    await bench.worker.resume(bench.version)
    await bench.assert_serves(bench.version)
    await bench.sync()
    await bench.assert_serves(bench.version)


@one_engine
async def test_version_is_staged_while_the_old_one_serves_and_loaded_from_there(bench: Bench) -> None:
    await bench.sync()
    calls = [asyncio.create_task(bench.worker.generate(request(f"r{i}", 200))) for i in range(8)]
    old = copy.deepcopy(bench.model)
    change(bench.model)
    manifest, buckets = publish(bench.model, bench.version + 1)
    victim = manifest.tensors[7]
    buckets[victim.bucket][victim.offset + 5] ^= 1
    with pytest.raises(WeightError, match=f"did not stage version {bench.version + 1}: .*{victim.name}"):
        await bench.worker.stage_weights(manifest, *buckets)
    buckets[victim.bucket][victim.offset + 5] ^= 1
    await bench.worker.stage_weights(manifest, *buckets)
    results = await asyncio.gather(*calls)
    assert {(result.finish_reason, *set(result.policy_versions)) for result in results} == {
        ("length", bench.version)
    }
    assert max(difference(old, result) for result in results) < TOLERANCE

    await bench.worker.pause()
    bench.version += 1
    # Its bytes do not travel again: what the sender has in their place does not matter.
    empty = [np.zeros_like(bucket) for bucket in buckets]
    assert (await bench.worker.load_weights(manifest, *empty)).digest == manifest.digest
    await bench.worker.resume(bench.version)
    await bench.assert_serves(bench.version)


@one_engine
async def test_version_that_came_by_a_group_is_loaded_from_there_and_another_asks_for_its_bytes(
    bench: Bench,
) -> None:
    await bench.sync()
    host = Host("127.0.0.1", "gloo", 30, [Member("rollout-0", 0, "", 1)])

    async def send(manifest: Manifest, buckets: list[Bytes]) -> None:
        receiving = asyncio.create_task(bench.worker.receive_weights(manifest, host.seats))
        for bucket in buckets:
            await asyncio.to_thread(host.send, bucket)
        await receiving

    manifest, buckets = bench.publish()
    await send(manifest, buckets)
    # Again by another group, as after the death of whoever had it sent: what is staged already is taken again.
    host = Host("127.0.0.1", "gloo", 30, [Member("rollout-0", 0, "", 1)])
    await send(manifest, buckets)
    assert (await bench.worker.swap(manifest)).digest == manifest.digest
    await bench.assert_serves(bench.version)

    manifest, buckets = bench.publish()
    victim = manifest.tensors[7]
    buckets[victim.bucket][victim.offset + 5] ^= 1
    with pytest.raises(WeightError, match=f"did not receive version {bench.version}: .*{victim.name}"):
        await send(manifest, buckets)
    with pytest.raises(NotStagedError, match=f"version {bench.version} is not staged"):
        await bench.worker.swap(manifest)
    buckets[victim.bucket][victim.offset + 5] ^= 1
    assert (await bench.worker.swap(manifest, *buckets)).digest == manifest.digest
    await bench.assert_serves(bench.version)
    manifest, buckets = bench.publish()
    await send(manifest, buckets)
    assert (await bench.worker.swap(manifest)).digest == manifest.digest
    await bench.assert_serves(bench.version)


@one_engine
async def test_loads_are_read_back_as_often_as_the_configuration_says(bench: Bench) -> None:
    await bench.sync()
    engine: Any = bench.worker._life.engine
    assert CONFIG.verify == engine.verify == "every", "the default"
    found = {}
    for often in ("every", "first", "off"):
        engine.verify = often
        await bench.sync()
        found[often] = (await bench.worker.held()).read_back
        await bench.assert_serves(bench.version)
    await bench.worker.pause()
    await bench.llm.collective_rpc("forget_weights")
    engine.verify = "first"
    await bench.load()
    assert (await bench.worker.held()).read_back, "the first since it held none"
    assert found == {"every": True, "first": False, "off": False}
    engine.verify = "every"


@one_engine
async def test_what_was_staged_gives_way_to_another_version(bench: Bench) -> None:
    await bench.sync()
    skipped, buckets = publish(bench.model, bench.version + 1)
    await bench.worker.stage_weights(skipped, *buckets)
    bench.version += 1
    await bench.sync()
    await bench.assert_serves(bench.version)
    await bench.worker.stage_weights(skipped, *buckets)
    await bench.assert_serves(bench.version)


@pytest.mark.parametrize("how", ["missing", "unexpected", "misshapen"])
async def test_manifest_that_does_not_fit_the_model_is_refused_by_name(bench: Bench, how: str) -> None:
    await bench.sync()
    await bench.worker.pause()
    tensors = [
        (name, parameter.detach().numpy().reshape(-1).view(np.uint8), "float32", tuple(parameter.shape))
        for name, parameter in bench.model.named_parameters()
    ]
    name, data, dtype, shape = tensors[5]
    changes = {
        "missing": [],
        "unexpected": [tensors[5], (f"{name}.extra", data, dtype, shape)],
        "misshapen": [(name, data, dtype, (shape[0] * shape[1],))],
    }
    manifest, buckets = pack(bench.version + 1, [*tensors[:5], *changes[how], *tensors[6:]], 1 << 20)
    with pytest.raises(WeightError, match=name):
        await bench.worker.load_weights(manifest, *buckets)
    await bench.worker.resume(bench.version)
    await bench.assert_serves(bench.version)


async def test_what_did_not_change_stays_and_what_did_is_what_transformers_has(bench: Bench) -> None:
    await bench.sync()
    layer = bench.model.model.layers[1]
    kept = bench.model.model.embed_tokens.weight
    parts = {
        "one of the joined queries, keys and values": [layer.self_attn.k_proj.weight],
        "a norm": [layer.input_layernorm.weight],
        "nothing": [],
        "the embedding": [kept],
        "a layer": list(layer.parameters()),
    }
    ids = np.arange(40, dtype=np.int32)
    for parameters in parts.values():
        with torch.no_grad():
            for parameter in parameters:
                parameter.add_(0.1 * torch.randn_like(parameter))
        await bench.worker.pause()
        bench.version += 1
        manifest, buckets = publish(bench.model, bench.version)
        report = await bench.worker.load_weights(manifest, *buckets)
        assert (report.version, report.digest) == (bench.version, manifest.digest)
        expected = expected_logprobs(bench.model, ids)
        assert np.max(np.abs(await bench.worker.canary(ids) - expected)) < TOLERANCE, parts


@one_engine
async def test_only_what_changed_is_loaded_and_for_another_base_it_is_refused(bench: Bench) -> None:
    await bench.sync()
    await bench.worker.pause()
    deltas, ids = DeltaPacker(100_000, np.copy), np.arange(40, dtype=np.int32)
    layer, embedding = bench.model.model.layers[1], bench.model.model.embed_tokens.weight

    def publish_moved(parameter: torch.Tensor) -> tuple[Manifest, list[Bytes]]:
        with torch.no_grad():
            parameter.add_(0.1 * torch.randn_like(parameter))
        bench.version += 1
        return deltas.pack(bench.version, flat_tensors(bench.model))

    for number in range(4):
        manifest, buckets = publish_moved(layer.self_attn.k_proj.weight)
        assert (manifest.base_buckets > 0) is (number > 1)
        moving = buckets[manifest.base_buckets :]
        report = await bench.worker.load_weights(manifest, *moving)
        assert (report.version, report.digest, report.read_back) == (bench.version, manifest.digest, True)
        got = await bench.worker.canary(ids)
        assert np.max(np.abs(got - expected_logprobs(bench.model, ids))) < TOLERANCE
    assert sum(bucket.nbytes for bucket in moving) < 0.3 * sum(manifest.bucket_sizes)

    # The engine holds what somebody else published meanwhile.
    before = embedding.detach().clone()
    with torch.no_grad():
        embedding.add_(0.1 * torch.randn_like(embedding))
    bench.version += 1
    strange, buckets = publish(bench.model, bench.version)
    await bench.worker.load_weights(strange, *buckets)
    engine: Any = bench.worker._life.engine
    embedding.data = before
    manifest, buckets = publish_moved(layer.self_attn.k_proj.weight)
    moving = buckets[manifest.base_buckets :]
    with pytest.raises(NotStagedError, match="send all of its bytes"):
        await bench.worker.load_weights(manifest, *moving)
    engine._held = manifest
    with pytest.raises(WeightError, match=r"without 'model\.embed_tokens\.weight', and version .*untouched"):
        await bench.worker.load_weights(manifest, *moving)
    engine._held = None
    assert (await bench.worker.held()).digest == strange.digest
    assert (await bench.worker.load_weights(manifest, *buckets)).digest == manifest.digest
    await bench.worker.resume(bench.version)
    await bench.assert_serves(bench.version)


async def test_adapters_are_added_to_a_base_that_is_sent_once(bench: Bench) -> None:
    await bench.sync()
    await bench.worker.pause()
    name, ids = "model.layers.1.self_attn.q_proj.weight", np.arange(40, dtype=np.int32)
    base, kept = publish(bench.model, 0)
    plain = bench.model.get_parameter(name).detach().clone()
    for number, scale in enumerate((0.5, 0.5, 2.0, 2.0)):
        bench.version += 1
        if number == 3:
            bench.model.get_parameter(name).data = plain
            change(bench.model)
            base, kept = publish(bench.model, 0)
            plain = bench.model.get_parameter(name).detach().clone()
        up, down = 0.2 * torch.randn(len(plain), 3), torch.randn(3, plain.shape[1])
        factors = [
            (name + part, one.numpy().reshape(-1).view(np.uint8), "float32", tuple(one.shape))
            for part, one in ((DOWN, down), (UP, up))
        ]
        manifest, own = pack_adapters(bench.version, base, factors, {name: scale}, 1 << 20)
        if number in (0, 3):
            victim = manifest.tensors[5]
            damaged = [bucket.copy() for bucket in kept]
            damaged[victim.bucket][victim.offset] ^= 1
            with pytest.raises(WeightError, match=f"{victim.name}.*old weights are untouched"):
                await bench.worker.load_weights(manifest, *damaged, *own)
        spoilt = own[0].copy()
        spoilt[9] ^= 1
        with pytest.raises(WeightError, match=r"q_proj\.weight\.lora_down.*old weights are untouched"):
            await bench.worker.load_weights(manifest, *kept, spoilt)
        report = await bench.worker.load_weights(manifest, *kept, *own)
        assert (report.version, report.digest) == (bench.version, manifest.digest)
        bench.model.get_parameter(name).data = plain + scale * up @ down
        expected = expected_logprobs(bench.model, ids)
        assert np.max(np.abs(await bench.worker.canary(ids) - expected)) < TOLERANCE
    # Its bytes do not travel again: what the sender has in its place does not matter.
    empty = [np.zeros_like(bucket) for bucket in kept]
    bench.version += 1
    again = replace(manifest, version=bench.version)
    assert (await bench.worker.load_weights(again, *empty, *own)).digest == manifest.digest
    bench.model.get_parameter(name).data = plain
    await bench.sync()
    await bench.assert_serves(bench.version)


@one_engine
async def test_versions_never_go_back_and_a_repeated_one_is_acknowledged(bench: Bench) -> None:
    await bench.sync()
    await bench.sync()
    manifest, buckets = publish(bench.model, bench.version)
    with pytest.raises(WeightError, match="pause it before loading"):
        await bench.worker.load_weights(replace(manifest, version=bench.version + 1), *buckets)
    for _ in range(2):  # serving, and paused
        report = await bench.worker.load_weights(manifest, *buckets)
        assert (report.version, report.digest) == (bench.version, manifest.digest)
        await bench.worker.pause()
    with pytest.raises(StaleWeightsError, match="is older"):
        await bench.worker.load_weights(replace(manifest, version=bench.version - 1), *buckets)
    change(bench.model)
    other, buckets = publish(bench.model, bench.version)
    with pytest.raises(WeightError, match="as a new version"):
        await bench.worker.load_weights(other, *buckets)


@one_engine
async def test_engine_that_slept_serves_what_was_loaded_and_what_it_kept(bench: Bench) -> None:
    await bench.sync()
    llm = bench.llm
    await bench.worker.pause()
    await bench.worker.sleep(keep_weights=False)
    asleep = await llm.engine_core.is_sleeping_async()
    assert (asleep, (await bench.worker.held()).version) == (True, -1)
    with pytest.raises(StaleWeightsError, match="holds version -1"):
        await bench.worker.resume(bench.version)
    await bench.load()
    ids = np.arange(40, dtype=np.int32)
    canary = await bench.worker.canary(ids)
    assert np.max(np.abs(canary - expected_logprobs(bench.model, ids))) < TOLERANCE
    await bench.worker.resume(bench.version)
    await bench.assert_serves(bench.version)

    await bench.worker.pause()
    await bench.worker.sleep(keep_weights=True)
    assert (await bench.worker.generate(request("asleep"))).finish_reason == "abort"
    await bench.worker.resume(bench.version)
    await bench.assert_serves(bench.version)
    assert not await llm.engine_core.is_sleeping_async()

    await bench.worker.pause()
    await bench.worker.sleep(keep_weights=False)
    flipped, buckets = publish(bench.model, bench.version)
    buckets[0][5] ^= 1
    with pytest.raises(WeightError, match="it holds no version"):
        await bench.worker.load_weights(flipped, *buckets)
    manifest, buckets = publish(bench.model, bench.version)
    await bench.worker.load_weights(manifest, *buckets)
    await bench.worker.resume(bench.version)
    await bench.assert_serves(bench.version)


@one_engine
async def test_interrupted_load_never_serves_and_the_next_load_repairs_it(bench: Bench) -> None:
    await bench.sync()
    call = asyncio.create_task(bench.worker.generate(request("frozen meanwhile", 240)))
    await bench.progress(1)
    await bench.worker.pause("keep")
    manifest, buckets = publish(bench.model, bench.version + 1)
    load = asyncio.create_task(bench.worker.load_weights(manifest, *buckets))
    while bench.worker._weights.broken is None:
        await asyncio.sleep(0)
    load.cancel()
    with pytest.raises(asyncio.CancelledError):
        await load
    with pytest.raises(WeightError, match="half loaded"):
        await bench.worker.resume(bench.version)
    with pytest.raises(WeightError, match="half loaded"):
        await bench.worker.canary(PROMPT)
    assert not call.done()
    before, bench.version = bench.version, bench.version + 1
    await bench.load()
    frozen = await asyncio.wait_for(call, 60)
    assert frozen.finish_reason == "abort" and len(frozen.response_ids) > 0
    assert set(frozen.policy_versions) == {before}
    assert bench.gaps(frozen).max() < TOLERANCE
    await bench.worker.resume(bench.version)
    await bench.assert_serves(bench.version)


def leave_the_head_stale(vllm_worker: Any) -> None:
    """Forget the packed copy of a tied head in the next load."""
    direct = vllm_worker.weight_transfer_engine._direct
    fill, tied = direct._fill, direct._tied

    def without(*args: Any) -> None:
        direct._tied, direct._fill = [], fill
        fill(*args)
        direct._tied = tied

    direct._fill = without


def flip_a_bit_of_a_joined_matrix(vllm_worker: Any) -> None:
    """Change what a layer's stand-in holds between its loading and its packing, in the next load."""
    direct = vllm_worker.weight_transfer_engine._direct
    write = direct._write

    def flipped(place: Any, tensor: torch.Tensor, *args: Any, **how: Any) -> None:
        if place.tensor.endswith("layers.1.self_attn.q_proj.weight"):
            direct._write = write
            tensor = tensor.clone()
            tensor.view(torch.int32)[7, 3] ^= 1
        write(place, tensor, *args, **how)

    direct._write = flipped


def say_it_is_installed(vllm_worker: Any) -> None:
    """Install nothing, and count as if all was."""
    vllm_worker.weight_transfer_engine._direct.install = lambda stand_ins: []


@one_engine
async def test_what_is_prepared_otherwise_than_it_was_sent_never_reaches_the_model(bench: Bench) -> None:
    await bench.sync()
    await bench.llm.collective_rpc(flip_a_bit_of_a_joined_matrix)
    before = bench.version
    await bench.worker.pause()
    wrong = f"did not load version {before + 1}: .*layers.1.self_attn.q_proj.*weights are untouched"
    with pytest.raises(WeightError, match=wrong):
        await bench.load()
    assert (await bench.worker.held()).version == before
    await bench.worker.resume(before)
    await bench.sync()
    await bench.assert_serves(bench.version)


@one_engine
@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (leave_the_head_stale, "what is packed for 'lm_head'"),
        pytest.param(say_it_is_installed, "does not compute with", marks=pytest.mark.slow),
    ],
)
async def test_engine_that_holds_something_else_than_was_sent_serves_nothing_until_it_is_right(
    bench: Bench, spoil: Callable[[Any], None], named: str
) -> None:
    await bench.sync()
    await bench.llm.collective_rpc(spoil)
    await bench.worker.pause()
    with pytest.raises(WeightError, match=f"did not load version {bench.version + 1}: .*{named}"):
        await bench.load()
    with pytest.raises(WeightError, match="half loaded"):
        await bench.worker.resume(bench.version)
    assert len((await bench.worker.generate(request("meanwhile"))).response_ids) == 0
    await bench.sync()
    await bench.assert_serves(bench.version)


@one_engine
async def test_a_request_that_has_no_token_at_a_load_shares_nothing_of_older_weights(bench: Bench) -> None:
    await bench.sync()
    engine: Any = bench.worker._life.engine
    prompt = np.resize(PROMPT, 70)
    requests = [request(f"sibling {n}", 100, ids=prompt) for n in range(CONFIG.rollout.max_num_seqs + 6)]
    engine.recompute_kv_cache = False
    try:
        calls = [asyncio.create_task(bench.worker.generate(one)) for one in requests]
        await bench.progress(8)
        before = bench.version
        await bench.swap()
        found = await asyncio.wait_for(asyncio.gather(*calls), 120)
    finally:
        engine.recompute_kv_cache = True
    late = [one for one in found if set(one.policy_versions) == {before + 1}]
    assert {len(one.response_ids) for one in found} == {100} and len(late) >= 6
    for one in late:
        ids = np.concatenate([prompt, one.response_ids])
        expected = expected_logprobs(bench.history[before + 1], ids)[len(prompt) - 1 :]
        assert np.abs(expected - one.logprobs).max() < TOLERANCE


@one_engine
async def test_engine_is_started_as_it_was_configured(bench: Bench) -> None:
    started = bench.llm.vllm_config
    assert started.cache_config.block_size == CONFIG.block_size == 32
    assert started.scheduler_config.max_num_batched_tokens == CONFIG.rollout.max_num_batched_tokens == 256
    assert started.scheduler_config.max_num_seqs == CONFIG.rollout.max_num_seqs


@one_engine
async def test_requests_run_on_under_the_old_weights_while_a_version_is_prepared(bench: Bench) -> None:
    await bench.sync()
    before = bench.version
    manifest, buckets = bench.publish()
    call = asyncio.create_task(bench.worker.generate(request("meanwhile", 200)))
    await bench.progress(1)
    await bench.worker.stage_weights(manifest, *buckets)
    assert (await bench.llm.collective_rpc("held_weights"))[0][0] == before
    result = await asyncio.wait_for(call, 60)
    assert set(result.policy_versions) == {before} and bench.gaps(result).max() < TOLERANCE
    assert await bench.llm.collective_rpc(is_prepared) == [True]
    assert (await bench.worker.swap(manifest)).digest == manifest.digest
    await bench.assert_serves(bench.version)


def is_prepared(vllm_worker: Any) -> bool:
    """Return whether a load has only to install what is there."""
    return vllm_worker.weight_transfer_engine._prepared is not None


async def test_bytes_that_were_sent_can_be_changed_by_nobody() -> None:
    from actors.rollout.vllm_engine import _copy

    sent = np.arange(9, dtype=np.uint8)
    with _copy(sent) as file:
        path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        with pytest.raises(PermissionError):
            os.pwrite(file.fileno(), b"x", 3)
        with pytest.raises(PermissionError):
            os.truncate(path, 4)
        assert np.array_equal(np.fromfile(path, np.uint8), sent)


# ---------------------------------------------------------------- as a Ray actor


@dataclass
class Spawned:
    """A worker in a process of its own, its engine up."""

    actor: ActorHandle
    info: EngineInfo
    model: LlamaForCausalLM


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def spawned(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Spawned, Spawned]:
    """Two, to be ended in two ways; started at once, each on a core of its own."""

    async def start(index: int) -> Spawned:
        folder, name = tmp_path_factory.mktemp("actor"), f"rollout-{index}"
        model = make_model(folder, tied=True)
        actor = spawn(RolloutWorker, name, str(folder), CONFIG, index, name=name)
        info = await asyncio.wait_for(actor.start.remote(), 240)
        slots, tokens = info.room
        assert slots == CONFIG.rollout.max_num_seqs and tokens > CONFIG.max_model_len, "what the engine says"
        return Spawned(actor, info, model)

    return await asyncio.gather(start(0), start(1))


async def gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        await asyncio.sleep(0.05)
    return False


async def test_actor_loads_from_the_object_store_and_answers_control_calls_under_load(
    spawned: tuple[Spawned, Spawned],
) -> None:
    actor, info, model = spawned[0].actor, spawned[0].info, spawned[0].model
    manifest, buckets = publish(model, 0)
    refs = [ray.put(bucket) for bucket in buckets]
    report = await asyncio.wait_for(actor.load_weights.remote(manifest, *refs), 60)
    assert (report.version, report.digest, report.worker) == (0, manifest.digest, "rollout-0")
    await actor.resume.remote(0)
    first = await asyncio.wait_for(actor.generate.remote(request("first")), 60)
    assert difference(model, first) < TOLERANCE

    calls = [actor.generate.remote(request(f"r{i}", 200)) for i in range(1500)]
    async with asyncio.timeout(240):
        while (await actor.stats.remote()).running <= 1000:
            await asyncio.sleep(0.05)
    await asyncio.wait_for(actor.pause.remote(), 60)
    results = await asyncio.wait_for(asyncio.gather(*calls), 60)
    assert sum(result.finish_reason == "abort" for result in results) > 1000

    # The engine's end is the actor's, although nobody called it.
    os.kill(info.engine_pids[0], signal.SIGKILL)
    assert await gone([info.pid, *info.engine_pids])
    with pytest.raises(RayActorError):
        await asyncio.wait_for(actor.stats.remote(), 60)


async def test_killed_actor_leaves_no_engine_process(spawned: tuple[Spawned, Spawned]) -> None:
    info = spawned[1].info
    os.kill(info.pid, signal.SIGKILL)
    assert await gone([info.pid, *info.engine_pids])


@pytest.mark.slow
async def test_actor_that_is_killed_while_its_engine_starts_leaves_no_engine_process(
    local_ray: None, tmp_path: Path
) -> None:
    make_model(tmp_path, tied=True)
    actor = spawn(RolloutWorker, "rollout-0", str(tmp_path), CONFIG, 0, name="killed-early")
    starting = actor.start.remote()
    pid = await asyncio.wait_for(actor.__ray_call__.remote(lambda _: os.getpid()), 60)
    deadline = time.monotonic() + 240
    while not (family := [one for one in psutil.Process(pid).children(recursive=True) if is_engine(one)]):
        assert time.monotonic() < deadline, "no process of the engine came"
        await asyncio.sleep(0.05)
    await asyncio.sleep(2)  # it reads what it was given, and imports
    os.kill(pid, signal.SIGKILL)
    ray.kill(actor)
    assert await gone([pid, *(one.pid for one in family)])
    with pytest.raises(RayActorError):
        await asyncio.wait_for(starting, 60)


@pytest.mark.slow
async def test_actor_whose_engine_hangs_ends_with_it(local_ray: None, tmp_path: Path) -> None:
    make_model(tmp_path, tied=True)
    config = replace(CONFIG, rollout=CONFIG.rollout.model_copy(update={"liveness_timeout_s": 2.0}))
    actor = spawn(RolloutWorker, "rollout-0", str(tmp_path), config, 0, name="hangs")
    info = await asyncio.wait_for(actor.start.remote(), 240)
    await asyncio.wait_for(actor.ping.remote(), 60)
    for pid in info.engine_pids:
        os.kill(pid, signal.SIGSTOP)
    with pytest.raises(RayActorError):
        await asyncio.wait_for(actor.ping.remote(), 60)
    assert await gone([info.pid, *info.engine_pids])


async def test_process_whose_engine_does_not_answer_kills_it_and_ends_unless_that_is_excused() -> None:
    script = """
import asyncio, subprocess, sys
from actors.engine.life import EngineInfo, EngineLife

async def main():
    life = EngineLife("rollout-0", None, None)
    engine = subprocess.Popen(["sleep", "60"])
    life.info = EngineInfo(1, [engine.pid])
    late = [60, 0]
    await life.answers(lambda: asyncio.sleep(0), 0.2, lambda: False)
    await life.answers(lambda: asyncio.sleep(60), 0.2, lambda: True)
    await life.answers(lambda: asyncio.sleep(late.pop(0)), 0.2, lambda: False)
    print(engine.pid, flush=True)
    await life.answers(lambda: asyncio.sleep(60), 0.2, lambda: False)

asyncio.run(main())
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)
    assert ended.returncode == 1 and "its engine did not answer for 0 s" in ended.stderr
    assert await gone([int(ended.stdout)])


def is_engine(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return any("spawn_main" in word or "EngineCore" in word for word in process.cmdline())
    return False


async def test_process_of_an_engine_ends_with_its_owner_however_early_that_was() -> None:
    script = "import actors.engine.life, sys; print('up', flush=True); sys.stdin.read()"
    owner = subprocess.Popen(["sleep", "60"])

    def engine() -> subprocess.Popen[str]:
        environment = os.environ | {OWNER: str(owner.pid)}
        return subprocess.Popen(
            [sys.executable, "-c", script],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    late = engine()
    assert late.stdout is not None and late.stdout.readline() == "up\n"
    owner.kill()
    owner.wait()
    assert late.wait(60) == 1
    early = engine()
    assert early.wait(60) == 1 and early.stdout is not None and early.stdout.read() == ""
