"""Rewards: sources give answers named values, and rules turn these values into credit."""

from maporl.rewards.base import RewardFailure as RewardFailure
from maporl.rewards.base import RewardSource as RewardSource
from maporl.rewards.build import SOURCES as SOURCES
from maporl.rewards.credit import assign_credit as assign_credit
