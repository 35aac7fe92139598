"""Rewards: sources give named values to utterances, rules turn them into credit."""

from maporl.rewards.sources import SOURCES, RewardSource, assign_credit, score_dialogues

__all__ = ["SOURCES", "RewardSource", "assign_credit", "score_dialogues"]
