"""The contract of a builder, which makes the rows of a data set from scored dialogues. No torch.

The value of an utterance is its credit, so reward rules say what a builder reads: with ``tree_mean``, it is the mean
over all dialogues that share the utterance. An utterance that dialogues share is one row. Utterances that may not be
trained on, and those of engines without token ids, make no rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from typing import ClassVar, Literal

from maporl.config.schema import Config
from maporl.errors import Fault
from maporl.loops.rows import AnyRow, Row
from maporl.loops.section import RowsStage
from maporl.types import Dialogue, Utterance


class Builder(ABC):
    """Makes rows of scored dialogues. It depends on nothing else, so the same dialogues give the same rows, in whatever
    order they come (:func:`in_order`).

    Attributes:
        makes: single rows, pairs, rows that are called good or bad, comparisons of whole dialogues, pairs of
            trajectories, or states in which candidates are sampled and ranked.
    """

    makes: ClassVar[Literal["single rows", "pairs", "signed rows", "comparisons", "trajectory pairs", "states"]] = (
        "single rows"
    )

    @abstractmethod
    def __call__(self, dialogues: Sequence[Dialogue], roles: Collection[str] = ()) -> Sequence[AnyRow]:
        """Return the rows of what was said in ``roles``, or in all roles if ``roles`` is empty."""

    def check(self, config: Config, section: RowsStage, before: Sequence[str], where: str) -> Iterator[Fault]:
        """Yield why the rows cannot be made or trained on in the run of ``config``. By default they can.

        Args:
            config: the configuration of the run.
            section: the stage of the builder.
            before: what trains the stages before it (``RowsStage.train``).
            where: the key of the stage, with which faults begin.
        """
        return iter(())


def in_order(dialogues: Sequence[Dialogue]) -> list[Dialogue]:
    """Return the dialogues in the order of their numbers, by which builders choose between equals."""
    return sorted(dialogues, key=lambda dialogue: (dialogue.prompt, dialogue.rollout))


def worth(dialogue: Dialogue) -> float | None:
    """Return the mean of the values of a dialogue's utterances, or None if none has a value."""
    values = [u.rewards["credit"] for u in dialogue.utterances if "credit" in u.rewards]
    return sum(values) / len(values) if values else None


def said(
    dialogues: Sequence[Dialogue], roles: Collection[str] = (), turn: int | None = None
) -> list[tuple[Row, tuple]]:
    """Return a row for every utterance that was said in ``roles``, with the identities of all words before it.

    With ``turn``, only for what was said in this turn of its agent.
    """
    rows: dict[tuple, tuple[Row, tuple]] = {}
    for dialogue in in_order(dialogues):
        for u in dialogue.utterances:
            role = u.role or u.agent
            if not u.trainable or not u.response_ids or "credit" not in u.rewards or (roles and role not in roles):
                continue
            if turn is not None and u.turn != turn:
                continue
            before = (dialogue.prompt, *(_identity(dialogue, v) for v in dialogue.utterances if v.order < u.order))
            key = (dialogue.prompt, *_identity(dialogue, u))
            rows.setdefault(key, (_row(dialogue, u, role), before))
    return list(rows.values())


def _row(dialogue: Dialogue, u: Utterance, role: str) -> Row:
    place = (dialogue.prompt, dialogue.rollout, u.id)
    ids = u.prompt_ids, u.response_ids
    return Row(u.policy, u.agent, role, dialogue.example.id, *ids, u.rewards["credit"], place, not u.stop.whole)


def _identity(dialogue: Dialogue, u: Utterance) -> tuple:
    return (None, u.sample) if u.sample is not None else (dialogue.rollout, u.id)
