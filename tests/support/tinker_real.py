"""Train a team on a server that is there, and here, and print by how much the weights differ and what the probe found.

python tests/support/tinker_real.py ADDRESS BASE FOLDER

On SkyRL's server q, k and v have one matrix A, and gate and up have one, which so gets the sum of their gradients. They
are left out of what is compared.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from maporl.runs import build

SHARED = ("q_proj.lora_A", "k_proj.lora_A", "v_proj.lora_A", "gate_proj.lora_A", "up_proj.lora_A")


def smooth(args):
    """Steps are nearly proportional to gradients, so that rounding, which is another in each library, stays small."""
    args.adam_epsilon = 1.0
    return args


def main(url, base, folder):
    sys.path.append(str(Path(__file__).parent))
    import tinker_runs

    ppo = {"num_ppo_epochs": 2, "num_mini_batches": 2, "kl_coef": 0.2, "kl_in": "loss", "kl_estimator": "k3"}
    options = {"sections": {"ppo": ppo, "updates": 2}, "max_grad_norm": 0.0, "learning_rate": 0.02}
    arguments = build.training_arguments
    with pytest.MonkeyPatch.context() as patch:
        recorded = tinker_runs.recording(patch)
        patch.setattr(build, "training_arguments", lambda config: smooth(arguments(config)))
        there, here = tinker_runs.trained_twice(Path(folder), base, SimpleNamespace(url=url), recorded, **options)
    ((facts,),) = (
        bases.values()
        for bases in json.loads(Path(folder, "there/audit.json").read_text())["built"]["service"].values()
    )
    own = [
        {n: {k: v for k, v in w.items() if not any(one in k for one in SHARED)} for n, w in end.items()}
        for end in (there, here)
    ]
    moved = max(float(v.abs().max()) for weights in there.values() for k, v in weights.items() if "lora_B" in k)
    print(json.dumps({"difference": tinker_runs.difference(*own), "moved": moved, "facts": facts}))


if __name__ == "__main__":
    main(*sys.argv[1:])
