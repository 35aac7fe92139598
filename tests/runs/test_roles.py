"""Two comparisons of published tables: roles that are only assigned, and trained policies that exchange their roles."""

import json
import shutil

import pytest
from recipe_runs import tiny_values
from scripted_training import scripted_trainer
from tiny_runs import TINY, invoke, trained

from maporl.datasets.mathematics import suite_tasks
from maporl.errors import ConfigError, refuse
from maporl.run import ResolvedRun
from maporl.runs.evaluate import evaluate, play_suite
from maporl.runs.train import train
from maporl.team.exchange import exchanged
from maporl.validation.load import from_dict, load
from trl_ext.ppo.options import GREEDY


def refuse_exchange(run, names):
    refuse(exchanged(run, names))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    agents = dict.fromkeys(("ann", "bob"), TINY["agents"]["ann"])
    return trained(tmp_path_factory.mktemp("roles") / "run", 1, agents=agents)


def measured(*words):
    done = invoke("eval", *words, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_swap_is_what_exchanging_the_folders_of_the_weights_is(run, tmp_path):
    other = shutil.copytree(run, tmp_path / "other")
    for name, now in (("ann", "spare"), ("bob", "ann"), ("spare", "bob")):
        (other / "final" / name).rename(other / "final" / now)
    swapped = measured(run, "--swap", "ann,bob")
    assert swapped == measured(other) == measured(run, "--swap", "bob,ann")
    assert swapped != measured(run), "the agents differ, or this test sees nothing"
    assert measured(other, "--swap", "ann,bob") == measured(run)


def test_a_suite_is_played_by_the_same_weights(run, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("maporl.runs.evaluate.play_suite", lambda player, *rest: seen.append(player.specs()) or [])
    for swap in ([], ["--swap", "ann,bob"]):
        assert invoke("eval", run, "--suite", "math", "--json", *swap).exit_code == 0
    policies = [{name: spec.policies for name, spec in specs.items()} for specs in seen]
    assert policies == [{"ann": ("ann",), "bob": ("bob",)}, {"ann": ("bob",), "bob": ("ann",)}]


@pytest.mark.parametrize("names, message", [
    (["ann", "bop"], r"--swap: unknown 'bop'; did you mean 'bob'"),
    (["ann"], r"--swap: expected two different agents or more of \['ann', 'bob'\], got \['ann'\]"),
    (["ann", "ann"], r"--swap: expected two different agents or more"),
])  # fmt: skip
def test_names_that_cannot_be_swapped_are_refused(names, message, run):
    done = invoke("eval", run, "--swap", ",".join(names))
    assert done.exit_code == 2 or isinstance(done.exception, ConfigError)
    with pytest.raises(ConfigError, match=message):
        refuse_exchange(ResolvedRun(load(run / "config.yaml")), names)


def test_agents_with_one_policy_or_without_weights_cannot_be_swapped():
    with pytest.raises(ConfigError, match=r"--swap: 'tool' and 'planner' share one policy, so nothing would change"):
        refuse_exchange(ResolvedRun(load("at_grpo_shared")), ["tool", "planner"])
    api = "agents.actor={model: null, engine: openai, api: {model: m}}"
    with pytest.raises(ConfigError, match=r"'collaborator' has the engine 'transformers' and 'actor' has 'openai'"):
        refuse_exchange(ResolvedRun(load("agentpo_hint", [api])), ["collaborator", "actor"])
    refuse_exchange(ResolvedRun(load("at_grpo_roles")), ["tool", "planner"])
    refuse_exchange(
        ResolvedRun(load("agentpo_hint")), ["collaborator", "actor"]
    )  # of different models, each with its own tokenizer


@pytest.mark.slow
def test_assigned_roles_without_training_are_an_evaluation_of_the_configuration(tmp_path, monkeypatch):
    """What ``maporl eval CONFIG`` measures is what the run itself measures before its first update."""
    values = tiny_values("agentpo_math", str(tmp_path / "run"), monkeypatch)
    values["training"] |= {"eval_steps": 0, "save_steps": 0}
    config = from_dict(values | {"updates": 1, "evaluation": {"questions": 12}})
    untrained = evaluate(config, None)
    before, _ = train(config, resume=False, quiet=True)
    assert before.turns == untrained.turns and before.flips == untrained.flips
    assert set(untrained.baselines) > {"collaborator alone", "actor alone"}


def test_the_suite_counts_the_actors_answer_and_not_the_hint(data, tmp_path, monkeypatch):
    values = tiny_values("agentpo_math", str(tmp_path / "run"), monkeypatch)
    del values["warm_start"]
    task = suite_tasks("math", data, 4)["gsm8k"]
    script = lambda r: rf"\boxed{{{r.example.answer if r.ask.agent == 'actor' else 'nothing'}}}"  # noqa: E731
    player = scripted_trainer(values, script).player
    (result,) = play_suite(player, {"gsm8k": task}, 1, GREEDY, 0)
    assert (result.questions, result.average.value) == (4, 1.0)


@pytest.mark.slow
def test_agents_of_different_models_keep_their_tokenizers_when_they_swap(tmp_path):
    run = trained(tmp_path / "run", 2)
    own, swapped = (measured(run, *swap)["baselines"] for swap in ([], ["--swap", "ann,bob"]))
    alone = lambda found: {name: share for name, share in found.items() if name.endswith("alone")}  # noqa: E731
    assert alone(swapped) == {"ann alone": own["bob alone"], "bob alone": own["ann alone"]}
    assert own["ann alone"] != own["bob alone"]
