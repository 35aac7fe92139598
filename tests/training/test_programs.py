"""Programs as protocols in the trainer's own steps, with tiny models that really answer."""

import json

import pytest
from asked_programs import ask, assistant, user
from tiny_run import config_of, end_of

from maporl.runs import train as run


def talk(question, base_url):
    """Each agent speaks twice, and bob is shown what ann says."""
    anns, bobs = [user(question)], []
    for _ in range(2):
        anns.append(assistant(ask(base_url, "ann", anns)))
        bobs += [user(anns[-1]["content"] + ";" + question)]
        bobs.append(assistant(ask(base_url, "bob", bobs)))
        anns.append(user(bobs[-1]["content"]))
    return bobs[-1]["content"]


def trained(folder, updates=2, **sections):
    program = {"name": "program", "run": "test_programs:talk"}
    reward = {"sources": {"label": 1.0}, "rules": ["last"]}
    config = config_of(folder, updates, {"protocol": program, "reward": reward, **sections}, learning_rate=0.0)
    return run.train(config, resume=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("program") / "run"
    trained(folder)
    return folder


def dialogues_of(folder):
    return [json.loads(line) for line in (folder / "dialogues.jsonl").read_text().splitlines()]


def test_both_policies_learn_from_what_they_said_token_by_token(folder):
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for agent in ("ann", "bob"):
        update = next(record for record in records if f"{agent}/val/first_ratio" in record)
        assert update[f"{agent}/val/first_ratio"] == pytest.approx(1.0, abs=1e-5)
        assert update[f"{agent}/continued_share"] == 1.0 and update["program/failed"] == 0.0
    assert {u["agent"] for d in dialogues_of(folder) for u in d["utterances"] if "credit" in u["rewards"]} == {
        "ann",
        "bob",
    }


def test_a_program_that_calls_in_its_own_order_is_repeatable(folder, tmp_path):
    trained(tmp_path / "again")
    assert end_of(tmp_path / "again", 2)[1:] == end_of(folder, 2)[1:]
