"""The worlds of the claims, through the trainer's own steps: what each arm is paid, before anything is learned."""

import random
import sys
from collections import Counter
from statistics import fmean

import pytest
from folders import ROOT
from scripted_training import played, rows, scripted_trainer

from maporl.config import read_values

sys.path.append(str(ROOT / "benchmarks"))  # last, because benchmarks/reward_server.py has the name of a package
from claims_data import CLAIMS

WORLDS = ROOT / "configs/ppo/claims"


def world(name, folder, **sections):
    """The values of a world's own file, without its warm start."""
    values = read_values(WORLDS / f"{name}.yaml")
    del values["warm_start"]
    for section, changes in sections.items():
        values[section] = values[section] | changes
    return values | {"output_dir": str(folder)}


ARMS = {
    "shared later reward": ([], lambda mean: 0.3 * mean / 1.3),
    "own turn": (["reward.share=individual", "reward.horizon=current"], lambda mean: 0.0),
}


@pytest.mark.parametrize("arm", ARMS)
def test_a_letter_earns_what_the_arm_of_influence_says(arm, tmp_path):
    """Ann says at random the right letter or another one. Bob is always right about his letter, and both can read."""
    sets, credit = ARMS[arm]
    assert CLAIMS["influence"].arms[arm] == sets
    reward = dict(line.removeprefix("reward.").split("=") for line in sets)
    rng = random.Random(0)

    def script(request):
        word, moves = request.ask.messages[-1]["content"], request.ask.tags["moves"]
        if word.isalpha():
            return request.ask.taught[0]
        truth = int(word) - 1
        return moves[truth] if request.ask.agent == "bob" else rng.choice([moves[truth], moves[truth - 1]])

    batch = played(scripted_trainer(world("exchange", tmp_path, reward=reward), script))
    own = {}
    for dialogue in batch.dialogues:
        letters, guesses = dialogue.utterances[:2], dialogue.utterances[2:]
        paid = [u.rewards["env"] for u in guesses]
        assert [u.rewards["env"] for u in letters] == [0, 0] and paid[0] == 1
        for letter in letters:
            assert letter.rewards["credit"] == pytest.approx(credit(fmean(paid)))
        own[id(letters[0])] = paid[1]
    anns = [(row.advantage, own[id(row.utterance)]) for row in rows(batch) if id(row.utterance) in own]
    assert len(anns) == 16 * 8 and {helped for _, helped in anns} == {0, 1}
    if arm == "shared later reward":
        assert all((advantage > 0) == (helped == 1) for advantage, helped in anns if advantage)
        assert sum(advantage != 0 for advantage, _ in anns) > 64
    else:
        assert {advantage for advantage, _ in anns} == {0.0}


def test_the_rare_agent_of_dr_mas_has_advantages_three_times_as_large_under_shared_statistics(tmp_path):
    """E[A^2] = (s_i^2 + (m_i - m)^2) / s^2 with m_i = .5, s_i^2 = .25, m = .875 and s^2 = .109 is 3.57; with its own,
    it is 1."""

    asked = Counter()  # how often dan has had a question, of which he answers every second time right

    def script(request):
        asked[request.example.id] += request.ask.agent == "dan"
        right = request.ask.agent != "dan" or asked[request.example.id] % 2
        return request.example.answer if right else "0"

    for key, squares in ((["prompt"], 3.57), (["prompt", "agent"], 1.0)):
        values = world("rare_agent", tmp_path, advantage={"key": key, "ddof": 0, "eps": 0.0})
        batch = played(scripted_trainer(values, script))
        rare = [row.advantage for row in rows(batch) if row.policy == "rare"]
        assert len(rare) == 8 * 8
        assert fmean(a * a for a in rare) == pytest.approx(squares, abs=0.005), key
