"""How parts say what is wrong with a run, and how that becomes an error or a warning."""

from dataclasses import replace

import pytest

from maporl.config.recipes import recipe_files
from maporl.errors import ConfigError, Fault, refuse, refused
from maporl.run import ResolvedRun
from maporl.team import exchange
from maporl.validation import check
from maporl.validation.load import load

ERROR = Fault("ppo.kl_coef", "it is -1", "set it to 0 or more")
WARNING = Fault("training.learning_rate", "it is 1", "1e-6 to 1e-3 is usual", "warning")


def test_a_fault_reads_as_its_key_what_is_wrong_and_what_to_do():
    assert str(ERROR) == "ppo.kl_coef: it is -1; set it to 0 or more"
    assert str(Fault("seed", "expected a number")) == "seed: expected a number"


def test_an_error_is_raised_with_where_it_comes_from_and_warnings_are_lines():
    assert refuse([WARNING]) == ["warning: training.learning_rate: it is 1; 1e-6 to 1e-3 is usual"]
    with pytest.raises(ConfigError, match=r"^x\.yaml: ppo\.kl_coef: it is -1; set it to 0 or more$"):
        refuse([WARNING, ERROR], "x.yaml")


def test_nothing_is_asked_after_the_first_error():
    asked = []

    def faults():
        for number in range(3):
            asked.append(number)
            yield ERROR

    with pytest.raises(ConfigError):
        refuse(faults())
    assert asked == [0]


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


def test_no_part_finds_fault_with_a_recipe():
    for name in recipe_files():
        run = ResolvedRun(load(name))
        assert [fault for part in check.PARTS for fault in part(run)] == [], name
