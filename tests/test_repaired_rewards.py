"""Rewards and published numbers, from the dialogue to the advantage, as the recipes' and experiments' own files say."""

from collections import Counter

import pytest
from scripted_training import played, recipe_values, rows, scripted_trainer

from maporl.config.recipes import tiny_version
from maporl.errors import ConfigError
from maporl.validation.load import from_dict

# -- G-RA -----------------------------------------------------------------------------------------------------------------

LENGTHS = (2, 8, 1, 9)
"""Of each rollout, the tokens of its answer with the one that ends it. Of ten tokens, brevity is .8 .2 .9 .1."""


def brief_or_not():
    """Return a script by which the first two rollouts of a question are right, and the others wrong."""
    rollouts: Counter[str] = Counter()

    def script(request):
        rollout = rollouts[request.example.id]
        rollouts[request.example.id] += 1
        length = LENGTHS[rollout] - 1
        return request.example.answer.rjust(length, "0") if rollout < 2 else "x" * length

    return script


def g_ra(folder, **reward):
    """Return the credit and the advantage of the four rollouts of a question, which are the same for all questions."""
    values = recipe_values("g_ra", folder, branching={"group": 4}, task={"largest": 4}, ppo={"response_length": 10})
    values["reward"] |= {"brevity": {"tokens": 10}} | reward
    found = {}
    for row in rows(played(scripted_trainer(values, brief_or_not()))):
        pair = (round(row.utterance.rewards["credit"], 6), round(row.advantage, 6))
        found.setdefault(len(row.utterance.response_ids), set()).add(pair)
    assert [len(found[length]) for length in LENGTHS] == [1] * 4
    return [pair for length in LENGTHS for pair in found[length]]


@pytest.mark.parametrize(
    ("reward", "credits", "advantages"),
    [
        ({}, [1.8, 1.2, 0, 0], [1.1667, 0.5, -0.8333, -0.8333]),
        ({"sources": {"label": 1.0, "brevity": 1.0}, "rules": ["own"]}, [1.8, 1.2, 0.9, 0.1], [1.1314, 0.2828, -0.1414, -1.2728]),
        ({"sources": {"label": 1.0}, "rules": ["own"]}, [1, 1, 0, 0], [0.8660, 0.8660, -0.8660, -0.8660]),
    ],
    ids=["gate", "sum", "label"],
)  # fmt: skip
def test_g_ra_gates_brevity_by_the_label(tmp_path, reward, credits, advantages):
    """The recipe's file, its sum without the gate, and the label alone: three different methods on its own task."""
    got = g_ra(tmp_path, **reward)
    assert [credit for credit, _ in got] == pytest.approx(credits)
    assert [advantage for _, advantage in got] == pytest.approx(advantages, abs=1e-4)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"rules": [{"gate": {"order": ["label", "format"]}}], "sources": {"label": 1, "format": 0}}, "'format' never varies behind 'label'"),
        ({"rules": [{"gate": {"order": ["label", "near"]}}], "sources": {"label": 1, "near": 0}}, "'near' never varies behind 'label'"),
        ({"rules": [{"gate": {"order": ["near", "format"]}}], "sources": {"near": 1, "format": 0}}, "'format' never varies behind 'near'"),
        ({"rules": [{"gate": {"order": ["label", "label"]}}]}, "'label' never varies behind 'label'"),
        ({"rules": [{"gate": {"order": []}}]}, "expected the names of rewards"),
        ({"rules": [{"gate": {"order": ["label", "brief"]}}]}, "gate reads the reward 'brief', which nothing gives here"),
        ({"rules": [{"mix": {"weights": {"callees/format": 0.1}}}]}, "mix reads the reward 'format', which nothing gives"),
        ({"rules": [{"tier": {"proximity": "near"}}]}, "tier reads the reward 'near', which nothing gives here"),
        ({"sources": {"label": 1, "brevity": 0}, "brevity": None}, r"reward.brevity: the source 'brevity' needs it; for example"),
    ],
)  # fmt: skip
def test_a_lower_reward_that_cannot_act_is_refused(tmp_path, reward, message):
    values = tiny_version("g_ra", str(tmp_path))
    values["reward"] = {"sources": {"label": 1.0}, "rules": ["own"], **reward}
    with pytest.raises(ConfigError, match=message):
        from_dict(values)


def test_behind_an_open_gate_the_lower_reward_varies(tmp_path):
    """Below a negative threshold a wrong answer passes too, so the form of the answer does vary."""
    values = tiny_version("g_ra", str(tmp_path))
    values["reward"] |= {"sources": {"label": 1, "format": 0}, "rules": [{"gate": {"order": ["label", "format"], "threshold": -1}}]}  # fmt: skip
    assert from_dict(values).reward.rules == ({"gate": {"order": ["label", "format"], "threshold": -1}},)
