"""No option of a configuration is without effect: a tiny run with another value measures, writes, computes or says
something else, or a test that is named shows it.

In CI, a few options are tried that change with the day. ``MAPORL_TEST_DAY=2026-11-28`` tries those of a day again.
"""

import atexit
import contextlib
import dataclasses
import datetime
import hashlib
import io
import json
import os
import random
import re
import shutil
import tempfile
import typing
from collections import Counter
from collections.abc import Callable
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from folders import ROOT
from option_cases import CASES, ELSEWHERE, UNREAD
from peft import LoraConfig, get_peft_model
from perturbed_training import longest_answer
from scripted_training import TokenScript
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import LlamaConfig, LlamaForSequenceClassification

from maporl.config.schema import Config, TinySection
from maporl.engines.base import Request
from maporl.errors import ConfigError
from maporl.loops.run import run_loop
from maporl.runs.build import build_trainer
from maporl.tiny import build_tiny_model, build_tiny_tokenizer
from maporl.validation.load import from_dict
from maporl.validation.preflight import check_run

NO_TIMES = ("time/", "memory/", "tokens_per_second", "tools/seconds")
CLOCK = re.compile(r"\d+(\.\d+)? (s|seconds|minutes)\b")
TIMES = re.compile(r'"(seconds|time)": [0-9.e-]+')
KINDS = ("metrics", "dialogues", "files", "computed", "asked", "said")
"""What is compared, the most telling first. ``said`` is what ``check`` and the run print."""


def leaves(kind: type = Config, above: str = "") -> dict[str, Any]:
    """Return the field of every leaf option of a configuration by its path. A name of the user's own stands as ``*``."""
    found: dict[str, Any] = {}
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        sections, path = sections_in(hints[field.name]), f"{above}{field.name}"
        named = typing.get_origin(strip(hints[field.name])) is dict
        for section in sections:
            found = leaves(section, f"{path}{'.*' if named else ''}.") | found
        if not sections:
            found[path] = field
    return found


def strip(hint: Any) -> Any:
    return strip(typing.get_args(hint)[0]) if typing.get_origin(hint) is typing.Annotated else hint


def sections_in(hint: Any) -> list[type]:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return [hint]
    return [section for part in typing.get_args(hint) for section in sections_in(part)]


def leaf_of(path: str, known: set[str]) -> str:
    """Return the leaf option that a path into a configuration is, such as ``agents.*.role`` of ``agents.ann.role``.

    Raises:
        KeyError: it does not exist.
    """
    for leaf in known:
        parts, wanted = [p for p in path.split(".") if not p.isdigit()], leaf.split(".")
        if len(parts) == len(wanted) and all(w in ("*", p) for w, p in zip(wanted, parts, strict=True)):
            return leaf
    raise KeyError(path)


def put(values: Any, path: str, value: Any) -> Any:
    """Return a copy of ``values`` with another value at a dotted path, whose numbers are places in lists."""
    key, _, rest = path.partition(".")
    if isinstance(values, list):
        return [put(v, rest, value) if n == int(key) else v for n, v in enumerate(values)]
    values = values or {}
    return values | {key: put(values.get(key), rest, value) if rest else value}


def filled(values: Any) -> Any:
    """Return values in which ``{model}`` and the like stand for folders and the server of this process."""
    if isinstance(values, dict):
        return {key: filled(value) for key, value in values.items()}
    if isinstance(values, str) and values.startswith(
        ("{server}", "{model}", "{other}", "{tokenizer}", "{adapter}", "{verifier}", "{other verifier}")
    ):
        name, _, rest = values[1:].partition("}")
        return (chat_server().url if name == "server" else str(folders() / name)) + rest
    return values


@cache
def folders() -> Path:
    """Return a folder with two language models, a tokenizer, an adapter and two verifiers, all of them tiny."""
    top = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, top)
    section = TinySection(alphabet="0123456789+=;-?", hidden_size=8, layers=1, heads=2, context=256)
    tokenizer = build_tiny_tokenizer(section)
    for seed, name in enumerate(("model", "other")):
        torch.manual_seed(seed)
        model = build_tiny_model(section, tokenizer)
        model.save_pretrained(top / name)
        tokenizer.save_pretrained(top / name)
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(top / "adapter")
    build_tiny_tokenizer(dataclasses.replace(section, alphabet="=0123456789+;-?")).save_pretrained(top / "tokenizer")
    shape = {
        "vocab_size": len(tokenizer),
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    for name in ("verifier", "other verifier"):
        config = LlamaConfig(**shape, num_labels=1, pad_token_id=tokenizer.pad_token_id, initializer_range=0.5)
        LlamaForSequenceClassification(config).save_pretrained(top / name)
        tokenizer.save_pretrained(top / name)
    return top


@cache
def chat_server() -> Any:
    """Return a server of chats, which answers by what it is asked and keeps it in ``asked``. It runs until the end."""

    class Endpoint(BaseHTTPRequestHandler):
        def do_POST(self):
            text = self.rfile.read(int(self.headers["Content-Length"])).decode()
            server.asked.append((self.path, self.headers["Authorization"], text))
            message = {"role": "assistant", "content": str(sum(map(ord, text)) % 10)}
            body = json.dumps({"choices": [{"finish_reason": "stop", "message": message}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    server.asked, server.url = [], f"http://127.0.0.1:{server.server_port}"
    Thread(target=server.serve_forever, daemon=True).start()
    os.environ |= {"MAPORL_TEST_KEY": "one", "OPENAI_API_KEY": "two"}
    return server


def evidence(values: dict[str, Any], script: Callable[[Request], str] | None = None) -> dict[str, Any]:
    """Return what a run of ``values`` leaves and does, without times and without its configuration.

    Raises:
        ConfigError: it is refused.
    """
    folder = Path(values["output_dir"])
    shutil.rmtree(folder, ignore_errors=True)
    chat_server().asked.clear()
    config = from_dict(values, "c.yaml")
    said, calls = list(check_run(config)), Counter()

    def count(module, args):
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            calls[type(module).__name__, str(args[0].dtype), tuple(args[0].shape)] += 1

    hook, printed = register_module_forward_pre_hook(count), io.StringIO()
    try:
        with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
            if config.loop.stages:
                run_loop(config, resume=False, quiet=True, tell=said.append)
            else:
                trainer = build_trainer(config, quiet=True)
                if script is not None:
                    engine = TokenScript(
                        trainer.team.policies, script, max(longest_answer(values), values["ppo"]["response_length"])
                    )
                    trainer.engines.update(dict.fromkeys(trainer.engines, engine))
                trainer.train()
    finally:
        hook.remove()
    said = [CLOCK.sub("", line) for line in said]
    said += [line for line in printed.getvalue().splitlines() if "%|" not in line]
    return {
        "metrics": metrics(folder),
        "dialogues": {
            str(p.relative_to(folder)): TIMES.sub("", p.read_text()) for p in sorted(folder.rglob("dialogues*.jsonl"))
        },
        "files": {
            str(p.relative_to(folder)): hashlib.sha1(p.read_bytes()).hexdigest() if p.suffix == ".safetensors" else ""
            for p in sorted(folder.rglob("*"))
            if p.name != "config.yaml"
        },
        "computed": calls,
        "asked": sorted(chat_server().asked),
        "said": said,
    }


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Return all that a run measured, without times: its updates, and its evaluations."""
    rows = []
    for path in sorted([*folder.rglob("metrics.jsonl"), *folder.rglob("*evaluation*.json")]):
        for line in path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]:
            row = json.loads(line)
            rows.append({k: v for k, v in row.items() if not k.startswith(NO_TIMES)} if isinstance(row, dict) else row)
    return rows


def difference(one: dict[str, Any], other: dict[str, Any]) -> str | None:
    return next((kind for kind in KINDS if one[kind] != other[kind]), None)


UNREAD_WORDS = "it is set, and nothing reads it"
DAY = os.environ.get("MAPORL_TEST_DAY") or datetime.date.today().isoformat()
SAMPLED = {name: random.Random(f"{DAY}{name}") for name in random.Random(DAY).sample(sorted(CASES), 2)}
"""The runs of the day."""
LEAVES = set(leaves())


def tried() -> set[str]:
    return {leaf_of(path, LEAVES) for case in CASES.values() for path in (*case.changes, *case.refused)}


def test_each_option_is_tried_or_a_test_shows_it():
    assert len(LEAVES) > 350
    elsewhere = {option for options in ELSEWHERE.values() for option in options}
    missing = sorted(LEAVES - tried() - elsewhere)
    assert not missing, (
        f"give {', '.join(missing)} another value in a case of tests/support/option_cases.py, where a tiny run shows the "
        "effect, or name it in ELSEWHERE below the file of the test that shows it"
    )
    assert tried() | elsewhere <= LEAVES
    assert not tried() & elsewhere


@pytest.mark.parametrize("file", ELSEWHERE)
def test_a_file_that_shows_other_options_sets_them(file):
    text = (ROOT / "tests" / file).read_text()
    assert [name for name in ELSEWHERE[file] if not re.search(rf"\b{name.rpartition('.')[2]}\b", text)] == []


def said_unread(path: str, lines: list[str]) -> bool:
    """Return whether one of the lines of ``check`` says that nothing reads an option, or its section."""
    return any(
        line.startswith("warning: ") and f"{path}.".startswith(f"{line.split(': ')[1]}.") and UNREAD_WORDS in line
        for line in lines
    )


def without_effect(name: str, folder: Path, most: int | None = None) -> list[str]:
    """Return the options of a case, at most so many of them, of which another value changes nothing."""
    case, found = CASES[name], []
    changes = list(case.changes.items())
    values = filled(case.values | {"output_dir": str(folder / "run")})
    plain = evidence(values, case.script)
    for path, value in changes if most is None else SAMPLED[name].sample(changes, min(most, len(changes))):
        other = evidence(put(values, path, filled(value)), case.script)
        if difference(plain, other) is None or said_unread(path, other["said"]):
            found.append(path)
    for path, value in case.refused.items() if most is None else ():
        with pytest.raises(ConfigError, match=path.rpartition(".")[2]):
            evidence(put(values, path, value), case.script)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_option_has_an_effect(name, tmp_path):
    assert without_effect(name, tmp_path) == []


@pytest.mark.parametrize("name", SAMPLED)
def test_options_of_the_day_have_an_effect(name, tmp_path):
    assert without_effect(name, tmp_path, 2) == [], f"MAPORL_TEST_DAY={DAY}"


@pytest.mark.parametrize("name", UNREAD)
def test_an_option_that_nothing_reads_is_named(name, tmp_path):
    case = UNREAD[name]
    values = case.values | {"output_dir": str(tmp_path / "run")}
    before = check_run(from_dict(values, "c.yaml"))
    for path, value in case.changes.items():
        after = check_run(from_dict(put(values, path, value), "c.yaml"))
        assert not said_unread(path, before) or name == "no KL", path
        assert said_unread(path, after), (path, after)
    for path, value in case.refused.items():
        with pytest.raises(ConfigError, match=path):
            check_run(from_dict(put(values, path, value), "c.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize("name", UNREAD)
def test_what_is_said_to_be_read_by_nothing_changes_nothing(name, tmp_path):
    case = UNREAD[name]
    values = case.values | {"output_dir": str(tmp_path / "run")}
    plain = evidence(values)
    for path, value in case.changes.items():
        assert difference(plain, evidence(put(values, path, value))) == "said", path
