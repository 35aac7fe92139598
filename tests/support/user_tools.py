"""Tools and environments as users write them: in a module that a configuration names, and as classes for
``environment_factory``, as TRL's guides write them. No class of these knows anything of maporl.
"""

import asyncio
import json
import random
from pathlib import Path

import pytest
import torch
import yaml
from chat_models import trl_template
from transformers import Qwen3Config, Qwen3ForCausalLM

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


class Shop:
    """Sells apples. It pays for what was bought in time."""

    def __init__(self):
        self.closed = 0

    def reset(self, prompt, stock: int = 3, **kwargs) -> str | None:
        self.left, self.bought, self.said = stock, 0, prompt[-1]["content"]
        return f" There are {stock} apples." if stock else None

    def buy(self, count: int) -> str:
        """Buy apples.

        Args:
            count: how many
        """
        if count > self.left:
            raise ValueError(f"Only {self.left} left.")
        self.left -= count
        self.bought += count
        return f"You have {self.bought}."

    async def look(self) -> str:
        """Look at the shelf."""
        await asyncio.sleep(0.001)
        return f"{self.left} apples"

    async def ask(self, what: str) -> str:
        """Ask the owner, who is angry.

        Args:
            what: the question
        """
        raise RuntimeError(f"No {what}!")

    def count(self) -> int:
        """Count what you have."""
        return self.bought

    def wait(self):
        """Do nothing."""

    def basket(self) -> dict:
        """Show the basket."""
        return {"apples": self.bought}

    def get_reward(self) -> float:
        return self.bought / 3

    def _secret(self):
        raise AssertionError("no tool")


class Wordle:
    """The pattern of TRL's guide for games: the reward is an attribute that reward functions read."""

    def __init__(self):
        self.reward, self.done = 0.0, False

    def reset(self, answer, **kwargs):
        self.word, self.reward, self.done = answer, 0.0, False

    def guess(self, word: str) -> str:
        """Guess the word.

        Args:
            word: a word of the same length
        """
        if self.done:
            raise ValueError("Game over.")
        self.done = word == self.word
        self.reward = 1.0 if self.done else sum(a == b for a, b in zip(word, self.word, strict=False)) / 10
        return "".join("G" if a == b else "X" for a, b in zip(word, self.word, strict=False))


class Dice:
    """Draws from its seed, and pays later."""

    def reset(self, seed: int):
        self.rng, self.total = random.Random(seed), 0

    def roll(self, times: int = 1) -> list:
        """Roll the dice.

        Args:
            times: how often
        """
        rolled = [self.rng.randint(1, 6) for _ in range(times)]
        self.total += sum(rolled)
        return rolled

    async def get_reward(self) -> float:
        await asyncio.sleep(0.001)
        return self.total / 10


class Notes:
    """Keeps notes of every caller. It can be forked and closed."""

    def __init__(self):
        self.notes, self._caller, self.ends = [], None, []

    def reset(self, **row):
        self.row = row

    def write(self, text: str) -> str:
        """Write a note.

        Args:
            text: the note
        """
        self.notes.append((self._caller, text))
        return "; ".join(f"{who}: {what}" for who, what in self.notes)

    def _fork(self):
        fork = Notes()
        fork.notes, fork.row = list(self.notes), self.row
        return fork

    def _close(self):
        self.ends.append("_close")

    def close(self):
        self.ends.append("close")


TEMPLATE = trl_template("qwen3")


def tool_call(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call><|im_end|>'


def model_of(tokenizer):
    """A tiny model of the tokenizer's size, for TRL's trainer and for the one here."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=8192, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)
