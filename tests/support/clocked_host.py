"""A process of a group that notes when each of its calls begins and ends, for a test in which processes share a
device."""

import os
import time
from pathlib import Path

from maporl.integrations.ray.ray_cluster import Host


class ClockedHost(Host):
    """Writes a line for each call into the folder ``calls`` of the run: the process, the method, the beginning and the
    end."""

    def __init__(self, part, spec, *rest):
        super().__init__(part, spec, *rest)
        self._calls = Path(spec.config.output_dir) / "calls"
        self._calls.mkdir(exist_ok=True)

    def _clocked(self, method, work):
        begin = time.monotonic()  # one clock for all processes of a machine
        found = work()
        with (self._calls / str(os.getpid())).open("a") as file:
            file.write(f"{os.getpid()} {method} {begin} {time.monotonic()}\n")
        return found

    def call(self, method, *arguments):
        return self._clocked(method, lambda: super(ClockedHost, self).call(method, *arguments))

    def kept(self, method, *arguments):
        return self._clocked(method, lambda: super(ClockedHost, self).kept(method, *arguments))
