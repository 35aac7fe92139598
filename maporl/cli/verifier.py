"""The command line: ``maporl verifier generate | balance | train``."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from maporl.cli.common import Quiet, known_errors, load_config, quiet_libraries
from maporl.errors import ConfigError
from maporl.verifier.options import BalanceOptions, GenerateOptions, SamplingOptions, TrainOptions

app = typer.Typer(
    help="A learned verifier: sample answers, balance right and wrong ones, train.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a value of CONFIG.", show_default=False),
]
Low = Annotated[float, typer.Option("--temperature-low", help="Each batch draws its temperature from this ...")]
High = Annotated[float, typer.Option("--temperature-high", help="... to this.")]
TopP = Annotated[float, typer.Option("--top-p", help="Sample from the most likely tokens of this much probability.")]
BatchSize = Annotated[int, typer.Option("--batch-size", help="Answers sampled, or rows trained on, at a time.")]
Judge = Annotated[
    str | None,
    typer.Option("--judge", help="This agent labels by yes or no, in place of the grader.", show_default=False),
]


@app.command()
def generate(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file: its task and its agents.")],
    output: Annotated[Path, typer.Option("--output", help="Folder; one that was begun is gone on with.")],
    set_: Set = None,
    per_question: Annotated[
        int, typer.Option("--per-question", help="Samples of each question by each agent.")
    ] = GenerateOptions.per_question,
    limit: Annotated[int | None, typer.Option("--limit", help="The first questions only.", show_default=False)] = None,
    agent: Annotated[
        list[str] | None, typer.Option("--agent", help="Who answers; default: all but the judge.", show_default=False)
    ] = None,
    judge: Judge = None,
    temperature_low: Low = SamplingOptions.temperature_low,
    temperature_high: High = SamplingOptions.temperature_high,
    top_p: TopP = SamplingOptions.top_p,
    batch_size: BatchSize = SamplingOptions.batch_size,
    quiet: Quiet = False,
) -> None:
    """Sample every training question many times and label the answers. Run it again to go on after a stop.

    Under `accelerate launch` each process takes its share of the questions.
    """
    with known_errors(quiet):
        options = GenerateOptions(
            temperature_low, temperature_high, top_p, batch_size, per_question, limit, tuple(agent or ()), judge
        )
        settings = load_config([str(config)], None, set_)
        quiet_libraries()
        from transformers import set_seed

        from maporl.tasks import build_task
        from maporl.team.team import Team
        from maporl.verifier.generate import Shard, generate_samples

        task = build_task(settings.task, "train", settings.seed)
        set_seed(settings.seed)  # tiny models are drawn at random, and every process and every restart needs the same
        team = Team.from_config(settings)
        made = generate_samples(settings, task, team, output, options, Shard.from_environment(), quiet)
        dropped = ", ".join(f"{reason} {n}" for reason, n in made["dropped"].items())
        state = "complete" if made["complete"] else "other processes are still at work"
        typer.echo(f"{output}: {made['right']} right, {made['wrong']} wrong, dropped: {dropped or 'none'}; {state}")


@app.command()
def balance(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What `maporl verifier generate` wrote.")],
    output: Annotated[Path, typer.Option("--output", help="The balanced JSONL file; must be new.")],
    config: Annotated[
        Path | None,
        typer.Argument(metavar="[CONFIG]", help="With it, short sides are topped up: the task's solutions and hints."),
    ] = None,
    set_: Set = None,
    per_question: Annotated[
        int, typer.Option("--per-question", help="Most right, and most wrong, answers of a question.")
    ] = BalanceOptions.per_question,
    rounds: Annotated[
        int, typer.Option("--rounds", help="Most rounds of hints; 0 needs no model.")
    ] = BalanceOptions.rounds,
    per_round: Annotated[
        int, typer.Option("--per-round", help="Samples of a short side in a round.")
    ] = BalanceOptions.per_round,
    short: Annotated[
        Literal["cut", "drop"], typer.Option("--short", help="What becomes of questions that stay short.")
    ] = BalanceOptions.short,
    free_form: Annotated[
        bool, typer.Option("--free-form", help="Answers have no final-answer line (open-ended tasks).")
    ] = False,
    repeats: Annotated[
        bool, typer.Option("--repeats", help="Count equal answers each (short answers have one right text).")
    ] = False,
    agent: Annotated[
        str | None, typer.Option("--agent", help="Who is given hints; default: the first.", show_default=False)
    ] = None,
    judge: Judge = None,
    temperature_low: Low = SamplingOptions.temperature_low,
    temperature_high: High = SamplingOptions.temperature_high,
    top_p: TopP = SamplingOptions.top_p,
    batch_size: BatchSize = SamplingOptions.batch_size,
    seed: Annotated[int, typer.Option("--seed")] = BalanceOptions.seed,
    quiet: Quiet = False,
) -> None:
    """As many right as wrong answers of every question, so that the question does not give the label away."""
    with known_errors(quiet):
        options = BalanceOptions(
            temperature_low, temperature_high, top_p, batch_size, per_question, rounds, per_round, short, free_form,
            repeats, agent, judge, seed,
        )  # fmt: skip
        if config is None and (agent or judge or set_):
            raise ConfigError("--agent, --judge and --set speak of a CONFIG; give one after the folder")
        quiet_libraries()
        from rich.console import Console

        from maporl.verifier import balance as balancing
        from maporl.verifier import data, leak

        data.must_not_exist(output)
        samples = data.read_folder(folder)
        settings = None if config is None else load_config([str(config)], None, set_)
        source = None if settings is None else balancing.TopUp.from_config(settings, options, quiet)
        made = balancing.balance(samples, options, source)
        console = Console(markup=False, highlight=False)
        console.print(leak.balance_table(leak.measure(samples), leak.measure(made.samples) if made.samples else None))
        for line in [*leak.source_lines(made.samples), *made.lines()]:
            console.print(line, soft_wrap=True)
        if not made.samples:
            raise data.DataError(f"{folder}: no question has a right and a wrong answer; nothing was written")
        data.write_new(output, "".join(sample.line() for sample in made.samples))
        console.print(f"{output}: {len(made.samples)} answers", soft_wrap=True)


@app.command()
def train(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `maporl verifier balance` wrote.")],
    model: Annotated[str, typer.Option("--model", help="A causal language model: folder or hub name.")],
    output: Annotated[Path, typer.Option("--output", help="Folder for the verifier; must be new.")],
    loss: Annotated[
        Literal["every", "last"], typer.Option("--loss", help="At every answer token, or at the last.")
    ] = TrainOptions.loss,
    lora_r: Annotated[int, typer.Option("--lora-r")] = TrainOptions.lora_r,
    lora_alpha: Annotated[int, typer.Option("--lora-alpha")] = TrainOptions.lora_alpha,
    learning_rate: Annotated[float, typer.Option("--learning-rate")] = TrainOptions.learning_rate,
    batch_size: BatchSize = TrainOptions.batch_size,
    epochs: Annotated[float, typer.Option("--epochs")] = TrainOptions.epochs,
    longest: Annotated[
        int, typer.Option("--longest", help="Longer rows, in tokens, are dropped.")
    ] = TrainOptions.longest,
    held_out: Annotated[
        float, typer.Option("--held-out", help="Share of the questions to evaluate on.")
    ] = TrainOptions.held_out,
    bf16: Annotated[bool, typer.Option("--bf16", help="Weights in bfloat16.")] = False,
    use_cpu: Annotated[bool, typer.Option("--use-cpu", help="Even where there is an accelerator.")] = False,
    chat_template: Annotated[
        str | None,
        typer.Option("--chat-template", help="For base models: 'fallback', or a Jinja file.", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option("--seed")] = TrainOptions.seed,
    quiet: Quiet = False,
) -> None:
    """Train a verifier on balanced answers, measure it on held-out questions, and save it ready to serve."""
    with known_errors(quiet):
        options = TrainOptions(
            model, loss, lora_r, lora_alpha, learning_rate, batch_size, epochs, longest, held_out, bf16, use_cpu,
            chat_template, seed,
        )  # fmt: skip
        quiet_libraries()
        from rich.console import Console

        from maporl.verifier.card import measures_table
        from maporl.verifier.train import train_verifier

        record = train_verifier(file, output, options, quiet)
        console = Console(markup=False, highlight=False)
        console.print(measures_table(record))
        console.print(str(output), soft_wrap=True)
