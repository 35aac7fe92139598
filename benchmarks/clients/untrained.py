"""Train an untrained model by the structured outputs of each client: two updates, in which every answer must be read.

    python benchmarks/clients/untrained.py [NAME ...] [--environments .venv-clients] [--model FOLDER]

The environments are those that ``table.py`` has made. The function ``structured`` of each file is the program of a run,
whose agent is a tiny model with random weights, or that of ``--model``. A program ends with an error if its client
cannot read an answer. Prints for each client how many dialogues ended well, how many answers were held to a shape, and
the mean ratio of the first minibatches, which is 1 if the update reads the probabilities that were sampled from.
"""

import argparse
import json
import tempfile
from pathlib import Path
from string import printable

from table import clients

from maporl.runs.train import train
from maporl.validation.load import from_dict


def settings(command: tuple[str, ...], folder: Path, model: str | None) -> dict:
    """Return the configuration of a run."""
    tiny = {"alphabet": printable[:95] + "\n", "hidden_size": 32, "layers": 1, "context": 4096}
    return {
        "output_dir": str(folder), "updates": 2, "task": {"name": "toy_sum", "largest": 9},
        "agents": {"solver": {"model": model} if model else {"tiny": tiny}},
        "protocol": {"name": "program", "command": list(command), "on_failure": "zero", "seconds": 120},
        "reward": {"rules": ["last"]}, "ppo": {"response_length": 256, "temperature": 1.0, "num_ppo_epochs": 1},
        "training": {"per_device_train_batch_size": 8, "use_cpu": True, "learning_rate": 1e-4, "on_void": "warn"},
        "evaluation": {"questions": 0},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--environments", type=Path, default=Path(".venv-clients"))
    parser.add_argument("--model")
    options = parser.parse_args()
    for client in clients():
        if "structured" not in client.aspects or (options.names and client.name not in options.names):
            continue
        folder = Path(tempfile.mkdtemp()) / "run"
        train(
            from_dict(settings(client.command(options.environments, "structured"), folder, options.model)),
            resume=False,
            quiet=True,
        )
        dialogues = [json.loads(line) for line in (folder / "dialogues.jsonl").read_text().splitlines()]
        held = [u for d in dialogues for u in d["utterances"] if u["grammar"]]
        failed = [d["outcome"]["failure"].splitlines()[-1] for d in dialogues if d["outcome"].get("failure")]
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        ratios = [r["solver/val/first_ratio"] for r in records if "solver/val/first_ratio" in r]
        who, well = f"{client.title} {client.version(options.environments)}", len(dialogues) - len(failed)
        told = f"{well} of {len(dialogues)} dialogues ended well, {len(held)} answers were held"
        print(f"{who}: {told}, first ratios {ratios} {failed[:1]}", flush=True)


if __name__ == "__main__":
    main()
