"""Rewards: sources give answers named values, and rules turn these values into credit."""

from maporl.rewards.base import RewardFailure as RewardFailure
from maporl.rewards.base import RewardSource as RewardSource
from maporl.rewards.base import as_source as as_source
from maporl.rewards.build import SOURCES as SOURCES
from maporl.rewards.build import build_sources as build_sources
from maporl.rewards.credit import assign_credit as assign_credit
from maporl.rewards.labels import label as label
from maporl.rewards.scoring import fill_in as fill_in
from maporl.rewards.scoring import grade_answers as grade_answers
from maporl.rewards.scoring import score_dialogues as score_dialogues
