"""What a program costs that reaches its agents over HTTP, against the same dialogues as a protocol inside.

    python benchmarks/program_protocol.py [--dialogues 64] [--turns 2] [--rounds 5] [--tokens 64] [--hidden 384]

Two tiny agents talk, and each speaks ``--turns`` times. The program is a function with the standard library's HTTP
client, with one connection for each dialogue. Rounds alternate. It prints one JSON line: the seconds of a rollout
(medians), the median of the ratios of neighbouring rounds, the milliseconds by which a round takes longer for each
request (with ``--dialogues 1`` this is how long a request waits), the processor's milliseconds for a request beyond
those of the protocol inside (server, client and threads together), the mean number of requests in a batch, and whether
the two said the same to the last token.
"""

import argparse
import http.client
import json
import statistics
import time
import urllib.parse
from collections.abc import Callable

from maporl.config.schema import TinySection
from maporl.engines.text import TextEngine
from maporl.playground.arithmetic import Arithmetic
from maporl.protocols.base import Play, Protocol
from maporl.rollout.driver import RolloutDriver
from maporl.rollout.episode import SpeakerSpec
from maporl.serving.program import Program
from maporl.team.agents import Agent
from maporl.team.team import Team
from maporl.tiny import build_tiny_model, build_tiny_tokenizer
from maporl.types import Ask, Dialogue, Example, user_says
from trl_ext.ppo.options import Decoding, PPOOptions
from trl_ext.sampling.own_weights import OwnWeights

AGENTS = ("ann", "bob")


class Talk(Protocol):
    """Both speak in turn, and each is told what the other one said."""

    def __init__(self, rounds: int):
        self.rounds = rounds

    def play(self, example: Example, agents: tuple[str, ...]) -> Play:
        """Play so many rounds."""
        told, parents, last = example.question, (), None
        for number in range(2 * self.rounds):
            agent = agents[number % 2]
            (last,) = yield [Ask(agent, user_says(told), parents=parents, answers=number == 2 * self.rounds - 1)]
            told, parents = last.text, (last.id,)


def program_of(rounds: int) -> Callable[[str, str], str]:
    """Return the same as a program."""

    def program(question: str, base_url: str) -> str:
        address = urllib.parse.urlsplit(base_url)
        connection = http.client.HTTPConnection(address.hostname or "", address.port)
        conversations: dict[str, list[dict]] = {agent: [] for agent in AGENTS}
        told = question
        for number in range(2 * rounds):
            agent = AGENTS[number % 2]
            conversations[agent].append({"role": "user", "content": told})
            body = json.dumps({"model": agent, "messages": conversations[agent]})
            connection.request("POST", f"{address.path}/chat/completions", body, {"content-type": "application/json"})
            told = json.loads(connection.getresponse().read())["choices"][0]["message"]["content"]
            conversations[agent].append({"role": "assistant", "content": told})
        connection.close()
        return told

    return program


class Counted(TextEngine):
    """Counts the requests of its batches."""

    batches: list[int]

    def submit(self, requests, decoding):
        """Count, and submit."""
        self.batches.append(len(requests))
        return super().submit(requests, decoding)


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("--dialogues", 64), ("--turns", 2), ("--rounds", 5), ("--tokens", 64), ("--hidden", 384)):
        parser.add_argument(name, type=int, default=default)
    options = parser.parse_args()
    section = TinySection(hidden_size=options.hidden, layers=6, heads=6, context=4096)
    tokenizer = build_tiny_tokenizer(section)
    team = Team([Agent(name, build_tiny_model(section, tokenizer), tokenizer) for name in AGENTS])
    team.find_stop_ids(PPOOptions(response_length=options.tokens))
    task, specs = Arithmetic(largest=9), {name: SpeakerSpec("here", (name,)) for name in AGENTS}
    engine = Counted(team.policies, OwnWeights(team.policies, 64), options.tokens)

    def played(protocol: Protocol, key: int) -> tuple[float, float, float, list[Dialogue]]:
        engine.batches = []
        driver = RolloutDriver(task, protocol, specs, {"here": engine}, Decoding(1.0), rng_key=(key,))
        wall, processor = time.perf_counter(), time.process_time()
        dialogues = driver.play([task[number] for number in range(options.dialogues)])
        took = time.perf_counter() - wall, time.process_time() - processor
        return *took, statistics.mean(engine.batches), dialogues

    inside, program = Talk(options.turns), Program(run=program_of(options.turns))
    played(inside, 0), played(program, 0)
    rounds = [(played(inside, key), played(program, key)) for key in range(options.rounds)]
    requests = 2 * options.turns * options.dialogues
    same = all(
        [[u.response_ids for u in d.utterances] for d in one[3]]
        == [[u.response_ids for u in d.utterances] for d in two[3]]
        for one, two in rounds
    )
    print(
        json.dumps(
            {
                "dialogues": options.dialogues,
                "requests": requests,
                "inside_seconds": round(statistics.median(one[0] for one, _ in rounds), 3),
                "program_seconds": round(statistics.median(two[0] for _, two in rounds), 3),
                "ratio": round(statistics.median(two[0] / one[0] for one, two in rounds), 3),
                "ms_longer": round(statistics.median(1000 * (two[0] - one[0]) / requests for one, two in rounds), 2),
                "ms_a_request": round(statistics.median(1000 * (two[1] - one[1]) / requests for one, two in rounds), 2),
                "batch_inside": round(statistics.mean(one[2] for one, _ in rounds), 1),
                "batch_program": round(statistics.mean(two[2] for _, two in rounds), 1),
                "same_tokens": same,
            }
        )
    )


if __name__ == "__main__":
    main()
