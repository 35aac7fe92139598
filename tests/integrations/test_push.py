"""A trained team is pushed to the hub and loaded again."""

import base64
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from hostile_runs import data_of
from typer.testing import CliRunner

from maporl import Team
from maporl.cli.main import app
from maporl.cli.train import _dry_run
from maporl.config import parse_config
from maporl.config.parse import to_yaml
from maporl.errors import ConfigError, RunError
from maporl.integrations.hub import pull
from maporl.integrations.hub.pack import _words_of, pack
from maporl.integrations.hub.push import push
from maporl.integrations.hub.scrub import mark
from maporl.report.page import about
from maporl.report.read import read_run
from maporl.runs.train import train
from maporl.team.loading import load_tokenizers
from maporl.team.saved import read_team
from maporl.training.args import changes
from maporl.training.run_record import RunRecord
from maporl.validation.load import from_dict

LETTERS = "0123456789+=;"
SHORT = {"name": "debate", "turns": 2, "later": "{others};{question}", "quote": "{text}", "separator": ";"}


def trained(folder, agents):
    config = from_dict(
        {
            "output_dir": str(folder), "task": {"name": "toy_sum", "largest": 9}, "agents": agents, "updates": 1,
            "protocol": SHORT, "ppo": {"response_length": 4, "num_ppo_epochs": 1}, "evaluation": {"questions": 8},
            "training": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "use_cpu": True, "learning_rate": 1e-2},
        }
    )  # fmt: skip
    train(config, resume=False, quiet=True)
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a small model as one would have it from the hub, and its tokenizer."""
    from maporl.config.schema import TinySection
    from maporl.tiny import build_tiny_model, build_tiny_tokenizer

    torch.manual_seed(3)
    section, folder = (
        TinySection(alphabet="".join(sorted({*LETTERS, *map(chr, range(97, 123)), " ", ".", "?", ":", "A", "\n"}))),
        tmp_path_factory.mktemp("base"),
    )
    tokenizer = build_tiny_tokenizer(section)
    build_tiny_model(section, tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory, saved):
    """A tiny model, a whole model read from a folder, and two LoRA agents on that folder's model."""
    lora = {"r": 4, "target_modules": "all-linear"}
    agents = {
        "ann": {"tiny": {"alphabet": LETTERS}, "policy_per": "turn"}, "bob": {"model": saved},
        "cat": {"model": saved, "lora": lora}, "dan": {"model": saved, "lora": lora},
    }  # fmt: skip
    return trained(tmp_path_factory.mktemp("runs") / "run", agents)


@pytest.fixture
def copy(run, tmp_path):
    """The run, in which a test may change files."""
    return shutil.copytree(run, tmp_path / "run")


def test_a_team_comes_back_as_it_was_trained(run, saved):
    team = Team.from_pretrained(run)
    assert list(team.agents) == ["ann", "bob", "cat", "dan"]
    assert set(team.policies) == {"ann-turn1", "ann-turn2", "bob", "cat", "dan"}
    from safetensors.torch import load_file

    for name in ("ann-turn1", "ann-turn2", "bob"):
        written, own = load_file(run / f"final/{name}/model.safetensors"), team.policies[name].model.state_dict()
        assert written and all(torch.equal(value, own[key]) for key, value in written.items()), name
    for name in ("cat", "dan"):
        written = load_file(run / f"final/{name}/adapter_model.safetensors")
        own = {
            k.replace(f".{name}.", "."): v
            for k, v in team.policies[name].model.state_dict().items()
            if f".{name}." in k
        }
        assert {k.split("base_model.model.")[-1] for k in written} == {k.split("base_model.model.")[-1] for k in own}
        assert all(torch.equal(v, own[k]) for k, v in written.items())
    assert team.policies["cat"].model is team.policies["dan"].model, "one base"
    bob = team.policies["bob"]
    assert bob.model.config._name_or_path == bob.tokenizer.name_or_path == str(run / "final/bob"), "they need no base"


def test_the_card_has_results_method_and_citation_and_policies_say_where_they_are(run, saved, tmp_path):
    unpacked(run, tmp_path)
    card = (tmp_path / "README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    assert front["library_name"] == "maporl" and "multi-agent" in front["tags"] and "base_model" not in front
    final = json.loads((run / "evaluation_after.json").read_text())["turns"][1]["team"]
    assert f"| 2 | all agents | {final['value']:.1%} | {final['low']:.1%} to {final['high']:.1%} |" in card
    assert 'Team.from_pretrained("org/team")' in card and "maporl play org/team" in card
    assert 'from_pretrained("org/team", subfolder="bob")' in (tmp_path / "bob/README.md").read_text()
    team = Team.from_pretrained(tmp_path, [f"agents.{name}.model={saved}" for name in ("cat", "dan")])
    assert set(team.policies) == {"ann-turn1", "ann-turn2", "bob", "cat", "dan"}, "what is pushed can be read"


def unpacked(run, folder):
    """What a push of the run holds, in a folder; returns what was noted."""
    contents, notes = pack(read_run(run), "org/team")
    for path, content in contents.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content if isinstance(content, bytes) else content.read_bytes())
    return notes


def test_nothing_of_this_machine_is_pushed(run, saved, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    file = tmp_path / "run/config.yaml"
    config = yaml.safe_load(file.read_text())
    config["protocol"]["opening"] = "/think {question}"  # no path
    config["agents"]["eve"] = {
        "engine": "openai",
        "api": {"model": "m", "base_url": "https://alice:s3cr3t@llm.corp/v1"},
    }
    file.write_text(yaml.safe_dump(config))
    notes = unpacked(tmp_path / "run", tmp_path / "out")
    texts = {p: p.read_text() for p in (tmp_path / "out").rglob("*") if p.suffix in (".json", ".md", ".yaml", ".html")}
    page = next(text for path, text in texts.items() if path.name == "report.html")
    texts["the page's data"] = json.dumps(data_of(page))
    for path, text in texts.items():
        assert saved not in text and str(tmp_path) not in text and str(run) not in text and "s3cr3t" not in text, path
    pushed = yaml.safe_load((tmp_path / "out/config.yaml").read_text())
    assert pushed["output_dir"] == "team" and pushed["protocol"]["opening"] == "/think {question}"
    for note in (
        f"taken out: {saved}",
        "agents.cat: its base is a folder of this machine; who loads the team must give agents.cat.model",
        "everybody can read: agents.eve.api.base_url=https://llm.corp/v1",
    ):
        assert note in notes, notes
    assert not any("agents.bob:" in note for note in notes), "whole models need no base"
    config["agents"]["cat"] |= {"lora": None, "adapter": str(run / "initial/cat")}  # as a run that was made in Python
    file.write_text(yaml.safe_dump(config))
    assert any(
        note.startswith("agents.cat: its base is a folder") for note in unpacked(tmp_path / "run", tmp_path / "two")
    )


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"agents": {"ann": {"engine": "openai", "api": {"model": "m", "base_url": "http://evil.example", "key_variable": "AWS_SECRET_ACCESS_KEY"}}}}, r"agents\.ann"),
        ({"agents": {"ann": {"model": "org/m", "engine": "vllm", "vllm": {"colocate": {"options": {"trust_remote_code": True}}}}}}, r"agents\.ann"),
        ({"agents": {"ann": {"tiny": {}, "chat_template": "fallback"}, "bob": {"model": "org/m", "chat_template": "secrets.txt"}}}, r"agents\.bob"),
        ({"tools": {"search": {"use": "bm25", "options": {"corpus": "/home/alice/mail.jsonl"}}}}, "tools"),
        ({"tools": {"run": {"use": "os:system"}}}, "tools"),
        ({"environments": {"shop": {"use": "bm25", "options": {"k": 2}}}}, "environments"),
    ],
)  # fmt: skip
def test_a_strangers_configuration_does_not_reach_out(tmp_path, monkeypatch, given, named):
    harmless = {"output_dir": "/home/someone", "task": {"name": "toy_sum"}, "agents": {"ann": {"tiny": {}}}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(harmless | given))
    monkeypatch.setattr(pull, "snapshot_download", lambda name, **options: str(tmp_path))
    with pytest.raises(RunError, match=rf"org/team: its config.yaml sets {named}\..*if you trust it: hf download"):
        read_team("org/team")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(harmless))
    assert read_team("org/team")[0].output_dir == "team", "and not where its author had it"
    assert read_team(tmp_path)[0].output_dir == str(tmp_path)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda run, empty: push(run, "not a name!"), "is not a name on the hub"),
        (lambda run, empty: push(run, "team"), "'team': expected ORG/NAME"),
        (lambda run, empty: push(empty, "org/team"), "is not a run: it has neither"),
        (lambda run, empty: push(run, "org/team"), "org/team: could not be pushed|org/team: nobody is logged in"),
        (
            lambda run, empty: Team.from_pretrained("org/none-such-team"),
            "neither a folder here nor a team on the hub that can be read|is not in the cache .*, and HF_HUB_OFFLINE is set",
        ),
        (lambda run, empty: Team.from_pretrained(empty), "has no config.yaml"),
    ],
)
def test_what_cannot_be_shared_is_said(run, tmp_path, call, message):
    with pytest.raises(RunError, match=message):
        call(run, tmp_path)


def test_a_run_that_has_not_ended_is_no_team(tmp_path):
    values = {"task": {"name": "toy_sum"}, "agents": {"ann": {"tiny": {}}}, "evaluation": {"questions": 0}}
    config = from_dict({"output_dir": str(tmp_path)} | values)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    with pytest.raises(RunError, match="has no folder for policy 'ann'; the run has not ended"):
        Team.from_pretrained(tmp_path)
    with pytest.raises(RunError, match=r"has no final weights and config\.yaml; push a run that has ended"):
        push(tmp_path, "org/team")
    assert load_tokenizers(config)["ann"].eos_token_id is not None


# -- what does not leave this machine --------------------------------------------------------------------------------

JWT = ".".join([*(base64.b64encode(part).decode() for part in (b'{"alg":"HS256","typ":"JWT"}', b'{"sub":"1234567","name":"Ann"}')), "SflKxwRJ" "SMeKKF2QT4fwpMeJf36P"])  # fmt: skip
SECRETS = {
    "hf": "hf_" + "aB3" * 10, "openai": "sk-proj-" + "x9Y" * 10, "github": "ghp_" + "q" * 30, "aws": "AKIA" + "Z" * 16,
    "google": "AIza" + "k" * 35, "slack": "xoxb-123456789-abc", "jwt": JWT,
    "bearer": "Bearer " + "8f3kQ0z7" + "LmXw.2b9Tn4Rv6Hd1", "password": "https://alice:s3cr3t@llm.corp/v1", "query": "https://x.org/v1?a=1&api_key=q1w2e3",
    "private": "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\n-----END RSA PRIVATE KEY-----", "groq": "gsk_" + "7hQ2vB9xLd4R" * 4 + "tY3m",
}  # fmt: skip
HIDDEN = [*(SECRETS[n] for n in ("hf", "openai", "github", "aws", "google", "slack", "jwt", "groq")), "8f3kQ0z7LmXw", "s3cr3t", "q1w2e3", "MIIEow"]  # fmt: skip


def readable(folder):
    """All texts of a pushed team, with the data in the page."""
    texts = {
        str(p.relative_to(folder)): p.read_text()
        for p in folder.rglob("*")
        if p.is_file() and p.suffix not in (".safetensors", ".png")
    }
    return texts | {"the page's data": json.dumps(data_of(texts["report.html"]))}


def test_secrets_by_their_names_are_taken_out_and_named(copy, tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "environment-secret")
    config = yaml.safe_load((copy / "config.yaml").read_text())
    config["agents"]["eve"] = {
        "engine": "openai",
        "api": {"model": "m", "base_url": "https://alice:s3cr3t@llm.corp/v1?api_key=q1w2e3#x"},
    }
    options = {"api_key": "k", "X-Api-Key": "k", "hf_token": "s3cr3t", "credentials": {"user": "s3cr3t"}, "password": 735914, "token": "8f3kQ0z7Lm" + "Xw2b9Tn4Rv"}  # fmt: skip
    config["agents"]["fay"] = {"engine_options": {**options, "pad_token": "<pad>"}}
    (copy / "config.yaml").write_text(yaml.safe_dump(config))
    lines = (copy / "dialogues.jsonl").read_text().splitlines()
    record = json.loads(lines[0])
    record["utterances"][0]["text"] = record["example"]["question"] = "It is environment-secret."
    (copy / "dialogues.jsonl").write_text("\n".join([json.dumps(record), *lines[1:]]) + "\n")
    notes = unpacked(copy, tmp_path / "out")
    hidden = ("environment-secret", "s3cr3t", "q1w2e3", "735914", "8f3kQ0z7Lm")
    for name, text in [*readable(tmp_path / "out").items(), ("notes", "\n".join(notes))]:
        assert not [secret for secret in hidden if secret in text], name
    for note in (
        *(f"taken out: the value of config.yaml: agents.fay.engine_options.{name}" for name in options),
        "taken out: the value of an environment variable, in report.html",
    ):
        assert note in notes, notes
    pushed = yaml.safe_load((tmp_path / "out/config.yaml").read_text())
    assert pushed["agents"]["eve"]["api"]["base_url"] == "https://llm.corp/v1"
    assert pushed["agents"]["fay"]["engine_options"]["pad_token"] == "<pad>", "a token of a vocabulary is not a secret"


def test_secrets_by_their_names_stand_neither_on_the_page_nor_in_trackers_nor_in_errors(run, copy, capsys):
    key = "8f3kQ0z7Lm" + "Xw2b9Tn4Rv"
    config = yaml.safe_load((copy / "config.yaml").read_text())
    config["agents"]["fay"] = {"engine_options": {"X-Api-Key": key, "token": key, "seconds": 5}}
    (copy / "config.yaml").write_text(yaml.safe_dump(config))
    sections = RunRecord.sections(SimpleNamespace(folder=copy))
    assert sections["agents"]["fay"]["engine_options"] == {"X-Api-Key": "(taken out)", "token": "(taken out)", "seconds": 5}  # fmt: skip
    told = json.dumps(about([read_run(copy)])) + json.dumps(about([read_run(run), read_run(copy)]))
    assert "X-Api-Key" in told and key not in told
    assert changes({"api_key": key}, {"api_key": f"{key}9"}) == ["api_key was '(taken out)' and is '(taken out)'"]
    wrong = {"task": {"name": "toy_sum"}, "output_dir": "x", "agents": {"ann": {"engine": "openai", "api": {"model": "m", "base_url": {"token": key}}}}}  # fmt: skip
    with pytest.raises(ConfigError, match=r"base_url: expected a text, got \{'token': '\(taken out\)'\}"):
        from_dict(wrong)
    tools = {"find": {"use": "bm25", "options": {"api_key": key}}}
    _dry_run(parse_config({"task": {"name": "toy_sum"}, "output_dir": "x", "agents": {"ann": {"tiny": {}}}, "tools": tools}, "x"))  # fmt: skip
    assert "api_key: (taken out)" in capsys.readouterr().out


def with_texts(copy, text):
    """Put a text into every kind of file of a team, and return the places that a push names."""
    from safetensors.torch import load_file, save_file

    config = yaml.safe_load((copy / "config.yaml").read_text())
    config["agents"]["bob"]["system"] = text
    (copy / "config.yaml").write_text(yaml.safe_dump(config, width=10**6))
    lines = (copy / "dialogues.jsonl").read_text().splitlines()
    record = json.loads(lines[1])
    record["utterances"][0]["text"] = text
    (copy / "dialogues.jsonl").write_text("\n".join([lines[0], json.dumps(record), *lines[2:]]) + "\n")
    for name in ("ann-turn1/README.md", "bob/chat_template.jinja"):
        (copy / "final" / name).write_text((copy / "final" / name).read_text() + text)
    for file in (copy / "final/bob/tokenizer_config.json", copy / "final/cat/adapter_config.json", copy / "final/bob/tokenizer.json", copy / "evaluation_after.json"):  # fmt: skip
        file.write_text(json.dumps(json.loads(file.read_text()) | {"note": text}))
    weights = copy / "final/bob/model.safetensors"
    save_file(load_file(weights), weights, metadata={"format": "pt", "note": text})
    return (
        "config.yaml: agents.bob.system", "report.html", "ann-turn1/README.md", "bob/chat_template.jinja", "bob/tokenizer_config.json: note",
        "cat/adapter_config.json: note", "bob/tokenizer.json", "bob/model.safetensors", "evaluation_after.json", "dialogues.jsonl:2",
    )  # fmt: skip


def test_what_looks_like_a_secret_stops_the_push_wherever_it_stands(copy):
    places = with_texts(copy, f"The tool said {SECRETS['groq']}, twice.")
    with pytest.raises(RunError, match=r"nothing was pushed, because 1 of its texts look.*--allow MARK") as refused:
        push(copy, "org/team", dry_run=True)
    (line,) = refused.value.__notes__
    assert line.startswith(f"  {mark(SECRETS['groq'])}: groq-api-key, in ") and SECRETS["groq"] not in line
    assert not [place for place in places if place not in line], line
    result = CliRunner().invoke(app, ["push", str(copy), "org/team", "--dry-run"])
    assert result.exit_code == 1 and mark(SECRETS["groq"]) in result.output
    allowed = ["--allow", mark(SECRETS["groq"])]
    result = CliRunner().invoke(app, ["push", str(copy), "org/team", "--dry-run", *allowed])
    assert result.exit_code == 0 and f"allowed: groq-api-key ({allowed[1]}), in report.html" in result.output


def test_every_kind_of_secret_in_a_dialogue_is_named_and_never_shown(copy):
    with_texts(copy, "\n".join(SECRETS.values()))
    with pytest.raises(RunError) as refused:
        pack(read_run(copy), "org/team")
    told = "\n".join([str(refused.value), *refused.value.__notes__])
    assert len(refused.value.__notes__) >= len(SECRETS)
    assert not [secret for secret in HIDDEN if secret in told], told


def test_tensors_are_not_searched(tmp_path):
    file = tmp_path / "model.safetensors"
    with file.open("wb") as weights:
        weights.write((9).to_bytes(8, "little") + b'{"a": 1} ')
        weights.truncate(2**30)
    assert _words_of(file) == b'{"a": 1} '


def test_no_path_of_this_machine_is_pushed(copy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models/base").mkdir(parents=True)
    config = yaml.safe_load((copy / "config.yaml").read_text())
    paths = {
        "source": "/srv/corp/private.jsonl", "eval_source": "file:///srv/corp/held-out.jsonl", "encoder": "/srv/corp/encoder",
    }  # fmt: skip
    config["task"] |= paths
    config["schedule"] = {"curriculum": [{"update": 2, "task": {"source": "../corp/harder.jsonl"}}]}
    config["reward"]["verifier"] = {"model": "models/base", "urls": ["http://10.0.0.5:8501", "file:///srv/corp/x"]}
    config["agents"]["ann"]["system"] = f"Look into {tmp_path}/notes and {Path.home()}/x."
    config["agents"]["bob"]["engine_options"] = {"anything": "/srv/corp/cache", "command": "/think {question}"}
    (copy / "config.yaml").write_text(yaml.safe_dump(config))
    notes = unpacked(copy, tmp_path / "out")
    for name, text in readable(tmp_path / "out").items():
        assert not [path for path in ("/srv/corp", "../corp", str(tmp_path), f"{Path.home()}/x") if path in text], name
    pushed = yaml.safe_load((tmp_path / "out/config.yaml").read_text())
    assert [pushed["task"][key] for key in paths] == ["private.jsonl", "held-out.jsonl", "encoder"]
    assert pushed["reward"]["verifier"] == {"model": "base", "urls": ["http://10.0.0.5:8501", "x"]}
    assert pushed["agents"]["bob"]["engine_options"]["command"] == "/think {question}"
    assert "taken out: /srv/corp/encoder" in notes


def test_only_the_files_of_a_team_are_pushed(run, copy):
    final = copy / "final"
    for name in (".env", "bob/.env", "bob/notes.txt", "bob/optimizer.safetensors", "bob/pytorch_model.bin", "bob/own.py", "bob/model.safetensors.bak", "bob/.git/config", "bob/deep/model.safetensors", "zoe/model.safetensors"):  # fmt: skip
        (final / name).parent.mkdir(parents=True, exist_ok=True)
        (final / name).write_text("private")
    (final / "bob/dangling.txt").symlink_to("/nowhere")
    (final / "bob/passwd").symlink_to("/etc/passwd")
    (final / "bob/home").symlink_to(Path.home())
    before, _ = pack(read_run(run), "org/team")
    contents, notes = pack(read_run(copy), "org/team")
    assert contents.keys() == before.keys()
    kinds = {path.name for path in map(Path, contents)}
    assert kinds == {
        "README.md", "config.yaml", "report.html", "evaluation_before.json", "evaluation_after.json", "config.json", "model.safetensors",
        "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "value_head.safetensors",
        "adapter_config.json", "adapter_model.safetensors",
    }  # fmt: skip
    left_out = {note for note in notes if note.startswith("left out: ")}
    assert left_out == {f"left out: final/{name}" for name in (
        ".env", "zoe", "bob/.env", "bob/notes.txt", "bob/optimizer.safetensors", "bob/pytorch_model.bin", "bob/own.py", "bob/.git/config",
        "bob/model.safetensors.bak", "bob/deep/model.safetensors", "bob/dangling.txt", "bob/passwd", "bob/home",
    )}  # fmt: skip


@pytest.mark.parametrize("name", ["final", "final/bob", "final/bob/model.safetensors", "final/bob/tokenizer_config.json", "final/bob/README.md", "evaluation_after.json"])  # fmt: skip
def test_a_link_in_the_place_of_a_file_of_the_team_is_refused(copy, tmp_path, name):
    place = (copy / name).rename(tmp_path / "elsewhere")
    (copy / name).symlink_to(place)
    with pytest.raises(RunError, match=rf"{copy / name}: is a link, and what it leads to may not be the team's"):
        push(copy, "org/team", dry_run=True)


@pytest.mark.parametrize(
    "name, text", [("config.json", b"\xff{"), ("config.json", b"{"), ("README.md", b"---\nbase_model: &a [*a]\n---\n")]
)
def test_a_text_of_the_team_that_cannot_be_read_is_named(copy, name, text):
    (copy / "final/bob" / name).write_bytes(text)
    with pytest.raises(RunError, match=rf"final/bob/{name}: cannot be read"):
        push(copy, "org/team", dry_run=True)
