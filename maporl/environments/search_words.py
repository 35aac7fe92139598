"""The words of a text that a search looks for, in any script. Imports no torch.

Scripts that write words without spaces between them, such as Chinese, Japanese and Thai, are read by their characters
and by pairs of neighbours, as Lucene's analyser for them does. Korean is too, because its particles are joined to
words.
"""

import unicodedata
from collections.abc import Callable, Container
from itertools import pairwise

import regex

_UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Hangul}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}ー"
_RUN = regex.compile(
    rf"([{_UNSPACED}][{_UNSPACED}\p{{M}}]*)|[[\p{{L}}\p{{N}}_]--[{_UNSPACED}]][[\p{{L}}\p{{M}}\p{{N}}_]--[{_UNSPACED}]]*",
    regex.V1,
)
"""A run of a script without spaces, or else a word."""
_CHARACTER = regex.compile(r"\X")
_LETTER = regex.compile(r"(?<=\w )A\b")
"""The letter in "vitamin A". Elsewhere ``a`` is an article."""
_ENDING = regex.compile(r"(?<=\w)['\u2019]\w\b")
"""What follows the apostrophe in ``Emma's`` and ``don't``."""
COMMON = frozenset({
    "a", "an", "and", "are", "as", "at", "be", "but", "by", "for", "if", "in", "into", "is",
    "it", "no", "not", "of", "on", "or", "such", "that", "the", "their", "then", "there", "these", "they",
    "this", "to", "was", "will", "with",
})  # fmt: skip
"""English words that nobody looks for: those that Lucene leaves out."""


def indexed_words(text: str) -> list[str]:
    """Return the words by which a passage is found, in their order.

    Upper and lower case, and forms of Unicode that mean the same, give the same words. Of a run without spaces these
    are all characters and all pairs.

    >>> indexed_words("The Caf\\u00e9's vitamin C"), indexed_words("\\u732b\\u304c\\u597d\\u304d")
    (['café', 'vitamin', 'c'], ['猫', 'が', '好', 'き', '猫が', 'が好', '好き'])
    """
    return _words(text, lambda characters, pairs: characters + pairs)


def wanted_words(query: str, known: Container[str]) -> list[str]:
    """Return those words of a query that an index knows.

    A run without spaces is looked for by its pairs, and by its characters only where no pair is known.

    >>> wanted_words("\\u597d\\u304d Vitamin D", {"好", "き", "好き", "vitamin"})
    ['好き', 'vitamin']
    """

    def wanted(characters: list[str], pairs: list[str]) -> list[str]:
        return [pair for pair in pairs if pair in known] or characters

    return [word for word in _words(query, wanted) if word in known]


def _words(text: str, of_run: Callable[[list[str], list[str]], list[str]]) -> list[str]:
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text.replace("\xad", ""))  # without soft hyphens
    text = _ENDING.sub(" ", text)
    words: list[str] = []
    for match in _RUN.finditer(text):
        word = match[0].casefold()
        if match[1] is not None:
            characters = _CHARACTER.findall(word)
            words += of_run(characters, [one + other for one, other in pairwise(characters)])
        elif word not in COMMON or _LETTER.match(text, match.start()):
            words.append(word if word.isascii() else unicodedata.normalize("NFKC", word))
    return words
