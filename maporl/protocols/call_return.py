"""Call and return: a planner hands parts of the question to workers, as often as it wants (M-GRPO, MATPO)."""

from dataclasses import dataclass
from typing import Literal

from maporl.environments.base import Tool, tool_of
from maporl.protocols.base import Play, Protocol, check_template
from maporl.text import check_pattern, matches, pattern_option, text_option
from maporl.types import Act, Ask, Example, user_says
from trl_ext.ppo.options import Positive, option

PLAN = (
    "{question}\n\nYou may ask a helper: write <call>what you want to know</call>. You will be told what it says. "
    "When you know enough, give your final answer without a call."
)


@dataclass(frozen=True)
class CallReturn(Protocol):
    """The ``planner`` answers, or calls a worker, at most ``calls`` times.

    The workers are the agents beside the planner, called in turn. Each is asked outside any conversation, and its reply
    comes back to the planner. An utterance that calls is not an answer. A call without a question is not a call.

    With ``call: tool`` the planner may call several workers in one utterance, which are then asked at the same time.
    The call format of the planner says how replies come back, and its limits how often it may call.

    The protocol pays a worker ``reply_form``: 1 if its reply has the ``form``, and else 0. The planner's last utterance
    earns ``started``: the number of its calls divided by ``calls``, at most 1.

    Raises:
        ValueError: an option is out of range, or a text lacks a placeholder or has an unknown one.
    """

    calls: Positive = option(4, "Most calls.")
    planner: str | None = option(None, "The agent that plans and answers. Default: the first one.")
    plan: str = text_option(PLAN, "What the planner is asked, with {question!}.")
    ask: str = text_option("{call}", "What a worker is asked, with {question} and {call!}.")
    returned: str = option("The helper says: {reply}", "How a reply comes back to the planner, with {reply}.")
    enough: str = option(
        "The helper says: {reply}\n\nThere are no more calls. Give your final answer.",
        "How the reply to the last call comes back, with {reply}. It tells the planner to answer.",
    )
    pattern: str = option(
        r"(?s)<call>((?:(?!<call>).)*?)</call>",
        "A regular expression whose group is the planner's question to a worker.",
    )
    form: str = pattern_option(r"\S", "A regular expression that is found in a reply of the right form.")
    call: Literal["text", "tool"] = option(
        "text",
        "How the planner calls: by a text that `pattern` finds, or by a tool `ask_WORKER(question)` for each worker.",
    )
    tool: str | None = option(None, "A tool that answers the calls in place of the workers.")
    place: str | None = option(None, "The environment to which the tool belongs, if it belongs to one.")
    argument: str = option("query", "The tool's argument that has the text of the call.")
    judge: str | None = text_option(
        None,
        "What the planner is asked about each reply, with {reply!}, before it goes on: whether it is useful (ReSeek, "
        "arXiv 2510.00568). Whatever it says, the reply stays in its conversation, so that `returned` and `enough` "
        "need not repeat it.",
    )
    useful: str = pattern_option(
        r"(?i)<judge>\s*yes\s*</judge>",
        "A regular expression that is found in a judgement that the reply is useful. A judgement must be one of both.",
    )
    useless: str = pattern_option(
        r"(?i)<judge>\s*no\s*</judge>", "A regular expression that is found in a judgement that it is not."
    )
    every_step_scored = False
    roles = True
    records = frozenset({"caller"})
    pays = frozenset({"reply_form", "started"})

    def __post_init__(self):
        super().__post_init__()
        for name in ("returned", "enough"):
            check_template(name, getattr(self, name), {"reply"}, {"reply"} if self.judge is None else set())
        for name, value in (("judge", self.judge), ("tool", self.tool)):
            if value is not None and self.call == "tool":
                raise ValueError(f"{name}: goes with calls in text, got call: tool; set call: text, or remove it")
        if self.place is not None and self.tool is None:
            raise ValueError(f"place: {self.place!r} is where a tool is called; name it, as tool: search")
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
        named = {f"{ASK}{worker}": f"Ask {worker}." for worker in workers}
        return [tool_of({"name": n, "description": what, "parameters": parameters}) for n, what in named.items()]

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
