"""How a verifier reads a chat. Training, in-process scoring and the server all call :func:`encode`. No torch."""

from maporl.types import Message
from trl_ext.chat import Tokenizer, render


class TooLong(ValueError):
    """A chat has more tokens than the verifier reads."""


def chat_of(question: str, answer: str) -> list[Message]:
    """The chat that a verifier judges: a question and one answer to it."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def encode(tokenizer: Tokenizer, chat: list[Message], longest: int | None = None) -> list[int]:
    """Ids of a whole chat, as the template writes it and without an opening for a next answer.

    The verifier's score is read at the last of them. A chat of more than ``longest`` tokens is refused, never cut:
    half an answer is another answer.
    """
    ids = tokenizer.encode(render(tokenizer, chat, generate=False), add_special_tokens=False)
    if longest is not None and len(ids) > longest:
        raise TooLong(f"the chat has {len(ids)} tokens and the verifier reads at most {longest}")
    return ids


def answer_start(tokenizer: Tokenizer, chat: list[Message]) -> int:
    """Where the last message's own tokens begin in :func:`encode`: after the longest prefix shared with its opening."""
    whole = encode(tokenizer, chat)
    opening = tokenizer.encode(render(tokenizer, chat[:-1], generate=True), add_special_tokens=False)
    start = 0
    for a, b in zip(whole, opening, strict=False):
        if a != b:
            break
        start += 1
    return min(start, len(whole) - 1)
