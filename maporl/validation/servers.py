"""Ask the servers that a run names whether they answer, before anything is loaded or sampled.

Each is asked once, all at the same time, for at most :data:`SECONDS`. Nothing is scored, sampled or paid for.
"""

import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from maporl.config.imports import extension
from maporl.config.schema import Config
from maporl.engines.openai import endpoint_of
from maporl.errors import Fault, refused
from maporl.http_client import HttpClient, HttpFailure
from maporl.run import ResolvedRun
from trl_ext.process.waits import Threads, result

SECONDS = 2.0
"""How long a server may take for its answer to a short question."""
REFUSED = (401, 403)
"""The statuses of an answer to a request whose key is missing or wrong."""


@dataclass(frozen=True)
class Server:
    """A server that a run names.

    Args:
        option: the option that names it.
        url: its address.
        variable: the environment variable with its key.
        path: what is asked for. It costs nothing, and needs the key where the server has one.
        start: how such a server is started, or what else to do.
        severity: what it is if the server does not answer.
        reads: what is wrong with the run, by what the server says.
    """

    option: str
    url: str
    variable: str
    path: str
    start: str
    severity: Literal["error", "warning"] = "error"
    reads: Callable[[Any], Fault | None] = lambda told: None

    def client(self) -> HttpClient:
        """Return what asks the server."""
        return HttpClient(self.url, SECONDS, os.environ.get(self.variable, ""), self.variable)


def check(run: ResolvedRun) -> Iterator[Fault]:
    """Yield the servers of agents and of the verifier that do not answer, refuse the key, or lack one."""
    with_key = []
    for name, agent in run.config.agents.items():
        lacking = () if agent.api is None else tuple(refused(partial(endpoint_of, name, agent.api)))
        yield from lacking
        if not lacking:
            with_key.append(name)
    servers = [*_of_agents(run.config, with_key)]
    if run.config.reward.verifier is not None:
        servers += extension("maporl.verifier.check:servers", "reward.verifier")(run)
    with Threads(len(servers), "asks a server") as threads:
        asked = [threads.submit(_fault, server) for server in servers]
        yield from (fault for fault in map(result, asked) if fault is not None)


def _of_agents(config: Config, names: Collection[str]) -> Iterator[Server]:
    """Yield the servers of these agents: endpoints, and vLLM that samples with their weights."""
    for name in names:
        agent = config.agents[name]
        if agent.api is not None:
            url, remedy = endpoint_of(name, agent.api), "look at its address and whether it runs"
            yield Server(f"agents.{name}.api", url, agent.api.key_variable, "/models", remedy)
        if agent.vllm is not None:
            for url in agent.vllm.urls:
                start = f"start it: vllm serve {agent.model} --enable-lora"
                yield Server(f"agents.{name}.vllm.urls", url, agent.vllm.key_variable, "/v1/models", start)


def _fault(server: Server) -> Fault | None:
    """Return what is wrong with a server, or None. One that answers anything but a refusal of the key will do."""
    try:
        client = server.client()
    except ValueError as error:
        return Fault(server.option, str(error))
    try:
        told: Any = client.get(server.path)
    except HttpFailure as error:
        if error.status in REFUSED:
            remedy = f"set the environment variable {server.variable} to a key that it takes"
            return Fault(server.option, f"{client.url} {error}", remedy)
        if isinstance(error.__context__, TimeoutError):
            what = f"{client.url}: did not answer a short question within {SECONDS:g} s"
            return Fault(server.option, what, "a run waits for it; look whether it has too much to do", "warning")
        if error.passing and not error.status:
            return Fault(server.option, f"{client.url}: {error}", server.start, server.severity)
        return None
    return server.reads(told)
