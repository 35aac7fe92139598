"""Find what this machine has, which features lack something, and how to install it. ``maporl doctor`` prints this."""

import importlib
import importlib.util
import os
import platform
import shlex
import shutil
import sys
import time
import warnings
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from maporl.config.imports import extension
from maporl.errors import ConfigError, install_command, one_line

if TYPE_CHECKING:
    import torch

PACKAGES = (
    "maporl",
    "torch",
    "transformers",
    "trl",
    "peft",
    "accelerate",
    "datasets",
    "sympy",
    "mpmath",
    "numpy",
    "pydantic",
)
FEATURES = (
    ("rollouts by vLLM in the trainer's process", "vllm", "vllm"),
    ("DeepSpeed ZeRO", "deepspeed", "deepspeed"),
    ("8-bit optimizer, 4-bit models", "bitsandbytes", "quantized"),
    ("maporl push", "kingfisher_sdk", "push"),
    ("reward server", "fastapi", "server"),
    ("TextArena games", "textarena", "textarena"),
)
LOCK_SECONDS = 600
"""A lock of a compiled extension that is older has no compilation behind it: they take a minute."""


@dataclass(frozen=True)
class Finding:
    """A line of ``maporl doctor``.

    ``state`` is fine, missing (one feature does not work) or broken (nothing works).
    """

    what: str
    state: Literal["fine", "missing", "broken"]
    detail: str


def examine() -> list[Finding]:
    """Return all findings, in order."""
    versions = _versions()
    broken = {finding.what for finding in versions if finding.state != "fine"}
    devices = [] if "torch" in broken else [*_devices(), *_stale_locks()]
    return [*versions, *devices, *_features(), *([] if broken else _groups()), *_surroundings()]


def _versions() -> list[Finding]:
    findings = [Finding("python", "fine", f"{platform.python_version()}, {sys.executable}")]
    for package in PACKAGES:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                importlib.import_module(package)
            findings.append(Finding(package, "fine", version(package)))
        except PackageNotFoundError:
            findings.append(Finding(package, "fine", "not installed as a package: this is a checkout"))
        except Exception as error:  # a broken installation may raise anything
            findings.append(
                Finding(
                    package,
                    "broken",
                    f"{type(error).__name__}: {one_line(error, 200)}; pip install {package}",
                )
            )
    return findings


def _devices() -> list[Finding]:
    import torch

    from trl_ext.process.devices import accelerators
    from trl_ext.process.threads import usable_cores

    threads = Finding(
        "processor", "fine", f"{usable_cores()} cores for this process, torch uses {torch.get_num_threads()} threads"
    )
    if devices := accelerators():
        return [threads, *(Finding(f"GPU {device.index}", "fine", _described(device)) for device in devices)]
    why = "torch is a build for CPUs" if torch.version.cuda is None else "no driver or no device"
    return [threads, Finding("GPU", "missing", f"none ({why}); tiny and small models train on the processor")]


def _described(device: "torch.device") -> str:
    """Return what torch knows of an accelerator: its name and memory if its kind tells them, or else its kind."""
    import torch

    # MPS has no such function
    ask = getattr(torch.get_device_module(device), "get_device_properties", None)
    if ask is None:
        return str(device)
    properties = ask(device)
    return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"


def _stale_locks() -> list[Finding]:
    """Return a finding for each lock that a killed compilation has left. DeepSpeed would wait for it without a word."""
    from torch.utils.cpp_extension import get_default_build_root

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    old = [path for path in sorted(root.rglob("lock")) if time.time() - path.stat().st_mtime > LOCK_SECONDS]
    why = "a compilation that was killed left this lock, and every start that needs the extension waits for it"
    return [Finding("compiled extensions", "missing", f"{why}; rm {shlex.quote(str(path))}") for path in old]


def _features() -> list[Finding]:
    findings = []
    for what, package, extra in FEATURES:
        if importlib.util.find_spec(package) is not None:
            findings.append(Finding(what, "fine", f"{package} {version_of(package)}"))
        else:
            findings.append(Finding(what, "missing", install_command(extra)))
    from maporl.sandbox.sandbox import Sandbox, SandboxError

    try:
        with Sandbox(cache=False) as sandbox:
            walls = sandbox.walls()
    except SandboxError as error:
        return [*findings, Finding("sandbox for programs", "missing", str(error))]
    inside = sandbox.kind == "bubblewrap"
    detail = ", ".join(walls) if inside else f"{', '.join(walls)}, without bubblewrap: {install_command('sandbox')}"
    return [*findings, Finding("sandbox for programs", "fine" if inside else "missing", detail)]


def _groups() -> list[Finding]:
    """Return whether policies can be in groups of processes."""
    what = "policies in groups"
    try:
        found: list[Finding] = extension("maporl.integrations.ray.doctor:examine_groups", "ray")(what)
    except ConfigError as error:
        return [Finding(what, "missing", str(error))]
    return found


def version_of(package: str) -> str:
    """Return the version of a package, or that it is unknown, in words for a finding."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "of unknown version"


def _surroundings() -> list[Finding]:
    from huggingface_hub import constants, get_token

    from trl_ext.process.hub import silence

    home = Path(os.path.expanduser("~"))
    there = next(path for path in (home, *home.parents) if path.exists())
    free = shutil.disk_usage(there).free / 2**30
    why, cache = silence(), f"cache {constants.HF_HUB_CACHE}"
    login = "logged in" if get_token() else "not logged in (hf auth login)"
    fine = not why or constants.HF_HUB_OFFLINE  # who sets it wants no network
    return [
        Finding("hub", "fine" if fine else "missing", f"{why or f'{constants.ENDPOINT} answers, {login}'}; {cache}"),
        Finding("disk", "fine" if free > 5 else "missing", f"{free:.0f} GB free in {there}"),
    ]
