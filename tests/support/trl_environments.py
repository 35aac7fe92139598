"""Classes for ``environment_factory``, written as TRL's guides write them. No class knows anything of maporl."""

import asyncio
import json
import random

import torch
from tool_models import trl_template
from transformers import Qwen3Config, Qwen3ForCausalLM


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
