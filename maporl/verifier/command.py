"""``maporl verifier generate | balance | train``: a verifier, from the answers it learns from to a folder to serve."""

from pathlib import Path
from typing import Annotated

import typer

from maporl.cli.common import Overrides, Quiet, Values, echo, load_config, load_libraries
from maporl.config.command_line import command
from maporl.errors import ConfigError
from maporl.verifier.options import BalanceOptions, GenerateOptions, TrainOptions

app = typer.Typer(
    help="A learned verifier: sample answers, balance right and wrong ones, train.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
@command
def generate(
    *,
    values: Values = None,
    output: Annotated[Path, typer.Option("--output", help="Folder for the samples; one that was begun is continued.")],
    set_: Overrides = None,
    options: GenerateOptions,
    quiet: Quiet = False,
) -> None:
    """Sample every training question many times and label the answers. Run it again to go on after a stop.

    Under `accelerate launch` each process takes its share of the questions.
    """
    settings = load_config(values, None, set_)
    load_libraries()
    from transformers import set_seed

    from maporl.tasks import build_task
    from maporl.team.team import Team
    from maporl.verifier.balance import one_sided
    from maporl.verifier.generate import Shard, generate_samples

    task = build_task(settings.task, "train", settings.seed)
    set_seed(settings.seed)  # tiny models are drawn at random, and every process and every restart needs the same
    team = Team.from_config(settings)
    made = generate_samples(settings, task, team, output, options, Shard.from_environment(), quiet)
    dropped = ", ".join(f"{reason} {n}" for reason, n in made["dropped"].items())
    state = "complete" if made["complete"] else "other processes are still at work"
    echo(f"{output}: {made['right']} right, {made['wrong']} wrong, dropped: {dropped or 'none'}; {state}")
    if made["complete"] and (lack := one_sided(made["right"], made["wrong"])) is not None:
        echo(f"warning: {lack}")


@app.command()
@command
def balance(
    *,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What `maporl verifier generate` wrote.")],
    output: Annotated[Path, typer.Option("--output", help="The balanced JSONL file; must be new.")],
    values: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG|KEY=VALUE]", help="With them, short sides are topped up: the task's solutions and hints."
        ),
    ] = None,
    set_: Overrides = None,
    options: BalanceOptions,
    quiet: Quiet = False,
) -> None:
    """As many right as wrong answers of every question, so that the question does not give the label away."""
    if not values and (options.agent or options.judge or set_):
        raise ConfigError("--agent, --judge and --set speak of a CONFIG; give one after the folder")
    load_libraries()
    from maporl.cli.common import Screen
    from maporl.verifier import balance as balancing
    from maporl.verifier import data, leak

    data.must_not_exist(output)
    samples = data.read_folder(folder)
    settings = load_config(values, None, set_) if values else None
    source = None if settings is None else balancing.TopUp.from_config(settings, options, quiet)
    made = balancing.balance(samples, options, source)
    console = Screen(markup=False, highlight=False)
    console.print(leak.balance_table(leak.measure(samples), leak.measure(made.samples) if made.samples else None))
    for line in [*leak.source_lines(made.samples), *made.lines()]:
        console.print(line, soft_wrap=True)
    if not made.samples:
        right = sum(sample.correct for sample in samples)
        lack = balancing.one_sided(right, len(samples) - right) or balancing.SHORT
        raise data.DataError(f"{folder}: no question has a right and a wrong answer; nothing was written. {lack}")
    if (few := balancing.too_few(made.samples)) is not None:
        console.print(f"warning: {few}", soft_wrap=True)
    data.write_new(output, "".join(sample.line() for sample in made.samples))
    console.print(f"{output}: {len(made.samples)} answers", soft_wrap=True)


@app.command()
@command
def train(
    *,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `maporl verifier balance` wrote.")],
    output: Annotated[Path, typer.Option("--output", help="Folder for the verifier; must be new.")],
    values: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CONFIG|KEY=VALUE]", help="With them, the verifier begins with an agent's model."),
    ] = None,
    set_: Overrides = None,
    options: TrainOptions,
    quiet: Quiet = False,
) -> None:
    """Train a verifier on balanced answers, measure it on held-out questions, and save it ready to serve."""
    if values:
        options = options.of_agent(load_config(values, None, set_))
    elif options.agent or set_:
        raise ConfigError("--agent and --set speak of a CONFIG; give one after the file")
    load_libraries()
    from maporl.cli.common import Screen
    from maporl.verifier.card import measures_table, told
    from maporl.verifier.train import train_verifier

    record = train_verifier(file, output, options, quiet)
    console = Screen(markup=False, highlight=False)
    console.print(measures_table(record))
    for line in (told(record), str(output)):
        console.print(line, soft_wrap=True)
