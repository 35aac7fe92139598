"""Loops that learn from preferences: Agent-RLVR's repaired answers and Optima's best talks."""

import copy
import itertools
import json
from dataclasses import replace

import pytest
import torch
from scripted_training import recipe_values, sampled

from maporl.config.schema import RewardSection
from maporl.errors import ConfigError, RunError
from maporl.loops.run import Loop, run_loop
from maporl.loops.singles import BestOf, Threshold
from maporl.methods.agent_rlvr import Repair
from maporl.rewards import assign_credit
from maporl.rewards.build import build_sources
from maporl.rewards.scoring import weighted_scores
from maporl.run import ResolvedRun
from maporl.runs.build import build_trainer
from maporl.types import Dialogue, Example, Utterance
from maporl.validation.load import from_dict, load
from maporl.validation.preflight import check_run

# -- Agent-RLVR --------------------------------------------------------------------------------------------------------


def attempt(prompt, rollout, *values):
    """One attempt of a coder at a task, and a second one if there are two values, with guidance of token 30."""
    said = [
        Utterance(n, "coder", "coder", n, n, [], "", role="coder", prompt_ids=[prompt + 20, *[30] * n],
                  response_ids=[5 + 2 * rollout + n, 2], rewards={"credit": value})
        for n, value in enumerate(values)
    ]  # fmt: skip
    return Dialogue(Example(str(prompt), "q", "a"), said, prompt=prompt, rollout=rollout)


def test_a_guided_success_is_learned_without_its_guidance():
    """Three tasks: right at once; wrong, then right with guidance; wrong twice: 1 row for SFT, 1 pair (recipe
    agent_rlvr)."""
    played = [attempt(0, 0, 1.0), attempt(1, 0, 0.0, 1.0), attempt(2, 0, 0.0, 0.0)]
    assert [row.question for row in Threshold(turn=0)(played, ("coder",))] == ["0"]
    assert [row.question for row in Threshold()(played)] == ["0", "1"]
    (pair,) = Repair()(played, ("coder",))
    assert (pair.chosen.question, pair.chosen.completion_ids, pair.rejected.completion_ids) == ("1", [6, 2], [5, 2])
    assert pair.chosen.prompt_ids == pair.rejected.prompt_ids == [21], "30 is the guidance"
    assert Repair(above=1.0)(played) == []


def test_a_wrong_attempt_is_compared_with_any_right_one_of_its_question():
    values = [(0.0, 0.0), (1.0,), (0.0, 1.0), (0.0, 0.0)]
    played = [*(attempt(0, rollout, *own) for rollout, own in enumerate(values)), attempt(1, 0, 1.0)]
    pairs = [(p.chosen.place[1:], p.rejected.place[1:]) for p in Repair()(played)]
    assert pairs == [((1, 0), (0, 0)), ((2, 1), (2, 0)), ((1, 0), (3, 0))]
    played[3].utterances[0].prompt_ids = [9]
    with pytest.raises(RunError, match="shown different tokens"):
        Repair()(played)


def test_a_share_of_the_rows_is_drawn():
    played = [attempt(p, 0, 1.0) for p in range(10)]
    rows = Threshold(share=0.2)(played)
    assert len(rows) == 2 and rows == Threshold(share=0.2)(played)
    assert [row.place for row in rows] == sorted(row.place for row in rows)


def test_an_attempt_that_failed_is_helped_and_one_that_did_not_is_not(tmp_path):
    """Through the loop's own sampling: the coder is right in every second attempt, or when it is helped."""
    values = recipe_values("agent_rlvr", tmp_path / "run", loop={"questions": 2}, evaluation={"questions": 0})
    count = itertools.count()

    def script(request):
        a, b = (int(n) for n in request.example.question.rstrip("=?").split("+"))
        if request.policy == "teacher":
            return "h"
        helped = any("Guidance" in message["content"] for message in request.transcript.messages)
        return str(a + b) if helped or next(count) % 2 else str(a + b + 1)

    dialogues = sampled(values, tmp_path, script)
    right = [len(d.utterances) == 1 for d in dialogues]
    assert len(dialogues) == 6 and right.count(True) == 3
    for d in dialogues:
        first, *others = d.utterances
        assert (first.rewards["credit"] == 1.0) == (not others) and d.outcome == (None if others else "unaided")
        if others:
            teacher, again = others
            assert d.example.answer in teacher.messages[-1]["content"]
            assert again.rewards["credit"] == 1.0 and "h" in again.messages[-1]["content"]
            assert again.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids != again.prompt_ids
    assert all(p.chosen.prompt_ids == p.rejected.prompt_ids for p in Repair()(dialogues, ("coder",)))
    assert len(Repair()(dialogues, ("coder",))) == 3 and len(Threshold(turn=0)(dialogues, ("coder",))) == 3


@pytest.mark.slow
def test_nobody_helps_in_evaluations_and_the_teacher_stays_as_it_is(tmp_path):
    values = recipe_values("agent_rlvr", tmp_path / "run")
    values["task"] = {"name": "toy_sum", "largest": 3}
    values |= {"warm_start": {"steps": 150, "batch_size": 16, "learning_rate": 5e-3}}
    run_loop(from_dict(values, "test"), False, True, lambda line: None)
    held_out = [json.loads(line) for line in (tmp_path / "run/evaluation_after.jsonl").read_text().splitlines()]
    assert held_out and all([u["agent"] for u in d["utterances"]] == ["coder"] for d in held_out)
    manifest = json.loads((tmp_path / "run/round-1/train-2/manifest.json").read_text())
    assert manifest["coder"]["rows"] > 0 and manifest["teacher"]["rows"] == 0
    files = [tmp_path / "run" / part / "teacher" for part in ("initial", "final")]
    weights = [sorted(path.glob("*.safetensors"))[0].read_bytes() for path in files]
    assert weights[0] == weights[1]


def test_help_for_wrong_answers_is_help_with_answers(tmp_path):
    values = recipe_values("agent_rlvr", tmp_path / "run", protocol={"mode": "hint"})
    with pytest.raises(ConfigError, match="when: wrong is about an answer that is criticised; set mode: critic"):
        Loop(ResolvedRun(from_dict(values, "test")), [], True, print)._player(tmp_path)


# -- Optima ------------------------------------------------------------------------------------------------------------


def talk(rollout, right, tokens, nll):
    """A dialogue of two utterances with so many tokens in all, of which the second has the larger ``nll``."""
    said = [
        Utterance(n, name, "shared", 0, n, [], "", prompt_ids=[1], response_ids=[2] * count,
                  rewards={"label": float(right), "nll": nll - 1 + n})
        for n, (name, count) in enumerate((("alice", tokens - 10), ("bob", 10)))
    ]  # fmt: skip
    return Dialogue(Example("q", "1+1=", "2"), said, rollout=rollout)


def worths(dialogues, rules):
    """The credits of each dialogue's utterances, by the recipe's own rules, after the weighted sum of its sources."""
    section = from_dict(recipe_values("optima", "unused")).reward
    weighted_scores(dialogues, section.sources)
    assign_credit(dialogues, ("alice", "bob"), replace(section, rules=rules))
    return [[round(u.rewards["credit"], 4) for u in d.utterances] for d in dialogues]


def test_what_a_dialogue_is_worth_in_optima():
    """l1 -.4, l2 .9: right, 120 of 300 tokens, NLL 2.0 -> 1.29; right, 300, 1.6 -> 1.1625; wrong, 60, 2.5 -> .28 (recipe
    optima)."""
    played = [talk(0, True, 120, 2.0), talk(1, True, 300, 1.6), talk(2, False, 60, 2.5)]
    own = from_dict(recipe_values("optima", "unused")).reward.rules
    assert worths(played, own) == [[1.29, 1.29], [1.1625, 1.1625], [0.28, 0.28]]
    rules = ("last", {"length_share": {"weight": -0.6}}, {"readability": {"weight": 0.7}})
    other = [talk(0, True, 80, 1.6), talk(1, True, 200, 1.4), talk(2, False, 60, 2.5)]
    assert worths(other, rules) == [[1.1975] * 2, [0.9] * 2, [0.1] * 2]
    best = BestOf(keep=1.0, at_least=0.6)(played)
    assert [row.place for row in best] == [(0, 0, 0), (0, 0, 1)]


def test_optima_has_the_numbers_of_its_published_recipe():
    """Those of GSM8K: of the length and the likelihood, of what is taken, of a round and of the sampling."""
    config = load("optima")
    weights = {name: options["weight"] for rule in config.reward.rules[1:] for name, options in rule.items()}
    assert weights == {"length_share": -0.4, "readability": 0.9}
    (stage,) = config.loop.stages
    assert stage.build == {"best_of": {"keep": 0.7, "at_least": 0.6}} and stage.learning_rate == 2e-6
    assert (config.loop.rounds, config.loop.questions, config.branching.group) == (6, 7000, 10)
    assert config.ppo.temperature == 0.7


def test_words_that_are_nearly_certain_are_not_worth_more_than_any_answer():
    assert worths([talk(0, True, 20, 0.001)], ("last", "readability")) == [[9.0, 9.0]]
    with pytest.raises(ConfigError, match=r"least: expected a number above 0, got 0\.0"):
        worths([talk(0, True, 20, 1.0)], ({"readability": {"least": 0.0}},))
    bare = talk(0, True, 20, 1.0)
    for u in bare.utterances:
        del u.rewards["nll"]
    assert worths([bare], ("last", "readability")) == [[1.0, 1.0]]


def test_agents_talk_until_they_agree(tmp_path):
    """Through the loop's own sampling: bob contradicts alice twice. An answer that cannot be read agrees with none."""
    values = recipe_values("optima", tmp_path / "run", loop={"questions": 1}, evaluation={"questions": 0})
    values["task"] = {"name": "toy_sum", "largest": 3}
    values["branching"] = {"group": 2}

    def script(request):
        turn = sum(message["role"] == "assistant" for message in request.transcript.messages)
        if request.rng_key[-2] == 1:  # the number of the dialogue
            return "?" if request.ask.agent == "bob" else "4"
        return "4" if request.ask.agent == "alice" else str(turn + 2)

    first, never = sampled(values, tmp_path, script)
    assert [u.text for u in first.utterances] == ["4", "2", "4", "3", "4", "4"]
    assert first.outcome == "agreement"
    assert never.outcome is None and len(never.utterances) == 2 * min(values["protocol"]["turns"], 5)
    assert all(u.rewards["nll"] > 0 for d in (first, never) for u in d.utterances)
    assert len({u.rewards["credit"] for u in first.utterances}) == 1


def test_the_likelihood_is_that_of_the_weights_before_training(tmp_path):
    """In PPO: after the weights have changed, ``nll`` is still what the first weights say."""
    values = recipe_values("optima", tmp_path / "run")
    for key in ("loop", "recipe"):
        del values[key]
    values |= {"updates": 1, "ppo": values["ppo"] | {"kl_coef": 0.01}, "task": {"name": "toy_sum", "largest": 3}}
    values["training"]["per_device_train_batch_size"] = 2
    values["training"]["gradient_accumulation_steps"] = 1
    trainer = build_trainer(from_dict(values, "test"), quiet=True)
    policy = trainer.team.policies["shared"]
    first = copy.deepcopy(policy.model)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.5)
    batch = trainer.score(trainer.collected())
    said = [u for d in batch.dialogues for u in d.utterances]

    def nll(model, u):
        logits = model(input_ids=torch.tensor([[*u.prompt_ids, *u.response_ids]])).logits[0, len(u.prompt_ids) - 1 : -1]
        return float(torch.nn.functional.cross_entropy(logits, torch.tensor(u.response_ids)).detach())

    expected, changed = ([nll(model, u) for u in said] for model in (first, policy.model))
    assert [u.rewards["nll"] for u in said] == pytest.approx(expected, abs=1e-5)
    assert expected != pytest.approx(changed, abs=1e-3)


def test_weights_that_are_gone_cannot_be_asked(tmp_path):
    values = recipe_values("optima", tmp_path / "run")
    del values["loop"]
    values |= {"updates": 1, "ppo": values["ppo"] | {"kl_coef": 0.0}}
    with pytest.raises(ConfigError, match=r"reward\.sources: nll asks the weights before training, and agents\.alice"):
        check_run(from_dict(values, "test"))
    with pytest.raises(ConfigError, match="only a team that plays has"):
        build_sources(RewardSection(), ["nll"])


def test_agreement_is_between_answers_of_all(tmp_path):
    values = recipe_values("optima", tmp_path / "run", protocol={"answering": "last"})
    with pytest.raises(ConfigError, match="until_agreement: it compares all agents"):
        check_run(from_dict(values, "test"))
