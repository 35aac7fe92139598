"""Compare tokens per second with CoMLRL 1.4.3: two agents with separate weights, one turn, one pass of optimisation.

    python benchmarks/two_agents.py --peer-python VENV/bin/python --model DIR --rounds 3

``--peer-python`` is an environment with torch 2.13.0, comlrl 1.4.3, transformers, wandb and openai. ``--peer-script``
drives CoMLRL's independent actor-critic there; by default it is ``comlrl_step.py``. Both libraries stop completions at
the end of sequence. The comparison is therefore of tokens per second: all sampled tokens over the seconds of
``train()``, without loading. Prompts are the bare text in both. Runs alternate in separate processes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed, if installed, prints on stdout
QUESTION = "Question {a}: a farmer has {a} cows and buys {b} more, how many cows does he have now and why? Explain."


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--once", action="store_true", help="measure maporl alone, in this process: one JSON line")
    parser.add_argument("--peer-python")
    parser.add_argument("--peer-script", default=os.path.join(os.path.dirname(__file__), "comlrl_step.py"))
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=int, default=8, help="per update")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--critic", choices=["head", "model"], default="head")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def once(options: argparse.Namespace) -> dict:
    """Run one update of two full models. Return the seconds of ``train()``, the sampled tokens and the memory."""
    import resource

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from maporl import Agent, Arithmetic, Debate, MultiAgentPPOConfig, MultiAgentPPOTrainer, RewardSection, Team

    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"  # the bare text, as in CoMLRL
    models = [AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16) for _ in range(2)]
    team = Team([Agent(name, model, tokenizer) for name, model in zip(("first", "second"), models, strict=True)])
    args = MultiAgentPPOConfig(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=options.prompts, total_episodes=options.prompts,
        response_length=options.new_tokens, temperature=1.0, num_ppo_epochs=1, kl_coef=0.0, learning_rate=1e-6,
        critic=options.critic, report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=not torch.cuda.is_available(),  # noqa: E501
    )  # fmt: skip
    lengths: list[int] = []

    def score(dialogues, task):
        lengths.extend(len(u.response_ids) for d in dialogues for u in d.utterances)
        return [[float(len(u.text) % 7) / 7 for u in d.utterances] for d in dialogues]

    trainer = MultiAgentPPOTrainer(
        args, team, Arithmetic(largest=99, template=QUESTION), Debate(turns=1), None, RewardSection(), sources={"label": score}  # noqa: E501
    )  # fmt: skip
    started = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "tokens": sum(lengths), "tokens_per_second": sum(lengths) / seconds, "peak_rss_bytes": peak}  # fmt: skip  # noqa: E501


def run(command: list[str]) -> dict:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    options = parse()
    if options.once:
        print(json.dumps(once(options)))
        return
    if not options.peer_python:
        sys.exit("--peer-python: expected the Python of an environment with CoMLRL (or --once)")
    names = ("model", "prompts", "new_tokens", "critic", "threads")
    shared = [word for n in names for word in (f"--{n.replace('_', '-')}", str(getattr(options, n)))]
    commands = {
        "CoMLRL 1.4.3": [options.peer_python, options.peer_script, *shared],
        "maporl": [sys.executable, __file__, "--once", *shared],
    }
    results: dict[str, list[dict]] = {name: [] for name in commands}
    for _ in range(options.rounds):
        for name, command in commands.items():
            results[name].append(run(command))
            print(name, results[name][-1], file=sys.stderr, flush=True)
    speed = {name: statistics.median(r["tokens_per_second"] for r in found) for name, found in results.items()}
    print(f"| critic: {options.critic} | tokens per second | times as fast | peak GB |\n|---|---|---|---|")
    for name, found in results.items():
        peak = statistics.median(r["peak_rss_bytes"] for r in found) / 2**30
        print(f"| {name} | {speed[name]:.1f} | {speed[name] / speed['CoMLRL 1.4.3']:.2f} | {peak:.2f} |")


if __name__ == "__main__":
    main()
