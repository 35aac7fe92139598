"""``maporl api``: serve the agents of a run, and the team, as models of an address."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from maporl.cli.common import Values, echo, load_libraries, load_team_config, names_a_team
from maporl.config.command_line import command, log_requests
from maporl.errors import ConfigError, install_command
from maporl.guard.listening import ServerError, bound, check_reach, token_in

TOKEN_VARIABLE = "MAPORL_API_TOKEN"


@command
def api(
    values: Values = None,
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", help="A checkpoint-N or final folder.", show_default=False)
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on; any but loopback needs a token.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any that is free.")] = 8700,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            help=f"Holds the token; default: ${TOKEN_VARIABLE}. Clients send it as their key.",
            show_default=False,
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", help="cpu, cuda:1, ...; default: the accelerator.", show_default=False),
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option("--dtype", help="Of the weights; default: as in the run.", show_default=False),
    ] = None,
    url: Annotated[
        list[str] | None,
        typer.Option(
            "--url", help="A vLLM server of the base, which samples in place of this process.", show_default=False
        ),
    ] = None,
    longest: Annotated[
        int | None,
        typer.Option("--max-tokens", min=1, help="Most that a request may ask for; default: as in the run."),
    ] = None,
    concurrency: Annotated[int, typer.Option("--max-concurrency", min=1, help="Requests answered at a time.")] = 64,
    queue: Annotated[int, typer.Option("--queue", min=0, help="Others that may wait; more get 429.")] = 256,
    ignore: Annotated[
        list[str] | None,
        typer.Option("--ignore", metavar="FIELD", help="A field of requests that is left out.", show_default=False),
    ] = None,
) -> None:
    """Serve the agents of a run, and the team, at an address of OpenAI's and of Anthropic's form.

    Each agent is a model by its name, as maporl eval would sample it. The model team plays the run's protocol on the
    last message, and answers with the final answer.
    """
    token = token_in(token_file, TOKEN_VARIABLE)
    check_reach(host, token, TOKEN_VARIABLE)
    held = bound(host, port)
    try:
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as error:
        raise ServerError(f"{error.name} is not installed; install it with: {install_command('server')}") from error
    named = [value for value in values or () if names_a_team(value)]
    if len(named) != 1:
        raise ConfigError(
            f"expected one run's folder, or a team on the hub, got {', '.join(values or ()) or 'nothing'}"
        )
    config, weights = load_team_config(values, None, None, checkpoint)
    load_libraries()
    from maporl.serving import server
    from trl_ext.process.threads import choose, use

    task, without = server.checked(config, weights, named[0])
    settings = server.serving_config(config, dtype, device, url or [])
    server.check_memory(settings, device)
    for name, why in without.items():
        echo(f"not served: {name}: {why}")
    use(choose(settings.tiny))
    log_requests()
    options = {"most": concurrency, "queue": queue, "ignored": tuple(ignore or ()), "longest": longest}
    address = server.address_of(settings, task, weights, without, device, **options)
    where = f"http://{f'[{host}]' if ':' in host else host}:{held.getsockname()[1]}/v1"
    echo(f"{where}: {', '.join(address.agents)}")
    server.serve(address, held, token)
