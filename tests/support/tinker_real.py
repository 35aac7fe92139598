"""Train a team on a server that is there, and here, and print by how much the weights differ and what the probe found.

python tests/support/tinker_real.py ADDRESS BASE FOLDER
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from maporl.runs import build

sys.path.append(str(Path(__file__).parent))


def steady(args):
    args.adam_epsilon = 1e-3
    return args


def main(url, base, folder):
    import tinker_runs

    with pytest.MonkeyPatch.context() as patch:
        recorded = tinker_runs.recording(patch)
        # two libraries round differently, and Adam makes much of gradients that are nearly 0
        arguments = build.training_arguments
        patch.setattr(build, "training_arguments", lambda config: steady(arguments(config)))
        ppo = {"num_ppo_epochs": 2, "num_mini_batches": 2, "kl_coef": 0.2, "kl_in": "loss", "kl_estimator": "k3"}
        options = {"sections": {"ppo": ppo, "updates": 2}, "max_grad_norm": 0.0}
        there, here = tinker_runs.trained_twice(Path(folder), base, SimpleNamespace(url=url), recorded, **options)
    (facts,) = json.loads(Path(folder, "there/audit.json").read_text())["built"]["service"].values()
    moved = max(float(v.abs().max()) for weights in there.values() for k, v in weights.items() if "lora_B" in k)
    print(json.dumps({"difference": tinker_runs.difference(there, here), "moved": moved, "facts": facts}))


if __name__ == "__main__":
    main(*sys.argv[1:])
