"""Measure what configurations learn over several seeds. The README's learning figures come from here.

    python benchmarks/learning.py run configs/ppo/quickstart.yaml --seeds 0 1 2 python benchmarks/learning.py run
    configs/ppo/smollm2_times.yaml --seeds 0 --set agents.ann.model=DIR --set agents.bob.model=DIR python
    benchmarks/learning.py compare at_grpo | dr_mas | agentpo | spiral | maporl | search | orchestrator | coder_tester |
    call_cost [--seeds 0 1 2]

Each run is a separate process, one after the other. ``run`` prints the held-out accuracy of all agents together in the
first and the final turn, before and after training, and the run's seconds. ``compare`` runs two methods on one
configuration, seed by seed in turn. It prints each measure as the mean over the seeds with a 95% t interval. Both print
Markdown tables. With ``--output`` the values of all seeds are written as JSON too.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from maporl.studies.comparing.study import T_975 as T95


@dataclass
class Run:
    """A finished run: its folder, seconds, evaluations and metrics."""

    folder: Path
    seconds: float

    def evaluation(self, when: str) -> dict:
        """Return the evaluation ``before`` or ``after`` training."""
        return json.loads((self.folder / f"evaluation_{when}.json").read_text())

    def dialogues(self, when: str) -> list[dict]:
        """Return the dialogues of the evaluation ``before`` or ``after`` training."""
        return [json.loads(line) for line in (self.folder / f"evaluation_{when}.jsonl").read_text().splitlines()]

    def updates(self, name: str) -> list[float]:
        """Return a metric at every update that has it."""
        records = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        return [r[name] for r in records if name in r]


def train(config: str, seed: int, sets: list[str], folder: Path, variables: dict[str, str] | None = None) -> Run:
    """Run a configuration to its end in another process, with more environment ``variables`` if any are given.

    A run that is finished in its ``folder`` (``--keep``) is read and not made again.
    """
    finished = folder / "seconds.json"
    if finished.is_file():
        return Run(folder, json.loads(finished.read_text()))
    command = [sys.executable, "-m", "maporl", "train", config, "-q"]
    values = [f"seed={seed}", f"output_dir={folder}", *sets]
    started = time.perf_counter()
    command += [x for s in values for x in ("--set", s)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | (variables or {}))
    seconds = time.perf_counter() - started
    finished.write_text(json.dumps(seconds))
    return Run(folder, seconds)


def run(options: argparse.Namespace, root: Path) -> None:
    """Train a configuration with each seed, and print a table of accuracies."""
    print(
        "| seed | first turn before | final turn before | first turn after | final turn after | gain | final - first "
        "| s |"
    )
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for seed in options.seeds:
        done = train(options.what, seed, options.set, root / f"{Path(options.what).stem}-seed{seed}")
        (a, b), (c, d) = (
            [done.evaluation(when)["turns"][i]["team"]["value"] for i in (0, -1)] for when in ("before", "after")
        )
        print(
            f"| {seed} | {a:.1%} | {b:.1%} | {c:.1%} | {d:.1%} | {100 * (d - b):+.1f} | {100 * (d - c):+.1f} | "
            f"{done.seconds:.0f} |",
            flush=True,
        )


def team(turn: int, when: str = "after") -> Callable[[Run], float]:
    """The team's held-out accuracy in a turn, in percent, by default after training."""
    return lambda done: 100 * done.evaluation(when)["turns"][turn]["team"]["value"]


def of_agent(agent: str, when: str = "after", turn: int = -1) -> Callable[[Run], float]:
    """One agent's held-out accuracy in a turn, in percent."""
    return lambda done: 100 * done.evaluation(when)["turns"][turn]["agents"][agent]["value"]


def right(when: str) -> Callable[[Run], float]:
    """The share of held-out questions that are answered rightly, in percent."""
    return lambda done: 100 * done.evaluation(when)["turns"][-1]["team"]["value"]


def calls(when: str, agent: str) -> Callable[[Run], float]:
    """The mean number of calls of an agent on a held-out question."""
    return lambda done: statistics.fmean(
        sum(len(u["calls"]) for u in d["utterances"] if u["agent"] == agent) for d in done.dialogues(when)
    )


def on_sums(easy: bool, when: str, what: str) -> Callable[[Run], float]:
    """The percentage of ``easy`` or of all other sums that are answered after a call ("calls"), or rightly
    ("right")."""

    def share(done: Run) -> float:
        asked = [d for d in done.dialogues(when) if d["example"]["question"].endswith("0=") == easy]
        if what == "calls":
            return 100 * statistics.fmean(any(u["calls"] for u in d["utterances"]) for d in asked)
        return 100 * statistics.fmean(d["utterances"][-1]["grade"]["correct"] for d in asked)

    return share


def steps(when: str) -> Callable[[Run], float]:
    """The mean number of steps of the dialogues on held-out questions in which an agent was called."""

    def mean(done: Run) -> float:
        counts = [1 + max(u["order"] for u in d["utterances"]) for d in done.dialogues(when)]
        return statistics.fmean([n for n in counts if n > 1] or [1])

    return mean


def without_search(done: Run) -> float:
    """The share of held-out questions that the trained team answers rightly if its search is taken away, in percent."""
    from maporl.config.parse import read_yaml
    from maporl.runs.evaluate import evaluate
    from maporl.validation.load import from_dict

    values = read_yaml(done.folder / "config.yaml") | {"output_dir": tempfile.mkdtemp()}
    values["environments"]["library"]["agents"] = []
    return 100 * evaluate(from_dict(values), done.folder / "final").final().value


def late(name: str, last: int = 10) -> Callable[[Run], float]:
    """The mean of a metric over the ``last`` updates."""
    return lambda done: statistics.fmean(done.updates(name)[-last:])


def peak(name: str) -> Callable[[Run], float]:
    """The largest value of a metric, divided by its median."""
    return lambda done: max(done.updates(name)) / statistics.median(done.updates(name))


def exploitability(done: Run) -> float:
    """How much a best response wins from the policy in Kuhn poker, in antes, summed over both positions.

    It is 0 at the equilibrium.
    """
    from maporl.config.parse import read_yaml
    from maporl.runs.build import build_player
    from maporl.types import Message
    from maporl.validation.load import from_dict

    config = from_dict(read_yaml(done.folder / "config.yaml") | {"output_dir": tempfile.mkdtemp()})
    policy = build_player(config, done.folder / "final").team.policies_of["first"][0]
    states = [f"{card} {history}".strip() for card in "JQK" for history in ("", "p", "b", "pb")]
    bets = {}
    for state in states:
        messages: list[Message] = [{"role": "user", "content": state}]
        bets[state] = _bet_probability(policy, messages)
    return _best_response(bets, 0) + _best_response(bets, 1)


def _bet_probability(policy, messages) -> float:
    import torch

    from trl_ext.chat.encoding import encode_prompt

    with torch.no_grad(), policy.active() as model:
        ids = torch.tensor([encode_prompt(policy.tokenizer, messages)], device=model.device)
        logits = model(input_ids=ids).logits[0, -1].float()
    bet, passes = (policy.tokenizer.convert_tokens_to_ids(move) for move in "bp")
    return float(torch.softmax(logits[[bet, passes]], dim=0)[0])  # among the legal moves


def _best_response(bets: dict[str, float], position: int) -> float:
    """What the best response in ``position`` wins on average from a player who bets with these probabilities."""
    ends = {"pp", "bp", "bb", "pbp", "pbb"}

    def won(history: str, mine: str, theirs: str) -> float:
        higher = 1.0 if "JQK".index(mine) > "JQK".index(theirs) else -1.0
        first = {"pp": 1, "bb": 2, "pbb": 2}.get(history)
        if first is not None:
            return first * higher
        return (1.0 if history == "bp" else -1.0) * (1 if position == 0 else -1)

    def value(history: str, mine: str, weights: dict[str, float]) -> float:
        """The best value. ``weights`` has the probability of coming here with each card of the other player."""
        if history in ends:
            return sum(w * won(history, mine, card) for card, w in weights.items())
        if len(history) % 2 == position:
            return max(value(history + move, mine, weights) for move in "pb")
        total = 0.0
        for move in "pb":
            chance = {
                c: bets[f"{c} {history}".strip()] if move == "b" else 1 - bets[f"{c} {history}".strip()]
                for c in weights
            }
            total += value(history + move, mine, {c: w * chance[c] for c, w in weights.items()})
        return total

    return sum(value("", mine, {c: 0.5 for c in "JQK" if c != mine}) for mine in "JQK") / 3


GRPO_ON_GAMES = [
    "branching.how=independent", "reward.rules=[sum]", "advantage.key=[prompt]", "advantage.unit=rollout",
]  # fmt: skip
HALVES = ["updates=100"]
COMPARISONS: dict[str, tuple[str, dict[str, list[str]], dict[str, Callable[[Run], float]]]] = {
    "at_grpo": (
        "configs/ppo/learning/plan_path.yaml",
        {"GRPO": GRPO_ON_GAMES, "AT-GRPO": []},
        {"held-out games solved, %": team(0)},
    ),
    "dr_mas": (
        "configs/ppo/learning/uneven_pair.yaml",
        {"global statistics": ["advantage.key=[prompt]"], "Dr. MAS": []},
        {
            "strong, held out, %": of_agent("strong"),
            "weak, held out, %": of_agent("weak"),
            "strong, gradient peak / median": peak("strong/grad_norm"),
            "weak, gradient peak / median": peak("weak/grad_norm"),
            "strong, gradient, last 10": late("strong/grad_norm"),
            "weak, gradient, last 10": late("weak/grad_norm"),
        },
    ),
    "agentpo": (
        "configs/ppo/learning/helper.yaml",
        {"untrained collaborator": ["updates=1", "training.learning_rate=0"], "trained collaborator": []},
        {"frozen actor, held out, %": of_agent("actor")},
    ),
    "spiral": (
        "configs/ppo/learning/kuhn.yaml",
        {"no baseline": ["advantage.baseline=none"], "running mean per role": []},
        {"exploitability, antes (0 is best)": exploitability},
    ),
    "maporl": (
        "configs/ppo/toy_sum.yaml",
        {"one agent alone trained": [*HALVES, "schedule.freeze=[{agent: bob, first: 1, last: 1000}]"], "co-trained": HALVES},  # noqa: E501
        {"final turn, held out, %": team(-1), "ann, %": of_agent("ann"), "bob, %": of_agent("bob")},
    ),
    "coder_tester": (
        "configs/ppo/coder_tester.yaml",
        {"coder and tester": []},
        {
            f"{what}, {when}, %": partial(lambda name, last, done: 100 * statistics.fmean(done.updates(name)[last]), name, last)  # noqa: E501
            for what, name in (
                ("right tests", "reward/tests/tester/turn_1"),
                ("first program", "reward/solved/coder/turn_1"),
                ("second program", "reward/solved/coder/turn_2"),
            )
            for when, last in (("first update", slice(1)), ("last 10 updates", slice(-10, None)))
        },
    ),
    "search": (
        "configs/ppo/hops.yaml",
        {"planner and searcher": []},
        {
            "right before, held out, %": right("before"),
            "right after, held out, %": right("after"),
            "right after without the search, held out, %": without_search,
            "questions to the searcher before": calls("before", "planner"),
            "questions to the searcher after": calls("after", "planner"),
            "searches before": calls("before", "searcher"),
            "searches after": calls("after", "searcher"),
        },
    ),
    "orchestrator": (
        "configs/ppo/orchestrator.yaml",
        {"steps cost nothing": ["reward.sources={label: 1.0}"], "a step costs 0.05": []},
        {
            "right before, held out, %": right("before"),
            "right after, held out, %": right("after"),
            "calls before": calls("before", "boss"),
            "calls after": calls("after", "boss"),
            "steps before, with calls": steps("before"),
            "steps after, with calls": steps("after"),
        },
    ),
    "call_cost": (
        "configs/ppo/learning/call_cost.yaml",
        {"a call costs 0.4": [], "a call costs nothing": ["reward.penalties.call=0"]},
        {
            f"{kind} sums, {what} {when}, %": on_sums(kind == "easy", when, what)
            for what in ("calls", "right") for kind in ("easy", "hard") for when in ("before", "after")
        },
    ),
}  # fmt: skip


def compare(options: argparse.Namespace, root: Path) -> None:
    """Train the two methods of a comparison with each seed, and print a table of measures."""
    config, variants, measures = COMPARISONS[options.what]
    done: dict[str, list[Run]] = {name: [] for name in variants}
    for seed in options.seeds:
        for number, (name, sets) in enumerate(variants.items()):  # in turn, so that both meet the same load
            folder = root / f"{options.what}-{number}-seed{seed}"
            done[name].append(train(config, seed, [*sets, *options.set], folder))
            print(f"seed {seed}, {name}: {done[name][-1].seconds:.0f} s", file=sys.stderr, flush=True)
    print(f"| {options.what}, {len(options.seeds)} seeds | " + " | ".join(variants) + " |")
    print("|---|" + "---|" * len(variants))
    for measure, value in measures.items():
        cells = []
        for name in variants:
            values = [value(finished) for finished in done[name]]
            cells.append(f"{interval(values)} ({', '.join(f'{v:.3g}' for v in values)})")
        print(f"| {measure} | " + " | ".join(cells) + " |")
    if options.output is not None:
        record = {name: {m: [value(r) for r in runs] for m, value in measures.items()} for name, runs in done.items()}
        options.output.write_text(json.dumps({"seeds": options.seeds, "measures": record}, indent=1) + "\n")
    print(
        "| seconds | " + " | ".join(interval([finished.seconds for finished in done[name]]) for name in variants) + " |"
    )


def interval(values: list[float]) -> str:
    """Return the text ``mean ± half width`` of the 95% t interval."""
    if len(values) < 2:
        return f"{values[0]:.3g}"
    half = T95[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.fmean(values):.3g} ± {half:.2g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "compare"])
    parser.add_argument("what", help=f"run: a configuration; compare: {', '.join(COMPARISONS)}")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--output", type=Path, default=None, help="compare: write the values as JSON here")
    parser.add_argument("--keep", type=Path, default=None, help="keep the run folders here")
    options = parser.parse_args()
    root = options.keep or Path(tempfile.mkdtemp())
    (run if options.command == "run" else compare)(options, root)


if __name__ == "__main__":
    main()
