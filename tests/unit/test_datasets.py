import json
from collections.abc import Callable
from pathlib import Path

import pytest

from raypost.config import JudgeConfig, SourceConfig, TaskConfig
from raypost.datasets import build_source, held_out, is_held_out, render
from raypost.errors import ConfigError
from raypost.tokenizer import Tokenizer


def gym_task(**changes: object) -> TaskConfig:
    params = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    source = {"kind": "reasoning_gym", "dataset": "chain_sum", "params": params, "size": 2000} | changes
    return TaskConfig(source=SourceConfig(**source))


def jsonl_task(path: Path, **changes: object) -> TaskConfig:
    source = SourceConfig(kind="jsonl", dataset=str(path))
    return TaskConfig(source=source, judge=JudgeConfig(kind="exact"), **changes)


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"What is {n}?", "answer": n}) + "\n" for n in range(200)))
    return path


def test_the_same_seed_gives_the_same_prompts_and_another_seed_others():
    first, again, other = (build_source(gym_task(), seed) for seed in (1, 1, 2))
    texts = [[source.sample(i).text for i in range(50)] for source in (first, again, other)]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_no_held_out_question_is_ever_trained_on_though_all_two_digit_sums_are_seen():
    task = gym_task()
    held = {prompt.metadata["question"] for seed in (0, 1) for prompt in held_out(task, seed)}
    trained = {
        build_source(task, seed).sample(i).metadata["question"] for seed in (0, 1) for i in range(2000)
    }
    assert len(trained) > 150 and len(held) >= 10
    assert not trained & held
    assert all(is_held_out(question) for question in held)


def test_held_out_prompts_differ_from_each_other_and_stop_at_the_limit():
    questions = [
        prompt.metadata["question"] for prompt in held_out(gym_task(size=100_000), 0, num_prompts=12)
    ]
    assert len(questions) == len(set(questions)) == 12


def test_an_index_outside_the_source_is_refused():
    source = build_source(gym_task(size=10), 0)
    assert len(source) == 10
    source.sample(9)
    with pytest.raises(IndexError, match="index 10 of a source of 10"):
        source.sample(10)


def test_a_prompt_carries_the_answer_and_the_entry_its_scorer_needs():
    prompt = build_source(gym_task(), 0).sample(3)
    assert prompt.metadata["entry"]["answer"] == prompt.metadata["answer"]
    assert prompt.metadata["question"] == prompt.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dataset": "chain_sun"}, "no dataset 'chain_sun'"),
        ({"params": {"min_terms": 0}}, "min_terms"),
        ({"params": {"terms": 3}}, "terms"),
    ],
)
def test_an_unknown_dataset_or_parameter_is_a_config_error(change: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=message):
        build_source(gym_task(**change), 0)


def refusal(ask: Callable[[], object]) -> str:
    try:
        ask()
    except ConfigError as error:
        return str(error)
    return ""


def test_a_source_of_one_problem_is_refused_by_the_side_that_gets_none():
    task = gym_task(size=1)
    training = [refusal(lambda s=seed: build_source(task, s).sample(0)) for seed in range(60)]
    evaluation = [refusal(lambda s=seed: held_out(task, s)) for seed in range(60)]
    assert 0 < sum("too few different ones" in text for text in training) < 30
    assert 30 < sum("no held-out problem" in text for text in evaluation) < 60


def test_jsonl_lines_are_split_once_and_for_all_between_training_and_evaluation(jsonl: Path):
    task = jsonl_task(jsonl, prompt_template="Q: {question} {json}")
    source = build_source(task, 0)
    trained = [source.sample(i) for i in range(len(source))]
    held = held_out(task, 7)
    assert len(trained) + len(held) == 200
    assert not {p.text for p in trained} & {p.text for p in held}
    assert trained[0].text.startswith("Q: What is ") and trained[0].text.endswith("? {json}")
    assert trained[0].metadata["answer"] in trained[0].metadata["question"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "0 prompts"),
        ("\n\n", "0 prompts"),
        ('{"prompt": "a"}\n', "line 1 must be like"),
        ('{"prompt": "a", "answer": 1}\n[1]\n', "line 2 must be like"),
        ("no json\n", "line 1 must be like"),
    ],
)
def test_an_empty_or_malformed_jsonl_file_is_a_config_error(tmp_path: Path, content: str, message: str):
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        build_source(jsonl_task(path), 0)


def test_a_missing_jsonl_file_is_a_config_error(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot read"):
        build_source(jsonl_task(tmp_path / "absent.jsonl"), 0)


def test_a_changed_jsonl_file_is_read_again(jsonl: Path):
    task = jsonl_task(jsonl)
    before = len(build_source(task, 0)) + len(held_out(task, 0))
    jsonl.write_text(jsonl.read_text() + '{"prompt": "one more", "answer": 1}\n')
    assert len(build_source(task, 0)) + len(held_out(task, 0)) == before + 1


def test_render_uses_plain_text_or_the_chat_template(tmp_path: Path, jsonl: Path):
    vocabulary = {"<eos>": 0, "<user>": 1, "What": 2, "<unk>": 3}
    _write_tokenizer(tmp_path, vocabulary, "{% for m in messages %}<user>{{ m.content }}{% endfor %}")
    tokenizer = Tokenizer.load(tmp_path)
    prompt = build_source(jsonl_task(jsonl), 0).sample(0)
    plain = render(prompt, tokenizer, jsonl_task(jsonl))
    chat = render(prompt, tokenizer, jsonl_task(jsonl, chat=True))
    assert plain[0] == 2
    assert chat[:2].tolist() == [1, 2]
    assert chat.tolist()[1:] == plain.tolist()


def _write_tokenizer(folder: Path, vocabulary: dict[str, int], template: str) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers

    backend = Backend(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<user>", "<eos>"])
    backend.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<eos>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
