"""Supervised examples: what they become, and which step gets which."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from raypost.algorithm_config import SftConfig
from raypost.errors import ConfigError
from raypost.packing import PackingRule, micro_batches
from raypost.sft import SftExamples
from raypost.tokenizer import Tokenizer

WORDS = {f"w{i}": i for i in range(9)}
EOS = 9


@pytest.fixture
def make(tmp_path):
    """Examples of these rows."""
    backend = Backend(WordLevel({**WORDS, "<eos>": EOS}, "<eos>"))
    backend.pre_tokenizer = Whitespace()
    template = "{% for m in messages %}w0 {{ m.content }}{% endfor %} w8"
    tokenizer = Tokenizer(
        backend, eos_ids=(EOS,), pad_id=EOS, special_tokens={}, chat_template=template, origin="here"
    )

    def examples(rows, samples=2, seed=0, max_tokens=16, chat=False):
        path = tmp_path / "examples.jsonl"
        path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
        return SftExamples(SftConfig(path=path, samples=samples, chat=chat), tokenizer, seed, max_tokens)

    return examples


def rows(count):
    return [{"prompt": f"w{i} w1", "response": f"w{i}"} for i in range(count)]


def test_an_example_is_a_trajectory_whose_response_and_end_are_trained(make):
    first, second = make([*rows(1), " ", {"prompt": "w5", "response": "w6 w7"}]).of_step(1)
    if len(first.state.response_ids) == 3:
        first, second = second, first
    assert first.state.prompt_ids.tolist() == [0, 1] and first.state.response_ids.tolist() == [0, EOS]
    assert second.state.response_ids.tolist() == [6, 7, EOS] and second.state.response_mask.all()
    (micro,) = micro_batches([first, second], 0, 1, PackingRule(64))
    assert sorted(micro.targets_T.tolist()) == [0, 6, 7, EOS, EOS]
    wrapped = make(rows(1), samples=1, chat=True).of_step(1)[0].state
    assert wrapped.prompt_ids.tolist() == [0, 0, 1, 8]


def test_every_example_comes_once_an_epoch_and_orders_depend_on_the_seed_and_the_step_alone(make):
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
    ({"prompt": "w1 " * 15, "response": "w1"}, r"examples.jsonl:2 has 17 tokens, more than 16"),
])  # fmt: skip
def test_a_line_that_is_no_example_is_named(make, bad, text):
    with pytest.raises(ConfigError, match=text):
        make([*rows(1), bad])


def test_too_few_examples_and_no_file_are_refused(make, tmp_path):
    with pytest.raises(ConfigError, match=r"holds 3 examples, fewer than train.sft.samples 4"):
        make(rows(3), samples=4)
    with pytest.raises(ConfigError, match=r"cannot read train.sft.path"):
        SftExamples(SftConfig(path=tmp_path / "none", samples=1), None, 0, 16)
    assert isinstance(make(rows(2)).of_step(1)[0].state.prompt_ids, np.ndarray)
