"""The scripts of ``examples/ray``.

Slurm, Ray and Kubernetes are made up here: only what the scripts say and do is checked.
"""

import os
import subprocess

import pytest
import yaml
from folders import ROOT

FOLDER = ROOT / "examples/ray"
TOLD = """#!/bin/bash
told() { echo "$(basename "$0") $*" >> "$LOG"; }
"""
COMMANDS = {
    "scontrol": "printf 'm1\\nm2\\nm3\\n'",
    "srun": 'told "$@"; while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "hostname": "echo 10.0.0.7 fe80::1",
    "ray": 'told "$@ $RAY_AUTH_MODE"; [[ "$*" != *--block ]] || exec sleep 60',
    # it waits until all nodes have joined, as the script's program does
    "python": 'told "$1 $RAY_ADDRESS"; cat > "$LOG.python"; until [[ $(grep -c "block token" "$LOG") -ge 2 ]]; do sleep 0.05; done',
    "maporl": 'told "$@ $RAY_ADDRESS $(stat -c %a "$RAY_AUTH_TOKEN_PATH") $(wc -c < "$RAY_AUTH_TOKEN_PATH")"; exit 3',
}


@pytest.fixture
def run(tmp_path):
    """Run a script of the folder with the commands above, in an empty folder. Return its end and what was told."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "here").mkdir()
    for name, text in COMMANDS.items():
        (tmp_path / "bin" / name).write_text(TOLD + text + "\n")
        (tmp_path / "bin" / name).chmod(0o755)

    def run(script, *words, **environment):
        path = f"{tmp_path}/bin:{os.environ['PATH']}"
        own = {"PATH": path, "LOG": f"{tmp_path}/log", "SLURM_JOB_ID": "41234", "SLURM_JOB_NODELIST": "m[1-3]"}
        command = ["bash", str(FOLDER / script), *words]
        ended = subprocess.run(
            command, env=own | environment, cwd=tmp_path / "here", capture_output=True, text=True, timeout=60
        )
        log = tmp_path / "log"
        return ended, log.read_text().splitlines() if log.exists() else []

    return run


def test_slurm_starts_a_head_and_workers_with_a_token_and_ends_them(run, tmp_path):
    ended, told = run("slurm.sh", "x.yaml", "--resume")
    assert ended.returncode == 3, ended.stderr
    address, on_head = "10.0.0.7:21234", "srun --overlap --nodes=1 --ntasks=1 --nodelist=m1"
    assert told[0] == f"{on_head} hostname --ip-address"
    head = "--node-ip-address=10.0.0.7 --port=21234 --include-dashboard=false --block"
    workers = f"srun --overlap --nodes=2 --ntasks=2 --nodelist=m2,m3 ray start --address={address} --block"
    train = "maporl train x.yaml --backend ray --set cluster.address=auto --resume"
    assert sorted(told[1:]) == sorted(
        [
            f"{on_head} ray start --head {head}",
            f"ray start --head {head} token",
            workers,
            f"ray start --address={address} --block token",
            f"{on_head} python - 3",
            f"python - {address}",
            f"{on_head} {train}",
            f"{train} {address} 600 64",
        ]
    )
    assert told.index(f"python - {address}") < told.index(f"{on_head} {train}")
    compile((tmp_path / "log.python").read_text(), "wait", "exec")
    assert list((tmp_path / "here").iterdir()) == [], "the token is gone"
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(tmp_path) not in running, "what it has started is gone"


def test_a_job_is_submitted_with_a_token_or_not_at_all(run):
    ended, told = run("submit.sh", "http://h:8265", "x.yaml", "--resume")
    assert ended.returncode == 2 and told == [] and "RAY_AUTH_TOKEN_PATH" in ended.stderr
    ended, told = run("submit.sh", "http://h:8265", "x.yaml", "--resume", RAY_AUTH_MODE="token")
    train = "maporl train x.yaml --backend ray --set cluster.address=auto --resume"
    assert ended.returncode == 0 and told == [f"ray job submit --address http://h:8265 -- {train} token"]


def test_the_manifest_of_kuberay_asks_for_a_token_and_shared_storage():
    spec = yaml.safe_load((FOLDER / "rayjob.yaml").read_text())["spec"]
    cluster = spec["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"} and "--set cluster.address=auto" in spec["entrypoint"]
    assert "--set output_dir=/shared/run" in spec["entrypoint"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert "persistentVolumeClaim" in volumes[mounts["/shared"]]
        assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
