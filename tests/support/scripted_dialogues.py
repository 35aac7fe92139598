"""Dialogues that are played by a script, also in branches, or written down; and what they earn."""

import itertools
import json
import string
from collections import defaultdict
from itertools import count

import torch
import yaml

from maporl import Arithmetic
from maporl.advantages import AdvantageConfig
from maporl.advantages.batch import COLUMNS
from maporl.config.schema import RewardSection
from maporl.engines.scripted import ScriptedEngine
from maporl.rewards import assign_credit
from maporl.rewards.build import build_sources
from maporl.rewards.labels import label
from maporl.rewards.rules import build_rules
from maporl.rewards.scoring import fill_in, grade_answers, score_dialogues
from maporl.rollout.branching import play_branched
from maporl.rollout.driver import RolloutDriver
from maporl.rollout.episode import Referee, SpeakerSpec
from maporl.training.assign import Advantages
from maporl.training.samples import Columns
from maporl.types import Act, Dialogue, Example, Utterance
from trl_ext.ppo.batch import Completion, build_token_batch
from trl_ext.ppo.options import GREEDY, Decoding, PPOOptions

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
    (dialogue,), prompts = _play(protocol, script, agents, None, [example], task)
    return dialogue, prompts


def _play(protocol, script, agents, referee, examples, task):
    prompts = []

    def say(request):
        prompts.append((request.ask.agent, request.ask.messages[-1]["content"]))
        return script(request) if callable(script) else script[request.ask.agent][request.turn]

    specs = {name: SpeakerSpec("scripted", (name,)) for name in agents}
    driver = RolloutDriver(task, protocol, specs, {"scripted": ScriptedEngine(say)}, GREEDY, referee)
    return driver.play(examples), prompts


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


def play_debates(protocol, script, agents=("ann", "bob"), referee=None, examples=(EXAMPLE,)):
    """Play a script {agent: [text by turn]}. Return the dialogues, and each prompt's last message by agent."""
    seeing = CallsFunction(referee) if referee else None
    dialogues, prompts = _play(protocol, script, agents, seeing, list(examples), TASK)
    return dialogues, {name: [text for agent, text in prompts if agent == name] for name in agents}


class CallsFunction(Referee):
    def __init__(self, function):
        self.function, self.seen = function, []

    def see(self, dialogue):
        self.seen.append(dialogue)

    def settle(self):
        seen, self.seen = self.seen, []
        self.function(seen)


def graded(dialogues):
    grade_answers(dialogues, TASK)
    fill_in(dialogues, TASK, {"label": label})


def scored(dialogues):
    graded(dialogues)
    score_dialogues(dialogues, TASK, {"label": label}, {"label": 1.0})


EXAMPLES = [Example("e", "2+2=", "4"), Example("f", "3+3=", "6")]


def play_branches(protocol, section, examples=EXAMPLES, task=TASK, judge=None, agents=("ann", "bob")):
    counter = itertools.count()
    engine = ScriptedEngine(lambda request: f"{request.ask.agent}{request.turn}.{next(counter)}")
    specs = {name: SpeakerSpec("scripted", (name,)) for name in agents}
    driver = RolloutDriver(task, protocol, specs, {"scripted": engine}, Decoding(1.0), common_seed=section.common_seed)
    return play_branched(driver, examples, section, judge or (lambda dialogues: [0.0] * len(dialogues)))


def dialogue(*entries, prompt=0, rollout=0):
    """A dialogue with one utterance for each entry (agent, turn, parents, options)."""
    utterances = []
    for number, (agent, turn, parents, options) in enumerate(entries):
        utterances.append(Utterance(number, agent, agent, turn, number, [], "", parents=tuple(parents), **options))
    return Dialogue(Example("e", "q", "a"), utterances, prompt=prompt, rollout=rollout)


def apply(entry, dialogues, credits):
    """What one rule of a configuration makes of the credits."""
    (rule,) = build_rules([entry])
    return rule(dialogues, credits)


def assigned(dialogues, gamma, lam, token_gamma, token_lam, returns="bi_level_gae"):
    """Return the advantages and returns of dialogues, each a list of (agent, values, score) in speaking order."""
    said = [(r, n, *turn) for r, dialogue in enumerate(dialogues) for n, turn in enumerate(dialogue)]
    rows = build_token_batch(
        [Completion([1, 2], [3] * len(values), True, "row", score=s) for _, _, _, values, s in said], "cpu"
    )
    turns = defaultdict(count)
    columns = [
        Columns(
            (r, n), score,
            {
                **dict.fromkeys(COLUMNS), "policy": "p", "prompt": 0, "rollout": r, "agent": agent, "turn": next(turns[r, agent]), "order": n,
                "action": "", "tokens": len(values), "seconds": 0.0,
            },
        )
        for r, n, agent, values, score in said
    ]  # fmt: skip
    for i, (_, _, _, values, _) in enumerate(said):
        rows.values[i, rows.sampled_mask[i]] = torch.tensor(values)
    config = AdvantageConfig(returns=returns, baseline="critic", scale="none", key=(), gamma=gamma, lam=lam)
    Advantages(config, {"p": PPOOptions(gamma=token_gamma, lam=token_lam, kl_coef=0.0)}, {"p"}).assign(
        {"p": rows}, {"p": columns}
    )
    picked = [rows.sampled_mask[i] for i in range(len(said))]
    return [[column[i][mask].tolist() for i, mask in enumerate(picked)] for column in (rows.advantages, rows.returns)]
