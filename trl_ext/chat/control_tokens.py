"""Encode the words of people, data sets and models as words: they never become control tokens.

A tokenizer turns the spelling of an added token, such as ``<|im_end|>``, into that token wherever it stands. A question
or another agent's answer could so end its own message and begin another one. Here each such spelling is cut into two
pieces that are encoded apart. The text stays the same to the letter. Text without such a spelling is not touched, so
its token ids are what they would be anyway.
"""

import re
import secrets
from collections.abc import Callable
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

from trl_ext.errors import UserError

Tokenizer = Any  # PreTrainedTokenizerBase; kept loose so that this module imports without transformers

MOST_ROUNDS = 8
"""How often a text may be normalized and cut. One round is enough for normalizers that change nothing twice."""


class ControlTokenError(UserError, ValueError):
    """A tokenizer makes a control token of ordinary text."""


class ControlTokens:
    """Finds the spellings of control tokens in a text.

    Args:
        words: the spellings.
        normalize: what the tokenizer does to a text before its model reads it, or None. It may turn other characters
            into a spelling, as NFKC does with full-width letters.
    """

    def __init__(self, words: set[str], normalize: Callable[[str], str] | None):
        self._normalize = normalize
        if normalize is not None:
            words = words | {normalize(word).strip("\u2581 ") for word in words}
        self._words = frozenset(words - {""})
        self._lengths = sorted({len(word) for word in self._words})
        self._longest = max(self._lengths, default=0)
        beginnings = sorted({re.escape(word[:4]) for word in self._words})
        self._beginning = re.compile("|".join(beginnings) or "(?!)")

    def pieces(self, text: str) -> list[str]:
        """Return the pieces of ``text``, none of which spells a control token. Joined they are the text.

        Two kinds of text change. A single character that is a control token becomes U+FFFD. A text that only the
        tokenizer's normalizer turns into a control token is returned as the normalizer leaves it.

        Raises:
            ControlTokenError: the normalizer makes a control token even of what it has already normalized.
        """
        pieces = self._cut(text)
        if self._normalize is None:
            return pieces
        for _ in range(MOST_ROUNDS):
            normal = [self._normalize(piece) for piece in pieces]
            if not any(self._places(piece) for piece in normal):
                return pieces
            pieces = [cut for piece in normal for cut in self._cut(piece)]
        raise ControlTokenError(f"the tokenizer's normalizer makes a control token of {text!r:.80}; use another one")

    def marked(self, messages: list[dict[str, Any]], mark: str) -> list[dict[str, Any]]:
        """Return ``messages`` with ``mark`` at every place where a control token must be cut."""
        marked = [self._marked(message, mark) for message in messages]
        before = ""  # a template may write messages without anything between them, so they may spell a token together
        for message in marked:
            if isinstance(message.get("content"), str):
                seam = before + message["content"][: self._longest]
                seams = [seam] if self._normalize is None else [seam, self._normalize(seam)]
                if before and any(map(self._places, seams)):
                    message["content"] = mark + message["content"]
                before = (before + message["content"])[-self._longest :]
        return marked

    def _marked(self, value: Any, mark: str) -> Any:
        """Return ``value`` with ``mark`` in every text in its lists and dictionaries."""
        if isinstance(value, str):
            return mark.join(self.pieces(value))
        if isinstance(value, dict):  # roles and types of parts are words that templates compare with their own
            return {
                name: part if name in ("role", "type") and str(part).isalpha() else self._marked(part, mark)
                for name, part in value.items()
            }
        if isinstance(value, list):
            return [self._marked(part, mark) for part in value]
        return value

    def _places(self, text: str) -> list[int]:
        """Return where the spellings begin, overlapping ones included."""
        places, match = [], self._beginning.search(text)
        while match:
            start = match.start()
            if any(text[start : start + length] in self._words for length in self._lengths):
                places.append(start)
            match = self._beginning.search(text, start + 1)
        return places

    def _cut(self, text: str) -> list[str]:
        places = self._places(text)
        if not places:
            return [text]
        cuts = [0, *(place + 1 for place in places), len(text)]
        pieces = [text[start:end] for start, end in pairwise(cuts)]
        return [p[:-1] + "\ufffd" if p[-1:] in self._words else p for p in pieces]


_known: WeakKeyDictionary = WeakKeyDictionary()


def control_tokens(tokenizer: Tokenizer, special: bool = False) -> ControlTokens:
    """Return the control tokens of ``tokenizer``: its added tokens, except runs of white space.

    Many tokenizers have added tokens for runs of spaces or line ends, which are ordinary text. ``special`` leaves out
    the added tokens that the tokenizer does not call special, such as ``<think>`` in many models.
    """
    state = (len(tokenizer), *tokenizer.all_special_tokens)
    cache = _known.setdefault(tokenizer, {})
    if cache.get("state") != state:
        cache.clear()
        cache["state"] = state
    tokens = cache.get(special)
    if tokens is None:
        added = [t for t in tokenizer.added_tokens_decoder.values() if t.special or not special]
        words = {t.content for t in added if t.content.replace("\u2581", " ").strip()}
        normalizer = tokenizer.backend_tokenizer.normalizer if tokenizer.is_fast else None
        tokens = cache[special] = ControlTokens(words, None if normalizer is None else normalizer.normalize_str)
    return tokens


def encode_words(tokenizer: Tokenizer, text: str, special: bool = False) -> list[int]:
    """Return the token ids of a part of a text, in which nothing becomes a control token.

    See :func:`control_tokens`.
    """
    return encode_pieces(tokenizer, control_tokens(tokenizer, special).pieces(text))


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of a whole text, which begins and ends with the tokens that the tokenizer puts there.

    Nothing in ``text`` itself becomes a control token.
    """
    before, after = special_ends(tokenizer)
    return [*before, *encode_words(tokenizer, text), *after]


def special_ends(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the special tokens that the tokenizer puts before a text, such as BOS, and behind it, such as EOS."""
    plain, whole = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
    start = next((n for n in range(len(whole)) if plain and whole[n : n + len(plain)] == plain), len(whole))
    return whole[:start], whole[start + len(plain) :]


def encode_pieces(tokenizer: Tokenizer, pieces: list[str]) -> list[int]:
    """Return the token ids of ``pieces``, each encoded alone."""
    return [i for piece in pieces for i in tokenizer.encode(piece, add_special_tokens=False)]


_PRIVATE_USE = str.maketrans("0123456789abcdef", "".join(map(chr, range(0xE000, 0xE010))))


def new_mark() -> str:
    """Return a random run of private-use characters, which no text can contain except by being told it."""
    return secrets.token_hex(16).translate(_PRIVATE_USE)
