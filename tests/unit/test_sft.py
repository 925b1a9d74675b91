"""Supervised examples: what they become, and which step gets which."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from raypost.config import SftConfig
from raypost.data.tokenizer import Tokenizer
from raypost.errors import ConfigError
from raypost.trainer.batch.packing import PackingRule, micro_batches
from raypost.trainer.batch.sft import SftExamples, check_examples

WORDS = {f"w{i}": i for i in range(9)}
EOS = 9
TEMPLATE = "{% for m in messages %}w0 {{ m.content }}{% endfor %} w8"


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., SftExamples]:
    """Examples of these rows."""
    backend = Backend(WordLevel({**WORDS, "<eos>": EOS}, "<eos>"))
    backend.pre_tokenizer = Whitespace()

    def examples(
        rows: Any,
        samples: int = 2,
        seed: int = 0,
        max_tokens: int = 16,
        chat: bool = False,
        template: Any = TEMPLATE,
    ) -> SftExamples:
        tokenizer = Tokenizer(
            backend, eos_ids=(EOS,), pad_id=EOS, special_tokens={}, chat_template=template, origin="here"
        )
        path = tmp_path / "examples.jsonl"
        path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
        config = SftConfig(path=path, samples=samples, chat=chat)
        check_examples(config, tokenizer, max_tokens)
        return SftExamples(config, tokenizer, seed, max_tokens)

    return examples


def rows(count: int) -> list[dict[str, str]]:
    return [{"prompt": f"w{i} w1", "response": f"w{i}"} for i in range(count)]


def test_an_example_is_a_trajectory_whose_response_and_end_are_trained(
    make: Callable[..., SftExamples],
) -> None:
    first, second = make([*rows(1), " ", {"prompt": "w5", "response": "w6 w7"}]).of_step(1)
    if len(first.state.response_ids) == 3:
        first, second = second, first
    assert first.state.prompt_ids.tolist() == [0, 1] and first.state.response_ids.tolist() == [0, EOS]
    assert second.state.response_ids.tolist() == [6, 7, EOS] and second.state.response_mask.all()
    (micro,) = micro_batches([first, second], 0, 1, PackingRule(64))
    assert sorted(micro.targets_T.tolist()) == [0, 6, 7, EOS, EOS]
    wrapped = make(rows(1), samples=1, chat=True).of_step(1)[0].state
    assert wrapped.prompt_ids.tolist() == [0, 0, 1, 8]


def test_every_example_comes_once_an_epoch_and_orders_depend_on_the_seed_and_the_step_alone(
    make: Callable[..., SftExamples],
) -> None:
    examples = make(rows(5))
    taken = [sample.state.group_id for step in range(1, 6) for sample in examples.of_step(step)]
    assert sorted(taken[:5]) == sorted(taken[5:]) == [0, 1, 2, 3, 4] and taken[:5] != taken[5:]
    again, other = make(rows(5)), make(rows(5), seed=1)
    assert [s.state.group_id for s in again.of_step(3)] == taken[4:6]
    assert [s.state.group_id for step in range(1, 6) for s in other.of_step(step)] != taken
    starts = [sample.start for sample in examples.of_step(2)]
    assert starts == [0, 2]


@pytest.mark.parametrize("bad, text", [
    ("{", r"examples.jsonl:2 is no JSON"), ("[1]", r"examples.jsonl:2 must read .* got \[1\]"),
    ({"prompt": "w1"}, r"examples.jsonl:2 must read"), ({"prompt": "w1", "response": 3}, r"must read"),
    ({"prompt": "", "response": "w1"}, r"examples.jsonl:2 has a prompt without tokens"),
    ({"prompt": "w1 " * 15, "response": "w1"}, r"examples.jsonl:2 has 17 tokens, more than the 16"),
])  # fmt: skip
def test_a_line_that_is_no_example_is_named_before_anything_starts(
    make: Callable[..., SftExamples], bad: Any, text: str
) -> None:
    with pytest.raises(ConfigError, match=text) as refused:
        make([*rows(1), bad])
    assert any(entry.name == "check_examples" for entry in refused.traceback)


def test_the_check_reads_every_line_but_encodes_for_no_longer_than_allowed(tmp_path: Path) -> None:
    class Slow:
        eos_ids = (EOS,)
        encoded = 0

        def encode(self, text: str, add_special_tokens: bool) -> Any:
            self.encoded += 1
            return np.ones(3, np.int32)

    path, slow = tmp_path / "examples.jsonl", Slow()
    path.write_text("\n".join(map(json.dumps, rows(50))))
    config = SftConfig(path=path, samples=1)
    check_examples(config, cast(Tokenizer, slow), 16, within_s=0.0)
    assert slow.encoded == 2
    check_examples(config, None, 16)
    check_examples(config, cast(Tokenizer, slow), 16, within_s=60)
    assert slow.encoded == 2 + 100
    path.write_text(path.read_text() + "\n[]")
    with pytest.raises(ConfigError, match=r"examples.jsonl:51 must read"):
        check_examples(config, None, 16)


def test_examples_of_a_step_are_split_over_its_optimizer_steps(make: Callable[..., SftExamples]) -> None:
    examples = make(rows(7), samples=5)
    whole = [id(sample.state) for sample in examples.of_step(2)]
    for updates, sizes in ((1, [5]), (2, [2, 3]), (5, [1] * 5), (7, [0, 1, 1, 0, 1, 1, 1])):
        parts = examples.of_updates(2, updates)
        assert [len(part) for part in parts] == sizes
        assert [id(sample.state) for part in parts for sample in part] == whole


def test_checking_examples_needs_neither_torch_nor_transformers() -> None:
    code = "import sys, raypost.trainer.batch.sft; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.stdout.strip() == "set()", done.stderr


def test_too_few_examples_and_no_file_are_refused(make: Callable[..., SftExamples], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds 3 examples, fewer than train.sft.samples 4"):
        make(rows(3), samples=4)
    with pytest.raises(ConfigError, match=r"cannot read train.sft.path"):
        SftExamples(SftConfig(path=tmp_path / "none", samples=1), cast(Tokenizer, None), 0, 16)
    assert isinstance(make(rows(2)).of_step(1)[0].state.prompt_ids, np.ndarray)


def test_a_chat_without_a_template_is_refused(make: Callable[..., SftExamples]) -> None:
    with pytest.raises(ConfigError, match=r"train.sft.chat is true, but .* has no chat template"):
        make(rows(2), chat=True, template=None)
