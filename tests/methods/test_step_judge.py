"""A judge of steps that learns beside the team (RLAnything)."""

import random
from dataclasses import replace
from functools import partial
from statistics import fmean

import pytest
from recipe_runs import VERDICTS, one_step_values, script
from scripted_training import STEPS, grid_of, played, recipe_values, rows, scripted_trainer, shown, step_to

from maporl import Debate, Propose
from maporl.environments.world import World
from maporl.errors import ConfigError
from maporl.methods.rl_anything import Consistency
from maporl.protocols import build_protocol, speakers
from maporl.protocols.judging import StepJudge, judge_of, judged
from maporl.runs.train import train
from maporl.storage.run_folder import RunFolder
from maporl.training.dialogue_metrics import dialogue_metrics
from maporl.types import Dialogue, Example, Utterance
from maporl.validation.load import from_dict
from maporl.validation.preflight import check_run


def test_the_published_rewards_and_advantages_of_rl_anything(tmp_path):
    """Outcomes 1 1 -1 -1, verdicts (1 1 -1) (1 -1 unreadable) (1 1 1) (-1 -1 -1): steps earn 1.3333 1 0 -2, advantages
    .9623 .7057 -.0642 -1.6038. Verdicts earn 1.3333 1.3333 -1.3333, advantages .7071 .7071 -1.4142; and 1 -1 -2, 1.3363
    -.2673 -1.0690."""
    trainer = scripted_trainer(one_step_values(tmp_path), script)
    batch = played(trainer)
    worth = {0: 1.3333, 1: 1.0, 2: 0.0, 3: -2.0}
    for d in batch.dialogues:
        step, *said = d.utterances
        assert [u.role for u in said] == ["judge"] * 3 and all(u.caller == step.id and u.fresh for u in said)
        assert step.text in said[0].messages[0]["content"] and d.example.question in said[0].messages[0]["content"]
        assert step.rewards["credit"] == pytest.approx(worth[d.rollout], abs=1e-4)
        assert [u.rewards["credit"] for u in said] == pytest.approx(
            [-2.0 if sign is None else worth[d.rollout] * sign for sign in VERDICTS[d.rollout]], abs=1e-4
        )
    found = {"ann": {}, "judge": {}}
    for row in rows(batch):
        d = next(d for d in batch.dialogues if any(u is row.utterance for u in d.utterances))
        found[row.policy].setdefault((d.prompt, d.rollout), []).append(row.advantage)
    steps = {0: 0.9623, 1: 0.7057, 2: -0.0642, 3: -1.6038}
    for (_, rollout), (advantage,) in found["ann"].items():
        assert advantage == pytest.approx(steps[rollout], abs=1e-3)
    expected = {0: [0.7071, 0.7071, -1.4142], 1: [1.3363, -0.2673, -1.0690]}
    assert {rollout for _, rollout in found["judge"]} == {0, 1}, "unanimous verdicts have advantage 0, and are left out"
    for (_, rollout), advantages in found["judge"].items():
        assert advantages == pytest.approx(expected[rollout], abs=1e-3)


def test_an_illegal_move_and_a_walk_that_ends_too_late_fail_alike(tmp_path):
    """Through the recipe's own game: of eight walks four arrive, two end with an illegal move and two walk on the spot.
    Their steps earn 1 + 1/3 and -1 - 1/3, whatever the game pays, so that the first ones have advantages of 1 and -1.
    """

    def walk(request):
        rollout = request.rng_key[-2]
        if request.ask.role == "judge":
            good, other = ("good", "bad") if rollout < 4 else ("bad", "good")
            return f"Verdict: {other if request.turn % 3 == 2 else good}"
        here, free, far = grid_of(shown(request), "A", "/")
        if rollout < 4:
            return next(move for move in STEPS if far.get(step_to(here, move, free), 99) < far[here])
        if rollout < 6:
            return "nonsense"
        return next((move for move in STEPS if step_to(here, move, free) == here), "U")

    batch = played(scripted_trainer(recipe_values("rl_anything", tmp_path, branching={"group": 8}), walk))
    lengths = set()
    for d in batch.dialogues:
        steps = [u for u in d.utterances if u.role != "judge"]
        lengths.add((d.rollout >= 4, len(steps)))
        for u in steps:
            verdicts = [v for v in d.utterances if v.caller == u.id]
            signs, worth = [v.tags["verdict"] for v in verdicts], (4 / 3 if d.rollout < 4 else -4 / 3)
            assert sum(signs) == (1 if d.rollout < 4 else -1) and u.rewards["credit"] == pytest.approx(worth)
            assert [v.rewards["credit"] for v in verdicts] == pytest.approx([worth * sign for sign in signs])
    assert {(True, 1), (True, 6)} <= lengths, "some fail at once, some at the end"
    first = [row.advantage for row in rows(batch) if row.policy == "shared" and row.utterance.order == 0]
    assert {round(advantage, 3) for advantage in first} == {1.0, -1.0}


def test_random_outcomes_and_verdicts_are_paid_as_published():
    """The published code, restated: O is 1 or -1, an unreadable verdict is 0 in the mean of three and earns -2; a
    question teaches the team at 1/8 to 7/8 successes and the judge at .2 to .8."""
    rng = random.Random(0)
    for _ in range(200):
        outcomes = [rng.choice((1.0, 0.0, -1.5)) for _ in range(8)]
        verdicts = [tuple(rng.choice((1, -1, None)) for _ in range(3)) for _ in outcomes]
        dialogues = [judged_dialogue(n, o, v) for n, (o, v) in enumerate(zip(outcomes, verdicts, strict=True))]
        credits = [dict.fromkeys(range(4), outcome) for outcome in outcomes]
        found = Consistency(failure=-1.0)(dialogues, credits)
        share = sum(outcome == 1 for outcome in outcomes) / 8
        for outcome, signs, own in zip(outcomes, verdicts, found, strict=True):
            reward = (1 if outcome == 1 else -1) + sum(sign or 0 for sign in signs) / 3
            assert own[0] == pytest.approx(reward if 1 / 8 <= share <= 7 / 8 else 0.0)
            for number, sign in enumerate(signs, 1):
                expected = -2.0 if sign is None else reward * sign
                assert own[number] == pytest.approx(expected if 0.2 <= share <= 0.8 else 0.0)
        order = rng.sample(range(8), 8)
        moved = Consistency(failure=-1.0)([dialogues[n] for n in order], [credits[n] for n in order])
        assert moved == [found[n] for n in order], "the order of dialogues is irrelevant"


def verdict_metrics(dialogues):
    metrics = dialogue_metrics(dialogues, World(), ())
    return {name: value for name, value in metrics.items() if name.startswith("verdicts/")}


def test_metrics_say_whether_verdicts_follow_the_outcome(tmp_path):
    """Successes have the verdicts 1 1 -1 and 1 -1 -1, failures 1 1 1 and -1 -1 -1: (3/6 + 3/6) / 2."""
    verdicts = ((1, 1, -1), (1, -1, -1), (1, 1, 1), (-1, -1, -1))
    batch = played(scripted_trainer(one_step_values(tmp_path), partial(script, verdicts=verdicts)))
    assert verdict_metrics(batch.dialogues) == {
        "verdicts/unreadable": 0.0, "verdicts/good": 0.5, "verdicts/balanced_accuracy": 0.5,
    }  # fmt: skip
    verdicts = ((1, 1, 1), (1, 1, None), (-1, 1, -1), (-1, None, -1))
    batch = played(scripted_trainer(one_step_values(tmp_path), partial(script, verdicts=verdicts)))
    found = verdict_metrics(batch.dialogues)
    assert found["verdicts/unreadable"] == pytest.approx(1 / 6) and found["verdicts/good"] == 0.6
    assert found["verdicts/balanced_accuracy"] == pytest.approx((1 + 4 / 5) / 2)
    batch = played(scripted_trainer(one_step_values(tmp_path), partial(script, right=(True,) * 4)))
    assert "verdicts/balanced_accuracy" not in verdict_metrics(batch.dialogues), "nothing failed"
    assert verdict_metrics([Dialogue(Example("q", "?", "1"), [])]) == {}


def judged_dialogue(rollout, credit, verdicts):
    step = Utterance(0, "ann", "ann", 0, 0, [], "", rewards={"credit": credit})
    said = [
        Utterance(1 + n, "judge", "judge", n, 1, [], "", role="judge", caller=0, tags={"verdict": one})
        for n, one in enumerate(verdicts)
    ]
    return Dialogue(Example("q", "?", "1"), [step, *said], rollout=rollout)


def paid(outcomes, rule=None, verdicts=(1, None, -1)):
    dialogues = [judged_dialogue(n, outcome, verdicts) for n, outcome in enumerate(outcomes)]
    return (rule or Consistency())(dialogues, [dict.fromkeys(range(4), outcome) for outcome in outcomes])


def test_a_failure_an_unreadable_verdict_and_the_weight_of_verdicts_are_options():
    _, second = paid([1.0, 0.0], verdicts=(1, 1, None))
    assert second[0] == 2 / 3, "a failure counts 0 by default"
    first, _ = paid([1.0, 0.0], Consistency(weight=0.75, unreadable=-1.0), verdicts=(1, 1, None))
    assert first == {0: 1.5, 1: 1.5, 2: 1.5, 3: -1.0}


@pytest.mark.parametrize(
    "options, words",
    [
        ({"failure": 1.0}, "failure: expected a finite number below 1, .* got 1.0"),
        ({"failure": float("nan")}, "failure: expected a finite number below 1, .* got nan"),
        ({"weight": -0.5}, "weight: expected a number of at least 0, got -0.5"),
        ({"unreadable": float("inf")}, "unreadable: expected a finite number, got inf"),
        ({"least": 0.9}, "least, most: expected shares that rise from 0 to 1, got 0.9, 0.875"),
    ],
)
def test_options_of_the_rule_are_checked(options, words):
    with pytest.raises(ValueError, match=words):
        Consistency(**options)


def test_questions_that_are_too_easy_or_too_hard_teach_nobody():
    """rl_anything: with eight dialogues, 1 to 7 must succeed for the team, and 2 to 6 for the judge."""
    for successes in range(9):
        found = paid([1.0] * successes + [0.0] * (8 - successes), verdicts=(1, 1, 1))
        assert all((own[0] != 0) == (1 <= successes <= 7) for own in found), successes
        assert all((own[1] != 0) == (2 <= successes <= 6) for own in found), successes
    assert paid([1.0])[0][0] == 1.0, "the share of one dialogue says nothing"


def test_a_judge_is_no_player_and_is_not_asked_in_evaluations(tmp_path):
    section = {"name": "debate", "turns": 2, "step_judge": {"agent": "judge"}}
    protocol = build_protocol(section, ("ann", "bob", "judge"))
    assert isinstance(protocol, Debate) and protocol.label == "debate" and protocol.roles
    assert speakers(section, ("ann", "bob", "judge"), protocol) == ("ann", "bob", "judge")
    assert protocol == judged(Debate(turns=2), StepJudge("judge")) != Debate(turns=2)
    assert judge_of(replace(protocol, turns=1)) == StepJudge("judge") and judge_of(Debate()) is None
    trainer = scripted_trainer(one_step_values(tmp_path), script)
    held_out = trainer.player.play_evaluation(trainer.task, 2, trainer.args.decoding, 0)
    assert [u.agent for d in held_out for u in d.utterances] == ["ann", "ann"]


def test_a_judged_protocol_is_evaluated_as_it_is_without_its_judge():
    """A proposer, too, is silent there."""
    held_out = judged(Propose(), StepJudge("judge")).in_evaluation()
    (ask,) = next(held_out.play(Example("e", "1+1", "2"), ("ann", "bob", "judge")))
    assert (ask.agent, ask.role, ask.messages[0]["content"]) == ("bob", "solver", "1+1")
    assert judge_of(held_out) == StepJudge("judge")


@pytest.mark.parametrize(
    ("judge", "message"),
    [
        ({"agent": "eve"}, r"protocol\.step_judge\.agent: expected one of"),
        ({"agent": "judge", "samples": 0}, "samples: expected at least 1, got 0"),
        ({"agent": "judge", "text": "Good?"}, r"text: it must contain \{said\}"),
        ({"agent": "judge", "good": "("}, "good"),
        ("judge", r"protocol\.step_judge: expected options, as \{agent: judge\}, got 'judge'"),
    ],
)
def test_a_judge_of_steps_that_cannot_serve_is_refused(judge, message, tmp_path):
    values = one_step_values(tmp_path)
    values["protocol"]["step_judge"] = judge
    with pytest.raises(ConfigError, match=message):
        check_run(from_dict(values, "test"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"protocol": {"name": "call_return"}, "agents": {"ann": {}, "bob": {}}},
            "consistency pays verdicts on what was said, and nobody gives any",
        ),
        ({"agents": {"judge": {}}}, r"protocol\.step_judge: 'judge' is the only agent"),
        ({"branching": {"how": "tree", "group": 2}}, "steps that nothing scores yet"),
    ],
)
def test_where_steps_cannot_be_judged_is_named(changes, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        check_run(from_dict(one_step_values(tmp_path, **changes), "test"))


def verdicts_learned(folder, seed, **options):
    """The last metrics of a judge that learns about a team that does not: it is right in about half of its sums, of
    four."""
    tiny = {"alphabet": "0123456789+=?Verdict: gobaN", "hidden_size": 64, "layers": 2, "context": 64}
    values = recipe_values("rl_anything", folder) | {
        "updates": 180,
        "seed": seed,
        "task": {"name": "toy_sum", "largest": 1},
        "agents": {"ann": {"tiny": tiny, "learning_rate": 1e-7}, "judge": {"tiny": tiny}},
        "protocol": {"name": "debate", "turns": 1, "step_judge": {"agent": "judge", "text": "{question}{said}?"}},
        "warm_start": {"steps": 150, "learning_rate": 2e-3, "wrong": 0.5},
        "evaluation": {"questions": 0},
    }
    values["reward"] = {"sources": {"label": 1.0}, "rules": ["last", {"consistency": options}]}
    values["ppo"] |= {"response_length": 14, "temperature": 1.0}
    values["training"] |= {"learning_rate": 5e-4, "per_device_train_batch_size": 64, "gradient_accumulation_steps": 1}
    train(from_dict(values, "test"), resume=False, quiet=True)
    last = RunFolder(folder).read_metrics()[-20:]
    return [fmean(one[f"verdicts/{name}"] for one in last) for name in ("good", "balanced_accuracy")]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
def test_a_judge_learns_to_judge_if_failures_count_and_else_to_agree(seed, tmp_path):
    """rl_anything: a judge that begins by calling most steps good ends by calling all of them good, although half are
    wrong, if a failure counts 0. Where it counts -1, as published, the judge learns to judge."""
    good, accuracy = verdicts_learned(tmp_path / "zero", seed, failure=0.0)
    assert good > 0.95 and accuracy < 0.55
    _, accuracy = verdicts_learned(tmp_path / "published", seed, failure=-1.0)
    assert accuracy > 0.7
