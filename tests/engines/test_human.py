"""A person plays in place of an agent, in the terminal and on the page."""

import json
import threading
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from maporl.cli.common import load_team_config
from maporl.cli.main import app
from maporl.methods.tiny_versions import tiny_version
from maporl.report.read import read_run
from maporl.run import ResolvedRun
from maporl.runs.play import Game
from maporl.validation.load import from_dict, load

QUICK = "configs/ppo/quickstart.yaml"


@pytest.fixture
def settings(tmp_path):
    return [f"output_dir={tmp_path / 'run'}", "warm_start.steps=0"]


def play(*words, typed=""):
    return CliRunner().invoke(app, ["play", *words], input=typed)


def test_a_person_takes_a_seat_and_is_graded_and_recorded(tmp_path, settings):
    held_out = ResolvedRun(load(QUICK, [])).held_out
    right, wrong = held_out[0].answer, held_out[0].answer[1:] + "5"
    assert right != wrong
    result = play(QUICK, *settings, "--as", "bob", typed=f"\n{wrong}\n{right}\n")
    assert result.exit_code == 0, result.output
    assert "You are bob, beside ann: debate of 2 turns on toy_skills." in result.output
    assert "(type an answer, or Ctrl-D to leave)" in result.output
    assert "[bob, turn 1]" in result.output and held_out[0].question in result.output
    assert f"The right answer is {right}." in result.output
    assert f"turn 1, bob: {wrong}: wrong" in result.output and f"turn 2, bob: {right}: right" in result.output
    [line] = (tmp_path / "run-played/dialogues.jsonl").read_text().splitlines()
    record = json.loads(line)
    own = [u for u in record["utterances"] if u["agent"] == "bob"]
    assert [(u["text"], u["grade"]["correct"], u["trainable"]) for u in own] == [
        (wrong, False, False),
        (right, True, False),
    ]
    assert all("credit" in u["rewards"] and "score" in u["rewards"] for u in record["utterances"])
    others = [u for u in record["utterances"] if u["agent"] == "ann"]
    assert all(u["response_ids"] for u in others) and not any(u["response_ids"] for u in own)
    again = play(QUICK, *settings, "--as", "bob", "-n", "2", typed="1\n2\n3\n4\n")
    assert again.exit_code == 0, again.output
    records = read_run(tmp_path / "run-played").dialogues
    assert [one.when for one in records] == [1, 2, 3]
    assert len({one.dialogue.example.id for one in records}) == 3, "another question each time"
    assert CliRunner().invoke(app, ["report", str(tmp_path / "run-played")]).exit_code == 0


def test_who_leaves_the_table_loses_only_the_dialogue_in_progress(tmp_path, settings):
    result = play(QUICK, *settings, typed="1\n")
    assert result.exit_code == 0 and "You have left; a dialogue that had not ended is not recorded." in result.output
    assert not (tmp_path / "run-played/dialogues.jsonl").exists()


@pytest.mark.parametrize("words, message", [
    (["--as", "bo"], "--as: unknown 'bo'"),
    (["--checkpoint", "nowhere"], "nowhere: no folder for policy 'ann'"),
])  # fmt: skip
def test_what_cannot_be_played_is_said(tmp_path, settings, words, message):
    result = play(QUICK, *settings, *words)
    assert result.exit_code in (1, 2) and message in result.output, result.output


def test_an_output_that_holds_something_else_is_left_alone(tmp_path, settings):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("x")
    result = play(QUICK, *settings, "-o", str(tmp_path / "mine"))
    assert result.exit_code == 2 and "is not empty and holds no played dialogues" in result.output
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["notes.txt"]
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text("")
    result = play(QUICK, *settings, "-o", str(tmp_path / "run"))
    assert result.exit_code == 2 and "holds a training run, which is left as it is" in result.output


def test_a_runs_folder_brings_its_configuration_and_final_weights(tmp_path):
    (tmp_path / "run/final/ann").mkdir(parents=True)
    (tmp_path / "run/final/ann/config.json").write_text("{}")
    (tmp_path / "run/config.yaml").write_text(Path(QUICK).read_text())
    config, checkpoint = load_team_config([str(tmp_path / "run"), "updates=3"], None, None, None)
    assert config.updates == 3 and checkpoint == tmp_path / "run/final"
    result = play(str(tmp_path))
    assert result.exit_code == 1 and "has no config.yaml; give a run's output_dir" in result.output


@pytest.mark.parametrize("recipe", ["agentpo_hint", "spiral", "matpo"])  # collaboration, game, call_return
def test_a_seat_in_other_protocols(tmp_path, recipe):
    config = from_dict(tiny_version(recipe, str(tmp_path / "run")) | {"warm_start": {"steps": 0}})
    shown = []
    game = Game(config, None, None, tmp_path / "played", shown.append, lambda prompt: "1")
    [dialogue] = game.play(1)
    own = [u for u in dialogue.utterances if u.agent == game.person]
    assert own and all(u.text == "1" for u in own) and shown


def test_a_person_plays_on_the_page(tmp_path, settings):
    import httpx2

    from maporl.report.live import LivePage, PageSeat

    seat = PageSeat()
    config = load(QUICK, settings)
    game = Game(config, "ann", None, tmp_path / "played", seat.show, seat.read)
    page = LivePage(tmp_path / "played", 0, seat)
    threading.Thread(target=page.serve_forever, args=(0.02,), daemon=True).start()
    played = []
    thread = threading.Thread(target=lambda: played.extend(game.play(1)))
    thread.start()
    for turn in (1, 2):
        deadline = time.time() + 60
        while (asked := httpx2.get(f"{page.url}seat").json()).get("number") != turn:
            assert time.time() < deadline
            time.sleep(0.05)
        assert f"[ann, turn {turn}]" in asked["lines"][0]
        httpx2.post(f"{page.url}seat", json={"number": turn, "text": "5"})
    thread.join(60)
    assert [u.text for u in played[0].utterances if u.agent == "ann"] == ["5", "5"]
    assert httpx2.get(f"{page.url}data").json()["recorded"] == 1
    page.shutdown()
    page.server_close()
