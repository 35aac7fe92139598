"""Ray's folder and what its processes inherit: nobody else reaches the token, no key travels, and killed runs leave
nothing."""

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from folders import ROOT
from ray_groups import check_cluster, config_of

from maporl.errors import ConfigError
from maporl.integrations.ray import ray_folder
from maporl.integrations.ray.ray_backend import reads_hub
from maporl.integrations.ray.ray_folder import end_abandoned, make_folder
from maporl.run import ResolvedRun
from trl_ext.process.inherited import inherited, only_inherited

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
KEPT = {
    "PATH": "/bin", "HOME": "/home/ann", "LANG": "C", "LC_ALL": "C", "TMPDIR": "/t", "VIRTUAL_ENV": "/v", "PYTHONPATH": "/p",
    "LD_LIBRARY_PATH": "/l", "CUDA_VISIBLE_DEVICES": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_SOCKET_IFNAME": "eth0",
    "OMP_NUM_THREADS": "1", "HF_HOME": "/h", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "https_proxy": "http://p",
    "TOKENIZERS_PARALLELISM": "false", "RAY_AUTH_TOKEN_PATH": "/t/token", "RAY_AUTH_MODE": "token", "RAY_worker_niceness": "0",
    "MAPORL_CACHE": "/c", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTORCH_CUDA_ALLOC_CONF": "x", "XDG_CACHE_HOME": "/x",
}  # fmt: skip
HELD = {
    "HF_TOKEN": "t", "HUGGING_FACE_HUB_TOKEN": "t", "HF_TOKEN_PATH": "/t", "OPENAI_API_KEY": "k", "ANTHROPIC_API_KEY": "k",
    "WANDB_API_KEY": "k", "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "k", "GITHUB_TOKEN": "t", "MAPORL_SERVER_TOKEN": "t",
    "VLLM_API_KEY": "k", "DATABASE_URL": "postgres://ann:secret@db", "SSH_AUTH_SOCK": "/s", "EDITOR": "vi", "MY_SETTING": "1",
    "RAY_CLUSTER_PASSWORD": "p", "HF_MY_CREDENTIALS": "c", "PYTHON_KEYS": "k",
}  # fmt: skip


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Where temporary folders are made."""
    monkeypatch.setattr(ray_folder, "_place", lambda: tmp_path)
    monkeypatch.setattr(ray_folder, "_LOCKS", [])
    monkeypatch.setattr(ray_folder, "_WATCHING", [])
    yield tmp_path
    for watching in ray_folder._WATCHING:
        watching.kill()
        watching.wait()
        watching.stdin.close()
    for lock in ray_folder._LOCKS:
        os.close(lock)


def test_processes_inherit_what_they_need_and_no_secrets(monkeypatch):
    assert inherited(KEPT | HELD) == KEPT
    assert inherited(KEPT | HELD, more=["MY_SETTING", "GITHUB_TOKEN"]) == KEPT | {
        "MY_SETTING": "1",
        "GITHUB_TOKEN": "t",
    }
    for name, value in HELD.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    show = [sys.executable, "-S", "-c", "import json, os; print(json.dumps(dict(os.environ)))"]
    with pytest.raises(KeyError), only_inherited(more=["MY_SETTING"]):
        shown = json.loads(subprocess.run(show, capture_output=True, check=True).stdout)
        raise KeyError
    assert HELD.keys() & shown.keys() == {"MY_SETTING"} and shown["PATH"] == os.environ["PATH"]
    assert dict(os.environ) == before


def test_only_the_user_reaches_the_token_whatever_ray_does_to_its_folder(place):
    folder = make_folder()
    outer = folder.parent
    assert outer.parent == place and outer.name.startswith("maporl-ray-")
    assert [stat.S_IMODE(path.stat().st_mode) for path in (outer, folder, folder / "token")] == [0o700, 0o700, 0o600]
    assert len((folder / "token").read_text()) == 64
    folder.chmod(0o777)  # as Ray does
    if os.getuid() == 0:
        nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        for words in (["ls", folder], ["cat", folder / "token"], ["mv", folder / "token", folder / "other"]):
            assert subprocess.run([*nobody, *map(str, words)], capture_output=True).returncode != 0
    [watching] = ray_folder._WATCHING
    variables = Path(f"/proc/{watching.pid}/environ").read_bytes().split(b"\0")
    assert not [own for own in variables if own.startswith((b"RAY_AUTH_TOKEN_PATH", b"OPENAI"))]


def test_names_are_short_enough_for_the_sockets_of_ray(monkeypatch):
    session = "/ray/session_2026-11-25_18-34-57_123456_1234567/sockets/plasma_store"
    for temporary in ("/tmp", "/var/folders/zz/zyxvpxvq6csfxvn_n0000000000000/T", "/scratch/slurm/job-123456789/tmp"):
        monkeypatch.setattr(ray_folder.tempfile, "tempdir", temporary)
        assert len(f"{ray_folder._place()}/maporl-ray-12345678{session}") <= 107
    monkeypatch.setattr(ray_folder.tempfile, "tempdir", "/scratch")
    assert str(ray_folder._place()) == "/scratch"


HOLDER = """
import sys, time
from pathlib import Path
from maporl.integrations.ray import ray_folder
ray_folder._place = lambda: Path(sys.argv[1])
folder = ray_folder.make_folder()
print(folder, ray_folder._WATCHING[0].pid, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_what_a_killed_run_and_its_killed_watchdog_left_is_ended_by_the_next_one(place, caplog):
    """Real processes: a driver with its watchdog, and one with the token, as the agents of Ray that stay.

    One driver lives.
    """
    drivers = []
    for _ in range(2):
        words = [sys.executable, "-c", HOLDER, str(place)]
        driver = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        folder, watchdog = driver.stdout.readline().split()
        agent = subprocess.Popen(["sleep", "600"], env={"RAY_AUTH_TOKEN_PATH": f"{folder}/token"})
        drivers.append(SimpleNamespace(driver=driver, folder=Path(folder), watchdog=int(watchdog), agent=agent))
    killed, living = drivers
    (place / "maporl-ray-older").mkdir()
    (place / "maporl-ray-link").symlink_to(place / "maporl-ray-older")
    try:
        os.kill(killed.watchdog, 9)
        killed.driver.kill()
        killed.driver.wait()
        assert killed.agent.poll() is None and killed.folder.exists()
        end_abandoned()
        assert killed.agent.wait(20) == -9 and not killed.folder.parent.exists()
        assert f"{killed.folder.parent}: ended what a killed run has left: 1 processes of Ray" in caplog.text
        assert living.agent.poll() is None and (living.folder / "token").exists()
        assert {path.name for path in place.iterdir()} == {
            "maporl-ray-older",
            "maporl-ray-link",
            living.folder.parent.name,
        }
        living.driver.kill()
        assert living.agent.wait(30) == -9, "its own watchdog ends it"
    finally:
        for own in drivers:
            for process in (own.driver, own.agent):
                process.kill()
                process.wait()
            own.driver.stdout.close()
    end = time.monotonic() + 30
    while living.folder.parent.exists() and time.monotonic() < end:
        time.sleep(0.1)
    assert not living.folder.parent.exists()


def config(cluster, **agent):
    return config_of({"ann": {"tiny": {}}, "bob": agent}, cluster=cluster)


def test_only_groups_that_read_from_the_hub_get_its_token(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    local = config({}, model=str(tmp_path))
    assert [reads_hub(local, [name]) for name in ("ann", "bob")] == [False, False]
    hub = config({}, model="owner/name")
    assert [reads_hub(hub, [name]) for name in ("ann", "bob")] == [False, True]


def test_variables_that_nothing_gets_are_refused(monkeypatch):
    monkeypatch.setattr("maporl.integrations.ray.ray_cluster.version", lambda name: "2.60.0")
    for cluster, why in (
        (
            {"backend": "ray", "address": "auto", "variables": ["A"]},
            "variables: the machines of a cluster that is joined have their own",
        ),
        ({"variables": ["A"]}, "variables: backend: local starts no processes"),
    ):
        with pytest.raises(ConfigError, match=why):
            config(cluster, tiny={})
    check_cluster(ResolvedRun(config({"backend": "ray", "variables": ["A"]}, tiny={})))
