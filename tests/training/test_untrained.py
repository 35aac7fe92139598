"""Nothing is silently untrained: what utterances without answers are credited with, and what is said of those without
credit."""

import json
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
from scripted_training import scripted_trainer

from maporl import (
    PROTOCOLS,
    Agent,
    Arithmetic,
    Ask,
    MultiAgentPPOConfig,
    MultiAgentPPOTrainer,
    Protocol,
    RewardSection,
    Team,
)
from maporl.config.schema import BranchingSection
from maporl.rewards import RewardFailure, RewardSource, assign_credit
from maporl.rewards.base import as_source
from maporl.rewards.build import ANSWERS_ONLY, SOURCES, build_sources
from maporl.rewards.scoring import Scorer, fill_in
from maporl.schedules import Freeze, Plan, Schedule
from maporl.training import untrained
from maporl.training.samples import TeamUpdateBatch
from maporl.training.untrained import Count, UntrainedCounter, count_credits, shares
from maporl.types import Dialogue, Example, Grade, Stop, Utterance
from maporl.validation.load import from_dict
from maporl.validation.preflight import check_run

TASK = Arithmetic(largest=9)
TEAM = ("ann", "bob", "cy")


def said(number, agent, answers=True, parents=(), score=None, **fields):
    rewards = {} if score is None else {"score": score}
    grade = Grade("4", True, "") if answers else None
    given = {"turn": 0, "order": number, "messages": [], "text": "4", "grade": grade, "rewards": rewards, **fields}
    return Utterance(number, agent, agent, answers=answers, parents=parents, response_ids=[1], **given)


def plan_and_answer(**fields):
    """ann plans, bob answers with the plan, and cy checks the answer, which nobody is shown."""
    example = next(e for e in TASK if e.answer == "4")
    utterances = [
        said(0, "ann", answers=False, **fields),
        said(1, "bob", parents=(0,)),
        said(2, "cy", answers=False, parents=(1,)),
    ]
    return Dialogue(example, utterances)


def credits(dialogue):
    return [u.rewards.get("credit") for u in dialogue.utterances]


class Of(RewardSource):
    """Gives each agent a number; None where it has none."""

    def __init__(self, **values):
        self.values, self.shown = values, []

    def __call__(self, dialogues, task):
        self.shown.append([[u.agent for u in d.utterances] for d in dialogues])
        return [[self.values.get(u.agent) for u in d.utterances] for d in dialogues]


def credited(sources, weights, dialogue=None, **section):
    dialogue = plan_and_answer() if dialogue is None else dialogue
    section = RewardSection(sources=weights, **section)
    built = build_sources(section, set(weights) - set(sources) - {"env", "paid"})
    scorer = Scorer(section, built | {n: as_source(s) for n, s in sources.items()}, TEAM)
    scorer.credit([dialogue], TASK)
    return credits(dialogue)


@pytest.mark.parametrize("values, rules, expected", [
    ({"ann": 0.5}, (), [0.5, 1.0, None]),  # its own score, and not that of its reader
    ({"cy": -0.25}, (), [1.0, 1.0, -0.25]),
    ({"ann": 0.5, "bob": 1.0, "cy": 0.25}, (), [0.5, 2.0, 0.25]),
    ({}, (), [1.0, 1.0, None]),
    ({"ann": 0.5}, ("own",), [0.5, 1.0, None]),
    ({"cy": -0.25}, ("own",), [1.0, 1.0, -0.25]),
    ({"ann": 0.5}, ({"back_propagate": {"keep_own": True}},), [1.5, 1.0, None]),  # both
    ({"cy": 3.0}, ("last",), [3.0, 3.0, 3.0]),
    ({"ann": 0.5, "cy": 0.0}, ("sum",), [1.5, 1.5, 1.5]),
])  # fmt: skip
def test_a_score_of_words_that_do_not_answer_is_their_credit(values, rules, expected):
    assert credited({"mine": Of(**values)}, {"label": 1.0, "mine": 1.0}, rules=rules) == expected


@pytest.mark.parametrize("rules", [(), ("own",)])
def test_a_reward_that_the_protocol_pays_to_a_helper_is_its_credit(rules):
    paid = plan_and_answer(rewards={"paid": 0.75})
    assert credited({}, {"label": 1.0, "paid": 2.0}, paid, rules=rules) == [1.5, 1.0, None]
    counted_in_rules_alone = plan_and_answer(rewards={"paid": 0.75})
    weights = {"label": 1.0, "paid": 0.0}
    assert credited({}, weights, counted_in_rules_alone, rules=rules) == [1.0, 1.0, None], "weight 0 makes no score"


def test_a_source_of_ones_own_is_shown_whole_dialogues_and_those_of_maporl_answers_alone():
    mine, answers = Of(ann=0.5), Of(bob=1.0)
    answers.answers_only = True
    dialogue = plan_and_answer()
    for _ in range(2):  # a batch that is resampled is scored again
        fill_in([dialogue], TASK, {"mine": mine, "answers": answers})
    assert mine.shown == [[["ann", "bob", "cy"]]] * 2 and answers.shown == [[["bob"]]]
    assert [u.rewards for u in dialogue.utterances] == [{"mine": 0.5}, {"answers": 1.0}, {}]
    fill_in([dialogue], TASK, {"mine": Of(ann=7.0)})
    assert dialogue.utterances[0].rewards["mine"] == 0.5, "what was given stays"


def test_which_sources_read_answers_only_is_known_without_building_them():
    section = RewardSection.__pydantic_validator__.validate_python({"brevity": {"tokens": 4}, "judge": {"agent": "sam"}, "arena": {"agent": "sam"}})  # fmt: skip
    light = ANSWERS_ONLY - {"verifier"}
    built = build_sources(section, light, voices=SimpleNamespace(speak=lambda agent, asked: []))
    assert {name for name, source in built.items() if source.answers_only} == light
    assert set(SOURCES) >= ANSWERS_ONLY


def test_a_source_that_does_not_expect_helpers_is_told_what_it_was_shown():
    def by_grade(dialogues, task):
        return [[float(u.grade.correct) for u in d.utterances] for d in dialogues]

    def of_answers(dialogues, task):
        return [[1.0 for u in d.utterances if u.answers] for d in dialogues]

    shown = r"also shown utterances that do not answer the question \(ann's, for example\).*: return None for those"
    with pytest.raises(RewardFailure, match=r"'mine' failed on arithmetic: .*AttributeError"):
        credited({"mine": by_grade}, {"mine": 1.0})
    with pytest.raises(RewardFailure, match=rf"one value for each of their 3 utterances, got \[\[1.0\]\].*{shown}"):
        credited({"mine": of_answers}, {"mine": 1.0})


def test_crediting_a_batch_again_changes_nothing():
    section = RewardSection()
    scorer = Scorer(section, build_sources(section, ["label"]), TEAM, missing_eos_penalty=0.5)
    dialogue = plan_and_answer(stop=Stop.LENGTH)
    assert scorer.worth([dialogue], TASK) == [1.0], "a plan without a score is worth nothing"
    for _ in range(3):
        scorer.credit([dialogue], TASK)
        assert credits(dialogue) == [0.5, 1.0, None]


def test_a_dialogue_without_any_answer_is_credited():
    dialogue = Dialogue(
        Example("e", "q", "4"), [said(0, "ann", answers=False, score=0.5), said(1, "bob", answers=False)]
    )
    for horizon in ("current", "last", "discounted_sum"):
        assign_credit([dialogue], TEAM, RewardSection(horizon=horizon))
        assert credits(dialogue) == [0.5, None]


# -- counting ---------------------------------------------------------------------------------------------------------


def test_utterances_without_credit_are_counted_by_agent_and_role():
    dialogue = plan_and_answer()
    dialogue.utterances += [replace(dialogue.utterances[2], id=3, turn=1, role="critic")]
    assign = [replace(d, rollout=r) for r, d in enumerate([dialogue] * 2)]
    for u in dialogue.utterances[:2]:
        u.rewards["credit"] = 1.0
    counts = count_credits(assign, {"ann", "bob", "cy"}, Plan())
    nobody = "nobody was shown what it said, for example agent 'cy', turn {}, dialogue 0+4.0"
    nobody = nobody.replace("0+4", dialogue.example.id)
    assert counts == {
        ("ann", "ann", None): Count(2), ("bob", "bob", None): Count(2),
        ("cy", "cy", None): Count(0, 2, nobody.format(1)), ("cy", "cy", "critic"): Count(0, 2, nobody.format(2)),
    }  # fmt: skip
    assert shares(counts) == {
        "ann/untrained_share": 0.0, "bob/untrained_share": 0.0, "cy/untrained_share": 1.0, "cy/untrained/cy": 2.0,
        "cy/untrained/cy/critic": 2.0,
    }  # fmt: skip
    assert set(count_credits(assign, {"ann", "bob"}, Plan())) == {("ann", "ann", None), ("bob", "bob", None)}
    assert ("cy", "cy", None) not in count_credits(assign, {"cy"}, Plan(never=frozenset({0})))
    assert not count_credits(assign, {"cy"}, Plan(frozen=frozenset({"cy"})))


def test_copies_in_forks_count_once_and_one_credit_is_enough():
    first = plan_and_answer()
    second = Dialogue(first.example, [replace(u, rewards={}, sample=f"0.{u.id}") for u in first.utterances], rollout=1)
    for u in first.utterances:
        u.sample = f"0.{u.id}"
    second.utterances[0].rewards["credit"] = 1.0
    counts = count_credits([first, second], {"ann", "cy"}, Plan())
    assert {agent: (c.credited, c.uncredited) for (_, agent, _), c in counts.items()} == {"ann": (1, 0), "cy": (0, 1)}


def test_processes_count_together_and_stop_together(monkeypatch):
    """One process has no dialogue of cy, and another has its only credit."""
    others = {("cy", "cy", None): Count(1, 3, "elsewhere")}
    monkeypatch.setattr(untrained.distributed, "all_gather", lambda own: [own, others])
    trained = batch_of([])
    counter = UntrainedCounter(rules=False)
    assert counter.measure(trained, {"cy"}) == {"cy/untrained_share": 0.75, "cy/untrained/cy": 3.0}
    assert trained.counts == {"agent/cy/credited": 1.0, "agent/cy/uncredited": 3.0}
    others = {("cy", "cy", None): Count(0, 3, "elsewhere")}
    with pytest.raises(RewardFailure, match=r"update 1: no utterance of agent 'cy' \(3 utterances; elsewhere\) has a"):
        UntrainedCounter(rules=False).measure(trained, {"cy"})
    assert counter.measure(trained, {"cy"})["cy/untrained_share"] == 1.0, "it has learned before"


def batch_of(dialogues, number=1):
    return TeamUpdateBatch(number, number - 1, [], task=TASK, plan=Plan(), dialogues=dialogues)


# -- runs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Workshop(Protocol):
    """A planner, a solver and a checker. It forgets to say who is shown the plan, unless ``told``."""

    told: bool = False
    checks_from: int = 0
    pay: float | None = None
    listed: bool = True
    every_step_scored = False

    @property
    def pays(self):
        return frozenset({"tidy"} if self.listed else ())

    def play(self, example, agents):
        planner, solver, *checkers = agents
        (plan,) = yield [Ask(planner, user(example.question), role="plan", answers=False)]
        if self.pay is not None:
            plan.rewards["tidy"] = self.pay
        (answer,) = yield [Ask(solver, user(plan.text + example.question), parents=(plan.id,) if self.told else ())]
        for checker in checkers:
            yield [Ask(checker, user(f"{answer.text}="), role="check", parents=(answer.id,), answers=False)]


def user(text):
    return [{"role": "user", "content": text}]


def trainer_of(tmp_path, tiny, protocol, agents=TEAM[:2], sources=None, reward=None, updates=2, **more):
    team = Team([Agent(name, *tiny(seed=i, hidden_size=32, layers=1)) for i, name in enumerate(agents)])
    args = MultiAgentPPOConfig(
        output_dir=str(tmp_path / "run"), total_episodes=4 * updates, per_device_train_batch_size=4, response_length=3,
        report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    return MultiAgentPPOTrainer(args, team, TASK, protocol, reward=reward, sources=sources, **more)


def test_a_run_in_which_an_agent_never_learns_stops_at_the_first_update(tmp_path, tiny):
    trainer = trainer_of(tmp_path, tiny, Workshop())
    with pytest.raises(RewardFailure) as raised:
        trainer.train()
    told = str(raised.value)
    assert told.startswith(
        "update 1: no utterance of agent 'ann' as 'plan' (4 utterances; nobody was shown what it said"
    )
    assert "Ask.parents" in told and "(pays)" in told and "(trainable: false)" in told
    assert trainer.state.global_step == 0
    trainer = trainer_of(tmp_path / "both", tiny, Workshop(), agents=TEAM)
    with pytest.raises(RewardFailure, match=r"of agent 'ann' as 'plan' .*; and none of agent 'cy' as 'check' \(4 "):
        trainer.train()


def test_with_parents_or_a_reward_or_a_payment_or_frozen_it_goes_on(tmp_path, tiny):
    def plans(dialogues, task):
        return [[None if u.answers else 0.25 for u in d.utterances] for d in dialogues]

    both = RewardSection(sources={"label": 1.0, "plans": 2.0})
    trainer = trainer_of(tmp_path / "source", tiny, Workshop(), reward=both, sources={"plans": plans}, updates=1)
    trainer.train()
    (metrics,) = trainer.run.read_metrics()
    found = [metrics[name] for name in ("reward/plans/ann", "reward/credit/ann", "ann/untrained_share")]
    assert found == [0.25, 0.5, 0.0]
    paid = RewardSection(sources={"label": 1.0, "tidy": 1.0})
    trainer = trainer_of(tmp_path / "paid", tiny, Workshop(pay=-0.5), reward=paid, updates=1)
    trainer.train()
    assert trainer.run.read_metrics()[0]["reward/credit/ann"] == -0.5
    trainer = trainer_of(tmp_path / "told", tiny, Workshop(told=True), updates=1)
    trainer.train()
    (metrics,) = trainer.run.read_metrics()
    assert metrics["reward/credit/ann"] == metrics["reward/credit/bob"] and "ann/untrained/ann/plan" not in metrics
    frozen = Schedule(freeze=[Freeze("ann", 1, 1)])
    trainer = trainer_of(tmp_path / "frozen", tiny, Workshop(), schedule=frozen)
    with pytest.raises(RewardFailure, match=r"^update 2: no utterance of agent 'ann' as 'plan' \(4 utterances; nobody"):
        trainer.train()
    assert trainer.state.global_step == 1, "it is to be trained from the second update on"


def test_forked_dialogues_are_counted_as_they_are_trained(tmp_path, tiny):
    forks = BranchingSection(how="fork_every", group=2)
    trainer = trainer_of(
        tmp_path, tiny, Workshop(told=True), agents=TEAM, branching=forks, reward=RewardSection(rules=("own",))
    )
    batch = trainer.score(trainer.collect(trainer.next_batch()))
    own = count_credits(batch.dialogues, set(TEAM), batch.plan)
    # 2 plans of each of 4 questions, 2 answers to each plan, and 2 checks of each answer, in 8 dialogues a question
    assert len(batch.dialogues) == 32
    assert {agent: (c.credited, c.uncredited) for (_, agent, _), c in own.items()} == {
        "ann": (8, 0), "bob": (16, 0), "cy": (0, 32),
    }  # fmt: skip
    with pytest.raises(RewardFailure, match=r"agent 'cy' .* no rule of reward\.rules credited them\. "):
        trainer.advantage(batch)


def test_an_agent_that_learned_once_may_go_without_and_a_checkpoint_remembers(tmp_path, tiny):
    trainer = trainer_of(tmp_path, tiny, Workshop(told=True))
    trainer.advantage(trainer.score(trainer.collect(trainer.next_batch())))
    state = json.loads(json.dumps(trainer.checkpoint_state()["credited"]))
    assert state == ["ann", "bob"]
    again = UntrainedCounter(rules=False)
    again.credited = set(state)
    assert again.measure(batch_of([plan_and_answer()], 2), {"ann"})["ann/untrained_share"] == 1.0
    saved = trainer.checkpoint_state()
    trainer.untrained.credited.clear()
    trainer.restore_state(saved)
    assert trainer.untrained.credited == {"ann", "bob"}


def test_approving_verifiers_learn(tmp_path):
    values = {
        "output_dir": str(tmp_path / "run"), "task": {"name": "toy_sum", "largest": 9}, "updates": 1, "evaluation": {"questions": 0},
        "agent_defaults": {"tiny": {"hidden_size": 32, "layers": 1, "heads": 2}}, "agents": {"ann": {}, "bob": {}},
        "protocol": {"name": "refine", "verify": "{draft}", "approval": "1"},
        "ppo": {"response_length": 4}, "training": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "use_cpu": True},
    }  # fmt: skip
    trainer = scripted_trainer(from_dict(values) and values, lambda request: "1")
    batch = trainer.advantage(trainer.score(trainer.collected()))
    assert {d.outcome for d in batch.dialogues} == {"approved"}
    for answer, verdict in (d.utterances for d in batch.dialogues):
        assert verdict.rewards["credit"] == answer.rewards["credit"]
    assert len(batch.samples["bob"]) == 4


# -- before and after a run -------------------------------------------------------------------------------------------


def workshop_values(tmp_path, monkeypatch, protocol, agents=TEAM, **changes):
    monkeypatch.setitem(PROTOCOLS, "workshop", Workshop)
    return {
        "output_dir": str(tmp_path / "run"), "task": {"name": "toy_sum", "largest": 9}, "updates": 1, "evaluation": {"questions": 0},
        "agents": {name: {"tiny": {"layers": 1}} for name in agents}, "protocol": {"name": "workshop", **protocol},
        "ppo": {"response_length": 4}, **changes,
    }  # fmt: skip


def credit_lines(values):
    return [line for line in check_run(from_dict(values)) if "credit: " in line]


def test_check_says_who_is_credited_for_what(tmp_path, monkeypatch):
    told, warning = credit_lines(workshop_values(tmp_path, monkeypatch, {"told": True}))
    assert told == (
        "credit: ann: the mean credit of those who are shown it (bob); bob: answers (label 1), horizon "
        "discounted_sum, share all; cy: NOTHING"
    )
    assert warning.startswith(
        "warning: credit: nothing credits cy if all utterances are empty: nobody who has a credit is shown"
    )
    frozen = {name: {"tiny": {"layers": 1}, "trainable": name != "cy"} for name in TEAM}
    assert (
        len(credit_lines(workshop_values(tmp_path, monkeypatch, {"told": True}, agents=TEAM) | {"agents": frozen})) == 1
    )
    paid = {"reward": {"sources": {"label": 1, "tidy": 0.5}}}
    (line,) = credit_lines(workshop_values(tmp_path, monkeypatch, {"pay": 1.0}, TEAM[:2], **paid))
    assert line.startswith("credit: ann: other words (tidy 0.5), not shared; bob: answers (label 1), horizon")
    charged = {"reward": {"charges": {"tokens": {"weight": 0.1, "roles": ["bob"]}}}}
    told = credit_lines(workshop_values(tmp_path, monkeypatch, {"told": True}, **charged))[0]
    assert told.endswith("bob: answers (label 1), horizon discounted_sum, share all, minus 0.1 x tokens; cy: NOTHING")
    unlisted = workshop_values(tmp_path, monkeypatch, {"pay": 1.0, "listed": False, "told": True}, TEAM[:2])
    (warning,) = (line for line in check_run(from_dict(unlisted)) if "pays" in line)
    assert (
        "workshop sets the rewards tidy, which its pays does not list" in warning
        and "pays = frozenset({'tidy'})" in warning
    )
    monkeypatch.setitem(SOURCES, "mine", lambda section, speak: as_source(Of(ann=1.0)))
    mine = {"reward": {"sources": {"label": 1, "mine": 0.5}}}
    _, warning = credit_lines(workshop_values(tmp_path, monkeypatch, {"told": True}, **mine))
    assert warning.startswith("warning: credit: nothing credits cy ") and "and only mine may score it" in warning
    call = workshop_values(tmp_path, monkeypatch, {}, TEAM[:2]) | {
        "protocol": {"name": "call_return", "plan": "{question}"}
    }
    assert credit_lines(call)[0].endswith("; bob: not asked if all utterances are empty")
