"""A verifier that is trained while the agents are, on answers that a rule labels (Cooper, arXiv 2508.05613).

Data flow: an update's graded answers -> for each question its first right and its first wrong answer -> every k updates,
steps on ``-log sigmoid(s+ - s-)`` over the gathered pairs, where s is the verifier's output before temperature and
sigmoid. In Cooper an assistant rewrites a right answer into a wrong one; here the agents wrote both.
"""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from maporl.rewards.verifier.encoding import TooLong, chat_of, encode
from maporl.rewards.verifier.model import Verifier, last_outputs
from maporl.tasks.base import Task
from maporl.types import Dialogue
from trl_ext import distributed
from trl_ext.checkpoint import load_weights
from trl_ext.master_weights import MasterAdamW
from trl_ext.optimizer_files import read_optimizer, save_optimizer


def pair_loss(right: Tensor, wrong: Tensor) -> Tensor:
    """Mean of ``-log sigmoid(right - wrong)`` over pairs [N], nats (Cooper, equation 4).

    >>> round(pair_loss(torch.tensor([2.0]), torch.tensor([-0.5])).item(), 4)
    0.0789
    """
    return -logsigmoid(right - wrong).mean()


class CoTraining:
    """Trains all weights of ``verifier`` in place, every ``every`` updates."""

    def __init__(self, verifier: Verifier, every: int, learning_rate: float):
        self.verifier, self.every = verifier, every
        self.pairs: list[tuple[list[int], list[int]]] = []
        verifier.model.requires_grad_(True)
        self.optimizer = MasterAdamW(verifier.model.parameters(), lr=learning_rate, weight_decay=0.0)

    def after_update(self, update: int, dialogues: Iterable[Dialogue], task: Task) -> dict[str, float]:
        """Gather this update's pairs, of all processes, and train on all gathered ones if it is time to. Returns numbers to log.

        One process trains, and sends the weights to the others. Each process scores with its own copy, and copies that
        were trained apart would drift apart, because kernels do not add up in the same order everywhere.
        """
        self.pairs += distributed.all_gather_lists(self._pairs_of(dialogues, task))
        if update % self.every or not self.pairs:
            return {}
        pairs, self.pairs = self.pairs, []
        loss = distributed.on_main(lambda: self._train(pairs))
        distributed.broadcast_weights(self.verifier.model.state_dict().values())
        return {"verifier/pair_loss": loss, "verifier/pairs": float(len(pairs))}

    def _train(self, pairs: list[tuple[list[int], list[int]]]) -> float:
        """Take a step for each batch of pairs. Return the mean loss."""
        losses = []
        size = self.verifier.batch_size
        for start in range(0, len(pairs), size):
            rights, wrongs = zip(*pairs[start : start + size], strict=True)
            outputs = last_outputs(self.verifier.model, [*rights, *wrongs])
            loss = pair_loss(*outputs.chunk(2))
            self.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.verifier.model.parameters(), 1.0)
            self.optimizer.step()
            losses.append(loss.item())
        return sum(losses) / len(losses)

    def _pairs_of(self, dialogues: Iterable[Dialogue], task: Task) -> list[tuple[list[int], list[int]]]:
        found: dict[tuple[str, str], dict[bool, list[int]]] = {}
        for dialogue in dialogues:
            for utterance in dialogue.answers():
                correct = utterance.grade.correct if utterance.grade else None
                asked = dialogue.asked(utterance)
                sides = found.setdefault((asked.id, asked.question), {})
                if correct is None or correct in sides:
                    continue
                chat = chat_of(task.question(asked), utterance.words())
                try:
                    sides[correct] = encode(self.verifier.tokenizer, chat, self.verifier.longest)
                except TooLong:
                    continue
        return [(sides[True], sides[False]) for sides in found.values() if len(sides) == 2]

    def save(self, folder: Path) -> None:
        """Write the verifier, and what is needed to go on training it, into ``folder``."""
        self.verifier.model.save_pretrained(folder)
        self.verifier.tokenizer.save_pretrained(folder)
        state = self.optimizer.state_dict()
        save_optimizer(state["state"].items(), state["param_groups"], folder, {"pairs": self.pairs})

    def load(self, folder: Path) -> None:
        """Read what :meth:`save` wrote.

        Raises:
            CheckpointError: the folder's weights or optimizer state cannot be read.
        """
        load_weights(self.verifier.model, None, folder)
        state, record = read_optimizer(folder)
        self.optimizer.load_state_dict({"state": state, "param_groups": record["groups"]})
        self.pairs = [(right, wrong) for right, wrong in record["pairs"]]
