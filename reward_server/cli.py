"""The command line of the server: ``python -m reward_server``, and ``maporl serve``."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

from reward_server.options import ServerError, ServerOptions, read_token


def serve(
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
            "--device", help="Give it several times for several copies. Default: cuda, else cpu.", show_default=False
        ),
    ] = None,
    workers: Annotated[int, typer.Option("--workers", help="Copies on each device.", min=1)] = 1,
    host: Annotated[str, typer.Option("--host", help="Other than loopback needs a token.")] = ServerOptions.host,
    port: Annotated[int, typer.Option("--port")] = ServerOptions.port,
    token_file: Annotated[
        Path | None,
        typer.Option("--token-file", help="Holds the bearer token; default: $MAPORL_SERVER_TOKEN.", show_default=False),
    ] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option("--dtype", help="auto: bfloat16 on a GPU, else as saved."),
    ] = "auto",
    batch_tokens: Annotated[
        int | None,
        typer.Option("--batch-tokens", help="Tokens of one forward.", show_default="16384 on a GPU, else 1024"),
    ] = None,
    queue_items: Annotated[
        int, typer.Option("--queue-items", help="Chats that may wait before others get 429.")
    ] = ServerOptions.queue_items,
    chat_tokens: Annotated[
        int | None, typer.Option("--chat-tokens", help="Longer chats are refused.", show_default="the model's context")
    ] = None,
    body_bytes: Annotated[
        int, typer.Option("--body-bytes", help="Larger requests are refused.")
    ] = ServerOptions.body_bytes,
    body_seconds: Annotated[
        float, typer.Option("--body-seconds", help="A request must have arrived within this.")
    ] = ServerOptions.body_seconds,
    answer_seconds: Annotated[
        float, typer.Option("--answer-seconds", help="Requests not answered within this get 429.")
    ] = ServerOptions.answer_seconds,
    drain_seconds: Annotated[
        int, typer.Option("--drain-seconds", help="For requests in progress at SIGTERM.")
    ] = ServerOptions.drain_seconds,
) -> None:
    """Serve a verifier, or a task's grader, over HTTP. The interface is described at /docs."""
    try:
        options = ServerOptions(
            host, port, read_token(token_file), batch_tokens, queue_items, body_bytes, chat_tokens, body_seconds,
            answer_seconds, drain_seconds,
        )  # fmt: skip
        if labels == (model is not None) or labels != (task is not None):
            raise ServerError("expected either --model DIR, or --task NAME with --labels")
        start = _ready(options, model, task, device, workers, dtype)
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    start()


def _ready(
    options: ServerOptions, model: str | None, task: str | None, device: list[str] | None, workers: int, dtype: str
) -> Callable[[], None]:
    """What serves until it is stopped; everything that can be wrong with the options is found before."""
    # read once, when torch is loaded: threads that wait by spinning take the cores from those that answer requests
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # oneDNN keeps 1,024 primitives, each made for one shape; batches have a new shape nearly every time
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    try:
        from reward_server import serve as serving
    except ModuleNotFoundError as error:
        raise ServerError(f"{error.name} is not installed; pip install 'maporl[server]'") from error
    if task is not None:
        scorers = serving.label_scorers(task, workers)
    else:
        import torch

        assert model is not None  # one of the two is given
        devices = device or ["cuda" if torch.cuda.is_available() else "cpu"]
        scorers = serving.verifier_scorers(model, devices * workers, dtype, options.chat_tokens)
    return lambda: serving.serve(scorers, options)


def main() -> None:
    """Entry point of ``python -m reward_server``."""
    app = typer.Typer(
        add_completion=False, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}
    )
    app.command()(serve)
    app()
