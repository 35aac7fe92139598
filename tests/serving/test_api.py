"""A trained team at an address: what it says there is what it says in an evaluation, and what it refuses."""

import importlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import httpx2
import pytest
from folders import ROOT
from tiny_runs import config_of

pytest.importorskip("fastapi")

from maporl.cli.common import load_team_config
from maporl.config.parse import to_yaml
from maporl.errors import ConfigError
from maporl.guard import connections
from maporl.run import ResolvedRun
from maporl.runs.build import loaded_player
from maporl.runs.train import train
from maporl.serving import api, server
from maporl.serving.routes import error_in
from maporl.serving.wire import Refused
from trl_ext.process.waits import pause

LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
THREE = {
    "agents": {"ann": {}, "bob": {"system": "3+3="}, "cy": {"sampling": {"max_tokens": [2, 1]}}},
    "evaluation": {"questions": 12, "temperature": 0.0},
    "ppo": {"response_length": 4, "num_ppo_epochs": 1, "temperature": 1.0},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run of three agents, and the dialogues of an evaluation of its team."""
    folder = tmp_path_factory.mktemp("api") / "run"
    train(config_of(folder, updates=1, sections=THREE), resume=False, quiet=True)
    config, weights = load_team_config([str(folder)], None, None, None)
    player = loaded_player(ResolvedRun(config), weights)
    task = ResolvedRun(config).held_out
    return folder, player.play_evaluation(task, 12, config.evaluation.decoding, config.seed)


@contextmanager
def listening(folder, token=None, most=8, queue=64, **more):
    """The address of a run's agents, which listens, and its owner."""
    config, weights = load_team_config([str(folder)], None, None, None)
    task, without = server.checked(config, weights, str(folder))
    config = server.serving_config(config, None, "cpu", ())
    address = server.address_of(config, task, weights, without, "cpu", most=most, queue=queue, **more)
    app = server.application(address, token)
    running = connections.guarded_server(app, server.LIMITS, error_in(Refused.body), port=0, lifespan="off",
                                         log_level="error")  # fmt: skip
    thread = threading.Thread(target=running.run)
    thread.start()
    while not running.started:
        pause(0.01)
    port = running.servers[0].sockets[0].getsockname()[1]
    try:
        yield SimpleNamespace(url=f"http://127.0.0.1:{port}", owner=address, without=without)
    finally:
        running.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def served(run):
    with listening(run[0], longest=12) as address:
        yield address


def ask(served, model, text, **more):
    body = {"model": model, "messages": [{"role": "user", "content": text}], **more}
    return httpx2.post(f"{served.url}/v1/chat/completions", json=body, timeout=60)


def test_agents_and_the_team_say_what_they_say_in_an_evaluation_token_for_token(run, served):
    _, dialogues = run
    spoken = {text for d in dialogues for text in (u.text for u in d.utterances)}
    assert len(spoken) > 3, "the answers differ"

    def of_agent(utterance):
        reply = ask(served, utterance.agent, utterance.messages[-1]["content"], logprobs=True).json()
        choice = reply["choices"][0]
        told = "".join(one["token"] for one in choice["logprobs"]["content"])
        return choice["message"]["content"], reply["usage"], told.strip()

    def of_team(dialogue):
        return ask(served, "team", dialogue.example.question).json()["maporl"]["dialogue"]

    first = [u for d in dialogues for u in d.at(0)]
    with ThreadPoolExecutor(8) as threads:  # agents and teams, all at once
        agents = [threads.submit(of_agent, u) for u in first]
        teams = [threads.submit(of_team, d) for d in dialogues]
    for u, future in zip(first, agents, strict=True):
        text, usage, tokens = future.result()
        assert (text, tokens) == (u.text, u.text)
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(u.prompt_ids), len(u.response_ids))
    for dialogue, future in zip(dialogues, teams, strict=True):
        assert [(one["agent"], one["turn"] - 1, one["text"]) for one in future.result()] == [
            (u.agent, u.turn, u.text) for u in dialogue.utterances
        ]


def test_the_team_answers_with_the_answer_of_most(served):
    task = served.owner.served.task
    for a in range(3, 8):
        reply = ask(served, "team", f"{a}+2=").json()
        last = [one for one in reply["maporl"]["dialogue"] if one["turn"] == 2]
        read = {one["agent"]: task.grade(task[0], one["text"]).answer for one in last}
        votes = {answer: list(read.values()).count(answer) for answer in read.values() if answer is not None}
        assert reply["maporl"]["votes"] == votes
        said = next(
            (one["text"] for one in last if votes and votes.get(read[one["agent"]]) == max(votes.values())), None
        )
        assert reply["choices"][0]["message"]["content"] == (said or last[-1]["text"])
        assert reply["usage"]["completion_tokens"] == reply["maporl"]["tokens"]["completion"] > 6
        assert reply["maporl"]["seconds"] > 0


def test_a_stream_of_the_team_shows_what_is_said_before_its_answer(served):
    body = {"model": "team", "stream": True, "messages": [{"role": "user", "content": "1+2="}]}
    with httpx2.stream("POST", f"{served.url}/v1/chat/completions", json=body, timeout=60) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    pieces = [json.loads(line) for line in lines]
    deltas = [piece["choices"][0]["delta"] for piece in pieces]
    whole = ask(served, "team", "1+2=").json()
    told = [f"{one['agent']}: {one['text']}\n\n" for one in whole["maporl"]["dialogue"]]
    assert [delta["reasoning_content"] for delta in deltas[:6]] == told
    assert "".join(delta.get("content") or "" for delta in deltas[6:]) == whole["choices"][0]["message"]["content"]
    assert pieces[-1]["maporl"]["votes"] == whole["maporl"]["votes"] and len({piece["id"] for piece in pieces}) == 1


def test_a_stream_of_an_agent_brings_its_text_while_it_is_said(served, monkeypatch):
    monkeypatch.setattr(api, "EVERY", 0.0)
    asked = [{"role": "user", "content": "5+4="}]
    for more in (
        {"temperature": 9, "seed": 4},
        {"temperature": 9, "seed": 5, "stop": ["77"]},
        {"n": 2},
        {"logprobs": True},
    ):
        body = {"model": "ann", "messages": asked, "max_tokens": 12, "stream": True, **more}
        with httpx2.stream("POST", f"{served.url}/v1/chat/completions", json=body, timeout=60) as reply:
            lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
        choices = [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]
        parts = [choice["delta"].get("content") or "" for choice in choices if choice["index"] == 0]
        whole = ask(served, "ann", "5+4=", max_tokens=12, **more).json()["choices"][0]
        if more.get("seed"):
            assert "".join(parts) == whole["message"]["content"] and len(list(filter(None, parts))) > 2
        assert choices[-1]["finish_reason"] == whole["finish_reason"] and lines[-1] == "[DONE]"


def test_a_request_decides_about_its_own_sampling(served):
    greedy = ask(served, "ann", "4+4=").json()["choices"][0]["message"]["content"]
    drawn = [ask(served, "ann", "4+4=", temperature=2.0, seed=n).json()["choices"][0]["message"]["content"]
             for n in (*range(8), *range(8))]  # fmt: skip
    assert drawn[:8] == drawn[8:] and len(set(drawn)) > 2, "a seed repeats, and other ones draw others"
    assert len({ask(served, "ann", "4+4=", temperature=2.0).text for _ in range(4)}) > 1
    lengths = {ask(served, "ann", "4+4=", temperature=9, seed=n, max_tokens=12).json()["usage"]["completion_tokens"]
               for n in range(12)}  # fmt: skip
    assert max(lengths) > 4, "it may be longer than an answer of the run"
    assert ask(served, "cy", "4+4=").json()["usage"]["completion_tokens"] <= 2, "as in the run"
    earlier = [{"role": role, "content": "4+4="} for role in ("user", "assistant", "user")]
    assert ask(served, "cy", "", messages=earlier).json()["usage"]["completion_tokens"] == 1, "its second turn"
    assert ask(served, "team", "4+4=", max_tokens=1).json()["maporl"]["tokens"]["completion"] == 6
    assert ask(served, "team", "4+4=", max_tokens=100).json()["maporl"]["tokens"]["completion"] <= 2 * 3 * 12
    first = greedy[:1]
    assert ask(served, "ann", "4+4=", stop=[first]).json()["choices"][0]["message"]["content"] == ""
    choices = ask(served, "ann", "4+4=", n=3, temperature=2.0, seed=1).json()["choices"]
    assert len({choice["message"]["content"] for choice in choices}) > 1
    held = ask(served, "ann", "4+4=", max_tokens=9, response_format={
        "type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}})  # fmt: skip
    assert int(held.json()["choices"][0]["message"]["content"]) is not None


@pytest.mark.parametrize(("model", "more", "status", "message"), [
    ("dan", {}, 404, "known: ann, bob, cy, team; the model of a request is"),
    ("team", {"n": 2}, 400, "n: a team plays its protocol"),
    ("team", {"logprobs": True}, 400, "logprobs: a team plays its protocol"),
    ("ann", {"logit_bias": {"5": 1}}, 400, "or add it to --ignore"),
    ("ann", {"messages": [{"role": "user", "content": "1" * 5000}]}, 400, "tokens"),
    ("team", {"messages": [{"role": "user", "content": "1" * 5000}]}, 400, "tokens"),
    ("team", {"messages": [{"role": "system", "content": "1+1="}]}, 400, "expected a message of a user"),
])  # fmt: skip
def test_what_cannot_be_had_is_refused(served, model, more, status, message):
    reply = ask(served, model, "1+1=", **more)
    assert reply.status_code == status and message in reply.json()["error"]["message"]


def test_two_families_of_clients_and_a_token(run):
    openai, anthropic = pytest.importorskip("openai"), pytest.importorskip("anthropic")
    token = "a" * 20
    with listening(run[0], token) as served:
        assert httpx2.get(f"{served.url}/health").json() == {"status": "ok"}
        for url in ("/v1/models", "/metrics"):
            assert httpx2.get(f"{served.url}{url}").status_code == 401
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key=token)
        assert [model.id for model in client.models.list()] == ["ann", "bob", "cy", "team"]
        asked = [{"role": "user", "content": "2+5="}]
        said = client.chat.completions.create(model="bob", messages=asked).choices[0].message.content
        assert client.responses.create(model="bob", input="2+5=").output_text == said
        streamed = client.chat.completions.create(model="bob", messages=asked, stream=True)
        assert "".join(piece.choices[0].delta.content or "" for piece in streamed) == said
        other = anthropic.Anthropic(base_url=served.url, api_key=token)
        assert other.messages.create(model="bob", messages=asked, max_tokens=4).content[0].text == said
        counted = other.messages.count_tokens(model="bob", messages=asked).input_tokens
        assert counted == client.chat.completions.create(model="bob", messages=asked).usage.prompt_tokens
        with pytest.raises(anthropic.BadRequestError, match="a team reads several prompts"):
            other.messages.count_tokens(model="team", messages=asked)
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{served.url}/v1", api_key="b" * 20).models.list()
        counted = httpx2.get(f"{served.url}/metrics", headers={"authorization": f"Bearer {token}"}).text
        assert 'maporl_api_requests_total{status="401"} 3.0' in counted and 'model="bob"' in counted


@pytest.mark.parametrize("package", ["openai", "anthropic"])
def test_a_program_that_was_trained_goes_on_with_the_trained_agents(tmp_path, monkeypatch, package):
    """A program calls the served agents as it has called them in training, and is the team of its run too."""
    pytest.importorskip(package)
    monkeypatch.syspath_prepend(ROOT / "examples/programs")
    program = importlib.import_module(f"with_{package}")
    sections = {
        "agents": {"solver": {}, "checker": {}},
        "protocol": {"name": "program", "run": f"with_{package}:solve"},
    }
    sections |= {"pythonpath": [str(ROOT / "examples/programs")]}
    sections |= {"evaluation": {"questions": 4, "temperature": 0.0}, "warm_start": {"steps": 0}}
    sections |= {
        "agent_defaults": {"tiny": {"alphabet": "0123456789+=?", "hidden_size": 32, "layers": 1, "context": 8192}}
    }
    folder = tmp_path / "run"
    train(config_of(folder, updates=1, sections=sections, per_device_train_batch_size=2), resume=False, quiet=True)
    config, weights = load_team_config([str(folder)], None, None, None)
    run = ResolvedRun(config)
    evaluated = loaded_player(run, weights).play_evaluation(run.held_out, 4, config.evaluation.decoding, config.seed)
    with listening(folder) as served:
        for dialogue in evaluated:
            question = run.held_out.question(dialogue.example)
            assert program.solve(question, f"{served.url}/v1", "any") == dialogue.outcome["answer"]
            reply = ask(served, "team", dialogue.example.question).json()
            assert reply["choices"][0]["message"]["content"] == dialogue.outcome["answer"]
            assert [one["agent"] for one in reply["maporl"]["dialogue"]] == ["solver", "checker", "solver"]


def test_the_page_asks_as_it_says(served, capsys):
    pytest.importorskip("openai")
    page = (ROOT / "docs/howto/api.md").read_text(encoding="utf-8")
    code = re.search(r"```py\n(.*?)```", page, re.DOTALL)[1]
    exec(code.replace("http://127.0.0.1:8700", served.url))
    assert (
        capsys.readouterr().out.strip() == ask(served, "ann", "What is 6*7?").json()["choices"][0]["message"]["content"]
    )
    body = json.loads(re.search(r"-d '(.*?)'", page)[1])
    reply = httpx2.post(f"{served.url}/v1/chat/completions", json=body, timeout=60).json()
    shown = json.loads(re.search(r"```json\n(.*?)```", page, re.DOTALL)[1])
    assert reply["maporl"].keys() == shown.keys()
    assert reply["maporl"]["dialogue"][0].keys() == shown["dialogue"][0].keys()


def test_more_than_can_wait_are_told_to_come_again_and_who_leaves_frees_a_place(run):
    with listening(run[0], most=1, queue=1, longest=100) as served:
        endless = {"model": "ann", "messages": [{"role": "user", "content": "1+1="}], "max_tokens": 100, "n": 40,
                   "temperature": 5.0}  # fmt: skip
        gone = [threading.Thread(target=_left, args=(served, endless)) for _ in range(2)]
        for thread in gone:
            thread.start()
        end = time.monotonic() + 20
        while served.owner.inside < 2 and time.monotonic() < end:
            pause(0.005)
        refused = ask(served, "ann", "1+1=")
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "too_busy"
        for thread in gone:
            thread.join()
        while served.owner.inside and time.monotonic() < end:
            pause(0.01)
        assert ask(served, "ann", "1+1=").status_code == 200


def _left(served, body):
    with httpx2.Client() as client:
        try:
            client.post(f"{served.url}/v1/chat/completions", json=body, timeout=0.3)
        except httpx2.TimeoutException:
            return


def test_adapters_of_one_base_are_served(tmp_path):
    folder = tmp_path / "run"
    sections = THREE | {"agent_defaults": {
        "tiny": {"alphabet": "0123456789+=;", "hidden_size": 32, "layers": 1}, "lora": LORA}}  # fmt: skip
    train(config_of(folder, updates=1, sections=sections), resume=False, quiet=True)
    with listening(folder) as served:
        assert {ask(served, name, "1+1=").status_code for name in ("ann", "bob", "cy", "team")} == {200}


GAME = {"task": {"name": "episodes"}, "protocol": {"name": "game", "game": "tictactoe"}, "warm_start": {"steps": 0}}


@pytest.mark.parametrize(("sections", "named", "why"), [
    ({"protocol": {"name": "debate", "turns": 2, "feedback": "label"}}, "team", "for which the right answer must be"),
    ({"restate": "base_model"}, "team", "restate: base_model asks the untrained weights"),
    ({"agents": {"ann": {}, "bob": {"engine": "openai", "api": {"model": "any"}}}}, "bob", "its engine is 'openai'"),
    ({"agents": {"ann": {}, "bob": {"engine": "openai", "api": {"model": "any"}}}}, "team", "pay, for strangers"),
    ({"agents": {"ann": {}, "team": {}}}, "team", "an agent has this name"),
    (GAME, "team", "brings what is asked itself, as a game does"),
])  # fmt: skip
def test_what_is_not_served_is_said_before_anything_is_loaded(tmp_path, sections, named, why):
    config = config_of(tmp_path / "run", sections={"evaluation": {"questions": 2}} | sections)
    run = ResolvedRun(config)
    assert why in dict(api.left_out(run, run.held_out or run.task))[named]


def command(*words, **more):
    environment = os.environ | {"MAPORL_API_TOKEN": ""} | more
    done = subprocess.run([sys.executable, "-m", "maporl", "api", *map(str, words)], capture_output=True, text=True,
                          env=environment, timeout=120)  # fmt: skip
    return done.returncode, done.stderr


def test_what_cannot_be_served_is_one_sentence_before_anything_is_loaded(run, tmp_path, monkeypatch):
    folder, _ = run
    with connections.socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, told = command(folder, "--port", port)
        assert status == 2 and told == (
            f"error: --host 127.0.0.1 --port {port}: the port is taken, perhaps by another server; stop it, or choose "
            "another --port\n")  # fmt: skip
    status, told = command(folder, "--host", "0.0.0.0", "--port", 0)
    assert status == 2 and "so a token is needed; set MAPORL_API_TOKEN or --token-file" in told
    status, told = command(folder, "--host", "0.0.0.0", "--port", 0, MAPORL_API_TOKEN="short")
    assert status == 2 and "token: expected at least 16 ASCII characters, got 5" in told
    status, told = command("quickstart.yaml", "--port", 0)
    assert status == 2 and "expected one run's folder, or a team on the hub, got quickstart.yaml" in told
    empty = tmp_path / "run"
    empty.mkdir()
    (empty / "config.yaml").write_text(to_yaml(config_of(empty)))
    status, told = command(empty, "--port", 0)
    assert status == 1 and "has no folder for policy 'ann'; the run has not ended" in told


def test_weights_that_do_not_fit_are_not_loaded(run, monkeypatch):
    config = load_team_config([str(run[0])], None, None, None)[0]
    server.check_memory(config, "cpu")
    monkeypatch.setattr(server, "main_bytes", lambda: 10_000)
    with pytest.raises(ConfigError, match=r"0\.0 GiB, and main memory has 0\.0; give --dtype bfloat16"):
        server.check_memory(config, "cpu")
