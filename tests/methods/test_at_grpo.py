"""The filter of AT-GRPO: of each policy's groups, those with the lowest mean rewards are not trained on."""

import random

import pytest
import torch
from invariant_runs import by_name, guess
from launches import trained
from scripted_training import played, recipe_values, route, rows, scripted_trainer

from maporl.advantages.batch import TurnBatch
from maporl.advantages.transforms import build_transforms
from maporl.config.schema import AdvantageConfig
from maporl.errors import ConfigError
from maporl.validation.load import load
from trl_ext.ppo.options import Decoding

KEY = ("prompt", "agent", "turn")


def kept(batch, **options):
    """The numbers of the prompts that stay."""
    (transform,) = build_transforms(AdvantageConfig(post=({"drop_groups": options},)))
    return [batch.prompt[i] for i, weight in enumerate(transform.weigh(batch).tolist()) if weight]


def pairs(*means):
    """A group of two for each mean: half of it more and half of it less."""
    return TurnBatch(
        reward=[mean + half for mean in means for half in (-0.5, 0.5)],
        prompt=[n for n in range(len(means)) for _ in range(2)],
    )


def test_the_share_with_the_lowest_means_goes_and_is_rounded_down():
    batch = pairs(0.25, 0.0, 1.0, 0.5)
    assert kept(batch) == [2, 2, 3, 3]
    assert kept(batch, share=0.25) == [0, 0, 2, 2, 3, 3] and kept(batch, share=0.24) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert kept(pairs(3.0, 2.0, 1.0)) == [0, 0, 1, 1] and kept(pairs(1.0)) == [0, 0]
    many = pairs(*range(100))
    assert [len(kept(many, share=share)) // 2 for share in (0.29, 0.57, 0.7)] == [71, 43, 30]
    assert 100 * 0.29 < 29 and 100 * 0.57 < 57, "in float64"


def test_of_equal_means_the_first_key_goes_and_rounding_is_no_difference():
    batch = TurnBatch(reward=[0.3, 0.2, 0.1, 0.1, 0.2, 0.3, 0.1 + 0.1, 0.2, 0.2], prompt=[12, 12, 12, 3, 3, 3, 7, 7, 7])
    assert kept(batch, share=0.4) == [12, 12, 12, 7, 7, 7]
    assert kept(batch, share=0.7) == [12, 12, 12]


def test_each_policys_groups_are_ranked_by_themselves():
    """Bob's are all better than Ann's, and both lose one of two."""
    batch = TurnBatch(reward=[0, 1, 5, 4], prompt=[0, 1, 0, 1], policy=["ann", "ann", "bob", "bob"])
    assert kept(batch) == [1, 0]
    one = TurnBatch(reward=[0, 1, 5, 4], prompt=[0, 1, 2, 3], policy=["ann"] * 4)
    assert kept(one) == [2, 3]


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("at_grpo_shared", {("planner", n) for n in range(4)}),
        ("at_grpo_roles", {("planner", 2), ("planner", 3), ("tool", 2), ("tool", 3)}),
    ],
)
def test_the_half_of_each_policys_groups_that_earned_less_is_left_out(recipe, expected, tmp_path):
    """On question n the tool agent plans well n + 1 times of four, and so earns -1.25, -0.5, 0.25 and 1; the planner
    always does, and earns 2.

    One policy for both keeps the planner's four groups. With a policy each, both keep those of the last two questions.
    """
    values = recipe_values(recipe, tmp_path, branching={"group": 4}, training={"per_device_train_batch_size": 4})
    numbers = {}

    def script(request):
        number = numbers.setdefault(request.example.id, len(numbers))
        candidate = int(request.label.rpartition(".")[2])
        good = request.ask.agent == "planner" or candidate <= number
        return f"#### {route(request)}" if good else "#### nothing"

    batch = played(scripted_trainer(values, script))
    first = min(d.prompt for d in batch.dialogues)
    found = rows(batch)
    assert {(row.utterance.agent, row.dialogue.prompt - first) for row in found} == expected
    assert len(found) == 4 * 4 and {row.weight for row in found} == {1.0}
    shares = {name: value for name, value in batch.metrics.items() if name.endswith("frac_groups_dropped")}
    assert shares == {f"{policy}/frac_groups_dropped": 0.5 for policy in batch.token_batches}
    third = [row for row in found if row.utterance.agent == "tool" and row.dialogue.prompt - first == 2]
    expected = [-1.5, 0.5, 0.5, 0.5] if recipe == "at_grpo_roles" else []
    assert sorted(round(row.advantage, 4) for row in third) == expected


@pytest.mark.parametrize("seed", range(3))
def test_groups_are_ranked_by_their_scores_and_not_by_their_kl(seed, tmp_path):
    """Questions of four answers, of which 0 to 3 are right. The KL of each token, up to 1, counts 10 in the reward."""
    right = [0, 1, 2, 3]
    random.Random(seed).shuffle(right)
    numbers = {}

    def script(request):
        number = numbers.setdefault(request.example.id, len(numbers))
        return request.example.answer if int(request.label.rpartition(".")[2]) < right[number] else "100"

    values = recipe_values("grpo", tmp_path, branching={"group": 4}, training={"per_device_train_batch_size": 4})
    post = [{"drop_groups": {"key": KEY}}]
    values["advantage"] = {"returns": "utterance", "baseline": "mean", "scale": "none", "key": KEY, "post": post}
    values["ppo"] |= {"kl_coef": 10.0, "kl_in": "reward", "kl_estimator": "k1", "num_mini_batches": 1}
    trainer = scripted_trainer(values, script)
    guess(trainer, by_name)
    batch = played(trainer)
    found = rows(batch)
    assert len({round(row.advantage, 3) for row in found}) > 8, "the KL counts in what is compared"
    assert {right[row.dialogue.prompt] for row in found} == {2, 3} and len(found) == 2 * 4 * 4


SAMPLED = {
    "at_grpo_shared": Decoding(0.0, 1.0, 0),
    "at_grpo_roles": Decoding(0.6, 0.95, 20),
    "at_grpo_code": Decoding(0.6, 0.95, 20),
}
"""How evaluations are sampled."""


@pytest.mark.parametrize("recipe", SAMPLED)
def test_the_published_workload_and_its_sampling(recipe):
    config = load(recipe)
    assert config.protocol.get("options", config.protocol)["rounds"] == 5 and config.branching.group == 8
    assert config.ppo.num_mini_batches * config.ppo.num_ppo_epochs == 2 and config.questions_per_update() == 32
    sampling = config.ppo.temperature, config.ppo.top_p, config.ppo.top_k, config.ppo.response_length
    assert sampling == (1.0, 0.9, 20, 2048)
    assert config.evaluation.decoding == SAMPLED[recipe]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("share: 1.0", "share: expected a number from 0 to below 1, got 1"),
        ("key: []", r"key: expected the columns whose rows form a group, such as \[prompt\], got \[\]"),
        ("key: [task]", "drop_groups names the column 'task', which is not recorded; there are"),
    ],
)
def test_a_wrong_share_and_a_column_that_is_not_recorded_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        load("at_grpo_shared", [f"advantage.post=[{{drop_groups: {{{options}}}}}]"])


@pytest.mark.slow
def test_several_processes_drop_the_groups_that_one_would(tmp_path):
    """Many groups have equal means here, so that their order decides, which is that of their keys."""
    advantage = {
        "returns": "utterance", "baseline": "none", "scale": "none", "key": KEY, "post": [{"drop_groups": {"key": KEY}}],
    }  # fmt: skip
    one, _ = trained(tmp_path / "one", 1, advantage=advantage)
    two, _ = trained(tmp_path / "two", 2, advantage=advantage)
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, atol=1e-5, rtol=0, msg=lambda text, key=key: f"{key}: {text}")
