"""What is said when a micro-batch does not fit the memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from raypost.errors import BatchMemoryError
from raypost.trainer.batch.packing import PackingRule, micro_batches
from raypost.trainer.memory import first_of, memory_named
from tests.unit.train_groups import make_groups, planned


def no_memory_left() -> None:
    raise MemoryError


def accelerator_is_full() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.mark.parametrize(
    "fails", [no_memory_left, accelerator_is_full, lambda: torch.empty(2**50), lambda: np.empty(2**58)]
)
def test_a_micro_batch_that_does_not_fit_names_its_groups_its_size_and_what_lowers_it(
    fails: Callable[[], None],
) -> None:
    (micro,) = micro_batches(planned(make_groups(3, 2)).samples, 0, 1, PackingRule(999))
    with pytest.raises(BatchMemoryError) as raised, memory_named(micro, "step 7, rank 1"):
        fails()
    text = str(raised.value)
    assert text.startswith(f"step 7, rank 1: out of memory in a micro-batch of {micro.num_inputs} tokens, ")
    for part in (f"{micro.num_trained} trained, of 6 trajectories", "('task', 0), ('task', 1), ('task', 2)",
                 "train.micro_batch_tokens", "train.logits_mb", "train.gradient_checkpointing"):  # fmt: skip
        assert part in text
    assert raised.value.__cause__ is not None


def test_other_errors_are_left_as_they_are() -> None:
    (micro,) = micro_batches([], 0, 1, PackingRule(9))
    with pytest.raises(RuntimeError, match="cannot be multiplied"), memory_named(micro, "here"):
        torch.ones(2, 3) @ torch.ones(2, 3)


def test_only_the_first_names_are_listed() -> None:
    assert first_of(["a", "b"]) == "a, b" and first_of([]) == ""
    assert first_of([str(n) for n in range(20)]).endswith("14, 15 and 4 more")
