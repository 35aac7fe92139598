"""The section ``cluster`` of a run, checked as before a training."""

from maporl.errors import refuse
from maporl.run import ResolvedRun
from maporl.validation.preflight import check_groups, group_lines


def check_cluster(run: ResolvedRun) -> list[str]:
    """Return what the groups of a run are, or raise what is wrong with them."""
    refuse(check_groups(run))
    return group_lines(run.config)
