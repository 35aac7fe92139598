"""Ray: starting it safely, and processes that it starts as members of groups. Only here and in ``ray_backend`` is Ray
imported.

Ray's own restarts and retries are off. An actor that Ray restarts has the weights of its construction again, and
answers with them without a word. The driver replaces processes itself.
"""

import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Collection, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from maporl.errors import ConfigError, RunError, install_command
from maporl.integrations.ray.engine_process import EngineProcess
from maporl.integrations.ray.groups import Part, Place, Plan
from maporl.integrations.ray.joining import Facts, facts_here
from maporl.integrations.ray.learner_process import LearnerProcess
from maporl.integrations.ray.member import GroupSpec, MemberDied, end_of, log_of, print_to
from maporl.integrations.ray.ray_folder import TOKEN, make_folder
from maporl.integrations.ray.ray_places import COUNTED, Places, kind_of, node_name
from maporl.integrations.ray.section import ClusterSection
from maporl.integrations.ray.verifier_pool import VerifierProcess
from trl_ext.files.stacks import stacks
from trl_ext.process.inherited import HUB_TOKENS, only_inherited
from trl_ext.process.waits import Threads

OLDEST = (2, 59)
"""The oldest Ray whose clusters on one machine have tokens."""
OBJECT_STORE = 2 * 2**30
"""The most bytes of shared memory that are taken on this machine for samples and weights."""
FACTS = 120.0
"""The seconds in which every machine must say what it is. A process starts for it there."""
REACHED = 10.0
"""The seconds in which the head of a cluster must take a connection."""
_SAFE = {
    # Ray's servers listen on every interface of a Linux machine by default; this makes them listen on loopback
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_DOCKER_CPU_WARNING": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # by default all other programs of the machine go before the processes that train and sample
    "RAY_worker_niceness": "0",
}


def check_installed() -> None:
    """Check that the package ``ray`` is there and new enough, without importing it.

    Raises:
        ConfigError: it is not.
    """
    try:
        installed = version("ray")
    except PackageNotFoundError:
        raise ConfigError(
            f"cluster.backend: ray needs the package ray; install it with: {install_command('ray')}"
        ) from None
    if tuple(int(part) for part in installed.split(".")[:2]) < OLDEST:
        raise ConfigError(
            f"cluster.backend: ray needs Ray {'.'.join(map(str, OLDEST))} or newer, got {installed}; update it with: "
            f"{install_command('ray')}"
        )


def check_reached(address: str) -> None:
    """Check that something listens at ``HOST:PORT``. Ray would try for minutes, and say nothing.

    Raises:
        ConfigError: nothing does, or the address is of another form.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"cluster.address: expected HOST:PORT or auto, got {address!r}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACHED).close()
    except OSError as error:
        raise ConfigError(
            f"cluster.address: nothing answers at {address} ({error}); start it there with: ray start --head "
            f"--port={port}"
        ) from None


def _make_safe() -> None:
    """Set what Ray reads from the environment when it is first imported, which must not have happened yet."""
    decided = {key: value for key, value in _SAFE.items() if key.startswith(("RAY_ENABLE", "RAY_AUTH"))}
    if "ray" in sys.modules and any(os.environ.get(key) != value for key, value in decided.items()):
        settings = " ".join(f"{key}={value}" for key, value in decided.items())
        raise ConfigError(
            "cluster.backend: the package ray was imported before, and would listen on every interface, without a "
            f"token; start Python with {settings}, or import ray later"
        )
    os.environ |= _SAFE


@cache
def _own_folder() -> Path:
    """Return the one folder of all clusters of this process, because Ray reads the token once in a process."""
    return make_folder()


class Cluster:
    """A Ray cluster: one that is started on this machine for this run alone, or one that is joined.

    Args:
        address: the address of a cluster to join, or None to start one here.
        memory: the bytes of shared memory of a cluster that is started here.
        places: the number of places on CPUs of a cluster that is started here.
        variables: environment variables that its processes get besides those that they need
            (:mod:`trl_ext.process.inherited`).
        reads_hub: the groups that read a model from the hub. Their processes get its token while they load it.

    Raises:
        ConfigError: Ray is missing or too old, or a cluster that is joined has no token.
    """

    def __init__(
        self,
        address: str | None = None,
        memory: int = OBJECT_STORE,
        places: int = 0,
        variables: Collection[str] = (),
        reads_hub: Collection[str] = (),
    ):
        self.started_here, self._reads_hub = address is None, frozenset(reads_hub)
        if self.started_here:
            _make_safe()
            folder = _own_folder()
            os.environ["RAY_AUTH_TOKEN_PATH"] = str(folder / TOKEN)
        elif os.environ.get("RAY_AUTH_MODE") != "token":
            raise ConfigError(
                "cluster.address: a cluster without a token lets everybody who reaches it run programs; start it with "
                "RAY_AUTH_MODE=token, and set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH here"
            )
        check_installed()
        if address not in (None, "auto"):
            check_reached(str(address))
        import ray

        self.ray: Any = ray
        if self.ray.is_initialized():
            raise ConfigError("cluster.backend: Ray runs in this process already; call ray.shutdown() before")
        options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
        if self.started_here:
            options |= {"include_dashboard": False, "object_store_memory": memory, "_temp_dir": str(folder)}
            options |= {"resources": {COUNTED: places}} if places else {}
        with _signals_kept(), only_inherited(variables) if self.started_here else nullcontext():
            self.ray.init(address=None if self.started_here else address, **options)
        if self.started_here:
            folder.chmod(0o700)  # Ray opens it to all users, who cannot reach it where it is
        self.host = self.ray.remote(max_restarts=0, max_task_retries=0, concurrency_groups={"control": 1})(Host)

    def start(self, name: str, part: Part, spec: GroupSpec, number: int, places: Places, place: Place) -> "RayMember":
        """Start a process, which prints to a file in the run's folder ``logs/``.

        Args:
            name: what errors and logs call it.
            part: ``learner``, ``engine`` or ``verifier``.
            spec: its group. A verifier's has no policies.
            number: its number among those of its kind.
            places: the devices of the run.
            place: the device of the process.

        Raises:
            NoPlace: the machine of the place is lost, and no other has a free device.
        """
        log = log_of(Path(spec.config.output_dir), name)
        options = places.options(place)
        device = options["num_gpus"] > 0
        # machines of a cluster that was joined have tokens of their own, and this one's would travel over the network
        reads = self.started_here and spec.name in self._reads_hub
        tokens = {key: os.environ[key] for key in HUB_TOKENS if reads and key in os.environ}
        actor = self.host.options(**options).remote(part, spec, number, name, log, os.getcwd(), device, tokens)
        return RayMember(self.ray, name, actor, log, place)

    def reserve(self, plan: Plan, section: ClusterSection, use_cpu: bool) -> Places:
        """Reserve a device for each process of ``plan``.

        Raises:
            ConfigError: the machines of the cluster have too few.
        """
        places = Places(self.ray, plan, section.pools, kind_of(section.devices, use_cpu, self.ray.cluster_resources()))
        places.take()
        return places

    def facts(self, folder: Path) -> dict[str, tuple[Facts, float]]:
        """Return what each machine says of itself, by its name, with this machine's time when it said so.

        Raises:
            ConfigError: a machine cannot run the code of this package, or does not answer.
        """
        pinned = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        ask = self.ray.remote(num_cpus=0, max_retries=0)(facts_here)
        nodes = {
            ask.options(scheduling_strategy=pinned(node["NodeID"], soft=False)).remote(str(folder)): node
            for node in self.ray.nodes()
            if node["Alive"]
        }
        machines, waiting, until = {}, list(nodes), time.monotonic() + FACTS
        while waiting:
            done, waiting = self.ray.wait(waiting, timeout=max(until - time.monotonic(), 0))
            name = node_name(nodes[(done or waiting)[0]])
            if not done:
                raise ConfigError(f"cluster: machine {name} has not answered within {FACTS:g} s; look at its Ray logs")
            now = time.time()
            try:
                facts = self.ray.get(done[0])
            except self.ray.exceptions.RayError as error:
                raise ConfigError(
                    f"cluster: machine {name} cannot run this package; install the same there: {error}"
                ) from error
            store = int(nodes[done[0]]["Resources"].get("object_store_memory", 0))
            free = store if facts.shared_memory is None else min(store, facts.shared_memory)
            machines[name] = (replace(facts, shared_memory=free), now)
        return machines

    def devices(self) -> dict[str, dict[str, float]]:
        """Return how many of each device every machine has, by its name: processors, GPUs, and counted places on
        CPUs."""
        kinds = ("CPU", "GPU", COUNTED)
        return {
            node_name(node): {kind: node["Resources"][kind] for kind in kinds if node["Resources"].get(kind)}
            for node in self.ray.nodes()
            if node["Alive"]
        }

    def end(self) -> None:
        """End all processes of a cluster that was started here, or leave one that was joined."""
        self.ray.shutdown()


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Keep this process's handler of SIGTERM, in whose place Ray puts its own, which ends the process with status 1."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@cache
def _settling() -> Threads:
    """Return the threads in which answers arrive. Ray's own thread would wait for itself if it were to call Ray."""
    return Threads(4, "answers from Ray", for_all=True)


class Host:
    """One member of a group, in a process that Ray started. Ray makes an actor of it."""

    def __init__(
        self,
        part: Part,
        spec: GroupSpec,
        number: int,
        name: str,
        log: Path,
        folder: str,
        device: bool,
        tokens: dict[str, str],
    ):
        os.environ |= tokens
        self._tokens = list(tokens)
        if Path(folder).is_dir():
            os.chdir(folder)  # in which relative paths of the configuration are meant
        if not device:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        print_to(log, name)
        parts = {"engine": EngineProcess, "verifier": VerifierProcess}
        self._part: Any = LearnerProcess(spec, number, _address()) if part == "learner" else parts[part](spec)

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the part. What it raises is in the log too."""
        try:
            return getattr(self._part, method)(*arguments)
        except Exception:
            traceback.print_exc()
            raise
        finally:
            if method == "build":  # the models are read
                for name in self._tokens:
                    os.environ.pop(name, None)

    def kept(self, method: str, *arguments: Any) -> tuple[None, Any]:
        """Call a method of the part, whose result stays in the object store."""
        return None, self.call(method, *arguments)

    def pid(self) -> int:
        """Return the number of this process."""
        return os.getpid()

    def stacks(self) -> str:
        """Return what every thread is doing."""
        return stacks()


def _address() -> str:
    """Return the address at which other machines of the cluster reach this one. It is loopback if the cluster is."""
    import ray

    return ray.util.get_node_ip_address()


class RayMember:
    """A process that Ray has started (:class:`maporl.integrations.ray.member.Member`)."""

    def __init__(self, ray: Any, name: str, actor: Any, log: Path, place: Place):
        self.ray, self.name, self.actor, self.log, self.place = ray, name, actor, log, place
        self._lock = threading.Lock()
        self._unanswered: set[Future[Any]] = set()

    def call(self, method: str, *arguments: Any, kept: bool = False) -> Future[Any]:
        """Begin a call (:meth:`maporl.integrations.ray.member.Member.call`)."""
        if kept:
            answer, handle = self.actor.kept.options(num_returns=2).remote(method, *arguments)
        else:
            answer, handle = self.actor.call.remote(method, *arguments), None
        result: Future[Any] = Future()
        with self._lock:
            self._unanswered.add(result)

        def settle(done: Future[Any]) -> None:
            error = done.exception()
            if error is None and handle is not None:  # so that it outlives its machine
                self.ray.wait([handle], fetch_local=True)
            with self._lock:
                if result not in self._unanswered:  # end() has answered
                    return
                self._unanswered.remove(result)
            if error is None:
                result.set_result(done.result() if handle is None else handle)
            else:
                result.set_exception(self._told(error))

        answer.future().add_done_callback(lambda done: _settling().submit(settle, done))
        return result

    def _told(self, error: BaseException) -> BaseException:
        """Return what the method raised, or that the process is gone, with its name and the end of its log."""
        exceptions = self.ray.exceptions
        if isinstance(error, exceptions.RayActorError) and error.actor_init_failed:  # another one would fail as well
            said = str(error).strip().splitlines()[-1]
            return RunError(f"{self.name}: its process could not begin: {said}; {end_of(self.log)}")
        if isinstance(error, exceptions.RayError) and not isinstance(error, exceptions.RayTaskError):
            kind = type(error).__name__
            return MemberDied(f"{self.name}: the process has ended or cannot be reached ({kind}); {end_of(self.log)}")
        cause = getattr(error, "cause", None)
        raised = cause if isinstance(cause, Exception) else error
        raised.add_note(f"{self.name} raised this; {end_of(self.log)}")
        return raised

    def pid(self) -> int:
        """Return the number of the process, for tests that kill it."""
        return self.ray.get(self.actor.pid.options(concurrency_group="control").remote(), timeout=60)

    def answers(self, seconds: float) -> bool:
        """Return whether the process says within ``seconds`` that it is there, although it may be busy with a call."""
        try:
            self.ray.get(self.actor.pid.options(concurrency_group="control").remote(), timeout=seconds)
        except self.ray.exceptions.RayError:
            return False
        return True

    def stacks(self) -> str:
        """Return what every thread of the process is doing, although it may be busy with a call."""
        try:
            return self.ray.get(self.actor.stacks.options(concurrency_group="control").remote(), timeout=20)
        except self.ray.exceptions.RayError as error:
            return f"no stacks: {type(error).__name__}"

    def end(self) -> None:
        """End the process at once. What it was asked raises MemberDied, also if Ray does not notice that it is gone."""
        self.ray.kill(self.actor, no_restart=True)
        with self._lock:
            left, self._unanswered = self._unanswered, set()
        for answer in left:
            answer.set_exception(MemberDied(f"{self.name}: the process was ended before it answered"))
