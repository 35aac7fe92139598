"""A team that calls tools, from a configuration with a module of its own."""

from pathlib import Path

import pytest
import yaml

MODULE = '''
from maporl import Environment, Tool


def double(n: int) -> int:
    """Double a number.

    Args:
        n: the number
    """
    return 2 * n


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def fail() -> str:
    """Fail always."""
    raise RuntimeError("no")


class Counter(Environment):
    forks = "replay"

    def reset(self, seed, row):
        self.count = 0
        return "c"

    def tools(self, agent):
        def up() -> int:
            """Count up."""
            self.count += 1
            return self.count

        return [Tool.of(up)]

    def reward(self):
        return float(self.count)


class Shop:
    def reset(self, **row):
        self.sold = 0
        return " sale"

    def buy(self, count: int) -> str:
        """Buy pieces.

        Args:
            count: how many
        """
        self.sold += count
        return f"{self.sold} sold"

    def get_reward(self):
        return self.sold / 10
'''
TEXTS = {"intro": "", "line": "", "json": "", "returned": "={text};", "failed": "?{text};", "limit": ";"}
ALPHABET = "0123456789+*= :;?abcdefghijklmnopqrstuvwxyz/<>(),."
AGENT = {
    "tiny": {"alphabet": ALPHABET, "hidden_size": 16, "layers": 1, "heads": 2, "context": 400},
    "call_format": "json",
    "call_texts": TEXTS,
}


@pytest.fixture(scope="module", autouse=True)
def worldly(tmp_path_factory):
    """A folder with the user's module, which a process imports once."""
    if not FOLDERS:  # another file of tests may have written it
        folder = tmp_path_factory.mktemp("own")
        (folder / "worldly.py").write_text(MODULE)
        FOLDERS[:] = [str(folder)]


FOLDERS: list[str] = []


def written(folder: Path, **changes) -> Path:
    config = {
        "output_dir": str(folder / "run"),
        "task": {"name": "toy_sum"},
        "agents": {"ann": AGENT | {"tools": ["double", "add", "fail"]}, "bob": AGENT | {"tools": ["counter"]}},
        "tools": {name: {"use": f"worldly:{name}"} for name in ("double", "add", "fail")},
        "environments": {"counter": {"use": "worldly:Counter", "agents": ["bob"]}},
        "reward": {"sources": {"label": 1.0, "counter": 0.5}},
        "protocol": {"name": "debate", "turns": 1, "opening": "{question}"},
        "ppo": {"response_length": 8},
        "training": {"per_device_train_batch_size": 2, "use_cpu": True, "save_steps": 0},
        "evaluation": {"questions": 2},
        "updates": 2,
        "pythonpath": FOLDERS,
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config | changes))
    return path
