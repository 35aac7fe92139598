"""The process of the server: it loads the scorers, listens, and ends in good order when it is asked to."""

import logging
from collections.abc import Sequence

import uvicorn

from maporl.config.command_line import log_requests
from maporl.guard.connections import guarded_server
from maporl.verifier.model import Verifier, VerifierError, chance_of
from reward_server.app import create_app, limits_of
from reward_server.options import ServerError, ServerOptions
from reward_server.scorers import LabelScorer, Scorer, VerifierScorer

logger = logging.getLogger("reward_server")


def verifier_scorers(model: str, devices: Sequence[str], dtype: str, longest: int | None) -> list[Scorer]:
    """A copy of a trained verifier on each of ``devices``; a device that is named twice gets two copies.

    ``longest``: the most tokens of a chat, besides the model's own limit.

    Raises:
        ServerError: a device does not exist, or the model cannot be loaded.
    """
    from torch import device as torch_device

    scorers: list[Scorer] = []
    for name in devices:
        try:
            kind = torch_device(name).type
        except RuntimeError as error:
            raise ServerError(f"--device {name!r}: {str(error).splitlines()[0]}") from error
        wanted = ("auto" if kind == "cpu" else "bfloat16") if dtype == "auto" else dtype
        try:
            scorers.append(VerifierScorer(Verifier.load(model, name, wanted), longest))
        except VerifierError as error:
            raise ServerError(f"--model: {error}") from error
        except (RuntimeError, AssertionError) as error:  # no such device, or no room on it
            raise ServerError(f"--device {name!r}: {str(error).splitlines()[0]}") from error
    return scorers


def label_scorers(task: str, workers: int) -> list[Scorer]:
    """One grader of the task ``task`` for each of ``workers``. Right answers come with requests, so no data is read.

    Raises:
        ConfigError: no task has this name.
    """
    from maporl.tasks import build_task

    grader = build_task({"name": task}, "train", 0, "--task")
    return [LabelScorer(grader, task) for _ in range(workers)]


def server(scorers: Sequence[Scorer], options: ServerOptions, log_level: str = "info") -> uvicorn.Server:
    """A server that is ready for ``run()``."""
    return guarded_server(
        create_app(scorers, options),
        limits_of(options),
        host=options.host,
        port=options.port,
        log_level=log_level,
        timeout_graceful_shutdown=options.drain_seconds,
    )


def serve(scorers: Sequence[Scorer], options: ServerOptions) -> None:
    """Answer requests until SIGTERM or SIGINT, then finish the requests in progress and return."""
    log_requests()
    for scorer in scorers[:1]:
        if isinstance(scorer, VerifierScorer) and (doubt := chance_of(scorer.verifier.record)) is not None:
            logger.warning("%s: %s", scorer.verifier.name, doubt)
    info, token = scorers[0].info, "a token" if options.token else "no token"
    logger.info("serving %s %s with %d worker(s) and %s", info.kind, info.name, len(scorers), token)
    server(scorers, options).run()
