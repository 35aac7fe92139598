"""``maporl jobs`` with a stand-in of the Hub's client: what a job is given, and what its script does."""

import subprocess
from types import SimpleNamespace

import pytest
import yaml
from typer.testing import CliRunner

from maporl.cli.main import app

VALUES = {
    "output_dir": "elsewhere",
    "task": {"name": "toy_sum", "largest": 9},
    "agent_defaults": {"tiny": {}},
    "agents": {"ann": {}, "bob": {}},
}
WORDS = ["--flavor", "a10g-small", "--from", "git+https://example.org/maporl@abc", "--to", "org/team"]


@pytest.fixture
def hub(monkeypatch):
    """A client that keeps the jobs that it is asked to start, with their scripts."""
    started = []

    def run_uv_job(script, **options):
        with open(script, encoding="utf-8") as file:
            started.append({"script": file.read(), **options})
        return SimpleNamespace(url="https://example.org/jobs/1")

    monkeypatch.setattr("huggingface_hub.run_uv_job", run_uv_job)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_secret")
    return started


def called(tmp_path, *words, **changes):
    file = tmp_path / "team.yaml"
    file.write_text(yaml.safe_dump(VALUES | changes))
    return CliRunner().invoke(app, ["jobs", "train", str(file), *words])


def test_a_job_installs_from_the_address_trains_and_pushes(tmp_path, monkeypatch, hub):
    monkeypatch.setenv("TINKER_API_KEY", "tml-1")
    words = ["--extra", "tinker", "--secret", "TINKER_API_KEY", "--timeout", "90m", "--private"]
    result = called(tmp_path, *WORDS, *words)
    assert result.exit_code == 0 and result.output.strip() == "log: https://example.org/jobs/1"
    (job,) = hub
    assert job["dependencies"] == ["maporl[push,tinker] @ git+https://example.org/maporl@abc"]
    assert job["flavor"] == "a10g-small" and job["timeout"] == "90m"
    assert job["secrets"] == {"TINKER_API_KEY": "tml-1", "HF_TOKEN": "hf_secret"} and "hf_secret" not in job["script"]
    asked = []
    monkeypatch.setattr(subprocess, "run", lambda words: asked.append(words[1:]) or SimpleNamespace(returncode=0))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="0"):
        exec(compile(job["script"], "train_team.py", "exec"), {})
    assert asked == [
        ["-m", "maporl", "train", "team.yaml", "--quiet"],
        ["-m", "maporl", "push", "run", "org/team", "--private"],
    ]
    assert yaml.safe_load((tmp_path / "team.yaml").read_text())["output_dir"] == "run"


def test_a_run_that_fails_is_not_pushed(tmp_path, monkeypatch, hub):
    called(tmp_path, *WORDS)
    asked = []
    monkeypatch.setattr(subprocess, "run", lambda words: asked.append(words[1:]) or SimpleNamespace(returncode=2))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        exec(compile(hub[0]["script"], "train_team.py", "exec"), {})
    assert len(asked) == 1


def test_what_a_job_cannot_have_is_refused(tmp_path, monkeypatch, hub):
    (tmp_path / "config.json").write_text("{}")
    result = called(tmp_path, *WORDS, agents={"ann": {"model": str(tmp_path), "tiny": None}})
    assert "is on this machine, and a job cannot read it" in result.output and not hub
    result = called(tmp_path, *WORDS, "--secret", "NOT_SET_ANYWHERE")
    assert "lacks the variable NOT_SET_ANYWHERE" in result.output and not hub
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert "lacks a Hugging Face token (hf auth login)" in called(tmp_path, *WORDS).output
