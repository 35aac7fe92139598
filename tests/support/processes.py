"""Processes of Python that start with the libraries already loaded.

A server imports them once. Every process is a fork of it, with an environment, a folder and output of its own. It runs
what a user types after ``python``. This saves the seconds in which each process would import torch and transformers. A
test whose subject is the start itself uses :mod:`subprocess`.
"""

import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from folders import ROOT

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        "tests.support.no_garbage",
        "maporl.cli.main",
        "maporl.cli.train",
        "maporl.cli.look",
        "maporl.runs.train",
        "maporl.loops.run",
        "maporl.integrations.ray.ray_backend",
        "maporl.serving.program",
        "maporl.report.page",
    ]
)


class Running:
    """A process that was started; the part of :class:`subprocess.Popen` that tests use."""

    def __init__(self, words: Sequence[object], env: Mapping[str, str] | None, cwd: Path, terminal: str | None):
        self.words = [str(word) for word in words]
        self.folder = tempfile.TemporaryDirectory()
        self.files = [terminal or f"{self.folder.name}/{name}" for name in ("stdout", "stderr")]
        environment = dict(os.environ if env is None else env)
        arguments = (self.words, environment, str(cwd), self.files)
        self.process = SERVER.Process(target=_run, args=arguments, daemon=True)
        self.process.start()
        self.pid = self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.kill()
            raise subprocess.TimeoutExpired(self.words, timeout, *self.output())
        return self.process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        return self.output()

    def output(self) -> tuple[str, str]:
        """What it has written so far to its standard output and its standard error."""
        out, err = (Path(file) for file in self.files)
        return tuple(file.read_text() if file.is_file() else "" for file in (out, err))

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self.process.terminate()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def start(
    words: Sequence[object], env: Mapping[str, str] | None = None, cwd: Path = ROOT, terminal: str | None = None
) -> Running:
    """Start ``python WORDS``: ``-m MODULE ...`` or ``SCRIPT ...``; ``terminal`` is the device that it writes to."""
    return Running(words, env, cwd, terminal)


def run(
    words: Sequence[object], env: Mapping[str, str] | None = None, cwd: Path = ROOT, timeout: float = 300
) -> subprocess.CompletedProcess:
    process = start(words, env, cwd)
    out, err = process.communicate(timeout)
    return subprocess.CompletedProcess(process.words, process.returncode, out, err)


def end_of(together: Sequence[Running], timeout: float) -> subprocess.CompletedProcess:
    """Wait for processes that work together; where one fails the others are ended, and it is what is returned."""
    try:
        while running := [process for process in together if process.poll() is None]:
            if any(process.poll() for process in together):
                break
            if not wait([process.process.sentinel for process in running], timeout):
                raise subprocess.TimeoutExpired(running[0].words, timeout, *running[0].output())
        failed = [process for process in together if process.poll()]
    finally:
        for process in together:
            process.kill()
    ended = failed[0] if failed else together[0]
    return subprocess.CompletedProcess(ended.words, ended.returncode, *ended.output())


def maporl(*words: object, timeout: float = 300) -> subprocess.CompletedProcess:
    return run(["-m", "maporl", *words], timeout=timeout)


def leave_files_to_the_system() -> None:
    """Let no file be waited for until it is on the disk: what tests write need not outlive a failure of power."""
    os.fsync = lambda file: None


def ask_each_kind_of_model_once() -> None:
    """Let :func:`trl_ext.models.forward.reading_of` ask models of one kind once in this process.

    Tests make thousands of tiny models of a few kinds, and two dozen short forwards of each were a fifth of their time.
    Of one kind are models of one class, configuration and type of numbers that consist of the same modules.
    """
    forward = sys.modules.get("trl_ext.models.forward")
    if forward is None:
        return
    ask, known = forward._ask_reading, {}

    def ask_once(model: Any) -> Any:
        modules = [(name, type(module)) for name, module in model.named_modules()]
        for module in model.modules():  # a test has put something in a forward's place, or listens
            if "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks:
                return ask(model)
        config = model.config.to_json_string(use_diff=False), model.config.get_text_config()._attn_implementation
        kinds = {(p.dtype, p.device.type, bool(p.isfinite().all())) for p in model.parameters()}
        key = (type(model), type(model).forward, *config, frozenset(kinds), *modules)
        if key not in known:
            known[key] = ask(model)
        return known[key]

    forward._ask_reading = ask_once


def _run(words: list[str], environment: dict[str, str], cwd: str, files: list[str]) -> None:
    for number, file in enumerate(files, 1):
        opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.freeze()  # collecting garbage would copy the memory of the server's imports
    gc.enable()
    leave_files_to_the_system()
    ask_each_kind_of_model_once()
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, cwd)
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")
