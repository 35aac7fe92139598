"""The process of :mod:`maporl.environments.isolated`: it imports an environment's module and forks a process for each
instance.

It runs the user's own code, with the rights and the variables of the trainer. Isolation is against code that blocks or
crashes, not against code that means harm. Imports no torch.
"""

import contextlib
import gc
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NoReturn

from maporl.config.imports import look_up, told
from maporl.config.schema import EnvironmentSection
from maporl.environments import ENVIRONMENTS
from maporl.environments.base import Environment, Tool
from maporl.environments.build import environment_spec
from maporl.environments.rooms import raised, readable
from maporl.event_loop import awaited
from trl_ext.process.random_states import seed_generators
from trl_ext.process.servant import Lost, owner, receive, requests, send

HOOKS = ("observe", "reward", "state")
"""Methods that are asked for only where a class overrides them."""


def main() -> NoReturn:
    """Import the environment that the first frame names, and fork processes until the other side is gone."""
    gc.disable()  # while modules are imported, most of what is made stays
    control = owner()
    try:
        section = json.loads(receive(control))
    except Lost:
        os._exit(0)
    try:
        make = _maker(**section)
        Tool.of(
            _any_tool
        )  # imports what reads signatures, here once and not in every fork: it takes a second and 160 MB
        ready = b"ready"
    except Exception as error:
        ready = told(error).encode()
    gc.freeze()  # a fork that collects garbage then copies nothing that was there before it
    gc.enable()
    with contextlib.suppress(Lost):  # if the trainer is gone, the loop ends
        send(control, ready)
    children: set[int] = set()
    while True:
        command, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if command == b"f":
            children.add(_forked(control, descriptors[0], make))
        elif command == b"e":
            children.discard(_reaped(control.recv(4)))
            control.sendall(b"e")
        else:  # the trainer is gone
            break
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    os._exit(0)


def _any_tool() -> None:
    """Do nothing."""


def _maker(name: str, use: str, **options: Any) -> Callable[[], Environment]:
    part = look_up(use, ENVIRONMENTS, f"environments.{name}.use")
    return environment_spec(name, part, EnvironmentSection(use=use, **options), ()).make


def _forked(control: socket.socket, descriptor: int, make: Callable[[], Environment]) -> int:
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        control.close()
        try:
            _serve(socket.socket(fileno=descriptor), make)
        finally:
            os._exit(1)
    os.close(descriptor)
    control.sendall(child.to_bytes(4, "big"))
    return child


def _reaped(number: bytes) -> int:
    child = int.from_bytes(number, "big")
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child, 0)
    return child


def _serve(stream: socket.socket, make: Callable[[], Environment]) -> None:
    """Carry out the requests of one environment until the other side is gone."""
    served = _Served(make)
    for request in requests(stream):
        try:
            answer = {"value": getattr(served, request.pop("do"))(**request)}
            body = json.dumps(answer).encode()
        except MemoryError:  # what it allocated is in an unknown state; the other side takes it for lost
            return
        except BaseException as error:
            body = json.dumps({"failed": told(error)}).encode()
        send(stream, body)


class _Served:
    """One environment. Each public method is a request."""

    def __init__(self, make: Callable[[], Environment]):
        self._make = make
        self._tools: dict[str, dict[str, Tool]] = {}

    def make(self) -> dict[str, Any]:
        self._made = self._make()
        has = [name for name in HOOKS if getattr(type(self._made), name) is not getattr(Environment, name)]
        # a copy would live in this process too, so only replay makes one that can be killed apart
        return {"forks": "replay" if self._made.forks == "replay" else "no", "has": has}

    def reset(self, seed: int, row: dict[str, Any]) -> dict[str, Any]:
        seed_generators(seed)
        said = self._made.reset(seed, row)
        return {"said": said, "over": self._made.over()}

    def tools(self, agent: str) -> list[dict[str, Any]]:
        self._tools[agent] = {tool.name: tool for tool in self._made.tools(agent)}
        fields = ("name", "description", "parameters", "ordered", "returns")
        return [{field: getattr(tool, field) for field in fields} for tool in self._tools[agent].values()]

    def call(self, agent: str, tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
        try:
            result = readable(awaited(self._tools[agent][tool].run(**arguments)))
        except MemoryError:
            raise
        except BaseException as error:  # as in the trainer's process, even SystemExit is told to the agent
            result = raised(error)
        return {**asdict(result), "over": self._made.over()}

    def observe(self, agent: str) -> str | None:
        return self._made.observe(agent)

    def reward(self) -> Any:
        return self._made.reward()

    def can_pay(self, agents: list[str]) -> bool:
        return self._made.can_pay(agents)

    def state(self) -> str | None:
        return self._made.state()

    def close(self) -> None:
        self._made.close()
