"""Two machines train together and a third one serves rewards: each a network namespace with an address of its own."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import uuid

import pytest
import torch
from folders import ROOT
from launches import ARGS, WORKER, launch
from safetensors.torch import load_file

HOSTS = ("10.213.77.1", "10.213.77.2", "10.213.77.3")


def ip(*words, check=True):
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True)


@pytest.fixture(scope="module")
def hosts():
    """Three namespaces on one bridge; they reach each other and nothing else."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    tag = uuid.uuid4().hex[:6]
    names = [f"maporl-{tag}-{n}" for n in range(len(HOSTS))]
    hub = f"maporl-{tag}-hub"
    if ip("netns", "add", hub, check=False).returncode:
        pytest.skip("this machine allows no network namespaces")
    try:
        ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        ip("-n", hub, "link", "set", "bridge", "up")
        for number, (name, address) in enumerate(zip(names, HOSTS, strict=True)):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", f"port{number}", "netns", hub)
            ip("-n", hub, "link", "set", f"port{number}", "master", "bridge", "up")
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
        yield names
    finally:
        for name in (*names, hub):
            ip("netns", "del", name, check=False)


def start(host, command, **variables):
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "eth0", "ACCELERATE_USE_CPU": "true",
        **variables,
    }  # fmt: skip
    return subprocess.Popen(
        ["ip", "netns", "exec", host, *map(str, command)], env=environment, cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


@contextlib.contextmanager
def killed_at_the_end(*processes):
    try:
        yield
    finally:
        for process in processes:
            process.kill()


@pytest.mark.slow
def test_two_machines_end_with_the_weights_of_one_process(hosts, tmp_path):
    assert launch(tmp_path / "alone", 1).returncode == 0
    args = ARGS | {"output_dir": str(tmp_path / "run"), "per_device_train_batch_size": 4}
    (tmp_path / "options.json").write_text(json.dumps({"args": args}))
    common = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1", "--master_addr", HOSTS[0],
        "--master_port", "29500",
    ]  # fmt: skip
    machines = [
        start(host, [*common, "--node_rank", rank, WORKER, tmp_path / "options.json", tmp_path])
        for rank, host in enumerate(hosts[:2])
    ]
    with killed_at_the_end(*machines):
        outputs = [machine.communicate(timeout=600)[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], outputs
    assert [(tmp_path / f"rank{n}").read_text() for n in range(2)] == ["2", "2"]
    weights, expected = load_file(tmp_path / "weights.safetensors"), load_file(tmp_path / "alone/weights.safetensors")
    assert weights.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(weights[key], value, atol=1e-5, rtol=0, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.slow
def test_the_documented_start_on_two_machines_with_a_reward_server_on_a_third(hosts, tmp_path):
    """``configs/accelerate/two_nodes.yaml`` with its addresses and counts, and a list of two reward servers of which
    one is gone."""
    server = start(
        hosts[2], [sys.executable, "-m", "reward_server", "--task", "toy_sum", "--labels", "--host", HOSTS[2], "--port", "8501"],
        MAPORL_SERVER_TOKEN="a-token-between-machines",
    )  # fmt: skip
    launcher = [
        sys.executable, "-m", "accelerate.commands.launch", "--config_file", "configs/accelerate/two_nodes.yaml",
        "--num_processes", "2", "--main_process_ip", HOSTS[0],
    ]  # fmt: skip
    run = [
        "train_multi_agent.py", "--config", "configs/ppo/quickstart.yaml", "--set", f"output_dir={tmp_path / 'run'}", "--set", "updates=2",
        "--set", "warm_start.steps=2", "--set", "training.use_cpu=true", "--set", "evaluation.questions=8",
        "--set", "training.per_device_train_batch_size=8", "--set", "training.gradient_accumulation_steps=1", "--set", "ppo.num_mini_batches=1",
        "--set", "reward.sources={verifier: 1.0}",
        "--set", f"reward.verifier={{urls: ['http://{HOSTS[2]}:8502', 'http://{HOSTS[2]}:8501'], on_failure: wait}}",
    ]  # fmt: skip
    with killed_at_the_end(server):
        while "running on" not in (line := server.stdout.readline()):
            assert line or server.poll() is None, "the reward server did not start"
        machines = [
            start(host, [*launcher, "--machine_rank", rank, *run], MAPORL_SERVER_TOKEN="a-token-between-machines")
            for rank, host in enumerate(hosts[:2])
        ]
        with killed_at_the_end(*machines):
            outputs = [machine.communicate(timeout=600)[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], outputs[0][-3000:] + outputs[1][-3000:]
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if "time/update" in r] == [1, 2]
    assert all("reward/verifier" in r for r in records if "time/update" in r)
    dialogues = (tmp_path / "run/dialogues.jsonl").read_text().splitlines()
    assert len(dialogues) == 2 * 4, "the first machine alone writes the run"
    assert (tmp_path / "run/final").is_dir()
