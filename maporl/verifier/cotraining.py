"""A verifier that is trained while the agents are, on answers that a rule labels (Cooper, arXiv 2508.05613).

Data flow: an update's graded answers -> for each question pairs of a right and a wrong answer -> every k updates, steps
on ``-log sigmoid(s+ - s-)`` over the gathered pairs, where s is the verifier's output before temperature and sigmoid.
In Cooper an assistant rewrites a right answer into a wrong one; here the agents wrote both. Prover-verifier games
(arXiv 2407.13692) train it from its first weights each time, on the pairs of all rounds. Decoupled ones (arXiv
2602.23248) train it on single answers, drawn from a mixture of all rounds, by the cross-entropy of its score and
whether the answer is right.
"""

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from maporl.tasks.base import Task
from maporl.types import Dialogue
from maporl.verifier.encoding import TooLong, chat_of, encode
from maporl.verifier.model import Verifier, last_outputs
from maporl.verifier.section import VerifierSection
from trl_ext.learning.policy import load_weights
from trl_ext.process import distributed
from trl_ext.sharding.holder import Holder
from trl_ext.sharding.master_weights import MasterAdamW
from trl_ext.sharding.optimizer_files import load_optimizer, save_optimizer

Pair = tuple[list[int] | None, list[int] | None]
"""The token ids of a right and of a wrong answer to a question.

If it learns from single answers, one of them is None.
"""


def pair_loss(right: Tensor, wrong: Tensor) -> Tensor:
    """Mean of ``-log sigmoid(right - wrong)`` over pairs [N], nats (Cooper, equation 4).

    >>> round(pair_loss(torch.tensor([2.0]), torch.tensor([-0.5])).item(), 4)
    0.0789
    """
    return -logsigmoid(right - wrong).mean()


def answer_loss(outputs: Tensor, right: Tensor) -> Tensor:
    """Mean cross-entropy of ``sigmoid(outputs)`` [N] and whether answers are ``right`` [N], 1 or 0, nats (arXiv
    2602.23248, section 2.3).

    >>> round(answer_loss(torch.tensor([2.0, -0.5]), torch.tensor([1.0, 0.0])).item(), 4)
    0.3005
    """
    return binary_cross_entropy_with_logits(outputs, right.to(outputs.dtype))


def mixture(rounds: Sequence[int], growth: float) -> list[float]:
    """Return how often each of several examples is to be drawn, if each of their ``rounds`` weighs ``growth`` times the
    one before.

    >>> [round(share, 4) for share in mixture([0, 0, 1], 2.0)]  # a third is from round 0, which has two
    [0.1667, 0.1667, 0.6667]
    """
    sizes = Counter(rounds)
    newest = max(sizes)
    weights = [growth ** (r - newest) / sizes[r] for r in rounds]
    return [weight / sum(weights) for weight in weights]


class CoTraining:
    """Trains all weights of ``verifier`` in place, as its ``section`` says."""

    def __init__(self, verifier: Verifier, section: VerifierSection):
        self.verifier, self.section = verifier, section
        self.pairs: list[Pair] = []
        self.rounds: list[int] = []
        """How often it had learned when each of the pairs was made."""
        self.round = 0
        """How often it has learned."""
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
        """Gather this update's pairs, of all processes, and train on all gathered ones if it is time to. Returns
        numbers to log.

        One process trains, and sends the weights to the others. Each process scores with its own copy, and copies that
        were trained apart would drift apart, because kernels do not add up in the same order everywhere.
        """
        gathered = distributed.all_gather_lists(self._pairs_of(dialogues, task))
        self.pairs, self.new = self.pairs + gathered, self.new + len(gathered)
        self.rounds = self.rounds + [self.round] * len(gathered)
        due = update % self.section.learn_every == 0 or (update == 1 and self.verifier.begins)
        if not due or not self.new:
            return {}
        pairs, rounds, self.new = self.pairs, self.rounds, 0
        if self.section.learn_from == "new":
            self.pairs, self.rounds = [], []
        loss = distributed.on_main(lambda: self._train(pairs, rounds))
        distributed.broadcast_weights(self.verifier.model.state_dict().values())
        self.round += 1
        one = "pair" if self.section.loss == "pairs" else "answer"
        return {f"verifier/{one}_loss": loss, f"verifier/{one}s": float(len(pairs))}

    def _train(self, pairs: list[Pair], rounds: list[int]) -> float:
        """Take a step for each batch of pairs in each pass. Return the mean loss."""
        losses = []
        if self.first is not None:
            self.verifier.model.load_state_dict(self.first)
            self.optimizer = self._optimizer()
        size = self.verifier.batch_size
        for epoch in range(self.section.epochs):
            passed = self._drawn(pairs, rounds, epoch)
            for start in range(0, len(passed), size):
                loss = self._loss(passed[start : start + size])
                self.optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.verifier.model.parameters(), 1.0)
                self.optimizer.step()
                losses.append(loss.item())
        return sum(losses) / len(losses)

    def _drawn(self, pairs: list[Pair], rounds: list[int], epoch: int) -> list[Pair]:
        """Return what a pass reads: all pairs in order, or as many drawn from a mixture of rounds."""
        if self.section.growth == 1:
            return pairs
        draws = random.Random(f"round {self.round}, epoch {epoch}")
        return draws.choices(pairs, mixture(rounds, self.section.growth), k=len(pairs))

    def _loss(self, pairs: list[Pair]) -> Tensor:
        rights = [right for right, _ in pairs if right is not None]
        wrongs = [wrong for _, wrong in pairs if wrong is not None]
        outputs = last_outputs(self.verifier.model, [*rights, *wrongs])
        if self.section.loss == "pairs":
            loss = pair_loss(*outputs.chunk(2))
        else:
            loss = answer_loss(outputs, (torch.arange(len(outputs)) < len(rights)).to(outputs.device))
        loss = loss + self.section.output_penalty * outputs.square().mean()
        return loss + self.section.score_penalty * outputs.sigmoid().square().mean()

    def _pairs_of(self, dialogues: Iterable[Dialogue], task: Task) -> list[Pair]:
        questions: dict[tuple[str, str], dict[bool, list[list[int]]]] = {}
        alone = self.section.loss == "answers"
        for dialogue in dialogues:
            for utterance in dialogue.answers():
                if self.section.authors and utterance.agent not in self.section.authors:
                    continue
                correct = utterance.grade.correct if utterance.grade else None
                asked = dialogue.asked(utterance)
                sides = questions.setdefault((asked.id, asked.question), {})
                if correct is None or (self.section.pairs == "first" and not alone and correct in sides):
                    continue
                chat = chat_of(task.question(asked), utterance.words())
                try:
                    ids = encode(self.verifier.tokenizer, chat, self.verifier.longest)
                except TooLong:
                    continue
                sides.setdefault(correct, []).append(ids)
        if alone:
            return [
                (ids, None) if correct else (None, ids)
                for sides in questions.values()
                for correct, answers in sides.items()
                for ids in answers
            ]
        return [pair for sides in questions.values() for pair in product(sides.get(True, ()), sides.get(False, ()))]

    def _holder(self) -> Holder:
        """Return what holds the verifier with its optimizer, for files."""
        model = self.verifier.model
        holder = Holder({"verifier": model}, None, list(model.parameters()))
        holder.attach(self.optimizer)
        return holder

    def save(self, folder: Path) -> None:
        """Write the verifier, and what is needed to go on training it, into ``folder``."""
        self.verifier.model.save_pretrained(folder)
        self.verifier.tokenizer.save_pretrained(folder)
        more = {"pairs": self.pairs, "rounds": self.rounds, "round": self.round, "new": self.new}
        save_optimizer(self._holder(), folder, **more)

    def load(self, folder: Path) -> None:
        """Read what :meth:`save` wrote.

        Raises:
            CheckpointError: the folder's weights or optimizer state cannot be read.
        """
        load_weights(self.verifier.model, None, folder)
        record = load_optimizer(self._holder(), folder)
        self.pairs = [(right, wrong) for right, wrong in record["pairs"]]
        self.new, self.rounds, self.round = record["new"], record["rounds"], record["round"]
