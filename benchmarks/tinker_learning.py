"""Whether the quickstart's world learns on a service as it does here: the SDK, against the stand-in of the tests.

    python benchmarks/tinker_learning.py --seeds 5 --output benchmarks/results/tinker_learning.json

Both runs of a seed begin with the models that the quickstart's warm start makes, train a LoRA on each by the mean of a
group, and ask the same held-out questions. They sample with different random numbers, so that they are equal on average
and not answer by answer (tests/integrations/tinker/test_tinker_equal.py has the same answers in both).
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

import yaml
from machine import machine

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests/support"))

from tinker_stub import Stub  # noqa: E402

from maporl.runs.build import build_trainer  # noqa: E402
from maporl.studies.comparing.study import Measured, compared  # noqa: E402
from maporl.validation.load import from_dict  # noqa: E402


def values_of(seed: int, folder: Path, updates: int) -> dict:
    """Return the quickstart with a mean over groups in place of a critic."""
    values = yaml.safe_load((ROOT / "configs/ppo/quickstart.yaml").read_text())
    values["training"] = values.get("training", {}) | {"critic": "none", "use_cpu": True, "save_steps": 0}
    values["training"] |= {"learning_rate": 1e-3, "per_device_train_batch_size": 32}
    values["evaluation"] = {"questions": 100}
    values["branching"] = {"group": 4}
    values["advantage"] = {"returns": "utterance", "baseline": "mean", "scale": "std"}
    ppo = {key: value for key, value in values.get("ppo", {}).items() if key not in ("gamma", "lam", "vf_coef")}
    values["ppo"] = ppo | {"temperature": 1.0, "entropy_coef": 0.0}
    return values | {"seed": seed, "updates": updates, "output_dir": str(folder)}


def trained(values: dict) -> dict:
    """Train, and return the accuracy of the last turn before and after, and the seconds."""
    shutil.rmtree(values["output_dir"], ignore_errors=True)
    began = time.perf_counter()
    trainer = build_trainer(from_dict(values), quiet=True)
    trainer.train()
    before, after = (evaluation.metrics()["accuracy/turn_2"] for evaluation in (trainer.before, trainer.after))
    return {"before": before, "after": after, "seconds": time.perf_counter() - began}


def ends(rows: list[dict]) -> dict:
    """Return the means of the last turn's accuracy at the end, in per cent, and their difference over seeds."""
    found = {
        (where, row["seed"]): Measured({"final turn": 100 * row[where]["after"]}, {})
        for row in rows
        for where in ("service", "here")
    }
    return compared(found)["final turn"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for seed in range(options.seeds):
            top = Path(scratch, str(seed))
            build_trainer(from_dict(values_of(seed, top / "warm", 1)), quiet=True)
            start = {name: str(top / "warm/initial" / name) for name in ("ann", "bob")}
            lora = {"r": 16}
            values = values_of(seed, top / "here", options.updates)
            values |= {"agents": {name: {"model": model, "lora": lora} for name, model in start.items()}}
            values.pop("warm_start")
            stub = Stub(start["ann"], bases=[start["bob"]])
            service = {"cluster": {"backend": "tinker", "tinker": {"base_url": stub.url}}}
            rows.append({"seed": seed, "here": trained(values)})
            rows[-1]["service"] = trained(values | service | {"output_dir": str(top / "service")})
            stub.close()
            print(json.dumps(rows[-1]), flush=True)
    if options.output is not None:
        about = {"machine": machine(), "updates": options.updates, "runs": rows, "compared": ends(rows)}
        options.output.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
