"""Compare PPO updates with those of TRL 1.12's PPOTrainer. Both do the same work, in alternating processes.

    python benchmarks/compare_with_trl_ppo.py --peer-python VENV/bin/python \
        --model DIR --rounds 2 [--dtype float32] [--critic head model] [--lora 16]

``--peer-python`` is an environment with torch 2.13.0, trl 1.12.0, transformers 5.23.0 and psutil. ``--peer-script``
drives TRL's trainer there; by default it is ``trl_ppo.py``.
This script prints a Markdown table of medians and ratios. A ratio of times above 1 means that this package is faster. A
ratio of memory below 1 means that it needs less.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys

from machine import machine

WORK = ["--batch", "8", "--prompt-len", "64", "--response-len", "64", "--epochs", "4"]


def run(command: list[str]) -> dict:
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--peer-script", default=os.path.join(os.path.dirname(__file__), "trl_ppo.py"))
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--updates", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--lora", type=int, default=0, help="LoRA rank of the policy, there and here; 0: full fine-tuning"
    )
    parser.add_argument("--critic", nargs="+", default=["head", "model"], choices=["head", "model"])
    options = parser.parse_args()
    shared = ["--model", options.model, "--dtype", options.dtype, "--updates", str(options.updates), *WORK]
    shared += ["--lora", str(options.lora)] if options.lora else []
    seconds: dict[str, list[float]] = {name: [] for name in ("trl", *options.critic)}
    memory: dict[str, list[float]] = {name: [] for name in seconds}
    for _ in range(options.rounds):
        peer = run([options.peer_python, options.peer_script, *shared])
        seconds["trl"] += peer["update_s"]
        memory["trl"].append(peer["peak_rss_mb"] * 2**20)
        for critic in options.critic:
            here = run(
                [
                    sys.executable,
                    os.path.join(os.path.dirname(__file__), "ppo_step.py"),
                    *shared,
                    "--critic",
                    critic,
                    "--json",
                ]
            )
            seconds[critic].append(here["seconds_per_update"])
            memory[critic].append(here["peak_rss_bytes"])
        print({name: [round(s, 1) for s in values] for name, values in seconds.items()}, file=sys.stderr, flush=True)
    base_seconds, base_memory = statistics.median(seconds["trl"]), statistics.median(memory["trl"])
    print(f"{machine()}\n")
    print(f"| {options.dtype} | s per update | times as fast | peak GB | of its memory |\n|---|---|---|---|---|")
    for name in seconds:
        label = "TRL 1.12 PPOTrainer" if name == "trl" else f"maporl, critic: {name}"
        s, m = statistics.median(seconds[name]), statistics.median(memory[name])
        print(f"| {label} | {s:.1f} | {base_seconds / s:.2f} | {m / 2**30:.2f} | {m / base_memory:.0%} |")


if __name__ == "__main__":
    main()
