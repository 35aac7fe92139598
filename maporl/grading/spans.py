"""Questions that are answered with a few words: exact match and F1 as in SQuAD (Rajpurkar et al. 2016) and HotpotQA."""

import re
import string
from collections import Counter

from maporl.grading.answers import LONGEST_TEXT, marked
from maporl.text import spoken
from maporl.types import Grade

_PUNCTUATION = dict.fromkeys(map(ord, string.punctuation))
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_WHOLE = ("yes", "no", "noanswer")
"""Answers that share no word with another one by chance: F1 is 0 unless they are equal."""


def normal_words(text: str) -> list[str]:
    """Return the words of ``text`` in small letters, without punctuation and articles.

    >>> normal_words("The  Beatles' song, an \\"A\\"!"), normal_words("Café-Bar")
    (['beatles', 'song'], ['cafébar'])
    """
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def exact_match(answer: str, truth: str) -> bool:
    """Return whether two answers have the same words, by :func:`normal_words`.

    >>> exact_match("the Emma.", "Emma"), exact_match("Emma Woodhouse", "Emma")
    (True, False)
    """
    return normal_words(answer) == normal_words(truth)


def token_f1(answer: str, truth: str) -> float:
    """Return the harmonic mean of precision and recall of the words of ``answer``, in [0, 1].

    It is 0 if one of the two is "yes" or "no" and the other is not.

    >>> token_f1("Jane Austen of Hampshire", "Jane Austen"), token_f1("no, not Austen", "no"), token_f1("", "Emma")
    (0.6666666666666666, 0.0, 0.0)
    """
    said, right = normal_words(answer), normal_words(truth)
    if said != right and (" ".join(said) in _WHOLE or " ".join(right) in _WHOLE):
        return 0.0
    common = sum((Counter(said) & Counter(right)).values())
    return 2 * common / (len(said) + len(right)) if common else 0.0


def find_span(text: str) -> str | None:
    """Return what follows the last ``Answer:`` on its line, or None. What stands in a thought does not count.

    >>> find_span("I think of Emma.\\nAnswer: Jane Austen\\nBye"), find_span("**Answer:** 1815"), find_span("Jane Austen")
    ('Jane Austen', '1815', None)
    >>> find_span("<think>Answer: Emma</think>Answer：<Jane Austen>"), find_span("<think>Answer: Emma")
    ('Jane Austen', None)
    """  # noqa: E501
    spans = [words.strip().strip("*").strip() for _, words, _ in marked(spoken(text)[-LONGEST_TEXT:])]
    spans = [words[1:-1].strip() if words[:1] == "<" and words[-1:] == ">" else words for words in spans]
    return spans[-1] or None if spans else None


def grade_span(text: str, truth: str) -> Grade:
    """Grade an answer by exact match. The reason has its F1. A text without a final answer is wrong."""
    if not normal_words(truth):
        return Grade(None, None, f"the label {truth!r:.100} has no words that can be compared")
    answer = find_span(text)
    if answer is None:
        return Grade(None, False, "no final answer")
    if exact_match(answer, truth):
        return Grade(answer, True, "equals the label")
    return Grade(answer, False, f"differs from the label, F1 {token_f1(answer, truth):.2f}")
