"""The process of ``maporl api``: it checks a run, loads its agents, listens, and ends in good order."""

import logging
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router

from maporl.config import Config
from maporl.config.imports import extension
from maporl.config.schema import RewardSection
from maporl.engines.text import TextEngine
from maporl.errors import ConfigError
from maporl.guard import Door, Limits, check_host, check_token
from maporl.guard.connections import guarded_server
from maporl.rollout.player import Player
from maporl.run import ResolvedRun
from maporl.runs.build import loaded_player, ready_to_play
from maporl.serving.api import Served, TeamAddress, left_out
from maporl.serving.continuous import SAMPLES, ContinuousWeights
from maporl.serving.routes import METHODS, answered, error_in, guarded, routes
from maporl.serving.wire import Refused
from maporl.tasks import Task, build_task
from maporl.team.memory import estimate, training_on_cpu
from maporl.team.saved import check_complete
from trl_ext.process.devices import main_bytes, total_bytes
from trl_ext.process.waits import Threads, result

logger = logging.getLogger(__name__)
LIMITS = Limits()
OPEN = frozenset({"/health"})
"""The paths that need no token, because supervisors ask for them."""
DRAIN_SECONDS = 30
"""What requests in progress get after SIGTERM."""
SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
KNOWN = "POST /v1/chat/completions, POST /v1/responses, POST /v1/messages, GET /v1/models, GET /health or GET /metrics"


def serving_config(config: Config, dtype: str | None, device: str | None, urls: Sequence[str]) -> Config:
    """Return the configuration of a run as it is served: nothing is scored, and vLLM samples at ``urls`` if there are
    any.

    Raises:
        ConfigError: a URL is not valid.
    """
    changed: dict[str, Any] = {"dtype": dtype} if dtype else {}
    if urls:
        section = extension("maporl.integrations.vllm.section:VLLMSection", "--url")
        try:
            changed |= {"engine": "vllm", "vllm": section(urls=list(urls))}
        except ValueError as error:
            raise ConfigError(f"--url: {error}") from None
    agents = {name: replace(one, **changed) if one.weights else one for name, one in config.agents.items()}
    training = replace(config.training, use_cpu=True) if device == "cpu" else config.training
    return replace(config, agents=agents, training=training, reward=RewardSection(), restate="off")


def checked(config: Config, weights: Path | None, name: str) -> tuple[Task, dict[str, str]]:
    """Check that the team ``name`` can be served, before a model is loaded. Return its task, and what is not served
    and why.

    Raises:
        RunError: weights are missing.
        ConfigError: no agent has any.
    """
    run, task = ResolvedRun(config), build_task(config.task, "eval", config.seed)
    root = weights or Path(name)
    check_complete(config, root / "policies" if (root / "policies").is_dir() else root)
    without = dict(left_out(run, task))
    if not set(run.speakers) - without.keys():
        raise ConfigError(f"{name}: no agent has weights of the run: {'; '.join(without.values())}")
    return task, without


def check_memory(config: Config, device: str | None) -> None:
    """Check that the weights fit, before they are loaded.

    Raises:
        ConfigError: they do not.
    """
    frozen = {name: replace(one, trainable=False) for name, one in config.agents.items()}
    run = ResolvedRun(replace(config, agents=frozen))
    needed = estimate(run, 1, 1)["weights"]
    cpu = device == "cpu" or training_on_cpu(config)
    total = main_bytes() if cpu else total_bytes()
    if total is not None and needed > total:
        where = "main memory has" if cpu else "the device has"
        raise ConfigError(
            f"the weights need {needed / 2**30:.1f} GiB, and {where} {total / 2**30:.1f}; give --dtype bfloat16, or "
            "let vLLM serve them on several devices (--url)"
        )


def address_of(
    config: Config, task: Task, weights: Path | None, without: Mapping[str, str], device: str | None, **options: Any
) -> TeamAddress:
    """Load the agents, and return what owns their address. ``options`` are those of
    :class:`~maporl.serving.api.TeamAddress`."""
    run = ResolvedRun(config)
    computing = Threads(1, SAMPLES, for_all=True)
    player = result(computing.submit(_loaded, run, weights, device))
    for name, engine in player.engines.items():
        if isinstance(engine, TextEngine) and not engine.remote:  # one: all weights of this process are in it
            rows = config.ppo.local_rollout_forward_batch_size
            tokens = ContinuousWeights(engine.policies, rows, computing)
            player.engines[name] = TextEngine(engine.policies, tokens, engine.max_new_tokens)
    agents = tuple(name for name in run.speakers if name not in without)
    protocol = run.protocol.at_update(1).in_evaluation()
    served = Served(player, task, protocol, config.evaluation.decoding, agents, without)
    return TeamAddress(served, **options)


def _loaded(run: ResolvedRun, weights: Path | None, device: str | None) -> Player:
    player = loaded_player(run, weights)
    if device is not None:
        import torch

        ready_to_play(player.team, torch.device(device))
    return player


def application(address: TeamAddress, token: str | None) -> Any:
    """Return the ASGI application of an address, behind its guard."""
    telemetry = Telemetry(address)

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def metrics(request: Request) -> Response:
        return Response(telemetry.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def elsewhere(owner: TeamAddress, request: Request) -> Response:
        raise Refused(f"{request.method} {request.url.path}: expected {KNOWN}", status=404, code="not_found")

    router = Router(
        routes=[
            *routes("/v1"),
            Route("/health", health, methods=["GET"]),
            Route("/metrics", metrics, methods=["GET"]),
            Route("/{rest:path}", answered(elsewhere), methods=METHODS),
        ]
    )

    def enter(scope: Any, headers: Any) -> None:
        scope["owner"] = address
        if token is None:
            check_host(headers)
        elif scope["path"] not in OPEN:
            key = headers.get(b"x-api-key")  # Anthropic's clients send it there
            check_token({b"authorization": b"Bearer " + key} if key is not None else headers, token)

    def log(method: str, path: str, status: int, seconds: float) -> None:
        telemetry.request(status)
        level = logging.WARNING if status in (401, 403) else logging.INFO
        logger.log(level, "%s %.100r: %s in %.0f ms", method, path, status or "client gone", 1000 * seconds)

    return guarded(router, LIMITS, Door(enter, log=log))


class Telemetry:
    """The counters that ``GET /metrics`` answers with, in Prometheus's text format."""

    def __init__(self, address: TeamAddress) -> None:
        registry = self.registry = CollectorRegistry()
        self._requests = Counter("maporl_api_requests", "Requests answered", ["status"], registry=registry)
        self._tokens = Counter("maporl_api_tokens", "Tokens sampled", ["model"], registry=registry)
        self._seconds = Histogram(
            "maporl_api_answer_seconds", "Time of an answer", ["model"], buckets=SECONDS, registry=registry
        )
        inside = Gauge("maporl_api_inside", "Requests that are answered or wait", registry=registry)
        inside.set_function(lambda: address.inside)
        address.told = self.answer

    def request(self, status: int) -> None:
        """Count a request."""
        self._requests.labels(str(status)).inc()

    def answer(self, model: str, tokens: int, seconds: float) -> None:
        """Count an answer of a model."""
        self._tokens.labels(model).inc(tokens)
        self._seconds.labels(model).observe(seconds)

    def text(self) -> bytes:
        """Return all counters."""
        return generate_latest(self.registry)


def serve(address: TeamAddress, held: socket.socket, token: str | None) -> None:
    """Answer requests until SIGTERM or SIGINT, then finish those in progress and return."""
    app = application(address, token)
    server = guarded_server(
        app, LIMITS, error_in(Refused.body), log_level="warning", lifespan="off",
        timeout_graceful_shutdown=DRAIN_SECONDS,
    )  # fmt: skip
    server.run(sockets=[held])
