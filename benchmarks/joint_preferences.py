"""Do preferences over joint answers (MADPO) break a symmetry? Two agents move at once, and win if their letters differ.

    OMP_NUM_THREADS=1 python benchmarks/joint_preferences.py [SEEDS]

Arms that start from the same untaught weights and train on as many sampled moves: joint DPO without a reference, the
same for each agent alone (the others' log-ratios left out), and joint DPO against the weights at the start of the
stage. For each arm it prints one JSON line with the share of held-out games that are won, before and after, of every
seed.
"""

import json
import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from maporl.environments.games.base import Game
from maporl.runs.train import train
from maporl.validation.load import from_dict

ARMS = {
    "joint": {"joint": True, "reference": "none"},
    "alone": {"joint": False, "reference": "none"},
    "joint, with a reference": {"joint": True, "reference": "stage"},
}


@dataclass
class Apart(Game):
    """Both players say one of three letters at once.

    Payments: both get 1 if the letters differ, and 0 if they are equal.
    """

    interests = "common"
    longest = 1

    def reset(self, rng: random.Random) -> None:
        self.said: dict[int, str] = {}

    def to_move(self) -> tuple[int, ...]:
        return () if self.said else (0, 1)

    def observe(self, player: int) -> str:
        return "?"

    def moves(self, player: int) -> tuple[str, ...]:
        return ("a", "b", "c")

    def step(self, moves: dict[int, str]) -> dict[int, float]:
        self.said = dict(moves)
        return dict.fromkeys(moves, float(moves[0] != moves[1]))

    def success(self, player: int) -> bool | None:
        return self.said[0] != self.said[1] if self.said else None


def values(folder: Path, seed: int, options: dict) -> dict:
    """Return the configuration of an arm."""
    stage = {"train": "dpo", "build": {"gap": {"per_question": 16}}, "learning_rate": 3e-3, "epochs": 2, **options}
    return {
        "output_dir": str(folder),
        "seed": seed,
        "task": {"name": "episodes"},
        "agent_defaults": {"tiny": {"alphabet": "abc?", "hidden_size": 32, "layers": 1}},
        "agents": {"ann": {}, "bob": {}},
        "protocol": {"name": "game", "game": f"{Path(__file__).stem}:Apart"},
        "pythonpath": [str(Path(__file__).parent)],
        "branching": {"group": 20},
        "reward": {"sources": {"env": 1.0}, "rules": ["own"]},
        "ppo": {"response_length": 1},
        "training": {"use_cpu": True},
        "warm_start": {"steps": 30, "batch_size": 16, "learning_rate": 1e-2},
        "evaluation": {"questions": 200, "temperature": 1.0},
        "loop": {"rounds": 2, "questions": 20, "stages": [stage]},
    }


def main() -> None:
    """Run all arms."""
    for name, options in ARMS.items():
        won = []
        for seed in range(int(sys.argv[1]) if len(sys.argv) > 1 else 5):
            with tempfile.TemporaryDirectory() as folder:
                ends = train(from_dict(values(Path(folder) / "run", seed, options)), resume=False, quiet=True)
                won.append([end.final().value if end else None for end in ends])
        after = [own[1] for own in won if own[1] is not None]
        print(json.dumps({"arm": name, "won before and after": won, "mean after": round(fmean(after), 3)}), flush=True)


if __name__ == "__main__":
    main()
