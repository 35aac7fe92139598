"""What it costs that a program cuts its memory: ``examples/programs/with_memory.py``, and the same where it keeps all.

    python benchmarks/program_memory.py [--tokens 32 128] [--dialogues 8] [--rounds 5]

Rounds of both programs alternate, with tiny models that were never trained. It prints a Markdown table with a row for
each program and each longest answer (``--tokens``). It has the share of the solver's requests that repeat a
conversation and go on with it (as ``AGENT/continued_share`` counts them), and of a dialogue: the solver's requests, the
tokens of its prompts, those of them that are new in their conversations, those of prompts with which a conversation
began again, the longest prompt, and the tokens that a step of learning reads, prompts and answers, each once. Seconds
are medians over the rounds: of the clock, which other work on the machine changes, and of the processor, for models,
server and clients together. It needs the package ``openai``.
"""

import argparse
import string
import sys
import time
from collections import defaultdict
from pathlib import Path
from statistics import fmean, median

from machine import machine

from maporl.config.schema import TinySection
from maporl.engines.text import TextEngine
from maporl.playground.arithmetic import Arithmetic
from maporl.rollout.driver import RolloutDriver
from maporl.rollout.episode import SpeakerSpec
from maporl.serving.program import Program
from maporl.team.agents import Agent
from maporl.team.team import Team
from maporl.tiny import build_tiny_model, build_tiny_tokenizer
from maporl.types import Dialogue
from trl_ext.ppo.options import Decoding, PPOOptions
from trl_ext.sampling.own_weights import OwnWeights

sys.path.append(str(Path(__file__).parents[1] / "examples/programs"))
AGENTS = ("solver", "checker")
LETTERS = string.ascii_letters + string.digits + "+=?.: "


def counted(dialogue: Dialogue) -> dict[str, float]:
    """Return what the solver's requests of a dialogue count."""
    said = {u.id: u for u in dialogue.utterances if u.agent == "solver"}
    whole = {number: len(u.prompt_ids) + len(u.response_ids) for number, u in said.items()}
    prompts = {number: len(u.prompt_ids) for number, u in said.items()}
    histories = [u.tags["history"] for u in said.values() if "history" in u.tags]
    new = sum(prompts.values()) - sum(whole[u.after] for u in said.values() if u.after is not None)
    return {
        "continued share": fmean(history == "continued" for history in histories),
        "requests": len(said),
        "tokens of prompts": sum(prompts.values()),
        "new": new,
        "begun again": sum(prompts[u.id] for u in said.values() if u.tags.get("history", "").startswith("changed")),
        "longest prompt": max(prompts.values()),
        "read in learning": new + sum(len(u.response_ids) for u in said.values()),
    }


def main() -> None:
    """Measure, and print the table."""
    import with_memory

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--dialogues", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    programs = {"cuts its memory": with_memory.solve, "keeps all": with_memory.keep_all}
    section = TinySection(alphabet=LETTERS, hidden_size=128, layers=4, heads=4, context=16384)
    tokenizer, task = build_tiny_tokenizer(section), Arithmetic(largest=9)
    specs = {name: SpeakerSpec("here", (name,)) for name in AGENTS}
    head: list[str] = []
    print(machine())
    for tokens in options.tokens:
        team = Team([Agent(name, build_tiny_model(section, tokenizer), tokenizer) for name in AGENTS])
        team.find_stop_ids(PPOOptions(response_length=tokens))
        engine = TextEngine(team.policies, OwnWeights(team.policies, 64), tokens)
        counts: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in programs}
        for key in range(1 + options.rounds):
            for name, program in list(programs.items())[:: 1 if key % 2 else -1]:
                driver = RolloutDriver(
                    task, Program(run=program), specs, {"here": engine}, Decoding(1.0), rng_key=(key,)
                )
                clock, processor = time.perf_counter(), time.process_time()
                dialogues = driver.play([task[number] for number in range(options.dialogues)])
                took = {"s": time.perf_counter() - clock, "s of processor": time.process_time() - processor}
                for what, value in took.items() if key else ():  # the first round makes threads and caches
                    counts[name][what].append(value)
                for dialogue in dialogues:
                    assert "failure" not in dialogue.outcome, dialogue.outcome["failure"]
                    for what, value in counted(dialogue).items():
                        counts[name][what].append(value)
        for name, told in counts.items():
            if not head:
                head = ["longest answer", "the program", *told]
                print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
            seconds = {what: f"{median(values):.2f}" for what, values in told.items() if what.startswith("s")}
            means = {
                what: f"{fmean(v):,.2f}" if what.endswith("share") else f"{fmean(v):,.0f}" for what, v in told.items()
            }
            cells = (means | seconds).values()
            print(f"| {tokens} | {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
