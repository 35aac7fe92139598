"""Classification: which of the labels a text asserts."""

import re
from bisect import bisect_left
from collections.abc import Sequence

from maporl.grading.answers import CLAUSES, LONGEST_TEXT, boxed, marked
from maporl.text import spoken
from maporl.types import Grade

_NEGATION = re.compile(
    r"\b(?:not|cannot|neither|nor|no|non|never|none|without|wrong|incorrect|false|untrue|unlikely|impossible|hardly|"
    r"barely|scarcely|rather than|instead of|opposite of|reject(?:s|ed|ing)?|refut(?:e|es|ed|ing)|anything but|all but|far from|rul(?:e|es|ed|ing) out|exclud(?:e|es|ed|ing)|"  # noqa: E501
    r"except|unless|lack(?:s|ing)?|fail(?:s|ed)?|absent|den(?:y|ies|ied)|doubt(?:s|ful)?|"
    r"(?:do|does|did|is|are|was|were|ca|wo|would|could|should)nt)\b|n['’]t\b|\?"
)
_NOTHING_BUT_NEGATION = re.compile(
    r"[\s*_]*(?:(?:is|that is|that's|this is)\s+)?(?:not|no|wrong|incorrect|false)[\s*_]*"
)
_ENDS_NEGATED = re.compile(r"(?:\bnot|n['’]t|\bcannot|\bnever|\bneither)$")
_ENDS_OPEN = re.compile(r"\b(?:that|be|is|an?|the|think|say|believe|really|necessarily|strictly)$")
_BESIDE = re.compile(r"[\s*_]*(?:and[\s*_]+)?")
_NEGATES_WHAT_FOLLOWS = re.compile(r"\b(?:not|never|cannot|n['’]t)\b")
_SIGN_OF_NEGATION = re.compile(r"(?<!\S)[!¬~](?=\w)|≠|!=")
_JOINED = re.compile(r"(?<=\bno[tn])_")
_REASON = re.compile(r"\b(?:because|since|as)\b")


def find_label(text: str, labels: Sequence[str]) -> str | None:
    """The only label that ``text`` asserts, or None if it asserts no label or several.

    Only whole words count. What stands in a thought does not. If the text marks a final answer, only that is read. A
    mention does not count if its clause negates it by a word like "not" or "wrong"; such a word in a reason that
    follows the mention does not negate it, nor does one that negates the next label. Of a longer text, the last 100,000
    characters are read.

    >>> nli = ("entailment", "neutral", "contradiction")
    >>> find_label("not entailment, it is a contradiction", nli)
    'contradiction'
    >>> find_label("neither entailment nor neutral but contradiction", nli), find_label("Answer: It is entailed.", nli)
    ('contradiction', 'entailment')
    >>> find_label("It could be neutral.\\nAnswer: Entailment because it is not open", nli)
    'entailment'
    >>> find_label("neutral or contradiction", nli) is None, find_label("contradictions abound", nli) is None
    (True, True)
    >>> find_label("This is not necessarily entailment.", nli) is None, find_label("entailment is wrong", nli) is None
    (True, True)
    >>> find_label("I don't think the answer is neutral", nli) is None, find_label("It is not, I think, neutral", nli) is None
    (True, True)
    >>> find_label("Neutral, not contradiction.", nli), find_label("entailment (neither neutral nor contradiction)", nli)
    ('neutral', 'entailment')
    >>> [find_label(text, ("yes", "no")) for text in ("yes", "No.", "yes or no", "not yes")]
    ['yes', 'no', None, None]
    """  # noqa: E501
    mention = re.compile("|".join(rf"(?<![^\W_])(?<!-){re.escape(label.lower())}(?![^\W_]|-)" for label in labels))
    text = spoken(text)[-LONGEST_TEXT:]
    where = boxed(text) or None  # an empty box says nothing
    after = text if where is None else text.rpartition(where)[2]  # a later statement outweighs a box
    told = [where or "", *(f"{before} {written}" for before, written, _ in marked(after))]
    for answers in (told, [_as_nouns(answer.lower(), labels) for answer in told]):
        if named := [answer for answer in answers if mention.search(answer.lower())]:
            break
    where = named[-1] if named else text if where is None else where
    where = _JOINED.sub(" ", _SIGN_OF_NEGATION.sub(" not ", where.lower()))
    clauses = CLAUSES.split(where)
    affirmed, carried = set(), False
    for clause, following in zip(clauses, [*clauses[1:], ""], strict=True):
        mentions = list(mention.finditer(clause))
        denied = not mention.search(following) and _NOTHING_BUT_NEGATION.fullmatch(following)
        others = mention.sub(lambda match: "_" * len(match.group()), clause)  # "no" may be a label itself
        if mentions and not (carried or denied):
            affirmed |= _asserted(mentions, others)
        carried = not mentions and (carried or _negation_goes_on(clause))
    asserted = [label for label in labels if label.lower() in affirmed]
    return asserted[0] if len(asserted) == 1 else None


def _as_nouns(text: str, labels: Sequence[str]) -> str:
    """``text`` with the labels of inference as they are named, such as "entailment" for "entailed"."""
    for label, forms in (("entailment", r"\bentail(?:s|ed)?\b"), ("contradiction", r"\bcontradict(?:s|ed|ory)?\b")):
        text = re.sub(forms, label, text) if label in labels else text
    return text


def _asserted(mentions: list[re.Match[str]], others: str) -> set[str]:
    """The mentions of a clause that no word negates: before them, or after them and before a reason."""
    negations = [match.span() for match in _NEGATION.finditer(others)]
    reasons = [match.start() for match in _REASON.finditer(others)]
    affirmed = set()
    for place, mention in enumerate(mentions):
        reason = bisect_left(reasons, mention.end())
        end = reasons[reason] if reason < len(reasons) else len(others)
        negation = bisect_left(negations, (mention.end(), 0))  # the first after the mention
        negated_after = negation < len(negations) and negations[negation][1] <= end
        if (
            negated_after
            and place + 1 < len(mentions)
            and _BESIDE.fullmatch(others, mention.end(), negations[negation][0])
        ):
            negated_after = negations[negation][1] > mentions[place + 1].start()  # "neutral, not a contradiction"
        if not (negated_after or (negations and negations[0][1] <= mention.start())):
            affirmed.add(mention.group())
    return affirmed


def _negation_goes_on(clause: str) -> bool:
    """Whether a clause ends in the middle of a negation, which the next clause goes on with.

    >>> [_negation_goes_on(c) for c in ("it is not", "I do not think that", "it is not clear", "I think that")]
    [True, True, False, False]
    """
    clause = clause.rstrip()
    if _ENDS_NEGATED.search(clause, max(0, len(clause) - 10)):
        return True
    last = _ENDS_OPEN.search(clause, max(0, len(clause) - 15))
    return last is not None and _NEGATES_WHAT_FOLLOWS.search(clause, 0, last.start()) is not None


def grade_label(text: str, truth: str, labels: Sequence[str]) -> Grade:
    """Grade a classification. A text that asserts no label, or several, has no final answer and is wrong."""
    if truth not in labels:
        return Grade(None, None, f"the label {truth!r:.100} is not one of {', '.join(labels)}")
    answer = find_label(text, labels)
    if answer is None:
        return Grade(None, False, "no single label is asserted")
    return Grade(answer, answer == truth, "equals the label" if answer == truth else "differs from the label")
