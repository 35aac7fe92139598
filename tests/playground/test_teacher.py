"""Warm start by role: each agent learns what its role says, and what nobody can write is refused before a model
loads."""

import random
from dataclasses import dataclass
from string import ascii_lowercase

import pytest

from maporl import PROTOCOLS, TASKS, Arithmetic, Ask, Protocol
from maporl.config.schema import WarmStartSection
from maporl.errors import ConfigError
from maporl.playground.teacher import play_teacher
from maporl.protocols import CallReturn, PlayGame, Refine
from maporl.rollout.driver import RolloutDriver
from maporl.rollout.episode import SpeakerSpec
from maporl.runs.build import build_trainer
from maporl.tasks import Episodes
from maporl.types import Example
from maporl.validation.load import from_dict
from maporl.validation.preflight import check_run
from trl_ext.ppo.options import GREEDY

TINY = {"hidden_size": 32, "layers": 1, "heads": 2, "alphabet": "0123456789+=pc"}


@dataclass(frozen=True)
class Roles(Arithmetic):
    """Sums, in which a planner says "p" and the larger number, and a right solver says "=" and the sum."""

    def write_reply(self, example, rng, right, role):
        if role == "planner":
            return "p" + max(example.id.split("+"))
        if role != "solver":
            raise NotImplementedError("it has no words for this role")
        return "=" + self.write_answer(example, rng, right)


@dataclass(frozen=True)
class Plan(Protocol):
    """ann plans and bob solves. The roles come from the protocol, or from ``agents.NAME.role`` if it names none."""

    planner: str | None = "planner"
    solver: str | None = "solver"
    taught: tuple[str, ...] = ()
    every_step_scored = False

    def play(self, example, agents):
        question = [{"role": "user", "content": example.question}]
        (plan,) = yield [Ask(agents[0], question, role=self.planner, answers=False, taught=self.taught)]
        told = [{"role": "user", "content": plan.text + example.question}]
        yield [Ask(agents[1], told, role=self.solver, parents=(plan.id,))]


@pytest.fixture
def values(tmp_path, monkeypatch):
    monkeypatch.setitem(TASKS, "roles", Roles)
    monkeypatch.setitem(PROTOCOLS, "plan", Plan)
    return {
        "output_dir": str(tmp_path / "run"), "task": {"name": "roles", "largest": 4}, "updates": 1, "agent_defaults": {"tiny": TINY},
        "agents": {"ann": {}, "bob": {}}, "protocol": {"name": "plan"}, "ppo": {"response_length": 4},
        "evaluation": {"questions": 4}, "training": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "use_cpu": True},
        "warm_start": {"steps": 1, "wrong": 0.0},
    }  # fmt: skip


def spoken(task, protocol, wrong=0.0, agents=("ann", "bob"), roles=(None, None)):
    specs = {name: SpeakerSpec("scripted", (name,), role=role) for name, role in zip(agents, roles, strict=True)}
    section = WarmStartSection(1, wrong=wrong)
    return play_teacher(task, protocol, specs, section, random.Random(0), [task[i] for i in range(min(40, len(task)))])


@pytest.mark.slow
def test_planner_and_solver_learn_different_words(values):
    """The trained models are asked, and not the teacher."""
    config = from_dict(values | {"warm_start": {"steps": 60, "batch_size": 32, "learning_rate": 3e-3, "wrong": 0.0}})
    trainer = build_trainer(config, quiet=True)
    texts = [[u.text for u in d.utterances] for d in trainer.play_evaluation()]
    assert texts and all(plan[:1] == "p" and answer[:1] == "=" for plan, answer in texts), texts


@pytest.mark.parametrize("protocol, roles", [
    (Plan(), (None, None)),
    (Plan(None, None), ("planner", "solver")),
    (Plan(None, "solver"), ("planner", "planner")),  # the role of an ask is more than that of its agent
])  # fmt: skip
def test_the_teacher_speaks_by_role(protocol, roles):
    task = Roles(largest=4)
    for d in spoken(task, protocol, roles=roles):
        a, b = d.example.id.split("+")
        assert [u.text for u in d.utterances] == [f"p{max(a, b)}", f"={int(a) + int(b)}"]
    assert all(d.utterances[1].text != f"={d.example.answer}" for d in spoken(task, protocol, 1.0, roles=roles))


def test_what_the_protocol_teaches_must_be_texts():
    with pytest.raises(ConfigError, match="what agent 'ann' says as 'planner': expected a text, got 3"):
        spoken(Roles(largest=4), Plan(taught=(3,)))


def test_what_the_protocol_teaches_comes_first():
    plans = {d.utterances[0].text for d in spoken(Roles(largest=4), Plan(taught=("left", "right")))}
    assert plans == {"left", "right"}


@pytest.mark.parametrize("game", ["exchange", "tictactoe", "kuhn_poker", "path_plans"])
def test_games_teach_legal_moves_and_keep_none_of_it_in_the_record(game):
    dialogues = spoken(Episodes(count=40), PlayGame(game))
    assert all(d.outcome != "illegal" for d in dialogues)
    assert not any("taught" in u.tags for d in dialogues for u in d.utterances)
    if game == "exchange":
        coded = [str(ascii_lowercase.index(heard.text) + 1) for d in dialogues for heard in d.utterances[1::-1]]
        assert coded == [u.text for d in dialogues for u in d.utterances[2:]], (
            "the number that the code has for the letter"
        )


def test_a_task_that_only_writes_answers_writes_them_in_every_role():
    for protocol in (Refine(rounds=1), CallReturn(calls=1)):
        for d in spoken(Arithmetic(largest=9), protocol):
            assert {u.text for u in d.utterances} == {d.example.answer}


@pytest.mark.parametrize(
    "protocol, agent", [({"solver": "judge"}, "'bob' says as 'judge'"), ({"planner": None}, "'ann' says:")]
)
def test_a_role_that_the_task_does_not_know_is_refused_before_a_model_loads(values, protocol, agent, monkeypatch):
    config = from_dict(values | {"protocol": {"name": "plan", **protocol}})
    monkeypatch.setattr("maporl.training.home.load_agents", lambda *_, **__: pytest.fail("a model was loaded"))
    message = rf"warm_start: task Roles does not write what agent {agent}.*no words for this role; define write_answer"
    for refuses in (check_run, build_trainer):
        with pytest.raises(ConfigError, match=message):
            refuses(config)
    check_run(from_dict(values | {"protocol": {"name": "plan", **protocol}, "warm_start": {"steps": 0}}))


@pytest.mark.parametrize("reply, message", [
    (lambda self, example, rng, right, role: {}[role], r"KeyError: 'planner'; define write_answer"),
    (lambda self, example, rng, right, role: None, r"'ann' says as 'planner': expected a text, got None; define write_answer"),
    (lambda self, example, rng, right: "", r"TypeError: .*positional arguments.*; define write_answer\(example, rng, right\)"),
])  # fmt: skip
def test_a_writer_that_fails_is_named(values, monkeypatch, reply, message):
    monkeypatch.setattr(Roles, "write_reply", reply)
    with pytest.raises(ConfigError, match=message):
        check_run(from_dict(values))


def test_a_task_without_a_writer_is_refused(values, tmp_path):
    source = tmp_path / "rows.jsonl"
    source.write_text('{"id": "a", "question": "1+1=", "answer": "2"}\n' * 9)
    config = from_dict(
        values
        | {"task": {"name": "gsm8k", "source": str(source), "eval_source": str(source), "instruction": "{question}"}}
    )
    with pytest.raises(ConfigError, match=r"task GSM8K cannot write example answers; .* or set warm_start.steps to 0"):
        check_run(config)


def test_the_warm_start_shows_the_system_prompt_as_training_does(values, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "maporl.playground.warm_start.supervised_rows", lambda policy, dialogues, *rest: seen.extend(dialogues)
    )
    build_trainer(from_dict(values | {"agents": {"ann": {"system": "12"}, "bob": {}}}), quiet=True)
    assert seen and {d.utterances[0].messages[0]["content"] for d in seen} == {"12"}


# -- an ask that was written down wrongly -----------------------------------------------------------------------------


@pytest.mark.parametrize("wrong, message", [
    ({"taught": "left"}, r"Ask: taught: expected a tuple, such as \(\"left\", \"right\"\), got 'left'"),
    ({"parents": 0}, r"Ask: parents: expected a tuple, such as \(said\.id,\), got 0"),
])  # fmt: skip
def test_a_field_that_is_not_a_tuple_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Ask("ann", [], **wrong)


@pytest.mark.parametrize(
    "parents", [lambda said: (said,), lambda said: (said.id + 1,), lambda said: (-1,), lambda said: ("0",)]
)
def test_parents_that_nobody_has_said_are_refused(parents):
    class Wrong(Protocol):
        def play(self, example, agents):
            (said,) = yield [Ask("ann", [])]
            yield [Ask("ann", [], parents=parents(said))]

    from maporl.engines.scripted import ScriptedEngine

    task = Arithmetic(largest=9)
    driver = RolloutDriver(
        task, Wrong(), {"ann": SpeakerSpec("s", ("ann",))}, {"s": ScriptedEngine(lambda r: "1")}, GREEDY
    )
    with pytest.raises(
        ConfigError, match=r"asks agent 'ann' with parents=.*, but only utterances 0 to 0 were said; give the ids"
    ):
        driver.play([task[0]])

    class Early(Protocol):
        def play(self, example, agents):
            yield [Ask("ann", [], parents=(0,))]

    with pytest.raises(ValueError, match=r"with parents=\(0,\), but nothing was said yet"):
        RolloutDriver(task, Early(), driver.specs, driver.engines, GREEDY).play([Example("e", "1+1=", "2")])
