"""Stop strings: a completion ends once its text contains one of them.

The tokens of the string belong to the completion. What was sampled is what is trained on, so a token that completes a
string is kept whole, even if its text goes on after the string.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from trl_ext.chat.encoding import Tokenizer


@dataclass(frozen=True)
class StopStrings:
    """Finds ``strings`` in the text of token ids, as ``tokenizer`` decodes them without special tokens."""

    tokenizer: Tokenizer
    strings: tuple[str, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer, strings: Sequence[str] | None) -> "StopStrings | None":
        """Return the stop strings of an option, or None if it is empty. They are made once."""
        return _made(tokenizer, tuple(strings)) if strings else None

    def end(self, ids: Sequence[int]) -> bool:
        """Return whether the last token of ``ids`` is the first to complete a string.

        Only the last tokens are decoded, because a sampler asks this after every token.
        """
        last = self._last(ids)
        return self._said(last) and not self._said(last[:-1])

    def length(self, ids: Sequence[int]) -> int | None:
        """Return the smallest number of first tokens whose text contains a string, or None if no text does."""
        if not self._said(ids):
            return None
        return 1 + bisect_left(range(1, len(ids)), True, key=lambda count: self._said(ids[:count]))

    def _said(self, ids: Sequence[int]) -> bool:
        text = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        return any(string in text for string in self.strings)

    @cached_property
    def _special(self) -> frozenset[int]:
        added = self.tokenizer.added_tokens_decoder
        return frozenset([*self.tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)])

    @cached_property
    def _most(self) -> int:
        """The most tokens that a string is in, if each has a byte of it, and some more."""
        # decoders treat a first token differently, and may begin within a character
        return 8 + max(len(string.encode("utf-8", "surrogatepass")) for string in self.strings)

    def _last(self, ids: Sequence[int]) -> list[int]:
        last: list[int] = []
        for token in reversed(ids):
            if token not in self._special:
                last.append(token)
            if len(last) == self._most:
                break
        return last[::-1]


@lru_cache(maxsize=64)
def _made(tokenizer: Tokenizer, strings: tuple[str, ...]) -> StopStrings:
    return StopStrings(tokenizer, strings)


def ended(ids: Sequence[int], stop_ids: frozenset[int], stop_strings: StopStrings | None) -> bool:
    """Return whether a completion ended by itself: with a stop id, or with a stop string."""
    return ids[-1] in stop_ids or (stop_strings is not None and stop_strings.end(ids))
