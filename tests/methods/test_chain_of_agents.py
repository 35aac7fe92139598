"""A team's dialogues as one text, from which one model learns to play all roles (Chain-of-Agents)."""

import json

import pytest
from scripted_training import recipe_values

from maporl import Arithmetic
from maporl.config.schema import TinySection
from maporl.errors import ConfigError
from maporl.loops.plan import stages_of
from maporl.loops.run import run_loop
from maporl.loops.run_stage import encoded
from maporl.loops.stages import sft_rows
from maporl.methods.chain_of_agents import Flatten
from maporl.tiny import build_tiny_tokenizer
from maporl.types import Call, Dialogue, Example, Result, Utterance
from maporl.validation.load import from_dict

TASK = Arithmetic(largest=9)
LETTERS = TinySection(alphabet="0123456789+=<>/abcdefghijklmnopqrstuvwxyz ", hidden_size=8, layers=1, heads=2)


def dialogue(*said, right=True, prompt=0, rollout=0):
    """A dialogue of (role, text, results of calls); the last utterance answers."""
    utterances = []
    for number, (role, text, results) in enumerate(said):
        calls = [Call(f"{number}.{i}", "search", {}, None, Result(found)) for i, found in enumerate(results)]
        last = number == len(said) - 1
        u = Utterance(number, role, role, 0, number, [], text, role=role, answers=last, calls=calls)
        u.rewards = {"credit": float(right)} if last else {}
        utterances.append(u)
    return Dialogue(Example("e", "2+2=", "4"), utterances, prompt=prompt, rollout=rollout)


class Student:
    """A policy, of which only the tokenizer is read."""

    tokenizer = build_tiny_tokenizer(LETTERS)


def decoded(ids):
    return Student.tokenizer.decode(ids)


def test_observations_bear_no_loss():
    """A thought of 5 tokens, a call of 3, an observation of 20 and an answer of 4: 12 bear loss, and the end (recipe
    chain_of_agents)."""
    played = dialogue(("thinker", "abcde", []), ("caller", "xyz", ["o" * 20]), ("solver", "4444", []))
    (row,) = Flatten(into="student", form="{text}", observation="{text}")([played])
    row = encoded(row, Student, None, TASK)
    assert sum(row.bears_loss) == 12 + 1 and len(row.completion_ids) == 32 + 1
    (columns,) = sft_rows([row])
    learned = [i for i, bears in zip(columns["input_ids"], columns["completion_mask"], strict=True) if bears]
    assert decoded(learned) == "abcdexyz4444<eos>"
    assert decoded(row.prompt_ids) == "2+2="


def test_the_text_keeps_the_order_of_speaking_and_every_word_once():
    played = dialogue(("planner", "plan", []), ("solver", "try", ["found"]), ("checker", "4", []))
    (row,) = Flatten(into="student")([played])
    row = encoded(row, Student, "be brief", TASK)
    text = decoded(row.completion_ids)
    said = "<planner>plan</planner><solver>try</solver><observation>found</observation><checker>4</checker>"
    assert text == f"{said}<eos>"
    assert decoded(row.prompt_ids) == "be brief2+2="
    silent = [i for i, bears in zip(row.completion_ids, row.bears_loss, strict=True) if not bears]
    assert decoded(silent) == "<observation>found</observation>"


def test_only_the_roles_of_a_stage_bear_loss():
    played = dialogue(("planner", "plan", []), ("checker", "4", []))
    (row,) = Flatten(into="student", form="{text}")([played], roles=["checker"])
    row = encoded(row, Student, None, TASK)
    assert decoded([i for i, b in zip(row.completion_ids, row.bears_loss, strict=True) if b]) == "4<eos>"


def test_wrong_and_short_dialogues_are_left_out():
    long, short = (("a", "x", []), ("b", "4", [])), (("b", "4", []),)
    played = [
        dialogue(*long), dialogue(*long, rollout=1), dialogue(*long, right=False, rollout=2), dialogue(*short, rollout=3),
        dialogue(*long, prompt=1),
    ]  # fmt: skip
    assert [row.place for row in Flatten(into="s")(played)] == [(0, 0, 0), (0, 1, 0), (1, 0, 0)]
    assert [row.place for row in Flatten(into="s", per_question=1)(played)] == [(0, 0, 0), (1, 0, 0)]
    assert len(Flatten(into="s", least=1)(played)) == 4


@pytest.mark.slow
def test_chain_of_agents_teaches_a_student_that_did_not_play(tmp_path):
    """The recipe with tiny models: the student's loss falls, and nobody else changes."""
    values = recipe_values("chain_of_agents", tmp_path, task={"name": "toy_sum", "largest": 3})
    values |= {"warm_start": {"steps": 150, "batch_size": 16, "learning_rate": 5e-3}}
    values["loop"]["stages"][0] |= {"epochs": 60, "learning_rate": 5e-3}
    lines = []
    run_loop(from_dict(values, "test"), resume=False, quiet=True, tell=lines.append)
    manifest = json.loads((tmp_path / "round-1/train-1/manifest.json").read_text())
    assert manifest["student"]["rows"] > 0 and manifest["student"]["loss"] < 2.0
    assert manifest["team"]["rows"] == 0
    rows = [json.loads(line) for line in (tmp_path / "round-1/train-1/student.rows.jsonl").read_text().splitlines()]
    assert all(row["example"] is None and row["completion_ids"] and row["bears_loss"] for row in rows)
    assert (tmp_path / "final/student").is_dir()
    before, after = ((tmp_path / part / "team/model.safetensors").read_bytes() for part in ("initial", "final"))
    assert before == after


@pytest.mark.parametrize(
    ("build", "words"),
    [
        ({"flatten": {"into": "nobody"}}, "flatten.into: 'nobody' names none of the policies that learn; name one of"),
        ({"flatten": {"into": "student", "form": "{other}"}}, "other"),
        ({"flatten": {"into": "student", "least": 0}}, "least"),
    ],
)
def test_what_cannot_be_flattened_is_refused(tmp_path, build, words):
    values = recipe_values("chain_of_agents", tmp_path)
    values["loop"]["stages"][0]["build"] = build
    with pytest.raises(ConfigError, match=words):
        stages_of(from_dict(values, "test"))
