"""Teams whose policies learn by different algorithms, and critics by different losses, over seeds.

    OMP_NUM_THREADS=1 python benchmarks/algorithms.py --seeds 5 --output benchmarks/results/algorithms.json

Calls ``maporl compare`` three times. A hinter and a guesser (``examples/hint_and_guess``) both learn by PPO with a
critic, or both by groups, or the hinter by PPO and the guesser by groups. The critics of the quickstart's team, and of
the hinter and the guesser, whose only reward comes at the end of a game, learn by the squared error or by histograms of
returns. Runs stand in ``--runs``, and what is there is not run again; ``--only`` makes one of the three comparisons.

Writes the tables of all three, and prints them.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import yaml
from quickstart import about

ROOT = Path(__file__).parents[1]
HINTS = "examples/hint_and_guess"
COMPARISONS = {
    "hint and guess": {
        "mixed": (f"{HINTS}/mixed.yaml", {}),
        "both_ppo": (f"{HINTS}/both_ppo.yaml", {}),
        "both_groups": (f"{HINTS}/both_groups.yaml", {}),
    },
    "critic, quickstart": {
        "clipped": ("configs/ppo/quickstart.yaml", {}),
        "hl_gauss": ("configs/ppo/quickstart.yaml", {"value_loss": "hl_gauss"}),
    },
    "critic, hint and guess": {
        "clipped": (f"{HINTS}/both_ppo.yaml", {}),
        # an illegal move costs 1.5, and the best game pays 1
        "hl_gauss": (f"{HINTS}/both_ppo.yaml", {"value_loss": "hl_gauss", "value_range": [-1.5, 1.0]}),
    },
}


def main() -> None:
    """Make each comparison, and write all tables into one file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", choices=COMPARISONS)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs/algorithms")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    found = json.loads(options.output.read_text())["comparisons"] if options.output.exists() else {}
    for name in [options.only] if options.only else COMPARISONS:
        folder = options.runs.resolve() / name.replace(",", "").replace(" ", "-")
        folder.mkdir(parents=True, exist_ok=True)
        files = []
        for arm, (base, ppo) in COMPARISONS[name].items():
            file = folder / f"{arm}.yaml"
            file.write_text(yaml.safe_dump({"extends": str(ROOT / base), **({"ppo": ppo} if ppo else {})}))
            files.append(str(file))
        command = [sys.executable, "-m", "maporl", "compare", *files, "--output", str(folder / "runs")]
        subprocess.run([*command, "--seeds", str(options.seeds)], check=True, cwd=ROOT)
        found[name] = json.loads((folder / "runs/compare.json").read_text())
        options.output.write_text(json.dumps({**about(), "comparisons": found}, indent=1) + "\n")
        print(f"{name}\n\n{(folder / 'runs/compare.md').read_text()}", flush=True)


if __name__ == "__main__":
    main()
