"""Sums of which a pupil knows those without a carry: the world in which an agent learns when a call is worth its
price."""

import random

import pytest

from maporl.config.call_options import CallLimits
from maporl.config.schema import PupilSection, WarmStartSection
from maporl.environments.build import ToolGrant
from maporl.environments.calculator import calculator
from maporl.environments.world import World
from maporl.errors import ConfigError
from maporl.playground.arithmetic import Arithmetic
from maporl.playground.teacher import play_teacher
from maporl.protocols import Debate
from maporl.rollout.agent_tools import agent_tools
from maporl.rollout.episode import SpeakerSpec
from maporl.tasks import build_task
from maporl.types import Example

SUMS = {"smallest": 10, "largest": 59, "easy": 0.5}


@pytest.mark.parametrize(
    ("question", "said"),
    [("47+30", "77"), ("47+35", "72"), ("99+95", "184"), ("80+70", "150"), ("7+5", "12"), ("105+7", "102")],
)
def test_a_pupil_forgets_what_is_carried(question, said):
    assert Arithmetic().write_by_skill(Example(question, f"{question}=", ""), "digitwise") == said


def test_half_of_the_sums_are_easy_and_the_pupil_is_right_on_these_alone():
    for split, count in (("train", 400), ("eval", 100)):
        task = Arithmetic(**SUMS, split=split)
        easy = [e.id.endswith("0") for e in task]
        assert abs(len(task) - count) < 25 and abs(2 * sum(easy) - len(task)) <= 1
        assert [task.grade(e, task.write_by_skill(e, "digitwise")).correct for e in task] == easy


def test_the_share_of_easy_sums_is_kept_and_nothing_else_changes():
    every = {e.id for e in Arithmetic(smallest=10, largest=59)}
    for share in (0.1, 0.25, 0.9):
        ids = [e.id for e in Arithmetic(**SUMS | {"easy": share})]
        assert sum(name.endswith("0") for name in ids) == round(len(ids) * share) and set(ids) < every


def test_what_easy_refuses():
    for given in ({"easy": 0.0}, {"easy": 1.0}, {"name": "toy_times", "easy": 0.5}):
        with pytest.raises(ConfigError, match=r"easy: (expected (more than 0|less than 1), got|it is a share of sums)"):
            build_task({"name": "toy_sum", **given}, "train", 0)
    with pytest.raises(ConfigError, match="easy: no pair of 1 to 9 is left in the train split"):
        build_task({"name": "toy_sum", "smallest": 1, "largest": 9, "easy": 0.5}, "train", 0)
    products = Arithmetic(operation="times")
    assert products.skills == ()
    with pytest.raises(NotImplementedError, match="has no skills"):
        products.write_by_skill(products[0], "digitwise")


def test_a_pupil_with_a_skill_is_right_after_a_call_and_uses_its_skill_without():
    task = Arithmetic(**SUMS)
    world = World({"calculator": calculator()})
    tools = agent_tools("ann", ToolGrant(("calculator",), "tags", CallLimits()), world, None, 100)
    section = WarmStartSection(steps=1, agents={"ann": PupilSection("digitwise", calls=0.5)})
    specs = {"ann": SpeakerSpec("scripted", ("ann",), tools=tools)}
    played = play_teacher(task, Debate(turns=1), specs, section, random.Random(0), [task[i] for i in range(80)], world)
    called = [d for d in played if len(d.utterances) == 2]
    assert 20 < len(called) < 60
    for dialogue in played:
        said = dialogue.utterances[-1].text
        example = dialogue.example
        assert said == (example.answer if dialogue in called else task.write_by_skill(example, "digitwise"))
