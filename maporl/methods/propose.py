"""Propose: one agent writes questions, another answers them (R-Zero, Search Self-Play, Absolute Zero, SPICE)."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal

from maporl.config.imports import unknown
from maporl.environments.base import Tool
from maporl.errors import ConfigError
from maporl.grading import LONGEST_LABEL
from maporl.protocols.base import Play, Protocol, seats
from maporl.tasks.documents import in_place_of_question
from maporl.text import text_option
from maporl.types import IN_PLAY, Act, Ask, Example, Grade, Utterance, user_says
from trl_ext.ppo.options import Positive, option

PROPOSE = "Write a question that is hard but can be answered. Put it between <question> and </question>."
RATE = "{question}\n\nHow clear and sensible is this question? End with a number from 1 to 10."
MARK = "{question}\n\nAn answer to this:\n{answer}\n\nHow right is it? End with a number from 1 to 10."
_OUT_OF_TEN = re.compile(r"(?<![\d.,/-])(10|[1-9])(?:\.0)?\s*(?:/|out of)\s*10(?!\d)")
_LAST = re.compile(r"(?<![\d.,/-])(10|[1-9])(?:\.0)?\D*$")
"""The last number of a verdict, from 1 to 10."""
OPTIONS = {
    "check": ("given", "tool"),
    "check_argument": ("given", "tool"),
    "check_about": ("given", "tool"),
    "answer_tag": ("stated",),
    **dict.fromkeys(("least_share", "most_share"), ("majority",)),
    **dict.fromkeys(("judge", "least_quality", "rate", "mark"), ("judge",)),
}
"""The ways of vouching that use an option, where not all do."""
KNOWN = ("difficulty", "band", "variance", "learnability", "extreme", "invalid")
"""What a proposer can be paid where the right answer is known."""
KNOWING = ("given", "stated", "tool")
"""The ways of vouching by which it is known."""
PAYS = {
    **dict.fromkeys(KNOWING, (*KNOWN, "mistake", "unreadable")),
    "majority": ("uncertainty",),
    "judge": ("proposal", "mark", "form"),
    "sources": (),
}
"""The rewards that each way of vouching sets."""
SHARPNESS = 0.01
"""The temperature of the reward ``variance`` (SPICE, arXiv 2510.24684, eq. 5)."""
MARKS = tuple(str(mark) for mark in range(1, 11))


@dataclass(frozen=True)
class Propose(Protocol):
    """The ``proposer`` writes a question, and the ``solver`` answers it ``tries`` times, each time apart from the
    others.

    The document of a task's example is its ``meta.document``, or else its ``meta.paragraphs``, or else its question.

    ``vouch`` says who knows the right answer of a made question:

    - "given": it is the answer of the task's example. ``check`` may name a tool; unless it returns this answer, the
      question is not asked.
    - "stated": it is what the proposer says between the tags ``<answer_tag>`` and ``</answer_tag>``, which the solver
      is not shown. A question without an answer that the task can grade is not asked. The proposer should read the
      answer in a document, because nobody checks it. The text ``propose`` must name the tags, because nothing else
      tells the proposer of them.
    - "tool": it is what the tool ``check`` finds. If its value has a ``question``, an ``answer`` and ``meta``, as that
      of the tool ``triplet`` has, then these are asked and graded. Otherwise its text is the answer. What the tool
      refuses is not asked.
    - "majority": it is the final answer that most tries give.
    - "judge": nobody knows it. The judge marks the question and each try from 1 to 10; a mark m is worth (m - 1)/9.
      What has a mark that cannot be read is not trained on.
    - "sources": nobody knows it. Reward sources, such as a verifier, score the tries, and the rule ``mix`` can pay the
      proposer by the mean of these scores (``callees/verifier``). A proposer whose question is not asked is not trained
      on.

    The protocol pays the proposer, where p is the share of right tries and s the share of the majority's answer:

    - given, stated and tool: ``difficulty``, 1 - p (Search Self-Play), ``band``, 4p(1 - p), ``variance``, exp(-(p(1 -
      p) - 0.25)^2 / 0.02) (SPICE), and ``learnability``, 1 - p if that is between 0 and 1, and else 0 (Absolute Zero).
      ``extreme`` is 1 if all tries are right or none is, and else 0. All are 0 for a question that is not asked, and
      ``invalid`` is then 1, and 0 otherwise. It also pays a try ``mistake``, 1 if it has a final answer that is wrong,
      and ``unreadable``, 1 if it has none.
    - majority: ``uncertainty``, min(s, 1 - s), and -1 for a question that is not asked (R-Zero).
    - judge: ``proposal``, (quality + difficulty + 1)/3, where the difficulty is 1 minus the mean worth of the tries,
      and 0 if the question is not asked. A question that cannot be read has ``proposal`` 0. It also pays each try its
      ``mark``, and tries and the judge ``form``: 1 for a try that ended by itself, and for a mark that can be read
      (Multi-Agent Evolve).

    In evaluations the solver answers the task's own questions, and nobody proposes. Nothing keeps a proposer from
    writing a question that is held out, which a small task makes likely.

    Raises:
        ValueError: an option is out of range or does not fit ``vouch``, or a text lacks a placeholder or has an unknown
            one.
    """

    tries: Positive = option(5, "How often a question is answered.")
    proposer: str | None = option(None, "The agent that proposes. Default: the first one.")
    solver: str | None = option(None, "The agent that answers. Default: the second one.")
    judge: str | None = option(None, "The agent that judges with vouch: judge. Default: the third one.")
    propose: str = text_option(
        PROPOSE,
        "What the proposer is asked, with the {question}, the {answer} and the {document} of the task's example.",
    )
    tag: str | None = option(
        "question", "The question is what stands between `<tag>` and `</tag>`. None: all that the proposer says."
    )
    answer_tag: str = option("answer", "The tag of the answer with vouch: stated.")
    longest: Positive = option(2000, "Most characters of a question. One that is longer, or empty, is not asked.")
    solve: str = text_option("{question}", "What the solver is asked, with {question!}.")
    vouch: Literal["given", "stated", "tool", "majority", "judge", "sources"] = option(
        "majority",
        "Who knows the right answer: the task's example (given), the proposer (stated), the tool `check` (tool), most "
        "tries (majority), or nobody, so that a judge or reward sources score the tries (judge, sources).",
    )
    least_share: float = option(
        0.0, "With vouch: majority, the tries are trained on if at least this share of them gives the same answer."
    )
    most_share: float = option(1.0, "And if at most this share does.")
    check: str | None = option(None, "A tool that checks or answers questions, with vouch: given or tool.")
    check_argument: str = option("expression", "The argument of the tool that has the question.")
    check_about: tuple[str, ...] = option(
        (), "The values of the example's `meta` that the tool is given too, by these names."
    )
    least_quality: float = option(
        0.7, "With vouch: judge, a question that is worth less than this, from 0 to 1, is not asked."
    )
    rate: str = text_option(RATE, "What the judge is asked about a question, with {question!}.")
    mark: str = text_option(MARK, "What the judge is asked about a try, with {question} and {answer!}.")
    roles = True
    records = frozenset({"caller"})
    least_players = 2

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.least_share <= self.most_share <= 1:
            raise ValueError(
                "least_share and most_share: expected shares between 0 and 1, the smaller one first, got "
                f"{self.least_share} and {self.most_share}"
            )
        if not 0 <= self.least_quality <= 1:
            raise ValueError(f"least_quality: expected a number between 0 and 1, got {self.least_quality}")
        if self.tag is not None and not re.fullmatch(r"\w+", self.tag):
            raise ValueError(f"tag: expected a word, such as question, or null, got {self.tag!r:.40}")
        if not re.fullmatch(r"\w+", self.answer_tag):
            raise ValueError(f"answer_tag: expected a word, such as answer, got {self.answer_tag!r:.40}")
        if self.vouch == "stated" and self.tag in (None, self.answer_tag):
            raise ValueError(
                "tag: with vouch: stated the question stands between tags of its own, beside those of the answer "
                f"({self.answer_tag}), got {self.tag!r}; set tag: question"
            )
        for name, told in (("tag", self.tag), ("answer_tag", self.answer_tag)) if self.vouch == "stated" else ():
            if f"<{told}>" not in self.propose:
                raise ValueError(
                    f"propose: with vouch: stated what stands between <{told}> and </{told}> is read, and the text "
                    f"tells the proposer of no such tags, got {self.propose!r:.80}; write <{told}> and </{told}> into "
                    f"it, or set {name} to a tag that it has"
                )
        for name, modes in OPTIONS.items():
            if self.vouch not in modes and getattr(self, name) != self.__dataclass_fields__[name].default:
                raise ValueError(f"{name}: it is only used with vouch: {' or '.join(modes)}; remove it, or set that")
        if self.vouch == "tool" and self.check is None:
            raise ValueError("check: vouch: tool needs a tool that finds the answer; name one, such as calculator")
        for name in ("check_argument", "check_about") if self.check is None else ():
            if getattr(self, name) != self.__dataclass_fields__[name].default:
                raise ValueError(
                    f"{name}: it says with what the tool check is called, and check names none; remove it, or set check"
                )
        if self.check_argument in self.check_about:
            raise ValueError(
                f"check_about: {self.check_argument!r} is the check_argument, which has the question, so it cannot "
                f"have a value of the example too, got {list(self.check_about)}; remove it from one of them"
            )
        if self.vouch == "majority" and self.tries < 2:
            raise ValueError("tries: one try is always its own majority; expected at least 2 with vouch: majority")
        seated = [name for name in (self.proposer, self.solver, self.judge) if name is not None]
        if len(set(seated)) < len(seated):
            raise ValueError(
                f"proposer, solver and judge: expected different agents, got {seated}; agents may share a policy"
            )

    @property
    def turns(self) -> int:  # type: ignore[override]  # it follows from the options
        """The largest number of answers."""
        return self.tries

    @property
    def opening(self) -> str:  # type: ignore[override]  # it follows from the options
        """The text in which the solver is asked a question."""
        return self.solve

    @property
    def pays(self) -> frozenset[str]:  # type: ignore[override]  # it follows from the options
        """The names of the rewards that it sets."""
        return frozenset(PAYS[self.vouch])

    @property
    def grade_between_turns(self) -> bool:  # type: ignore[override]  # it follows from the options
        """Whether it must know which answers are right, or which answers were given."""
        return self.vouch not in ("judge", "sources")

    @property
    def uses_tools(self) -> frozenset[str]:  # type: ignore[override]  # it follows from the options
        """The tool that checks questions, if one does."""
        return frozenset([] if self.check is None else [self.check])

    def mentioned(self) -> set[str]:
        """Return the agents that the options name."""
        return {name for name in (self.proposer, self.solver, self.judge) if name is not None}

    def check_tools(self, tools: Mapping[str, Tool]) -> None:
        """Check that the tool that checks questions has the arguments that it is given, and needs no others.

        Raises:
            ValueError: it lacks one, or needs another.
        """
        if self.check is None or self.check not in tools:
            return
        names = tools[self.check].parameters["properties"]
        for key, asked in (("check_argument", (self.check_argument,)), ("check_about", self.check_about)):
            for name in asked:
                if name not in names:
                    raise ValueError(f"{key}: tool {self.check}: {unknown(name, names)}")
        passed = [self.check_argument, *self.check_about]
        for name in tools[self.check].parameters.get("required", ()):
            if name not in passed:
                raise ValueError(
                    f"check_about: tool {self.check} needs {name!r}, and is given {passed} alone; name it here if the "
                    "meta of the task's examples has it, or set another check"
                )

    def check_example(self, example: Example) -> None:
        """Check that an example of the task has what the proposer and the tool are to be told of it.

        Raises:
            ConfigError: its meta lacks a value that ``check_about`` names, or it is a document that nobody is shown, or
                that has no answer where ``vouch`` takes one of it.
        """
        self._about(example)
        if not in_place_of_question(example):
            return
        if self.vouch == "given":
            raise ConfigError(
                "protocol.vouch: given takes the right answer of the task's example, and the task gives documents, "
                "which have none; set vouch: stated, by which the proposer states it"
            )
        blank = dict.fromkeys(("question", "answer", "document"), "")
        if self.propose.format(**blank) == self.propose.format(**blank | {"document": "?", "question": "?"}):
            raise ConfigError(
                "protocol.propose: the task gives documents, and the text shows the proposer nothing of them, got "
                f"{self.propose!r:.80}; put {{document}} into it"
            )

    def check_players(self, players: tuple[str, ...]) -> None:
        """Check that there are two players, or three with a judge.

        Raises:
            ValueError: there are too few or too many of them.
        """
        super().check_players(players)
        wanted = 3 if self.vouch == "judge" else 2
        if len(players) != wanted:
            raise ValueError(
                f"with vouch: {self.vouch} it has {wanted} players but agents are {list(players)}; list that many in "
                "protocol.agents"
            )

    def in_evaluation(self) -> Protocol:
        """Return the protocol of evaluations: the solver answers the task's questions."""
        return Answer(self.solve, self.proposer, self.solver, self.judge)

    def play(self, example: Example, agents: tuple[str, ...]) -> Play:
        """Play the dialogue. The outcome says what became of the proposal: "unread", "refused" or "asked"."""
        proposer, solver, judge = seats(agents, self.proposer, self.solver, self.judge)
        text = self.propose.format(question=example.question, answer=example.answer, document=document_of(example))
        (proposal,) = yield [Ask(proposer, user_says(text), "proposer", answers=False, taught=(self._taught(example),))]
        question, answer = self._read(proposal.text, example)
        proposal.tags |= {"question": question, "accepted": False}
        if question is None or answer is None:
            self._pay_unasked(proposal, None)
            return "unread"
        quality = yield from self._quality(judge, proposal, question, example)
        if quality is None:
            _leave_out(proposal)
            return "refused"
        dropped = ("document", "draw", "bare_question", "shown_meta")
        meta = {name: value for name, value in example.meta.items() if name not in dropped}
        made = replace(example, question=question, answer=answer, meta=meta)
        if self.vouch == "tool":
            made = yield from self._found(proposal, made, example)
        if made is None or quality < (self.least_quality if self.vouch == "judge" else 1):
            self._pay_unasked(proposal, quality)
            return "refused"
        proposal.tags["accepted"] = True
        asked = Ask(
            solver,
            user_says(self.solve.format(question=made.question)),
            "solver",
            (proposal.id,),
            proposal.id,
            answers=self.vouch != "judge",
            fresh=True,
            example=made,
        )
        tries = yield [asked] * self.tries
        if self.vouch in ("stated", "tool") and not _graded(tries):
            proposal.tags["accepted"] = False
            self._pay_unasked(proposal, None)
            return "unread"
        if self.vouch == "sources":
            return "asked"
        worths = yield from self._worths(judge, proposal, question, tries)
        if worths:
            proposal.rewards |= self._payments(quality, fmean(worths))
        else:
            _leave_out(proposal)
        return "asked"

    def _taught(self, example: Example) -> str:
        """Return what a warm start teaches a proposer to say: the example's own question."""
        question = example.question if self.tag is None else f"<{self.tag}>{example.question}</{self.tag}>"
        return question + (f"<{self.answer_tag}>{example.answer}</{self.answer_tag}>" if self.vouch == "stated" else "")

    def _read(self, text: str, example: Example) -> tuple[str | None, str | None]:
        """Return a proposal's question and answer (empty if nobody knows it); one that cannot be read is None."""
        question = text if self.tag is None else between(self.tag, text)
        question = question.strip() if question is not None else ""
        if not 0 < len(question) <= self.longest:
            return None, None
        if self.vouch == "stated":
            answer = (between(self.answer_tag, text) or "").strip()
            return question, answer if 0 < len(answer) <= LONGEST_LABEL else None
        return question, example.answer if self.vouch == "given" or question == example.question else ""

    def _quality(self, judge: str, proposal: Utterance, question: str, example: Example) -> Play:
        """Return what a question is worth before it is asked, in [0, 1], or None if the judge's mark cannot be read."""
        if self.vouch == "judge":
            (verdict,) = yield [_judged(judge, self.rate.format(question=question), proposal)]
            return _worth(verdict)
        if self.check is not None and self.vouch == "given":
            (result,) = yield [self._call(proposal, question, example)]
            return float(result.error is None and result.text.strip() == example.answer.strip())
        return 1.0

    def _found(self, proposal: Utterance, made: Example, example: Example) -> Play:
        """Return the question that the tool makes of the proposed one, with its answer, or None if it refuses it."""
        (result,) = yield [self._call(proposal, made.question, example)]
        if result.error is not None:
            return None
        if isinstance(result.value, Mapping) and result.value.keys() >= {"question", "answer", "meta"}:
            question, answer, meta = (result.value[name] for name in ("question", "answer", "meta"))
            if not (isinstance(question, str) and isinstance(answer, str) and isinstance(meta, Mapping)):
                kinds = [type(one).__name__ for one in (question, answer, meta)]
                raise ConfigError(
                    f"protocol.check: the tool {self.check} returned a question, an answer and a meta of the types "
                    f"{kinds}; return two texts and a dictionary"
                )
            made = replace(made, question=question, answer=answer, meta={**made.meta, **meta})
        else:
            made = replace(made, answer=result.text.strip())
        return made if made.question.strip() and made.answer.strip() else None

    def _call(self, proposal: Utterance, question: str, example: Example) -> Act:
        """Return the call of the tool that checks a question."""
        arguments = {self.check_argument: question, **self._about(example)}
        return Act(proposal.agent, str(self.check), arguments, of=proposal.id)

    def _about(self, example: Example) -> dict[str, Any]:
        """Return what the tool that checks questions is told of the example."""
        if missing := [name for name in self.check_about if name not in example.meta]:
            keys = sorted(example.meta.keys() - IN_PLAY)  # which every question has
            raise ConfigError(
                f"protocol.check_about: question {example.id} has no {missing[0]!r} in its meta, but {keys}; name one "
                "of these, or use a task that gives it"
            )
        return {name: example.meta[name] for name in self.check_about}

    def _worths(self, judge: str, proposal: Utterance, question: str, tries: list[Utterance]) -> Play:
        """Pay the tries. Return what each is worth, in [0, 1], without those of which nobody knows it."""
        if self.vouch in KNOWING:
            right = [float(u.grade is not None and u.grade.correct is True) for u in tries]
            for u, is_right in zip(tries, right, strict=True):
                final = u.grade is not None and u.grade.answer is not None
                u.rewards |= {"mistake": float(final and not is_right), "unreadable": float(not final and not is_right)}
            return right
        if self.vouch == "majority":
            right = let_majority_grade(tries)
            in_range = self.least_share <= fmean(right) <= self.most_share
            for u in [] if in_range else tries:
                _leave_out(u)
            return right
        texts = [self.mark.format(question=question, answer=u.text) for u in tries]
        verdicts = yield [replace(_judged(judge, text, u), fresh=True) for text, u in zip(texts, tries, strict=True)]
        read = []
        for u, verdict in zip(tries, verdicts, strict=True):
            worth = _worth(verdict)
            if worth is None:
                _leave_out(u)
            else:
                u.rewards |= {"mark": worth, "form": float(u.stop.whole and bool(u.text.strip()))}
                read.append(worth)
        return read

    def _pay_unasked(self, proposal: Utterance, quality: float | None) -> None:
        """Pay a proposer whose question is not asked."""
        if self.vouch == "sources":
            _leave_out(proposal)  # nobody knows what it would have earned, and 0 may be more than that
        else:
            proposal.rewards |= self._payments(quality, None)

    def _payments(self, quality: float | None, worth: float | None) -> dict[str, float]:
        """Return what the proposer is paid. ``worth`` is the tries' mean, or None if the question was not asked."""
        if self.vouch in KNOWING:
            return _known_payments(worth)
        if self.vouch == "majority":
            return {"uncertainty": -1.0 if worth is None else min(worth, 1 - worth)}
        if quality is None:
            return {"proposal": 0.0}
        return {"proposal": (quality + (0.0 if worth is None else 1 - worth) + 1.0) / 3}


@dataclass(frozen=True)
class Answer(Protocol):
    """The solver of :class:`Propose` answers a question of the task. The other seats are silent."""

    solve: str
    proposer: str | None = None
    solver: str | None = None
    judge: str | None = None
    roles = True

    def play(self, example: Example, agents: tuple[str, ...]) -> Play:
        """Play the dialogue."""
        _, solver, _ = seats(agents, self.proposer, self.solver, self.judge)
        yield [Ask(solver, user_says(self.solve.format(question=example.question)), "solver")]


def document_of(example: Example) -> str:
    """Return what a proposer may read: an example's document, or its paragraphs with their titles, or else its
    question.

    >>> document_of(Example("1", "Who?", "Emma", {"paragraphs": [{"title": "Emma", "text": "A novel."}]}))
    'Emma\\nA novel.'
    """
    paragraphs = [f"{one['title']}\n{one['text']}".strip() for one in example.meta.get("paragraphs", ())]
    return str(example.meta.get("document") or "\n\n".join(paragraphs) or example.question)


def between(tag: str, text: str) -> str | None:
    """Return what stands between the first ``<tag>`` and the next ``</tag>``, or None.

    >>> between("q", "I ask <q>1+1</q>, <q>2</q>"), between("q", "<q>1+1")
    ('1+1', None)
    """
    match = re.search(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return None if match is None else match[1]


def let_majority_grade(tries: Sequence[Utterance]) -> list[float]:
    """Grade tries by the final answer that most of them give, the first of equally frequent ones. Return 1 for the
    right ones.

    A try without a final answer is wrong, and does not vote.
    """
    answers = [None if u.grade is None else u.grade.answer for u in tries]
    votes = Counter(answer for answer in answers if answer is not None)
    most = votes.most_common(1)[0][0] if votes else None
    for u, answer in zip(tries, answers, strict=True):
        right = answer is not None and answer == most
        if u.example is not None:  # rewards that compare with the right answer read it there
            u.example = replace(u.example, answer=most or "")
        u.grade = Grade(answer, right, "the majority's answer" if right else "not the majority's answer")
    return [float(u.grade is not None and u.grade.correct is True) for u in tries]


def _graded(tries: Sequence[Utterance]) -> bool:
    """Return whether the task could compare tries with an answer. If not, they count as wrong and teach nothing."""
    if any(u.grade is not None and u.grade.correct is not None for u in tries):
        return True
    for u in tries:
        u.grade = Grade(None, False, "the answer cannot be compared")
        _leave_out(u)
    return False


def _known_payments(p: float | None) -> dict[str, float]:
    """Return a proposer's pay if the share ``p`` of the tries is right; None: its question was not asked."""
    if p is None:
        return dict.fromkeys(KNOWN, 0.0) | {"invalid": 1.0}
    variance = p * (1 - p)
    peak = math.exp(-((variance - 0.25) ** 2) / (2 * SHARPNESS))
    extreme = p in (0, 1)
    return {
        "difficulty": 1 - p,
        "band": 4 * variance,
        "variance": peak,
        "learnability": 0.0 if extreme else 1 - p,
        "extreme": float(extreme),
        "invalid": 0.0,
    }


def _judged(judge: str, text: str, of: Utterance) -> Ask:
    return Ask(judge, user_says(text), "judge", (of.id,), of.id, answers=False, fresh=True, taught=MARKS)


def _worth(verdict: Utterance) -> float | None:
    """Pay a verdict for its form. Return what its mark is worth, (m - 1)/9, or None if it cannot be read."""
    marks = [*_OUT_OF_TEN.finditer(verdict.text)][-1:] or [*_LAST.finditer(verdict.text)]
    verdict.rewards["form"] = float(bool(marks))
    return (int(marks[0][1]) - 1) / 9 if marks else None


def _leave_out(utterance: Utterance) -> None:
    """Do not train on what nobody knows the worth of. It would otherwise have the credit of the verdict on it."""
    utterance.trainable = False
