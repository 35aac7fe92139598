"""Peak memory and seconds of ``maporl eval`` for two agents that train all their weights.

    python benchmarks/eval_memory.py --model FOLDER [--against ANOTHER_CHECKOUT]

``FOLDER`` holds a causal language model. With ``--against``, the same command also runs with the code of another
checkout, which compares two versions.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

HERE = Path(__file__).resolve().parents[1]


def configuration(model: str, folder: str) -> dict:
    """Return a configuration of two full-weight agents that debate four products, with a KL penalty.

    With the penalty, training would keep a reference copy of each model.
    """
    return {
        "output_dir": f"{folder}/run",
        "task": {"name": "toy_times", "largest": 9},
        "agents": {"ann": {"model": model}, "bob": {"model": model}},
        "ppo": {"response_length": 8, "kl_coef": 0.05},
        "training": {"use_cpu": True},
        "evaluation": {"questions": 4},
    }


def measure(checkout: Path, model: str) -> dict[str, float]:
    """Run one evaluation in another process. Return its peak memory in GiB, seconds, right answers and tokens."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(yaml.safe_dump(configuration(model, folder)))
        command = [sys.executable, "-m", "maporl", "eval", str(file), "--json"]
        started = time.perf_counter()
        environment = os.environ | {"PYTHONPATH": str(checkout), "HF_HUB_OFFLINE": "1"}
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        printed = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise SystemExit(f"{' '.join(command)} ended with status {status}")
    record = json.loads(printed.strip().splitlines()[-1])
    return {
        "peak GiB": usage.ru_maxrss / 2**20,
        "seconds": time.perf_counter() - started,
        "right": record["turns"][-1]["team"]["count"],
        "tokens": record["tokens"],
    }


def main() -> None:
    """Print a row for each checkout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--against", type=Path)
    options = parser.parse_args()
    for checkout in [HERE, *([options.against] if options.against else [])]:
        found = measure(checkout, options.model)
        print(f"{checkout}: " + ", ".join(f"{name} {value:.2f}" for name, value in found.items()), flush=True)


if __name__ == "__main__":
    main()
