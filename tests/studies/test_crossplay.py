"""Cross-play: the command on real runs, what it refuses, and the report."""

import json
import re
import shutil

import pytest
import torch
import yaml
from hostile_runs import data_of
from tiny_runs import (
    SPLIT,
    TINY,
    TWO,
    invoke,
    played,
    runs,  # noqa: F401  # fixtures
    trained,
)

from maporl.config.schema import TinySection
from maporl.errors import ConfigError, RunError
from maporl.report.findings import said
from maporl.report.page import write_report
from maporl.report.read import read_run
from maporl.report.story import story
from maporl.runs.build import build_player, load_checkpoint_weights
from maporl.storage.run_folder import weights_of
from maporl.studies.crossplay.entrants import read_entrants, seats_of, shared_questions
from maporl.studies.crossplay.play import AgentPool, play_crossplay
from maporl.studies.crossplay.result import final_right
from maporl.tasks import build_task
from maporl.team.saved import read_team
from maporl.tiny import build_tiny_model, build_tiny_tokenizer
from trl_ext.ppo.options import GREEDY


@pytest.mark.slow
def test_the_command_plays_draws_and_reports_and_its_diagonal_is_what_eval_says(runs, tmp_path):
    copies = [shutil.copytree(run, tmp_path / run.name) for run in runs]
    done = invoke("crossplay", *copies, "--json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert (result["runs"], result["seats"], len(result["teams"])) == (["seed1", "seed2", "seed3"], ["ann", "bob"], 9)
    assert result["left_out"] == 0 and result["questions"] == 12
    for number, run in enumerate(copies):
        alone = json.loads(invoke("eval", run, "--json").stdout)
        own = next(team for team in result["teams"] if team["runs"] == [number] * 2)
        final = alone["turns"][-1]["team"]
        assert own["final"] == {key: final[key] for key in ("value", "low", "high")} == result["matrix"][number][number]
        assert sum(own["right"]) == final["count"]
        assert json.loads((run / "crossplay.json").read_text()) == result
    assert len({tuple(team["right"]) for team in result["teams"]}) > 1, "teams differ, or this test sees nothing"
    page = data_of(write_report([copies[0]]).read_text())
    for shown, cells in zip(page["runs"][0]["crossplay"]["cells"], result["matrix"], strict=True):
        assert [cell["value"] for cell in shown] == pytest.approx([cell["value"] for cell in cells], abs=1e-5)
    table = invoke("crossplay", *copies, "--set", "evaluation.questions=4", "--output", tmp_path / "out")
    assert table.exit_code == 0 and "4 questions" in table.output, table.output
    assert (tmp_path / "out/crossplay.json").exists()


def test_a_mixed_team_is_the_agents_of_both_runs(runs):
    """ann of the first run and bob of the second, put together by hand, say the same as in cross-play."""
    entrants = read_entrants([str(run) for run in runs[:2]])
    play = play_crossplay(entrants, 64, quiet=True)
    player = build_player(entrants[0].config, runs[0] / "final")
    load_checkpoint_weights({"bob": player.team.policies["bob"]}, runs[1] / "final")
    dialogues = player.play_evaluation(build_task(SPLIT, "eval", 0), 12, GREEDY, 1)
    mixed = next(team for team in play.teams if team.runs == (0, 1))
    assert mixed.right == tuple(final_right(d) for d in dialogues)


@pytest.mark.slow
def test_sampled_answers_have_the_random_numbers_of_an_evaluation_with_the_first_runs_seed(runs, tmp_path):
    out = tmp_path / "out"
    done = invoke("crossplay", *runs[:2], "evaluation.temperature=1.5", "--json", "-o", out)
    result = json.loads(done.stdout)
    greedy = play_crossplay(read_entrants([str(run) for run in runs[:2]]), 64, quiet=True)
    assert (result["temperature"], result["seed"]) == (1.5, 1)
    alone = json.loads(invoke("eval", runs[1], "evaluation.temperature=1.5", "seed=1", "--json").stdout)
    own = alone["turns"][-1]["team"]
    assert result["teams"][3]["final"] == {key: own[key] for key in ("value", "low", "high")}
    assert [team["right"] for team in result["teams"]] != [list(team.right) for team in greedy.teams]


def test_only_questions_are_asked_that_no_run_was_trained_on(tmp_path):
    drawn = {"name": "toy_sum", "largest": 4, "held_out": 0.5}
    paths = [trained(tmp_path / f"own{n}", n, task=drawn, warm_start={"steps": 2}) for n in (4, 5)]
    entrants = read_entrants([str(path) for path in paths])
    task, numbers, left_out = shared_questions(entrants)
    asked = [task[n].id for n in numbers]
    assert len(asked) + left_out == 12 and 0 < len(asked) < 12
    for seed in (4, 5):
        assert not {e.id for e in build_task(drawn, "train", seed)} & set(asked)
    play = play_crossplay(entrants, 64, quiet=True)
    assert (play.questions, play.left_out) == (len(asked), left_out)


@pytest.mark.slow
def test_adapters_of_all_runs_share_one_base(tmp_path):
    torch.manual_seed(0)
    section = TinySection(alphabet="0123456789+=;", hidden_size=32, layers=1, heads=2)
    tokenizer = build_tiny_tokenizer(section)
    build_tiny_model(section, tokenizer).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    lora = {"model": str(tmp_path / "base"), "lora": {"r": 4}}
    agents = {"ann": lora, "bob": lora, "cat": {"model": str(tmp_path / "base"), "trainable": False}}
    paths = [trained(tmp_path / f"run{n}", n, agents=agents) for n in (1, 2)]
    entrants = read_entrants([str(path) for path in paths])
    assert seats_of(entrants) == ("ann", "bob"), "cat is frozen, and the same in both runs"
    pool = AgentPool(entrants, torch.device("cpu"))
    player = pool.player({"ann": 0, "bob": 1, "cat": 0}, None)
    ann, bob, cat = (player.team.policies_of[name][0] for name in ("ann", "bob", "cat"))
    assert ann.model is bob.model and ann.adapter != bob.adapter and cat.model is not ann.model
    play = play_crossplay(entrants, 64, quiet=True)
    for number, path in enumerate(paths):
        final = json.loads((path / "evaluation_after.json").read_text())["turns"][-1]["team"]
        assert play.cell(number, number).value == final["value"]
    pool.keep([])
    assert pool.loaded == {} and pool._bases == {}


@pytest.mark.slow
def test_agents_that_share_weights_come_with_weights_of_their_own_run(tmp_path):
    ann, bob = ({"tiny": TINY["agents"][name]["tiny"] | {"context": 512}} for name in ("ann", "bob"))
    both = ann | {"policy": "both", "policy_per": "first_and_rest"}
    agents = {"ann": both, "bob": both, "cat": bob}
    paths = [trained(tmp_path / f"run{n}", n, agents=agents, restate="base_model") for n in (1, 2)]
    play = play_crossplay(read_entrants([str(path) for path in paths]), 7, quiet=True)
    assert len(play.teams) == 8 and play.seats == ("ann", "bob", "cat")
    for number, path in enumerate(paths):
        alone = json.loads(invoke("eval", path, "--json").stdout)
        assert play.cell(number, number).value == alone["turns"][-1]["team"]["value"]


@pytest.mark.slow
@pytest.mark.parametrize("restate", [pytest.param("off", marks=pytest.mark.slow), "base_model"])
def test_a_fully_trained_model_restates_with_the_weights_that_it_started_from(restate, tmp_path):
    section = TinySection(**TINY["agents"]["ann"]["tiny"] | {"context": 512})
    tokenizer = build_tiny_tokenizer(section)
    base = build_tiny_model(section, tokenizer)
    base.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    run = trained(tmp_path / "run", 1, agents={"ann": {"model": str(tmp_path / "base")}}, restate=restate)
    config, folder = read_team(run)
    player = build_player(config, weights_of(folder))
    spoken, start = player.team.policies["ann"].model, dict(base.named_parameters())
    assert any(not torch.equal(value, start[name]) for name, value in spoken.named_parameters())
    if restate == "base_model":
        with player.untrained.model_of("ann") as model:
            assert all(torch.equal(value, start[name]) for name, value in model.named_parameters())
    else:
        assert config.agents["ann"].model == str(run / "final/ann"), "the model that it started from is not needed"


def test_a_task_may_have_a_seed_of_its_own():
    one, two = (build_task({"name": "toy_sum", "seed": 7}, "eval", seed) for seed in (1, 2))
    assert one == two == build_task({"name": "toy_sum"}, "eval", 7) != build_task({"name": "toy_sum"}, "eval", 1)


# -- what is refused ----------------------------------------------------------------------------------------------


def changed(run, folder, **changes):
    """A copy of a run whose configuration is another."""
    shutil.copytree(run, folder)
    values = yaml.safe_load((folder / "config.yaml").read_text())
    (folder / "config.yaml").write_text(yaml.safe_dump(values | changes))
    return folder


def test_runs_that_cannot_play_together_are_refused_before_a_model_loads(runs, tmp_path, monkeypatch):
    monkeypatch.setattr("maporl.studies.crossplay.play.load_agents", None)
    agents = yaml.safe_load((runs[0] / "config.yaml").read_text())["agents"]
    short = TINY["protocol"]
    frozen = {name: section | {"trainable": name == "ann"} for name, section in agents.items()}
    others = {
        "task": ({"task": {"name": "toy_times"}}, "other: task is {'name': 'toy_times'}, but in seed1 it is .*of one task and one protocol"),
        "protocol": ({"protocol": short | {"turns": 3}}, "other: protocol is .*'turns': 3.*of one task and one protocol"),
        "names": ({"agents": {"ann": agents["ann"], "eve": agents["bob"]}}, r"the list of agents is \['ann', 'eve'\], but in seed1 it is \['ann', 'bob'\]"),
        "length": ({"ppo": {"response_length": 6}}, "ppo.response_length is 6, but in seed1 it is 4; give ppo.response_length=VALUE after the runs"),
        "tools": ({"tools": {"calculator": {"use": "calculator"}}}, r"other: tools\.calculator is ToolSection\(use='calculator'.*but in seed1 it is None"),
        "limits": ({"agents": agents | {"bob": agents["bob"] | {"limits": {"calls": 2}}}}, r"other: agents\.bob\.limits is CallLimits\(calls=2"),
        "sampling": ({"agents": agents | {"bob": agents["bob"] | {"sampling": {"temperature": 0.5}}}}, r"other: agents\.bob\.sampling is .*temperature=0.5.*but in seed1 it is None; give agents\.bob\.sampling=VALUE"),
        "judged": ({"evaluation": {"questions": 12, "sampling": {"ann": {"temperature": 0.5}}}}, r"other: evaluation\.sampling\.ann is .*temperature=0.5"),
        "questions": ({"evaluation": {"questions": 9}}, "evaluation.questions is 9, but in seed1 it is 12; give"),
    }  # fmt: skip
    for name, (changes, message) in others.items():
        other = changed(runs[1], tmp_path / name / "other", **changes)
        if name == "names":
            (other / "final/bob").rename(other / "final/eve")
        with pytest.raises(ConfigError, match=message):
            read_entrants([str(runs[0]), str(other)])
    one = [changed(run, tmp_path / f"half{n}", agents=frozen) for n, run in enumerate(runs[:2])]
    alone = [changed(run, tmp_path / f"alone{n}", agents={"ann": agents["ann"]}) for n, run in enumerate(runs[:2])]
    with pytest.raises(ConfigError, match="needs teams of two agents or more, but in these runs 'ann' plays alone"):
        read_entrants(list(map(str, alone)))
    assert seats_of(read_entrants(list(map(str, one)))) == ("ann", "bob"), "frozen, with a random start of each run"
    for path in one:
        shutil.rmtree(path / "initial")
    missing = r"agents\.bob is a frozen tiny model, and .*initial/bob with its weights is missing"
    with pytest.raises(RunError, match=missing):
        read_entrants(list(map(str, one)))


def test_one_trained_agent_beside_a_frozen_model_cannot_be_crossed(runs, tmp_path, monkeypatch):
    monkeypatch.setattr("maporl.studies.crossplay.play.load_agents", None)
    agents = yaml.safe_load((runs[0] / "config.yaml").read_text())["agents"]
    bob = agents["bob"] | {"tiny": None, "model": str(runs[0] / "final/bob"), "trainable": False}
    beside = {"ann": agents["ann"], "bob": bob}
    paths = [changed(run, tmp_path / f"half{n}", agents=beside) for n, run in enumerate(runs[:2])]
    for path in paths:
        shutil.rmtree(path / "final/bob")
    with pytest.raises(ConfigError, match=r"two agents or more that differ between the runs, got \['ann'\]"):
        read_entrants(list(map(str, paths)))


def test_what_is_no_finished_run_is_refused(runs, tmp_path):
    (tmp_path / "empty").mkdir()
    unfinished = changed(runs[1], tmp_path / "unfinished")
    shutil.rmtree(unfinished / "final")
    again = tmp_path / "again"
    again.symlink_to(runs[0])
    for words, status, message in (
        ([], 2, ""),
        ([runs[0]], 2, "expected at least two runs, got "),
        ([runs[0], again], 2, f"again: is the same run as {runs[0]}; give every run once"),
        ([runs[0], tmp_path / "empty"], 1, "has no config.yaml; give a run's output_dir"),
        ([runs[0], tmp_path / "nowhere"], 1, "neither a folder here nor a team on the hub"),
        ([runs[0], unfinished], 1, "has no folder for policy 'ann'; the run has not ended"),
        ([*runs[:2], "evaluation.questions=0"], 2, "evaluation.questions is 0; give evaluation.questions=NUMBER after the runs"),
        ([*runs[:2], "evaluation.question=0"], 2, "unknown key 'evaluation.question'"),
    ):  # fmt: skip
        done = invoke("crossplay", *words)
        assert done.exit_code == status and message in done.output, (words, done.output)


def test_runs_without_a_question_that_both_held_out_are_refused(runs, tmp_path):
    drawn = [changed(run, tmp_path / f"own{n}", task={"name": "toy_sum", "largest": 2}, seed=2 * n) for n, run in enumerate(runs[:2])]  # fmt: skip
    entrants = read_entrants(list(map(str, drawn)))
    message = r"all 2 held-out questions of own0 were training questions of another run.*task\.seed"
    with pytest.raises(ConfigError, match=message):
        shared_questions(entrants)


# -- the report ---------------------------------------------------------------------------------------------------


def test_a_report_shows_the_cross_play_that_names_its_run(runs, tmp_path):
    run = tmp_path / "one"
    shutil.copytree(runs[0], run)
    assert read_run(run).crossplay is None
    play = played(TWO)
    (run / "crossplay.json").write_text(json.dumps(play.to_json()))
    assert read_run(run).crossplay == play
    assert story(read_run(run))[-1] == {"title": "Do the agents work with others?", "text": said("others", play)}
    run = run.rename(tmp_path / "renamed")
    assert read_run(run).crossplay is None
    (run / "crossplay.json").write_text('{"runs": ["renamed"]}')
    assert read_run(run).crossplay is None
    assert re.search(r"crossplay\.json: is not a cross-play \(KeyError.* It is left out\.", read_run(run).damaged[0])
