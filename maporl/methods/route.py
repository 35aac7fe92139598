"""Route: a router sends the question to a searcher, as often as it wants, and then to an answerer (Dr. MAS)."""

from dataclasses import dataclass
from typing import Literal

from maporl.protocols.base import Play, Protocol, seats
from maporl.text import check_pattern, matches, text_option
from maporl.types import Act, Ask, Example, Utterance, user_says
from trl_ext.ppo.options import Positive, option

STATE = "{question}\n\n{passages}\n\n"
ROUTE = STATE + "Is this enough to answer? End with <verify>yes</verify> or <verify>no</verify>."
SEARCH = STATE + "{verdict}\n\nWhat should be looked up next? End with <search>your query</search>."
ANSWER = STATE + "Answer the question."


@dataclass(frozen=True)
class Route(Protocol):
    """The ``router`` says whether enough is known. If not, the ``searcher`` searches, and the router is asked again.
    The ``answerer`` answers when the router says so, or after ``steps`` searches.

    Each of them is asked outside any conversation, with everything that was found so far in ``{passages}``. The router
    is taken to say no unless only ``enough`` is found in its reply.

    A reply of the router with either yes or no, and a reply of the searcher with a query, earns 1, and any other one 0,
    under the reward name ``route_form``. A routing is a parent of what it leads to. So it has the credit of that, if
    ``reward.sources`` does not name ``route_form``.

    Raises:
        ValueError: an option is out of range, two roles have one agent, or a text or a pattern cannot serve.
    """

    steps: Positive = option(4, "Most searches.")
    at_end: Literal["answer", "stop"] = option(
        "answer",
        "What follows the last search. answer: the answerer answers. stop: nobody has to answer; the router is asked "
        "`steps` times, and if it never says that enough is known, the dialogue ends without an answer.",
    )
    router: str | None = option(None, "The agent that says whether enough is known. Default: the first one.")
    searcher: str | None = option(None, "The agent that searches. Default: the second one.")
    answerer: str | None = option(None, "The agent that answers. Default: the third one.")
    tool: str = option("search", "The tool that searches.")
    place: str | None = option(None, "The environment to which the tool belongs, if it belongs to one.")
    argument: str = option("query", "The tool's argument that has the query.")
    route: str = text_option(ROUTE, "What the router is asked, with {question!} and {passages!}.")
    search: str = text_option(
        SEARCH, "What the searcher is asked, with {question!}, {passages!} and {verdict!}, what the router said."
    )
    answer: str = text_option(ANSWER, "What the answerer is asked, with {question!}, {passages!} and {verdict}.")
    found: str = text_option(
        "Step {step}, found for {query}:\n{text}", "A step in {{passages}}, with {step}, {query} and {text!}."
    )
    nothing: str = option("Nothing was looked up yet.", "Stands in {passages} before the first search.")
    enough: str = option(
        r"(?i)<verify>\s*yes\s*</verify>", "A regular expression that is found in a reply of the router that says yes."
    )
    more: str = option(r"(?i)<verify>\s*no\s*</verify>", "A regular expression that is found in one that says no.")
    query: str = option(
        r"(?s)<search>((?:(?!<search>).)*?)</search>",
        "A regular expression whose group is the query. Without a match the whole reply is.",
    )
    form: str | None = option(
        None,
        "A regular expression that is found in a reply of the router of the right form. None: either yes or no. (That "
        "of `refine` is never None: there one expression approves, and none says what else a verdict may be.)",
    )
    every_step_scored = False
    roles = True
    least_players = 3
    pays = frozenset({"route_form"})

    def __post_init__(self):
        super().__post_init__()
        named = [name for name in (self.router, self.searcher, self.answerer) if name is not None]
        if len(set(named)) < len(named):
            raise ValueError(f"router, searcher, answerer: expected three agents, got {named}; give each role its own")
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
