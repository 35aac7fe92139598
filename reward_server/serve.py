"""The process of the server: it loads the scorers, listens, and ends in good order when it is asked to."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from maporl.config.command_line import PrintableFormatter
from maporl.rewards.verifier.model import Verifier, VerifierError, chance_of
from reward_server.app import create_app
from reward_server.guard import error_body
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
    return uvicorn.Server(
        uvicorn.Config(
            create_app(scorers, options), host=options.host, port=options.port, log_level=log_level, access_log=False,
            http=_protocol(options.body_seconds), ws="none", timeout_keep_alive=30,
            timeout_graceful_shutdown=options.drain_seconds, server_header=False,
        )
    )  # fmt: skip


def serve(scorers: Sequence[Scorer], options: ServerOptions) -> None:
    """Answer requests until SIGTERM or SIGINT, then finish the requests in progress and return."""
    log = logging.StreamHandler()
    log.setFormatter(PrintableFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[log])
    for scorer in scorers[:1]:
        if isinstance(scorer, VerifierScorer) and (doubt := chance_of(scorer.verifier.record)) is not None:
            logger.warning("%s: %s", scorer.verifier.name, doubt)
    info, token = scorers[0].info, "a token" if options.token else "no token"
    logger.info("serving %s %s with %d worker(s) and %s", info.kind, info.name, len(scorers), token)
    server(scorers, options).run()


def _protocol(seconds: float) -> type[H11Protocol]:
    """Uvicorn's HTTP/1.1, which also closes a connection if a request's headers do not arrive within ``seconds``."""

    class TimedHeaders(H11Protocol):
        _too_late: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._too_late = self.loop.call_later(seconds, self._give_up)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            incomplete = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
            if not incomplete:
                self._stop_timer()
            elif self._too_late is None:
                self._too_late = self.loop.call_later(seconds, self._give_up)

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def _stop_timer(self) -> None:
            if self._too_late is not None:
                self._too_late.cancel()
                self._too_late = None

        def _give_up(self) -> None:
            body = error_body("too_slow", f"the request's headers did not arrive within {seconds:g} s")
            head = f"HTTP/1.1 408 Request Timeout\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            self.transport.write(head.encode() + b"Connection: close\r\n\r\n" + body)
            self.transport.close()

    return TimedHeaders
