"""Episodes of a game, for protocols that bring their own questions."""

from dataclasses import dataclass
from typing import Literal

from maporl.tasks.base import Task
from maporl.types import Example, Grade
from trl_ext.ppo.options import Positive, option


@dataclass(frozen=True)
class Episodes(Task):
    """``count`` episodes to train on and ``held_out`` others to evaluate on. An episode is a seed; the game grades it.

    Raises:
        ValueError: ``count`` or ``held_out`` is below 1.
    """

    has_questions = False

    count: Positive = option(10_000, "Episodes to train on.")
    held_out: Positive = option(256, "Other episodes to evaluate on.")
    split: Literal["train", "eval"] = option("train", "The split. A run sets it.")
    seed: int = option(0, "Seed of what is drawn. Default: that of the run.")

    def __len__(self) -> int:
        return self.count if self.split == "train" else self.held_out

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return Example(f"{self.split}-{self.seed}-{index}", "", "")

    def grade(self, example: Example, text: str) -> Grade:
        """No grade: a move is neither right nor wrong, and the protocol grades it when the game is over."""
        return Grade(text, None, "the game is not over")
