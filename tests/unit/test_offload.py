"""Memory that is freed and comes back, on the CPU: nothing here needs an optimizer or a process group."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from raypost.errors import ConfigError
from raypost.trainer import offload
from raypost.trainer.offload import HostStates, tensors_of
from tests.factories import make_config
from tests.present import present

CPU = torch.device("cpu")


def test_offloaded_memory_is_free_and_comes_back_below_every_view() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    row, other = whole[1], torch.ones(5, dtype=torch.bfloat16)
    states = HostStates(CPU)
    assert states.offload([whole, row, other, whole]) == 12 * 4 + 5 * 2
    assert [one.untyped_storage().nbytes() for one in (whole, row, other)] == [0, 0, 0]
    assert (states.is_offloaded, states.offload([torch.ones(3)])) == (True, 0)
    states.reload()
    states.reload()
    assert not states.is_offloaded
    assert row.tolist() == [4, 5, 6, 7] and other.tolist() == [1] * 5
    row.zero_()
    assert whole.sum() == 0 + 1 + 2 + 3 + 8 + 9 + 10 + 11, "a view is a view again"


def test_it_can_be_freed_any_number_of_times_with_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "CHUNK_BYTES", 16)
    weight, states = torch.zeros(9), HostStates(CPU)
    for step in range(1, 4):
        weight += step
        new = torch.full((step,), float(step))
        assert states.offload([weight, new]) == 4 * (9 + step)
        states.reload()
        assert new.tolist() == [step] * step
    assert weight.tolist() == [6] * 9


def test_scratch_memory_is_offloaded_without_a_copy_and_comes_back_as_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(offload, "CHUNK_BYTES", 16)
    kept, scratch, states = torch.ones(9), torch.ones(100), HostStates(CPU)
    assert states.offload([kept, scratch], [scratch]) == 4 * 109
    assert [one.copies == [] for one in states._freed] == [True, False]
    states.reload()
    assert kept.tolist() == [1] * 9 and scratch.untyped_storage().nbytes() == 400


def test_what_lies_elsewhere_or_cannot_be_freed_stays() -> None:
    mapped = torch.from_numpy(torch.ones(4).numpy().copy())
    states = HostStates(CPU)
    assert states.offload([torch.empty(3, device="meta"), mapped, torch.empty(0)]) == 0
    assert mapped.tolist() == [1] * 4


def test_without_enough_main_memory_everything_is_as_before() -> None:
    class Small(HostStates):
        def _copied(self, storage: torch.UntypedStorage) -> list[Tensor]:
            if self._freed:
                raise MemoryError("no room for a second one")
            return super()._copied(storage)

    first, second, states = torch.ones(4), torch.full((4,), 2.0), Small(CPU)
    with pytest.raises(MemoryError):
        states.offload([first, second])
    assert (first.tolist(), second.tolist(), states.is_offloaded) == ([1] * 4, [2] * 4, False)


def test_every_tensor_of_an_optimizer_is_found_with_what_hangs_on_it() -> None:
    class Optimizer:
        """Stands for DeepSpeed's, which take long to import."""

        def __init__(self, **fields: Any) -> None:
            vars(self).update(fields)

    Optimizer.__module__ = "deepspeed.runtime.zero"
    weight = torch.nn.Parameter(torch.ones(3))
    partition, weight.grad = torch.zeros(2), torch.ones(3)
    vars(weight)["ds_tensor"] = partition
    moment, master, foreign = torch.ones(3), torch.ones(3), torch.ones(3)
    inner = Optimizer(state={weight: {"exp_avg": moment}}, of_others=SimpleNamespace(tensor=foreign))
    outer = Optimizer(optimizer=inner, partitions=[(master,)])
    vars(outer)["itself"] = outer
    found = {one.data_ptr() for one in tensors_of(outer)}
    assert found == {one.data_ptr() for one in (weight, present(weight.grad), partition, moment, master)}


@pytest.mark.parametrize(
    ("train", "name"),
    [
        ({"zero_stage": 0}, "train.zero_stage"),
        (
            {"zero_stage": 2, "advantage": {"kind": "gae"}, "critic": {"zero_stage": 0}},
            "train.critic.zero_stage",
        ),
    ],
)
def test_an_optimizer_is_offloaded_by_zero_only(train: dict[str, object], name: str) -> None:
    asked = {"num_steps": 1, "batch_size": 1} | train
    with pytest.raises(ConfigError, match=f"{name} is 0, where DeepSpeed offloads nothing"):
        make_config(train=asked | {"offload_optimizer": True})
    make_config(train=asked)
