"""The answers that a verifier should not learn from, and why. Imports no torch."""

import re

from maporl.grading import final_answer
from maporl.text import spoken

_ASKED = re.compile(
    r"^[^\w\n]*(?:the\s+)?(?:final\s+)?answer\W*[:：]|\\(?:boxed|fbox)\s*(?:\{(?!\s*\})|\w)|####",
    re.IGNORECASE | re.MULTILINE,
)
_LEAKED = re.compile(
    r"^[^\w\n]*(?:user|human|assistant|system|instructions?)\s*:|<\|[^|\n]*\|>|\[/?INST\]|</?s>|<(?:start|end)_of_turn>"
    r"|^#+\s*(?:instruction|response|input)\b",
    re.IGNORECASE | re.MULTILINE,
)
_WRONG = r"(?:wrong|incorrect|false|flawed|mistaken|erroneous|inaccurate)"
_REWRITTEN = rf"(?:{_WRONG}|plausible|rewritten|reworded|rephrased|paraphrased|alternative|different|another|modified)"
_ADMITS = re.compile(
    rf"\bas\s+(?:you\s+)?(?:requested|asked|instructed)\b|\bper\s+(?:your|the)\s+(?:request|instructions?)\b"
    rf"|\bhere(?:'s|’s|\s+is|\s+are)\s+(?:\w+\s+){{0,4}}?(?:{_REWRITTEN})\b[\w\s,-]{{0,40}}?\b(?:answer|solution|version|response)\b"
    rf"|\b(?:intentional|deliberate|purpose)(?:ly|ful|fully)?\s+(?:{_WRONG}|error|mistake)\b"
    r"|\b(?:rewrit|reword|rephras|paraphras)\w*\s+(?:\w+\s+){0,2}?(?:answer|solution|version|response|text)\b"
    rf"|\b(?:my|this|the|above|following)\s+(?:answer|solution)\s+is\s+(?:\w+\s+)?{_WRONG}\b"
    rf"|\b(?:sample|example|provided|reference)\s+(?:answer|solution)\b"
    rf"|\bplausible\s+but\s+{_WRONG}\b|\bin\s+(?:my\s+own|different)\s+words\b",
    re.IGNORECASE,
)


def final_answers(text: str) -> int:
    r"""How many final answers a text gives: the marked ones, or one if the whole text is a final answer.

    >>> [final_answers(t) for t in ("2+2=4\nAnswer: 4", "Answer: 4\nAnswer: 5", r"\boxed{4}", "42", "so it is four")]
    [1, 2, 1, 1, 0]
    >>> final_answers("The answer is 4, I think.\nAnswer: 4")
    1
    """
    return max(1, len(_ASKED.findall(spoken(text)))) if final_answer(text) is not None else 0


def fault(text: str, free_form: bool = False) -> str | None:
    r"""Why a verifier should not learn from ``text``, or None. ``free_form``: it need not have a final answer.

    >>> [fault(t) for t in ("Answer: 4", "hm", "Answer: 4\nAnswer: 5", "Answer: 4\nUser: and now?", " ")]
    [None, 'no_final_answer', 'several_final_answers', 'leaked_prompt', 'empty']
    >>> fault("As requested, here is a wrong answer.\nAnswer: 5"), fault("Answer: 4<|im_end|>")
    ('admits_rewriting', 'leaked_prompt')
    >>> fault("They meet at the gate.", free_form=True) is None
    True
    """
    if not text.strip():
        return "empty"
    if _LEAKED.search(text):
        return "leaked_prompt"
    if _ADMITS.search(text):
        return "admits_rewriting"
    if free_form or (count := final_answers(text)) == 1:
        return None
    return "several_final_answers" if count else "no_final_answer"


def same_text(text: str) -> str:
    """The words of ``text`` in one spelling, so that texts which differ only in spacing and case are equal.

    >>> same_text("Answer:  4\\n") == same_text("answer: 4")
    True
    """
    return " ".join(text.lower().split())
