"""Questions whose parts others answer (tiny_hops, toy_parts): what a warm start teaches of calls, and runs of them."""

import json
import random
import string
from collections import Counter

import pytest
from folders import ROOT

from maporl import Parts, TinyHops
from maporl.config.call_options import CallLimits
from maporl.config.schema import EnvironmentSection, PupilSection, RewardSection, WarmStartSection
from maporl.datasets.search import QuestionSearch
from maporl.environments.build import ToolGrant
from maporl.environments.world import EnvironmentSpec, World
from maporl.errors import ConfigError
from maporl.methods.route import Route
from maporl.playground.teacher import is_taught, play_teacher
from maporl.protocols import CallReturn, Debate
from maporl.rewards.build import build_sources
from maporl.rollout.agent_tools import agent_tools
from maporl.rollout.episode import SpeakerSpec
from maporl.run import ResolvedRun
from maporl.types import Dialogue, Utterance


def rng():
    return random.Random(0)


def taught(task, protocol, agents, given, pupils, questions=200, **limits):
    """Dialogues of the teacher, in which the agents in ``given`` have the tools named there."""
    spec = EnvironmentSpec("library", lambda: QuestionSearch(k=1), tuple(agents), EnvironmentSection(use="bm25"))
    world = World({}, {"library": spec} if isinstance(task, TinyHops) else {})
    specs = {}
    for name in agents:
        handed, own = protocol.tools(name, agents), given.get(name, ())
        grant = ToolGrant(tuple(own), "tags", CallLimits(**limits))
        kit = agent_tools(name, grant, world, None, 100, handed) if handed or own else None
        specs[name] = SpeakerSpec("scripted", (name,), tools=kit)
    section = WarmStartSection(steps=1, agents=pupils)
    return play_teacher(task, protocol, specs, section, rng(), [task[i] for i in range(questions)], world)


class TestWhatAWarmStartTeaches:
    PUPILS = {
        "planner": PupilSection(wrong=1.0, calls=0.5, gives_in=1.0),
        "searcher": PupilSection(wrong=1.0, calls=0.5),
    }

    def team(self):
        pytest.importorskip("bm25s", reason="needs the extra search")
        protocol = CallReturn(call="tool", plan="{question}")
        return taught(TinyHops(), protocol, ("planner", "searcher"), {"searcher": ["library"]}, self.PUPILS)

    def test_a_planner_asks_for_one_fact_after_the_other(self):
        dialogue = next(d for d in self.team() if len(d.utterances) == 7)
        start, end = dialogue.example.question[:2], dialogue.example.answer
        between = dialogue.utterances[2].text
        assert [u.text for u in dialogue.utterances] == [
            f"<ask_searcher>{start}></ask_searcher>", f"<search>{start}</search>", between,
            f"<ask_searcher>{between}></ask_searcher>", f"<search>{between}</search>", end, end,
        ]  # fmt: skip

    def test_the_planner_repeats_what_it_was_told_right_or_wrong(self):
        asked = [d for d in self.team() if d.utterances[0].calls]
        assert all(d.utterances[-1].text == d.utterances[-2].text for d in asked)
        assert {d.utterances[-1].text == d.example.answer for d in asked} == {True, False}

    def test_who_does_not_search_is_wrong_where_the_section_says_so(self):
        for dialogue in self.team():
            answered = dict(zip([u.id for u in dialogue.utterances], dialogue.utterances, strict=True))
            for u in dialogue.utterances:
                if u.agent == "searcher" and u.part == 0 and not u.calls:
                    facts = {p["title"]: p["text"] for p in dialogue.example.meta["paragraphs"]}
                    asked = answered[u.caller].calls[0].arguments["question"][:2]
                    assert facts[asked] != f"{asked}>{u.text}"

    def test_what_helpers_say_is_taught_although_it_does_not_answer(self):
        dialogue = next(d for d in self.team() if len(d.utterances) == 7)
        assert [is_taught(TinyHops(), u) for u in dialogue.utterances] == [False, True, True, False, True, True, True]
        assert not is_taught(TinyHops(), Utterance(0, "a", "a", 0, 0, [], "", role="summariser", answers=False))

    def test_one_agent_that_searches_itself(self):
        pytest.importorskip("bm25s", reason="needs the extra search")
        pupils = {"ann": PupilSection(calls=1.0)}
        found = taught(TinyHops(), Debate(turns=1), ("ann",), {"ann": ["library"]}, pupils, 20)
        assert [len(d.utterances) for d in found] == [2, 3] * 10
        assert all(d.utterances[-1].text == d.example.answer for d in found)

    def test_a_router_says_no_until_enough_was_found(self):
        pytest.importorskip("bm25s", reason="needs the extra search")
        pupils = {name: PupilSection() for name in ("router", "searcher", "answerer")}
        protocol = Route(place="library")
        _, dialogue = taught(TinyHops(), protocol, ("router", "searcher", "answerer"), {}, pupils, 2)
        start, end = dialogue.example.question[:2], dialogue.example.answer
        between = dialogue.utterances[3].text[8:10]
        assert [u.text for u in dialogue.utterances] == [
            "<verify>no</verify>", f"<search>{start}</search>", "<verify>no</verify>", f"<search>{between}</search>",
            "<verify>yes</verify>", end,
        ]  # fmt: skip
        assert all(is_taught(TinyHops(), u) for u in dialogue.utterances)


class TestCallsThatNobodyCanWrite:
    def checked(self, tmp_path, pupil=None):
        """Check a searcher whose chat template writes calls in its own way."""
        from chat_models import characters, trl_template

        from maporl.errors import refuse
        from maporl.playground.teacher import taught_calls
        from maporl.team.agents import Voice
        from maporl.validation.load import from_dict

        values = {
            "output_dir": str(tmp_path / "run"), "task": {"name": "tiny_hops"}, "agents": {"ann": {"tiny": {}}},
            "warm_start": {"steps": 1, "agents": {} if pupil is None else {"ann": pupil}},
        }  # fmt: skip
        library = EnvironmentSpec("library", QuestionSearch, ("ann",), EnvironmentSection(use="bm25"))
        voice = Voice("ann", characters(trl_template("qwen3")), 1000)
        kit = agent_tools("ann", ToolGrant(("library",)), World({}, {"library": library}), voice, 100)
        assert kit.format.name == "native"
        refuse(taught_calls(ResolvedRun(from_dict(values)), {"ann": kit}))

    def test_they_are_refused_before_a_model_loads(self, tmp_path):
        pytest.importorskip("bm25s", reason="needs the extra search")
        message = "agents.ann: a warm start writes calls in the formats json and tags, not native; set call_format"
        with pytest.raises(ConfigError, match=message):
            self.checked(tmp_path)

    def test_who_is_taught_no_calls_may_have_any_format(self, tmp_path):
        pytest.importorskip("bm25s", reason="needs the extra search")
        self.checked(tmp_path, {"calls": 0.0})


@pytest.mark.slow
def test_a_protocol_that_searches_itself_can_have_a_warm_start(tmp_path):
    pytest.importorskip("bm25s", reason="needs the extra search")
    from maporl.runs.train import train
    from maporl.validation.load import from_dict
    from maporl.validation.preflight import check_run

    tiny = {"alphabet": string.printable[:95] + "\n", "context": 512}
    values = {
        "output_dir": str(tmp_path / "run"), "task": {"name": "tiny_hops"}, "warm_start": {"steps": 1},
        "agents": {name: {"tiny": tiny} for name in ("router", "searcher", "answerer")},
        "environments": {"library": {"use": "bm25"}}, "protocol": {"name": "route", "place": "library"}, "updates": 1,
        "ppo": {"response_length": 8}, "training": {"per_device_train_batch_size": 4, "use_cpu": True}, "dialogues_logged": 99,
        "evaluation": {"questions": 0},
    }  # fmt: skip
    assert any(line.startswith("task tiny_hops: 4096 questions") for line in check_run(from_dict(values)))
    train(from_dict(values), resume=False, quiet=True)
    dialogues = [json.loads(line) for line in (tmp_path / "run/dialogues.jsonl").read_text().splitlines()]
    calls = [c for d in dialogues for u in d.get("dialogue", d)["utterances"] for c in u["calls"]]
    metrics = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])
    assert metrics["tools/search/calls"] == len(calls) > 0, "what the teacher looked up counts in no update"


class TestAnOrchestrator:
    AGENTS = ("boss", "next", "reversed")

    def played(self, together, **limits):
        pupils = {
            "boss": PupilSection(calls=1.0, together=together), "next": PupilSection(skill="next"),
            "reversed": PupilSection(skill="reversed"),
        }  # fmt: skip
        protocol = CallReturn(call="tool", plan="{question}")
        task = Parts()
        dialogues = taught(task, protocol, self.AGENTS, {}, pupils, 40, **limits)
        assert all(d.utterances[-1].text == d.example.answer for d in dialogues)
        return dialogues

    def steps(self, dialogues):
        source = build_sources(RewardSection(), ["critical_steps"])["critical_steps"]
        values = source(dialogues, Parts())
        assert all(v is None for d, row in zip(dialogues, values, strict=True) for v in row[:-1]), (
            "only answers have them"
        )
        return [row[-1] for row in values]

    def test_both_at_once_take_three_steps_and_one_after_the_other_five(self):
        assert set(self.steps(self.played(1.0, parallel=True))) == {3.0}
        assert set(self.steps(self.played(0.0, parallel=True))) == {5.0}
        assert Counter(self.steps(self.played(0.5, parallel=True))).keys() == {3.0, 5.0}

    def test_who_may_make_one_call_at_a_time_is_taught_so(self):
        assert set(self.steps(self.played(1.0))) == {5.0}

    def test_critical_steps_are_those_of_the_longest_branches(self):
        """Stages of 2 and then at most 8 of three branches, of 1 and then 4, and of 3: 18 steps, and 26 utterances."""
        orders, step = [], 0
        for own, branches in ((2, (5, 3, 8)), (1, (4,)), (3, ())):
            orders += range(step, step + own)
            step += own
            orders += [step + place for length in branches for place in range(length)]
            step += max(branches, default=0)
        said = [Utterance(n, "a", "a", 0, order, [], "", answers=n == 25) for n, order in enumerate(orders)]
        assert len(said) == 26
        assert self.steps([Dialogue(Parts()[0], said)]) == [18.0]


def test_the_page_on_an_orchestrator_is_a_run(tmp_path):
    """Two specialists stay as they are, and the orchestrator is trained on what it and they say."""
    import re

    from maporl.config.safe_yaml import parse_yaml
    from maporl.runs.train import train
    from maporl.validation.load import from_dict

    text, _ = re.findall(
        r"^```yaml\n(.*?)^```", (ROOT / "docs/howto/orchestrator.md").read_text(), re.DOTALL | re.MULTILINE
    )
    config = from_dict(parse_yaml(text) | {"output_dir": str(tmp_path / "run"), "dialogues_logged": 99})
    _, after = train(config, resume=False, quiet=True)
    assert after.questions == 8
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    assert any("boss/grad_norm" in m for m in metrics) and not any("next/grad_norm" in m for m in metrics)
    dialogues = [json.loads(line) for line in (tmp_path / "run/dialogues.jsonl").read_text().splitlines()]
    for said in (entry.get("dialogue", entry)["utterances"] for entry in dialogues):
        assert said[-1]["rewards"]["critical_steps"] == 1 + max(u["order"] for u in said)
