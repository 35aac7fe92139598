"""Call and return: a planner hands parts of the question to workers, as often as it wants (M-GRPO, MATPO)."""

from dataclasses import dataclass
from typing import Literal

from maporl.environments.base import Tool
from maporl.protocols.base import Play, Protocol, check_template
from maporl.text import check_pattern, matches
from maporl.types import Act, Ask, Example, user_says

PLAN = (
    "{question}\n\nYou may ask a helper: write <call>what you want to know</call>. You will be told what it says. "
    "When you know enough, give your final answer without a call."
)


@dataclass(frozen=True)
class CallReturn(Protocol):
    """The ``planner`` answers, or calls a worker, at most ``calls`` times.

    The planner is by default the first agent. The workers are the other agents, called in turn. The first group of
    ``pattern`` is the planner's question to a worker. The worker is asked with ``ask``, outside any conversation, and
    its reply comes back to the planner in ``returned``. An utterance that calls is not an answer. A call without a
    question is not a call. After the last call the planner receives ``enough``, which tells it to answer.

    With ``call: tool`` the planner has a tool ``ask_WORKER(question)`` for each worker instead. It may call several in
    one utterance, which are then asked at the same time. ``plan`` and ``ask`` are used as above; the call format of the
    planner says how replies come back, and its limits how often it may call.

    With ``tool`` a call does not go to a worker. Its text becomes the argument ``argument`` of this tool, which may
    belong to the environment ``place``, and what the tool returns is the reply.

    With ``judge`` the planner is shown each reply in this text, and asked whether it is useful, before it goes on
    (ReSeek, arXiv 2510.00568). The regular expressions ``useful`` and ``useless`` read its judgement, which must be one
    of both. Whatever it says, the reply stays in its conversation. ``returned`` and ``enough`` then need not repeat it.

    The regular expression ``form`` says what a reply must contain. The worker earns 1 if the reply contains it and 0 if
    not, under the reward name ``reply_form``. The planner's last utterance earns ``started``: the number of its calls
    divided by ``calls``, at most 1.

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
    tool: str | None = None
    place: str | None = None
    argument: str = "query"
    judge: str | None = None
    useful: str = r"(?i)<judge>\s*yes\s*</judge>"
    useless: str = r"(?i)<judge>\s*no\s*</judge>"
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
            check_template(name, getattr(self, name), {"reply"}, {"reply"} if self.judge is None else set())
        if self.judge is not None:
            check_template("judge", self.judge, {"reply"}, {"reply"})
        for name, value in (("judge", self.judge), ("tool", self.tool)):
            if value is not None and self.call == "tool":
                raise ValueError(f"{name}: goes with calls in text, got call: tool; set call: text, or remove it")
        if self.place is not None and self.tool is None:
            raise ValueError(f"place: {self.place!r} is where a tool is called; name it, as tool: search")
        for name in ("form", "useful", "useless"):
            check_pattern(name, getattr(self, name))
        if check_pattern("pattern", self.pattern) != 1:
            raise ValueError(f"pattern: expected one group, around what is asked; got {self.pattern!r}")

    @property
    def turns(self) -> int:  # type: ignore[override]  # it follows from the options
        """The largest number of utterances of the planner."""
        return self.calls * (1 if self.judge is None else 2) + 1

    @property
    def uses_tools(self) -> frozenset[str]:  # type: ignore[override]  # it follows from the options
        """The tool that it calls itself, unless it belongs to an environment."""
        return frozenset([self.tool] if self.tool is not None and self.place is None else [])

    @property
    def acts_in(self) -> frozenset[str]:  # type: ignore[override]  # it follows from the options
        """The environment in which it calls, if the tool belongs to one."""
        return frozenset([self.place] if self.place else [])

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
            (said,) = yield [Ask(planner, user_says(text), role="planner", parents=parents)]
            call = next(matches(self.pattern, said.text), None)
            if call is None or not call.group(1).strip():
                said.rewards["started"] = number / self.calls
                return number
            said.answers = False
            asked = self.ask.format(question=example.question, call=call.group(1).strip())
            if self.tool is not None:
                (result,) = yield [Act(planner, self.tool, {self.argument: asked}, said.id, self.place)]
                heard, parents = result.text, (said.id,)
            else:
                worker, told = workers[number % len(workers)], user_says(asked)
                (reply,) = yield [
                    Ask(worker, told, role="worker", parents=(said.id,), caller=said.id, answers=False, fresh=True)
                ]
                reply.rewards["reply_form"] = float(any(matches(self.form, reply.text)))
                heard, parents = reply.text, (reply.id,)
            if self.judge is not None:
                shown = user_says(self.judge.format(reply=heard))
                (judgement,) = yield [
                    Ask(planner, shown, role="judge", parents=parents, answers=False, taught=JUDGEMENTS)
                ]
                yes, no = (any(matches(pattern, judgement.text)) for pattern in (self.useful, self.useless))
                judgement.tags["useful"] = yes if yes != no else None
                parents = (judgement.id,)
            template = self.returned if number + 1 < self.calls else self.enough
            text = template.format(reply=heard)
        (said,) = yield [Ask(planner, user_says(text), role="planner", parents=parents)]
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
        (said,) = yield [Ask(planner, user_says(self.plan.format(question=example.question)), role="planner")]
        number = 0
        while calls := [call for call in said.calls if call.result is None and said.turn_end is None]:
            asks = []
            for call in calls:
                asked = self.ask.format(question=example.question, call=str(call.arguments["question"]).strip())
                worker = call.name.removeprefix(ASK)
                asks.append(
                    Ask(
                        worker,
                        user_says(asked),
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


JUDGEMENTS = ("<judge>yes</judge>", "<judge>no</judge>")
"""What warm starts teach to say of replies."""
ASK = "ask_"
"""What stands before a worker's name in the name of its tool."""


def _answered_by_worker(question: str) -> str:
    raise NotImplementedError("the protocol answers this call")
