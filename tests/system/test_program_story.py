"""The story of the page of programs, as its own files and commands tell it: a program plays with models behind an API,
small ones learn what was said there, and PPO goes on with them.
"""

import json
import re
import shlex
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from folders import ROOT
from typer.testing import CliRunner

from maporl.cli.main import app

PAGE = (ROOT / "docs" / "howto" / "program.md").read_text(encoding="utf-8")
TINY = ("{best_of: {keep: 0.5}}", "{best_of: {keep: 0.5}}, epochs: 60, learning_rate: 0.003")
"""What tiny models need to learn from so few dialogues."""


@pytest.fixture
def large():
    """A server as OpenAI's, whose model adds rightly in three of four answers. Gives its address and what it was
    asked."""
    asked, lock = [], threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *told):
            pass

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            text = body["messages"][-1]["content"]
            with lock:
                asked.append(text)
                wrong = ";" in text and asked.count(text) % 4 == 0
            first, second = map(int, re.search(r"(\d+)\+(\d+)=", text).groups())
            message = {"role": "assistant", "content": str(first + second + wrong)}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            answer = json.dumps({"choices": [choice], "usage": {"prompt_tokens": 5, "completion_tokens": 1}}).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1", asked
    server.shutdown()
    server.server_close()


def command(name, *changes, **numbers):
    """The page's command ``name``, with other numbers and more words."""
    line = re.findall(rf"^maporl {name}.*$", PAGE, re.M)[-1]
    for option, number in numbers.items():
        line, found = re.subn(rf"--{option} \S+", f"--{option} {number}", line)
        assert found == 1, option
    return run(f"{line} {' '.join(changes)}")


def run(line):
    result = CliRunner().invoke(app, shlex.split(line)[1:])
    assert result.exit_code == 0, f"{line}\n{result.output}\n{result.exception!r}"
    return result.output


def score_of(output):
    return float(re.findall(r"mean score (\S+)", output)[-1].rstrip(","))


@pytest.mark.slow
def test_small_models_learn_what_large_ones_said_and_go_on_with_ppo(large, tmp_path, monkeypatch):
    url, asked = large
    monkeypatch.chdir(tmp_path)
    for title, text in re.findall(r'^```\w+ title="(\S+)"\n(.*?)^```', PAGE, re.M | re.S):
        (tmp_path / title).write_text(text.replace("https://api.example.com/v1", url).replace(*TINY), encoding="utf-8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["large.yaml", "loop.yaml", "mine.yaml", "my_app.py"]

    recorded = command("record", questions=20, samples=4)
    assert len(asked) == 2 * 80 and score_of(recorded) == pytest.approx(0.75)
    before = score_of(run("maporl record mine.yaml -o runs/before -n 20 --samples 2"))
    assert before < 0.2, "nobody has taught them anything"

    command("sft", "--epochs 60 --learning-rate 0.003 --quiet")
    taught = "agents.drafter.model=runs/taught/drafter agents.checker.model=runs/taught/checker"
    assert score_of(run(f"maporl record mine.yaml {taught} -o runs/after -n 20 --samples 2")) > before + 0.4

    command("train loop.yaml", "--quiet")
    [stages] = [figures["stages"] for figures in json.loads((tmp_path / "runs/loop/rounds.json").read_text())]
    assert [stage["checker"]["rows"] for stage in stages] == [10, 80] and stages[1]["checker"]["good"] == 60
    looped = "agents.drafter.model=runs/loop/final/drafter agents.checker.model=runs/loop/final/checker"
    assert score_of(run(f"maporl record mine.yaml {looped} -o runs/looped -n 20 --samples 2")) > before + 0.2

    command("train mine.yaml", "updates=2 evaluation.questions=0 --quiet")
    steps = [json.loads(line) for line in (tmp_path / "runs/program/metrics.jsonl").read_text().splitlines()]
    updates = [record for record in steps if "checker/val/first_ratio" in record]
    assert len(updates) == 2 and updates[0]["checker/val/first_ratio"] == pytest.approx(1.0, abs=1e-4)
    assert updates[0]["reward/score"] > before, "PPO begins with what was taught"
