"""``maporl sft``: supervised training of a team's policies before PPO."""

from pathlib import Path
from typing import Annotated

import typer

from maporl.cli.common import ConfigFile, Overrides, Quiet, Values, echo, load_config, load_libraries
from maporl.config.command_line import command
from maporl.loops.sft_options import SFTOptions


@command
def sft(
    *,
    output: Annotated[Path, typer.Option("--output", help="Folder for the trained policies; must be new.")],
    values: Values = None,
    config: ConfigFile = None,
    set_: Overrides = None,
    dialogues: Annotated[
        Path | None,
        typer.Option("--dialogues", help="Learn from these recorded debates instead of the task's solutions."),
    ] = None,
    best: Annotated[float, typer.Option("--best", help="Share of the debates to learn from, best first.")] = 0.1,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Questions to learn from; default: all.")] = None,
    options: SFTOptions,
    quiet: Quiet = False,
) -> None:
    """Train a team's policies by supervision, on the task's solutions or on the best of recorded debates."""
    settings = load_config(values, config, set_)
    load_libraries()
    from transformers import set_seed

    from maporl.errors import ConfigError
    from maporl.loops import sft as supervised
    from maporl.run import ResolvedRun
    from maporl.team.team import Team
    from trl_ext.process.threads import choose, use

    set_seed(settings.seed)
    use(choose(settings.tiny))
    if dialogues is not None:
        team, material = Team.from_config(settings), supervised.best_debates(dialogues, best)
    else:
        run = ResolvedRun(settings)
        team = Team.from_config(settings)
        callers = [name for name, agent in settings.agents.items() if agent.tools] or list(settings.environments)
        if callers:
            raise ConfigError(
                f"{callers[0]}: the task's solutions call no tools, so its policies would learn to call none; train on "
                "recorded dialogues: maporl sft CONFIG --dialogues RUN/dialogues.jsonl"
            )
        material = supervised.solutions(team, run.task, run.protocol.opening, limit)
    losses = supervised.train_supervised(settings, team, material, output, options, quiet)
    for policy, loss in losses.items():
        echo(f"{policy}: {len(material)} dialogues, mean loss {loss:.3f}, saved in {output / policy}")
