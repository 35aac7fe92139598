"""How a verifier reads a chat. Imports no torch.

Training, scoring in a run and the server all call :func:`encode`, so that a verifier is used as it was trained.
"""

from collections.abc import Iterable

from maporl.errors import UserError
from maporl.types import Message, Utterance
from trl_ext.chat.encoding import Tokenizer, encode_chat

CHARACTERS_PER_TOKEN = 32
"""A chat of more characters for each token that the verifier reads is too long without being tokenised.

English has about 4 characters a token, and indented code has seldom more than 10. Tokenising a chat of megabytes takes
seconds and hundreds of times its memory.
"""


class TooLong(UserError, ValueError):
    """A chat has more tokens than the verifier reads."""


def chat_of(question: str, answer: str) -> list[Message]:
    """The chat that a verifier reads: a question and one answer to it."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def joint_text(said: Iterable[Utterance]) -> str:
    """The answer that a verifier of whole dialogues reads: everything that was said, in order, with names."""
    return "\n\n".join(f"{u.role or u.agent}: {u.words()}" for u in said)


def encode(tokenizer: Tokenizer, chat: list[Message], longest: int | None = None) -> list[int]:
    """The token ids of a whole chat as the template writes it, without an opening for a next answer.

    The score is read at the last id. A chat of more than ``longest`` tokens is not cut, because half an answer is
    another answer.

    Raises:
        TooLong: the chat has more than ``longest`` tokens, or :data:`CHARACTERS_PER_TOKEN` times as many characters.
    """
    characters = sum(len(message["content"]) for message in chat)
    if longest is not None and characters > longest * CHARACTERS_PER_TOKEN:
        raise TooLong(
            f"the chat has {characters} characters and the verifier reads at most {longest} tokens, for which at most "
            f"{longest * CHARACTERS_PER_TOKEN} characters are taken"
        )
    ids = encode_chat(tokenizer, chat)
    if longest is not None and len(ids) > longest:
        raise TooLong(f"the chat has {len(ids)} tokens and the verifier reads at most {longest}")
    return ids


def answer_start(tokenizer: Tokenizer, chat: list[Message]) -> int:
    """The index of the first token of the last message in :func:`encode`.

    It follows the longest prefix that the whole chat shares with the opening of its last message.
    """
    whole = encode(tokenizer, chat)
    opening = encode_chat(tokenizer, chat[:-1], generate=True)
    start = 0
    for a, b in zip(whole, opening, strict=False):
        if a != b:
            break
        start += 1
    return min(start, len(whole) - 1)
