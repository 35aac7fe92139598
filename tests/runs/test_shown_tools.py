"""``maporl tools``: what an agent may call, its first prompt and an example call, with the mask and the tokens."""

import pytest
from chat_models import characters, trl_template
from transformers import Qwen3Config
from typer.testing import CliRunner
from user_tools import AGENT, FOLDERS, worldly, written  # noqa: F401

from maporl.cli.main import app
from maporl.errors import ConfigError
from maporl.runs.shown_tools import shown_tools
from maporl.tasks import build_task
from maporl.validation.load import load
from trl_ext.chat.encoding import FALLBACK_TEMPLATE

LONGER = len("What is 2+3+4?")
"""The characters of the question of the worked transcripts, of which each is a token."""


def model(folder, template):
    """Save a tokenizer of characters and a model's configuration."""
    tokenizer = characters(template)
    tokenizer.save_pretrained(folder)
    Qwen3Config(vocab_size=len(tokenizer), hidden_size=16, max_position_embeddings=4096).save_pretrained(folder)
    return {"model": str(folder), "tools": ["add"]}


def shown(tmp_path, template, **changes):
    agents = {"ann": model(tmp_path / "model", template) | changes, "bob": {**AGENT, "tools": ["double"]}}
    only = {"environments": {}, "reward": {"sources": {"label": 1.0}}}
    config = load(written(tmp_path, agents=agents, **only))
    question = build_task(config.task, "train", config.seed)[0].question
    return shown_tools(config, "ann"), len(question) - LONGER


def test_the_native_format_has_the_tokens_of_the_worked_transcript(tmp_path):
    lines, more = shown(tmp_path, trl_template("qwen3"))
    assert max(map(len, lines)) <= 78
    assert lines[:2] == [
        "tools: ann may call add (native, 680 tokens of its first prompt)",
        "  add(a: integer, b: integer): Add two numbers.",
    ]
    titles = [line for line in lines[2:] if not line.startswith("  ")]
    # the suffix of a result of one character has 54 tokens, and RESULT has six characters
    assert titles == [
        f"first prompt ({713 + more} tokens):",
        "an example call:",
        "what follows it, where RESULT is what the tool returns (59 tokens):",
    ]
    assert "  own     | (a call of add, as the model has learned to write it)" in lines
    assert lines[lines.index(titles[2]) :][1:6] == [
        "  context | ",
        "  context | <|im_start|>user",
        "  context | <tool_response>",
        "  context | RESULT",
        "  context | </tool_response><|im_end|>",
    ]


def test_a_plain_format_shows_the_call_itself(tmp_path):
    lines, more = shown(tmp_path, FALLBACK_TEMPLATE)
    assert lines[0].startswith("tools: ann may call add (json, ")
    titles = [line for line in lines[2:] if not line.startswith("  ")]
    assert titles == [
        f"first prompt ({291 + more} tokens):",
        "an example call (59 tokens):",
        "what follows it, where RESULT is what the tool returns (41 tokens):",
    ]
    assert '  own     | <call>{"name": "add", "arguments": {"a": 1, "b": 1}}</call>' in lines
    assert "  context | User: add returned: RESULT" in lines


def test_the_command_and_what_it_refuses(tmp_path):
    path = str(written(tmp_path))
    done = CliRunner().invoke(app, ["tools", path, "--agent", "bob"])
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[:2] == [
        "tools: bob may call up (json, 0 tokens of its first prompt)",
        "  up(): Count up.",
    ]
    assert "+" in done.output and "context | " in done.output
    refused = CliRunner().invoke(app, ["tools", path, "--agent", "bib"])
    assert refused.exit_code == 2 and "--agent: " in refused.output and "bob" in refused.output
    agents = {"ann": {**AGENT, "tools": ["double"]}, "bob": AGENT}
    silent = load(written(tmp_path, agents=agents, environments={}, reward={"sources": {"label": 1.0}}))
    with pytest.raises(ConfigError, match=r"--agent: bob may call nothing; set agents\.bob\.tools"):
        shown_tools(silent, "bob")


def test_a_person_is_shown_how_to_type_a_call(tmp_path):
    agents = {"ann": {"engine": "human", "tools": ["double"]}, "bob": {**AGENT, "tools": ["double"]}}
    config = load(written(tmp_path, agents=agents, environments={}, reward={"sources": {"label": 1.0}}))
    lines = shown_tools(config, "ann")
    assert lines[0] == "tools: ann may call double (typed)"
    assert '  own     | /double {"n": 1}' in lines and "  context | double returned: RESULT" in lines
