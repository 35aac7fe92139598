"""The requests and answers of the server, version 1. Imports no torch."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

MOST_CHATS = 1024
"""The most chats in one request."""
MOST_MESSAGES = 256
"""The most messages in one chat."""
MOST_MESSAGES_IN_ALL = 16_384
"""The most messages in one request."""
MOST_KEYS = 16
"""The most keys of an object. The error of each unknown key would take a kilobyte."""


class Strict(BaseModel):
    """A model that refuses unknown keys and values of another type."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _few_keys(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MOST_KEYS:
            raise PydanticCustomError(
                "too_many_keys", "expected at most {most} keys, got {got}", {"most": MOST_KEYS, "got": len(value)}
            )
        return value


def _is_text(value: str) -> str:
    """Check that ``value`` can be encoded. JSON may hold half of a surrogate pair, but no tokenizer reads it."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("no_text", "expected valid Unicode, got half of a surrogate pair") from None
    return value


Text = Annotated[str, AfterValidator(_is_text)]


class Message(Strict):
    """One message of a chat."""

    role: Literal["system", "user", "assistant"]
    content: Text


def _ends_with_an_answer(chat: list[Message]) -> list[Message]:
    if chat[-1].role != "assistant":
        raise PydanticCustomError("no_answer", "the last message is what is scored; expected role 'assistant'")
    return chat


def _not_too_many(chats: Any) -> Any:
    if isinstance(chats, list) and len(chats) > MOST_CHATS:
        raise PydanticCustomError(
            "too_many_chats", "expected at most {most} chats, got {got}; send several requests", {"most": MOST_CHATS, "got": len(chats)}  # noqa: E501
        )  # fmt: skip
    lengths = [len(chat) for chat in chats if isinstance(chat, list)] if isinstance(chats, list) else []
    messages = sum(min(length, MOST_MESSAGES) for length in lengths)  # one chat that is too long is named as such
    if messages > MOST_MESSAGES_IN_ALL:
        raise PydanticCustomError(
            "too_many_messages", "expected at most {most} messages, got {got}; send several requests",
            {"most": MOST_MESSAGES_IN_ALL, "got": messages},
        )  # fmt: skip
    return chats


Chat = Annotated[
    list[Message], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True), AfterValidator(_ends_with_an_answer)
]
Chats = Annotated[
    list[Chat],
    Field(min_length=1, fail_fast=True, json_schema_extra={"maxItems": MOST_CHATS}),
    BeforeValidator(_not_too_many),
]
RequestId = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9._:-]+$")]


class ScoreRequest(Strict):
    """Chats to score. A request that is sent again with the same ``request_id`` is not scored again."""

    request_id: RequestId | None = None
    chats: Chats
    references: Annotated[list[Text | None], Field(max_length=MOST_CHATS, fail_fast=True)] | None = Field(
        default=None, description="A right answer for each chat, for scorers that compare with one."
    )


class ItemError(BaseModel):
    """Why one chat has no score."""

    code: Literal["too_long", "cannot_be_rendered", "no_reference", "cannot_be_graded", "scoring_failed"]
    message: str


class Item(BaseModel):
    """The outcome for one chat: a ``score`` in [0, 1], or an ``error``."""

    score: float | None = None
    error: ItemError | None = None


class ScoreResponse(BaseModel):
    """One result for each chat, in order. ``model`` and ``sha256`` are those of :class:`ModelInfo`, so that a client
    sees by each answer which verifier it is from."""

    request_id: str | None
    model: str
    sha256: str
    results: list[Item]


class PredictRequest(Strict):
    """The request that MAPoRL's own server took: a user's and an assistant's message for each item."""

    query_responses: Chats


class PredictResponse(BaseModel):
    """The answer that MAPoRL's own server gave."""

    result: list[float]


class ModelInfo(BaseModel):
    """The verifier or grader that scores here.

    ``sha256`` is the digest of what decides its scores: of a verifier's weights, temperature, chat template and
    vocabulary, or of a grader's name. ``calibration`` holds the measures that were taken after training.
    """

    name: str
    kind: Literal["verifier", "labels"]
    sha256: str
    temperature: float | None = None
    longest_chat_tokens: int | None = None
    calibration: dict[str, Any] | None = None


class Status(BaseModel):
    """Whether the server is up."""

    status: Literal["ok", "ready", "draining"]


class Error(BaseModel):
    """What went wrong; ``field`` is the path of the offending value in the request."""

    code: str
    message: str
    field: str | None = None


class ErrorBody(BaseModel):
    """The body of every answer that is not a success."""

    error: Error
