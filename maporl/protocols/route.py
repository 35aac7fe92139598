"""Route: a router sends the question to a searcher, as often as it wants, and then to an answerer (Dr. MAS)."""

from dataclasses import dataclass
from typing import Literal

from maporl.protocols.base import Play, Protocol, check_template, seats
from maporl.text import check_pattern, matches
from maporl.types import Act, Ask, Example, Utterance, user_says

STATE = "{question}\n\n{passages}\n\n"
ROUTE = STATE + "Is this enough to answer? End with <verify>yes</verify> or <verify>no</verify>."
SEARCH = STATE + "{verdict}\n\nWhat should be looked up next? End with <search>your query</search>."
ANSWER = STATE + "Answer the question."


@dataclass(frozen=True)
class Route(Protocol):
    """The ``router`` says whether enough is known. If not, the ``searcher`` searches, and the router is asked again.
    The ``answerer`` answers when the router says so, or after ``steps`` searches. With ``at_end: stop`` nobody has to
    answer: the router is asked ``steps`` times, and if it never says so, the dialogue ends after the last of them
    without an answer.

    By default they are the first, the second and the third agent. Each of them is asked outside any conversation, with
    everything that was found so far in ``{passages}``: a ``found`` for each step. Without a search it is ``nothing``.
    The searcher is shown what the router said in ``{verdict}``, and the answerer may be.

    The regular expressions ``enough`` and ``more`` say yes and no. The router is taken to say no unless only ``enough``
    is found. The first group of ``query`` is the query, and without a match the whole reply is. It becomes the argument
    ``argument`` of the tool ``tool``, which may belong to the environment ``place``.

    A reply of the router with either yes or no, and a reply of the searcher with a query, earns 1, and any other one 0,
    under the reward name ``route_form``. If ``form`` is given, a reply of the router earns 1 if this regular expression
    is found in it. (``form`` of ``refine`` is never None: there one expression approves, and none says what else a
    verdict may be.) A routing is a parent of what it leads to. So it has the credit of that, if ``reward.sources`` does
    not name ``route_form``.

    Raises:
        ValueError: an option is out of range, two roles have one agent, or a text or a pattern cannot serve.
    """

    steps: int = 4
    at_end: Literal["answer", "stop"] = "answer"
    router: str | None = None
    searcher: str | None = None
    answerer: str | None = None
    tool: str = "search"
    place: str | None = None
    argument: str = "query"
    route: str = ROUTE
    search: str = SEARCH
    answer: str = ANSWER
    found: str = "Step {step}, found for {query}:\n{text}"
    nothing: str = "Nothing was looked up yet."
    enough: str = r"(?i)<verify>\s*yes\s*</verify>"
    more: str = r"(?i)<verify>\s*no\s*</verify>"
    query: str = r"(?s)<search>((?:(?!<search>).)*?)</search>"
    form: str | None = None
    every_step_scored = False
    roles = True
    least_players = 3
    pays = frozenset({"route_form"})

    def __post_init__(self):
        super().__post_init__()
        if self.steps < 1:
            raise ValueError(f"steps: expected at least 1, got {self.steps}")
        named = [name for name in (self.router, self.searcher, self.answerer) if name is not None]
        if len(set(named)) < len(named):
            raise ValueError(f"router, searcher, answerer: expected three agents, got {named}; give each role its own")
        for name, verdict in (("route", set()), ("search", {"verdict"}), ("answer", {"verdict"})):
            needed = {"question", "passages"}
            check_template(
                name, getattr(self, name), needed | verdict, needed | (verdict if name == "search" else set())
            )
        check_template("found", self.found, {"step", "query", "text"}, {"text"})
        groups = [check_pattern(name, getattr(self, name)) for name in ("enough", "more", "query")]
        if groups[2] != 1:
            raise ValueError(f"query: expected one group, around the query; got {self.query!r}")
        if self.form is not None:
            check_pattern("form", self.form)

    @property
    def uses_tools(self) -> frozenset[str]:  # type: ignore[override]  # it follows from the options
        """The tool that it calls itself, unless it belongs to an environment."""
        return frozenset([self.tool] if self.place is None else [])

    @property
    def acts_in(self) -> frozenset[str]:  # type: ignore[override]  # it follows from the options
        """The environment in which it searches, if the tool belongs to one."""
        return frozenset([self.place] if self.place else [])

    def mentioned(self) -> set[str]:
        """Return the agents that the options name."""
        return {name for name in (self.router, self.searcher, self.answerer) if name is not None}

    def play(self, example: Example, agents: tuple[str, ...]) -> Play:
        """Play the dialogue. The outcome is the number of searches, or "unanswered"."""
        router, searcher, answerer = seats(agents, self.router, self.searcher, self.answerer)
        passages: list[str] = []
        shown: tuple[int, ...] = ()

        def ask(agent: str, role: str, template: str, routing: Utterance | None = None) -> list[Ask]:
            values = {"question": example.question, "passages": "\n\n".join(passages) or self.nothing}
            text = template.format(**values, verdict=routing.text if routing else "")
            parents = (*shown, routing.id) if routing else shown
            answers = role == "answerer"
            return [Ask(agent, user_says(text), role, parents, answers=answers, fresh=True)]

        routing: Utterance | None = None
        while len(passages) < self.steps:
            (routing,) = yield ask(router, "router", self.route)
            yes, no = (any(matches(pattern, routing.text)) for pattern in (self.enough, self.more))
            formed = yes != no if self.form is None else any(matches(self.form, routing.text))
            routing.rewards["route_form"] = float(formed)
            if yes and not no:
                break
            if self.at_end == "stop" and len(passages) + 1 == self.steps:
                return "unanswered"  # nobody would be shown what one more search finds
            (said,) = yield ask(searcher, "searcher", self.search, routing)
            match = next(matches(self.query, said.text), None)
            said.rewards["route_form"] = float(match is not None)
            query = (said.text if match is None else match.group(1)).strip()
            (result,) = yield [Act(searcher, self.tool, {self.argument: query}, said.id, self.place)]
            passages.append(self.found.format(step=len(passages) + 1, query=query, text=result.text))
            shown, routing = (*shown, said.id), None
        yield ask(answerer, "answerer", self.answer, routing)
        return len(passages)
