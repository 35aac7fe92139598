"""The resolved run: its parts, which everything that reads a run reads."""

import pytest

import maporl.run
from maporl import Chain, Debate
from maporl.decoding import Sampling
from maporl.errors import ConfigError
from maporl.run import ResolvedRun
from maporl.validation.load import from_dict


def config(**changes):
    values = {
        "output_dir": "run",
        "task": {"name": "toy_sum", "largest": 9},
        "agent_defaults": {"tiny": {"alphabet": "0123456789+=;", "hidden_size": 32, "layers": 1}},
        "agents": {"ann": {"role": "solver"}, "bob": {}, "eve": {"trainable": False}},
        "protocol": {"name": "debate", "turns": 2, "agents": ["bob", "ann"], "summariser": "eve"},
    }
    return from_dict(values | changes, "here")


def test_parts_are_what_the_sections_say():
    run = ResolvedRun(
        config(protocol={"name": "chain", "agents": ["bob", "ann"], "sampling": {"solver": {"top_k": 3}}})
    )
    assert run.agents == ("ann", "bob", "eve") and isinstance(run.protocol, Chain)
    assert run.speakers == ("bob", "ann") and run.learners == {"bob": None, "ann": "solver"}
    assert run.sampling.roles == {"solver": Sampling(top_k=3)}
    assert (len(run.task), len(run.held_out)) == (80, 20) and run.splits == [run.task, run.held_out]
    assert run.curriculum == []
    run.open_tools().world.close()


def test_helpers_play_too_and_frozen_agents_do_not_learn():
    run = ResolvedRun(config())
    assert run.speakers == ("bob", "ann", "eve") and list(run.learners) == ["bob", "ann"]


def test_a_run_without_evaluation_has_no_held_out_split():
    run = ResolvedRun(config(evaluation={"questions": 0}))
    assert run.held_out is None and run.splits == [run.task]


def test_stages_of_a_curriculum_are_tasks_with_their_updates():
    run = ResolvedRun(config(updates=4, schedule={"curriculum": [{"update": 3, "task": {"largest": 2}}]}))
    [(update, task)] = run.curriculum
    assert update == 3 and len(task) == 7 and task.largest == 2


def test_what_was_made_stands_in_the_place_of_what_is_described():
    tools = object()
    run = ResolvedRun(config(), made={"speakers": ("eve",), "tools": tools})
    assert run.speakers == ("eve",) and run.open_tools() is tools and isinstance(run.protocol, Debate)


def test_a_wrong_section_is_named_with_where_it_comes_from():
    run = ResolvedRun(config())
    run.config.protocol["name"] = "debat"
    with pytest.raises(ConfigError, match=r"there: protocol.name: .*debate"):
        _ = ResolvedRun(run.config, "there").speakers


@pytest.mark.parametrize(
    "split, remedy", [("train", "the training split is empty"), ("eval", "evaluation.questions to 0")]
)
def test_an_empty_split_is_refused(split, remedy, monkeypatch):
    monkeypatch.setattr(maporl.run, "build_task", lambda section, which, *_: [] if which == split else ["1+1="])
    with pytest.raises(ConfigError, match=f"task: .*{remedy}"):
        _ = ResolvedRun(config()).splits
