"""A verifier that is trained while the agents are, on answers that a rule labels (Cooper, arXiv 2508.05613).

Data flow: an update's graded answers -> for each question pairs of a right and a wrong answer -> every k updates,
steps on ``-log sigmoid(s+ - s-)`` over the gathered pairs, where s is the verifier's output before temperature and
sigmoid. In Cooper an assistant rewrites a right answer into a wrong one; here the agents wrote both. Prover-verifier games
(arXiv 2407.13692) train it from its first weights each time, on the pairs of all rounds.
"""

from collections.abc import Iterable
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from maporl.config.schema import VerifierSection
from maporl.rewards.verifier.encoding import TooLong, chat_of, encode
from maporl.rewards.verifier.model import Verifier, last_outputs
from maporl.tasks.base import Task
from maporl.types import Dialogue
from trl_ext import distributed
from trl_ext.checkpoint import load_weights
from trl_ext.master_weights import MasterAdamW
from trl_ext.optimizer_files import read_optimizer, save_optimizer

Pair = tuple[list[int], list[int]]
"""The token ids of a right and of a wrong answer to a question."""


def pair_loss(right: Tensor, wrong: Tensor) -> Tensor:
    """Mean of ``-log sigmoid(right - wrong)`` over pairs [N], nats (Cooper, equation 4).

    >>> round(pair_loss(torch.tensor([2.0]), torch.tensor([-0.5])).item(), 4)
    0.0789
    """
    return -logsigmoid(right - wrong).mean()


class CoTraining:
    """Trains all weights of ``verifier`` in place, as its ``section`` says."""

    def __init__(self, verifier: Verifier, section: VerifierSection):
        self.verifier, self.section = verifier, section
        self.pairs: list[Pair] = []
        self.new = 0
        """How many of the pairs it has not learned from."""
        verifier.model.requires_grad_(True)
        self.first = None
        if section.restart:
            self.first = {name: value.detach().cpu().clone() for name, value in verifier.model.state_dict().items()}
        self.optimizer = self._optimizer()

    def _optimizer(self) -> MasterAdamW:
        return MasterAdamW(self.verifier.model.parameters(), lr=self.section.learning_rate, weight_decay=0.0)

    def after_update(self, update: int, dialogues: Iterable[Dialogue], task: Task) -> dict[str, float]:
        """Gather this update's pairs, of all processes, and train on all gathered ones if it is time to. Returns numbers to log.

        One process trains, and sends the weights to the others. Each process scores with its own copy, and copies that
        were trained apart would drift apart, because kernels do not add up in the same order everywhere.
        """
        found = distributed.all_gather_lists(self._pairs_of(dialogues, task))
        self.pairs, self.new = self.pairs + found, self.new + len(found)
        due = update % self.section.learn_every == 0 or (update == 1 and self.verifier.begins)
        if not due or not self.new:
            return {}
        pairs, self.new = self.pairs, 0
        if self.section.learn_from == "new":
            self.pairs = []
        loss = distributed.on_main(lambda: self._train(pairs))
        distributed.broadcast_weights(self.verifier.model.state_dict().values())
        return {"verifier/pair_loss": loss, "verifier/pairs": float(len(pairs))}

    def _train(self, pairs: list[Pair]) -> float:
        """Take a step for each batch of pairs. Return the mean loss."""
        losses = []
        if self.first is not None:
            self.verifier.model.load_state_dict(self.first)
            self.optimizer = self._optimizer()
        size = self.verifier.batch_size
        for start in range(0, len(pairs), size):
            rights, wrongs = zip(*pairs[start : start + size], strict=True)
            outputs = last_outputs(self.verifier.model, [*rights, *wrongs])
            loss = pair_loss(*outputs.chunk(2)) + self.section.output_penalty * outputs.square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.verifier.model.parameters(), 1.0)
            self.optimizer.step()
            losses.append(loss.item())
        return sum(losses) / len(losses)

    def _pairs_of(self, dialogues: Iterable[Dialogue], task: Task) -> list[Pair]:
        found: dict[tuple[str, str], dict[bool, list[list[int]]]] = {}
        for dialogue in dialogues:
            for utterance in dialogue.answers():
                correct = utterance.grade.correct if utterance.grade else None
                asked = dialogue.asked(utterance)
                sides = found.setdefault((asked.id, asked.question), {})
                if correct is None or (self.section.pairs == "first" and correct in sides):
                    continue
                chat = chat_of(task.question(asked), utterance.words())
                try:
                    ids = encode(self.verifier.tokenizer, chat, self.verifier.longest)
                except TooLong:
                    continue
                sides.setdefault(correct, []).append(ids)
        return [pair for sides in found.values() for pair in product(sides.get(True, ()), sides.get(False, ()))]

    def save(self, folder: Path) -> None:
        """Write the verifier, and what is needed to go on training it, into ``folder``."""
        self.verifier.model.save_pretrained(folder)
        self.verifier.tokenizer.save_pretrained(folder)
        state = self.optimizer.state_dict()
        record = {"pairs": self.pairs, "new": self.new}
        save_optimizer(state["state"].items(), state["param_groups"], folder, record)

    def load(self, folder: Path) -> None:
        """Read what :meth:`save` wrote.

        Raises:
            CheckpointError: the folder's weights or optimizer state cannot be read.
        """
        load_weights(self.verifier.model, None, folder)
        state, record = read_optimizer(folder)
        self.optimizer.load_state_dict({"state": state, "param_groups": record["groups"]})
        self.pairs = [(right, wrong) for right, wrong in record["pairs"]]
        self.new = record.get("new", len(self.pairs))  # earlier versions kept new pairs only
