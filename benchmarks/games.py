"""Measure players of a game against a fixed opponent, before and after self-play.

    python benchmarks/games.py configs/ppo/learning/tictactoe.yaml --seeds 0 1 2 3 4 --output tictactoe.json
    python benchmarks/games.py configs/ppo/learning/dilemma.yaml --seeds 0 1 2 3 4 --output dilemma.json

For each seed a team is trained. Before is its warm start. Each seat in turn keeps its policy, and the others make
random moves (``engine: random``), or those of ``--moves``. All teams play the same games. The table has the mean
payment of the seats that keep their policy, and the difference with its 95% t interval over the seeds.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from learning import T95

from maporl.config.parse import read_yaml
from maporl.runs.build import build_player
from maporl.tasks import build_task
from maporl.validation.load import load
from trl_ext.ppo.options import Decoding


def train(config: Path, folder: Path, seed: int) -> None:
    """Train in another process."""
    command = [sys.executable, "-m", "maporl", "train", str(config), f"seed={seed}", f"output_dir={folder}", "-q"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def against_random(folder: Path, weights: str, seats: list[str], games: int, moves: list[str]) -> float:
    """Return the mean payment of a run's players with its ``weights``, each in its own seat among random players.

    A game that an illegal move ended pays its author -1 and counts so.
    """
    paid = []
    for seat in seats:
        others = [name for name in seats if name != seat]
        changes = [f"agents.{name}.{key}" for name in others for key in ("engine=random", "policy=null")]
        changes += [f"agents.{name}.engine_options={{moves: {json.dumps(moves)}}}" for name in others if moves]
        config = load(str(folder / "config.yaml"), changes)
        player = build_player(config, folder / weights)
        task = build_task(config.task, "eval", config.seed)
        dialogues = player.play_evaluation(task, games, Decoding(1.0), config.seed)
        paid += [-1.0 if d.outcome == "illegal" else d.outcome[seat] for d in dialogues]  # random moves are legal
    return statistics.mean(paid)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--games", type=int, default=256)
    parser.add_argument(
        "--moves", nargs="*", default=[], help="the moves of the fixed opponents, for games that list none"
    )
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    seats = list(read_yaml(options.config)["agents"])
    print(
        f"{options.config}: mean payment of a player among random ones, {options.games} games in each of {len(seats)} "
        "seats"
    )
    print("| seed | before | after | gain | s |\n|---|---|---|---|---|")
    rows = []
    for seed in options.seeds:
        since = time.perf_counter()
        with tempfile.TemporaryDirectory() as root:
            run = Path(root) / "run"
            train(options.config, run, seed)
            found = {
                when: against_random(run, weights, seats, options.games, options.moves)
                for when, weights in {"before": "initial", "after": "final"}.items()
            }
        rows.append({"seed": seed, **found, "gain": found["after"] - found["before"]})
        print(
            f"| {seed} | {found['before']:+.3f} | {found['after']:+.3f} | {rows[-1]['gain']:+.3f} | "
            f"{time.perf_counter() - since:.0f} |",
            flush=True,
        )
        if options.output:
            options.output.write_text(
                json.dumps({"config": str(options.config), "games": options.games, "seeds": rows}, indent=1)
            )
    gains = [row["gain"] for row in rows]
    if len(gains) > 1:
        spread = T95[len(gains)] * statistics.stdev(gains) / len(gains) ** 0.5
        print(f"gain {statistics.mean(gains):+.3f} ± {spread:.3f}")


if __name__ == "__main__":
    main()
