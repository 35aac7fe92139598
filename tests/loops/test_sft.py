"""Supervised training before PPO, and a learned verifier in this process."""

import dataclasses
import json
import math
import shutil
import threading

import pytest
import torch
from one_policy import saved_verifier
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from maporl import Agent, Arithmetic, Team
from maporl.cli.main import app
from maporl.config.schema import RewardSection
from maporl.errors import ConfigError
from maporl.loops.sft import best_debates, solutions, train_supervised
from maporl.loops.sft_options import SFTOptions
from maporl.rewards.base import RewardFailure
from maporl.rewards.build import build_sources
from maporl.rewards.scoring import fill_in
from maporl.runs import train as run
from maporl.storage.run_folder import RunExists
from maporl.types import Dialogue, Example, Grade, Utterance, to_record
from maporl.validation.load import from_dict
from maporl.verifier.options import TrainOptions
from maporl.verifier.section import VerifierSection
from maporl.verifier.source import checked
from maporl.verifier.train import train_verifier
from trl_ext.files.lock import FolderInUse, RunLock
from trl_ext.learning.policy import Policy

TASK = Arithmetic(largest=4)
CONFIG = {
    "output_dir": "unused", "task": {"name": "toy_sum", "largest": 4},
    "agents": {"ann": {"tiny": {"hidden_size": 32, "layers": 1, "heads": 2}}}, "training": {"use_cpu": True},
}  # fmt: skip


def utterance(number, turn, score, text="4"):
    return Utterance(
        number, "ann", "ann", turn, turn, [{"role": "user", "content": "2+2="}], text, rewards={"score": score}
    )


# -- supervised ---------------------------------------------------------------------------------------------------


def test_a_team_learns_its_tasks_solutions_and_loads_again(tiny, tmp_path):
    model, tokenizer = tiny()
    team = Team([Agent("ann", model, tokenizer)])
    dialogues = solutions(team, TASK, "{question}")
    assert [d.utterances[0].text for d in dialogues[:3]] == [TASK[i].answer for i in range(3)]

    def loss(epochs):
        options = SFTOptions(epochs=epochs, learning_rate=3e-3)
        return train_supervised(from_dict(CONFIG), team, dialogues, tmp_path / str(epochs), options, quiet=True)["ann"]

    assert loss(1) > loss(20)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "20/ann")
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))


def test_each_adapter_of_a_shared_base_learns_from_its_own_words_only(tiny, tmp_path):
    model, tokenizer = tiny()
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    shared = get_peft_model(model, lora, adapter_name="ann")
    shared.add_adapter("bob", lora)
    team = Team([Agent(n, shared, tokenizer, adapter=n, trainable=n == "ann") for n in ("ann", "bob")])
    before = {n: p.clone() for n, p in shared.named_parameters()}
    train_supervised(from_dict(CONFIG), team, solutions(team, TASK, "{question}"), tmp_path / "out", quiet=True)
    changed = {n for n, p in shared.named_parameters() if not torch.equal(p, before[n])}
    assert changed and all(".ann." in name for name in changed)
    base, _ = tiny()
    assert isinstance(PeftModel.from_pretrained(base, tmp_path / "out" / "ann"), PeftModel)


def test_the_best_debates_are_those_whose_final_answers_score_best(tmp_path):
    file = tmp_path / "dialogues.jsonl"
    dialogues = [
        Dialogue(Example(str(i), "2+2=", "4"), [utterance(0, 0, 1 - s), utterance(1, 1, s)])
        for i, s in enumerate((0.2, 0.9, 0.5, 0.1))
    ]
    file.write_text("".join(json.dumps({"step": 3, **to_record(d)}) + "\n" for d in dialogues))
    assert [d.example.id for d in best_debates(file, 0.5)] == ["1", "2"]
    assert [d.example.id for d in best_debates(file, 0.1)] == ["1"]
    silent = Dialogue(Example("silent", "2+2=", "4"), [dataclasses.replace(utterance(0, 0, 1.0), answers=False)])
    file.write_text("".join(json.dumps({"step": 3, **to_record(d)}) + "\n" for d in [silent, *dialogues]))
    assert [d.example.id for d in best_debates(file, 1.0)] == ["1", "2", "0", "3", "silent"]
    half = dataclasses.replace(silent, example=Example("h", "2+2=\ud83d", "4"))
    file.write_text(json.dumps({"step": 3, **to_record(half)}) + "\n")
    assert best_debates(file, 1.0)[0].example.question == "2+2=\ufffd", "no tokenizer reads half of a character"
    with pytest.raises(ConfigError, match="expected a share above 0 and at most 1, got 0"):
        best_debates(file, 0)
    with pytest.raises(ConfigError, match="no such file"):
        best_debates(tmp_path / "none.jsonl", 0.5)


def test_of_equally_good_debates_those_on_different_questions_come_first(tmp_path):
    file = tmp_path / "dialogues.jsonl"
    lines = []
    for step, scores in ((1, (1.0, 1.0)), (2, (0.0, 1.0)), (3, (1.0, 1.0))):
        for rollout, score in enumerate(scores):
            example = Example(f"{step}.{rollout}", "2+2=", "4")
            dialogue = Dialogue(example, [utterance(0, 0, score)], prompt=step, rollout=rollout)
            lines.append(json.dumps({"step": step, **to_record(dialogue)}) + "\n")
    file.write_text("".join(lines))
    assert [d.example.id for d in best_debates(file, 1.0)] == ["1.0", "2.1", "3.0", "1.1", "3.1", "2.0"]


@pytest.mark.slow
def test_sft_that_is_killed_while_it_saves_leaves_no_half_policy_and_can_be_run_again(tiny, tmp_path, monkeypatch):
    model, tokenizer = tiny()
    team = Team([Agent("ann", model, tokenizer)])
    folder, options = tmp_path / "out", SFTOptions(epochs=1)

    def learn():
        four = solutions(team, TASK, "{question}", 4)
        return train_supervised(from_dict(CONFIG), team, four, folder, options, quiet=True)

    def killed(policy, partial):
        save(policy, partial)
        shutil.copytree(partial, tmp_path / "left")  # as SIGKILL leaves it
        raise KeyboardInterrupt

    save = Policy.save
    monkeypatch.setattr(Policy, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        learn()
    assert not (folder / "ann").exists()
    shutil.copytree(tmp_path / "left", folder / ".partial-ann")
    monkeypatch.setattr(Policy, "save", save)
    learn()
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "ann"]
    with pytest.raises(RunExists, match="exists and is not empty; nothing was overwritten"):
        learn()


@pytest.mark.parametrize("what", ["sft", "verifier"])
def test_two_that_train_into_one_folder_are_told_apart_before_training(tiny, tmp_path, what):
    folder, refused = tmp_path / "out", []
    locked = folder if what == "sft" else tmp_path / ".partial-training-out"

    def other():
        with pytest.raises(FolderInUse, match="writes here") as told:
            if what == "sft":
                train_supervised(from_dict(CONFIG), Team([Agent("ann", *tiny())]), [], folder)
            else:
                train_verifier(tmp_path / "data.jsonl", folder, TrainOptions("none"))
        refused.append(told)

    with RunLock(locked):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert len(refused) == 1


def test_the_sft_command_saves_policies_and_overwrites_nothing(tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text(json.dumps(CONFIG))  # JSON is YAML
    command = ["sft", str(config), "--output", str(tmp_path / "out"), "--limit", "4"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert "ann: 4 dialogues, mean loss" in done.output and (tmp_path / "out" / "ann" / "model.safetensors").exists()
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 1 and "nothing was overwritten" in again.output


# -- the verifier -------------------------------------------------------------------------------------------------


@pytest.fixture
def verifier(tiny, tmp_path):
    """A folder with a random sequence classifier of ``labels`` outputs."""

    def build(labels=1):
        _, tokenizer = tiny(alphabet="0123456789+=Answer: ", context=256)
        return saved_verifier(tokenizer, tmp_path / f"verifier-{labels}", labels)

    return build


def test_a_verifier_scores_question_and_answer_between_0_and_1_whatever_the_batch(verifier):
    folder = verifier()
    dialogues = [
        Dialogue(Example("e", f"{i}+2=", "4"), [utterance(0, 0, 0.0, t), utterance(1, 1, 0.0, "77")])
        for i, t in enumerate("4567")
    ]
    scores = []
    for batch in (1, 8):
        for d in dialogues:
            for u in d.utterances:
                u.rewards = {}
        section = RewardSection(sources={"verifier": 1.0}, verifier=VerifierSection(folder, batch))
        fill_in(dialogues, TASK, build_sources(section, ["verifier"]))
        scores.append([u.rewards["verifier"] for d in dialogues for u in d.utterances])
    assert scores[0] == pytest.approx(scores[1], abs=1e-5) and len(set(scores[0])) == 8
    assert all(0 < s < 1 for s in scores[0])


@pytest.mark.parametrize("bad", [[1.5, 0.5], [-0.1, 0.5], [math.nan, 0.5]])
def test_scores_outside_0_and_1_are_an_error_naming_the_verifier_and_the_answer(bad):
    dialogue = Dialogue(Example("e", "q", "a"), [utterance(0, 0, 0.0), utterance(1, 1, 0.0)])
    asked = [(dialogue, u) for u in dialogue.utterances]
    with pytest.raises(RewardFailure, match=r"verifier here: expected scores in \[0, 1\], got .* agent 'ann', turn 1"):
        checked(bad, asked, "here")
    with pytest.raises(RewardFailure, match="verifier here: expected 2 scores, got 1"):
        checked(bad[:1], asked, "here")


def test_a_verifier_that_cannot_serve_is_named_before_anything_runs(verifier):
    with pytest.raises(ConfigError, match=r"reward\.verifier\.model: .* has 3 outputs"):
        build_sources(RewardSection(verifier=VerifierSection(verifier(3))), ["verifier"])
    with pytest.raises(ConfigError, match=r"reward\.verifier\.model: '/none' could not be loaded"):
        build_sources(RewardSection(verifier=VerifierSection("/none")), ["verifier"])
    for changes in ({"reward": {"sources": {"verifier": 1}}}, {"protocol": {"name": "debate", "feedback": "verifier"}}):
        with pytest.raises(ConfigError, match=r"reward\.verifier: a verifier scores or gives feedback here"):
            from_dict({**CONFIG, **changes})


def graded(number, text, correct):
    return Utterance(number, "ann", "ann", 0, 0, [], text, grade=Grade(text, correct, ""))


def test_a_verifier_that_keeps_learning_learns_from_the_first_right_and_wrong_answer_of_each_question(verifier):
    (source,) = build_sources(learning(verifier(), every=2), ["verifier"]).values()
    dialogues = [
        Dialogue(Example("a", "2+2=", "4"), [graded(0, "4", True), graded(1, "7", False), graded(2, "8", False)]),
        Dialogue(Example("a", "2+2=", "4"), [graded(0, "4", True)]),
        Dialogue(Example("b", "1+1=", "2"), [graded(0, "2", True), graded(1, "", None)]),
    ]

    def apart():
        ((right, wrong, _), *_) = source(dialogues[:1], TASK)
        return right - wrong

    before = apart()
    assert source.after_update(1, dialogues, TASK) == {} and apart() == before
    logged = source.after_update(2, dialogues, TASK)
    assert logged["verifier/pairs"] == 2.0 and logged["verifier/pair_loss"] == pytest.approx(math.log(2), abs=0.2)
    for update in range(3, 43):
        source.after_update(update, dialogues, TASK)
    assert apart() > before + 0.3


def learning(folder, every):
    section = VerifierSection(folder, learn_every=every, learning_rate=1e-3)
    return RewardSection(sources={"verifier": 1.0}, verifier=section)


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_the_verifier_that_had_learned(verifier, tmp_path):
    def config(name):
        training = CONFIG["training"] | {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "save_steps": 3}  # fmt: skip
        section = {"model": verifier(), "learn_every": 2, "learning_rate": 1e-3}
        return from_dict({
            **CONFIG, "output_dir": str(tmp_path / name), "updates": 6, "training": training,
            "reward": {"sources": {"verifier": 1.0}, "verifier": section}, "evaluation": {"questions": 0},
            "warm_start": {"steps": 60}, "ppo": {"response_length": 2, "temperature": 1.5},
        })  # fmt: skip

    run.train(config("whole"), resume=False, quiet=True)
    run.train(config("parts"), resume=False, quiet=True)
    for newer in ("checkpoint-6", "final"):
        shutil.rmtree(tmp_path / "parts" / newer)
    run.train(config("parts"), resume=True, quiet=True)
    learned = "checkpoint-6/others/verifier/model.safetensors"
    whole, parts = (load_file(tmp_path / name / learned) for name in ("whole", "parts"))
    started = load_file(f"{verifier()}/model.safetensors")
    assert all(torch.equal(whole[key], parts[key]) for key in whole)
    assert any(not torch.equal(whole[key], started[key]) for key in whole)


def test_only_a_verifier_in_this_process_can_learn():
    for section in ({"urls": ["http://h"]}, {"model": "m", "urls": ["http://h"]}):
        with pytest.raises(ConfigError, match="learn_every: only a verifier in this process can learn"):
            reward = {"sources": {"verifier": 1}, "verifier": {**section, "learn_every": 1}}
            from_dict({**CONFIG, "reward": reward})
