"""What precision of the weights costs and keeps: bytes held, seconds, and how far small steps move the weights.

    python benchmarks/precision.py --model DIR [--steps 10 --rate 1e-6 --rows 2 --tokens 32]

Every way runs in a process of its own, and makes the same ``--steps`` optimizer steps of ``trl_ext``'s learner without
a critic on the same random rows. It prints one JSON line with:

- ``weights``, ``masters``, ``optimizer``: the bytes a parameter of each, from the tensors that are held after a step.
- ``gradients``: the bytes a parameter of gradients after a backward pass.
- ``peak``: the process's peak of memory in GB.
- ``seconds``: the median of a step with its forward and backward pass.
- ``moved``: the share of the movement of float32 weights that the stepped weights made, along its direction.
- ``moved_in_memory``: the same for the weights with which the model computes.

The way ``bfloat16, no masters`` is AdamW on bfloat16 weights, which ``trl_ext`` no longer does and TRL's trainers do.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_ext import PPOv2Config
from trl_ext.learning.learner import Learner
from trl_ext.learning.policy import Policy
from trl_ext.ppo.batch import Completion, build_token_batch
from trl_ext.sharding import master_weights

WAYS = ("float32", "bfloat16 with masters", "bfloat16, no masters")


class OneProcess:
    """Stands in for accelerate's ``Accelerator`` in a single process on a CPU."""

    device = torch.device("cpu")
    mixed_precision = "no"


def rows_of(learner: Learner, count: int, tokens: int):
    """Return ``count`` rows of random tokens, of which the second half is trained on, with random advantages."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(100, 10_000, (count, tokens), generator=generator).tolist()
    rows = build_token_batch(
        [Completion(r[: tokens // 2], r[tokens // 2 :], True, f"row {n}") for n, r in enumerate(ids)], "cpu"
    )
    learner.annotate(rows)
    rows.advantages = torch.randn(rows.sampled_mask.shape, generator=generator) * rows.sampled_mask
    return rows


def size(tensors) -> int:
    """Return the bytes of ``tensors``."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def measure(way: str, options: argparse.Namespace) -> dict:
    """Make the steps in this process, and save the movement of the stepped weights in ``options.folder``."""
    if way == WAYS[2]:
        master_weights.HALF_PRECISION = ()
    dtype = torch.float32 if way == WAYS[0] else torch.bfloat16
    # all ways begin at bfloat16 weights, so that the movement is the only difference
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).to(dtype)
    args = PPOv2Config(
        output_dir=options.folder, use_cpu=True, report_to=[], learning_rate=options.rate, kl_coef=0.0, temperature=1.0,
        lr_scheduler_type="constant", per_device_train_batch_size=options.rows, cliprange=1e6,
    )  # fmt: skip
    learner = Learner(Policy("policy", model, AutoTokenizer.from_pretrained(options.model)), args, critic="none")
    learner.prepare(OneProcess(), 1)
    stepped = [p for group in learner.optimizer.param_groups for p in group["params"]]
    before, rows, seconds = [p.detach().clone() for p in stepped], rows_of(learner, options.rows, options.tokens), []
    for _ in range(options.steps):
        begun = time.perf_counter()
        learner.accumulate(rows, torch.arange(len(rows)))
        gradients = size(p.grad for p in [*model.parameters(), *learner.optimizer.masters.values()])
        learner.step()
        seconds.append(time.perf_counter() - begun)
    # resource.getrusage would report the parent's peak where that is larger
    status = Path("/proc/self/status").read_text().split()
    peak = int(status[status.index("VmHWM:") + 1]) / 1e6
    count = sum(p.numel() for p in stepped)
    for name, tensors in (("stepped", stepped), ("memory", list(model.parameters()))):
        moved = [after.detach().float() - start.float() for after, start in zip(tensors, before, strict=True)]
        torch.save(torch.cat([m.flatten() for m in moved]), Path(options.folder) / f"{name}-{WAYS.index(way)}.pt")
    state = [v for entries in learner.optimizer.state.values() for v in entries.values() if torch.is_tensor(v)]
    held = {
        "weights": size(model.parameters()), "masters": size(learner.optimizer.masters.values()), "optimizer": size(state),  # noqa: E501
        "gradients": gradients,
    }  # fmt: skip
    return {what: round(number / count, 2) for what, number in held.items()} | {
        "peak": round(peak, 2), "seconds": round(statistics.median(seconds), 2),
    }  # fmt: skip


def share(folder: Path, name: str, way: int) -> float:
    """Return the share of the float32 movement that a way made along its direction."""
    own, whole = (torch.load(folder / f"{part}.pt") for part in (f"{name}-{way}", "stepped-0"))
    return round(float(own.double() @ whole.double() / (whole.double() @ whole.double())), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description="Bytes and movement of weights in float32 and bfloat16.")
    parser.add_argument("--model", required=True)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rate", type=float, default=1e-6)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--way", type=int, help="Measure this way only, in this process.")
    parser.add_argument("--folder", help="Where a way saves its movement.")
    options = parser.parse_args()
    if options.way is not None:
        print(json.dumps(measure(WAYS[options.way], options)))
        return
    with tempfile.TemporaryDirectory() as folder:
        for number, way in enumerate(WAYS):
            command = [sys.executable, __file__, *sys.argv[1:], "--way", str(number), "--folder", folder]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found = json.loads(done.stdout.strip().splitlines()[-1])
            moved = {
                "moved": share(Path(folder), "stepped", number),
                "moved_in_memory": share(Path(folder), "memory", number),
            }
            print(json.dumps({"way": way} | found | moved), flush=True)


if __name__ == "__main__":
    main()
