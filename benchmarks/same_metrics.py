"""Whether two updates of the quickstart and of recipes of different kinds have the same metrics with two checkouts'
code.

    python benchmarks/same_metrics.py ANOTHER_CHECKOUT [NAME ...]

A move of code must change no number: every metric is compared to the last bit, but those of time and memory. Recipes
run in their tiny versions, a loop for one round.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
NAMES = (
    "quickstart",
    "maporl",
    "at_grpo_shared",
    "c3",
    "cory",
    "dr_mas",
    "gigpo",
    "iac",
    "magrpo",
    "malt",
    "rema",
    "spiral",
)
"""PPO with critics, games, groups of turns, two roles of one policy, branching, callers, central critics, a loop,
self-play."""
RUN = """
import sys
from pathlib import Path
from maporl.config.parse import read_yaml
try:
    from maporl.methods.tiny_versions import tiny_version
except ModuleNotFoundError:  # a checkout from before they were a module of maporl.methods
    from maporl.playground.tiny_versions import tiny_version
from maporl.runs.train import train
from maporl.validation.load import from_dict
name, folder = sys.argv[1:]
if name == "quickstart":
    values = read_yaml(Path("configs/ppo/quickstart.yaml")) | {"output_dir": folder}
    values["warm_start"] |= {"steps": 20}
else:
    values = tiny_version(name, folder)
if "loop" in values:
    values["loop"] |= {"rounds": 1}
else:
    values["updates"] = 2
values["evaluation"] = values.get("evaluation", {}) | {"questions": 8}
config = from_dict(values, name)
train(config, False, quiet=True)
"""
MEASURED = ("time/", "memory/")


def metrics(folder: Path) -> dict[str, list[dict[str, object]]]:
    """Return the rows of every file of metrics in a run's folder, without what was measured of the machine."""
    files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("metrics.jsonl"))}
    return {
        name: [
            {
                key: value
                for key, value in json.loads(line).items()
                if not any(part in key for part in (*MEASURED, "second"))
            }
            for line in path.read_text().splitlines()
        ]
        for name, path in files.items()
    }


def run(checkout: Path, name: str, folder: Path) -> subprocess.Popen:
    """Start a run with one checkout's code."""
    environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with (folder.parent / f"{folder.name}.log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, "-c", RUN, name, str(folder)], cwd=checkout, env=environment, stdout=log, stderr=log
        )


def differences(mine: dict, other: dict) -> list[str]:
    """Return a sentence for each of the first metrics that differ."""
    if mine.keys() != other.keys():
        return [f"files {sorted(mine)} and {sorted(other)}"]
    found = []
    for file, rows in mine.items():
        if len(rows) != len(other[file]):
            found.append(f"{file}: {len(rows)} and {len(other[file])} rows")
        for number, (row, its) in enumerate(zip(rows, other[file], strict=False)):
            found += [
                f"{file}, row {number}, {key}: {row.get(key)!r} and {its.get(key)!r}"
                for key in sorted(row.keys() | its.keys())
                if json.dumps(row.get(key)) != json.dumps(its.get(key))
            ]
    return found


def main() -> None:
    """Print for each run how many metrics were compared, and what differs. The status is 1 if anything does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path)
    parser.add_argument("names", nargs="*", default=NAMES)
    options = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as temporary:
        for name in options.names:
            folders = [Path(temporary) / f"{name}-{which}" for which in ("here", "there")]
            started = [run(c, name, f) for c, f in zip((HERE, options.other.resolve()), folders, strict=True)]
            statuses = [process.wait() for process in started]
            if any(statuses):
                logs = [(folder.parent / f"{folder.name}.log").read_text() for folder in folders]
                raise SystemExit(f"{name}: a run failed\n" + "\n".join(log[-1500:] for log in logs))
            mine, other = map(metrics, folders)
            count = sum(len(row) for rows in mine.values() for row in rows)
            found = differences(mine, other)
            failed |= bool(found) or not count
            print(f"{name}: {count} metrics, {len(found)} differ", *found[:5], sep="\n  ", flush=True)
    raise SystemExit(int(failed))


if __name__ == "__main__":
    main()
