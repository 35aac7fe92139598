"""Ray: starting it safely, and processes that it starts as members of groups. Only here and in ``ray_backend`` is Ray imported.

Ray's own restarts and retries are off. An actor that Ray restarts has the weights of its construction again, and answers with
them without a word. The driver replaces processes itself.
"""

import os
import secrets
import subprocess
import sys
import threading
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from maporl.backends.engine_process import EngineProcess
from maporl.backends.learner_process import LearnerProcess
from maporl.backends.member import MemberDied
from maporl.backends.spec import GroupSpec
from maporl.backends.verifier_process import VerifierProcess
from maporl.errors import ConfigError, install_command

OLDEST = (2, 59)
"""The oldest Ray whose clusters on one machine have tokens."""
OBJECT_STORE = 2 * 2**30
"""The most bytes of shared memory that are taken on this machine for samples and weights."""
_SAFE = {
    # Ray's servers listen on every interface of a Linux machine by default; this makes them listen on loopback
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_DOCKER_CPU_WARNING": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


def check_installed() -> None:
    """Check that the package ``ray`` is there and new enough, without importing it.

    Raises:
        ConfigError: it is not.
    """
    try:
        found = version("ray")
    except PackageNotFoundError:
        raise ConfigError(
            f"cluster.backend: ray needs the package ray; install it with: {install_command('ray')}"
        ) from None
    if tuple(int(part) for part in found.split(".")[:2]) < OLDEST:
        raise ConfigError(
            f"cluster.backend: ray needs Ray {'.'.join(map(str, OLDEST))} or newer, got {found}; update it with: "
            f"{install_command('ray')}"
        )


def _make_safe() -> None:
    """Set what Ray reads from the environment when it is first imported.

    Raises:
        ConfigError: it was imported before, without these settings.
    """
    decided = {key: value for key, value in _SAFE.items() if key.startswith(("RAY_ENABLE", "RAY_AUTH"))}
    if "ray" in sys.modules and any(os.environ.get(key) != value for key, value in decided.items()):
        settings = " ".join(f"{key}={value}" for key, value in decided.items())
        raise ConfigError(
            f"cluster.backend: the package ray was imported before, and would listen on every interface, without a token; start "
            f"Python with {settings}, or import ray later"
        )
    os.environ |= _SAFE


_WATCHING: list[subprocess.Popen] = []
"""The process that ends what this one leaves. It is kept, because its standard input would close with it."""


@cache
def _own_folder() -> Path:
    """Make the folder of the clusters that this process starts, with their token. Only this user can read it.

    Ray reads the token once in a process, so that all clusters of a process have the same.
    """
    folder = Path(mkdtemp(prefix="maporl-ray-"))
    # its standard input ends with this process, however that ends
    command = [sys.executable, "-m", "maporl.backends.watchdog", str(folder)]
    without = {key: value for key, value in os.environ.items() if key != "RAY_AUTH_TOKEN_PATH"}
    _WATCHING.append(subprocess.Popen(command, stdin=subprocess.PIPE, env=without, start_new_session=True))
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    return folder


class Cluster:
    """A Ray cluster: one that is started on this machine for this run alone, or one that is joined.

    Args:
        address: the address of a cluster to join, or None to start one here.
        memory: the bytes of shared memory of a cluster that is started here.

    Raises:
        ConfigError: Ray is missing or too old, or a cluster that is joined has no token.
    """

    def __init__(self, address: str | None = None, memory: int = OBJECT_STORE):
        self.own = address is None
        if self.own:
            _make_safe()
            folder = _own_folder()
            os.environ["RAY_AUTH_TOKEN_PATH"] = str(folder / "token")
        elif os.environ.get("RAY_AUTH_MODE") != "token":
            raise ConfigError(
                "cluster.address: a cluster without a token lets everybody who reaches it run programs; start it with "
                "RAY_AUTH_MODE=token, and set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH here"
            )
        check_installed()
        import ray

        self.ray: Any = ray
        if self.ray.is_initialized():
            raise ConfigError("cluster.backend: Ray runs in this process already; call ray.shutdown() before")
        options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
        if self.own:
            options |= {"include_dashboard": False, "object_store_memory": memory, "_temp_dir": str(folder)}
        self.ray.init(address=None if self.own else address, **options)
        self.host = self.ray.remote(max_restarts=0, max_task_retries=0, concurrency_groups={"control": 1})(Host)

    def devices(self) -> int:
        """Return the number of accelerators of the cluster."""
        return int(self.ray.cluster_resources().get("GPU", 0))

    def start(self, name: str, part: str, spec: GroupSpec, number: int, device: bool, log: Path) -> "RayMember":
        """Start a process.

        Args:
            name: what errors and logs call it.
            part: ``learner``, ``engine`` or ``verifier``.
            spec: its group. A verifier's has no policies.
            number: its number among those of its kind.
            device: whether it has an accelerator of its own.
            log: the file that it prints to.
        """
        actor = self.host.options(num_cpus=0, num_gpus=int(device)).remote(part, spec, number, str(log))
        return RayMember(self.ray, name, actor)

    def end(self) -> None:
        """End all processes of a cluster that was started here, or leave one that was joined."""
        self.ray.shutdown()


@cache
def _settling() -> ThreadPoolExecutor:
    """Return the threads in which answers arrive. Ray's own thread would wait for itself if it were to call Ray."""
    return ThreadPoolExecutor(4, thread_name_prefix="answers from Ray")


class Host:
    """What runs in a process that Ray started: one part of a group. Ray makes an actor of it."""

    def __init__(self, part: str, spec: GroupSpec, number: int, log: str):
        Path(log).parent.mkdir(parents=True, exist_ok=True)
        with open(log, "a", buffering=1) as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        parts = {"engine": EngineProcess, "verifier": VerifierProcess}
        self._part: Any = LearnerProcess(spec, number) if part == "learner" else parts[part](spec)

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the part."""
        return getattr(self._part, method)(*arguments)

    def kept(self, method: str, *arguments: Any) -> tuple[None, Any]:
        """Call a method of the part, whose result stays in the object store."""
        return None, getattr(self._part, method)(*arguments)

    def pid(self) -> int:
        """Return the number of this process."""
        return os.getpid()

    def stacks(self) -> str:
        """Return what every thread is doing."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        frames = sys._current_frames().items()
        return "\n".join(f"{names.get(ident, ident)}\n{''.join(traceback.format_stack(f))}" for ident, f in frames)


class RayMember:
    """A process that Ray has started (:class:`maporl.backends.member.Member`)."""

    def __init__(self, ray: Any, name: str, actor: Any):
        self.ray, self.name, self.actor = ray, name, actor

    def call(self, method: str, *arguments: Any, kept: bool = False) -> Future[Any]:
        """Begin a call (:meth:`maporl.backends.member.Member.call`)."""
        if kept:
            signal, handle = self.actor.kept.options(num_returns=2).remote(method, *arguments)
        else:
            signal, handle = self.actor.call.remote(method, *arguments), None
        result: Future[Any] = Future()

        def settle(done: Future[Any]) -> None:
            error = done.exception()
            if error is None:
                result.set_result(done.result() if handle is None else handle)
            else:
                result.set_exception(self._told(error))

        signal.future().add_done_callback(lambda done: _settling().submit(settle, done))
        return result

    def _told(self, error: BaseException) -> BaseException:
        """Return what the method raised, or that the process is gone."""
        exceptions = self.ray.exceptions
        if isinstance(error, exceptions.RayTaskError):
            return error.cause if isinstance(error.cause, Exception) else error
        if isinstance(error, exceptions.RayError):
            return MemberDied(f"{self.name}: the process has ended or cannot be reached ({type(error).__name__})")
        return error

    def pid(self) -> int:
        """Return the number of the process, for tests that kill it."""
        return self.ray.get(self.actor.pid.options(concurrency_group="control").remote(), timeout=60)

    def stacks(self) -> str:
        """Return what every thread of the process is doing, although it may be busy with a call."""
        try:
            return self.ray.get(self.actor.stacks.options(concurrency_group="control").remote(), timeout=20)
        except self.ray.exceptions.RayError as error:
            return f"no stacks: {type(error).__name__}"

    def end(self) -> None:
        """End the process at once."""
        self.ray.kill(self.actor, no_restart=True)
