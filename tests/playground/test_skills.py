"""The quickstart: specialists who are right on half of the questions, and what the trainer pays them for listening."""

import json
import random
from itertools import combinations

import pytest
import torch
from safetensors.torch import load_file
from scripted_training import played, rows, scripted_trainer

from maporl.config import read_values
from maporl.config.schema import PupilSection, WarmStartSection
from maporl.engines.transcript import Transcript
from maporl.errors import ConfigError
from maporl.playground import warm_start
from maporl.playground.skills import Skills
from maporl.protocols import Chain, Collaboration, Debate
from maporl.runs.train import train
from maporl.tasks import build_task
from maporl.team.agents import Agent
from maporl.team.loading import load_tokenizers
from maporl.team.team import Team
from maporl.validation.load import from_dict, load
from maporl.validation.preflight import check_run

QUICK = "configs/ppo/quickstart.yaml"
SPECIALISTS = {"ann": PupilSection("next", gives_in=0.3), "bob": PupilSection("reversed", gives_in=0.3)}


def test_the_sign_says_which_skill_is_asked_for():
    task = Skills(skills=("next", "reversed", "previous"))
    answers = {e.question: e.answer for e in [*task, *Skills(skills=task.skills, split="eval")]}
    assert len(answers) == 3000
    assert [answers[q] for q in ("472+", "472*", "472-", "909+", "001*", "009-")] == [
        "583", "274", "361", "010", "100", "998",
    ]  # fmt: skip
    example = next(e for e in task if e.meta["skill"] == "next")
    assert (
        task.grade(example, f" {example.answer}").correct and task.grade(example, f"Answer: {example.answer}").correct
    )
    assert task.grade(example, example.id[:3]).correct is False
    assert task.grade(example, example.answer[1:]).answer is None, "two digits cannot be read"


@pytest.mark.parametrize("digits", [2, 3, 4, pytest.param(5, marks=pytest.mark.slow)])
def test_no_two_skills_ever_agree(digits):
    task = Skills(skills=("next", "reversed", "previous"), digits=digits)
    for example in task:
        own = [task.write_by_skill(example, skill) for skill in task.skills]
        assert all(a != b for a, b in combinations(own, 2)), example
        assert example.answer == own[task.skills.index(example.meta["skill"])]


def test_a_number_is_held_out_with_all_its_questions():
    train, held_out = Skills(), Skills(split="eval")
    assert (len(train), len(held_out)) == (1600, 400)
    assert not {e.id[:3] for e in train} & {e.id[:3] for e in held_out}
    assert [sum(e.meta["skill"] == s for e in held_out) for s in train.skills] == [200, 200]
    assert [e.id for e in Skills(seed=1)] != [e.id for e in train]


def test_a_wrong_answer_can_be_any_other_number():
    task, rng = Skills(digits=2), random.Random(0)
    example = next(iter(task))
    written = {task.write_answer(example, rng, right=False) for _ in range(3000)}
    assert written == {f"{n:02d}" for n in range(100)} - {example.answer}
    assert task.write_answer(example, rng, right=True) == example.answer


def taught(monkeypatch, tiny, pupils, protocol, steps=20, task=None, wrong=0.0):
    """The dialogues that a warm start trains on."""
    seen = []
    monkeypatch.setattr(warm_start, "supervised_rows", lambda policy, dialogues, *rest: seen.append(dialogues))
    names = ("ann", "bob", "cy")[: max(2, len(pupils))]
    team = Team([Agent(n, *tiny(alphabet="0123456789+*-;", hidden_size=32, layers=1)) for n in names])
    section = WarmStartSection(steps, 64, wrong=wrong, agents=pupils)
    warm_start.warm_start(team, task or Skills(), protocol, section, seed=0, quiet=True)
    assert len(seen) == steps * len(names)
    return [d for dialogues in seen[:: len(names)] for d in dialogues]


DEBATE = Debate(later="{others};{question}", quote="{text}", separator=";")


def test_specialists_are_right_on_half_of_the_questions_in_both_turns(monkeypatch, tiny):
    dialogues = taught(monkeypatch, tiny, SPECIALISTS, DEBATE)
    task = Skills()
    gave_in = {"ann": 0, "bob": 0}
    for d in dialogues:
        ann, bob, *later = d.utterances
        assert (ann.text, bob.text) == tuple(task.write_by_skill(d.example, s) for s in ("next", "reversed"))
        for u, own, other in zip(later, (ann, bob), (bob, ann), strict=True):
            assert u.text in (own.text, other.text)
            gave_in[u.agent] += u.text == other.text
        assert d.utterances[2].messages[-1]["content"] == f"{bob.text};{d.example.question}"
    # 1,280 dialogues at 0.3: four standard deviations are 0.051
    assert all(abs(n / len(dialogues) - 0.3) < 0.052 for n in gave_in.values()), gave_in
    right = [sum(u.text == d.example.answer for u in d.at(t)) / 2 for d in dialogues for t in (0, 1)]
    assert abs(sum(right) / len(right) - 0.5) < 0.02


def test_with_three_agents_one_of_the_two_others_is_followed(monkeypatch, tiny):
    pupils = {
        "ann": PupilSection("next", gives_in=0.5), "bob": PupilSection("reversed"), "cy": PupilSection("previous"),
    }  # fmt: skip
    skills = Skills(skills=("next", "reversed", "previous"))
    dialogues = taught(monkeypatch, tiny, pupils, DEBATE, task=skills)
    said = dict.fromkeys(skills.skills, 0)
    for d in dialogues:
        second = {u.agent: u.text for u in d.at(1)}
        assert second["bob"] == skills.write_by_skill(d.example, "reversed"), "only ann gives in"
        said[next(s for s in said if skills.write_by_skill(d.example, s) == second["ann"])] += 1
    assert abs(said["next"] / len(dialogues) - 0.5) < 0.056
    assert (
        abs(said["reversed"] / len(dialogues) - 0.25) < 0.049 and abs(said["previous"] / len(dialogues) - 0.25) < 0.049
    )


def test_agents_may_differ_without_skills_and_in_a_chain(monkeypatch, tiny):
    """Whoever is not named learns as ``warm_start.wrong`` says. In a chain the first speaker has heard nobody."""
    pupils = {"bob": PupilSection(gives_in=1.0)}
    dialogues = taught(monkeypatch, tiny, pupils, Chain(), wrong=0.5)
    assert all(bob.text == ann.text for d in dialogues for ann, bob in [d.utterances[:2]])
    assert abs(sum(d.utterances[0].text == d.example.answer for d in dialogues) / len(dialogues) - 0.5) < 0.056
    same = taught(monkeypatch, tiny, {"ann": PupilSection(gives_in=1.0, wrong=0.0)}, Chain(), wrong=1.0)
    assert all(ann.text == d.example.answer for d in same for ann in d.utterances if ann.agent == "ann")
    assert all(bob.text != d.example.answer for d in same for bob in d.utterances if bob.agent == "bob")


@pytest.mark.parametrize("mode", ["hint", "critic"])
def test_an_actor_may_be_taught_to_repeat_what_its_collaborator_says(monkeypatch, tiny, mode):
    """The warm start teaches the collaborator to say answers, although its words do not answer the question."""
    pupils = {"ann": PupilSection("next"), "bob": PupilSection("reversed", gives_in=0.5)}
    dialogues = taught(monkeypatch, tiny, pupils, Collaboration(mode=mode))
    followed = [d.utterances[-1].text == d.utterances[-2].text for d in dialogues]
    assert all(d.utterances[-2].agent == "ann" and d.utterances[-1].agent == "bob" for d in dialogues)
    assert abs(sum(followed) / len(followed) - 0.5) < 0.056


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"agents": {"bop": {"gives_in": 0.3}}}, r"warm_start\.agents: unknown 'bop'; did you mean 'bob'"),
        ({"agents": {"ann": {"skill": "nxt"}}}, r"warm_start\.agents\.ann\.skill: unknown 'nxt'; did you mean 'next'"),
        ({"agents": {"ann": {"skill": "previous"}}}, r"warm_start\.agents\.ann\.skill: unknown 'previous'"),
        ({"agents": {"ann": {"gives_in": 1.5}}}, r"warm_start\.agents\.ann\.gives_in"),
    ],
)
def test_a_pupil_that_cannot_be_taught_is_refused(changes, message):
    values = read_values(QUICK)
    with pytest.raises(ConfigError, match=message):
        from_dict(values | {"warm_start": {"steps": 1, **changes}})


def test_a_skill_of_a_task_without_skills_is_refused():
    values = read_values(QUICK) | {"task": {"name": "toy_times"}}
    with pytest.raises(ConfigError, match=r"ann\.skill: task 'toy_times' has no skills; remove it"):
        from_dict(values)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"skills": ["next", "next"]}, "expected each once"),
        ({"skills": []}, "expected each once"),
        ({"skills": ["sideways"]}, "skills"),
        ({"digits": 1}, "digits: expected at least 2, got 1"),
        ({"held_out": 1.0}, "held_out: expected less than 1, got 1.0"),
    ],
)
def test_options_that_make_no_task_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        build_task({"name": "toy_skills", **options}, "train", 0)


def test_the_trainer_pays_for_listening_to_the_right_agent(tmp_path):
    """The quickstart's own file, played, scored and assigned with scripted specialists who always give in."""
    values = read_values(QUICK) | {"output_dir": str(tmp_path / "run")}
    del values["warm_start"]
    values["training"] |= {"per_device_train_batch_size": 16}
    skills = {"ann": "next", "bob": "reversed"}
    task = Skills()

    def gives_in(request):
        if request.turn == 0:
            return task.write_by_skill(request.example, skills[request.ask.agent])
        (other,) = request.heard
        return other.text

    batch = played(scripted_trainer(values, gives_in))
    examples = {d.prompt: d.example for d in batch.dialogues}
    assert len(examples) == 16 and len(rows(batch)) == 64
    for d in batch.dialogues:
        assert {u.turn: sorted(v.rewards["score"] for v in d.at(u.turn)) for u in d.utterances} == {
            0: [0, 1],
            1: [0, 1],
        }
        for u in d.utterances:
            own = d.example.meta["skill"] == skills[u.agent]
            # a first answer: (own score + 0.3 x the mean of the second turn, 1/2) / 1.3; a second: its own score
            expected = ((1.15 if own else 0.15) / 1.3) if u.turn == 0 else (0.0 if own else 1.0)
            assert u.rewards["credit"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.slow
def test_the_quickstart_gains_everything_by_talking(tmp_path):
    train(load(QUICK, [f"output_dir={tmp_path / 'run'}"]), resume=False, quiet=True)
    (first, last), (opening, closing) = (
        json.loads((tmp_path / f"run/evaluation_{when}.json").read_text())["turns"] for when in ("before", "after")
    )
    for turn in (first, last, opening):
        assert 0.47 <= turn["team"]["value"] <= 0.53
    assert closing["team"]["value"] >= 0.9


REAL = "configs/ppo/smollm2_listen.yaml"


def stand_in(tiny, folder):
    """Overrides that give both agents one tiny model in place of the real one."""
    model, tokenizer = tiny(alphabet="0123456789+*;", hidden_size=32, layers=1)
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return [f"agents.{name}.model={folder}" for name in ("ann", "bob")]


def test_the_real_models_prompts_hold_the_contents_only(tiny, tmp_path):
    """A conversation begins with the model's first token, without which it learns a skill several times slower."""
    config = load(REAL, [*stand_in(tiny, tmp_path / "model"), f"output_dir={tmp_path / 'run'}"])
    assert {a.model for a in load(REAL).agents.values()} == {"HuggingFaceTB/SmolLM2-135M-Instruct"}
    check_run(config)
    tokenizer = load_tokenizers(config)["ann"]
    transcript = Transcript()
    transcript.add_messages([{"role": "user", "content": "47+"}], tokenizer, frozenset({tokenizer.eos_token_id}))
    transcript.add_completion(0, tokenizer.encode("58<eos>"), ended=True)
    transcript.add_messages([{"role": "user", "content": "74;47+"}], tokenizer, frozenset({tokenizer.eos_token_id}))
    assert tokenizer.decode(transcript.ids) == "<bos>47+58<eos>74;47+"


def test_the_real_models_configuration_trains_two_adapters_of_one_base(tiny, tmp_path):
    changes = ["updates=2", "warm_start.steps=2", "evaluation.questions=4", f"output_dir={tmp_path / 'run'}"]
    train(load(REAL, [*stand_in(tiny, tmp_path / "model"), *changes]), resume=False, quiet=True)
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) >= 2
    (first, last) = (
        json.loads((tmp_path / f"run/evaluation_{w}.json").read_text())["turns"] for w in ("before", "after")
    )
    assert len(first) == len(last) == 2 and first[0]["team"]["total"] == 4
    moved = [load_file(tmp_path / f"run/final/{name}/adapter_model.safetensors") for name in ("ann", "bob")]
    start = [load_file(tmp_path / f"run/initial/{name}/adapter_model.safetensors") for name in ("ann", "bob")]
    for before, after in zip(start, moved, strict=True):
        assert any(not torch.equal(before[key], after[key]) for key in before)
