"""Dialogues of a program are recorded without training, and another team learns from them."""

import json
import warnings

import pytest
from asked_programs import ask, assistant, user
from tiny_runs import config_of
from typer.testing import CliRunner

from maporl.cli.main import app
from maporl.config.parse import to_yaml
from maporl.engines.transcript import supervised_rows
from maporl.errors import ConfigError
from maporl.loops.sft import best_debates, spoken_by_team, train_supervised
from maporl.runs.play import Game
from maporl.runs.record import record
from maporl.team.team import Team


def talk(question, base_url):
    """Ann speaks twice in one conversation, and bob is shown the second answer."""
    messages = [user(question)]
    for _ in range(2):
        messages.append(assistant(ask(base_url, "ann", messages)))
        messages.append(user(question))
    return ask(base_url, "bob", [user(messages[-2]["content"] + ";" + question)])


def config(folder, **agents):
    program = {"protocol": {"name": "program", "run": "test_record:talk"}, "warm_start": {"steps": 0}}
    return config_of(folder, 1, program | ({"agents": agents} if agents else {}))


def lines_of(folder):
    return [json.loads(line) for line in (folder / "dialogues.jsonl").read_text().splitlines()]


def test_a_record_goes_on_where_it_ended_and_is_repeatable(tmp_path):
    settings = config(tmp_path / "run")
    played = [d for some in record(settings, tmp_path / "a", 3, samples=2) for d in some]
    assert len(played) == 6 and all("score" in d.answers()[0].rewards for d in played)
    assert [line["step"] for line in lines_of(tmp_path / "a")] == [1, 1, 2, 2, 3, 3]
    list(record(settings, tmp_path / "a", 1, samples=2))
    list(record(settings, tmp_path / "b", 4, samples=2))
    texts = [[[u["text"] for u in line["utterances"]] for line in lines_of(tmp_path / name)] for name in "ab"]
    assert texts[0] == texts[1], "other batches may round log-probabilities differently, and say the same"


@pytest.mark.parametrize(("recorded", "questions", "again"), [(8, 2, 0), (9, 3, 2), (10, 1, 1), (21, 1, 1), (0, 11, 1)])
def test_questions_that_are_played_again_are_told_beforehand(tmp_path, monkeypatch, recorded, questions, again):
    monkeypatch.setattr("maporl.playground.arithmetic.Arithmetic.__len__", lambda task: 10)
    settings = config(tmp_path / "run")
    if recorded:
        list(record(settings, tmp_path / "a", 1))
        line = lines_of(tmp_path / "a")[0] | {"step": recorded}
        (tmp_path / "a/dialogues.jsonl").write_text(json.dumps(line) + "\n")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        next(record(settings, tmp_path / "a", questions))
    told = [str(warning.message) for warning in caught if str(warning.message).startswith("record")]
    what = f"record: {again} of these {questions} questions are played again, because the split has 10"
    assert told == ([f"{what}; --samples plays each question several times at once"] if again else [])


def test_a_record_is_of_one_configuration(tmp_path):
    list(record(config(tmp_path / "run"), tmp_path / "a", 1))
    with pytest.raises(ConfigError, match="played with another configuration"):
        list(record(config(tmp_path / "other"), tmp_path / "a", 1))


def test_another_team_learns_what_was_recorded(tmp_path):
    list(record(config(tmp_path / "run"), tmp_path / "record", 4))
    shared = {"tiny": {"alphabet": "0123456789+=;", "hidden_size": 32, "layers": 1}, "policy": "both"}
    pupils = config(tmp_path / "pupils", ann=shared, bob=shared)
    dialogues = best_debates(tmp_path / "record" / "dialogues.jsonl", 1.0)
    team = Team.from_config(pupils)
    rows = supervised_rows(team.policies["both"], [spoken_by_team(d, team) for d in dialogues], {})
    assert len(rows) == 8, "one conversation of ann and one of bob in each dialogue"
    spoken = sum(len(u.response_ids) for d in dialogues for u in d.utterances)
    assert 0 < sum(map(sum, (mask for _, mask in rows))) <= spoken + 12, "ann's first answer is taught once"
    losses = train_supervised(pupils, team, dialogues, tmp_path / "taught", quiet=True)
    assert losses.keys() == {"both"} and (tmp_path / "taught" / "both" / "config.json").exists()


def test_a_person_may_take_the_seat_of_an_agent(tmp_path):
    shown, typed = [], iter(["7", "12"])
    game = Game(config(tmp_path / "run"), "ann", None, tmp_path / "played", shown.append, lambda prompt: next(typed))
    [dialogue] = game.play(1)
    ann = [u for u in dialogue.utterances if u.agent == "ann"]
    assert [u.text for u in ann] == ["7", "12"] and ann[1].after == 0 and all(u.tags["person"] for u in ann)
    assert dialogue.utterances[2].messages[0]["content"].startswith("12;") and dialogue.outcome["calls"] == 3


def test_the_command_records(tmp_path):
    file = tmp_path / "program.yaml"
    file.write_text(to_yaml(config(tmp_path / "run")))
    result = CliRunner().invoke(app, ["record", str(file), "--output", str(tmp_path / "record"), "-n", "2"])
    assert result.exit_code == 0, result.output
    assert "2 dialogues, mean score 0.000" in result.output and len(lines_of(tmp_path / "record")) == 2
