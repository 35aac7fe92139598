"""What the driver of a group costs for each utterance, if sampling costs nothing.

    python benchmarks/utterances.py [--dialogues 256] [--turns 2]

Debates of two agents, so that each has ``2 * turns`` utterances. The pool of engines is that of ``cluster.backend:
ray``; its two processes are threads here, which answer at once. Counted are protocols, transcripts, tokenizers,
requests, the queue of the pool, and reading answers. Prints milliseconds an utterance, for ``batching`` in steps and in
flow.
"""

import argparse
import queue
import threading
import time
from concurrent.futures import Future
from pathlib import Path

from maporl.config.schema import TinySection
from maporl.engines.text import TextEngine
from maporl.integrations.ray.engine_pool import EnginePool
from maporl.integrations.ray.member import GroupSpec
from maporl.integrations.ray.remote import RemoteEngine
from maporl.integrations.ray.section import FailuresSection
from maporl.playground.arithmetic import Arithmetic
from maporl.protocols.debate import Debate
from maporl.rollout.driver import RolloutDriver
from maporl.rollout.episode import SpeakerSpec
from maporl.team.agents import Agent
from maporl.team.team import Team
from maporl.tiny import build_tiny_model, build_tiny_tokenizer
from trl_ext.ppo.options import Decoding
from trl_ext.sampling.options import Sampled


class Instant:
    """A process that answers every row with the same tokens."""

    def __init__(self, name: str):
        self.name, self.place, self.calls = name, name, queue.SimpleQueue()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            method, arguments, answer = self.calls.get()
            rows = arguments[0] if method == "sample" else {}
            answer.set_result({number: Sampled([5, 6, 1], [-1.0, -1.0, -1.0]) for number in rows})

    def call(self, method: str, *arguments, kept: bool = False) -> Future:
        """Begin a call."""
        answer: Future = Future()
        self.calls.put((method, arguments, answer))
        return answer


def main() -> None:
    """Play, and print what an utterance took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dialogues", type=int, default=256)
    parser.add_argument("--turns", type=int, default=2)
    options = parser.parse_args()
    tiny = TinySection(alphabet="0123456789+=;", hidden_size=32, layers=1)
    tokenizer = build_tiny_tokenizer(tiny)
    team = Team([Agent(name, build_tiny_model(tiny, tokenizer), tokenizer) for name in ("ann", "bob")])
    spec = GroupSpec("all", None, ("ann", "bob"), (), 1, False, 1, 1, "replicated", 2, 64, None, None, {}, 0)  # type: ignore[arg-type]
    pool = EnginePool(spec, lambda number, place: Instant(f"engine {number}"), FailuresSection(), Path("."))
    pool.build()
    task = Arithmetic(largest=99)
    protocol = Debate(turns=options.turns, later="{others};{question}", quote="{text}", separator=";")
    for flow in (False, True):
        engine = TextEngine(team.policies, RemoteEngine({"ann": pool, "bob": pool}, lambda *sent: None, flow, True), 8)
        specs = {name: SpeakerSpec("all", (name,)) for name in ("ann", "bob")}
        times = []
        for _ in range(3):
            driver = RolloutDriver(task, protocol, specs, {"all": engine}, Decoding(1.0), rng_key=(0,))
            start = time.process_time()
            dialogues = driver.play([task[number] for number in range(options.dialogues)])
            times.append(time.process_time() - start)
        said = sum(len(dialogue.utterances) for dialogue in dialogues)
        sizes = pool.take_counts()["rows_per_call"]
        print(
            f"{'flow' if flow else 'steps'}: {1000 * min(times) / said:.2f} ms an utterance ({said} utterances, "
            f"{sizes:.0f} a call)"
        )


if __name__ == "__main__":
    main()
