"""Programs that ask their agents over real HTTP, with the standard library alone, and dialogues of them."""

import json
import urllib.error
import urllib.request

from maporl import Arithmetic, Program
from maporl.engines.scripted import ScriptedEngine
from maporl.rollout.driver import RolloutDriver
from maporl.rollout.episode import SpeakerSpec
from maporl.types import Example
from trl_ext.ppo.options import Decoding

TASK = Arithmetic(largest=9)
EXAMPLE = Example("e", "2+2=", "4", {"hint": "add"})


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def post(base_url, path, body, headers=()):
    """Post JSON, or bytes as they are. Return the status and what the server answers."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"{base_url}/{path}", data, {"content-type": "application/json", **dict(headers)})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def ask(base_url, model, messages, headers=(), **fields):
    status, answer = post(base_url, "chat/completions", {"model": model, "messages": messages, **fields}, headers)
    assert status == 200, answer
    return answer["choices"][0]["message"]["content"]


class Script(ScriptedEngine):
    """An engine that says ``AGENT N``, or what ``script`` gives for an agent's turns. It counts what it answers at once."""

    def __init__(self, **script):
        super().__init__(lambda r: script[r.ask.agent][r.turn] if r.ask.agent in script else f"{r.ask.agent} {r.turn}")
        self.batches = []

    def generate(self, requests, decoding):
        self.batches.append(len(requests))
        return super().generate(requests, decoding)


def driver_of(program, engine=None, agents=("ann", "bob"), learning=(), **options):
    """A driver of a function as a program, or of ``Program`` options."""
    protocol = Program(run=program, **options) if program is not None else Program(**options)
    specs = {name: SpeakerSpec("scripted", (name,), frozenset(learning)) for name in agents}
    return RolloutDriver(TASK, protocol, specs, {"scripted": engine or Script()}, Decoding(1.0))


def play(program, engine=None, examples=(EXAMPLE,), **options):
    return driver_of(program, engine, **options).play(list(examples))
