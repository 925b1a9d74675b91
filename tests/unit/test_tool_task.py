"""Tasks with tools and with agents, from the configuration to the prompt; what plan refuses."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from raypost.config import Config, load_config
from raypost.data.prompt import Prompt, text_for_engine
from raypost.data.tokenizer import Tokenizer
from raypost.errors import ConfigError
from raypost.plan import loops
from raypost.plan.loops import loop_problems
from tests.unit.chat_templates import TEMPLATES
from tests.unit.tokenizers import write_tokenizer

YAML = """
model: {{name: tiny}}
tasks:
  - source: {{kind: reasoning_gym, dataset: chain_sum}}
    chat_template: template.jinja
    agent_loop: {agent_loop}
{more}
train: {{num_steps: 4, batch_size: 8}}
"""
TOOLS = '''
def look(x: str) -> str:
    """Looks something up."""
    return x
def untold(x: str): ...
async def agent(session, words=""): ...
def other(x: str) -> str:
    """Does something else."""
    return x
other.__name__ = "look"
'''
LOOK = "{kind: tools, tools: ['mine.py:look']}"


def configured(
    folder: Path, agent_loop: str = LOOK, template: str = "chatml with tools", more: str = ""
) -> Config:
    folder.mkdir(exist_ok=True)
    (folder / "mine.py").write_text(textwrap.dedent(TOOLS))
    (folder / "template.jinja").write_text(TEMPLATES[template])
    (folder / "config.yaml").write_text(YAML.format(agent_loop=agent_loop, more=more))
    return load_config(folder / "config.yaml")


def problems(folder: Path, agent_loop: str, template: str = "chatml with tools", more: str = "") -> list[str]:
    config = configured(folder, agent_loop, template, more)
    tokenizer = Tokenizer.load(write_tokenizer(folder / "model"))
    return list(loop_problems(config.tasks[0], config, tokenizer))


def test_the_policy_reads_in_its_prompt_what_tools_there_are(tmp_path: Path) -> None:
    task = configured(tmp_path).tasks[0]
    (tmp_path / "mine.py").unlink()  # the configuration holds its text
    text = text_for_engine(Prompt("3 + 4 ="), Tokenizer.load(write_tokenizer(tmp_path / "model")), task)
    assert task.chat and "Looks something up." in text and text.endswith("assistant\n")


@pytest.mark.parametrize("template", ["chatml with tools", "results together", "strips thinking"])
def test_what_can_call_is_accepted(template: str, tmp_path: Path) -> None:
    assert problems(tmp_path, LOOK, template) == []
    assert problems(tmp_path, "{kind: session, agent: 'mine.py:agent', params: {words: x}}", template) == []
    assert problems(tmp_path, "{kind: session, command: [python3, agent.py]}", template) == []


def test_tools_of_a_file_stand_beside_those_of_the_sandbox_which_must_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = "{kind: tools, tools: ['mine.py:look', 'raypost.sandbox.tools:python']}"
    monkeypatch.setattr(loops, "why_not", lambda limits: None)
    assert problems(tmp_path, both) == []
    monkeypatch.setattr(loops, "why_not", lambda limits: "there is no bubblewrap")
    (problem,) = problems(tmp_path, both)
    assert problem == "task 'default': agent_loop.tools: there is no bubblewrap"


@pytest.mark.parametrize(
    ("agent_loop", "template", "more", "why"),
    [
        (LOOK, "default system", "", "leaves out what tools there are"),
        (LOOK, "counts messages", "", "leaves out what tools there are"),
        ("{kind: tools, tools: ['mine.py:gone']}", "chatml with tools", "", "mine.py has no 'gone'"),
        ("{kind: tools, tools: ['mine.py:untold']}", "chatml with tools", "", "no docstring"),
        ("{kind: tools, tools: [{mcp: [no-such-one]}]}", "chatml with tools", "", "no program 'no-such-one'"),
        (
            "{kind: tools, tools: ['mine.py:look', 'mine.py:other']}",
            "chatml with tools",
            "",
            "second tool called 'look'",
        ),
        (
            "{kind: tools, tools: ['mine.py:look'], session_timeout_s: 100}",
            "chatml with tools",
            "rollout: {request_timeout_s: 40}",
            "session_timeout_s is 100, but a group is given up after 80 s",
        ),
        (
            "{kind: tools, tools: ['mine.py:look'], step_timeout_s: 100}",
            "chatml with tools",
            "rollout: {request_timeout_s: 40}",
            "step_timeout_s is 100, but a group is given up after 80 s",
        ),
    ],
)
def test_what_cannot_work_is_refused_by_the_plan(
    agent_loop: str, template: str, more: str, why: str, tmp_path: Path
) -> None:
    (problem,) = problems(tmp_path, agent_loop, template, more)
    assert why in problem and problem.startswith("task 'default': agent_loop."), problem


@pytest.mark.parametrize(
    ("agent_loop", "why"),
    [
        ("{kind: session, agent: 'mine.py:gone'}", "mine.py has no 'gone'"),
        ("{kind: session, agent: 'mine.py:agent', params: {word: x}}", "cannot be called with a session"),
        ("{kind: session, command: [no-such-program]}", "no program 'no-such-program'"),
        (
            "{kind: session, agent: 'mine.py:agent', session_timeout_s: 5000}",
            "session_timeout_s is 5000, but a group is given up after 1200 s",
        ),
    ],
)
def test_an_agent_that_cannot_begin_is_refused_by_the_plan(agent_loop: str, why: str, tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, agent_loop)
    assert why in problem and problem.startswith("task 'default': agent_loop"), problem


def test_the_reward_of_a_session_is_not_multiplied_by_its_branches(tmp_path: Path) -> None:
    config = configured(tmp_path, "{kind: session, agent: 'mine.py:agent'}")
    summed = config.train.advantage.model_copy(update={"session_reward": "sum"})
    train = config.train.model_copy(update={"advantage": summed})
    config = config.model_copy(update={"train": train})
    (problem,) = loop_problems(config.tasks[0], config, None)
    assert "session_reward is sum" in problem and "use last" in problem


def test_the_template_of_the_documentation_can_call(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()
    template = page.partition("```jinja\n")[2].partition("```")[0]
    config = configured(tmp_path)
    task = config.tasks[0].model_copy(update={"chat_template_source": template})
    assert list(loop_problems(task, config, Tokenizer.load(write_tokenizer(tmp_path / "model")))) == []


def test_a_template_after_which_no_result_can_stand_is_refused(tmp_path: Path) -> None:
    (tmp_path / "template.jinja").touch()
    config = configured(tmp_path)
    template = TEMPLATES["chatml with tools"] + "{{- messages | length }}"
    task = config.tasks[0].model_copy(update={"chat_template_source": template.replace("<|im_end|>", "|")})
    (problem,) = loop_problems(task, config, Tokenizer.load(write_tokenizer(tmp_path / "model")))
    assert "no ids that may follow a call" in problem


@pytest.mark.parametrize(
    ("agent_loop", "why"),
    [
        ("{kind: tools}", "kind 'tools' needs `tools`"),
        ("{kind: session}", "needs either `agent`, a function, or `command`, a program"),
        ("{kind: session, agent: 'a:b', command: [x]}", "needs either `agent`"),
        ("{command: [x]}", "command ('x',) is not used by kind 'single_turn': use 'session'"),
        ("{tools: ['mine.py:look']}", "is not used by kind 'single_turn': use 'tools'"),
        ("{kind: tools, tools: ['mine.py:look', 'other.py:look']}", "in several files"),
        (
            "{kind: tools, tools: ['mine.py:look'], session_timeout_s: 60}",
            "step_timeout_s 60 is not below session_timeout_s 60",
        ),
        ("{kind: tools, tools: ['mine.py:look']}\n    tools: [{}]", "tools has schemas, but"),
        ("{kind: tools, tools: ['mine.py:look']}\n    chat: false", "but chat is false"),
    ],
)
def test_what_contradicts_itself_is_refused(agent_loop: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="problem") as refused:
        configured(tmp_path, agent_loop)
    assert why in str(refused.value)
