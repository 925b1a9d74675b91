import json
import os
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raypost.config import ModelConfig
from raypost.data.chat_template import render_template
from raypost.data.prompt import is_held_out
from raypost.data.tokenizer import Tokenizer
from raypost.errors import ConfigError
from raypost.models import calls, programs, smollm2, tiny
from raypost.models import resolve as models
from raypost.models.resolve import check_model, resolve_model
from tests.unit.model_folders import write_model

SMALL = {
    "hidden_size": 32,
    "num_heads": 1,
    "num_layers": 1,
    "intermediate_size": 32,
    "steps": 2,
    "batch_size": 4,
}


def entry(expression: str, answer: int) -> dict[str, Any]:
    return {"answer": str(answer), "metadata": {"expression": expression}}


def test_a_worked_answer_makes_the_sum_one_number_shorter_a_line() -> None:
    assert tiny.worked(entry("4 + 3 - 9 + 5", 3)) == "\n7 - 9 + 5 =\n-2 + 5 =\n3"
    assert tiny.blurted(entry("4 - 9", -5)) == " -5"


def test_every_worked_answer_ends_in_the_right_answer() -> None:
    for problem in islice(tiny.problems(tiny.TinyRecipe(), seed=3), 300):
        assert tiny.worked(problem).split("\n")[-1] == problem["answer"]


def test_prompts_that_are_called_readable_are_made_of_its_words() -> None:
    tokenizer = tiny.build_tokenizer(tiny.TinyRecipe())
    prompts = [e["question"] for e in islice(tiny.problems(tiny.TinyRecipe(terms=6), seed=3), 100)]
    prompts.append(prompts[0].replace(" =", " + 12 - 345 ="))
    for prompt in prompts:
        assert tiny.CORPORA["sums"].readable.fullmatch(prompt)
        assert tokenizer.unk_token_id not in tokenizer(prompt)["input_ids"]
    assert not any(
        tiny.CORPORA["sums"].readable.fullmatch(text)
        for text in ("2 + 2 =", prompts[0] + " ", prompts[0] + "?")
    )


def test_no_warm_up_problem_is_held_out() -> None:
    assert not any(is_held_out(e["question"]) for e in islice(tiny.problems(tiny.TinyRecipe(), seed=0), 2000))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hiden_size": 64}, "no 'hiden_size'"),
        ({"steps": "many"}, "steps must be a non-negative int, got 'many'"),
        ({"steps": 1.5}, "steps must be a non-negative int"),
        ({"num_layers": 0}, "num_layers must be at least 1"),
        ({"terms": 1}, "terms must be at least 2"),
        ({"blurt_share": 1.5}, "blurt_share must be at most 1"),
        ({"hidden_size": 100}, "must be 32, 64 or 128"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_model(ModelConfig(name="tiny", options=options))


def test_options_of_another_model_are_refused() -> None:
    with pytest.raises(ConfigError, match="belong to the model 'tiny'"):
        check_model(ModelConfig(name="some/model", options={"steps": 1}))


def test_a_folder_that_does_not_exist_is_refused_and_a_hub_id_is_not(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        check_model(ModelConfig(name=str(tmp_path / "absent")))
    check_model(ModelConfig(name="owner/model"))


def test_a_folder_without_configuration_or_without_an_end_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        check_model(ModelConfig(name=str(tmp_path)))
    write_model(tmp_path)
    check_model(ModelConfig(name=str(tmp_path)))
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del settings["eos_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="no end-of-sequence token"):
        check_model(ModelConfig(name=str(tmp_path)))


def test_the_model_is_made_once_a_seed_and_its_tokenizer_restores_every_answer(tmp_path: Path) -> None:
    model = ModelConfig(name="tiny", options=SMALL)
    folder = Path(resolve_model(model, 0, tmp_path))
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve_model(model, 0, tmp_path) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert resolve_model(model, 1, tmp_path) != folder
    assert all(not path.name.startswith(".") for path in tmp_path.iterdir())

    tokenizer = Tokenizer.load(folder)
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == tokenizer.vocab_size
    for problem in islice(tiny.problems(tiny.TinyRecipe(), seed=5), 200):
        for text in (problem["question"], tiny.worked(problem), tiny.blurted(problem)):
            ids = tokenizer.encode(text)
            assert tokenizer.decode(ids) == text and 2 not in ids
    assert len(tokenizer.encode(problem["question"])) == 9


def test_the_same_seed_makes_the_same_weights(tmp_path: Path) -> None:
    model = ModelConfig(name="tiny", options=SMALL)
    files = [Path(resolve_model(model, 4, tmp_path / name)) / "model.safetensors" for name in ("a", "b")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_maker_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        models.cached(tmp_path / "model", fail)
    assert list(tmp_path.iterdir()) == []


def test_a_second_maker_of_the_same_model_keeps_the_first_ones(tmp_path: Path) -> None:
    target = tmp_path / "model"

    def make(folder: Path) -> None:
        target.mkdir()
        (target / "first").write_text("x")
        (folder / "second").write_text("x")

    assert models.cached(target, make) == target
    assert os.listdir(target) == ["first"] and os.listdir(tmp_path) == ["model"]


def test_smollm2_without_its_package_names_the_extra_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "no-such-package-here")
    with pytest.raises(ConfigError, match="extra 'smollm2'"):
        check_model(ModelConfig(name="smollm2-135m", cache_dir=tmp_path))


# ---------------------------------------------------------------- programs


def value(program: str, n: int, k: int) -> int:
    space: dict[str, Any] = {}
    exec(program, space)
    found: int = space["f"](n, k)
    return found


def test_a_careful_program_is_right_and_a_hasty_one_a_third_of_the_time() -> None:
    arguments, hasty = [(2, 3), (7, 1), (0, 5), (9, 9)], 0
    for program in islice(programs.programs(terms=5, seed=1), 300):
        wanted = [program.value(n, k) for n, k in arguments]
        assert [value(program.careful, n, k) for n, k in arguments] == wanted
        hasty += [value(program.hasty, n, k) for n, k in arguments] == wanted
    assert 0.2 < hasty / 300 < 0.45


def test_the_right_answer_of_a_row_passes_its_tests() -> None:
    rows = programs.problems(size=100)
    assert rows == programs.problems(size=100) != programs.problems(size=100, seed=1)
    for row in rows:
        space: dict[str, Any] = {}
        exec("\n".join([row["answer"], *row["tests"]]), space)
        assert len(row["tests"]) == programs.NUM_TESTS


def test_programs_are_read_and_written_in_words_of_the_model_and_none_is_held_out() -> None:
    recipe = tiny.TinyRecipe.from_options({"corpus": "programs", "terms": 5})
    tokenizer, readable = tiny.build_tokenizer(recipe), tiny.CORPORA["programs"].readable
    for texts in islice(tiny.CORPORA["programs"].examples(recipe, 3), 300):
        assert readable.fullmatch(texts[0]) and not is_held_out(texts[0])
        for text in texts:
            ids = tokenizer(text)["input_ids"]
            assert tokenizer.decode(ids) == text and tokenizer.unk_token_id not in ids and len(ids) <= 16
    assert not readable.fullmatch("Write f(n, k): start with n, divide by 2.")
    with pytest.raises(ConfigError, match="corpus is 'poems': use sums or programs"):
        tiny.TinyRecipe.from_options({"corpus": "poems"})


@pytest.mark.parametrize("corpus", tiny.CORPORA)
def test_a_plan_has_the_tokenizer_of_a_model_that_is_not_made_yet(corpus: str, tmp_path: Path) -> None:
    recipe = tiny.TinyRecipe.from_options({"corpus": corpus})
    (tmp_path / "saved").mkdir()
    tiny.build_tokenizer(recipe).save_pretrained(tmp_path / "saved")
    (tmp_path / "written").mkdir()
    tiny.write_tokenizer(recipe, tmp_path / "written")
    saved, written = (Tokenizer.load(tmp_path / name) for name in ("saved", "written"))
    assert (saved.eos_ids, saved.pad_id, saved.vocab_size) == (
        written.eos_ids,
        written.pad_id,
        written.vocab_size,
    )
    for texts in islice(tiny.CORPORA[corpus].examples(recipe, 3), 50):
        for text in texts:
            assert np.array_equal(saved.encode(text), written.encode(text))


def test_conversations_with_a_calculator_are_what_the_recipes_template_renders() -> None:
    root = Path(__file__).resolve().parents[2] / "jobs" / "recipes"
    template = (root / "tools.jinja").read_text()
    recipe = tiny.TinyRecipe(corpus="calls")
    tokenizer = tiny.build_tokenizer(recipe)
    tool = {"function": {"name": "calculate"}}
    for prompt, hasty, asked in islice(tiny.CORPORA["calls"].examples(recipe, 3), 50):
        call, result, answer = asked.split(calls.EOS)
        arguments = json.loads(call.removeprefix("<tool_call>").removesuffix("</tool_call>"))["arguments"]
        question = prompt.split("<user>")[1].split(calls.EOS)[0]
        messages: list[Any] = [{"role": "user", "content": question}]
        assert (
            render_template(template, "x", {"tools": [tool], "add_generation_prompt": True}, messages)
            == prompt
        )
        made = {"function": {"name": "calculate", "arguments": arguments}}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [made]},
            {"role": "tool", "content": result.removeprefix("<tool>")},
            {"role": "assistant", "content": answer.removeprefix("<assistant>")},
        ]
        whole = render_template(template, "x", {"tools": [tool]}, messages)
        assert whole == prompt + asked + calls.EOS
        assert tokenizer.unk_token_id not in tokenizer(whole)["input_ids"]
        assert hasty == answer.removeprefix("<assistant>")
