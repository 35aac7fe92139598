"""How parts say what is wrong with a run, and how that becomes an error or a warning."""

import json
import re
from dataclasses import replace

import pytest
from tiny_runs import config_of
from typer.testing import CliRunner

from maporl.cli.main import app
from maporl.errors import ConfigError, Fault, refuse, refused
from maporl.integrations.ray.check import check as cluster_faults
from maporl.run import ResolvedRun
from maporl.team import exchange
from maporl.validation.load import load

ERROR = Fault("ppo.kl_coef", "it is -1", "set it to 0 or more")
WARNING = Fault("training.learning_rate", "it is 1", "1e-6 to 1e-3 is usual", "warning")


def test_an_error_is_raised_with_where_it_comes_from_and_warnings_are_lines():
    assert refuse([WARNING]) == ["warning: training.learning_rate: it is 1; 1e-6 to 1e-3 is usual"]
    with pytest.raises(ConfigError, match=r"^x\.yaml: ppo\.kl_coef: it is -1; set it to 0 or more$"):
        refuse([WARNING, ERROR], "x.yaml")


def test_the_other_errors_are_noted_below_the_first_and_each_once():
    with pytest.raises(ConfigError, match=r"^x\.yaml: ppo\.kl_coef: ") as caught:
        refuse([ERROR, WARNING, Fault("seed", "expected a number"), ERROR], "x.yaml")
    assert caught.value.__notes__ == ["error: x.yaml: seed: expected a number"]


@pytest.mark.parametrize(
    "stumble, noted",
    [(KeyError("ann"), []), (ConfigError("task: it is empty"), ["error: task: it is empty"])],
    ids=["by its own code", "by another error of the user's"],
)
def test_what_stumbles_over_an_error_does_not_hide_it(stumble, noted):
    def faults(before):
        yield from before
        raise stumble

    with pytest.raises(ConfigError, match=r"^ppo\.kl_coef: it is -1") as caught:
        refuse(faults([ERROR]))
    assert getattr(caught.value, "__notes__", []) == noted
    with pytest.raises(type(stumble)):
        refuse(faults([WARNING]))


def test_a_part_that_is_refused_for_several_reasons_is_that_many_faults():
    errors = [ERROR, Fault("seed", "expected a number")]
    assert [*map(str, refused(lambda: refuse(errors)))] == [*map(str, errors)]


def test_several_problems_of_one_configuration_are_all_named(tmp_path):
    values = {
        "output_dir": str(tmp_path / "run"),
        "task": {"name": "toy_sum"},
        "agents": {"ann": {"tiny": {}, "tools": ["calculator", "add"]}, "bob": {"tiny": {}, "tools": ["search"]}},
        "tools": {"calculator": {"use": "calculator"}},
        "reward": {"sources": {"label": 1.0, "calculator": 0.1}},
        "cluster": {"pools": {"fast": {"resource": "x"}}},
        "training": {"lr_scheduler_type": "none"},
    }
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(values))
    shown = CliRunner().invoke(app, ["check", str(file)])
    assert shown.exit_code == 2
    assert [re.sub(r"; (known|did you mean).*", "", line) for line in shown.output.splitlines()] == [
        "error: training.lr_scheduler_type: unknown 'none'",
        "error: cluster.pools: backend is local, which has none; set cluster.backend: ray",
        "error: reward: calculator: the tool 'calculator' pays nothing: it returns no maporl.Result; remove "
        "'calculator' from the rewards, or let the tool return Result(text, reward=...)",
        "error: agents.ann.tools: unknown 'add'",
        "error: agents.bob.tools: unknown 'search'",
    ]


def test_several_problems_of_groups_are_all_named(tmp_path):
    groups = {"a": {"policies": ["ann", "nobody"], "engines": {"pool": "x"}}}
    sections = {"cluster": {"backend": "ray", "groups": groups}, "training": {"placement": "split"}}
    config = config_of(tmp_path / "run", sections=sections)
    said = [
        str(fault).split(";")[0] for fault in cluster_faults(ResolvedRun(config)) if "package ray" not in str(fault)
    ]
    assert said == [
        "cluster.backend: ray does not do training.placement: split yet",
        "cluster.groups.a: no policy 'nobody'",
        "cluster.groups: policy 'bob' is in no group",
    ]


def test_what_a_part_says_when_it_is_built_is_a_fault():
    def build():
        raise ValueError("schedule.swap: expected two agents: got one")

    assert list(refused(build)) == [Fault("schedule.swap", "expected two agents: got one")]
    assert list(refused(lambda: 1)) == []
    assert str(Fault.of(ValueError("no key"))) == "configuration: no key"


def test_a_part_yields_all_of_its_faults_and_the_border_raises_the_first():
    config = load("grpo")
    run = ResolvedRun(replace(config, schedule=replace(config.schedule, critic_warmup=config.updates)))
    assert [fault.what.split()[:3] for fault in exchange.check(run)] == [
        ["a", "critic", "is"],
        ["only", "the", "critics"],
    ]


def test_an_agent_that_is_exchanged_twice_is_found():
    run = ResolvedRun(load("at_grpo_roles"))
    assert list(exchange.exchanged(run, ["tool", "planner"])) == []
    [fault] = exchange.exchanged(run, ["tool", "tool"])
    assert str(fault) == "--swap: expected two different agents or more of ['tool', 'planner'], got ['tool', 'tool']"
