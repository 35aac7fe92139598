"""Measure one update of a team of LoRA agents on one base model, against the naive way, and the cost of turns and
agents.

    python benchmarks/debate_step.py compare --model DIR [--agents 3 --turns 3 --questions 16 --new-tokens 64 --rounds
    2] [--json] python benchmarks/debate_step.py sweep --model DIR --json > points.json python benchmarks/debate_step.py
    sweep --model DIR --points points.json --plot docs/images/debate_cost.png

``compare``: the naive way samples with one call of generate for each agent and turn, reads every prompt again, and
trains on one row for each agent and turn. All variants get the same questions and random numbers, and force every
completion to its full length. They therefore sample the same tokens (in float32; in bfloat16 a few differ) and have the
same loss. Variants run in alternating processes, and the table has medians. ``sweep`` varies turns and agents from 1 to
6, and fits a line to the seconds against the tokens read.
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed, if installed, prints on stdout
VARIANTS = {
    "naive": {"mixed": False, "states": False, "prefixes": False},
    "agents in one batch": {"mixed": True, "states": False, "prefixes": False},
    "and states kept": {"mixed": True, "states": True, "prefixes": False},
    "and conversations read once": {"mixed": True, "states": True, "prefixes": True},
}
"""Whether adapters sample in one batch, and whether the KV cache is kept and rows share prefixes."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["compare", "sweep", "once"])
    parser.add_argument("--model", required=True, help="a folder with a causal language model")
    parser.add_argument("--agents", type=int, default=3)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--plot", default=None)
    parser.add_argument("--points", default=None, help="of an earlier sweep, in place of measuring")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def once(options: argparse.Namespace) -> dict:
    """Run one update of the first of ``--variants`` in this process. Return seconds by phase, tokens and losses."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from maporl import Agent, Arithmetic, Debate, MultiAgentPPOConfig, MultiAgentPPOTrainer, RewardSection, Team
    from maporl.engines.text import TextEngine
    from trl_ext.models.forward import tree_limits
    from trl_ext.ppo.prefix_tree import PrefixTree
    from trl_ext.sampling.own_weights import OwnWeights

    torch.set_num_threads(options.threads)
    variant = VARIANTS[options.variants[0]]
    if not variant["prefixes"]:
        build_tree = PrefixTree.of
        PrefixTree.of = lambda rows: dataclasses.replace(build_tree(rows), shared=[0] * len(rows))  # type: ignore
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    base = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype))
    names = [f"agent{number}" for number in range(options.agents)]
    torch.manual_seed(0)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, lora, adapter_name=names[0], autocast_adapter_dtype=False)
    for name in names[1:]:
        model.add_adapter(name, lora, autocast_adapter_dtype=False)
    team = Team([Agent(name, model, tokenizer, adapter=name) for name in names])
    args = MultiAgentPPOConfig(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=8, gradient_accumulation_steps=options.questions // 8,  # noqa: E501
        total_episodes=options.questions, response_length=options.new_tokens, stop_token="none", temperature=1.0,
        num_ppo_epochs=options.epochs, learning_rate=1e-5, report_to=[], save_strategy="no", disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(), keep_states=variant["states"],
    )  # fmt: skip
    task = Arithmetic(operation="times", largest=99, template="What is {a}*{b}? Think, then answer with the number.")
    odd = {"label": lambda dialogues, task: [[float(sum(u.response_ids) % 7) for u in d.utterances] for d in dialogues]}
    trainer = MultiAgentPPOTrainer(args, team, task, Debate(turns=options.turns), None, RewardSection(), sources=odd)
    tokens = OwnWeights(team.policies, 64, keep_states=variant["states"], mix=variant["mixed"])
    trainer.engines["transformers"] = TextEngine(team.policies, tokens, options.new_tokens)
    read: list[int] = []
    build = trainer.learning.token_batches

    def build_and_count(completions, critic_only=False):
        batches, metrics = build(completions, critic_only)
        read.append(sum(batch.tree.reads(tree_limits(base)) for batch in batches.values()))
        return batches, metrics

    trainer.learning.token_batches = build_and_count  # type: ignore[method-assign]
    trainer.train()
    records = trainer.run.read_metrics()
    last = records[-1]
    phases = {name.split("/")[1]: value for name, value in last.items() if name.startswith("time/")}
    sampled = options.agents * options.turns * options.questions * options.new_tokens
    return {
        "seconds": sum(phases.values()), "phases": phases, "tokens_sampled": sampled,
        "tokens_read_by_the_update": read[-1], "tokens_prefilled": read[-1] - sampled if variant["prefixes"] else None,
        "parameters": sum(p.numel() for p in base.parameters()), "agents": options.agents, "turns": options.turns,
        "questions": options.questions, "new_tokens": options.new_tokens,
        "losses": [last[f"{name}/loss/policy_avg"] for name in names],
    }  # fmt: skip


def run(options: argparse.Namespace, variant: str, **changes: int) -> dict:
    """Run :func:`once` with one variant in another process. ``changes`` replace options."""
    values = vars(options) | changes
    flags = [(f"--{key.replace('_', '-')}", str(values[key])) for key in ("model", "agents", "turns", "questions", "new_tokens", "epochs", "dtype", "threads")]  # fmt: skip  # noqa: E501
    command = [sys.executable, __file__, "once", "--variants", variant, *(word for flag in flags for word in flag)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def compare(options: argparse.Namespace) -> None:
    """Run all variants in turn, and print a table of medians."""
    results: dict[str, list[dict]] = {name: [] for name in options.variants}
    for _ in range(options.rounds):
        for name in options.variants:
            results[name].append(run(options, name))
            print(name, {k: round(v, 1) for k, v in results[name][-1]["phases"].items()}, file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps(results))
        return
    first = statistics.median(result["seconds"] for result in results[options.variants[0]])
    print(
        "| | s per update | times as fast | rollout s | advantage s | update s | tokens read by the update "
        "|\n|---|---|---|---|---|---|---|"
    )
    for name, runs in results.items():
        seconds = statistics.median(result["seconds"] for result in runs)
        phases = [statistics.median(result["phases"][p] for result in runs) for p in ("collect", "advantage", "update")]
        cells = " | ".join(f"{p:.1f}" for p in phases)
        print(f"| {name} | {seconds:.1f} | {first / seconds:.2f} | {cells} | {runs[0]['tokens_read_by_the_update']} |")
    expected = results[options.variants[0]][0]["losses"]
    spread = max(abs(a - b) for runs in results.values() for a, b in zip(runs[0]["losses"], expected, strict=True))
    print(f"\nlargest difference of a policy loss to the first variant: {spread:.2g}")


def sweep(options: argparse.Namespace) -> None:
    """Measure or read twelve points: 1 to 6 turns with two agents, then 1 to 6 agents with two turns."""
    import numpy as np

    if options.points:
        measured = json.loads(Path(options.points).read_text())
    else:
        shapes = [{"agents": 2, "turns": n} for n in range(1, 7)] + [{"agents": n, "turns": 2} for n in range(1, 7)]
        measured = [run(options, "and conversations read once", **shape) for shape in shapes]
    if options.json:
        print(json.dumps(measured))
    points = {"turns": measured[:6], "agents": measured[6:]}
    for what, found in points.items() if not options.json else ():
        tokens, seconds = [p["tokens_read_by_the_update"] for p in found], [p["seconds"] for p in found]
        slope, start = np.polyfit(tokens, seconds, 1)
        explained = np.corrcoef(tokens, seconds)[0, 1] ** 2
        print(f"{what} 1..6: seconds {[round(s, 1) for s in seconds]}, tokens {tokens}: {1000 * slope:.2f} ms a token + {start:.1f} s, R^2 {explained:.3f}")  # fmt: skip  # noqa: E501
    if options.plot:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 3), layout="constrained")
        for axis, (what, found) in zip(figure.subplots(1, 2, sharey=True), points.items(), strict=True):
            axis.plot([p["tokens_read_by_the_update"] for p in found], [p["seconds"] for p in found], "o-")
            axis.set(title=f"1 to 6 {what}", xlabel="tokens read by the update", ylabel="seconds per update")
        figure.savefig(options.plot, dpi=90)


if __name__ == "__main__":
    options = parse()
    if options.command == "once":
        print(json.dumps(once(options)))
    else:
        (compare if options.command == "compare" else sweep)(options)
