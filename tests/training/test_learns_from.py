"""What a run learns from is said in plain sentences, made from its parts, and a run records whose scores paid for what."""

import json
import logging
from dataclasses import dataclass

import pytest

from maporl import Agent, Arithmetic, Ask, MultiAgentPPOConfig, MultiAgentPPOTrainer, Protocol, RewardSection, Team
from maporl.config.schema import AdvantageConfig, BonusSection, BranchingSection, ChargeSection, PenaltySection
from maporl.decoding import TeamSampling
from maporl.report.page import payload
from maporl.report.read import read_run
from maporl.training.learns_from import facts_of, learns_from
from trl_ext.ppo.options import PPOOptions

MADE = {"learning_rate": 1e-4, "critic": "head", "critic_learning_rate": 2e-4, "objective": "ppo"}
ANN = facts_of(MADE, ["ann"], True, PPOOptions(), {}, {"ann": AdvantageConfig()}, TeamSampling(), {"ann": None})


def told(reward=None, advantage=None, branching=None, ppo=None):
    return learns_from(
        reward or RewardSection(),
        [(["ann"], advantage or AdvantageConfig(), ppo or PPOOptions(kl_coef=0.0))],
        branching or BranchingSection(),
        ppo or PPOOptions(kl_coef=0.0),
        {"ann": ANN},
    )[1:]


def test_every_part_that_pays_or_fines_is_named_with_its_numbers():
    reward = RewardSection(
        sources={"label": 1.0, "format": 0.1, "near": -0.5},
        horizon="last",
        bonus=BonusSection(alpha=[1, 0, 0.5, 2]),
        penalties=PenaltySection(min_tokens=50, no_eos=0.0, call=0.2),
        charges={"tokens": ChargeSection(weight=0.01, roles=("critic",))},
    )
    ppo = PPOOptions(kl_coef=0.05, missing_eos_penalty=1.0)
    assert told(reward, ppo=ppo) == [
        "score: label + 0.1 x format - 0.5 x near",
        "credit of an answer: the team's mean score in the last turn",
        "bonus: +1 where a right majority persuades an agent; +0.5 for a wrong answer from which the others become right; "
        "+2 where it persuades the others and is right; the opposite moves cost as much",
        "fines of an answer: fewer than 50 tokens 0.1, no final answer 0.1, it repeats itself 0.1; off its credit alone",
        "fines of calls: each call 0.2; off the credit of what called",
        "fine: 1 off the credit of what does not end by itself",
        "charge: 0.01 x tokens, off the credit of critic alone",
        "KL from the weights before training: 0.05 (k1), off the reward of each token",
        "compared: token_gae with what the critic expects, divided by std over its group",
        "group: the same agent, turn; a question has one dialogue",
    ]


def test_rules_and_comparisons_are_told():
    reward = RewardSection(sources={"label": 1.0, "nll": 0.0}, rules=("last", {"cost": {"per_token": 0.002}}))
    advantage = AdvantageConfig(
        returns="utterance", baseline="loo", scale="none", key=("prompt", "agent"), post=("drop_zeros",)
    )
    assert told(reward, advantage, BranchingSection(group=8)) == [
        "score: label (for rules alone: nll)",
        "credit, rule 1: last (to: all). Every utterance gets the score of the last utterance that has one: the mean, if several were said at once",
        "credit, rule 2: cost (per_token: 0.002). Subtracts per_token for every sampled token, but at most most in all",
        "compared: utterance with loo, the mean of the *other* rows of the group",
        "group: the same prompt, agent; a question has 8 dialogues",
        "then: drop_zeros. " + told(reward, advantage)[-1].removeprefix("then: drop_zeros. "),
    ]


# -- a planner, a solver and a critic that is charged for its words ---------------------------------------------------


@dataclass(frozen=True)
class Crew(Protocol):
    """A plan, a draft, a check of it, and an answer."""

    every_step_scored = False

    def play(self, example, agents):
        planner, solver, critic = agents
        (plan,) = yield [Ask(planner, user(example.question), role="planner", answers=False)]
        (draft,) = yield [Ask(solver, user(plan.text + example.question), role="solver", parents=(plan.id,))]
        (check,) = yield [Ask(critic, user(f"{draft.text}="), role="critic", parents=(draft.id,), answers=False)]
        yield [Ask(solver, user(f"{check.text}="), role="solver", parents=(check.id,))]


def user(text):
    return [{"role": "user", "content": text}]


def ones(dialogues, task):
    """1 for each answer."""
    return [[1.0 if u.answers else None for u in d.utterances] for d in dialogues]


def words(dialogues, task):
    """10 words for a check; nothing else is counted."""
    return [[10.0 if u.role == "critic" else None for u in d.utterances] for d in dialogues]


def crew(folder, tiny, reward, **options):
    team = Team([Agent(n, *tiny(seed=i, hidden_size=32, layers=1)) for i, n in enumerate(["pia", "sol", "cy"])])
    args = MultiAgentPPOConfig(
        output_dir=str(folder), total_episodes=4, per_device_train_batch_size=4, response_length=3, report_to=[],
        use_cpu=True, save_strategy="no", **options,
    )  # fmt: skip
    return MultiAgentPPOTrainer(
        args, team, Arithmetic(largest=9), Crew(), reward=reward, sources={"words": words, "ones": ones}
    )


def test_a_trainer_in_python_says_what_it_learns_from_and_records_whose_score_paid(tmp_path, tiny, capsys):
    charges = {"words": ChargeSection(weight=0.01, roles=("critic",))}
    reward = RewardSection(discount=1.0, charges=charges)
    # transformers derives the default from how much it tells, which commands in other tests change
    trainer = crew(tmp_path / "run", tiny, reward, disable_tqdm=False)
    metrics = trainer.train()
    lines = (tmp_path / "run/learns_from.txt").read_text().splitlines()
    assert "charge: 0.01 x words, off the credit of critic alone" in lines
    printed = capsys.readouterr().out
    assert "\n".join(lines) in printed and f"report: {tmp_path / 'run/report.html'}" in printed
    assert list(metrics)[:2] == ["accuracy/turn_1", "accuracy/turn_2"]
    assert metrics["reward/charge/words/cy"] == pytest.approx(-0.1)
    # the check has what the last answer earned, less its price, and the plan pays nothing of it
    assert metrics["reward/credit/cy"] == pytest.approx(metrics["accuracy/turn_2"] - 0.1)
    assert metrics["reward/credit/pia"] == pytest.approx((metrics["accuracy/turn_1"] + metrics["accuracy/turn_2"]) / 2)
    for line in (tmp_path / "run/dialogues.jsonl").read_text().splitlines():
        for u in json.loads(line)["utterances"]:
            parts = sum(part for _, part in u["trace"]["earned"])
            assert u["rewards"]["credit"] == pytest.approx(parts + u["rewards"].get("charge/words", 0.0), abs=1e-3)


def test_the_page_says_what_a_run_learns_from_and_where_each_credit_came_from(tmp_path, tiny):
    charges = {"words": ChargeSection(weight=0.01, roles=("critic",))}
    reward = RewardSection(sources={"label": 0.0, "ones": 1.0}, discount=1.0, charges=charges)
    crew(tmp_path / "run", tiny, reward, disable_tqdm=True).train()
    content = payload([read_run(tmp_path / "run")])
    assert content["runs"][0]["learns_from"] == (tmp_path / "run/learns_from.txt").read_text().splitlines()
    (rewards,) = (chart for chart in content["charts"] if chart["title"] == "Reward, by name")
    drawn = {line["name"] for line in rewards["series"]}
    assert "credit" in drawn and "words" not in drawn, "beside 10 words, a credit of 1 would be a flat line"
    assert not [chart for chart in content["charts"] if chart["title"] == "Agreement"], "one agent answers"
    plan, draft, check, answer = content["dialogues"][0]["said"]
    assert plan["credited"] == draft["credited"].replace("its own score", "sol's score in turn 1")
    assert draft["credited"] == "Credit 1.00: 0.50 from its own score, 0.50 from sol's score in turn 2."
    assert check["credited"] == "Credit 0.90: 1.00 from sol's score in turn 2, charged 0.10 for words."
    assert answer["credited"] == "Credit 1.00: 1.00 from its own score."


def test_a_source_that_takes_the_place_of_a_shared_credit_is_named_with_the_remedy(tmp_path, tiny, caplog):
    trainer = crew(tmp_path / "run", tiny, RewardSection(sources={"label": 1.0, "words": -0.01}), disable_tqdm=True)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    (said,) = [record.getMessage() for record in caplog.records if "takes the place" in record.getMessage()]
    assert said.startswith("words scores what critic says") and "shown it (sol)" in said
    assert "reward.charges: {words: {roles: [critic], weight: 0.01}}" in said
