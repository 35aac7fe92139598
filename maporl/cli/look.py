"""``maporl eval``, ``report``, ``watch``, ``dump`` and ``play``: measuring a team, looking at runs, and taking part."""

import atexit
import json
import sys
import tempfile
import threading
import time
import webbrowser
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from maporl.cli.common import ConfigFile, Overrides, Values, echo, load_libraries, load_team_config
from maporl.config.command_line import command
from maporl.config.schema import Config
from maporl.errors import ConfigError
from trl_ext.errors import retold

UNTRAINED = "untrained: the configuration's own models; for a run: maporl {command} runs/NAME"
"""What is said of a team that comes from a configuration and not from a run."""

Run = Annotated[Path, typer.Argument(metavar="RUN", help="The output_dir of a run.")]
Port = Annotated[int, typer.Option("--port", help="Port of the page on 127.0.0.1; 0: any that is free.")]
Browser = Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")]


@command
def evaluate(
    values: Values = None,
    config: ConfigFile = None,
    set_: Overrides = None,
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", help="A checkpoint-N or final folder.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
    suite: Annotated[
        str | None,
        typer.Option("--suite", help="A suite of benchmarks in place of the task: math.", show_default=False),
    ] = None,
    suite_data: Annotated[
        Path | None, typer.Option("--suite-data", help="Its files (NAME/test*.jsonl), not the hub.", show_default=False)
    ] = None,
    samples: Annotated[int, typer.Option("--samples", help="Dialogues on each question of a suite.", min=1)] = 1,
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=1, help="First questions of each benchmark of a suite.", show_default=False),
    ] = None,
    swap: Annotated[
        str | None,
        typer.Option(
            "--swap",
            metavar="AGENT,AGENT",
            help="Let each of these agents speak with the weights of the next one.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Evaluate a team on held-out questions, against each agent alone and voting over independent samples.

    With --suite: over benchmarks, avg@k, pass@k and maj@k, as one Markdown table. A YAML file or a recipe is evaluated
    with its untrained models.
    """
    settings, checkpoint = load_team_config(values, config, set_, checkpoint)
    load_libraries()
    from trl_ext.process.threads import choose, use

    use(choose(settings.tiny))
    exchanged = swap.split(",") if swap is not None else []
    if suite is not None:
        return _evaluate_suite(settings, checkpoint, suite, suite_data, samples, limit, as_json, exchanged)
    from maporl.cli.common import Screen
    from maporl.evaluation.tables import evaluation_table, flip_lines
    from maporl.runs.evaluate import evaluate as evaluate_run

    evaluation = evaluate_run(settings, checkpoint, exchanged)
    if as_json:
        echo(json.dumps(evaluation.to_json()))
        return None
    console = Screen(markup=False, highlight=False)
    if checkpoint is None:
        console.print(UNTRAINED.format(command="eval"), soft_wrap=True)
    console.print(evaluation_table(evaluation))
    for line in flip_lines(evaluation):
        console.print(line, soft_wrap=True)
    return None


def _evaluate_suite(
    settings: Config,
    checkpoint: Path | None,
    suite: str,
    data: Path | None,
    samples: int,
    limit: int | None,
    as_json: bool,
    exchanged: list[str],
) -> None:
    from maporl.config.imports import extension, unknown
    from maporl.evaluation.suite import markdown
    from maporl.runs.evaluate import evaluate_suite

    suites = extension("maporl.datasets.mathematics:SUITES", "maporl eval --suite")
    if suite not in suites:
        raise ConfigError(f"--suite: {unknown(suite, suites)}")
    tasks = extension("maporl.datasets.mathematics:suite_tasks", "maporl eval --suite")(suite, data, limit)
    results = evaluate_suite(settings, checkpoint, tasks, samples, exchanged)
    echo(json.dumps([r.to_json() for r in results], indent=1) if as_json else markdown(results))


@command
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders; several are compared.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="The file to write; by default report.html in the run, comparison.html here for several.",
            show_default=False,
        ),
    ] = None,
    most: Annotated[int, typer.Option("--dialogues", min=0, help="Most dialogues in the page.")] = 5000,
) -> None:
    """Write a run, or several beside each other, as one page that needs no network."""
    from maporl.report.page import write_report

    echo(write_report(runs, output, most))


@command
def audit(
    run: Run,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Status 1 for a doubt too.")] = False,
) -> None:
    """Say what a run did, and what it did not do although a part of it promised it. Status 0: nothing is void or idle;
    1: something is; 2: the folder holds no run."""
    from maporl.cli.common import Screen
    from maporl.errors import RunError
    from maporl.evaluation.tables import audit_table
    from maporl.report.audit import audits_of
    from maporl.report.read import read_run

    with retold(RunError, lambda error: ConfigError(str(error))):
        audits = audits_of(read_run(run))
    screen = Screen(markup=False, highlight=False)
    if as_json:
        done = {name: one.to_json() for name, one in audits.items()}
        echo(json.dumps(done.get("", done)))
    for name, one in audits.items() if not as_json else ():
        screen.print(audit_table(one, name))
        screen.print(*one.lines(), sep="\n", soft_wrap=True)
    raise typer.Exit(max(one.status(strict) for one in audits.values()))


@command
def watch(
    run: Run,
    port: Port = 8600,
    browser: Browser = True,
    tui: Annotated[bool, typer.Option("--tui", help="Show it in this terminal.")] = False,
) -> None:
    """Look at a run while it goes on: a page on this machine, or a view in the terminal."""
    if tui:
        return _in_the_terminal(run)
    from maporl.report.live import LivePage

    page = LivePage(run, port)
    open_page(page.url, browser)
    echo("Ctrl-C ends it; the run goes on.")
    try:
        page.serve_forever()
    except KeyboardInterrupt:
        page.server_close()
    return None


@command
def dump(run: Run) -> None:
    """Write what every thread and process of a running run does, into its folder stacks/: for a run that seems to
    hang."""
    from maporl.runs.dump import dump as ask

    echo(str(ask(run)))


@command
def play(
    values: Annotated[
        list[str],
        typer.Argument(
            metavar="CONFIG|KEY=VALUE",
            help="A YAML file, a recipe, a run's folder or a team on the hub, and values to override.",
        ),
    ],
    person: Annotated[
        str | None, typer.Option("--as", help="Whose seat you take; by default the first agent's.", show_default=False)
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option("--checkpoint", help="A checkpoint-N or final folder for the others.", show_default=False),
    ] = None,
    questions: Annotated[int, typer.Option("--questions", "-n", min=1, help="Dialogues to play.")] = 1,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Folder for what is played; by default the run's with -played.", show_default=False
        ),
    ] = None,
    page: Annotated[bool, typer.Option("--page", help="Play in a browser instead of here.")] = False,
    port: Port = 8600,
    browser: Browser = True,
) -> None:
    """Take an agent's seat in any protocol; the dialogue is graded and recorded like any other."""
    load_libraries()
    from maporl.engines.human import SeatLeft
    from maporl.report.live import LivePage, PageSeat
    from maporl.runs.play import Game, told, welcome

    config, checkpoint = load_team_config(values, None, None, checkpoint)
    folder = output or Path(f"{config.output_dir}-played")
    seat = PageSeat() if page else None
    game = Game(config, person, checkpoint, folder, *((seat.show, seat.read) if seat else (echo, _typed)))
    served = LivePage(folder, port, seat) if seat else None
    if served is not None:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        open_page(served.url, browser)
    if checkpoint is None:
        (seat.show if seat else echo)(UNTRAINED.format(command="play"))
    (seat.show if seat else echo)(welcome(game, config))
    played = 0
    try:
        for dialogue in game.play(questions):
            played += 1
            (seat.show if seat else echo)(told(dialogue))
        if seat is not None:
            seat.close()
            echo("That was the last one. Ctrl-C ends the page.")
            while True:
                time.sleep(1)
    except (KeyboardInterrupt, SeatLeft):
        echo("\nYou have left; a dialogue that had not ended is not recorded.")
    if played:
        echo(str(folder / "dialogues.jsonl"))


def open_page(url: str, browser: bool) -> None:
    """Say where the page is, and open it where there is a browser.

    The address has a secret token in it, and all users of a machine can read the command lines of its processes. So the
    browser gets the name of a file that only this user can read and that leads to the address. The file is removed when
    this process ends.
    """
    echo(url)
    if browser and not _has_browser():
        echo("no browser was found here; open the address in one on this machine")
    elif browser:
        handle, name = tempfile.mkstemp(prefix="maporl-", suffix=".html")  # mode 0600
        atexit.register(Path(name).unlink, missing_ok=True)
        with open(handle, "w", encoding="utf-8") as file:
            file.write(f'<!doctype html><meta http-equiv="refresh" content="0; url={url}"><a href="{url}">{url}</a>\n')
        webbrowser.open(Path(name).as_uri())


def _typed(prompt: str) -> str:
    """Return a line that the person types. Without a standard input there is nobody."""
    if sys.stdin is None:
        raise EOFError
    return input(prompt)


def _has_browser() -> bool:
    try:
        return not isinstance(webbrowser.get(), webbrowser.GenericBrowser)  # those are for the terminal
    except webbrowser.Error:
        return False


def _in_the_terminal(folder: Path) -> None:
    from rich.live import Live

    from maporl.cli.common import Screen
    from maporl.errors import RunError
    from maporl.report.read import RunReader
    from maporl.report.terminal import frame

    console, reader = Screen(), RunReader(folder, keep=100)
    first = frame(reader.read(), console.width)
    if not sys.stdout.isatty():
        console.print(first)
        return
    with Live(first, console=console, auto_refresh=False, screen=True, vertical_overflow="crop") as view:
        try:
            while True:
                began = time.monotonic()
                with suppress(RunError):  # a file that is being replaced is there the next time
                    view.update(frame(reader.read(), console.width), refresh=True)
                time.sleep(max(1.0, 10 * (time.monotonic() - began)))
        except KeyboardInterrupt:
            return
