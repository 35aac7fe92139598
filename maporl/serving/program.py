"""Program: a program of the user's own calls the agents as models behind an address of OpenAI's and of Anthropic's
form."""

import copy
import dataclasses
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any, Literal
from urllib.request import getproxies

from maporl.config.imports import kind_of, look_up
from maporl.errors import ConfigError, Fault
from maporl.hosts import past_proxies
from maporl.protocols.base import Dropped, Play, Protocol
from maporl.serving.gateway import Report, Session, gateway
from maporl.serving.histories import Histories, Place
from maporl.serving.routes import Call
from maporl.serving.running import LATE, Ending, Question, Run, Runner, of_command, of_function, own_clients
from maporl.serving.wire import Refused, ask_of, calls_of, refusal_of, said
from maporl.types import IN_PLAY, Ask, Example, Message, Result, Utterance, Wait, why_nobody
from trl_ext.ppo.options import option

REHEARSED_SECONDS = 30.0
"""The most seconds of a program in a dry run."""
AT_ONCE = 64
"""How many programs run at once, where the user does not say it."""
AGAIN_SECONDS = 10.0
"""A program that is played again and asks something else has this time to ask what it asked before. Its threads may
come in another order."""
_warn_once = cache(partial(warnings.warn, stacklevel=1))


@dataclass(frozen=True)
class Program(Protocol):
    """A user's program, a function or a command, sends requests to the agents and returns the answer.

    The ``model`` of a request is the name of an agent. A request that repeats a conversation unchanged goes on with it,
    token by token; one that has changed it begins a new one. An utterance is a parent of every later request whose
    messages hold its text. An utterance that no request shows has the credit of the answer.

    What a program returns is graded. It may report rewards too (``POST {base_url}/reward``), which
    ``reward.sources: {reported: 1.0}`` counts.

    The program runs in this process or beside it, with the rights of the user who starts the run.

    Raises:
        ValueError: neither or both of ``run`` and ``command`` are given, or a number is out of its range.
    """

    run: str | Callable[..., Any] | None = option(
        None,
        "The program as MODULE:FUNCTION. It is called with base_url and those of question, api_key and example that it "
        "takes, and returns its answer. A coroutine function is awaited.",
    )
    command: tuple[str, ...] = option(
        (),
        "The program as a command: JSON with question, base_url, api_key and example on its standard input, the answer "
        "as its last line.",
    )
    variables: tuple[str, ...] = option(
        (),
        "Variables of the environment that a command is given beside those of the system and of libraries that train: "
        "none that looks like a secret is given unless it is named here.",
    )
    on_failure: Literal["zero", "drop", "stop"] = option(
        "zero",
        "What a program that fails leaves: a dialogue without answer (zero), one that is not trained on (drop), or "
        "the end of the run (stop).",
    )
    seconds: float = option(600.0, "Most seconds of a dialogue.")
    calls: int = option(100, "Most calls of a dialogue. Further ones are refused.")
    concurrency: int | None = option(
        None, "Most programs that run at once. By default 64, and with replays all of an update."
    )
    ignore: tuple[str, ...] = option(
        (),
        "Fields of requests that are left out, such as temperature, where the run decides. Others that cannot be had "
        "are refused.",
    )
    replays: bool = option(
        False,
        "Whether it makes the same requests in the same order when it gets the same replies, so that its dialogues can "
        "be forked (branching). Each fork then starts it again, with the recorded completions as replies.",
    )
    roles = True
    pays = frozenset({"reported"})
    every_step_scored = False
    waits = True
    runs_program = True

    def __post_init__(self):
        super().__post_init__()
        if bool(self.run) == bool(self.command):
            raise ValueError(
                "run, command: expected one of them: run: MODULE:FUNCTION, or command: [python, my_program.py]"
            )
        for name in ("seconds", "calls", "concurrency"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ValueError(f"{name}: expected a number above 0, got {getattr(self, name)}")
        if self.replays and self.concurrency is not None:
            raise ValueError(
                "concurrency: with replays a dialogue and its forks run beside each other, however many they are; "
                f"leave it out, got {self.concurrency}"
            )
        if self._own_clients:  # the function is looked up before models are loaded, too
            _warn_once(f"protocol.run: {self._own_clients}, and no agent; give it the base_url of its call")

    @property
    def replayable(self) -> bool:  # type: ignore[override]  # it follows from the options
        """Whether its dialogues can be forked, as the user says."""
        return self.replays

    @cached_property
    def function(self) -> Callable[..., Any]:
        """The function that is the program.

        Raises:
            ConfigError: it cannot be imported, does not take ``base_url``, or needs others than are given.
        """
        os.environ.update(past_proxies())  # clients read it when they are made, which may be when they are imported
        function = look_up(self.run, {}, "protocol.run") if isinstance(self.run, str) else self.run
        question = Question("", "", {})
        expected = "protocol.run: expected a function of base_url, and of question, api_key and example if it likes"
        if not callable(function) or "base_url" not in question.arguments(function):
            raise ConfigError(
                f"{expected}, got {kind_of(function)}; without base_url its client cannot reach its agents, and would "
                "ask a provider with your key: give the client base_url, or run the program as a command, in which "
                "OpenAI() and Anthropic() find its agents (protocol.command)"
            )
        if lacking := question.lacking(function):
            method = "name the method of an object, as in my_app:team.solve" if "self" in lacking else ""
            remedy = method or "give it a default, or call the function in another one that takes these"
            raise ConfigError(f"{expected}, got {kind_of(function)}, which needs {', '.join(lacking)}; {remedy}")
        return function

    @cached_property
    def _own_clients(self) -> str:
        return own_clients(self.function) if self.run else ""

    @cached_property
    def _runner(self) -> Runner:
        return Runner(None if self.replays else self.concurrency or AT_ONCE)

    def in_evaluation(self) -> "Program":
        """Return the program as it is played in evaluations, which fork nothing."""
        return dataclasses.replace(self, replays=False)

    def in_rehearsal(self) -> "Program":
        """Return the program for a dry run: it may fail, because mock completions are not what it expects."""
        return dataclasses.replace(self, on_failure="zero", seconds=min(self.seconds, REHEARSED_SECONDS))

    def check_rehearsal(self, rehearsal: Any) -> Iterator[Fault]:
        """Yield all that the program asks for and is always refused, or else that it always fails or asks no learner.

        It is an error if a refusal ends the program each time or keeps it from every learner, because the run would
        learn nothing then. So is a program that asks nobody on any of several questions, because no words have decided
        that.
        """
        run = rehearsal.run
        dialogues = [play.dialogue for play in rehearsal.plays]
        failures = [(dialogue.outcome or {}).get("failure") for dialogue in dialogues]
        answered = {u.agent for dialogue in dialogues for u in dialogue.utterances if "refused" not in u.tags}
        unasked = not answered & set(run.learners or run.speakers)
        refused = dict.fromkeys(self._always_refused(rehearsal))
        for why in refused:
            what = f"a request of the program is refused: {why}"
            yield Fault("protocol", what, "", "error" if all(failures) or unasked else "warning")
        if refused:
            return
        last = f". The last failure:\n{failures[-1]}" if all(failures) else ""
        # a program that begins slowly has more time in the run
        if why_nobody(dialogues) and LATE not in last and (nobody := why_nobody(rehearsal.silent_elsewhere())):
            remedy = f"let its client use the base_url that it is given, with the name of an agent as model{last}"
            yield Fault("protocol", f"the program asks no agent: {nobody}", remedy)
        if last:
            remedy = f"call it with such words, or try it with maporl play{last}"
            yield Fault("protocol", "the program failed in three rehearsals with made-up words", remedy, "warning")
        if unasked:
            learners = ", ".join(run.learners)
            what = f"the program asked none of the agents that are trained ({learners}) in three rehearsals"
            remedy = "let its client use the base_url that it is given, with the name of an agent as model"
            yield Fault("protocol", what, remedy, "warning")

    def _always_refused(self, rehearsal: Any) -> Iterator[str]:
        """Yield why requests of the program are refused, whatever is said.

        It is then played without the fields that can be ignored, as the remedy says, to find what else would be
        refused.
        """
        outcomes = [play.dialogue.outcome or {} for play in rehearsal.plays]
        within = all(outcome.get("calls", 0) < self.calls for outcome in outcomes)  # words decide, else
        whys = [why for why in outcomes[-1].get("refused", []) if all(why in o.get("refused", []) for o in outcomes)]
        yield from whys if within else []
        fields = {why.partition(":")[0] for why in whys if "protocol.ignore" in why} - set(self.ignore)
        if within and fields:
            further = replace(self, ignore=(*self.ignore, *sorted(fields)))
            yield from further._always_refused(rehearsal.of(further))

    def play(self, example: Example, agents: tuple[str, ...]) -> Play:
        """Play until the program ends. The outcome says how.

        It has the ``answer`` or None, the number of ``requests``, how many of them were ``answered``, and the ``calls``
        that count for ``protocol.calls``. Where it happened, it has the ``failure`` too, the reasons for which requests
        were ``refused``, and why ``nobody`` was asked.

        A fork starts the program too, and answers what it asks with what was said, as it is told by the driver.

        Raises:
            Dropped: it failed, and ``on_failure`` is drop.
            ConfigError: it failed, and ``on_failure`` is stop.
        """
        server = gateway()
        session = server.open(agents, self.ignore)
        question = Question(example.question, session.base_url, _plain(example))
        work = (
            of_command(self.command, question, self.variables) if self.command else of_function(self.function, question)
        )
        run = Run(work, self.seconds, session.tell)
        talk = _Talk(session, self.calls)
        self._runner.start(run)
        try:
            while run.ending is None:
                again = yield [Wait(session.news())]
                asked = [] if run.ending is not None else talk.asks(session.take(), again)
                talk.pay_agents()
                if asked:
                    talk.take(asked, (yield [ask for _, ask in asked]))
            ending = run.ending
        finally:
            self._runner.end(run)
            server.close(session)
        return self._ended(ending, talk, session)

    def _ended(self, ending: Ending, talk: "_Talk", session: Session) -> dict[str, Any]:
        """Let the dialogue end: the answer is somebody's, what was reported is paid, and a failure is told."""
        kept = {"answer": ending.answer, "failure": ending.failure, "refused": session.refused}
        kept |= {"nobody": None if talk.sent else self._why_nobody(ending, session)}
        outcome = {name: value for name, value in kept.items() if value or name == "answer"} | {"calls": talk.called}
        outcome |= {"requests": talk.answered + session.denied, "answered": talk.answered}
        if ending.failure is not None:
            what = f"protocol program: it failed (protocol.on_failure: {self.on_failure})"
            if self.on_failure == "stop":
                raise ConfigError(f"{what}; mend it, or set protocol.on_failure: zero or drop:\n{ending.failure}")
            warnings.warn(f"{what}:\n{ending.failure}", stacklevel=2)
            if self.on_failure == "drop":
                raise Dropped("program", outcome=outcome)
        talk.submit(ending.answer or "")
        talk.pay_all()
        return outcome

    def _why_nobody(self, ending: Ending, session: Session) -> str:
        """Return why no agent was asked, in one sentence."""
        if session.denied:
            return f"all its requests were refused: {'; '.join(dict.fromkeys(session.refused))}"
        whys = [f"it failed: {ending.failure.splitlines()[-1]}"] if ending.failure else []
        proxies = [f"{name.upper()}_PROXY" for name in ("http", "all") if name in getproxies()]
        whys += [f"{name} is set, and a client asks that proxy if it has not read NO_PROXY" for name in proxies[:1]]
        return "; ".join(["no request came to its base_url", *filter(None, [self._own_clients]), *whys])


class _Talk:
    """The utterances of a program's dialogue, and the requests that they answer."""

    def __init__(self, session: Session, most: int):
        self.session, self.most = session, most
        self.histories = Histories()
        self.utterances: dict[int, Utterance] = {}
        """By their ids. Of a turn in which an agent called tools of the run it has the last one."""
        self.sent: dict[int, Message] = {}
        """What the program was sent of each utterance."""
        self.called = self.answered = 0
        self.patience: float | None = None
        """When a program that is played again must have asked what it asked before."""
        self.reports: list[Report] = []
        """What was reported for all agents."""

    def asks(self, calls: Sequence[Call], again: Sequence[Ask] = ()) -> list[tuple[Call, Ask]]:
        """Return what is asked for requests that have come together, in an order that does not depend on time.

        If they were asked before (``again``), those that belong to it are returned when all of them are there, and the
        others are put back.
        """
        asked: list[tuple[Call, Ask]] = []
        for call in sorted(calls, key=lambda call: repr(call.request)):
            try:
                if self.called + len(asked) + call.request.n > self.most:
                    had = f"this dialogue has had {self.called + len(asked)} of {self.most} calls (protocol.calls)"
                    what = f"{had}, and {call.request.n} more are asked for; each sample is one"
                    raise Refused(what, status=429, code="too_many_calls")
                asked += [(call, ask) for ask in self._asks(call)]
            except Refused as error:
                call.refuse(error)
        if again:
            asked = self._asked_before(asked, again)
        self.called += len(asked)
        for call, _ in asked:
            self._see_results(self.histories.place(call.request))
        if len({call for call, _ in asked}) < 2:
            return asked
        return [(call, replace(ask, tags={**ask.tags, "together": True})) for call, ask in asked]

    def _asked_before(self, asked: list[tuple[Call, Ask]], again: Sequence[Ask]) -> list[tuple[Call, Ask]]:
        """Return those of ``asked`` that are ``again``, or nothing until all of these have come.

        Whoever comes with something else for too long is returned, which the driver refuses.
        """
        left = list(asked)
        found = []
        for before in again:
            same = (one for one in left if _place_of(one[1]) == _place_of(before))
            if (one := next(same, None)) is not None:
                found.append(one)
                left = [other for other in left if other is not one]
        now = time.monotonic()
        if len(found) == len(again):
            self.patience = None
            self.session.put_back(list(dict.fromkeys(call for call, _ in left)), 0)
            return found
        if not asked or (self.patience is not None and now >= self.patience):
            return asked
        back = list(dict.fromkeys(call for call, _ in asked))
        self.session.put_back(back, AGAIN_SECONDS if self.patience is None else None)
        self.patience = self.patience or now + AGAIN_SECONDS
        return []

    def _asks(self, call: Call) -> list[Ask]:
        """Return what is asked for a request: its samples, of which each is an utterance."""
        request = call.request
        place, parents = self.histories.place(request), self._parents(call)
        tags: dict[str, Any] = {"program": True} | ({"history": place.history} if place.history else {})
        return [
            ask_of(
                request,
                place.new,
                parents=parents,
                tags=tags | ({"choice": f"{number} of {request.n}"} if request.n > 1 else {}),
                sampling=request.sampling,
                after=place.after,
                seed=() if request.seed is None else (request.seed, number),
            )
            for number in range(1, request.n + 1)
        ]

    def _see_results(self, place: Place) -> None:
        """Record what the program answers to the calls of the utterance with which a conversation goes on."""
        if place.after is None:
            return
        calls = [call for call in self.utterances[place.after].calls if call.result is None]
        results = [message for message in place.new if message["role"] == "tool"]
        for called, result in zip(calls, results, strict=False):
            called.result = Result(result["content"])

    def _parents(self, call: Call) -> tuple[int, ...]:
        """Return the utterances whose text is in the messages of a request, or those that its header names."""
        if call.request.parents is not None:
            kinds = [f"{kind}{self.session.name}" for kind in ("chatcmpl-", "resp_", "msg_")]
            names = {f"{kind}-{number}": number for number in self.utterances for kind in kinds}
            unknown = [name for name in call.request.parents if name not in names]
            if unknown:
                raise Refused(f"x-maporl-parents: {unknown[0]!r:.80} is not the id of a reply", "x-maporl-parents")
            return tuple(names[name] for name in call.request.parents)
        heard = "\n".join(message["content"] for message in call.request.messages)
        called = [one for message in call.request.messages for one in message.get("tool_calls", ())]
        return tuple(
            number
            for number, message in self.sent.items()
            if any(one in called for one in message.get("tool_calls", ()))
            or any(holds(heard, text) for text in self._shown(number, call.request.agent))
        )

    def _shown(self, utterance: int, agent: str) -> Iterator[str]:
        """Yield what a request to ``agent`` may show of an utterance: its text, and the ids of its calls.

        What a call asks may be all that is shown to another agent, which is called as a tool.
        """
        yield self.sent[utterance]["content"]
        spoken = self.utterances[utterance]
        for name, call in calls_of(spoken):
            yield name
            if agent != spoken.agent and isinstance(call.arguments, Mapping):
                yield from (value for value in call.arguments.values() if isinstance(value, str))

    def take(self, asked: Sequence[tuple[Call, Ask]], utterances: Sequence[Utterance]) -> None:
        """Send each program's request what was said to it."""
        answers: dict[Call, list[Utterance]] = {}
        for (call, _), utterance in zip(asked, utterances, strict=True):
            self.utterances[utterance.id] = utterance
            # a copy in a fork lacks what only the end of the other dialogue has made of it
            if utterance.submitted is not None:
                utterance.answers, utterance.submitted, utterance.grade = False, None, None
            utterance.settles = ()
            utterance.rewards.pop("reported", None)
            if (why := refusal_of(utterance)) is not None:
                call.refuse(why)
                continue
            self.sent[utterance.id] = said(utterance, call.request)
            self.histories.add(call.request, self.sent[utterance.id], utterance.id)
            answers.setdefault(call, []).append(utterance)
        for call, samples in answers.items():
            call.answer(*samples)
        self.answered += len(answers)

    def submit(self, answer: str) -> None:
        """Let the last one who said ``answer``, or else the last one who spoke, answer with it.

        What nobody was shown has the credit of this answer.
        """
        spoken = [u for u in self.utterances.values() if "refused" not in u.tags]
        if not spoken:
            return
        texts = {u.id: self.sent[u.id]["content"] for u in spoken}
        same = (u for u in reversed(spoken) if holds(texts[u.id], answer) or holds(answer, texts[u.id]))
        author = next(same, spoken[-1])
        author.answers, author.submitted = True, answer
        read = {parent for u in spoken for parent in u.parents}
        for u in spoken:
            if u is not author and u.id not in read:
                u.settles = (author.id,)

    def pay_agents(self) -> None:
        """Pay what the program has reported for single agents: to what each has said last."""
        for report in self.session.take_reports():
            if report.agent is None:
                self.reports.append(report)
            else:
                self._pay(report, [u for u in self.utterances.values() if u.agent == report.agent])

    def pay_all(self) -> None:
        """Pay what the program has reported: for agents as before, and for all to the answer."""
        self.pay_agents()
        for report in self.reports:
            self._pay(report, [u for u in self.utterances.values() if u.answers])

    def _pay(self, report: Report, those: Sequence[Utterance]) -> None:
        for u in those[-1:]:
            u.rewards["reported"] = u.rewards.get("reported", 0.0) + report.value


def _place_of(ask: Ask) -> tuple[Any, ...]:
    """Return what tells the asks of a program apart."""
    return ask.agent, ask.after, list(ask.messages), ask.schemas, ask.seed, ask.tags.get("choice")


def holds(text: str, part: str) -> bool:
    """Return whether ``part`` stands in ``text`` as whole words, exactly or without the space around it.

    >>> holds("The others say: 14.", "4"), holds("The others say: 14.", " 14 "), holds("Anything.", "")
    (False, True, False)
    """
    part = part.strip()
    if not part or part not in text:
        return False
    before, after = r"(?<!\w)" if part[0].isalnum() else "", r"(?!\w)" if part[-1].isalnum() else ""
    return re.search(before + re.escape(part) + after, text) is not None


def _plain(example: Example) -> dict[str, Any]:
    """Return what a program may know of an example: what its task shows, and not its answer, solution or tests."""
    meta = {name: value for name, value in example.meta.items() if name in IN_PLAY}
    return copy.deepcopy({"id": example.id, "question": example.question, "meta": meta.pop("shown_meta", {}) | meta})
