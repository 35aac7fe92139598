"""Propose: one agent writes questions, another answers them. What six papers share, and a class for each of them.

``vouch`` says which of them is played (:class:`Propose`): who knows the right answer of a made question, and so whom it
pays for what. The options of all are options of ``propose``.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from statistics import fmean
from typing import Any, ClassVar, Literal

from maporl.config.imports import unknown
from maporl.environments.base import Tool
from maporl.errors import ConfigError
from maporl.grading import LONGEST_LABEL
from maporl.protocols.base import Play, Protocol, seats
from maporl.tasks.base import in_place_of_question
from maporl.text import text_option
from maporl.types import IN_PLAY, Act, Ask, Example, Grade, Utterance, user_says
from trl_ext.ppo.options import Positive, option

PROPOSE = "Write a question that is hard but can be answered. Put it between <question> and </question>."
RATE = "{question}\n\nHow clear and sensible is this question? End with a number from 1 to 10."
MARK = "{question}\n\nAn answer to this:\n{answer}\n\nHow right is it? End with a number from 1 to 10."
_OUT_OF_TEN = re.compile(r"(?<![\d.,/-])(10|[1-9])(?:\.0)?\s*(?:/|out of)\s*10(?!\d)")
_LAST = re.compile(r"(?<![\d.,/-])(10|[1-9])(?:\.0)?\D*$")
"""The last number of a verdict, from 1 to 10."""
MARKS = tuple(str(mark) for mark in range(1, 11))


@dataclass(frozen=True)
class Proposing(Protocol):
    """What the papers share: the ``proposer`` writes a question, and the ``solver`` answers it ``tries`` times.

    Raises:
        ValueError: ``tag`` is not a word, or two seats have the same agent.
    """

    tries: Positive = option(5, "How often a question is answered.")
    proposer: str | None = option(None, "The agent that proposes. Default: the first one.")
    solver: str | None = option(None, "The agent that answers. Default: the second one.")
    propose: str = text_option(
        PROPOSE,
        "What the proposer is asked, with the {question}, the {answer} and the {document} of the task's example.",
    )
    tag: str | None = option(
        "question", "The question is what stands between `<tag>` and `</tag>`. None: all that the proposer says."
    )
    longest: Positive = option(2000, "Most characters of a question. One that is longer, or empty, is not asked.")
    solve: str = text_option("{question}", "What the solver is asked, with {question!}.")
    roles = True
    records = frozenset({"caller"})
    players = 2
    # whether the right answer of a made question is that of the task's example
    _answer_is_given: ClassVar[bool] = False
    # what a proposer is paid whose question is not asked; if it is empty, nobody knows what that would have earned, and
    # 0 may be more than it, so the proposer is not trained on
    _unasked: ClassVar[Mapping[str, float]] = {}

    def __post_init__(self):
        super().__post_init__()
        if self.tag is not None and not re.fullmatch(r"\w+", self.tag):
            raise ValueError(f"tag: expected a word, such as question, or null, got {self.tag!r:.40}")
        seated = [name for name in self._seats() if name is not None]
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

    def _seats(self) -> tuple[str | None, ...]:
        return self.proposer, self.solver

    def mentioned(self) -> set[str]:
        """Return the agents that the options name."""
        return {name for name in self._seats() if name is not None}

    def check_example(self, example: Example) -> None:
        """Check that an example of the task has what the proposer is to be told of it.

        Raises:
            ConfigError: it is a document that nobody is shown, or that has no answer where it is taken of the example.
        """
        if not in_place_of_question(example):
            return
        if self._answer_is_given:
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

    def in_evaluation(self) -> Protocol:
        """Return the protocol of evaluations: the solver answers the task's questions."""
        return Answer(self.solve, self._seats())

    def play(self, example: Example, agents: tuple[str, ...]) -> Play:
        """Play the dialogue. The outcome says what became of the proposal: "unread", "refused" or "asked"."""
        text = self.propose.format(question=example.question, answer=example.answer, document=document_of(example))
        taught, proposer = self._taught(example), seats(agents, *self._seats())[0]
        (proposal,) = yield [Ask(proposer, user_says(text), "proposer", answers=False, taught=(taught,))]
        question = (proposal.text if self.tag is None else between(self.tag, proposal.text) or "").strip()
        readable = 0 < len(question) <= self.longest
        answer = self._answer(question, proposal.text, example) if readable else None
        proposal.tags |= {"question": question if readable else None, "accepted": False}
        if answer is None:
            return self._not_asked(proposal, "unread")
        dropped = ("document", "draw", "bare_question", "shown_meta")
        meta = {name: value for name, value in example.meta.items() if name not in dropped}
        proposed = replace(example, question=question, answer=answer, meta=meta)
        made = yield from self._vouched(proposal, proposed, example)
        if made is None:
            return self._not_asked(proposal, "refused")
        return (yield from self._solved(proposal, made, agents))

    def _taught(self, example: Example) -> str:
        """Return what a warm start teaches a proposer to say: the example's own question."""
        return example.question if self.tag is None else f"<{self.tag}>{example.question}</{self.tag}>"

    def _answer(self, question: str, text: str, example: Example) -> str | None:
        """Return the answer of a proposed question: empty if nobody knows it yet, and None if it cannot be read."""
        return example.answer if self._answer_is_given or question == example.question else ""

    def _vouched(self, proposal: Utterance, made: Example, example: Example) -> Play:
        """Return the question that is asked, with its answer, or None if it is refused."""
        yield from ()
        return made

    def _solved(self, proposal: Utterance, made: Example, agents: tuple[str, ...]) -> Play:
        """Let the question be answered, and return the outcome."""
        tries = yield self._asks(proposal, made, agents)
        return self._pay(proposal, tries)

    def _asks(self, proposal: Utterance, made: Example, agents: tuple[str, ...]) -> list[Ask]:
        proposal.tags["accepted"] = True
        solver, told = seats(agents, *self._seats())[1], user_says(self.solve.format(question=made.question))
        return [Ask(solver, told, "solver", (proposal.id,), proposal.id, fresh=True, example=made)] * self.tries

    def _pay(self, proposal: Utterance, tries: list[Utterance]) -> str:
        """Pay the proposer and the tries. Return the outcome."""
        return "asked"

    def _not_asked(self, proposal: Utterance, outcome: str) -> str:
        """Pay a proposer whose question is not asked, and return the outcome."""
        proposal.rewards |= self._unasked
        proposal.trainable &= bool(self._unasked)
        return outcome


@dataclass(frozen=True)
class LanguageSelfPlay(Proposing):
    """Language Self-Play (arXiv 2509.07414), ``vouch: sources``: reward sources score the tries, and a rule the
    proposer."""


@dataclass(frozen=True)
class RZero(Proposing):
    """R-Zero (arXiv 2508.05004), ``vouch: majority``: the answer that most tries give is the right one.

    Raises:
        ValueError: ``least_share`` is above ``most_share``, or there is one try.
    """

    least_share: float = option(
        0.0, "With vouch: majority, the tries are trained on if at least this share of them gives the same answer."
    )
    most_share: float = option(1.0, "And if at most this share does.")
    _unasked = {"uncertainty": -1.0}
    pays = frozenset(_unasked)
    grade_between_turns = True

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.least_share <= self.most_share <= 1:
            raise ValueError(
                "least_share and most_share: expected shares between 0 and 1, the smaller one first, got "
                f"{self.least_share} and {self.most_share}"
            )
        if self.tries < 2:
            raise ValueError("tries: one try is always its own majority; expected at least 2 with vouch: majority")

    def _pay(self, proposal: Utterance, tries: list[Utterance]) -> str:
        share = fmean(let_majority_grade(tries))
        for u in tries:
            u.trainable &= self.least_share <= share <= self.most_share
        proposal.rewards["uncertainty"] = min(share, 1 - share)
        return "asked"


@dataclass(frozen=True)
class _Known(Proposing):
    """The right answer is known, so that a proposer is paid by the share of right tries, and a try for what it is."""

    _unasked = {"difficulty": 0.0, "band": 0.0, "variance": 0.0, "learnability": 0.0, "extreme": 0.0, "invalid": 1.0}
    pays = frozenset({*_unasked, "mistake", "unreadable"})
    grade_between_turns = True

    def _pay(self, proposal: Utterance, tries: list[Utterance]) -> str:
        if not self._answer_is_given and all(u.grade is None or u.grade.correct is None for u in tries):
            for u in tries:  # the task cannot compare them with a made answer, so they count as wrong and teach nothing
                u.grade = Grade(None, False, "the answer cannot be compared")
                u.trainable = False
            proposal.tags["accepted"] = False
            return self._not_asked(proposal, "unread")
        right = [float(u.grade is not None and u.grade.correct is True) for u in tries]
        for u, is_right in zip(tries, right, strict=True):
            final = u.grade is not None and u.grade.answer is not None
            u.rewards |= {"mistake": float(final and not is_right), "unreadable": float(not final and not is_right)}
        p = fmean(right)
        variance, extreme = p * (1 - p), p in (0, 1)
        proposal.rewards |= {
            "difficulty": 1 - p,
            "band": 4 * variance,
            "variance": math.exp(-((variance - 0.25) ** 2) / 0.02),  # SPICE, eq. 5, whose temperature is 0.01
            "learnability": 0.0 if extreme else 1 - p,
            "extreme": float(extreme),
            "invalid": 0.0,
        }
        return "asked"


@dataclass(frozen=True)
class Spice(_Known):
    """SPICE (arXiv 2510.24684), ``vouch: stated``: the proposer reads a document, and states the answer with the
    question.

    Raises:
        ValueError: ``answer_tag`` is not a word, is that of the question, or the text does not ask for it.
    """

    answer_tag: str = option("answer", "The tag of the answer with vouch: stated.")

    def __post_init__(self):
        super().__post_init__()
        if not re.fullmatch(r"\w+", self.answer_tag):
            raise ValueError(f"answer_tag: expected a word, such as answer, got {self.answer_tag!r:.40}")
        if self.tag in (None, self.answer_tag):
            raise ValueError(
                "tag: with vouch: stated the question stands between tags of its own, beside those of the answer "
                f"({self.answer_tag}), got {self.tag!r}; set tag: question"
            )
        for name, told in (("tag", self.tag), ("answer_tag", self.answer_tag)):
            if f"<{told}>" not in self.propose:
                raise ValueError(
                    f"propose: with vouch: stated what stands between <{told}> and </{told}> is read, and the text "
                    f"tells the proposer of no such tags, got {self.propose!r:.80}; write <{told}> and </{told}> into "
                    f"it, or set {name} to a tag that it has"
                )

    def _taught(self, example: Example) -> str:
        return f"{super()._taught(example)}<{self.answer_tag}>{example.answer}</{self.answer_tag}>"

    def _answer(self, question: str, text: str, example: Example) -> str | None:
        answer = (between(self.answer_tag, text) or "").strip()
        return answer if 0 < len(answer) <= LONGEST_LABEL else None


@dataclass(frozen=True)
class _Checked(_Known):
    """A tool checks the question."""

    check: str | None = option(None, "A tool that checks or answers questions, with vouch: given or tool.")
    check_argument: str = option("expression", "The argument of the tool that has the question.")
    check_about: tuple[str, ...] = option(
        (), "The values of the example's `meta` that the tool is given too, by these names."
    )

    def __post_init__(self):
        super().__post_init__()
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

    @property
    def uses_tools(self) -> frozenset[str]:  # type: ignore[override]  # it follows from the options
        """The tool that checks questions, if one does."""
        return frozenset([] if self.check is None else [self.check])

    def check_tools(self, tools: Mapping[str, Tool]) -> None:
        """Check that the tool that checks questions has the arguments that it is given, and needs no others.

        Raises:
            ValueError: it lacks one, or needs another.
        """
        if self.check is None or self.check not in tools:
            return
        names = tools[self.check].parameters["properties"]
        passed = {self.check_argument: "check_argument", **dict.fromkeys(self.check_about, "check_about")}
        for name, key in passed.items():
            if name not in names:
                raise ValueError(f"{key}: tool {self.check}: {unknown(name, names)}")
        for name in tools[self.check].parameters.get("required", ()):
            if name not in passed:
                raise ValueError(
                    f"check_about: tool {self.check} needs {name!r}, and is given {list(passed)} alone; name it here "
                    "if the meta of the task's examples has it, or set another check"
                )

    def check_example(self, example: Example) -> None:
        """Check that an example of the task has what the proposer and the tool are to be told of it.

        Raises:
            ConfigError: its meta lacks a value that ``check_about`` names, or it is a document that nobody is shown.
        """
        self._about(example)
        super().check_example(example)

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


@dataclass(frozen=True)
class SearchSelfPlay(_Checked):
    """Search Self-Play (arXiv 2510.18821), ``vouch: given``: the proposer writes a question to the example's answer."""

    _answer_is_given = True

    def _vouched(self, proposal: Utterance, made: Example, example: Example) -> Play:
        if self.check is None:
            return made
        (result,) = yield [self._call(proposal, made.question, example)]
        return made if result.error is None and result.text.strip() == example.answer.strip() else None


@dataclass(frozen=True)
class AbsoluteZero(_Checked):
    """Absolute Zero (arXiv 2505.03335), ``vouch: tool``: the answer is what the tool finds.

    Raises:
        ValueError: no tool is named.
    """

    def __post_init__(self):
        super().__post_init__()
        if self.check is None:
            raise ValueError("check: vouch: tool needs a tool that finds the answer; name one, such as calculator")

    def _vouched(self, proposal: Utterance, made: Example, example: Example) -> Play:
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


@dataclass(frozen=True)
class MultiAgentEvolve(Proposing):
    """Multi-Agent Evolve (arXiv 2510.23595), ``vouch: judge``: a judge marks the question, and each try.

    Raises:
        ValueError: ``least_quality`` is not between 0 and 1.
    """

    judge: str | None = option(None, "The agent that judges with vouch: judge. Default: the third one.")
    least_quality: float = option(
        0.7, "With vouch: judge, a question that is worth less than this, from 0 to 1, is not asked."
    )
    rate: str = text_option(RATE, "What the judge is asked about a question, with {question!}.")
    mark: str = text_option(MARK, "What the judge is asked about a try, with {question} and {answer!}.")
    players = 3
    _unasked = {"proposal": 0.0}
    pays = frozenset({*_unasked, "mark", "form"})

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.least_quality <= 1:
            raise ValueError(f"least_quality: expected a number between 0 and 1, got {self.least_quality}")

    def _seats(self) -> tuple[str | None, ...]:
        return self.proposer, self.solver, self.judge

    def _solved(self, proposal: Utterance, made: Example, agents: tuple[str, ...]) -> Play:
        judge = seats(agents, *self._seats())[2]
        (verdict,) = yield [_judged(judge, self.rate.format(question=made.question), proposal)]
        quality = _worth(verdict)
        if quality is None or quality < self.least_quality:
            proposal.trainable &= quality is not None
            proposal.rewards |= {} if quality is None else {"proposal": (quality + 1.0) / 3}
            return "refused"
        tries = yield [replace(ask, answers=False) for ask in self._asks(proposal, made, agents)]
        verdicts = yield [_judged(judge, self.mark.format(question=made.question, answer=u.text), u) for u in tries]
        worths = []
        for u, verdict in zip(tries, verdicts, strict=True):
            worth = _worth(verdict)
            u.trainable &= worth is not None
            if worth is not None:
                u.rewards |= {"mark": worth, "form": float(u.stop.whole and bool(u.text.strip()))}
                worths.append(worth)
        proposal.trainable &= bool(worths)
        if worths:
            proposal.rewards["proposal"] = (quality + (1 - fmean(worths)) + 1.0) / 3
        return "asked"


METHODS: dict[str, type[Proposing]] = {
    "given": SearchSelfPlay,
    "stated": Spice,
    "tool": AbsoluteZero,
    "majority": RZero,
    "judge": MultiAgentEvolve,
    "sources": LanguageSelfPlay,
}
"""The class of each way of vouching."""


@dataclass(frozen=True)
class Propose(RZero, SearchSelfPlay, AbsoluteZero, Spice, MultiAgentEvolve, LanguageSelfPlay):
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

    vouch: Literal["given", "stated", "tool", "majority", "judge", "sources"] = option(
        "majority",
        "Who knows the right answer: the task's example (given), the proposer (stated), the tool `check` (tool), most "
        "tries (majority), or nobody, so that a judge or reward sources score the tries (judge, sources).",
    )
    players = None  # type: ignore[assignment]  # ``method`` says how many
    least_players = 2

    def __post_init__(self):
        Protocol.__post_init__(self)
        for f in fields(self):
            users = [vouch for vouch, kind in METHODS.items() if f.name in kind.__dataclass_fields__]
            if users and self.vouch not in users and getattr(self, f.name) != f.default:
                raise ValueError(f"{f.name}: it is only used with vouch: {' or '.join(users)}; remove it, or set that")
        vars(self).update(pays=self.method.pays, grade_between_turns=self.method.grade_between_turns)  # it is frozen

    @cached_property
    def method(self) -> Proposing:
        """The protocol that ``vouch`` names, with those of the options that it has."""
        kind = METHODS[self.vouch]
        return kind(**{f.name: getattr(self, f.name) for f in fields(kind)})

    def check_example(self, example: Example) -> None:
        """Check that an example of the task has what the proposer and the tool are to be told of it.

        Raises:
            ConfigError: its meta lacks a value that ``check_about`` names, or it is a document that nobody is shown, or
                that has no answer where ``vouch`` takes one of it.
        """
        self.method.check_example(example)

    def check_players(self, players: tuple[str, ...]) -> None:
        """Check that there are two players, or three with a judge.

        Raises:
            ValueError: there are too few or too many of them.
        """
        super().check_players(players)
        if len(players) != (wanted := self.method.players):
            raise ValueError(
                f"with vouch: {self.vouch} it has {wanted} players but agents are {list(players)}; list that many in "
                "protocol.agents"
            )

    def play(self, example: Example, agents: tuple[str, ...]) -> Play:
        """Play the dialogue. The outcome says what became of the proposal: "unread", "refused" or "asked"."""
        return self.method.play(example, agents)


@dataclass(frozen=True)
class Answer(Protocol):
    """The solver of :class:`Propose` answers a question of the task. The other seats are silent."""

    solve: str
    seated: tuple[str | None, ...]
    roles = True

    def play(self, example: Example, agents: tuple[str, ...]) -> Play:
        """Play the dialogue."""
        yield [Ask(seats(agents, *self.seated)[1], user_says(self.solve.format(question=example.question)), "solver")]


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


def _judged(judge: str, text: str, of: Utterance) -> Ask:
    return Ask(judge, user_says(text), "judge", (of.id,), of.id, answers=False, fresh=True, taught=MARKS)


def _worth(verdict: Utterance) -> float | None:
    """Pay a verdict for its form. Return what its mark is worth, (m - 1)/9, or None if it cannot be read."""
    marks = [*_OUT_OF_TEN.finditer(verdict.text)][-1:] or [*_LAST.finditer(verdict.text)]
    verdict.rewards["form"] = float(bool(marks))
    return (int(marks[0][1]) - 1) / 9 if marks else None
