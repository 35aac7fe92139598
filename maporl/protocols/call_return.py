"""Call and return: a planner hands parts of the question to workers, as often as it wants (M-GRPO, MATPO)."""

from dataclasses import dataclass
from typing import Literal

from maporl.environments.base import Tool
from maporl.protocols.base import Play, Protocol, check_template
from maporl.text import check_pattern, matches
from maporl.types import Ask, Example

PLAN = (
    "{question}\n\nYou may ask a helper: write <call>what you want to know</call>. You will be told what it says. When you know "
    "enough, give your final answer without a call."
)


@dataclass(frozen=True)
class CallReturn(Protocol):
    """The ``planner`` answers, or calls a worker, at most ``calls`` times.

    The planner is by default the first agent. The workers are the other agents, called in turn. The first group of
    ``pattern`` is the planner's question to a worker. The worker is asked with ``ask``, outside any conversation, and
    its reply comes back to the planner in ``returned``. An utterance that calls is not an answer. A call without a question
    is not a call. After the last call
    the planner receives ``enough``, which tells it to answer.

    With ``call: tool`` the planner has a tool ``ask_WORKER(question)`` for each worker instead. It may call several in one
    utterance, which are then asked at the same time. ``plan`` and ``ask`` are used as above; the call format of the planner says
    how replies come back, and its limits how often it may call.

    The regular expression ``form`` says what a reply must contain. The worker earns 1 if the reply contains it and 0 if
    not, under the reward name ``reply_form``. The planner's last utterance earns ``started``: the number of its calls divided by
    ``calls``, at most 1.

    Raises:
        ValueError: an option is out of range, or a text lacks a placeholder or has an unknown one.
    """

    calls: int = 4
    planner: str | None = None
    plan: str = PLAN
    ask: str = "{call}"
    returned: str = "The helper says: {reply}"
    enough: str = "The helper says: {reply}\n\nThere are no more calls. Give your final answer."
    pattern: str = r"(?s)<call>((?:(?!<call>).)*?)</call>"
    form: str = r"\S"
    call: Literal["text", "tool"] = "text"
    every_step_scored = False
    roles = True
    records = frozenset({"caller"})
    pays = frozenset({"reply_form", "started"})

    def __post_init__(self):
        super().__post_init__()
        if self.calls < 1:
            raise ValueError(f"calls: expected at least 1, got {self.calls}")
        check_template("plan", self.plan, {"question"}, {"question"})
        check_template("ask", self.ask, {"question", "call"}, {"call"})
        for name in ("returned", "enough"):
            check_template(name, getattr(self, name), {"reply"}, {"reply"})
        check_pattern("form", self.form)
        if check_pattern("pattern", self.pattern) != 1:
            raise ValueError(f"pattern: expected one group, around what is asked; got {self.pattern!r}")

    @property
    def turns(self) -> int:  # type: ignore[override]  # it follows from the options
        """The largest number of utterances of the planner."""
        return self.calls + 1

    def mentioned(self) -> set[str]:
        """Return the agents that the options name."""
        return {self.planner} - {None}  # type: ignore[return-value]

    def play(self, example: Example, agents: tuple[str, ...]) -> Play:
        """Play the dialogue. The outcome is the number of calls."""
        planner = self.planner or agents[0]
        if self.call == "tool":
            return (yield from self._by_tools(example, planner))
        workers = [a for a in agents if a != planner] or [planner]
        text = self.plan.format(question=example.question)
        parents: tuple[int, ...] = ()
        for number in range(self.calls):
            (said,) = yield [Ask(planner, _user(text), role="planner", parents=parents)]
            call = next(matches(self.pattern, said.text), None)
            if call is None or not call.group(1).strip():
                said.rewards["started"] = number / self.calls
                return number
            said.answers = False
            asked = self.ask.format(question=example.question, call=call.group(1).strip())
            worker = workers[number % len(workers)]
            (reply,) = yield [
                Ask(worker, _user(asked), role="worker", parents=(said.id,), caller=said.id, answers=False, fresh=True)
            ]
            reply.rewards["reply_form"] = float(any(matches(self.form, reply.text)))
            template = self.returned if number + 1 < self.calls else self.enough
            text, parents = template.format(reply=reply.text), (reply.id,)
        (said,) = yield [Ask(planner, _user(text), role="planner", parents=parents)]
        said.rewards["started"] = 1.0
        return self.calls

    def tools(self, agent: str, agents: tuple[str, ...]) -> list[Tool]:
        """Return a tool of the planner for each worker, with ``call: tool``."""
        planner = self.planner or agents[0]
        if self.call != "tool" or agent != planner:
            return []
        workers = [worker for worker in agents if worker != planner] or [planner]
        # a worker that is asked nothing could have a prompt without tokens
        question = {
            "type": "string",
            "description": "the question, with everything that is needed to answer it",
            "pattern": r"\S",
        }
        parameters = {"type": "object", "properties": {"question": question}, "required": ["question"]}
        return [Tool(f"{ASK}{worker}", f"Ask {worker}.", parameters, _answered_by_worker) for worker in workers]

    def _by_tools(self, example: Example, planner: str) -> Play:
        """Play with tools in place of a pattern."""
        (said,) = yield [Ask(planner, _user(self.plan.format(question=example.question)), role="planner")]
        number = 0
        while calls := [call for call in said.calls if call.result is None and said.turn_end is None]:
            asks = []
            for call in calls:
                asked = self.ask.format(question=example.question, call=str(call.arguments["question"]).strip())
                worker = call.name.removeprefix(ASK)
                asks.append(
                    Ask(
                        worker,
                        _user(asked),
                        role="worker",
                        parents=(said.id,),
                        caller=said.id,
                        answers=False,
                        fresh=True,
                    )
                )
            replies = yield asks
            for reply in replies:
                reply.rewards["reply_form"] = float(any(matches(self.form, reply.text)))
            number += len(calls)
            results = [
                {"role": "tool", "name": call.name, "content": reply.words()}
                for call, reply in zip(calls, replies, strict=True)
            ]
            parents = tuple(reply.id for reply in replies)
            (said,) = yield [Ask(planner, results, role="planner", parents=parents, continues=said.id)]
        said.rewards["started"] = min(1.0, number / self.calls)
        return number


ASK = "ask_"
"""What stands before a worker's name in the name of its tool."""


def _answered_by_worker(question: str) -> str:
    raise NotImplementedError("the protocol answers this call")


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]
