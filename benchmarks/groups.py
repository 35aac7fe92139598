"""What groups of processes on Ray cost and bring on one machine: starting, memory, learning at the same time, sending
weights.

    python benchmarks/groups.py [--rounds 5]

Two tiny policies of 256 hidden units and 4 layers, a group for each, on CPUs, one thread for each process. Prints one
JSON object:

- ``start_s``: seconds from the beginning to groups that can sample, of which Ray itself takes ``ray_s``.
- ``ray_mb``: the main memory of Ray's own processes, in which memory that several processes share counts once in all
  (PSS); ``ray_rss_mb``: the same where it counts for each of them; ``ray_processes``: the first by process.
- ``together_s``, ``in_turn_s``: the median seconds of an update of both groups at the same time, and of one after the
  other, which take turns; ``ratio`` of the two.
- ``send_s``: the median seconds until both engines of a policy have new weights of ``send_mb``.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from maporl.runs.build import build_trainer
from maporl.validation.load import from_dict


def config_of(folder: str) -> dict:
    """Return a run of two policies whose update takes about a second."""
    tiny = {"alphabet": "0123456789+=;", "hidden_size": 256, "layers": 4}
    return {
        "output_dir": f"{folder}/run",
        "task": {"name": "toy_sum", "largest": 99},
        "agents": {"ann": {"tiny": tiny}, "bob": {"tiny": tiny}},
        "protocol": {"name": "debate", "turns": 2, "later": "{others};{question}", "quote": "{text}"},
        "updates": 50,
        "ppo": {"response_length": 8, "temperature": 1.0, "num_ppo_epochs": 2, "stop_token": "none"},
        "training": {
            "per_device_train_batch_size": 32,
            "gradient_accumulation_steps": 4,
            "use_cpu": True,
            "save_steps": 0,
        },
        "evaluation": {"questions": 0},
        "cluster": {
            "backend": "ray",
            "groups": {
                "ann": {"policies": ["ann"], "engines": {"replicas": 2}},
                "bob": {"policies": ["bob"]},
            },
        },
    }


def memory_of_ray() -> dict[str, Any]:
    """Return the main memory of the processes that Ray has started for itself, on Linux."""
    found: dict[str, Any] = {"ray_mb": 0.0, "ray_rss_mb": 0.0, "ray_processes": {}}
    for process in psutil.Process().children(recursive=True):
        if process.name().startswith("ray::Host") or "maporl.integrations.ray.ray_folder" in process.cmdline():
            continue
        memory = process.memory_full_info()
        script = next((Path(word).stem for word in process.cmdline() if word.endswith(".py")), process.name())
        found["ray_processes"][script] = round(memory.pss / 1e6)
        found["ray_mb"] += memory.pss / 1e6
        found["ray_rss_mb"] += memory.rss / 1e6
    return found


def main() -> None:
    """Start the groups, and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        from maporl.integrations.ray.ray_cluster import Cluster

        Cluster().end()  # a cluster alone, to tell its time from that of the groups
        found: dict[str, Any] = {"ray_s": time.perf_counter() - begin}
        begin = time.perf_counter()
        trainer = build_trainer(from_dict(config_of(folder)), quiet=True)
        found["start_s"] = time.perf_counter() - begin
        backend = trainer.home
        assert backend is not None
        try:
            found |= memory_of_ray()
            trainer.inform_samplers()
            batch = trainer.advantage(trainer.score(trainer.collect(trainer.next_batch())))
            groups, learning = list(backend.learner_groups.values()), trainer.learning
            samples = {name: list(own) for name, own in batch.samples.items()}
            times: dict[str, list[float]] = {"together_s": [], "in_turn_s": [], "send_s": []}
            step = 1
            for _ in range(rounds):
                for way in ("together_s", "in_turn_s"):
                    learning.token_batches(samples)
                    step += 1
                    arguments = {
                        group.spec.name: [
                            ({n: learning._assigned(batch.token_batches[n], n, 0) for n in group.spec.trained}, step)
                        ]
                        for group in groups
                    }
                    start = time.perf_counter()
                    if way == "together_s":
                        learning.on_all(lambda group, given=arguments: group.update(given[group.spec.name]))
                    else:
                        for group in groups:
                            group.update(arguments[group.spec.name])
                    times[way].append(time.perf_counter() - start)
                start = time.perf_counter()
                backend.send("ann", step)
                backend.pools["ann"].release()  # a process does one thing after another, so it has loaded them
                times["send_s"].append(time.perf_counter() - start)
            found |= {name: statistics.median(own) for name, own in times.items()}
            found["ratio"] = found["in_turn_s"] / found["together_s"]
            found["send_mb"] = sum(p.numel() * 4 for p in trainer.team.policies["ann"].model.parameters()) / 1e6
        finally:
            backend.end()
    print(json.dumps({name: round(value, 3) if isinstance(value, float) else value for name, value in found.items()}))


if __name__ == "__main__":
    main()
