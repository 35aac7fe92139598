"""A learned verifier from nothing: sample answers, balance them, train the verifier, serve it, and train a team with
its scores.

    python examples/03_verifier_pipeline.py [--folder runs/verifier_pipeline] [--updates 20]

All models are tiny, and the script takes a few minutes on two CPU cores. The same five commands make a verifier of any
size.
"""

import argparse
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx2

TINY = {"hidden_size": 64, "layers": 2, "heads": 4, "context": 64}
TEAM = {
    "task": {"name": "toy_sum", "largest": 19},
    "agents": {"ann": {"tiny": TINY}, "bob": {"tiny": {**TINY, "architecture": "qwen3"}}},
    "protocol": {"name": "debate", "later": "{others};{question}", "quote": "{text}", "separator": ";"},
    "ppo": {"response_length": 3, "temperature": 1.0, "num_mini_batches": 8, "num_ppo_epochs": 2, "kl_coef": 0.03, "vf_coef": 0.5},  # noqa: E501
    "training": {
        "per_device_train_batch_size": 128, "gradient_accumulation_steps": 1, "learning_rate": 3e-4,
        "value_learning_rate": 3e-3, "lr_scheduler_type": "constant", "adam_beta2": 0.99, "use_cpu": True,
    },
    "evaluation": {"questions": 80},
}  # fmt: skip


def step(title: str, *command: object) -> None:
    """Run one step of the pipeline as a command that you could type."""
    print(f"\n# {title}\n$ maporl", *command, flush=True)
    subprocess.run([sys.executable, "-m", "maporl", *map(str, command)], check=True)


def serve(verifier: Path) -> tuple[subprocess.Popen, str]:
    """Start the server in a separate process. Return the process and its URL once the server is ready.

    Raises:
        RuntimeError: The server did not start.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["reward_server", "--model", str(verifier), "--port", str(port)]
    print("\n# serve it\n$ python -m", *command, flush=True)
    process = subprocess.Popen([sys.executable, "-m", *command])
    url = f"http://127.0.0.1:{port}"
    while process.poll() is None:
        try:
            httpx2.get(f"{url}/ready", trust_env=False).raise_for_status()  # no proxy
            return process, url
        except httpx2.TransportError:
            time.sleep(0.2)
    raise RuntimeError("the server did not start; its output above says why")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/verifier_pipeline"))
    parser.add_argument("--updates", type=int, default=80)
    parser.add_argument("--samples", type=int, default=32, help="answers of each agent to each question")
    parser.add_argument(
        "--teacher-epochs", type=int, default=80, help="epochs of the larger model, which becomes the verifier"
    )
    options = parser.parse_args()
    folder = options.folder
    folder.mkdir(parents=True)  # fails if the folder exists, so an earlier run is never overwritten

    def configuration(name: str, **changes: object) -> Path:
        path = folder / f"{name}.yaml"
        path.write_text(json.dumps({**TEAM, "output_dir": str(folder / name), "updates": options.updates, **changes}))
        return path  # every JSON text is also YAML

    pupils, teachers, samples, verifier = (folder / name for name in ("pupils", "teachers", "samples", "verifier"))
    balanced = folder / "balanced.jsonl"
    learn = ("--learning-rate", 1e-3, "-q")
    step(
        "teach two small models a little",
        *("sft", configuration("small"), "--output", pupils, "--epochs", 12, *learn),
    )
    large = configuration("large", agents={"judge": {"tiny": {**TINY, "hidden_size": 128}}})
    step("teach a larger one more", "sft", large, "--output", teachers, "--epochs", options.teacher_epochs, *learn)
    agents = {name: {"model": str(pupils / name)} for name in TEAM["agents"]}
    answering = configuration("answering", agents=agents)
    step(
        "sample their answers to every question, and label them",
        *("verifier", "generate", answering, "--output", samples, "--per-question", options.samples),
    )
    step(
        "keep as many right as wrong answers to each question; a sum has only one right text, so keep repeats",
        *("verifier", "balance", samples, "--output", balanced, "--repeats"),
    )
    step(
        "train a verifier on them",
        *("verifier", "train", balanced, "--model", teachers / "judge", "--output", verifier, "--epochs", 12),
        *("--learning-rate", 1e-3, "--batch-size", 64, "--use-cpu"),
    )
    server, url = serve(verifier)
    try:
        reward = {"sources": {"verifier": 1.0}, "verifier": {"urls": [url], "on_failure": "wait"}}
        team = configuration("team", agents=agents, reward=reward, warm_start={"steps": 60})
        step("teach the team to debate, and train it with the verifier's scores", "train", team)
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
