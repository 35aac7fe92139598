"""The command line of the server: ``python -m reward_server``, and ``maporl serve``."""

import os
import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from maporl.config.command_line import command, printable_messages
from maporl.errors import install_command
from reward_server.options import ServerError, ServerOptions, must_be_free
from trl_ext.process.threads import wait_briefly


@command
def serve(
    run: Annotated[str | None, typer.Argument(hidden=True)] = None,
    *,
    model: Annotated[
        str | None, typer.Option("--model", help="A verifier: folder or hub name.", show_default=False)
    ] = None,
    task: Annotated[
        str | None, typer.Option("--task", help="With --labels: whose grader to serve.", show_default=False)
    ] = None,
    labels: Annotated[
        bool, typer.Option("--labels", help="Serve a task's rule-based grader; requests bring right answers.")
    ] = False,
    device: Annotated[
        list[str] | None,
        typer.Option(
            "--device",
            help="Give it several times for several copies. Default: the accelerator, else cpu.",
            show_default=False,
        ),
    ] = None,
    workers: Annotated[int, typer.Option("--workers", help="Copies on each device.", min=1)] = 1,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option("--dtype", help="auto: bfloat16 on an accelerator, else as saved."),
    ] = "auto",
    options: ServerOptions,
) -> None:
    """Serve a verifier, or a task's grader, over HTTP. The interface is described at /docs.

    A score is between 0 and 1: the sigmoid of the model's output at the end of a chat.
    """
    run = run or (model if model is not None and Path(model, "config.yaml").is_file() else None)
    if run is not None:
        raise ServerError(f"{run}: this serves verifiers; a trained team is served by: maporl api {shlex.quote(run)}")
    if labels == (model is not None) or labels != (task is not None):
        raise ServerError("expected either --model DIR, or --task NAME with --labels")
    must_be_free(options.host, options.port)
    wait_briefly()  # threads that wait by spinning would take the cores from those that score
    # oneDNN keeps 1,024 primitives, each made for one shape; batches have a new shape nearly every time
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    try:
        from reward_server import serve as serving
    except ModuleNotFoundError as error:
        raise ServerError(f"{error.name} is not installed; install it with: {install_command('server')}") from error
    if task is not None:
        scorers = serving.label_scorers(task, workers)
    else:
        from trl_ext.process.devices import process_device

        assert model is not None  # one of the two is given
        devices = device or [process_device().type]
        scorers = serving.verifier_scorers(model, devices * workers, dtype, options.chat_tokens)
    serving.serve(scorers, options)


def main() -> None:
    """Entry point of ``python -m reward_server``."""
    printable_messages()
    app = typer.Typer(
        add_completion=False, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}
    )
    app.command()(serve)
    app()
