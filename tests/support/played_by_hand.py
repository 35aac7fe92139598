"""Protocols that are played by hand: what each agent says, and what each act returns, is a list."""

import json
import string

import yaml

from maporl import Arithmetic
from maporl.config.schema import RewardSection
from maporl.engines.scripted import ScriptedEngine
from maporl.rewards import assign_credit
from maporl.rewards.build import build_sources
from maporl.rewards.scoring import score_dialogues
from maporl.rollout.driver import RolloutDriver
from maporl.rollout.episode import SpeakerSpec
from maporl.types import Act, Example, Utterance
from trl_ext.ppo.options import GREEDY

TASK = Arithmetic(largest=9)
EXAMPLE = Example("e", "2+2=", "4")
QUESTION = Example("1", "Who wrote Emma?", "Jane Austen")
TEAM = ("ann", "bob", "cy")


class Game:
    """Plays a protocol: what each agent says and what each act returns is a list."""

    def __init__(self, protocol, agents, said, results=(), example=QUESTION):
        self.said, self.results = iter(said), iter(results)
        self.asks, self.acts, self.utterances, self.outcome = [], [], [], None
        play, sent = protocol.play(example, agents), None
        while True:
            try:
                moves = play.send(sent)
            except StopIteration as end:
                self.outcome = end.value
                return
            if isinstance(moves[0], Act):
                self.acts += moves
                sent = [next(self.results) for _ in moves]
                continue
            (ask,) = moves
            self.asks.append(ask)
            number = len(self.utterances)
            said = Utterance(number, ask.agent, ask.agent, 0, number, ask.messages, next(self.said))
            self.utterances.append(said)
            sent = [said]

    def texts(self):
        return [ask.messages[0]["content"] for ask in self.asks]


def play(protocol, script, agents=("ann", "bob"), task=TASK, example=EXAMPLE):
    """Play a script {agent: [text by turn]}, or a function. Return the dialogue and [(agent, its last message)]."""
    prompts = []

    def say(request):
        prompts.append((request.ask.agent, request.ask.messages[-1]["content"]))
        return script(request) if callable(script) else script[request.ask.agent][request.turn]

    specs = {name: SpeakerSpec("scripted", (name,), frozenset()) for name in agents}
    (dialogue,) = RolloutDriver(task, protocol, specs, {"scripted": ScriptedEngine(say)}, GREEDY).play([example])
    return dialogue, prompts


def credited(dialogue, rules, sources=None, task=TASK):
    section = RewardSection(sources=sources or {"label": 1.0}, rules=rules)
    score_dialogues([dialogue], task, build_sources(section, {"label"} & set(section.sources)), section.sources)
    assign_credit([dialogue], tuple(dict.fromkeys(u.agent for u in dialogue.utterances)), section)
    return [u.rewards.get("credit") for u in dialogue.utterances]


def trained(tmp_path, monkeypatch, agents, **sections):
    """The first dialogue of a run of one update."""
    from maporl.runs.train import train
    from maporl.validation.load import load

    tiny = {"context": 2000, "alphabet": string.printable[:95] + "\n"}
    values = {
        "output_dir": str(tmp_path / "run"), "agents": {name: {"tiny": tiny} for name in agents}, "updates": 1,
        "ppo": {"response_length": 4}, "evaluation": {"questions": 2}, "dialogues_logged": 99,
        "training": {"gradient_accumulation_steps": 1, "use_cpu": True, "per_device_train_batch_size": 2}, **sections,
    }  # fmt: skip
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(values))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MAPORL_CACHE", str(tmp_path / "cache"))
    train(load("mine.yaml"), resume=False, quiet=True)
    (line, *_) = (tmp_path / "run/dialogues.jsonl").read_text().splitlines()
    record = json.loads(line)
    return record.get("dialogue", record)["utterances"]
