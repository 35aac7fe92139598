"""A team that calls tools is trained: through configuration, trainer, record and metrics."""

import json
import sys

import pytest
import yaml
from typer.testing import CliRunner
from user_tools import (
    AGENT,
    worldly,  # noqa: F401  # fixtures
    written,
)

from maporl import Agent, Arithmetic, Debate, MultiAgentPPOConfig, MultiAgentPPOTrainer, Team, check
from maporl.cli.main import app
from maporl.config.schema import AdvantageConfig, TinySection
from maporl.engines import text as engine
from maporl.environments import calls
from maporl.errors import ConfigError
from maporl.report.metric_panels import METRICS
from maporl.runs.build import build_trainer
from maporl.runs.play import Game
from maporl.tiny import build_tiny_model, build_tiny_tokenizer
from maporl.types import Stop, from_record
from maporl.validation.load import load
from maporl.validation.preflight import check_run


def calls_of(monkeypatch, words):
    """Let every completion be read as ``words``, so that untrained models call."""
    kept = calls.JsonFormat.read
    monkeypatch.setattr(calls.JsonFormat, "read", lambda self, text, prompt, response: kept(self, words(self), [], []))


def _ends_by_itself(monkeypatch):
    """Untrained models hardly ever end a completion. Let every completion count as ended."""
    kept = engine.reply_of

    def whole(*parts):
        reply = kept(*parts)
        reply.stop = Stop.EOS
        return reply

    monkeypatch.setattr(engine, "reply_of", whole)


def test_an_environment_that_nobody_uses_is_named(tmp_path):
    idle = {"counter": {"use": "worldly:Counter", "agents": ["bob"]}, "spare": {"use": "worldly:Counter", "agents": []}}
    lines = check_run(load(written(tmp_path, environments=idle)))
    assert [line for line in lines if line.startswith("warning: environments")] == [
        "warning: environments.spare: no agent acts in it or hears of it, because its agents are []; list some, or "
        "remove it"
    ]


def test_agents_that_call_nothing_are_named_once(tmp_path, monkeypatch, caplog):
    build_trainer(load(written(tmp_path, updates=4)), quiet=True).train()
    said = [r.getMessage() for r in caplog.records if "was never called" in r.getMessage()]
    assert said and all(line.count("; teach the model to call it (warm_start.calls") == 1 for line in said)
    caplog.clear()
    names = {True: "up", False: "fail"}
    calls_of(monkeypatch, lambda form: f'<call>{{"name": "{names["up" in form.tools]}"}}</call>')
    _ends_by_itself(monkeypatch)
    other = tmp_path / "other"
    other.mkdir()
    trainer = build_trainer(load(written(other, updates=1)), quiet=True)
    trainer.train()
    assert all(tool.calls for name, tool in trainer.audit.numbers("tool").items() if name in ("up", "fail"))


def test_calls_of_other_agents_are_counted(tmp_path, monkeypatch, caplog):
    """An orchestrator's tools are the other agents. The run has neither tools nor environments of its own."""
    calls_of(monkeypatch, lambda form: '<call>{"name": "ask_bob", "arguments": {"question": "1+2="}}</call>')
    _ends_by_itself(monkeypatch)
    changes = {"agents": {"ann": AGENT, "bob": AGENT}, "tools": {}, "environments": {}, "updates": 1}
    changes |= {
        "dialogues_logged": 99,
        "protocol": {"name": "call_return", "call": "tool", "planner": "ann", "plan": "{question}"},
    }
    build_trainer(load(written(tmp_path, reward={"sources": {"label": 1.0}}, **changes)), quiet=True).train()
    assert not [r for r in caplog.records if "was never called" in r.getMessage()]
    first = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])
    played = [json.loads(line) for line in (tmp_path / "run/dialogues.jsonl").read_text().splitlines()]
    assert first["calls/ann"] == sum(len(u["calls"]) for d in played for u in d["utterances"]) > 0


def test_a_class_written_for_trl_and_three_functions(tmp_path, monkeypatch):
    """Five lines of YAML give two policies tools and an environment: two under agents, and these three."""
    agents = {name: {**AGENT, "tools": ["double", "add", "fail"]} for name in ("ann", "bob")}
    rewards = {"sources": {"label": 1.0, "shop": 0.5}}
    config = load(written(tmp_path, agents=agents, environments={"shop": {"use": "worldly:Shop"}}, reward=rewards))
    calls_of(monkeypatch, lambda form: '<call>{"name": "buy", "arguments": {"count": 3}}</call>')
    _ends_by_itself(monkeypatch)
    trainer = build_trainer(config, quiet=True)
    trainer.train()
    records = [json.loads(line) for line in (tmp_path / "run/dialogues.jsonl").read_text().splitlines()]
    dialogue = from_record(records[0])
    # both act in one shop, at the same time: 8 calls each, ann first
    assert [u.calls[0].result.text for u in dialogue.utterances[:4]] == ["3 sold", "6 sold", "9 sold", "12 sold"]
    last = {u.agent: u.rewards["shop"] for u in dialogue.utterances if u.answers}
    assert last == {"ann": 4.8, "bob": 4.8}
    assert dialogue.utterances[0].messages[-1]["content"].endswith(" sale")
    names = {name for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines() for name in json.loads(line)}
    assert "tools/buy/calls" in names and "turns/end/limit" in names
    assert [name for name in names if not any(metric.pattern.fullmatch(name) for metric in METRICS)] == []


@pytest.mark.parametrize(("changes", "message"), [
    ({"tools": {"add": {"use": "worldly:ad"}}}, r"tools\.add\.use: worldly:ad: unknown 'ad'; did you mean 'add'"),
    ({"agents": {"ann": {"tiny": {}, "tools": ["ad"]}, "bob": {"tiny": {}}}},
     r"agents\.ann\.tools: unknown 'ad'; did you mean 'add'\? known: add, counter, double, fail; add it"),
    ({"tools": {"add": {"use": "wordly:add"}}}, r"tools\.add\.use: .*wordly"),
    ({"tools": {"add": {"use": "worldly:Counter"}}},
     r"tools\.add: expected a typed function, a maporl\.Tool or a maporl\.Toolbox, got a value of type Counter"),
    ({"environments": {"counter": {"use": "worldly:__name__", "agents": ["bob"]}}},
     r"environments\.counter\.use: expected a class or a function that makes an environment, got a value of type str"),
    ({"branching": {"how": "fork_every", "group": 2, "joint": "cross"}},
     r"branching\.joint: cross combines answers that were given in different worlds; use joint: aligned"),
    ({"environments": {"counter": {"use": "worldly:Counter", "agents": ["bob", "cy"]}}},
     r"environments\.counter\.agents: agent 'cy' does not play"),
    ({"environments": {"counter": {"use": "worldly:add", "agents": ["bob"]}}}, r"environment 'counter' cannot be made"),
    ({"environments": {"counter": {"use": "worldly:Counter", "agents": ["ann"]}}},
     r"agents\.bob\.tools: environment 'counter' is for \['ann'\]; add 'bob'"),
    ({"branching": {"how": "tree", "group": 2}, "reward": {"sources": {"label": 1.0}, "rules": ["own"]}},
     "tree compares what agents say at once"),
    ({"ppo": {"response_length": 8, "aggregation": "sequence_sum"}}, r"ppo\.aggregation: sequence_sum looks at each"),
    ({"ppo": {"response_length": 8, "ratio": "sequence"}}, r"ppo\.ratio: sequence looks at each completion"),
    ({"branching": {"how": "fork_every", "group": 2}, "environments": {"counter": {"use": "worldly:Counter", "agents": ["bob"], "forks": "no"}}}, "environment 'counter' can be neither copied nor replayed"),
])  # fmt: skip
def test_what_is_refused_before_models_load(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        check_run(load(written(tmp_path, **changes)))


def test_supervised_training_on_solutions_is_refused(tmp_path):
    result = CliRunner().invoke(app, ["sft", str(written(tmp_path)), "--output", str(tmp_path / "sft")])
    assert result.exit_code == 2 and "call no tools" in result.output


def test_a_person_types_calls(tmp_path):
    seen, typed = [], iter(["/double 4", '/add {"a": 1, "b": 2}', "/sell", "3"])
    game = Game(load(written(tmp_path)), "ann", None, tmp_path / "played", seen.append, lambda prompt: next(typed))
    (dialogue,) = game.play(1)
    anns = [u for u in dialogue.utterances if u.agent == "ann"]
    assert [c.result.text for u in anns for c in u.calls] == ["8", "3", "unknown 'sell'; known: add, double, fail"]
    assert anns[-1].text == "3" and anns[-1].answers
    assert any("/NAME" in line for line in seen) and "=8;" in seen


class TestInPython:
    """The same team, made in Python with functions and a class."""

    def trainer(self, tmp_path, **given):
        section = TinySection(**AGENT["tiny"])
        tokenizer = build_tiny_tokenizer(section)
        team = Team([Agent(name, build_tiny_model(section, tokenizer), tokenizer) for name in ("ann", "bob")])
        args = MultiAgentPPOConfig(
            str(tmp_path / "run"), per_device_train_batch_size=2, total_episodes=2, response_length=8, use_cpu=True
        )
        return MultiAgentPPOTrainer(args, team, Arithmetic(largest=9), Debate(turns=1), **given)

    def test_functions_of_a_module_are_written_into_the_configuration(self, tmp_path, monkeypatch):
        load(written(tmp_path))  # imports the module
        worldly = sys.modules["worldly"]
        calls_of(monkeypatch, lambda form: '<call>{"name": "double", "arguments": {"n": 4}}</call>')
        _ends_by_itself(monkeypatch)
        given = {"ann": [worldly.double, "counter"], "bob": [worldly.double]}
        self.trainer(tmp_path, tools=given, environments={"counter": worldly.Counter}).train()
        config = load(tmp_path / "run/config.yaml")
        assert config.tools["double"].use == "worldly:double"
        assert config.environments["counter"].use == "worldly:Counter"
        assert (config.agents["ann"].tools, config.agents["bob"].tools) == (["double", "counter"], ["double"])
        assert config.only_in_python == {}

    def test_check_opens_environments_to_find_groups_of_one(self, tmp_path):
        """Making a trainer opens no environment, which may be anywhere; without a check the first update tells it."""
        load(written(tmp_path))
        counter = sys.modules["worldly"].Counter
        alone = AdvantageConfig(returns="utterance", baseline="mean", key=("prompt", "agent", "turn"), scale="none")
        made = self.trainer(tmp_path, tools={"ann": ["counter"]}, environments={"counter": counter}, advantage=alone)
        with pytest.raises(ConfigError, match=r"^advantage: .* has a single member"):
            check(made)

    def test_a_lambda_stays_in_python(self, tmp_path):
        def local(n: int) -> int:
            """Return it.

            Args:
                n: a number
            """
            return n

        self.trainer(tmp_path, tools={"ann": [local]}).train()
        config = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
        assert list(config["only_in_python"]) == ["tools.local"]
