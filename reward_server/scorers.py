"""What scores a chat: a trained verifier, or a task's grader behind the same interface."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from jinja2 import TemplateError

from maporl.rewards.verifier.encoding import TooLong, encode
from maporl.rewards.verifier.model import Verifier
from maporl.tasks.base import Task
from maporl.types import Example, Message
from reward_server.schemas import ItemError, ModelInfo


@dataclass(frozen=True)
class Prepared:
    """A chat ready to score. ``length``: tokens, or what stands for them; rows of one length make the best batches."""

    length: int
    payload: Any


class Scorer(Protocol):
    """What the server needs of whatever scores."""

    batch_tokens: int
    """What suits the device, unless the options say otherwise."""

    @property
    def info(self) -> ModelInfo:
        """What scores."""
        ...

    def prepare(self, chat: list[Message], reference: str | None) -> Prepared | ItemError:
        """Everything that can be done for one chat alone, or why it cannot be scored."""
        ...

    def score(self, payloads: Sequence[Any]) -> list[float | ItemError]:
        """Scores in [0, 1] of one batch."""
        ...


class VerifierScorer:
    """A trained verifier on one device."""

    def __init__(self, verifier: Verifier, longest: int | None = None):
        limits = [limit for limit in (verifier.longest, longest) if limit is not None]
        self.verifier = verifier
        self.longest = min(limits, default=None)
        self.batch_tokens = 16384 if verifier.model.device.type == "cuda" else 1024  # beyond it, no faster there

    @cached_property
    def info(self) -> ModelInfo:
        """Computed for the copy that is asked, because it reads all weights."""
        verifier = self.verifier
        return ModelInfo(
            name=verifier.name, kind="verifier", sha256=verifier.digest(), temperature=verifier.temperature,
            longest_chat_tokens=self.longest, calibration=(verifier.record or {}).get("metrics"),
        )  # fmt: skip

    def prepare(self, chat: list[Message], reference: str | None) -> Prepared | ItemError:
        """Token ids of the chat; ``reference`` is of no use to a verifier."""
        try:
            ids = encode(self.verifier.tokenizer, chat, self.longest)
        except TooLong as error:
            return ItemError(code="too_long", message=str(error))
        except (TemplateError, ValueError) as error:
            return ItemError(code="cannot_be_rendered", message=f"the model's chat template refuses it: {error}")
        if not ids:
            return ItemError(code="cannot_be_rendered", message="the model's chat template makes nothing of it")
        return Prepared(len(ids), ids)

    def score(self, payloads: Sequence[Any]) -> list[float | ItemError]:
        """One forward."""
        return list(self.verifier.score_ids(list(payloads), batch_size=len(payloads)))


class LabelScorer:
    """A task's grader: 1.0 for a right answer, 0.0 for a wrong one. Every chat needs a reference."""

    def __init__(self, task: Task, name: str, longest: int = 100_000):
        self.task, self.longest, self.batch_tokens = task, longest, 100_000
        self.info = ModelInfo(name=f"labels of {name}", kind="labels")

    def prepare(self, chat: list[Message], reference: str | None) -> Prepared | ItemError:
        """The answer and the reference to compare it with."""
        if reference is None:
            return ItemError(code="no_reference", message="labels are given by comparison; send 'references'")
        answer = chat[-1]["content"]
        if len(answer) > self.longest:
            return ItemError(
                code="too_long", message=f"the answer has {len(answer)} characters; at most {self.longest} are graded"
            )
        return Prepared(max(1, len(answer) // 4), (Example("request", chat[0]["content"], reference), answer))

    def score(self, payloads: Sequence[Any]) -> list[float | ItemError]:
        """Grades as numbers."""
        examples, answers = zip(*payloads, strict=True)
        grades = self.task.grade_many(examples, answers)
        return [
            ItemError(code="cannot_be_graded", message=grade.reason) if grade.correct is None else float(grade.correct)
            for grade in grades
        ]
