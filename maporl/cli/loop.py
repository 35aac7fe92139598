"""``maporl loop``: rounds of sampling with a team, and of training it on what was sampled."""

from typing import Annotated

import typer

from maporl.cli.common import ConfigFile, Overrides, Quiet, Values, echo, load_config, quiet_libraries
from maporl.config.command_line import command


@command
def loop(
    values: Values = None,
    config: ConfigFile = None,
    set_: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the first part that is missing.")] = False,
    quiet: Quiet = False,
) -> None:
    """Sample with a team, train it on the best of what it said (SFT, DPO), evaluate it, and repeat."""
    settings = load_config(values, config, set_)
    quiet_libraries()
    from maporl.runs.loop import run_loop, stages_of
    from maporl.validation.preflight import check_run
    from maporl.validation.threads import threads_of
    from trl_ext.threads import use

    stages_of(settings)
    checked = check_run(settings)
    use(threads_of(settings))
    for line in checked:
        echo(line)
    for figures in run_loop(settings, resume, quiet, lambda line: _tell(line, quiet)):
        for number, stage in enumerate(figures["stages"], 1):
            for policy, about in ((name, own) for name, own in stage.items() if name != "utterances"):
                echo(f"round {figures['round']}, stage {number}: {policy}: {about['rows']} rows")


def _tell(line: str, quiet: bool) -> None:
    if line.startswith("warning:") or not quiet:
        echo(line, err=True)
