"""What a message tells a user to do is done here, to its end: the run goes on, or another one begins from its weights.

Each test reads the advice from the message itself. What is not here is listed in no message: advice on a machine, a
package or a server, and advice that is a value in the same key, which the tests of that option follow.
"""

import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from fast_cases import some
from folders import ROOT
from notebook_runs import DEBATE, HELD_OUT, TASK, args
from peft import LoraConfig
from safetensors.torch import load_file
from typer.testing import CliRunner

from maporl import MultiAgentPPOTrainer, Team
from maporl.cli.main import app
from maporl.config.schema import AdvantageConfig, BranchingSection, TinySection
from maporl.errors import RunError
from maporl.tiny import build_tiny_model, build_tiny_tokenizer
from maporl.training.args import MAY_CHANGE, OF_PROGRAMS
from trl_ext.files.manifest import CheckpointError

ALPHABET = "0123456789+=;?ab"
TINY = {"alphabet": ALPHABET, "hidden_size": 16, "layers": 1, "heads": 2}
BASE = {
    "updates": 2,
    "task": {"name": "toy_sum", "largest": 9},
    "agent_defaults": {"tiny": TINY},
    "agents": {"ann": {}, "bob": {}},
    "protocol": {"name": "debate", "turns": 2, "later": "{others};{question}", "quote": "{text}", "separator": ";"},
    "warm_start": {"steps": 2},
    "ppo": {"response_length": 2, "num_ppo_epochs": 1},
    "training": {"learning_rate": 1e-2, "per_device_train_batch_size": 4, "use_cpu": True, "save_steps": 1},
    "evaluation": {"questions": 8},
    "seed": 3,
}
LORA = ["agent_defaults.lora.r=4", "agent_defaults.lora.target_modules=[q_proj,v_proj]"]
KINDS = {"whole": [], "lora": LORA}


def maporl(*words, status=0):
    """Run a command of maporl in this process, and return all that it said."""
    done = CliRunner().invoke(app, list(map(str, words)))
    assert done.exit_code == status, (words, done.output, done.exception)
    return done.output


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Write the file of a configuration whose run is RUN in the present folder, with other sections."""
    monkeypatch.chdir(tmp_path)

    def write(**sections):
        Path("c.yaml").write_text(yaml.safe_dump(BASE | {"output_dir": "run"} | sections))
        return "c.yaml"

    return write


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A finished run of each kind, which tests copy."""
    folder = tmp_path_factory.mktemp("ended")
    (folder / "c.yaml").write_text(yaml.safe_dump(BASE | {"output_dir": "run"}))
    for kind, options in KINDS.items():
        maporl("train", folder / "c.yaml", *options, f"output_dir={folder / kind}", "-q")
    return folder


def killed(run):
    """Leave of a finished run what a kill after its first update leaves."""
    for name in ("final", "checkpoint-2"):
        shutil.rmtree(f"{run}/{name}")
    for name in ("evaluation_after.json", "evaluation_after.jsonl"):
        Path(run, name).unlink()
    for file in (Path(run, "metrics.jsonl"), Path(run, "dialogues.jsonl")):
        file.write_text("".join(line for line in file.open() if json.loads(line)["step"] == 1))


def policies(folder):
    """The weights of all policies in a folder, without those of critics and optimizers."""
    files = sorted(Path(folder).glob("*/*model.safetensors"))
    return {str(file.relative_to(folder)): load_file(file) for file in files}


def equal(one, other):
    return one.keys() == other.keys() and all(
        value.equal(other[name][key]) for name, tensors in one.items() for key, value in tensors.items()
    )


def right(file):
    return json.loads(Path(file).read_text())["turns"]


# -- another run from the weights of this one ----------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["ended", "killed"])
@pytest.mark.parametrize("kind", some(KINDS, 0))
def test_the_weights_that_a_refused_resume_names_begin_another_run(config, ended, kind, end):
    file, saved = config(), Path("run/final" if end == "ended" else "run/checkpoint-1/policies")
    shutil.copytree(ended / kind, "run")
    if end == "killed":
        killed("run")
    told = maporl("train", "run/config.yaml", "--resume", "training.learning_rate=0.0", "-q", status=1)
    assert "(training.learning_rate was 0.01 and is 0.0)" in told and ("final" in told) == (end == "ended")
    if exports := re.search(r"`maporl (export .+?)`", told):
        maporl(*shlex.split(exports[1]))
    advised = shlex.split(told.split("from its weights, in ")[1].split(": ", 1)[1])
    assert sum(word.startswith(f"agents.ann.{'model' if kind == 'whole' else 'adapter'}=") for word in advised) == 1
    maporl("train", file, *KINDS[kind], "training.learning_rate=0.0", "updates=1", "output_dir=next", *advised, "-q")
    assert len(policies("next/final")) == 2 and equal(policies("next/final"), policies(saved))
    if end == "ended":
        assert right("next/evaluation_before.json") == right("run/evaluation_after.json")


@pytest.mark.slow
def test_a_run_without_checkpoints_names_its_last_weights(config):
    file = config()
    maporl("train", file, "training.save_steps=0", "-q")
    told = maporl("train", "run/config.yaml", "--resume", "--updates", "3", "-q", status=1)
    assert "cannot be made longer, because it has no checkpoint" in told
    maporl("train", file, "output_dir=next", *told.split("run/final: ")[1].split(), "-q")
    assert right("next/evaluation_before.json") == right("run/evaluation_after.json")


@pytest.mark.slow
def test_a_model_that_is_an_adapter_is_answered_with_the_option_and_its_base(config):
    """Also one on a base that has no name, which is a tiny model."""
    base_model("base")
    file = config(agent_defaults={"model": "base"}, warm_start={"steps": 0})
    maporl("train", file, *LORA, "updates=1", "-q")
    told = maporl("check", file, "output_dir=next", "agents.ann.model=run/final/ann", status=2)
    advised = re.search(r"'run/final/ann' has no config.json; it is an adapter: give (\S+) and (\S+)", told).groups()
    maporl("train", file, "output_dir=next", "updates=1", *LORA, *advised, "training.learning_rate=0.0", "-q")
    name = "ann/adapter_model.safetensors"
    assert equal({name: policies("next/final")[name]}, {name: policies("run/final")[name]})


def test_an_adapter_of_a_tiny_model_says_that_its_base_is_drawn(config, ended):
    told = maporl("check", config(), f"agents.ann.model={ended}/lora/final/ann", status=2)
    assert (
        f"give agents.ann.adapter={ended}/lora/final/ann and the model that it was trained on: for a tiny one" in told
    )
    maporl("check", "c.yaml", f"agents.ann.adapter={ended}/lora/final/ann")


# -- the run goes on -----------------------------------------------------------------------------------------------------

FREE = [
    "training.save_steps=2", "training.save_total_limit=3", "training.eval_steps=1", "training.gradient_checkpointing=true",
    "training.per_device_train_batch_size=2", "training.gradient_accumulation_steps=2", "ppo.max_tokens_per_microbatch=400",
    "dialogues_logged=1", "evaluation.questions=6", "evaluation.temperature=0.5",
]  # fmt: skip


def test_what_decides_no_weights_may_change_and_evaluations_stay_comparable(config, ended, caplog):
    file = config()
    shutil.copytree(ended / "whole", "run")
    whole, before = policies("run/final"), right("run/evaluation_before.json")
    killed("run")
    maporl("train", "run/config.yaml", "--resume", *FREE, "-q")
    assert equal(policies("run/final"), whole), "they decide no weights"
    assert yaml.safe_load(Path("run/config.yaml").read_text())["training"]["save_steps"] == 2
    assert "evaluation.questions was 8 and is 6; evaluation.temperature was 0.0 and is 0.5" in caplog.text
    assert right("run/evaluation_before.json.abandoned") == before
    maporl("train", file, "output_dir=other", "updates=1", *FREE[-2:], "-q")
    assert right("run/evaluation_before.json") == right("other/evaluation_before.json") != before


@pytest.mark.parametrize("changed", ["training.per_device_train_batch_size=2", "seed=4", "evaluation.questions=6"])
def test_what_decides_weights_stays(config, ended, changed):
    """The batch of all processes decides, and of a loop the evaluation does, by which its rounds are compared."""
    stage = {"train": "sft", "build": "best_of"}
    shutil.copytree(ended / "whole", "run")
    killed("run")
    values = yaml.safe_load(Path("run/config.yaml").read_text())
    loop = values["loop"] | {"stages": [stage] * changed.startswith("evaluation")}
    Path("run/config.yaml").write_text(yaml.safe_dump(values | {"loop": loop}))
    told = maporl("train", "run/config.yaml", "--resume", changed, "-q", status=1)
    assert re.search(r"batch_size was 4 and is 2|\(seed was 3 and is 4\)|\(evaluation.questions was 8 and is 6\)", told)


def test_what_may_change_is_on_the_page():
    page = (ROOT / "docs/commands.md").read_text()
    named = {pattern.split(".")[-1] for pattern in (*MAY_CHANGE, *OF_PROGRAMS)}
    assert [name for name in sorted(named) if not re.search(rf"`(\w+\.)*{name}`", page)] == []


LATE = """
from dataclasses import dataclass

from asked_programs import ask, user
from maporl import Ask, Protocol


@dataclass(frozen=True)
class Late(Protocol):
    def play(self, example, agents):
        more = example.question.startswith("7") and example.meta.get("rollout") == 0
        for turn in range(1 + more):
            yield [Ask(agents[0], [{"role": "user", "content": example.question}])]


def solve(question, base_url):
    if question.startswith("7"):
        raise RuntimeError("7 is out of order")
    return ask(base_url, "ann", [user(question)])
"""
OF_ONE = {
    "agents": {"ann": {}},
    "updates": 12,
    "warm_start": {"steps": 0},
    "ppo": BASE["ppo"] | {"kl_coef": 0.0},
    "training": BASE["training"] | {"per_device_train_batch_size": 2, "critic": "none"},
    "evaluation": {"questions": 0},
}
GROUPS = {
    "advantage": {"returns": "utterance", "baseline": "mean", "scale": "std", "key": ["prompt", "agent", "turn"]},
    "branching": {"group": 2, "common_seed": False},
}
STOPS = {
    "a group of one": (GROUPS | {"protocol": {"name": "late_parts:Late"}}, r"set (advantage)\.(singleton): (zero)", 1),
    "a program that fails": ({"protocol": {"name": "program", "run": "late_parts:solve", "on_failure": "stop"}},
                             r"set (protocol)\.(on_failure): (zero)", 2),
}  # fmt: skip


@pytest.mark.parametrize("stop", some(STOPS, 0))
def test_the_option_that_mends_a_stop_is_taken_by_the_run_that_it_stopped(config, stop, monkeypatch):
    sections, advice, status = STOPS[stop]
    Path("late_parts.py").write_text(LATE)
    monkeypatch.delitem(sys.modules, "late_parts", raising=False)
    file = config(**OF_ONE, **sections)
    told = maporl("train", file, "-q", status=status)
    assert (done := len(Path("run/metrics.jsonl").read_text().splitlines())) >= 1, "it stops later than at its start"
    resumed = re.search(r"to go on: maporl (train .+? --resume)", told)
    maporl(*shlex.split(resumed[1]), "-q", status=status)
    section, key, value = re.search(advice, told).groups()
    maporl(*shlex.split(resumed[1]), f"{section}.{key}={value}", "-q")
    assert Path("run/final/ann").is_dir() and done < len(Path("run/metrics.jsonl").read_text().splitlines()) == 12


def test_a_program_that_was_mended_goes_on_as_the_message_says(config, monkeypatch):
    """What it would decide has changed, so that somebody must say that this is meant."""
    Path("late_parts.py").write_text(LATE)
    monkeypatch.delitem(sys.modules, "late_parts", raising=False)
    sections, _, status = STOPS["a program that fails"]
    told = maporl("train", config(**OF_ONE, **sections), "-q", status=status)
    assert "mend it" in told
    again = [*shlex.split(re.search(r"to go on: maporl (train .+? --resume)", told)[1]), "-q"]
    # of another length: Python takes a module of the same length and second for the one that it has compiled
    Path("late_parts.py").write_text(LATE.replace('startswith("7"):', 'startswith("none"):'))
    monkeypatch.delitem(sys.modules, "late_parts")
    refused = maporl(*again, status=1)
    Path(re.search(r"To go on with the data as they are now: remove (\S+)", refused)[1]).unlink()
    maporl(*again)
    assert len(Path("run/metrics.jsonl").read_text().splitlines()) == 12


@pytest.mark.slow
def test_a_killed_run_says_what_evaluates_it_and_what_ends_it(config, ended):
    config()
    shutil.copytree(ended / "whole", "run")
    killed("run")
    told = maporl("eval", "run", "--json", status=1)
    evaluated = re.search(r"such as (\S+), because the run has not ended", told)[1]
    assert json.loads(maporl("eval", "run", "--json", "--checkpoint", evaluated).splitlines()[-1])["turns"]
    with pytest.raises(RunError, match=r"the run has not ended \(maporl train") as error:
        Team.from_pretrained("run")
    maporl(*shlex.split(re.search(r"maporl (train .+? --resume)", str(error.value))[1]), "-q")
    assert len(Team.from_pretrained("run").policies) == 2
    told = maporl("train", "run/config.yaml", "--resume", "evaluation.questions=5", "-q")
    again = re.search(r"by: maporl (eval \S+) KEY=VALUE", told)[1]
    assert json.loads(maporl(*again.split(), "evaluation.questions=5", "--json").splitlines()[-1])["questions"] == 5


# -- paths ---------------------------------------------------------------------------------------------------------------


def base_model(folder):
    section = TinySection(**TINY)
    tokenizer = build_tiny_tokenizer(section)
    build_tiny_model(section, tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize(
    "moved", [pytest.param(False, id="in place", marks=pytest.mark.slow), pytest.param(True, id="moved")]
)
def test_a_run_on_relative_paths_is_taken_up_from_another_folder(config, tmp_path, monkeypatch, moved):
    base_model("base")
    rows = [{"question": f"{n}+1=", "answer": str(n + 1)} for n in range(12)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"name": "gsm8k", "source": "rows.jsonl", "eval_source": "rows.jsonl", "instruction": "{question}"}
    maporl("train", config(task=task, agent_defaults={"model": "base"}, warm_start={"steps": 0}), *LORA, "-q")
    assert (
        json.loads(Path("run/final/ann/adapter_config.json").read_text())["base_model_name_or_path"]
        == f"{tmp_path}/base"
    )
    (tmp_path / "elsewhere").mkdir()
    run = shutil.move("run", "elsewhere/moved") if moved else "run"
    monkeypatch.chdir(tmp_path / "elsewhere")
    run = "moved" if moved else f"../{run}"
    assert len(Team.from_pretrained(run).policies) == 2
    assert json.loads(maporl("eval", run, "--json").splitlines()[-1])["turns"] == right(f"{run}/evaluation_after.json")
    maporl("train", f"{run}/config.yaml", "--resume", "--updates", "3", "-q")
    assert len(Path(run, "metrics.jsonl").read_text().splitlines()) == 3
    assert {path.name for path in Path.cwd().iterdir()} == ({"moved"} if moved else set()), "and nothing lands here"


@pytest.mark.slow
def test_a_run_made_in_python_goes_on_after_a_move_and_with_what_may_change(
    config, tmp_path, monkeypatch, tiny, caplog
):
    """Its own weights are in its folder, and found there by the command and by Python."""

    def trainer(folder, **options):
        model, tokenizer = tiny(**{key: TINY[key] for key in ("alphabet", "hidden_size", "layers")})
        team = Team.on_one_base(
            model, tokenizer, ["ann"], LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
        )
        sections = {key: options.pop(key) for key in ("advantage",) if key in options}
        return MultiAgentPPOTrainer(
            args(folder, save_strategy="steps", total_episodes=32, kl_coef=0.0, critic="none", **options), team, TASK, DEBATE, HELD_OUT,
            branching=BranchingSection(group=2), **sections,
        )  # fmt: skip

    config()
    groups = {"returns": "utterance", "baseline": "mean", "scale": "std", "key": ("prompt", "agent", "turn")}
    trainer("run", advantage=AdvantageConfig(**groups)).train()
    assert (
        yaml.safe_load(Path("run/config.yaml").read_text())["agents"]["ann"]["model"]
        == f"{tmp_path}/run/initial/ann/base"
    )
    shutil.rmtree("run/final")
    again = trainer("run", advantage=AdvantageConfig(**groups, singleton="zero"), eval_questions=3)
    again.train(resume_from_checkpoint=True)
    assert again.before.questions == again.after.questions == 3 and "evaluation.questions was" in caplog.text
    (tmp_path / "elsewhere").mkdir()
    shutil.move("run", "elsewhere/moved")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert len(Team.from_pretrained("moved").policies) == 1
    shutil.rmtree("moved/final")
    maporl("train", "moved/config.yaml", "--resume", "-q")
    assert Path("moved/final/ann/adapter_model.safetensors").is_file()
    other = trainer("moved", advantage=AdvantageConfig(**groups | {"scale": "none"}))
    with pytest.raises(
        CheckpointError, match=r"\(advantage.scale was 'std' and is 'none'\); .* weights, in moved/final"
    ):
        other.train(resume_from_checkpoint=True)
