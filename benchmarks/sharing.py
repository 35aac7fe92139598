"""One policy for a team or one for each agent, in three workflows.

    OMP_NUM_THREADS=1 python benchmarks/sharing.py --seeds 5 --output benchmarks/results/sharing.json

Calls ``maporl sharing`` with three teams: voters that answer side by side, a generator with a verifier and a refiner,
and an orchestrator with two specialists that learn too. Runs stand in ``--runs``, and what is there is not run again.

What was expected before the first run (2026-11-26), after arXiv 2605.24202: that policies apart reach higher peaks in
all three and fall further from them; that one role has more than half of the gradients of the shared policy of the
orchestrator; and that voters, whose roles are alike, differ by less than 3 points.

Writes the tables of all three, and prints them.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from quickstart import about

ROOT = Path(__file__).parents[1]
WORKFLOWS = {
    "voters": ["configs/ppo/claims/voters.yaml"],
    "generator, verifier, refiner": ["configs/ppo/claims/checked_sums.yaml"],
    "orchestrator": [
        "configs/ppo/orchestrator.yaml",
        "schedule.freeze=[]",
        "updates=40",
        # specialists that learn apart may answer at such length that the orchestrator could not read it
        "agent_defaults.tiny.context=512",
    ],
}


def main() -> None:
    """Compare each workflow, and write all tables into one file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs/sharing")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    found = {}
    for name, configuration in WORKFLOWS.items():
        folder = options.runs.resolve() / Path(configuration[0]).stem
        command = [sys.executable, "-m", "maporl", "sharing", *configuration, "--output", folder]
        subprocess.run([*map(str, command), "--seeds", str(options.seeds)], check=True, cwd=ROOT)
        found[name] = json.loads((folder / "sharing.json").read_text())
        options.output.write_text(json.dumps({**about(), "workflows": found}, indent=1) + "\n")
        print(f"{name}\n\n{(folder / 'sharing.md').read_text()}", flush=True)


if __name__ == "__main__":
    main()
