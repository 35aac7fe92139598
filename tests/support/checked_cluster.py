"""The section ``cluster`` of a run, checked as before a training."""

from maporl.backends.check import check, group_lines
from maporl.errors import refuse
from maporl.run import ResolvedRun


def check_cluster(run: ResolvedRun) -> list[str]:
    """Return what the groups of a run are, or raise what is wrong with them."""
    refuse(check(run))
    return group_lines(run.config)
