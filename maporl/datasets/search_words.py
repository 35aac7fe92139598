"""The words of a text that a search looks for, in any script. Imports no torch.

Scripts that write words without spaces between them, such as Chinese, Japanese and Thai, are read by their characters
and by pairs of neighbours, as Lucene's analyser for them does. Korean is too, because its particles are joined to
words. Marks that a writer may leave out make no difference: the points of Arabic and Hebrew, and the accents of
Greek, whose capitals have none.
"""

import unicodedata
from collections.abc import Callable, Container
from itertools import pairwise

import regex

_UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Hangul}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}ー"
_RUN = regex.compile(
    rf"(?P<number>[0-9]{{1,3}}(?:,[0-9]{{3}})+\b)|([{_UNSPACED}][{_UNSPACED}\p{{M}}]*)|[[\p{{L}}\p{{N}}_]--[{_UNSPACED}]][[\p{{L}}\p{{M}}\p{{N}}_]--[{_UNSPACED}]]*",
    regex.V1,
)
"""A number in groups of digits, a run of a script without spaces, or else a word."""
_LEFT_OUT = regex.compile(
    r"[\p{Cf}--\u200b]|\p{Variation_Selector}|\u0640|[[\u0591-\u05c7\u0610-\u061a\u064b-\u0652\u0670\u06d6-\u06ed]&&\p{M}]"
    r"|\p{M}(?<=\p{Greek}\p{M}{1,4})|(?<=[Ii])\u0307",
    regex.V1,
)
"""What a writer may leave out of a decomposed text: unseen characters, vowel points, Greek accents, the dot of an i."""
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


def indexed_words(text: str, common: bool = False) -> list[str]:
    """Return the words by which a passage is found, in their order. ``common``: with those of :data:`COMMON` but "a".

    Upper and lower case, and forms of Unicode that mean the same, give the same words. Of a run without spaces these
    are all characters and all pairs, and of 1,234 both groups and 1234.

    >>> indexed_words("The Caf\\u00e9's vitamin C"), indexed_words("\\u732b\\u304c\\u597d\\u304d")
    (['café', 'vitamin', 'c'], ['猫', 'が', '好', 'き', '猫が', 'が好', '好き'])
    """
    return _words(text, lambda characters, pairs: characters + pairs, common)


def wanted_words(query: str, known: Container[str]) -> list[str]:
    """Return those words of a query that an index knows.

    A run without spaces is looked for by its pairs, and by its characters only where no pair is known. Common words
    are looked for if it has only these, as in the title "It".

    >>> wanted_words("\\u597d\\u304d Vitamin D", {"好", "き", "好き", "vitamin"})
    ['好き', 'vitamin']
    """

    def wanted(characters: list[str], pairs: list[str]) -> list[str]:
        return [pair for pair in pairs if pair in known] or characters

    return [word for word in _words(query, wanted) or _words(query, wanted, common=True) if word in known]


def _words(text: str, of_run: Callable[[list[str], list[str]], list[str]], common: bool = False) -> list[str]:
    if not text.isascii():
        text = unicodedata.normalize("NFKC", _LEFT_OUT.sub("", unicodedata.normalize("NFKD", text)))
    text = _ENDING.sub(" ", text)
    words: list[str] = []
    for match in _RUN.finditer(text):
        word = match[0].casefold()
        if match["number"]:
            words += of_run(word.split(","), [word.replace(",", "")])
        elif match[2] is not None:
            characters = _CHARACTER.findall(word)
            words += of_run(characters, [one + other for one, other in pairwise(characters)])
        elif (common and len(word) > 1) or word not in COMMON or _LETTER.match(text, match.start()):
            words.append(word if word.isascii() else unicodedata.normalize("NFKC", word))
    return words
