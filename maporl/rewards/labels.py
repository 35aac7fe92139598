"""Reward sources that need no model: right or wrong, readable, near, of the same words, brief. Imports no torch."""

from collections import Counter
from collections.abc import Callable
from fractions import Fraction

from maporl.grading import canonical, final_answer, number
from maporl.grading.spans import token_f1
from maporl.rewards.base import RewardSource, Values
from maporl.rewards.scoring import grade_answers
from maporl.tasks.base import Task
from maporl.types import Dialogue, Utterance


def label(dialogues: list[Dialogue], task: Task) -> Values:
    """Return 1 for a right answer and 0 for a wrong one. The answer keeps the grade that the task's grader gave it."""
    grade_answers(dialogues, task)
    return [
        [None if u.grade is None or u.grade.correct is None else float(u.grade.correct) for u in d.utterances]
        for d in dialogues
    ]


def readable(dialogues: list[Dialogue], task: Task) -> Values:
    """Return 1 for an answer that has a final answer in the required form, right or wrong, and 0 otherwise."""
    grade_answers(dialogues, task)
    return [[None if u.grade is None else float(u.grade.answer is not None) for u in d.utterances] for d in dialogues]


def near(dialogues: list[Dialogue], task: Task) -> Values:
    """Return how near a numeric answer a is to the label b, in [0, 1]: ``1 / (1 + |a - b| / max(1, |b|))``.

    The value is 0 if the answer or the label is not a number.
    """
    grade_answers(dialogues, task)

    def nearness(answer: str | None, truth: str) -> float:
        said, label = (None if text is None else number(text) for text in (answer, truth))
        if said is None or label is None:
            return 0.0
        return float(1 / (1 + abs(said - label) / max(Fraction(1), abs(label))))

    return [[nearness(u.grade.answer if u.grade else None, d.asked(u).answer) for u in d.utterances] for d in dialogues]


def f1(dialogues: list[Dialogue], task: Task) -> Values:
    """Return the F1 of the words of an answer and of the label, in [0, 1]. The value is 0 without a final answer."""
    grade_answers(dialogues, task)

    def shared(answer: str | None, truth: str) -> float:
        return 0.0 if answer is None else token_f1(answer, truth)

    return [
        [None if u.grade is None else shared(u.grade.answer, d.asked(u).answer) for u in d.utterances]
        for d in dialogues
    ]


def verdict(dialogues: list[Dialogue], task: Task) -> Values:
    """Return 1 for a verdict that is true, and 0 for one that is not (MarsRL, arXiv 2511.11373).

    A verdict in the protocol ``refine`` approves the draft that it was shown, or does not. It is true if it approves a
    right draft or does not approve a wrong one.
    """
    grade_answers(dialogues, task)
    return [[_true_verdict(d, u) for u in d.utterances] for d in dialogues]


def majority(dialogues: list[Dialogue], task: Task) -> Values:
    """Return 1 for an answer that agrees with the majority of a question's last answers, and 0 otherwise. It reads no
    label (TTRL, arXiv 2504.16084; of a debate: MACA, arXiv 2509.15172).

    The voters are the answers of the last turn of all dialogues on the question in this update. An answer without a
    final answer votes for nothing and earns 0. If n answers have equally many votes, each of them earns 1/n. Agreement
    is paid whether it is right or wrong: a team can earn it by one answer to every question.
    """
    return agreement(dialogues, task, lambda d, u: None, lambda d, u: None)


Block = Callable[[Dialogue, Utterance], str | None]


def agreement(dialogues: list[Dialogue], task: Task, votes_in: Block, follows: Block) -> Values:
    """Return for each answer its share of the winners of the vote that it ``follows``; see :func:`majority`.

    Last answers to a question vote in the block that ``votes_in`` names, and there is one vote for each block.
    """
    grade_answers(dialogues, task)
    votes: dict[tuple[int, str, str | None], Counter[str]] = {}
    for d in dialogues:
        for u in d.at(d.turns() - 1) if not d.without else ():
            if (given := _final(u)) is not None:
                votes.setdefault((d.prompt, d.asked(u).question, votes_in(d, u)), Counter())[given] += 1

    def agreed(d: Dialogue, u: Utterance) -> float | None:
        if not u.answers:
            return None
        counts = votes.get((d.prompt, d.asked(u).question, follows(d, u)), Counter())
        most = [answer for answer, count in counts.items() if count == max(counts.values())]
        return 1 / len(most) if _final(u) in most else 0.0

    return [[agreed(d, u) for u in d.utterances] for d in dialogues]


def _final(utterance: Utterance) -> str | None:
    """Return the final answer by which votes are counted. A task without labels has read none."""
    if utterance.grade is not None and utterance.grade.answer is not None:
        return utterance.grade.answer
    if utterance.grade is not None and utterance.grade.correct is not None:
        return None
    written = final_answer(utterance.words())
    return None if written is None else canonical(written)


def is_verdict(utterance: Utterance) -> bool:
    """Return whether an utterance judges a draft that it was shown."""
    return utterance.role == "verifier" and not utterance.answers and bool(utterance.parents)


def is_step_verdict(utterance: Utterance) -> bool:
    """Return whether an utterance is the verdict of a judge of steps (``protocol.step_judge``)."""
    return "verdict" in utterance.tags and utterance.caller is not None


def is_judgement(utterance: Utterance) -> bool:
    """Return whether an utterance judges a result that its agent called for."""
    return utterance.role == "judge" and "useful" in utterance.tags


def _true_verdict(dialogue: Dialogue, utterance: Utterance) -> float | None:
    if not is_verdict(utterance):
        return None
    grades = {u.id: u.grade for u in dialogue.utterances}
    grade = grades.get(utterance.parents[0])
    if grade is None or grade.correct is None:
        return None
    return float(bool(utterance.settles) == grade.correct)


def critical_steps(dialogues: list[Dialogue], task: Task) -> Values:
    """Return for each answer how many steps its dialogue has taken: the length of its longest branch (Kimi K2.5, PARL).

    What is said in one step takes the time of one utterance, however many agents speak. So an orchestrator that asks
    two agents at once takes 3 steps, and one that asks them one after the other takes 5. Give it a negative weight.
    """
    steps = [1 + max((u.order for u in d.utterances), default=0) for d in dialogues]
    return [[float(n) if u.answers else None for u in d.utterances] for d, n in zip(dialogues, steps, strict=True)]


def tokens(dialogues: list[Dialogue], task: Task) -> Values:
    """Return how many tokens of an utterance were sampled. It is meant for ``reward.charges``: what words cost.

    An utterance without sampled tokens, such as a person's, has no value.
    """
    return [[float(len(u.response_ids)) if u.response_ids else None for u in d.utterances] for d in dialogues]


class Brevity(RewardSource):
    """How short an answer is, in [0, 1]: ``max(0, 1 - n / tokens)`` for an answer of n sampled tokens.

    A reward for short answers alone teaches silence. It is meant as a lower reward behind a gate
    (:class:`maporl.methods.g_ra.Gate`), where only right answers earn it. An answer without sampled tokens, such as a
    person's, has no value.
    """

    answers_only = True

    def __init__(self, tokens: int):
        self.tokens = tokens

    def __call__(self, dialogues: list[Dialogue], task: Task) -> Values:
        """Return the brevity of each answer."""
        lengths = [[len(u.response_ids) for u in d.utterances] for d in dialogues]
        return [[max(0.0, 1 - n / self.tokens) if n else None for n in row] for row in lengths]


IMPLIED = {"label": frozenset({"format", "near"}), "near": frozenset({"format"}), "f1": frozenset({"format"})}
"""For a reward, those that are 1 whenever it is above 0: a right answer is readable and is as near as can be."""
