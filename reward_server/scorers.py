"""Scorers of chats: a trained verifier, and a task's grader behind the same interface."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from maporl.grading import LONGEST_LABEL, LONGEST_TEXT
from maporl.tasks.base import Task
from maporl.types import Example, Message
from maporl.verifier.encoding import TooLong, encode
from maporl.verifier.model import Verifier
from reward_server.schemas import ItemError, ModelInfo
from trl_ext.chat.encoding import ChatError

MOST_TOKENS = 2**17
"""The most tokens of a chat for a model that names no context."""

_BATCH_CHATS, _SHORTEST = 32, 64
"""The most chats that a grader takes at a time, and the least tokens that a chat counts for. A grader gains nothing by
larger batches, and what the client no longer waits for can be dropped between two of them only."""


@dataclass(frozen=True)
class Prepared:
    """A chat that is ready to be scored.

    ``length``: its tokens, or an estimate; equal lengths make the best batches.
    """

    length: int
    payload: Any


class Scorer(Protocol):
    """The contract of a scorer."""

    batch_tokens: int
    """The most tokens of a forward that suit the device, unless the options name another number."""

    @property
    def info(self) -> ModelInfo:
        """The description that ``GET /v1/model`` answers with."""
        ...

    def prepare(self, chat: list[Message], reference: str | None) -> Prepared | ItemError:
        """Do all the work that concerns one chat alone, or say why the chat cannot be scored."""
        ...

    def score(self, payloads: Sequence[Any]) -> list[float | ItemError]:
        """The scores in [0, 1] of one batch, in order."""
        ...


class VerifierScorer:
    """A trained verifier on one device."""

    def __init__(self, verifier: Verifier, longest: int | None = None):
        limits = [limit for limit in (verifier.longest, longest) if limit is not None]
        self.verifier = verifier
        self.longest = min(limits, default=MOST_TOKENS)
        self.batch_tokens = 1024 if verifier.model.device.type == "cpu" else 16384  # larger forwards are not faster

    @cached_property
    def info(self) -> ModelInfo:
        """Its description. It is computed when it is asked for, because the digest reads all weights."""
        verifier = self.verifier
        return ModelInfo(
            name=verifier.name, kind="verifier", sha256=verifier.digest(), temperature=verifier.temperature,
            longest_chat_tokens=self.longest, calibration=(verifier.record or {}).get("metrics"),
        )  # fmt: skip

    def prepare(self, chat: list[Message], reference: str | None) -> Prepared | ItemError:
        """The token ids of the chat. A verifier needs no ``reference``."""
        try:
            ids = encode(self.verifier.tokenizer, chat, self.longest)
        except TooLong as error:
            return ItemError(code="too_long", message=str(error))
        except ChatError as error:
            return ItemError(code="cannot_be_rendered", message=str(error))
        if not ids:
            return ItemError(code="cannot_be_rendered", message="the model's chat template makes nothing of it")
        return Prepared(len(ids), ids)

    def score(self, payloads: Sequence[Any]) -> list[float | ItemError]:
        """The verifier's scores, by one forward."""
        return list(self.verifier.score_ids(list(payloads), batch_size=len(payloads)))


class LabelScorer:
    """A task's grader. It scores a right answer 1.0 and a wrong one 0.0. Every chat needs a reference."""

    def __init__(self, task: Task, name: str):
        self.task, self.batch_tokens = task, _BATCH_CHATS * _SHORTEST
        digest = hashlib.sha256(f"labels of {name}".encode()).hexdigest()
        self.info = ModelInfo(name=f"labels of {name}", kind="labels", sha256=digest)

    def prepare(self, chat: list[Message], reference: str | None) -> Prepared | ItemError:
        """The answer, and the reference that it is compared with."""
        if reference is None:
            return ItemError(code="no_reference", message="labels are given by comparison; send 'references'")
        answer = chat[-1]["content"]
        if len(answer) > LONGEST_TEXT:
            return ItemError(
                code="too_long", message=f"the answer has {len(answer)} characters; at most {LONGEST_TEXT} are graded"
            )
        if len(reference) > LONGEST_LABEL:
            return ItemError(
                code="too_long",
                message=f"the reference has {len(reference)} characters; at most {LONGEST_LABEL} are compared",
            )
        return Prepared(max(_SHORTEST, len(answer) // 4), (Example("request", chat[0]["content"], reference), answer))

    def score(self, payloads: Sequence[Any]) -> list[float | ItemError]:
        """The grades as numbers."""
        examples, answers = zip(*payloads, strict=True)
        grades = self.task.grade_many(examples, answers)
        return [
            ItemError(code="cannot_be_graded", message=grade.reason) if grade.correct is None else float(grade.correct)
            for grade in grades
        ]
