"""Tasksets of the library verifiers, as tasks of a team.

It cannot be installed beside the newest MCP SDK: an environment of its own.
"""

import json
import subprocess
import sys

import pytest

from maporl.config.imports import named_imports
from maporl.errors import ConfigError
from maporl.runs.train import train
from maporl.tasks import TaskError, build_task
from maporl.types import Dialogue, Example, Utterance
from maporl.validation.load import from_dict
from maporl.validation.preflight import check_run

MODULE = """
import verifiers.v1 as vf
from verifiers.v1.configs.taskset import TasksetConfig


class Row(vf.TaskData):
    answer: str


class Sum(vf.Task[Row]):
    @vf.reward(weight=0.5)
    async def right(self, trace):
        return float(self.data.answer in trace.last_reply)

    @vf.reward
    async def polite(self, trace):
        return 0.25 * sum("please" in m.content for m in trace.assistant_messages)

    @vf.reward
    async def tests(self, trace, runtime):
        raise AssertionError("it needs a runtime")

    @vf.metric
    async def length(self, trace):
        return len(trace.last_reply)


class SumsConfig(TasksetConfig):
    start: int = 0


class Sums(vf.Taskset[Sum, SumsConfig]):
    def load(self):
        for a in range(self.config.start, self.config.start + 10):
            prompt = f"{a}+1=" if a % 2 else [vf.SystemMessage(content="Add."), vf.UserMessage(content=f"{a}+1=")]
            yield Sum(Row(prompt=prompt, answer=str(a + 1)), self.config.task)


class Endless(Sums):
    INFINITE = True


class Boxed(Sum):
    NEEDS_CONTAINER = True


class Boxes(Sums):
    def load(self):
        yield Boxed(Row(prompt="1", answer="1"), self.config.task)


class OnlyRuntime(vf.Task[Row]):
    @vf.reward
    async def tests(self, trace, runtime):
        return 1.0


class Runtimes(vf.Taskset[OnlyRuntime, SumsConfig]):
    def load(self):
        for a in range(4):
            yield OnlyRuntime(Row(prompt="1", answer="1"), self.config.task)


class Broken(vf.Task[Row]):
    @vf.reward
    async def odd(self, trace):
        raise OSError("no disk")


class Breaking(vf.Taskset[Broken, SumsConfig]):
    def load(self):
        for a in range(4):
            yield Broken(Row(prompt="1", answer="1"), self.config.task)
"""
AGENT = {"tiny": {"alphabet": "0123456789+= Ad.plesa", "hidden_size": 16, "layers": 1, "heads": 2}}


def values(folder, use="vf_sums:Sums", **changes):
    return {
        "output_dir": str(folder / "run"),
        "task": {"name": "verifiers", "use": use},
        "agents": {"ann": AGENT, "bob": AGENT},
        "reward": {"sources": {"verifiers": 1.0}},
        "protocol": {"name": "debate", "turns": 1, "opening": "{question}"},
        "ppo": {"response_length": 6},
        "training": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "use_cpu": True},
        "evaluation": {"questions": 1},
        "updates": 1,
        "pythonpath": [str(folder)],
    } | changes


def test_a_missing_package_is_named(tmp_path):
    """In an environment where it is not installed, whatever this one has."""
    code = (
        "import importlib.util as u, maporl.integrations.verifiers as v; v.find_spec = lambda name: None\n"
        "from maporl.tasks import build_task\n"
        "len(build_task({'name': 'verifiers', 'use': 'a:B'}, 'train', 0))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "the package verifiers is not installed; install it with: pip install verifiers" in done.stderr


def test_a_strangers_configuration_names_it_as_an_import(tmp_path):
    config = from_dict(values(tmp_path) | {"pythonpath": []} | {"task": {"name": "toy_sum"}, "reward": {}})
    config.task.update({"use": "own:Thing"})
    assert named_imports(config)["task.use: own:Thing"] == "own:Thing"


@pytest.mark.parametrize(("option", "words"), [({"limit": 0}, "limit: expected at least 1, got 0"), ({"held_out": 1.0}, "held_out: expected less than 1, got 1.0")])  # fmt: skip
def test_options_are_checked(option, words):
    with pytest.raises(ConfigError, match=words):
        build_task({"name": "verifiers", "use": "a:B"} | option, "train", 0)


class TestWithThePackage:
    @pytest.fixture(autouse=True)
    def module(self, tmp_path, monkeypatch):
        pytest.importorskip("verifiers.v1")
        (tmp_path / "vf_sums.py").write_text(MODULE)
        monkeypatch.syspath_prepend(tmp_path)
        sys.modules.pop("vf_sums", None)

    def test_tasks_become_questions(self):
        train, held_out = (
            build_task({"name": "verifiers", "use": "vf_sums:Sums", "held_out": 0.3}, s, 0) for s in ("train", "eval")
        )
        assert (len(train), len(held_out)) == (7, 3)
        questions = {e.question for e in train} | {e.question for e in held_out}
        assert questions == {f"{a}+1=" for a in range(10)}
        for example in train:
            even = int(example.question[0]) % 2 == 0
            assert train.before_question(example) == ([{"role": "system", "content": "Add."}] if even else [])
            assert train.columns(example)["answer"] == str(int(example.question[0]) + 1)
        other = build_task({"name": "verifiers", "use": "vf_sums:Sums", "config": {"start": 5}, "limit": 2}, "train", 0)
        assert {e.question for e in other} <= {"5+1=", "6+1="} and len(other) == 1

    def test_rewards_are_the_tasks_own(self):
        from maporl.integrations.verifiers_rewards import VerifiersReward

        task = build_task({"name": "verifiers", "use": "vf_sums:Sums"}, "train", 0)
        example = next(e for e in task if e.question == "3+1=")
        said = [
            Utterance(0, "ann", "ann", 0, 0, [], "please, 7"), Utterance(1, "bob", "bob", 0, 0, [], "4"),
            Utterance(2, "bob", "bob", 1, 1, [], "a plan", answers=False),
            Utterance(3, "ann", "ann", 1, 2, [{"role": "user", "content": "again"}], "please, 4"),
        ]  # fmt: skip
        assert VerifiersReward()([Dialogue(example, said)], task) == [[0.25, 0.5, None, 1.0]]

    def test_a_team_trains_on_them(self, tmp_path):
        config = from_dict(values(tmp_path))
        assert "rewards of vf_sums:Sums that need a runtime are left out: tests" in check_run(config)
        _, after = train(config, resume=False, quiet=True)
        assert after.questions == 1 and "verifiers" in json.dumps(after.rewards)

    @pytest.mark.parametrize(
        ("use", "words"),
        [
            ("vf_sums:Endless", "yields tasks without end; set task.limit"),
            ("vf_sums:Boxes", "its tasks need a container"),
            ("vf_sums:Sum", "expected a class derived from"),
            ("vf_sums:Sumz", "unknown 'Sumz'; did you mean 'Sums'"),
            ("vf_sums:Sums", r"task\.config: vf_sums:Sums does not take"),
        ],
    )
    def test_what_cannot_be_taken_is_refused(self, use, words):
        config = {"config": {"begin": 1}} if use == "vf_sums:Sums" else {}
        with pytest.raises((ConfigError, TaskError), match=words):
            len(build_task({"name": "verifiers", "use": use, **config}, "train", 0))

    @pytest.mark.parametrize(
        ("use", "words"),
        [
            ("vf_sums:Runtimes", r"gives no reward without a runtime \(left out: tests\)"),
            ("vf_sums:Breaking", "no disk"),
        ],
    )
    def test_a_failed_reward_is_never_zero(self, tmp_path, use, words):
        with pytest.raises(Exception, match=words):
            train(from_dict(values(tmp_path, use)), resume=False, quiet=True)

    def test_the_source_needs_the_task(self):
        from maporl.integrations.verifiers_rewards import VerifiersReward

        task = build_task({"name": "toy_sum"}, "train", 0)
        with pytest.raises(Exception, match="belongs to task verifiers, and this is task"):
            VerifiersReward()([Dialogue(Example("e", "q", "a"), [])], task)
