"""Grammars that completions keep to: which tokens may come next, by the package ``llguidance``.

A mask has one bit for each token of the vocabulary, 32 in each int32. Sampling asks for the mask of each next token.
Training replays a completion through its grammar, and so gets the masks of all of its tokens again, which are not kept.
"""

import os
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from trl_ext.chat.control_tokens import Tokenizer, encode_text
from trl_ext.chat.templates import fault_of_grammar
from trl_ext.errors import UserError
from trl_ext.ppo.options import Grammar

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

MOST_COMPILED = 256
"""Most compiled grammars that are kept for one tokenizer, those that were used last."""


class GrammarError(UserError, ValueError):
    """A grammar cannot be read, or takes too much time or memory, or a tokenizer's tokens cannot be read as text."""


class Grammars:
    """The grammars over the tokens of one model.

    Args:
        tokenizer: its tokenizer.
        size: the number of its logits, V.
    """

    def __init__(self, tokenizer: Tokenizer, size: int):
        self.tokenizer, self.size = tokenizer, size
        self._tokens: dict[tuple[int, ...], LLTokenizer] = {}  # by what ends a completion
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()

    def matcher(self, grammar: Grammar) -> "LLMatcher":
        """Return what reads a completion of ``grammar`` token by token, at its beginning.

        Raises:
            GrammarError: the grammar cannot be compiled, or not with this tokenizer.
        """
        if grammar not in self._compiled:
            from llguidance import LLMatcher

            if why := fault_of_grammar(grammar.text):
                raise GrammarError(why)
            made = LLMatcher(self._tokenizer(grammar.stop_ids), grammar.text, log_level=0)
            if made.is_error():
                raise GrammarError(made.get_error().partition("\n<state>")[0])
            self._compiled[grammar] = made
            while len(self._compiled) > MOST_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return self._compiled[grammar].deep_copy()

    def replay(self, grammars: Sequence[Grammar | None], completions: Sequence[Sequence[int]]) -> Tensor:
        """Return the masks of all M tokens of some completions, one after the other, [M, ceil(V / 32)] int32.

        Raises:
            GrammarError: a completion has a token that its grammar does not allow.
        """
        lengths = [len(ids) for ids in completions]
        # what is not computed, behind a token that is not allowed, allows nothing
        masks = torch.zeros(sum(lengths), -(-self.size // 32), dtype=torch.int32)
        first, asked, start = [], [], 0
        for grammar, ids in zip(grammars, completions, strict=True):
            if grammar is None:
                masks[start : start + len(ids)] = -1
            else:
                first.append((self.matcher(grammar), start))
                if len(ids) > 1:
                    asked.append((*first.pop(), list(ids[:-1])))
            start += len(ids)
        memory = masks.data_ptr(), 4 * masks.shape[1], len(masks)
        if first:
            _executor().unsafe_compute_mask_ptr(first, *memory)
        if asked:
            _executor().unsafe_compute_mask_ptr_with_draft_token(asked, *memory)
        said = torch.tensor([token for ids in completions for token in ids])
        allowed = (masks[torch.arange(len(said)), said // 32] >> (said % 32).int()) & 1
        if not bool(allowed.all()):
            token = int(said[allowed == 0][0])
            raise GrammarError(
                f"token {token} ({self.tokenizer.decode([token])!r}) of a completion is not allowed by the grammar by "
                "which it was asked for; whoever sampled it did not keep to the grammar"
            )
        return masks

    def _tokenizer(self, stop_ids: tuple[int, ...]) -> "LLTokenizer":
        if stop_ids not in self._tokens:
            from llguidance import LLTokenizer
            from llguidance.hf import from_tokenizer

            if not stop_ids:
                raise GrammarError(
                    "a completion with a grammar ends where the grammar does, with a stop token, and this policy has "
                    "none; remove ppo.stop_token: none"
                )
            ends = list(stop_ids)
            try:
                self._tokens[stop_ids] = from_tokenizer(self.tokenizer, self.size, ends)
            except ValueError as error:  # its tokens are not bytes, such as those of a tiny model
                plain: Any = _Plain(self.tokenizer, ends[0], str(error))
                self._tokens[stop_ids] = LLTokenizer(plain, self.size, ends)
        return self._tokens[stop_ids]


def next_masks(matchers: Sequence["LLMatcher | None"], size: int) -> Tensor:
    """Return the mask of the next token of each completion, [B, ceil(V / 32)] int32, of a model with V logits.

    Without a matcher it allows all.
    """
    masks = torch.full((len(matchers), -(-size // 32)), -1, dtype=torch.int32)
    asked = [(matcher, row) for row, matcher in enumerate(matchers) if matcher is not None]
    _executor().unsafe_compute_mask_ptr(asked, masks.data_ptr(), 4 * masks.shape[1], len(masks))
    return masks


def forced(masks: Tensor) -> Tensor:
    """Return whether each of ``masks`` [M, W] allows one token alone, [M]."""
    # a number has one bit exactly if it is not 0 and has no bit in common with the number before it
    bits = masks != 0
    return (bits.sum(1) == 1) & ((masks & (masks - 1)) == 0).all(1)


class _Plain:
    """A tokenizer as ``llguidance`` takes one, whose tokens are texts that are written one after the other.

    Raises:
        GrammarError: its tokens are not such texts.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, eos: int, why: str):
        self.tokenizer, self.eos_token_id = tokenizer, eos
        self.special_token_ids = sorted({*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", ())})
        texts = [tokenizer.decode([token]) for token in range(len(tokenizer))]
        words = [token for token in range(len(texts)) if token not in set(self.special_token_ids)]
        together = tokenizer.decode(words, clean_up_tokenization_spaces=False)
        if together != "".join([texts[token] for token in words]) or "\N{REPLACEMENT CHARACTER}" in together:
            raise GrammarError(
                f"structured outputs cannot be had of the tokenizer {type(tokenizer).__name__}: {why}, and its tokens "
                "are not texts that are written one after the other; use a fast tokenizer of bytes"
            )
        self.tokens = [text.encode() for text in texts]

    def __call__(self, text: str) -> list[int]:
        return encode_text(self.tokenizer, text)


_GRAMMARS: "WeakKeyDictionary[Any, dict[int, Grammars]]" = WeakKeyDictionary()


def grammars_of(tokenizer: Tokenizer, size: int) -> Grammars:
    """Return the grammars over a model of ``size`` logits, which are compiled once for each tokenizer."""
    return _GRAMMARS.setdefault(tokenizer, {}).setdefault(size, Grammars(tokenizer, size))


def _executor() -> "LLExecutor":
    return _executor_of(os.getpid())


@lru_cache(maxsize=1)
def _executor_of(process: int) -> "LLExecutor":
    from llguidance import LLExecutor

    return LLExecutor()  # its threads do not live on in a fork
