"""What a player tells its engines of weights."""

from dataclasses import replace

from maporl import Agent, Debate, Engine, MultiAgentPPOConfig, RewardSection, Team
from maporl.rollout.player import Player


class Told(Engine):
    """Remembers whose weights it was told to take over, with their version."""

    def __init__(self):
        self.told = []

    def sync(self, policy):
        self.told.append((policy, self.version))


def test_engines_take_over_each_version_of_the_weights_once_and_frozen_weights_once(tiny, tmp_path):
    ann, bob = (Agent(name, *tiny(seed=seed)) for seed, name in enumerate(("ann", "bob")))
    engine = Told()
    options = MultiAgentPPOConfig(output_dir=str(tmp_path), report_to=[])
    team = Team([ann, replace(bob, trainable=False)])
    player = Player.build(team, Debate(), options, RewardSection(), engines={"transformers": engine, "again": engine})
    for version in (None, None, 0, 3, 3, None):
        player.inform_engines(version=version)
    assert engine.told == [("ann", 0), ("bob", 0), ("ann", 3)]
    player.sync_engines(["ann"], version=4)
    player.inform_engines(version=4)
    player.inform_engines(version=2)  # an earlier checkpoint was loaded
    assert engine.told[3:] == [("ann", 4), ("ann", 2)]
