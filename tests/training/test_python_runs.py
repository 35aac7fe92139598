"""A run made in Python is a run: what it leaves, what works on it, and what it does not claim."""

import dataclasses
import importlib
import json
import logging
import os
import shutil
import signal
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from inspect import signature
from pathlib import Path

import processes
import pytest
import torch
import yaml
from fast_cases import some
from hostile_runs import AFTER, data_of, write_run
from notebook_runs import ALPHABET, DEBATE, HELD_OUT, READABLE, TASK, args, names
from one_policy import StopAfter
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainerCallback
from typer.testing import CliRunner

from maporl import (
    Agent,
    Arithmetic,
    Debate,
    Example,
    Grade,
    MultiAgentPPOTrainer,
    Protocol,
    RewardSection,
    Task,
    Team,
    TinySection,
    build_tiny_tokenizer,
)  # fmt: skip
from maporl.cli.main import app
from maporl.config import parse_config, read_yaml
from maporl.config.imports import FINGERPRINTS
from maporl.config.schema import AdvantageConfig, ApiSection, BranchingSection
from maporl.engines.scripted import ScriptedEngine
from maporl.integrations.hub import pull
from maporl.integrations.hub.card import card
from maporl.integrations.hub.pack import pack
from maporl.protocols import build_protocol
from maporl.protocols.judging import StepJudge, judged
from maporl.report.page import payload
from maporl.report.read import read_run
from maporl.report.story import story
from maporl.report.terminal import frame
from maporl.rewards.base import RewardFailure
from maporl.rewards.rules import RULES
from maporl.runs.train import train
from maporl.schedules import Freeze, Schedule
from maporl.storage.run_folder import RunExists
from maporl.training.parts import RunParts
from maporl.types import Ask
from trl_ext.files.fingerprint import DataChanged
from trl_ext.files.manifest import CheckpointError
from trl_ext.process.interruptions import Interrupted


@pytest.fixture
def team(tiny):
    """``team(...)``: an agent per name, each with a model of its own."""

    def build(*names, **options):
        sizes = {"hidden_size": 32, "layers": 1, "alphabet": ALPHABET}
        own = [tiny(("llama", "qwen3")[n % 2], seed=n, **sizes) for n in range(len(names or "ab"))]
        return Team([Agent(name, *made, **options) for name, made in zip(names or ("ann", "bob"), own, strict=True)])

    return build


def trainer_of(folder, team, task=TASK, protocol=DEBATE, eval_task=HELD_OUT, more=None, **options):
    return MultiAgentPPOTrainer(args(folder, **options), team, task, protocol, eval_task, **(more or {}))


def maporl(*words, **options):
    return CliRunner().invoke(app, [str(word) for word in words], **options)


def error_of(*words):
    done = maporl(*words)
    assert done.exit_code in (1, 2) and done.output.startswith("error: ") and done.output.count("\n") == 1, done.output
    return done.output


def config_of(folder):
    return yaml.safe_load((folder / "config.yaml").read_text())


def told(folder):
    return {part["title"]: part["text"] for part in story(read_run(folder))}


def weights(folder, name="final"):
    return {p.name: load_file(p / "model.safetensors") for p in sorted((folder / name).iterdir())}


def assert_same_weights(one, other):
    assert one.keys() == other.keys()
    for name, own in one.items():
        assert all(torch.equal(tensor, other[name][key]) for key, tensor in own.items()), name


def assert_trained(folder):
    """The final weights are others than those at the start, so that comparing them says something."""
    was, now = weights(folder, "initial"), weights(folder)
    assert all(not torch.equal(was[name]["lm_head.weight"], own["lm_head.weight"]) for name, own in now.items())


# -- what is refused when a trainer is made ----------------------------------------------------------------------------


# -- what is left, and what works on it ---------------------------------------------------------------------------


@pytest.mark.slow
def test_a_judge_of_steps_is_written_down(team, tmp_path):
    judge = StepJudge("eve", samples=2, text="{said}=", good="1", bad="2")
    more = {"reward": RewardSection(sources={"format": 1.0}, rules=("own", "consistency"))}
    protocol = judged(DEBATE, judge)
    trainer = trainer_of(tmp_path, team("ann", "bob", "eve"), TASK, protocol, None, more, eval_questions=0)
    trainer.train()
    config = config_of(tmp_path)
    assert config["protocol"]["name"] == "debate" and config["only_in_python"] == {}
    assert build_protocol(config["protocol"], ("ann", "bob", "eve")) == judged(DEBATE, judge)
    said = [json.loads(line)["utterances"] for line in (tmp_path / "dialogues.jsonl").read_text().splitlines()]
    assert all([u["role"] for u in one].count("judge") == 8 for one in said), "two verdicts on each of four answers"


def test_a_run_leaves_everything_that_the_command_leaves_and_every_command_takes_it(team, tmp_path, monkeypatch):
    run = tmp_path / "run"
    trainer = trainer_of(run, team())
    trainer.train()
    assert names(run) == [
        "audit.json", "config.yaml", "data_fingerprints.json", "dialogues.jsonl", "evaluation_after.json", "evaluation_after.jsonl",
        "evaluation_before.json", "evaluation_before.jsonl", "final", "initial", "learns_from.txt", "metrics.jsonl",
        "report.html",
    ]  # fmt: skip
    assert trainer.after == trainer.measure() and trainer.before.turns[1].team.total == 4
    assert json.loads((run / "evaluation_after.json").read_text()) == trainer.after.to_json()
    config = config_of(run)
    assert config["task"] == {**config["task"], "name": "toy_sum", "largest": 9} and "split" not in config["task"]
    assert config["protocol"]["name"] == "debate" and config["protocol"]["turns"] == 2
    assert config["updates"] == 2 and config["seed"] == 3 and config["only_in_python"] == {}
    assert "Agent ann: a model without a name, saved in initial/ann. Agent bob" in told(run)["The team"]
    shutil.move(run, tmp_path / "moved")  # a run's folder may be moved
    run = tmp_path / "moved"
    evaluated = maporl("eval", run, "--json")
    assert evaluated.exit_code == 0, evaluated.output
    assert json.loads(evaluated.stdout.splitlines()[-1])["turns"] == trainer.after.to_json()["turns"]
    played = maporl("play", run, "--output", tmp_path / "played", input="4\n5\n")
    assert played.exit_code == 0 and (tmp_path / "played/dialogues.jsonl").is_file(), played.output
    assert maporl("report", run).exit_code == 0
    assert maporl("push", run, "org/team", "--dry-run").exit_code == 0
    assert maporl("watch", run, "--tui").exit_code == 0
    loaded = Team.from_pretrained(run)
    ids = torch.tensor([[3, 4, 5]])
    for name, policy in trainer.team.policies.items():
        with torch.no_grad():
            assert torch.equal(policy.model.eval()(ids).logits, loaded.policies[name].model.eval()(ids).logits)


@pytest.mark.slow
def test_the_description_builds_the_same_run(team, tmp_path):
    """What the command resumes from it ends with the weights of the uninterrupted run in Python."""
    more = {
        "reward": RewardSection(sources={"label": 1.0, "format": 0.2}, rules=("own", {"team_mean": {}})),
        "advantage": AdvantageConfig(returns="utterance", baseline="mean", scale="std", key=("prompt", "agent")),
        "branching": BranchingSection(group=2),
        "schedule": Schedule(freeze=[Freeze("bob", 2, 2)]),
        "curriculum": [(3, Arithmetic(largest=5))],
    }
    options = {
        "updates": 4,
        "save_strategy": "steps",
        "save_steps": 1,
        "kl_coef": 0.1,
        "kl_in": "loss",
        "kl_estimator": "k3",
        "cliprange_high": 0.3,
    }
    whole = trainer_of(tmp_path / "whole", team(), more=more, **options)
    whole.train()
    stopped = trainer_of(tmp_path / "run", team(), more={**more, "callbacks": [StopAfter(2)]}, **options)
    stopped.train()
    run = tmp_path / "run"
    written = config_of(run)
    assert list(written.pop("only_in_python")) == ["training.callbacks.StopAfter"]
    assert written["output_dir"] == str(run)
    (run / "config.yaml").write_text(yaml.safe_dump(written))
    config = parse_config(read_yaml(run / "config.yaml"))
    assert config.schedule.curriculum[0].task == {"largest": 5}
    shutil.rmtree(run / "final")
    before, after = train(config, resume=True, quiet=True)
    assert before == stopped.before == whole.before and after == whole.after
    assert_same_weights(weights(run), weights(tmp_path / "whole"))
    assert_trained(run)
    described = config_of(tmp_path / "whole")
    described["only_in_python"] = {}
    assert {**described, "output_dir": "", "agents": 0} == {**config_of(run), "output_dir": "", "agents": 0}


def test_a_run_resumes_in_python_and_ends_as_the_whole_run(team, tmp_path):
    options = {"updates": 3, "save_strategy": "steps", "save_steps": 1, "more": {"reward": READABLE}}
    whole = trainer_of(tmp_path / "whole", team(), **options)
    whole.train()
    run = tmp_path / "run"
    first = trainer_of(run, team(), **options | {"more": {"reward": READABLE, "callbacks": [StopAfter(1)]}})
    first.train()
    assert (run / "final").is_dir() and "Updates: 1 update " in told(run)["How it was trained"]
    second = trainer_of(run, team(), **options)
    second.train(resume_from_checkpoint=True)
    assert second.before == first.before and second.after == whole.after
    assert_same_weights(weights(run), weights(tmp_path / "whole"))
    assert_trained(run)
    assert {"final.abandoned", "evaluation_after.json.abandoned", "config.yaml.abandoned"} <= set(names(run))
    assert config_of(run)["only_in_python"] == {}


def test_a_run_whose_reward_fails_is_saved_and_goes_on_as_a_calm_one(team, tmp_path):
    """A source that fails in the third update, as a verifier whose server is gone, costs none of the first two."""

    def run(folder, fails=-1, resume=None):
        def shaky(dialogues, task):
            if trainer.state.global_step == fails:
                raise ConnectionError("gone")
            return [[float(len(u.text)) if u.answers else None for u in d.utterances] for d in dialogues]

        more = {"reward": RewardSection(sources={"shaky": 1.0}), "sources": {"shaky": shaky}}
        trainer = trainer_of(tmp_path / folder, team(), more=more, updates=4)
        trainer.train(resume_from_checkpoint=resume)

    run("calm")
    with pytest.raises(RewardFailure, match="gone") as error:
        run("run", fails=2)
    (note,) = error.value.__notes__
    assert note == (
        f"stopped after update 2 of 4; saved in {tmp_path}/run/checkpoint-2; to go on: train(resume_from_checkpoint=True)"
    )
    run("run", resume=True)
    assert_same_weights(weights(tmp_path / "run"), weights(tmp_path / "calm"))
    assert_trained(tmp_path / "run")
    with pytest.raises(RewardFailure, match="gone") as error:
        run("first", fails=0)
    assert not getattr(error.value, "__notes__", []), "there is nothing to go on from"


@pytest.mark.slow
def test_training_on_in_the_same_process_and_calling_train_again(team, tmp_path):
    run = tmp_path / "run"
    stop = StopAfter(1)
    trainer = trainer_of(run, team(), more={"callbacks": [stop], "reward": READABLE}, updates=2)
    trainer.train()
    early = weights(run)
    stop.step = None
    trainer.train()
    assert [m["step"] for m in read_run(run).updates()] == [1, 2] and (run / "final.abandoned").is_dir()
    assert not torch.equal(early["ann"]["lm_head.weight"], weights(run)["ann"]["lm_head.weight"])
    left, after = names(run), trainer.after
    trainer.train()  # nothing is left to train
    assert names(run) == left and trainer.after == after


@pytest.mark.parametrize("options", some([{"eval_task": None}, {"eval_questions": 0}], 0))
def test_without_an_evaluation_there_is_none(team, tmp_path, options):
    trainer = trainer_of(tmp_path / "run", team(), updates=1, **options)
    trainer.train()
    assert trainer.before is None and trainer.after is None
    assert not [name for name in names(tmp_path / "run") if name.startswith("evaluation")]
    assert config_of(tmp_path / "run")["evaluation"]["questions"] == 0
    assert "No evaluation after training is recorded." in told(tmp_path / "run")["What it learned"]


# -- agents -------------------------------------------------------------------------------------------------------


def lora(model, *adapters):
    options = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    shared = get_peft_model(model, options, adapter_name=adapters[0])
    for name in adapters[1:]:
        shared.add_adapter(name, options)
    return shared


def of_all_kinds(tiny, folder):
    """Adapters of one base that has no name, one by turn, a frozen random model, a frozen named one, a person, and an
    API."""
    sizes = {"hidden_size": 32, "layers": 1, "alphabet": ALPHABET}
    model, tokenizer = tiny("llama", **sizes)
    shared = lora(model, "ann", "first", "rest")
    named, own = tiny("qwen3", seed=4, **sizes)
    named.save_pretrained(folder)
    turns = tuple(Agent(name, shared, tokenizer, adapter=name) for name in ("first", "rest"))
    frozen, other = tiny("gpt_neox", seed=5, **sizes)
    return Team([
        Agent("ann", shared, tokenizer, adapter="ann", role="solver"),
        Agent("bob", by_turn=turns, system="Be brief."),
        Agent("cat", frozen, other, trainable=False),
        Agent("dan", AutoModelForCausalLM.from_pretrained(folder), own, trainable=False),
        Agent("me", engine="human"),
        Agent("oracle", engine="mine"),
    ])  # fmt: skip


@pytest.mark.slow
def test_agents_of_every_kind_come_back_also_from_the_hub(tiny, tmp_path, monkeypatch):
    run, answers = tmp_path / "run", ScriptedEngine(lambda request: "4")
    original = of_all_kinds(tiny, tmp_path / "named")
    trainer = trainer_of(run, original, updates=1, more={"engines": {"human": answers, "mine": answers}})
    trainer.train()
    agents = config_of(run)["agents"]
    assert agents["bob"]["policy_per"] == ["first", "rest"] and agents["bob"]["system"] == "Be brief."
    assert agents["dan"]["model"] == str(tmp_path / "named") and not (run / "initial/dan").exists()
    assert agents["ann"]["model"] == agents["bob"]["model"] == f"{run}/initial/ann/base"
    assert agents["oracle"]["engine"] == "python" and "engines.oracle" in config_of(run)["only_in_python"]
    text = told(run)["The team"]
    assert (
        "Agent me: a person." in text
        and "Agent oracle: an engine that was passed in Python." in text
        and "frozen" in text
    )
    (pushed := tmp_path / "pushed").mkdir()
    contents, _ = pack(read_run(run), "org/team")
    for path, content in contents.items():
        (pushed / path).parent.mkdir(parents=True, exist_ok=True)
        (pushed / path).write_bytes(content if isinstance(content, bytes) else content.read_bytes())
    assert str(tmp_path) not in (pushed / "config.yaml").read_text()
    monkeypatch.setattr(pull, "snapshot_download", lambda name, **options: str(pushed))
    ids = torch.tensor([[3, 4, 5]])
    for loaded in (Team.from_pretrained(run), Team.from_pretrained("org/team", [f"agents.dan.model={tmp_path}/named"])):
        assert list(loaded.policies) == list(original.policies)
        for name, policy in original.policies.items():
            with torch.no_grad(), policy.active() as one, loaded.policies[name].active() as two:
                assert torch.equal(one.eval()(ids).logits, two.eval()(ids).logits), name


def test_no_key_is_written(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_KEY", "sk-very-secret-key-0123456789")
    model, tokenizer = tiny(alphabet=ALPHABET)
    both = Team([Agent("ann", model, tokenizer), Agent("judge", engine="openai")])
    more = {
        "speakers": ["ann"],
        "engine_options": {"judge": ApiSection("gpt", base_url="http://127.0.0.1:9", key_variable="SOME_KEY")},
    }
    trainer_of(tmp_path / "run", both, updates=1, protocol=Debate(turns=1), more=more).train()
    text = (tmp_path / "run/config.yaml").read_text()
    assert "key_variable: SOME_KEY" in text and "very-secret" not in text
    assert config_of(tmp_path / "run")["protocol"]["agents"] == ["ann"]


# -- parts without a name -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Doubling(Task):
    """A task of one's own."""

    largest: int = 9
    split: str = "train"

    def __len__(self):
        return self.largest

    def __getitem__(self, index):
        return Example(f"{self.split}-{index}", f"{index}+{index}=", str(2 * index))

    def grade(self, example, text):
        return Grade(text, text == example.answer, "")


def in_a_function():
    @dataclass(frozen=True)
    class Relay(Protocol):
        rounds: int = 2
        turns = 1

        def play(self, example, agents):
            heard = ()
            for agent in agents:
                (said,) = yield [Ask(agent, [{"role": "user", "content": example.question}], parents=heard)]
                heard = (said.id,)

    return Relay


def test_parts_without_a_name_are_described_and_refused_by_their_names(team, tmp_path):
    run = tmp_path / "run"
    Relay = in_a_function()
    more = {"sources": {"odd": lambda dialogues, task: [[1.0] * len(d.utterances) for d in dialogues]},
            "reward": RewardSection(sources={"odd": 1.0}), "callbacks": [TrainerCallback()]}  # fmt: skip
    own = type("Tripling", (Doubling,), {})  # a class that no module has
    trainer_of(run, team(), own(7), Relay(rounds=3), own(7, "eval"), more, updates=2).train()
    written = config_of(run)
    assert written["task"] == {"name": f"{own.__module__}.Tripling", "largest": 7}
    assert written["protocol"] == {"name": f"{__name__}.in_a_function.<locals>.Relay", "rounds": 3}
    assert sorted(written["only_in_python"]) == [
        "protocol",
        "reward.sources.odd",
        "task",
        "training.callbacks.TrainerCallback",
    ]
    text = told(run)
    assert "Protocol: " in text["The team"] and "Relay" in text["The team"] and "debate" not in text["The team"]
    assert written["only_in_python"]["task"].endswith("Tripling, which no other process can import")
    assert "The reward is odd." in text["How it was trained"]
    assert maporl("report", run).exit_code == 0 and maporl("watch", run, "--tui").exit_code == 0
    for command in (
        ["eval", run],
        ["play", run],
        ["train", run / "config.yaml", "--resume"],
        ["crossplay", run, run / "."],
    ):
        refused = error_of(*command)
        assert "only_in_python" in refused or command[0] == "crossplay", refused
        assert "Tripling" in refused or command[0] == "crossplay", refused
    assert maporl("push", run, "org/team", "--dry-run").exit_code == 0
    again = Team.from_pretrained(run)  # what the message says to do
    trainer_of(tmp_path / "more", again, own(7), Relay(), own(7, "eval"), more, updates=1).train()
    assert (tmp_path / "more/final").is_dir()


MINE = """
from dataclasses import dataclass
from maporl import Arithmetic, Debate
from maporl.rewards.rules import Rule

@dataclass(frozen=True)
class Sums(Arithmetic):
    extra: int = 1

@dataclass(frozen=True)
class Talk(Debate):
    loud: bool = False

@dataclass(frozen=True)
class Half(Rule):
    share: float = 0.5

    def __call__(self, dialogues, credits):
        return [{key: self.share * value for key, value in own.items()} for own in credits]

def length(dialogues, task):
    return [[float(len(u.text)) for u in d.utterances] for d in dialogues]
"""


@pytest.mark.slow
def test_parts_of_an_importable_module_are_named_and_every_command_takes_the_run(team, tmp_path, monkeypatch):
    (folder := tmp_path / "code").mkdir()
    (folder / "my_parts.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(folder))
    mine = importlib.import_module("my_parts")
    monkeypatch.setitem(RULES, "half", mine.Half)
    run = tmp_path / "run"
    more = {
        "sources": {"length": mine.length},
        "reward": RewardSection(sources={"length": 0.5, "format": 1.0}, rules=("own", {"half": {"share": 0.25}})),
    }
    talk = mine.Talk(turns=2, later="{others};{question}", quote="{text}", loud=True)
    parts = (mine.Sums(largest=9), talk, mine.Sums(largest=9, split="eval"), more)
    trainer = trainer_of(run, team(), *parts, save_strategy="steps")
    trainer.train()
    written = config_of(run)
    assert written["only_in_python"] == {} and written["pythonpath"] == [str(folder)]
    assert written["task"]["name"] == "my_parts:Sums" and written["protocol"]["name"] == "my_parts:Talk"
    assert written["protocol"]["loud"] is True
    assert written["reward"]["sources"] == {"my_parts:length": 0.5, "format": 1.0}
    assert written["reward"]["rules"] == ["own", {"my_parts:Half": {"share": 0.25}}]
    with monkeypatch.context() as elsewhere_only:
        elsewhere_only.setattr(sys, "path", [place for place in sys.path if place != str(folder)])
        elsewhere = processes.run(["-m", "maporl", "eval", run, "--json"], cwd=tmp_path)
    assert elsewhere.returncode == 0, elsewhere.stderr
    assert json.loads(elsewhere.stdout.splitlines()[-1])["turns"] == trainer.after.to_json()["turns"]
    assert list(json.loads((run / FINGERPRINTS).read_text())) == ["my_parts"]
    for other, section in (
        ({"reward": RewardSection(sources={"length": 0.5, "format": 2.0}, rules=more["reward"].rules)}, "reward.sources"),
        ({"branching": BranchingSection(group=2)}, "branching.group"),
        ({"advantage": AdvantageConfig(returns="utterance", baseline="mean", scale="none", key=("prompt",))}, "advantage.returns"),
    ):  # fmt: skip
        again = trainer_of(run, team(), *parts[:3], more | other, save_strategy="steps")
        with pytest.raises(CheckpointError, match=rf"another configuration \({section}"):
            again.train(resume_from_checkpoint=True)
    (folder / "my_parts.py").write_text(MINE + "# changed\n")
    again = trainer_of(run, team(), *parts, save_strategy="steps")
    with pytest.raises(DataChanged, match="the module 'my_parts' has changed since the run began"):
        again.train(resume_from_checkpoint=True)


SCRIPT = """
from maporl import Agent, MultiAgentPPOTrainer, Team
from notebook_runs import args, ALPHABET, READABLE
from maporl import TinySection, build_tiny_model, build_tiny_tokenizer
import torch
"""
GUARDED = """
if __name__ == "__main__":
    import sys

    section = TinySection(hidden_size=32, layers=1, alphabet=ALPHABET)
    torch.manual_seed(0)
    team = Team.on_one_base(build_tiny_model(section, tok := build_tiny_tokenizer(section)), tok, ["ann", "bob"])
    talk = Talk(turns=2, later="{others};{question}", quote="{text}")
    own = args(sys.argv[1], save_strategy="steps", save_steps=1)
    MultiAgentPPOTrainer(own, team, Sums(largest=9), talk, Sums(largest=9, split="eval"), READABLE).train()
"""


@pytest.mark.slow
def test_a_class_of_a_script_is_found_again_under_the_name_of_its_file(team, tmp_path, monkeypatch):
    (folder := tmp_path / "code").mkdir()
    (folder / "my_script.py").write_text(MINE + SCRIPT + GUARDED)
    run = tmp_path / "run"
    done = processes.run([folder / "my_script.py", run], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    written = config_of(run)
    assert written["only_in_python"] == {} and written["pythonpath"] == [str(folder)]
    assert (written["task"]["name"], written["protocol"]["name"]) == ("my_script:Sums", "my_script:Talk")
    assert list(json.loads((run / FINGERPRINTS).read_text())) == ["my_script"]
    evaluated = maporl("eval", run, "--json")
    assert evaluated.exit_code == 0, evaluated.output
    monkeypatch.syspath_prepend(str(folder))
    mine = importlib.import_module("my_script")
    for once in ("my_script:", "__main__."):  # what was written, and what a script without the line leaves
        text = (run / "config.yaml").read_text()
        (run / "config.yaml").write_text(text.replace("my_script:", once))
        section = TinySection(hidden_size=32, layers=1, alphabet=ALPHABET)
        model, tokenizer = Team.from_pretrained(run).policies["ann"].model.unload(), build_tiny_tokenizer(section)
        talk = mine.Talk(turns=2, later="{others};{question}", quote="{text}")
        parts = (mine.Sums(largest=9), talk, mine.Sums(largest=9, split="eval"), {"reward": READABLE})
        again = trainer_of(run, Team.on_one_base(model, tokenizer, ["ann", "bob"]), *parts, save_strategy="steps")
        again.train(resume_from_checkpoint=True)


def test_a_script_that_would_run_again_is_not_imported(tmp_path):
    asked = "from maporl.config.imports import import_name\nprint(import_name(Sums))\n"
    for name, text, printed in (
        ("my_plain_script", asked, "None\n"),
        ("my-script", f"if __name__ == '__main__':\n    {asked.replace(chr(10), '; ')}\n", "None\n"),
        ("my_other_script", f"if __name__ == '__main__':\n    {asked.replace(chr(10), '; ')}\n", "my_other_script:Sums\n"),
    ):  # fmt: skip
        (tmp_path / f"{name}.py").write_text(MINE + text)
        assert processes.run([tmp_path / f"{name}.py"], cwd=tmp_path).stdout == printed, name


# -- what goes wrong ----------------------------------------------------------------------------------------------


def test_nothing_of_another_run_is_overwritten(team, tmp_path):
    run = tmp_path / "run"
    trainer_of(run, team(), updates=1).train()
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(RunExists, match="holds another run; --resume"):
        trainer_of(run, team(), updates=1).train()
    for gone in ("metrics.jsonl", "dialogues.jsonl"):
        (run / gone).unlink()
        before.pop(run / gone)
    with pytest.raises(RunExists, match="holds final of another run, which stays"):
        trainer_of(run, team(), updates=1).train()
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    (mine := tmp_path / "mine").mkdir()
    (mine / "config.yaml").write_text("a: 1\n")
    with pytest.raises(RunExists, match=r"config\.yaml: is another run.s configuration, and stays"):
        trainer_of(mine, team(), updates=1).train()
    assert (mine / "config.yaml").read_text() == "a: 1\n"


class Breaks:
    """A reward that fails from call ``number`` on."""

    def __init__(self, number, error):
        self.left, self.error = number, error

    def __call__(self, dialogues, task):
        self.left -= 1
        if self.left < 0:
            raise self.error
        return [[1.0] * len(d.utterances) for d in dialogues]


@pytest.mark.slow
def test_a_run_that_trained_nothing_leaves_an_empty_folder_for_the_corrected_one(team, tmp_path):
    run = tmp_path / "run"
    for error in (ValueError("no"), KeyboardInterrupt()):
        more = {"sources": {"odd": Breaks(0, error)}, "reward": RewardSection(sources={"odd": 1.0})}
        with pytest.raises((RuntimeError, KeyboardInterrupt)):
            trainer_of(run, team(), more=more).train()
        assert names(run) == []
    trainer_of(run, team(), updates=1).train()
    assert (run / "report.html").is_file()


@pytest.mark.slow
def test_a_run_that_was_killed_before_it_trained_begins_again(team, tmp_path, monkeypatch):
    run = tmp_path / "run"
    trainer = trainer_of(run, team(), updates=1)
    monkeypatch.setattr(trainer.record, "failed", lambda: None)  # a kill runs no handler
    monkeypatch.setattr(trainer, "collect", lambda batch: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert {"config.yaml", "initial", "evaluation_before.json"} <= set(names(run))
    trainer_of(run, team(), updates=1).train()
    assert (run / "final").is_dir() and (run / "initial.abandoned").is_dir()


def test_a_run_that_fails_on_the_way_leaves_a_report_and_no_final_weights(team, tmp_path):
    run = tmp_path / "run"
    # an evaluation and two updates ask it
    more = {"sources": {"odd": Breaks(3, ValueError("no"))}, "reward": RewardSection(sources={"odd": 1.0})}
    with pytest.raises(RuntimeError):
        trainer_of(run, team(), updates=4, more=more).train()
    assert not (run / "final").exists() and not (run / "evaluation_after.json").exists()
    assert "Updates: 2 of 4 updates" in told(run)["How it was trained"]
    page = data_of((run / "report.html").read_text())
    assert page["runs"][0]["finished"] is False


@pytest.mark.slow
def test_a_stopped_run_says_so_and_leaves_a_report(team, tmp_path):
    run = tmp_path / "run"

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 1:
                os.kill(os.getpid(), signal.SIGINT)

    trainer = trainer_of(run, team(), updates=3, more={"callbacks": [Stop()]})
    with pytest.raises(Interrupted):
        trainer.train()
    assert (run / "report.html").is_file() and (run / "checkpoint-1").is_dir() and not (run / "final").exists()
    assert "Updates: 1 of 3 updates" in told(run)["How it was trained"]


# -- what a report does not know ----------------------------------------------------------------------------------


def leaves(values, at=()):
    """Every key of a configuration, by its path."""
    for key, value in values.items():
        yield (*at, key)
        if isinstance(value, dict):
            yield from leaves(value, (*at, key))


def without(values, path):
    head, *rest = path
    return {k: without(v, rest) if k == head and rest else v for k, v in values.items() if k != head or rest}


FULL = {
    "output_dir": "run",
    "updates": 2,
    "task": {"name": "TASKNAME"},
    "protocol": {"name": "PROTOCOLNAME", "turns": 7},
    "agents": {
        "ann": {"tiny": {"architecture": "qwen3", "layers": 5}, "trainable": False},
        "bob": {"engine": "openai", "api": {"model": "MODELNAME"}},
    },
    "ppo": {"temperature": 0.9, "kl_coef": 0.25},
    "evaluation": {"temperature": 0.0},
    "reward": {"sources": {"SOURCE": 1.5}},
    "warm_start": {"steps": 11},
}
WORDS = {
    ("task", "name"): "TASKNAME", ("protocol", "name"): "PROTOCOLNAME", ("protocol", "turns"): "7 turns",
    ("agents", "ann", "tiny", "architecture"): "qwen3", ("agents", "ann", "tiny", "layers"): "5 layers",
    ("agents", "bob", "api", "model"): "MODELNAME", ("reward", "sources", "SOURCE"): "SOURCE",
    ("warm_start", "steps"): "11 steps", ("ppo", "temperature"): "temperature 0.9",
}  # fmt: skip
CLAIMS = (
    "debate", "llama", "3 layers", "None", "LoRA", "Multi-agent PPO", "reward is label",
)  # fmt: skip
"""What the defaults of a configuration would make a report say."""


@pytest.fixture
def records(tmp_path):
    """A run of which only the records are left."""
    folder = write_run(tmp_path / "run", dialogues=AFTER)
    (folder / "config.yaml").unlink()
    return folder


def everything_told(run, folder=None):
    record = read_run(run)
    shown = payload([record])
    page = {**shown, "dialogues": [], "rewards": {}, "runs": [{**shown["runs"][0], "config": ""}]}
    compared = payload([record, record])
    frame(record, 80)
    return " ".join([json.dumps(page), json.dumps(compared["comparison"]), card(record, "org/team", ["ann"])]), compared


def test_a_report_without_a_configuration_claims_nothing(records):
    text, compared = everything_told(records)
    assert not [claim for claim in CLAIMS if claim in text]
    rows = {row["key"]: row["values"] for row in compared["comparison"]["results"]}
    assert rows["protocol"] == rows["task"] == ["\u2013", "\u2013"] and not compared["comparison"]["comparable"]
    assert told(records)["The team"].startswith(
        "Agent ann: not recorded. Agent bob: not recorded. One of its questions: "
    )


def test_a_report_states_every_value_that_it_knows(records):
    (records / "config.yaml").write_text(yaml.safe_dump(FULL))
    text, _ = everything_told(records)
    assert not [words for words in WORDS.values() if words not in text]


@pytest.mark.parametrize("path", list(leaves(FULL)), ids=".".join)
def test_a_report_with_one_value_missing_does_not_make_it_up(records, path):
    partial = without(FULL, list(path))
    (records / "config.yaml").write_text(yaml.safe_dump(partial))
    text, _ = everything_told(records)
    assert not [claim for claim in CLAIMS if claim in text]
    gone = [words for key, words in WORDS.items() if key[: len(path)] == path]
    assert not [words for words in gone if words in text]


def test_the_card_of_a_saved_team_claims_no_training(team, tmp_path):
    team().save(tmp_path / "team")
    contents, notes = pack(read_run(tmp_path / "team"), "org/team")
    card = contents["README.md"].decode()
    assert (
        "saved with `maporl`" in card and "trained together" not in card and "None" not in card and "Method" not in card
    )
    assert "ann/model.safetensors" in contents and not [note for note in notes if note.startswith("left out")]
    assert maporl("push", tmp_path / "team", "org/team", "--dry-run").exit_code == 0
    assert "saved without a task and a protocol" in error_of("play", tmp_path / "team")
    words = ["task.name=toy_sum", "task.largest=9", "protocol.name=debate", "protocol.turns=1"]
    done = maporl("eval", tmp_path / "team", *words, "evaluation.questions=4", "ppo.response_length=3", "--json")
    assert done.exit_code == 0, done.output


def test_every_argument_of_the_trainer_is_a_part_of_the_run():
    """An argument that is added to the trainer must be a part, which is described, or be named here."""
    arguments = set(signature(MultiAgentPPOTrainer).parameters)
    parts = {field.name for field in dataclasses.fields(RunParts)}
    other_forms = {
        "train_dataset",
        "eval_dataset",
        "reward_funcs",
        "reward_weights",
        "environments",
    }  # of task, eval_task, sources, reward, tools
    assert arguments - parts == {"backend"} | other_forms
    assert parts | set(signature(RunParts.of).parameters) == arguments - {"backend"} | {"others"}


@pytest.mark.slow
def test_a_run_on_a_data_set_of_prompts_with_reward_functions(team, tmp_path):
    def ones(prompts, completions):
        return [float(text.count("1")) for text in completions]

    rows = [{"prompt": f"{a}+{b}="} for a in range(10) for b in range(12)]
    more = {"train_dataset": rows, "eval_dataset": rows[:4], "reward_funcs": ones}
    trainer = MultiAgentPPOTrainer(args(tmp_path / "run"), team(), protocol=DEBATE, **more)
    trainer.train()
    written = config_of(tmp_path / "run")
    assert written["reward"]["sources"] == {"ones": 1.0}
    assert sorted(written["only_in_python"]) == ["reward.sources.ones", "task.rows"]
    assert maporl("report", tmp_path / "run").exit_code == 0
    assert "task.rows" in error_of("eval", tmp_path / "run")
    assert list(Team.from_pretrained(tmp_path / "run").policies) == ["ann", "bob"]


def test_a_script_is_not_told_of_a_kernel_that_only_4_bit_models_on_a_cpu_use(capfd):
    library = find_spec("bitsandbytes")
    if library is not None:
        module = Path(library.submodule_search_locations[0]) / "backends/cpu/ops.py"
        assert "gemm_4bit_forward from kernels-community" in module.read_text(), "the warning comes from elsewhere"
    logging.getLogger("bitsandbytes.backends.cpu.ops").warning("no kernel")
    assert capfd.readouterr().err == ""
