"""Chain: agents speak one after another, each seeing what was said before (CORY, MARFT, MHGPO, MAC-SPGG)."""

from dataclasses import dataclass, field
from typing import Literal

from maporl.protocols.base import Play, Protocol, check_template
from maporl.types import Ask, Example, Utterance

LATER = "{question}\n\nOthers have said:\n\n{others}"


@dataclass(frozen=True)
class Chain(Protocol):
    """``turns`` rounds in which the agents speak in ``order`` (default: as they are listed).

    ``visibility``: each sees its ``predecessor``'s words, those of ``all`` before it in the dialogue, or of the agents that
    ``sees`` names for it (``graph``). ``opening`` is asked where there is nothing to see, else ``later``, in which
    ``{others}`` joins a ``quote`` of each with ``separator``; ``prompts`` has texts of its own for agents, with the same
    braces. ``answering``: whose words answer the question: of ``all``, or of the ``last`` in the order.
    """

    turns: int = 1
    order: tuple[str, ...] = ()
    visibility: Literal["predecessor", "all", "graph"] = "all"
    sees: dict[str, tuple[str, ...]] = field(default_factory=dict)
    opening: str = "{question}"
    later: str = LATER
    prompts: dict[str, str] = field(default_factory=dict)
    quote: str = "{name}: {text}"
    separator: str = "\n\n"
    answering: Literal["all", "last"] = "all"

    def __post_init__(self):
        if self.turns < 1:
            raise ValueError(f"turns: a chain has at least 1 round, got {self.turns}")
        if (self.visibility == "graph") != bool(self.sees):
            raise ValueError("sees: names whom each agent sees, and goes with visibility: graph; give both or neither")
        check_template("opening", self.opening, {"question"}, {"question"})
        check_template("later", self.later, {"question", "others"})
        check_template("quote", self.quote, {"name", "text"})
        for agent, text in self.prompts.items():
            check_template(f"prompts.{agent}", text, {"question", "others"})

    def mentioned(self) -> set[str]:
        """Agents that the options name."""
        return {*self.order, *self.prompts, *self.sees, *(b for seen in self.sees.values() for b in seen)}

    @property
    def every_step_scored(self) -> bool:  # type: ignore[override]  # it follows from the options
        """Whether each step ends with an answer."""
        return self.answering == "all"

    def play(self, example: Example, agents: tuple[str, ...]) -> Play:
        """Everybody in order, ``turns`` times."""
        order = self.order or agents
        said: list[Utterance] = []
        for _ in range(self.turns):
            for agent in order:
                said += yield [self._ask(agent, example.question, said, answers=self._answers(agent, order))]

    def _answers(self, agent: str, order: tuple[str, ...]) -> bool:
        return self.answering == "all" or agent == order[-1]

    def _ask(self, agent: str, question: str, said: list[Utterance], answers: bool) -> Ask:
        seen = self._seen(agent, said)
        others = self.separator.join(self.quote.format(name=u.agent, text=u.words()) for u in seen)
        template = self.prompts.get(agent, self.later if seen else self.opening)
        text = template.format(question=question, others=others)
        return Ask(agent, [{"role": "user", "content": text}], parents=tuple(u.id for u in seen), answers=answers)

    def _seen(self, agent: str, said: list[Utterance]) -> list[Utterance]:
        """What is new to the agent: said since it last spoke, as far as it may see it."""
        last = max((i for i, u in enumerate(said) if u.agent == agent), default=-1)
        new = said[last + 1 :]
        if self.visibility == "predecessor":
            return new[-1:]
        if self.visibility == "graph":
            return [u for u in new if u.agent in self.sees.get(agent, ())]
        return new
