"""What newcomers met in their first hour: mistakes that were found late, not at all, or were told in words that did not
help."""

import json
import os
import re
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from asked_programs import ask, post, user
from folders import ROOT
from tiny_models import build_any
from typer.testing import CliRunner

from maporl.advantages.estimator import GroupOfOne
from maporl.advantages.transforms import TRANSFORMS, Transform
from maporl.cli.main import app
from maporl.config.parse import parse_config, read_values, to_yaml
from maporl.config.recipes import recipe_files
from maporl.config.safe_yaml import dump_yaml, parse_yaml
from maporl.config.schema import TinySection
from maporl.environments.build import TeamTools
from maporl.errors import ConfigError, install_command, refuse
from maporl.methods.tiny_versions import tiny_version
from maporl.protocols import PROTOCOLS, Protocol, program
from maporl.protocols.base import must_be_protocol
from maporl.rewards.rules import RULES, Rule
from maporl.run import ResolvedRun
from maporl.runs.train import train
from maporl.team import memory, model_checks
from maporl.team.team import Team
from maporl.tiny import build_tiny_tokenizer
from maporl.training.lonely import lonely_groups
from maporl.types import Ask
from maporl.validation import preflight
from maporl.validation.load import from_dict, load
from maporl.validation.preflight import check_run
from maporl.validation.rehearsal import Rehearsal, findings

TINY = {"alphabet": "0123456789+=;", "hidden_size": 32, "layers": 1, "heads": 2}
BASE = {
    "output_dir": "runs/first_hour",
    "task": {"name": "toy_sum", "largest": 9},
    "agents": {"ann": {"tiny": TINY}, "bob": {"tiny": TINY}},
    "protocol": {"name": "debate", "later": "{others};{question}", "quote": "{text}", "separator": ";"},
    "ppo": {"response_length": 4, "kl_in": "loss", "kl_estimator": "k3"},
    "training": {"per_device_train_batch_size": 8, "use_cpu": True},
    "evaluation": {"questions": 0},
}
MEAN = {"returns": "utterance", "baseline": "mean"}


def written(folder, changes=None):
    file = folder / "mine.yaml"
    file.write_text(yaml.safe_dump({**BASE, "output_dir": str(folder / "run"), **(changes or {})}))
    return file


# -- what a bare word in YAML and in an override means -----------------------------------------------------------------

WORDS = {
    "0123": "0123", "-012": "-012", "00": "00", "0": 0, "7": 7, "+7": 7, "1_000": 1000, "0x1F": 31, "0b11": "0b11",
    "1e5": 1e5, "1e-5": 1e-5, "2E+3": 2e3, "1.e5": 1e5, ".5": 0.5, "1.5e3": 1.5e3, "012.5": 12.5, "1e": "1e", "e5": "e5",
    "1.2.3": "1.2.3", "._": "._", ".inf": float("inf"), "12:30:45": "12:30:45", "190:20:30.15": "190:20:30.15",
    "2024-01-31": "2024-01-31", "2024-99-99": "2024-99-99", "2001-12-14 21:59:43": "2001-12-14 21:59:43", "=": "=", "<<": "<<",
    "yes": True, "off": False, "y": "y", "~": None, "null": None, "": None,
}  # fmt: skip


@pytest.mark.parametrize(("word", "value"), WORDS.items())
def test_a_bare_word_means_what_people_expect(word, value):
    assert (parse_yaml(word), type(parse_yaml(word))) == (value, type(value))


@pytest.mark.parametrize("word", [*WORDS, "'", '"', "a: b", "# a", "1e5\n", " x", "\u2028", "é"])
def test_what_is_written_is_read_again(word):
    for value in (word, {word: word}, [word], 1e-5, 1e22, float("inf"), True, None, 0, -7, ("a", 1)):
        read = parse_yaml(dump_yaml(value))
        assert read == ([*value] if isinstance(value, tuple) else value) and type(read) is not tuple


def test_an_override_is_a_text_where_a_text_is_expected_and_a_number_where_a_number_is(tmp_path):
    texts = ["agents.ann.tiny.alphabet=0123", "output_dir=2024-01-31", "protocol.separator=="]
    numbers = ["training.learning_rate=1e-4", "updates=1e2", "seed=010"]
    config = parse_config(read_values(written(tmp_path), [*texts, *numbers]))
    assert (config.agents["ann"].tiny.alphabet, config.protocol["separator"]) == ("0123", "=")
    assert config.output_dir == "2024-01-31"
    assert (config.training.learning_rate, config.updates, config.seed) == (1e-4, 100, 10)
    assert parse_config(yaml.safe_load(to_yaml(config))) == parse_config(parse_yaml(to_yaml(config))) == config
    options = parse_config(read_values(written(tmp_path), ["training.lr_scheduler_kwargs={min_lr: 1e-6}"])).training
    assert options.lr_scheduler_kwargs == {"min_lr": 1e-6}


# -- names of a protocol's rewards and columns -------------------------------------------------------------------------


def protocol_with(**names):
    @dataclass(frozen=True)
    class Mine(Protocol):
        def play(self, example, agents):
            (said,) = yield [Ask(agents[0], [{"role": "user", "content": example.question}])]
            said.rewards["bonus"] = 1.0

    for name, value in names.items():
        setattr(Mine, name, value)
    return Mine


@pytest.mark.parametrize("name", ["pays", "records"])
@pytest.mark.parametrize("value", [("bonus",), ["bonus"], "bonus", {"bonus": 1}, frozenset({1}), None])
def test_names_that_are_no_set_are_refused_in_one_line(monkeypatch, name, value):
    monkeypatch.setitem(PROTOCOLS, "mine", protocol_with(**{name: value}))
    with pytest.raises(ConfigError, match=rf"Mine\.{name}: expected a set of names, as") as caught:
        from_dict({**BASE, "protocol": {"name": "mine"}})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [{"bonus"}, frozenset({"bonus"})])
def test_a_protocols_own_reward_can_be_a_source_and_be_read_by_a_rule(monkeypatch, value):
    monkeypatch.setitem(PROTOCOLS, "mine", protocol_with(pays=value))
    own = {"name": "mine"}
    from_dict({**BASE, "protocol": own, "reward": {"sources": {"bonus": 1.0}}})
    from_dict({**BASE, "protocol": own, "reward": {"rules": [{"mix": {"weights": {"bonus": 0.5}}}]}})


def test_what_a_rule_and_a_slot_need_is_told_apart_from_letters(monkeypatch):
    @dataclass(frozen=True)
    class Mine(Rule):
        needs = "caller"

    @dataclass(frozen=True)
    class Late(Transform):
        needs = "caller"  # ("caller") is a text, too

    monkeypatch.setitem(RULES, "mine", Mine)
    monkeypatch.setitem(TRANSFORMS, "late", Late)
    with pytest.raises(ConfigError, match=r"Mine\.needs: expected a set .* frozenset\(\{'caller'\}\), got 'caller'"):
        from_dict({**BASE, "reward": {"rules": ["mine"]}})
    with pytest.raises(ConfigError, match=r"post: late: its needs are a tuple .*\('caller',\), got 'caller'"):
        from_dict({**BASE, "advantage": {**MEAN, "key": ["prompt"], "post": ["late"]}})
    with pytest.raises(ConfigError, match=r"between_turns\(\): expected a set of names"):
        must_be_protocol(protocol_with(between_turns=lambda self: ["label"])(), "protocol")


@dataclass(frozen=True)
class FirstTwo(Transform):
    def apply(self, advantages, batch, config):
        return advantages[:2]


def test_a_transform_of_ones_own_is_tried_before_a_model_loads():
    with pytest.raises(
        ConfigError, match=r"FirstTwo: apply returned a tensor \[2\]; expected a tensor \[16\] of finite"
    ):
        from_dict({**BASE, "advantage": {**MEAN, "key": ["agent"], "post": ["test_newcomers:FirstTwo"]}})


# -- groups of one row -------------------------------------------------------------------------------------------------

FROZEN = {"agents": {"ann": {"tiny": TINY}, "bob": {"tiny": TINY, "trainable": False}}}
GAME = {"task": {"name": "episodes"}, "protocol": {"name": "game"}, "reward": {"sources": {"env": 1.0}}}
LONE = {
    "one dialogue": {"advantage": {**MEAN, "key": ["prompt", "agent", "turn"]}},
    "a frozen partner": {"advantage": {**MEAN, "key": ["prompt", "turn"]}, **FROZEN},
    "one learner at a time": {"advantage": {**MEAN, "key": ["prompt", "turn"]}, "schedule": {"round_robin": {"every": 2}}},
    "one turn at a time": {"advantage": {**MEAN, "key": ["prompt", "agent"]}, "schedule": {"preset": "one_turn_at_a_time"}},
    "one rollout": {"advantage": {**MEAN, "key": ["prompt", "agent"], "unit": "rollout"}},
    "a chain by order": {"advantage": {**MEAN, "key": ["prompt", "order"]}, "protocol": {"name": "chain"}},
    "one question": {"advantage": {**MEAN, "key": ["agent", "turn"]}, "training": {"per_device_train_batch_size": 1, "use_cpu": True}},
    "scaled over the batch": {
        "advantage": {"returns": "utterance", "baseline": "none", "scale": "batch_std", "key": []}, **FROZEN,
        "protocol": {"name": "chain"}, "training": {"per_device_train_batch_size": 1, "use_cpu": True},
    },
    "a game that is over at once": {**GAME, "protocol": {"name": "game", "game": "sokoban"}, "advantage": {**MEAN, "key": ["prompt", "agent"]}},
}  # fmt: skip
TOGETHER = {
    "two dialogues": {"advantage": {**MEAN, "key": ["prompt", "agent", "turn"]}, "branching": {"group": 2}},
    "agents of a turn": {"advantage": {**MEAN, "key": ["prompt", "turn"]}},
    "agents of a rollout": {"advantage": {**MEAN, "key": ["prompt", "rollout"]}},
    "turns of an agent": {"advantage": {**MEAN, "key": ["prompt", "agent"]}},
    "zero": {"advantage": {**MEAN, "key": ["prompt", "agent", "turn"], "singleton": "zero"}},
    "forks": {"advantage": {**MEAN, "key": ["state"]}, "branching": {"how": "fork_every", "group": 3}},
    "players": {**GAME, "advantage": {**MEAN, "key": ["game", "role"]}},
    "per token": {},
}  # fmt: skip


def rehearsed(changes):
    return refuse(lonely_groups(Rehearsal(ResolvedRun(from_dict({**BASE, **changes}))).grouping()))


@pytest.mark.parametrize("case", LONE)
def test_a_group_of_one_is_found_before_a_model_loads(case):
    with pytest.raises(ConfigError, match=r"the group \{.*\} has a single member"):
        rehearsed(LONE[case])


@pytest.mark.parametrize("case", TOGETHER)
def test_no_alarm_where_rows_have_company(case):
    assert rehearsed(TOGETHER[case]) == []


def test_a_group_of_one_that_depends_on_the_words_is_a_warning():
    (line,) = rehearsed({**GAME, "advantage": {**MEAN, "key": ["prompt", "agent"]}})
    assert line.startswith("warning: ") and line.endswith("This happens to dialogues with empty or illegal answers.")


@pytest.mark.parametrize("case", ["a frozen partner", "agents of a rollout"])
def test_the_rehearsal_says_what_a_run_does(tmp_path, case):
    alone = case in LONE
    config = from_dict({**BASE, **(LONE | TOGETHER)[case], "output_dir": str(tmp_path / "run"), "updates": 1})
    with pytest.raises(GroupOfOne, match="has a single member") if alone else nullcontext():
        train(config, resume=False, quiet=True)


@pytest.mark.parametrize("name", recipe_files())
def test_no_recipe_is_alarmed(name, tmp_path):
    run = ResolvedRun(from_dict(tiny_version(name, str(tmp_path / "run")), name))
    world = TeamTools.from_config(run.config, run.agents).world
    rehearsal = Rehearsal(run, world)
    assert [*findings(rehearsal), *lonely_groups(rehearsal.grouping())] == []
    world.close()


def stops(base_url):
    return ask(base_url, "ann", [user("1+1=")], stop=[";"], temperature=0.7, max_tokens=2)


@pytest.mark.parametrize("own", [{}, {"sampling": {"temperature": 1.3}}], ids=["the run's", "its own"])
def test_a_program_is_rehearsed_with_the_sampling_of_the_training(own):
    changes = {
        "protocol": {"name": "program", "run": "test_newcomers:stops"},
        "ppo": {**BASE["ppo"], "temperature": 0.7},
        "agents": {"ann": {"tiny": TINY, **own}},
    }
    dialogue = Rehearsal(ResolvedRun(from_dict({**BASE, **changes}))).silent.dialogue
    (refused,) = dialogue.outcome.get("refused", [None])
    said = "temperature: this agent is being trained, and answers are drawn with 1.3, not with 0.7; leave it out, or "
    assert refused.startswith(said) if own else refused is None


def asks_twice(base_url):
    ask(base_url, "ann", [user("1+1=")])
    return ask(base_url, "ann", [user("1+1=")], n=2)


def asks_otherwise(base_url):
    return post(base_url, "chat/completions", {"model": "eve"})[0] and ask(base_url, "ann", [user("1+1=")])


def asks_on(base_url):
    while True:
        ask(base_url, "ann", [user("1+1=")])


def wants_a_number(base_url):
    return int(ask(base_url, "ann", [user("1+1=")]).strip("2") + "x")


def asks_for_much(base_url):
    """Each request is refused until the field of the one before it is ignored."""
    for fields in (
        {"temperature": 0.2, "min_p": 0.1, "seed": 1},
        {"logit_bias": {"7": 5}, "top_p": 0.5},
    ):
        said = ask(base_url, "ann", [user("1+1=")], **fields)
    return said


def asks_all_in_vain(base_url):
    post(base_url, "chat/completions", {"model": "ann", "messages": [user("1+1=")], "min_p": 0.1})
    return "4"


def raises_first(base_url):
    raise KeyError("city")


TO_ITSELF = {}


def asks_about_others(question, base_url):
    return ask(base_url, "ann", [user(question)]) if question not in TO_ITSELF else "4"


def asks_late(base_url):
    time.sleep(0.3)
    return "4"


REFUSED = "protocol: a request of the program is refused: "


def test_what_a_program_is_always_refused_is_told_before_a_run():
    def says(name, agents=None, **options):
        program = {"protocol": {"name": "program", "run": f"test_newcomers:{name}", **options}}
        return warned(program | ({"agents": agents} if agents else {}))

    behind_an_api = {"engine": "openai", "api": {"model": "m", "base_url": "http://127.0.0.1:1/v1"}}
    agents = {"ann": behind_an_api, "bob": {"tiny": TINY}}
    with pytest.raises(
        ConfigError, match=f"^{REFUSED}n: this agent is behind an API, .*; send several requests, leave"
    ):
        says("asks_twice", agents)
    assert says("asks_twice") == [], "others say as many samples as they are asked for"
    [line] = says("asks_otherwise")
    assert line.startswith(f"warning: {REFUSED}model: unknown 'eve'; known: ann"), "it went on without"
    with pytest.raises(ConfigError, match=f"^{REFUSED}min_p: answers are drawn from") as error:
        says("asks_for_much")
    faults = [str(error.value), *error.value.__notes__]
    fields = ["min_p", "temperature", "logit_bias", "top_p"]
    assert [fault.removeprefix("error: ").removeprefix(REFUSED).partition(":")[0] for fault in faults] == fields
    assert all(fault.endswith("leave it out, or add it to protocol.ignore") for fault in faults)
    assert says("asks_for_much", ignore=fields) == [], "the advice is followed to its end"
    with pytest.raises(ConfigError, match=f"^{REFUSED}min_p: answers are drawn from"):
        says("asks_all_in_vain")
    [line] = says("asks_on", calls=2)
    assert "in three rehearsals" in line and "has had 2 of 2 calls (protocol.calls)" in line, (
        "other words may end it earlier"
    )
    [line] = says("wants_a_number")
    assert "call it with such words, or try it with maporl play. The last failure:\n" in line
    assert line.splitlines()[-1].startswith("ValueError: invalid literal for int()")


def test_a_program_that_asks_nobody_is_an_error_where_no_words_decide_it(monkeypatch):
    def says(name):
        return warned({"protocol": {"name": "program", "run": f"test_newcomers:{name}"}})

    with pytest.raises(ConfigError, match=r"^protocol: the program asks no agent: no request came .*; it f"):
        says("raises_first")
    monkeypatch.setattr(program, "REHEARSED_SECONDS", 0.1)
    failed, unasked = says("asks_late")
    assert "it did not end within 0.1 seconds" in failed and "asked none of the agents that are trained" in unasked
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=r"^protocol: the program asks no agent: no request came .*; let"):
        says("asks_late")
    first = ResolvedRun(from_dict(BASE)).task
    monkeypatch.setitem(TO_ITSELF, first.question(first[0]), "4")
    [line] = says("asks_about_others")
    assert line.startswith("warning: protocol: the program asked none of the agents that are trained (ann, bob) in thr")


# -- who is shown what, and who is asked what --------------------------------------------------------------------------


def warned(changes):
    return refuse(findings(Rehearsal(ResolvedRun(from_dict({**BASE, **changes})))))


@pytest.mark.parametrize(("protocol", "deaf"), [
    ({"name": "debate", "later": "{question}"}, "ann, bob"),
    ({"name": "debate", "quote": "Agent {number} has answered."}, "ann, bob"),
    ({"name": "chain", "later": "{question}"}, "bob"),
    ({"name": "chain", "prompts": {"bob": "{question}"}}, "bob"),
    ({"name": "debate", "summariser": "bob", "agents": ["ann", "sue", "bob"], "summary": "{question}"}, "bob"),
])  # fmt: skip
def test_agents_that_are_shown_nothing_of_each_other_are_named(protocol, deaf):
    changes = {
        "protocol": protocol,
        "agents": {name: {"tiny": TINY} for name in ("ann", "bob", "sue")[: 2 + ("summary" in protocol)]},
    }
    (line,) = warned(changes)
    assert f"the prompts of {deaf} show nothing of what other agents said" in line


def test_a_prompt_that_is_never_used_need_tell_nothing():
    assert warned({"protocol": {"name": "debate", "turns": 1, "later": "x"}}) == []


def test_a_game_with_questions_is_warned_of():
    (line,) = warned({**GAME, "task": {"name": "toy_sum"}})
    assert "so nobody is asked those of toy_sum; set task: {name: episodes}" in line
    assert warned(GAME) == []


@pytest.mark.parametrize(("changes", "message"), [
    ({"task": {"name": "episodes"}}, "task: .episodes. has no questions, and protocol .debate. brings none; use protocol: .name: game."),
    ({"agents": {"ann": {"tiny": TINY, "tokenizer": "org/name"}}}, "agents.ann.tokenizer: a tiny model has a tokenizer of its own; remove it"),
    ({"agents": {"ann": {"tiny": TINY, "lora": {}, "load_in_4bit": True}}}, "agents.ann.load_in_4bit: a tiny model is not quantised"),
    ({"reward": {"penalties": {"min_tokens": 50}}},
     "reward.penalties.min_tokens: answers below 50 tokens are fined, and all of ann, bob have 4 or less"),
    ({"reward": {"penalties": {"min_tokens": 4}}, "agents": {"ann": {"tiny": TINY, "sampling": {"max_tokens": 3}}, "bob": {"tiny": TINY}}},
     "all of ann have 3 or less"),
    ({"reward": {"sources": {"brevity": 1.0}, "brevity": {"tokens": 3}, "penalties": {"min_tokens": 3}}},
     "reward.penalties.min_tokens: answers below 3 tokens are fined; brevity is below 3"),
    ({"reward": {"penalties": {}}, "ppo": {**BASE["ppo"], "stop_token": "none"}},
     "answers that do not end by themselves are fined, and with ppo.stop_token: none no answer does"),
])  # fmt: skip
def test_what_contradicts_itself_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        from_dict({**BASE, **changes})


def test_a_fine_is_taken_where_some_answers_escape_it():
    assert from_dict({**BASE, "reward": {"penalties": {"min_tokens": 4}}}).reward.penalties.min_tokens == 4


# -- what a machine lacks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("targets", "message"), [
    (["qq"], "unknown 'qq'; known: down_proj"),
    (["q_proj", "v_prj"], "unknown 'v_prj'; did you mean 'v_proj'"),
    ([], "expected all-linear or at least one of down_proj"),
    ("q_proj", "the regular expression 'q_proj' is the whole name of no module, such as 'lm_head'; give a list"),
    ("(", "is not a regular expression"),
    ("all_linear", "give a list of some of down_proj, .* or all-linear"),
    (["q_proj", "v_proj"], None),
    (["layers.0.self_attn.q_proj", "lm_head", "embed_tokens"], None),
    (r".*\.(q|v)_proj", None),
    ("all-linear", None),
])  # fmt: skip
def test_modules_of_a_lora_that_the_model_lacks_are_named(targets, message):
    config = from_dict({**BASE, "agents": {"ann": {"tiny": TINY, "lora": {"target_modules": targets}}}})
    with (
        pytest.raises(ConfigError, match=rf"agents.ann.lora.target_modules: .*{message}") if message else nullcontext()
    ):
        refuse(model_checks.check(ResolvedRun(config)))
    if message is None:
        assert Team.from_config(config, weights=False).policies["ann"].trainable


@pytest.mark.parametrize(("kind", "more", "left_out"), [
    ("mamba", {}, {"dt_proj", "out_proj"}),
    ("llama4_text", {"num_local_experts": 4, "intermediate_size_mlp": 64}, {"router"}),
    ("deepseek_v4", {"o_groups": 2, "layer_types": ["sliding_attention"] * 2}, {"o_a_proj"}),
    ("falcon", {"head_dim": None}, set()),
])  # fmt: skip
def test_a_lora_on_all_layers_leaves_out_those_that_it_cannot_adapt(tiny, tmp_path, kind, more, left_out):
    model, tokenizer = build_any(tiny, kind, "eager", **more)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)

    def config(targets):
        agent = {"model": str(tmp_path), "lora": {"r": 4, "target_modules": targets}}
        return from_dict({**BASE, "agents": {"ann": agent}})

    linear = {name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    learning = Team.from_config(config("all-linear"), weights=False).policies["ann"].model
    trained = {name: p.numel() for name, p in learning.named_parameters() if p.requires_grad}
    assert {name.split(".")[-4] for name in trained} == linear - {"lm_head"} - left_out
    assert memory.adapter_parameters(config("all-linear").agents["ann"]) == sum(trained.values()) > 0
    for layer in left_out:
        with pytest.raises(ConfigError, match=rf"lora\.target_modules: unknown '{layer}'; .*known: "):
            refuse(model_checks.check(ResolvedRun(config([layer]))))


def test_a_folder_that_cannot_be_written_is_found_before_the_run(tmp_path):
    with pytest.raises(
        ConfigError, match=r"output_dir: '/proc/nowhere/run' cannot be written: nothing can be made in '/proc'"
    ):
        check_run(from_dict({**BASE, "output_dir": "/proc/nowhere/run"}))
    check_run(from_dict({**BASE, "output_dir": str(tmp_path / "a/b/run")}))
    assert [*tmp_path.iterdir()] == [], "the check leaves nothing"


@pytest.mark.parametrize(("env", "message"), [
    ("Nope-v0", r"options.env: 'Nope-v0' cannot begin for 2 players: ValueError: .*; give a game of TextArena"),
    ("Sudoku-v0", "options.env: 'Sudoku-v0' cannot begin for 2 players: AssertionError"),
])  # fmt: skip
def test_textarena_says_in_one_line_what_it_lacks(env, message):
    pytest.importorskip("textarena")
    protocol = {"name": "game", "game": "textarena", "options": {"env": env}}
    with pytest.raises(ConfigError, match=message) as caught:
        check_run(from_dict({**BASE, **GAME, "protocol": protocol}))
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"textarena has 2 to 15 players but agents are \['ann'\]"):
        from_dict({**BASE, **GAME, "protocol": {"name": "game", "game": "textarena", "agents": ["ann"]}})


# -- commands that install ---------------------------------------------------------------------------------------------


class Installed:
    requires = (
        "torch>=2.8",
        'textarena>=0.7; extra == "games"',
        "pygame>=2.6 ; (sys_platform == 'linux') and extra == 'games'",
        'maporl[games,mcp]; extra == "dev"',
    )

    def __init__(self, record):
        self.record = record

    def read_text(self, name):
        assert name == "direct_url.json"
        return None if self.record is None else json.dumps(self.record)


@pytest.mark.parametrize(("record", "command"), [
    ({"url": "file:///a%20b/maporl", "dir_info": {"editable": True}}, "pip install -e '/a b/maporl[games]'"),
    ({"url": "file:///a/maporl", "dir_info": {}}, "pip install '/a/maporl[games]'"),
    ({"url": "file:///a/maporl.whl", "archive_info": {}}, "pip install 'maporl[games] @ file:///a/maporl.whl'"),
    ({"url": "https://x.org/m", "vcs_info": {"vcs": "git", "commit_id": "1"}}, "pip install 'maporl[games] @ git+https://x.org/m'"),
    (None, "pip install 'textarena>=0.7' 'pygame>=2.6'"),
])  # fmt: skip
def test_an_extra_is_installed_from_where_maporl_came_from(monkeypatch, tmp_path, record, command):
    monkeypatch.setattr("maporl.errors.__file__", str(tmp_path / "maporl/errors.py"))  # not in a checkout
    monkeypatch.setattr("importlib.metadata.distribution", lambda name: Installed(record))
    assert install_command("games") == command


def test_a_checkout_that_is_not_installed_installs_its_extras_itself(monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.distribution", missing)
    assert install_command("games") == f"pip install -e '{ROOT}[games]'"


def test_no_text_tells_to_install_what_is_on_no_index():
    folders = ("maporl", "trl_ext", "reward_server", "examples", "benchmarks", "tests", "docs", "configs", ".github")
    kinds = ("py", "md", "yaml", "yml", "sh", "ipynb", "toml")  # beside the folders may lie an environment
    texts = [file for folder in folders for kind in kinds for file in (ROOT / folder).glob(f"**/*.{kind}")]
    texts += [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "Makefile")]
    wrong = [
        f"{file.name}: {line.strip()}"
        for file in texts
        if file not in (ROOT / "maporl/errors.py", Path(__file__)) and "_build" not in str(file)
        for line in file.read_text(encoding="utf-8").splitlines()
        if re.search(r"pip install [^\n#&`]*(?<![/\w])maporl(?![/\w])|\(maporl\[\w+\]\)", line)
    ]
    assert wrong == [] and len(texts) > 300


# -- keys in the wrong place, and models over tiny ones ----------------------------------------------------------------


def test_a_model_takes_the_place_of_a_tiny_one_and_a_tiny_one_that_of_a_model(tmp_path):
    ann = parse_config(read_values(written(tmp_path), ["agents.ann.model=org/name"])).agents["ann"]
    assert ann.model == "org/name" and ann.tiny is None
    defaults = {"agent_defaults": {"tiny": TINY}, "agents": {"ann": {"model": "org/name"}, "bob": {}}}
    agents = from_dict({**BASE, **defaults}).agents
    assert agents["ann"].tiny is None and agents["bob"].tiny is not None
    back = parse_config(
        read_values(written(tmp_path, {"agents": {"ann": {"model": "org/name"}}}), ["agents.ann.tiny.layers=1"])
    ).agents["ann"]
    assert back.model is None and back.tiny.layers == 1
    both = written(tmp_path, {"agents": {"ann": {"model": "org/name", "tiny": TINY}}})
    with pytest.raises(ConfigError, match=r"agents.ann: give either .* got both; remove one .*agents.ann.tiny=null"):
        from_dict(read_values(both))
    assert from_dict(read_values(both, ["agents.ann.tiny=null"])).agents["ann"].model == "org/name"


# -- a first look at a method ------------------------------------------------------------------------------------------


def test_a_tried_recipe_shows_rewards_and_leaves_its_page(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    shown = CliRunner().invoke(app, ["recipes", "try", "ssl"])
    assert shown.exit_code == 0, shown.output
    updates = [line for line in shown.output.splitlines() if line.startswith("update ")]
    assert len(updates) == 3
    for line in updates:
        assert re.search(
            r"reward/credit -?\d.*reward/label \d.*reward/score -?\d.*\w+/grad_norm \d.*\w+/loss/policy_avg -?\d",
            line,
        )
    page = Path(shown.output.splitlines()[-1])
    assert page.name == "report.html" and page.is_relative_to(tmp_path) and "ssl" in page.read_text()
    refused = CliRunner().invoke(app, ["recipes", "try", "corry"])
    assert refused.exit_code == 2 and "did you mean 'cory'" in refused.output and len(list(tmp_path.iterdir())) == 1


# -- what is printed at every start ------------------------------------------------------------------------------------

START = """
import sys, torch
from maporl import Agent, Arithmetic, MultiAgentPPOConfig, MultiAgentPPOTrainer, Team, TinySection, build_tiny_model, build_tiny_tokenizer
section = TinySection(alphabet="0123456789+=;", hidden_size=32, layers=1)
tokenizer = build_tiny_tokenizer(section)
model = build_tiny_model(section, tokenizer)
team = Team([Agent("ann", model, tokenizer)])
args = MultiAgentPPOConfig(output_dir=sys.argv[1], total_episodes=8, response_length=2, use_cpu=True)
MultiAgentPPOTrainer(args=args, team=team, task=Arithmetic(largest=9))
model.save_pretrained(sys.argv[1])
assert "torch" in sys.modules and "deepspeed" not in sys.modules
"""


@pytest.mark.slow
def test_a_start_in_python_does_not_import_deepspeed(tmp_path):
    pytest.importorskip("deepspeed")
    variables = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    done = subprocess.run([sys.executable, "-c", START, str(tmp_path)], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "accelerator" not in done.stdout + done.stderr


# -- values of the wrong kind ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("override", "message"), [
    ("learning_rate=1", "unknown key 'learning_rate'; did you mean 'training.learning_rate' or "),
    ("training.kl_coef=1", r"unknown key 'training.kl_coef'; did you mean 'ppo.kl_coef'\? known: learning_rate, "),
    ("training.temperature=1", ".*did you mean 'ppo.temperature' or 'evaluation.temperature' or "),
    ("lora={}", "unknown key 'lora'; did you mean 'agents.NAME.lora'"),
    ("agents.ann.r=8", "unknown key 'agents.ann.r'; did you mean 'agents.NAME.lora.r'"),
    ("training.learning_rat=1", ".*did you mean 'learning_rate'"),
    ("qqq=1", "unknown key 'qqq'; known: "),
    ("turns=3", "unknown key 'turns'; known: .*; what a protocol or a task can be told stands below protocol: or task:"),
    ("protocol.later={question}", r".*later: expected a text, got \{'question': None\}; put a text .* in quotes:"),
    ("task=gsm8k", "task: expected a mapping of keys to values, as {name: gsm8k}, got 'gsm8k'"),
    ("reward.rules=[{own: 1}]", "reward.rules.0.own: expected a mapping of keys to values, got 1"),
    ("ppo.stop_token_id=x", r"ppo.stop_token_id: expected a whole number, got 'x'; ppo.stop_token_id: expected a list, as \[x\], got 'x'"),
    ("agents.ann.engine=vlm", r"agents.ann.engine: unknown 'vlm'; did you mean 'vllm'\? known: "),
    ("agents.ann.engine=openai", "agents.ann.engine: openai needs agents.ann.api, for example api: {model: NAME}"),
    ("agents.ann.api={model: x}", "agents.ann.api: goes with engine: openai, got engine 'transformers'; give both or neither"),
])  # fmt: skip
def test_a_key_of_another_section_and_a_value_of_another_kind_are_told_what_was_meant(tmp_path, override, message):
    with pytest.raises(ConfigError, match=f"^configuration: {message}"):
        from_dict(read_values(written(tmp_path), [override]))


def test_a_folder_without_weights_is_no_model_and_no_adapter(tmp_path):
    for key, file in (("model", "config.json"), ("adapter", "adapter_config.json")):
        with pytest.raises(ConfigError, match=rf"agents.ann.{key}: the folder '.*' has no {file}; expected a folder"):
            from_dict(read_values(written(tmp_path), [f"agents.ann.{key}={tmp_path}"]))


def test_a_file_that_is_none_is_named_with_what_it_is(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    with pytest.raises(ConfigError, match=r"^nosuch: no such file or folder; a recipe unknown 'nosuch'; known"):
        read_values("nosuch")
    with pytest.raises(ConfigError, match=r"^run: is a folder; expected a YAML file$"):
        read_values("run")
    (tmp_path / "run/config.yaml").write_text("updates: 1")
    with pytest.raises(ConfigError, match=r"^run: is a folder; expected a YAML file: .* is run/config.yaml$"):
        read_values("run")


@pytest.mark.parametrize(("change", "warning"), [
    ({"reward.sources": "{label: -1}"}, "reward.sources: label has the weight -1, so right answers cost"),
    ({"reward.rules": "[own]", "reward.share": "individual"},
     "reward.share: it is set, and nothing reads it: reward.rules take their place; remove it"),
    ({"training.per_device_train_batch_size": 5000, "ppo.num_mini_batches": 1},
     "an update has 5000 questions, and the training split 1600, so some are asked several times"),
])  # fmt: skip
def test_check_warns_of_what_is_hardly_ever_meant(tmp_path, change, warning):
    values = [f"output_dir={tmp_path}/run", *(f"{key}={value}" for key, value in change.items())]
    lines = check_run(load("quickstart", values))
    assert [line for line in lines if line.startswith("warning:")] == [line for line in lines if warning in line] != []


def test_check_says_that_a_folder_is_taken(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    printed = CliRunner().invoke(app, ["check", "quickstart", f"output_dir={tmp_path}"]).output
    assert "is not empty: `maporl train` goes on with its run by --resume" in " ".join(printed.split())


def test_a_room_of_the_package_is_an_attribute_and_a_text_for_a_number_is_named():
    import maporl

    assert maporl.rewards.assign_credit is not None
    assert {"Debate", "__version__"} <= set(dir(maporl)) and "import_module" not in dir(maporl)
    with pytest.raises(ValueError, match="kl_coef: expected a number of at least 0, got 'a'"):
        maporl.MultiAgentPPOConfig(output_dir="unused", kl_coef="a", use_cpu=True)


def test_a_file_may_extend_a_recipe_by_its_name(tmp_path):
    (tmp_path / "grpo.yaml").write_text("extends: grpo\nupdates: 7\n")
    values = read_values(tmp_path / "grpo.yaml")
    assert values["updates"] == 7 and values["branching"] == read_values("grpo")["branching"]
    (tmp_path / "other.yaml").write_text("extends: gropo\n")
    with pytest.raises(ConfigError, match="gropo: no such configuration file"):
        read_values(tmp_path / "other.yaml")


# -- what a run will train, and what contradicts itself ----------------------------------------------------------------


def check_lines(changes):
    return check_run(from_dict({**BASE, **changes}))


def line_of(begins, changes):
    (line,) = (line for line in check_lines(changes) if line.startswith(begins))
    return line.removeprefix(begins)


EVE = {"agents": {"ann": {"tiny": TINY}, "bob": {"tiny": TINY}, "eve": {"tiny": TINY, "trainable": False}}}


@pytest.mark.parametrize(("changes", "told"), [
    ({}, "ann and bob in all turns"),
    ({"protocol": {**BASE["protocol"], "turns": 1}}, "ann and bob"),
    (EVE, "ann and bob in all turns; eve plays and never learns"),
    ({"schedule": {"train_first_turn": False}}, "ann and bob in turn 2"),
    ({"schedule": {"round_robin": {"every": 2}}, "updates": 5},
     "updates 1 to 2: ann in all turns; updates 3 to 4: bob in all turns; update 5: ann in all turns"),
    ({"schedule": {"critic_warmup": 1, "freeze": [{"agent": "bob", "first": 2, "last": 9}]}, "updates": 9},
     "update 1: only the critics of ann and bob in all turns; updates 2 to 9: ann in all turns"),
    ({"schedule": {"swap": {"agents": ["ann", "bob"], "every": 5}}},
     "ann and bob in all turns; ann and bob exchange their weights every 5 updates"),
    ({"schedule": {"cycle": [{"updates": 1, "turns": [1]}, {"updates": 1, "turns": [2]}]}},
     "update 1: ann and bob in turn 1; update 2: ann and bob in turn 2; update 3: ann and bob in turn 1; update 4: " "ann and bob in turn 2; update 5: ann and bob in turn 1; update 6: ann and bob in turn 2; and so on"),
])  # fmt: skip
def test_the_check_says_who_learns_in_which_turns(changes, told):
    assert line_of("learning: ", changes) == told


def test_the_check_warns_of_what_no_update_reaches():
    late = {
        "updates": 3,
        "schedule": {"round_robin": {"every": 3}, "curriculum": [{"update": 4, "task": {"largest": 5}}]},
        "training": {**BASE["training"], "warmup_steps": 3},
    }
    warned = [line for line in check_lines(late) if line.startswith("warning: ")]
    assert [line.split(";")[0] for line in warned] == [
        "warning: schedule: bob learns in none of the 3 updates",
        "warning: schedule.curriculum: its stage from update 4 on is never reached in 3 updates",
        "warning: training.warmup_steps: the learning rate rises for 3 updates, and the run has 3, so it is never reached",
    ]
    falling = {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 5}}
    frozen = {"updates": 3, "schedule": {"freeze": [{"agent": "bob", "first": 1, "last": 10}]}}
    (warned,) = (line for line in check_lines(frozen) if line.startswith("warning: "))
    assert warned.startswith("warning: schedule: bob learns in none of the 3 updates")  # the user meant ten of more
    del frozen["schedule"]["freeze"][0]["last"]
    assert not [line for line in check_lines(frozen) if line.startswith("warning: ")]
    training = {"training": {**BASE["training"], **falling}}
    (warned,) = (line for line in check_lines({"updates": 4, **training}) if line.startswith("warning: "))
    assert (
        "num_decay_steps: the learning rate falls for 5 updates, and the run has 4, so that it begins lower" in warned
    )
    assert not [line for line in check_lines({"updates": 5, **training}) if line.startswith("warning: ")]


def test_the_check_says_what_bonuses_and_fines_are():
    reward = {"bonus": {"alpha": [0.3, 0, 0, 0.1]}, "penalties": {"min_tokens": 2, "repetition": 0, "call": 0.5}}
    assert line_of("bonus: ", {"reward": reward}) == (
        "+0.3 where a right majority persuades an agent; +0.1 where it persuades the others and is right; the opposite "
        "moves cost as much"
    )
    assert line_of("fines of an answer: ", {"reward": reward}) == (
        "fewer than 2 tokens 0.1, no final answer 0.1, it does not end by itself 0.1; off its credit alone"
    )
    eos = {"ppo": {**BASE["ppo"], "missing_eos_penalty": 1.0}}
    assert line_of("fine: ", {"reward": reward, **eos}) == "1 off the credit of what does not end by itself"
    assert not [line for line in check_lines({}) if line.startswith(("bonus: ", "fine"))]


def test_the_folder_of_a_run_is_checked_as_its_configuration(tmp_path):
    config = from_dict({**BASE, "output_dir": str(tmp_path / "run"), "updates": 1})
    train(config, resume=False, quiet=True)
    checked = CliRunner().invoke(app, ["check", str(tmp_path / "run")])
    assert checked.exit_code == 0, checked.output
    assert checked.output.splitlines() == [*check_run(config), "ok"]


def test_a_line_break_is_a_token_of_a_tiny_model_also_where_several_stand_together():
    tokenizer = build_tiny_tokenizer(TinySection(alphabet="ab\n"))
    assert tokenizer.encode("a\n\nb\n") == [3, 5, 5, 4, 5]


# -- disks, homes and devices ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("free", "training", "severity"), [
    (10e9, {"save_steps": 1}, None),
    (0.201e9, {"save_steps": 1}, "warning"),
    (0.201e9, {"save_steps": 1, "save_total_limit": 1}, None),
    (0.201e9, {"save_steps": 0}, None),
    (0.1e9, {"save_steps": 0}, "error"),
])  # fmt: skip
def test_a_disk_that_is_too_full_is_told_before_the_run(monkeypatch, tmp_path, free, training, severity):
    """Two tiny models leave 0.1 MB, and 0.3 MB with their optimizers in each of 500 checkpoints; 0.2 GB are spare."""
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    changes = {"output_dir": str(tmp_path / "run"), "updates": 500, "training": {**BASE["training"], **training}}
    run = ResolvedRun(from_dict({**BASE, **changes}))
    faults = list(preflight.check_disk(run))
    assert [fault.severity for fault in faults] == [severity] * (severity is not None)
    if severity == "warning":
        assert "500 checkpoints of " in str(faults[0]) and "set training.save_total_limit: 1" in str(faults[0])


def test_a_tilde_is_the_home_folder_in_every_path_of_a_configuration_and_of_a_command(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    rows = {"name": "gsm8k", "source": "~/rows.jsonl", "eval_source": "~/rows.jsonl"}
    sections = {"reward": {"verifier": {"model": "~/verifier"}}, "agents": {"a": {"model": "~/m"}}}
    config = parse_config({**BASE, "output_dir": "~/run", "task": rows, **sections})
    assert (config.output_dir, config.task["source"]) == (f"{tmp_path}/run", f"{tmp_path}/rows.jsonl")
    assert (config.agents["a"].model, config.reward.verifier.model) == (f"{tmp_path}/m", f"{tmp_path}/verifier")
    written(tmp_path, {"output_dir": "~/run"})
    monkeypatch.chdir("/")
    for words in (["~/mine.yaml"], ["--config=~/mine.yaml"], ["~/mine.yaml", "--set", "output_dir=~/run"]):
        checked = CliRunner().invoke(app, ["check", *words])
        assert checked.exit_code == 0 and f"questions into {tmp_path}/run\n" in checked.output, checked.output


@pytest.mark.parametrize(
    ("changes", "told"), [({}, 0), ({"use_cpu": False}, 1), ({"use_cpu": False, "placement": "split"}, 0)]
)
def test_accelerators_that_one_process_would_leave_idle_are_told_with_the_launcher_s_file(monkeypatch, changes, told):
    monkeypatch.setattr(preflight, "accelerators", lambda: ["cuda:0", "cuda:1"])
    config = from_dict({**BASE, "training": {**BASE["training"], **changes}})
    lines = preflight._launch_line(config)
    assert len(lines) == told and all("configs/accelerate/multi_gpu.yaml --num_processes 2" in line for line in lines)
