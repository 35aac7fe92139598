"""Rewards: sources give answers named values, and rules turn these values into credit."""

from maporl.rewards.base import RewardFailure, RewardSource, as_source
from maporl.rewards.build import SOURCES, build_sources
from maporl.rewards.credit import assign_credit
from maporl.rewards.labels import label
from maporl.rewards.scoring import fill_in, grade_answers, score_dialogues

__all__ = [
    "SOURCES",
    "RewardFailure",
    "RewardSource",
    "as_source",
    "assign_credit",
    "build_sources",
    "fill_in",
    "grade_answers",
    "label",
    "score_dialogues",
]
