"""Rewards: sources give named values to answers, rules turn them into credit."""

from maporl.rewards.credit import assign_credit
from maporl.rewards.sources import SOURCES, RewardSource, build_sources, fill_in, grade_answers, label, score_dialogues

__all__ = [
    "SOURCES",
    "RewardSource",
    "assign_credit",
    "build_sources",
    "fill_in",
    "grade_answers",
    "label",
    "score_dialogues",
]
