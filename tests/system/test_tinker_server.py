"""Training on SkyRL's JAX server, which others wrote, ends with the weights of training here.

It needs a virtual environment with the server, of Python 3.12, and a folder with an SDK that the server answers::

    python3.12 -m venv SERVER && SERVER/bin/pip install torch==2.13.0 "skyrl[tinker,jax]" "tinker<=0.24.1"
    pip install --no-deps --target SDK tinker==0.24.1
    MAPORL_SKYRL=SERVER MAPORL_TINKER_SDK=SDK pytest -m slow tests/system/test_tinker_server.py
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import pytest
from folders import ROOT
from launches import free_port
from tinker_stub import write_base

from maporl.sections import TinySection
from maporl.tiny import build_tiny_model, build_tiny_tokenizer

SERVER, SDK = os.environ.get("MAPORL_SKYRL"), os.environ.get("MAPORL_TINKER_SDK")
UV = """#!/bin/bash
while [ "$1" != "-m" ]; do shift; done
{python} "$@" &
child=$!
trap 'kill $child' TERM INT
wait $child
"""
"""SkyRL starts its engine by ``uv run``, which would download; this runs what is installed."""


@pytest.fixture
def server(tmp_path):
    """The address of a server, and the folder of its base model."""
    section = TinySection(
        alphabet="0123456789+=;", hidden_size=64, layers=2, heads=2, architecture="qwen3", context=256
    )
    tokenizer = build_tiny_tokenizer(section)
    base = write_base(tmp_path / "qwen", lambda: (build_tiny_model(section, tokenizer), tokenizer))
    uv = tmp_path / "bin/uv"
    uv.parent.mkdir()
    uv.write_text(UV.format(python=Path(str(SERVER), "bin/python")))
    uv.chmod(0o755)
    port = free_port()
    words = {
        "base-model": base, "backend": "jax", "backend-config": '{"max_lora_adapters": 6, "max_lora_rank": 8}',
        "host": "127.0.0.1", "port": port, "database-url": f"sqlite:///{tmp_path}/server.db", "checkpoints-base": tmp_path / "saved",
    }  # fmt: skip
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"PATH": f"{uv.parent}:{os.environ['PATH']}", "JAX_PLATFORMS": "cpu"}
    command = [str(uv), "run", "-m", "skyrl.tinker.api", *(str(w) for k, v in words.items() for w in (f"--{k}", v))]
    with (tmp_path / "server.log").open("w") as log:
        running = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + 180
    try:
        while time.monotonic() < end:
            try:
                httpx2.get(f"{url}/api/v1/healthz", timeout=5).raise_for_status()
                break
            except httpx2.HTTPError:
                time.sleep(1)
        yield url, base
    finally:
        running.terminate()
        running.wait(60)


@pytest.mark.slow
@pytest.mark.skipif(not (SERVER and SDK), reason="MAPORL_SKYRL and MAPORL_TINKER_SDK name the server and its SDK")
def test_weights_are_those_of_training_here(tmp_path, server):
    url, base = server
    words = [sys.executable, ROOT / "tests/support/tinker_runs.py", url, base, tmp_path]
    path = os.pathsep.join([str(SDK), str(ROOT)])
    done = subprocess.run(words, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["facts"]["divides"] == "sequence and rows" and found["facts"]["clips"] is False
    assert 100 * found["difference"] < 0.01 < found["moved"]
