"""C3 (arXiv 2603.06859) compares answers to the same transcript; its form without a critic is made of existing
parts."""

import random
from collections import defaultdict
from itertools import count

import pytest
import torch
from scripted_training import played, recipe_values, rows, scripted_trainer

from maporl.advantages import AdvantageConfig, TurnBatch, estimate
from maporl.config.schema import BranchingSection
from maporl.errors import ConfigError
from maporl.validation.load import from_dict

LEAVES = [[1, 1, 0, 1], [0, 1, 0, 0]]


def credited(tmp_path, leaves, **sections):
    """By question, the advantages of the reasoner's messages, and under each message those of the actor's answers."""
    values = recipe_values("c3", tmp_path, branching={"group": [2, 4]}, task={"largest": 4}, **sections)
    values["ppo"] |= {"response_length": 8}
    written, answered = defaultdict(int), defaultdict(int)

    def script(request):
        question = request.example.id
        if request.ask.agent == "reasoner":
            written[question] += 1
            return f"m{written[question]}"
        message = 1 if "m1" in request.ask.messages[-1]["content"] else 2
        answered[question, message] += 1
        right = leaves[message - 1][answered[question, message] - 1]
        return request.example.answer if right else "x"

    batch = played(scripted_trainer(values, script))
    messages, answers = defaultdict(dict), defaultdict(list)
    for row in rows(batch):
        if row.utterance.agent == "reasoner":
            messages[row.dialogue.prompt][row.utterance.text] = row.advantage
        else:
            answers[row.dialogue.prompt, row.dialogue.utterances[0].text].append(row.advantage)
    return messages, answers


@pytest.mark.parametrize("name", ["c3", "c3_assisted", "mhgpo"])
def test_where_all_answers_are_right_no_noise_of_the_kl_or_of_a_critic_is_an_advantage(name, tmp_path):
    """The policy has moved away from the reference, as it has after any update. All advantages were 1 or -1."""
    values = recipe_values(name, tmp_path, task={"largest": 4})
    values["ppo"] |= {"response_length": 8}
    written = count()

    def script(request):
        return request.example.answer if request.ask.agent in ("actor", "answerer") else f"m{next(written)}"

    trainer = scripted_trainer(values, script)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in trainer.team.policies["shared"].model.parameters():
            parameter += 1e-2 * torch.randn_like(parameter)
    batch = played(trainer)
    assert batch.metrics["shared/objective/kl_k3"] > 1e-3
    found = [row.advantage for row in rows(batch)]
    assert len(found) >= 20 and set(found) == {0.0}


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"advantage": {"baseline": "mean", "key": ["prompt", "agent"]}}, "kl_in: loss"),
        ({"advantage": {"baseline": "loo", "key": ["prompt"]}}, "advantage.scale: none"),
        (
            {"advantage": {"scale": "none", "key": ["prompt"], "plus": [{"scale": "std"}]}},
            "advantage.plus.0.scale: none",
        ),
        (
            {"advantage": {"baseline": "critic", "key": ["prompt", "agent"]}, "ppo": {"kl_coef": 0}},
            "the critic's error",
        ),
        ({"advantage": {"scale": "none", "post": [{"whiten": {"key": ["prompt"]}}]}}, "or leave whiten out"),
        (
            {
                "advantage": {"baseline": "none", "scale": "none", "post": ["cumulative_kl"]},
                "ppo": {"kl_in": "loss", "kl_estimator": "k3"},
            },
            "set ppo.kl_in: reward",
        ),
    ],
)
def test_what_differs_by_noise_is_not_divided_by_its_own_spread(changes, remedy, tmp_path):
    values = recipe_values("grpo", tmp_path)
    values["ppo"] |= {"kl_coef": 0.01, "kl_in": "reward"} | changes.get("ppo", {})
    values["advantage"] = {"returns": "utterance", "baseline": "mean", "scale": "std", **changes["advantage"]}
    values["training"] |= {"critic": "head"}
    with pytest.raises(ConfigError, match=remedy):
        from_dict(values, "test")
    values["ppo"] |= {"kl_in": "loss", "kl_estimator": "k3"}
    if "critic" not in remedy and "reward" not in remedy:
        from_dict(values, "test")


@pytest.mark.parametrize("baseline", ["none", "mean", "loo", "max", "batch_mean", "assisted"])
@pytest.mark.parametrize("scale", ["std", "token_std", "raw_std", "agent_std", "batch_std"])
def test_equal_rewards_of_a_question_earn_nothing_whatever_they_are_compared_with(baseline, scale):
    """0.3 and 0.1 + 0.2 are equal but for rounding; a million came out where these were divided by eps alone."""
    rng = random.Random(0)
    batch = TurnBatch(
        reward=[0.3, 0.1 + 0.2, 0.3, 0.1 + 0.2], value=[rng.random() for _ in range(4)], prompt=[0] * 4, rollout=list(range(4)),
        agent=["ann"] * 4, tokens=[3, 5, 2, 7],
    )  # fmt: skip
    config = AdvantageConfig(returns="utterance", baseline=baseline, scale=scale, key=("prompt", "agent"))
    assert estimate(batch, config).tolist() == [0.0] * 4


Z = {1: [0.5774, 0.5774, -1.7321, 0.5774], 2: [-0.5774, 1.7321, -0.5774, -0.5774]}
BY_SIZE = {1: [1 / 3, 1 / 3, -1, 1 / 3], 2: [-1 / 3, 1, -1 / 3, -1 / 3]}


@pytest.mark.parametrize(
    ("advantage", "message", "expected"), [({}, 1.0, Z), ({"baseline": "loo", "scale": "none"}, 0.5, BY_SIZE)]
)
def test_c3_compares_what_continues_the_same_transcript(tmp_path, advantage, message, expected):
    """The recipe c3: two messages and four answers to each are ten rows a question, and every message is one of
    them."""
    messages, answers = credited(tmp_path, LEAVES, advantage=advantage)
    assert len(messages) == 4
    for prompt, own in messages.items():
        assert own == {"m1": pytest.approx(message, abs=1e-3), "m2": pytest.approx(-message, abs=1e-3)}
        for number in (1, 2):
            assert sorted(answers[prompt, f"m{number}"]) == pytest.approx(sorted(expected[number]), abs=1e-3)


@pytest.mark.parametrize(("group", "numbers"), [((2, 4), [2, 4, 4]), (3, [3, 3, 3]), ((3, 1), [3, 1, 1])])
def test_the_last_number_of_a_list_holds_for_all_later_steps(group, numbers):
    branching = BranchingSection(how="fork_every", group=group)
    assert [branching.at(step) for step in range(3)] == numbers and branching.most == max(numbers)


@pytest.mark.parametrize(
    ("branching", "words"),
    [
        ({"how": "tree", "group": [2, 4]}, "a list says how many branches each step has, which needs how: fork_every"),
        ({"how": "fork_every", "group": [1, 1]}, "fork_every needs at least 2 dialogues"),
        ({"how": "fork_every", "group": []}, "branching.group: expected at least one, got \\[\\]"),
        ({"how": "fork_every", "group": [2, "x"]}, "^test: branching.group.1: expected a whole number, got 'x'$"),
    ],
)
def test_wrong_numbers_of_branches_are_refused(tmp_path, branching, words):
    values = recipe_values("c3", tmp_path)
    values["branching"] = branching
    with pytest.raises(ValueError, match=words):
        from_dict(values, "test")


# -- with a critic ----------------------------------------------------------------------------------------------------

REWARDS, FORECASTS = [1.0, 1.0, 0.0, 1.0], [0.8, 0.6, 0.5, 0.7]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"scale": "none"}, [0.4, 0.3333, -0.7, 0.3667]),
        ({}, [0.6487, 0.5045, -1.7298, 0.5766]),
        ({"scale": "none", "alpha": 0.5}, [0.3667, 0.3333, -0.85, 0.35]),
        ({"scale": "none", "alpha": 0.0}, [1 / 3, 1 / 3, -1, 1 / 3]),
    ],
    ids=["differences", "normalised", "half of the critic", "without the critic"],
)
def test_c3_with_a_critic_on_one_group(options, expected):
    batch = TurnBatch(reward=REWARDS, value=FORECASTS, prompt=[0] * 4)
    given = {"returns": "utterance", "baseline": "assisted", "scale": "std", "ddof": 0, "eps": 1e-8, "key": ("prompt",)}
    found = estimate(batch, AdvantageConfig(**(given | options)))
    torch.testing.assert_close(found.float(), torch.tensor(expected), atol=1e-3, rtol=0)


def assisted_batch(tmp_path):
    """The next update of the recipe c3_assisted, in which two of three answers are right."""
    values = recipe_values("c3_assisted", tmp_path, task={"largest": 4}, branching={"group": [2, 4]})
    values["ppo"] |= {"response_length": 8}
    said = defaultdict(int)

    def script(request):
        said[request.example.id, request.ask.agent] += 1
        number = said[request.example.id, request.ask.agent]
        if request.ask.agent == "reasoner":
            return f"m{number}"
        return request.example.answer if number % 3 else "x"

    return played(scripted_trainer(values, script))


def siblings(batch):
    """The rows of each group of siblings: (return, the critic's value of the last token, advantage, row, token
    batch)."""
    groups = defaultdict(list)
    for policy, tokens in batch.token_batches.items():
        for i, sample in enumerate(tokens.sample.tolist()):
            columns = batch.samples[policy][sample].columns
            before = columns.earlier[-1][2] if columns.earlier else columns.values["prompt"]
            last = int(tokens.sampled_mask[i].nonzero().max())
            advantage = float(tokens.advantages[i, last])
            groups[before].append((float(tokens.score[i]), float(tokens.values[i, last]), advantage, i, tokens))
    return list(groups.values())


def test_c3_assisted_compares_rewards_with_what_a_critic_expects_of_siblings(tmp_path):
    groups = siblings(assisted_batch(tmp_path))
    assert sorted(len(group) for group in groups) == [2] * 4 + [4] * 8
    for group in groups:
        n = len(group)
        rewards, forecasts = (torch.tensor([row[k] for row in group], dtype=torch.float64) for k in (0, 1))
        raw = rewards - (forecasts.sum() - forecasts) / (n - 1)
        expected = (raw - raw.mean()) / (raw.std(correction=0) + 1e-8)
        torch.testing.assert_close(torch.tensor([row[2] for row in group]), expected.float(), atol=2e-3, rtol=1e-3)


def test_the_critic_of_c3_assisted_learns_from_what_follows_a_message(tmp_path):
    for group in siblings(assisted_batch(tmp_path)):
        for reward, _, _, i, tokens in group:
            last = int(tokens.sampled_mask[i].nonzero().max())
            assert tokens.value_mask[i].nonzero().flatten().tolist() == [last]
            assert float(tokens.returns[i, last]) == pytest.approx(reward)


def test_a_baseline_that_reads_what_was_said_needs_a_number_for_each_utterance(tmp_path):
    values = recipe_values("c3_assisted", tmp_path, advantage={"returns": "turn_gae"})
    with pytest.raises(ValueError, match=r"advantage: baseline \w+ reads the critic after an utterance"):
        from_dict(values, "test")
