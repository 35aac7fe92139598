"""Environments in processes of their own, which can be killed. Imports no torch.

Python cannot end a thread, so an environment that blocks for ever keeps one, and one that crashes ends the run. With
``isolate: process`` each instance lives in a process that is forked from one that has imported its module. Requests and
answers are JSON.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from maporl.config.schema import EnvironmentSection
from maporl.environments.base import Environment, EnvironmentLost, Tool, Toolbox
from maporl.environments.rooms import EnvironmentFailure
from maporl.errors import UserError
from maporl.types import Result
from trl_ext.errors import retold
from trl_ext.process.servant import Lost, Servant, receive, send

PROGRAM = "import sys; sys.path[:] = sys.argv[1:]; from maporl.environments.isolated_host import main; main()"
START_SECONDS = 120.0
"""The most seconds in which the module of an environment is imported."""
PATIENCE = 2.0
"""The seconds that the process has to end by itself."""
BEGINNING = ("make", "reset", "tools", "can_pay")
"""Requests before which nothing was done in an environment, so that there is nothing to lose."""


class HostFailed(UserError, RuntimeError):
    """The process from which environments are forked cannot start. The message says why."""


class Host(Toolbox):
    """The process from which the processes of one section's environments are forked.

    It is started when it is first needed, and ends with this process, however this one ends.

    Args:
        name: the name of the environment.
        section: the environment's section. ``use`` must be a name that another process can import.
    """

    def __init__(self, name: str, section: EnvironmentSection):
        self.name, self.section = name, section
        self._process = _Importer(name, section)

    def tools(self) -> Sequence[Tool]:
        """Return nothing: the tools are those of the environments."""
        return []

    def fork(self) -> tuple[socket.socket, int]:
        """Start the process of one environment. Return the socket to it, and its process number.

        Raises:
            HostFailed: the module cannot be imported there, or the system starts no more processes.
        """
        with self._process.lock:
            try:
                return self._forked()
            except OSError:  # it was killed; environments that it had forked are lost, but others need not be
                self._process.close()
            with retold(OSError, lambda error: HostFailed(f"environment {self.name!r}: isolate: process: {error}")):
                return self._forked()

    def _forked(self) -> tuple[socket.socket, int]:
        control = self._process.connected()
        ours, its = socket.socketpair()
        with its:
            try:
                socket.send_fds(control, [b"f"], [its.fileno()])
                return ours, int.from_bytes(_answer(control, 4), "big")
            except OSError:
                ours.close()
                raise

    def end(self, pid: int) -> None:
        """Kill the process of an environment. Its number is not given to another process before."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with self._process.lock:
            if self._process.connection is not None:
                with contextlib.suppress(OSError):
                    self._process.connection.sendall(b"e" + pid.to_bytes(4, "big"))
                    _answer(self._process.connection, 1)

    def close(self) -> None:
        """End the process, and with it those of all environments."""
        with self._process.lock:
            self._process.close()


class _Importer(Servant):
    """The host's process: it imports the module of the environment, and then forks it on demand."""

    def __init__(self, name: str, section: EnvironmentSection):
        super().__init__(patience=PATIENCE)
        self.name, self.section = name, section

    def command(self) -> list[str]:
        """Return a program that has the path of this process, so that it finds the same modules."""
        return [sys.executable, "-c", PROGRAM, *sys.path]

    def begin(self, end: socket.socket) -> None:
        """Have the module imported.

        Raises:
            HostFailed: it cannot be.
        """
        section = {name: getattr(self.section, name) for name in ("use", "options", "reward", "forks")}
        deadline = time.monotonic() + START_SECONDS
        try:
            send(end, json.dumps({"name": self.name, **section}).encode(), deadline)
            said = receive(end, deadline).decode()
        except Lost as error:
            said = "timed out" if str(error) == "timeout" else "its process ended"
        except TypeError as error:
            said = str(error)
        if said != "ready":
            raise HostFailed(f"environment {self.name!r}: isolate: process: {said}")
        end.settimeout(START_SECONDS)


class IsolatedEnvironment(Environment):
    """An environment that lives in a process of its own.

    It is forked by replay only, if its class or its section says that it replays. The global random generators of its
    process are seeded at its beginning. A call that kills the process, or that takes too long, loses it.

    Args:
        host: the process from which that of this environment is forked.

    Raises:
        EnvironmentFailure: it cannot be made.
        HostFailed: its module cannot be imported.
    """

    def __init__(self, host: Host):
        self._host, self._options = host, host.section
        self._lock, self._dead, self._over = threading.Lock(), "", False
        self._socket, self._pid = host.fork()
        try:
            made = self._ask("make", seconds=self._options.open_seconds)
        except BaseException:
            self._end("it cannot be made")
            raise
        self.forks = made["forks"]
        self._has: set[str] = set(made["has"])

    def reset(self, seed: int, row: Mapping[str, Any]) -> str | dict[str, str] | None:
        """Begin.

        Raises:
            EnvironmentFailure: it raised something, it was not ready in time, or ``row`` is not JSON.
        """
        begun = self._ask("reset", seconds=self._options.open_seconds, seed=seed, row=dict(row))
        self._over = begun["over"]
        return begun["said"]

    def tools(self, agent: str) -> Sequence[Tool]:
        """Return the tools of ``agent``, which call the process.

        Raises:
            EnvironmentFailure: they cannot be read.
        """
        offered = self._ask("tools", seconds=self._options.open_seconds, agent=agent)
        return [Tool(**tool, run=partial(self._call, agent, tool["name"])) for tool in offered]

    def observe(self, agent: str) -> str | None:
        """Return the news for ``agent``, or None. One that has died has none; the next call tells."""
        return self._asked_if("observe", agent=agent)

    def reward(self) -> float | dict[str, float] | None:
        """Return what the dialogue has earned.

        Raises:
            EnvironmentFailure: it raised something.
            EnvironmentLost: its process is gone.
        """
        return self._ask("reward", seconds=self._options.seconds) if "reward" in self._has else None

    def can_pay(self, agents: Sequence[str]) -> bool:
        """Return whether it may pay one of ``agents`` anything."""
        return self._ask("can_pay", seconds=self._options.open_seconds, agents=list(agents))

    def state(self) -> str | None:
        """Return the name of the situation, or None."""
        return self._asked_if("state")

    def over(self) -> bool:
        """Return whether nothing can be done here any more."""
        return self._over and not self._dead

    def close(self) -> None:
        """Close it, and end its process.

        Raises:
            EnvironmentFailure: its ``close`` raised something.
        """
        try:
            if not self._dead:
                self._ask("close", seconds=self._options.close_seconds)
        except EnvironmentLost as error:
            raise EnvironmentFailure(str(error)) from None
        finally:
            self._end("it is closed")

    def abandon(self) -> None:
        """Kill its process."""
        self._kill("a call took too long")

    def _call(self, agent: str, tool: str, **arguments: Any) -> Result:
        try:
            said = self._ask("call", seconds=self._options.seconds, agent=agent, tool=tool, arguments=arguments)
        except EnvironmentLost as error:
            return Result(str(error), error="lost")
        self._over = said.pop("over")
        return Result(**said)

    def _asked_if(self, what: str, **values: Any) -> Any:
        if what not in self._has or self._dead:
            return None
        try:
            return self._ask(what, seconds=self._options.seconds, **values)
        except EnvironmentLost:
            return None

    def _ask(self, what: str, seconds: float, **values: Any) -> Any:
        """Send a request and return the answer. Raises EnvironmentLost if the process is gone or late."""
        try:
            request = json.dumps({"do": what, **values}).encode()
        except (TypeError, ValueError) as error:
            raise EnvironmentFailure(f"isolate: process passes JSON only: {error}") from None
        deadline = time.monotonic() + seconds
        with self._lock:
            if self._dead:
                raise EnvironmentLost(self._dead)
            try:
                send(self._socket, request, deadline)
                answer = json.loads(receive(self._socket, deadline))
            except Lost as error:
                late = str(error) == "timeout"
                self._kill(f"{what} did not answer within {seconds:g} s" if late else "its process ended")
                if what not in BEGINNING:
                    raise EnvironmentLost(self._dead) from None
                hint = "; raise open_seconds, or lower at_once" if late else ""
                raise EnvironmentFailure(f"{self._dead}{hint}") from None
        if "failed" in answer:
            raise EnvironmentFailure(answer["failed"])
        return answer["value"]

    def _kill(self, why: str) -> None:
        """Kill the process. Another thread that waits for an answer is woken."""
        if not self._dead:
            self._dead = why
            self._host.end(self._pid)
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _end(self, why: str) -> None:
        self._kill(why)
        self._socket.close()


def _answer(control: socket.socket, count: int) -> bytes:
    """Return the ``count`` bytes that the host writes at once, or raise if it is gone or late."""
    answer = control.recv(count)
    if len(answer) != count:
        raise ConnectionError("its process ended")
    return answer
