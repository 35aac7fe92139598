"""What ``maporl plan --probe`` measures of a model here, and how well the formulas then predict what it has not
measured.

    python benchmarks/probe.py --model DIR [--dtype float32] [--rows 4 8 16 48] [--updates 2 4 8] [--clock processor]

The probe measures two decoding steps, the reading of prompts and one update. Then decoding steps of ``--rows`` rows,
prompts and updates of other sizes are measured and compared with the prediction. With ``--memory``, a run of one update
of two policies follows in a process of its own, whose peak of main memory is compared with the estimate of ``maporl
check``. ``--clock processor`` counts the seconds of the processor instead of those on the clock, which other programs
on the machine do not lengthen so much; it needs OMP_NUM_THREADS=1. Probe and measurements are repeated ``--rounds``
times; the Markdown table that is printed has the medians, and all ratios.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch

from maporl.config import Config
from maporl.config.parse import to_yaml
from maporl.config.threads import threads_of
from maporl.planning import probe
from maporl.planning.devices import read_cluster
from maporl.planning.estimates import Rates, step_seconds, update_seconds
from maporl.planning.groups import groups_of
from maporl.planning.placements import Group
from maporl.validation.load import from_dict
from maporl.validation.preflight import check_run
from trl_ext.process.threads import use


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder with a causal language model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 8, 16, 48])
    parser.add_argument("--updates", type=int, nargs="+", default=[2, 4, 8], help="conversations of an update")
    parser.add_argument("--clock", choices=["wall", "processor"], default="wall")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", action="store_true")
    return parser.parse_args()


def config_of(options: argparse.Namespace, folder: str) -> Config:
    """Return a run of one update of two policies, whose reference is kept."""
    agent = {"model": options.model, "dtype": options.dtype, "chat_template": "fallback"}
    return from_dict(
        {
            "output_dir": f"{folder}/run",
            "task": {"name": "toy_sum"},
            "agents": {"ann": agent, "bob": agent},
            "protocol": {"name": "debate", "turns": 1},
            "updates": 1,
            "ppo": {"response_length": 32, "kl_coef": 0.05, "num_ppo_epochs": 1, "stop_token": "none"},
            "training": {
                "per_device_train_batch_size": 4,
                "gradient_accumulation_steps": 1,
                "use_cpu": not torch.accelerator.is_available(),
                "save_steps": 0,
            },
            "evaluation": {"questions": 0},
        }
    )


def held_out(
    options: argparse.Namespace, config: Config, group: Group, rates: Rates
) -> Iterator[tuple[str, float, float]]:
    """Yield what is measured, its prediction and its seconds."""
    device = read_cluster("1xH100").device  # all rates that it would give are measured
    ready = probe.decoder(config, group)
    for rows in options.rows:
        first, more = (probe.seconds_of(ready(rows, probe.PROMPT, n)) for n in (1, 1 + 2 * probe.STEPS))
        predicted = step_seconds(group.model, rows, probe.PROMPT + probe.STEPS, device, rates)
        yield f"decoding step of {rows} rows", predicted, (more - first) / (2 * probe.STEPS)
    for rows in (2, 6):
        predicted = 2 * group.model.parameters * rows * 96 / rates.reading
        yield f"reading {rows} prompts of 96 tokens", predicted, probe.seconds_of(ready(rows, 96, 1))
    del ready
    trainer = probe.trainer(config, group)
    for rows in options.updates:
        work = probe.work_of(group, rows)
        predicted = update_seconds(group.model, work, device, 1, rates=rates)[0]
        yield (
            f"update of {rows} conversations of {work.conversation} tokens",
            predicted,
            probe.seconds_of(trainer(work)),
        )


def peak_gib(config: Config) -> float:
    """Return the peak of main memory of a run in a process of its own."""
    folder = Path(config.output_dir).parent
    (folder / "config.yaml").write_text(to_yaml(config))
    command = [sys.executable, "-m", "maporl", "train", str(folder / "config.yaml"), "-q"]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])})
    return json.loads((folder / "run/metrics.jsonl").read_text().splitlines()[-1])["memory/peak"]


def main() -> None:
    """Probe, measure and compare."""
    options = parse()
    if options.clock == "processor":
        probe.CLOCK = time.process_time
    found: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(options, folder)
        use(threads_of(config))
        fixed = replace(config, ppo=replace(config.ppo, keep_states=False))
        for _ in range(options.rounds):
            begin = time.perf_counter()
            (group, _), said = probe.probed(config, groups_of(config), read_cluster("4xH100"))
            print(
                f"{said[0]}, {torch.get_num_threads()} threads, in {time.perf_counter() - begin:.0f} s; {group.rates}",
                file=sys.stderr,
                flush=True,
            )
            assert group.rates is not None, "the model fits"
            for what, predicted, seconds in held_out(options, fixed, group, group.rates):
                print(f"{what}: {predicted:.3f} against {seconds:.3f} s", file=sys.stderr, flush=True)
                found.setdefault(what, []).append((predicted, seconds))
        print("| | predicted | measured | predicted / measured | of each round |\n|---|---|---|---|---|")
        for what, pairs in found.items():
            ratios = [predicted / seconds for predicted, seconds in pairs]
            predicted, seconds = (statistics.median(own) for own in zip(*pairs, strict=True))
            each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
            print(f"| {what} | {predicted:.3f} s | {seconds:.3f} s | {statistics.median(ratios):.2f} | {each} |")
        if options.memory:
            told = next(line for line in check_run(config) if line.startswith("memory:"))
            about, peak = float(told.split("about ")[1].split(" ")[0]), peak_gib(config)
            print(f"| memory of a local run | {about:.1f} GiB | {peak:.1f} GiB | {about / peak:.2f} | |")


if __name__ == "__main__":
    main()
