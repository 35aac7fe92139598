"""Chain: agents speak one after another, and each sees what was said before (CORY, MARFT, MHGPO, MAC-SPGG)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from maporl.protocols.base import (
    Play,
    Protocol,
    answered,
    check_somebody_speaks,
    check_speaks,
    check_template,
    speakers_of,
)
from maporl.text import text_option
from maporl.types import Ask, Example, Utterance, user_says
from trl_ext.ppo.options import Positive, option

LATER = "{question}\n\nOthers have said:\n\n{others}"


@dataclass(frozen=True)
class Chain(Protocol):
    """A chain of ``turns`` rounds in which the agents speak in ``order``. An agent is asked with ``later`` if there is
    something to see, and with ``opening`` otherwise.

    Raises:
        ValueError: an option is out of range, or a text lacks a placeholder or has an unknown one.
    """

    turns: Positive = option(1, "Number of rounds.")
    order: tuple[str, ...] = option((), "The agents in the order in which they speak. Default: as they are listed.")
    visibility: Literal["predecessor", "all", "graph"] = option(
        "all",
        "Whose words an agent sees: those of its predecessor, of all before it in the dialogue, or of the agents that "
        "`sees` names for it (graph).",
    )
    sees: dict[str, tuple[str, ...]] = option(
        {}, "The agents whose words each agent sees, with visibility: graph, as {bob: [ann]}."
    )
    opening: str = text_option("{question}", "What an agent that sees nothing is asked, with {question!}.")
    later: str = text_option(LATER, "What an agent that sees something is asked, with {question} and {others}.")
    prompts: dict[str, str] = option(
        {},
        "Texts of single agents in place of these two, as {bob: TEXT}. They may have {reference} too, the right "
        "answer, which only such an agent is shown (the sneaky translator of arXiv 2602.23248).",
    )
    quote: str = text_option("{name}: {text}", "An utterance in {{others}}, with {name} and {text}.")
    separator: str = option("\n\n", "Stands between the quotes.")
    answering: Literal["all", "last"] = option(
        "all", "Whose words answer the question: those of all, or of the last agent in the order."
    )
    speaks: dict[str, tuple[int, ...]] = option(
        {}, "The rounds, from 1, in which single agents speak: {bob: [1, 3]}. In its other rounds an agent is silent."
    )
    pass_: str | None = option(
        None,
        "The word by which an agent declines: an utterance that is this word only is not shown to others. The texts "
        "must tell the agents so.",
    )
    until_agreement: bool = option(
        False, "End the dialogue as soon as the last answers of all agents are the same (Optima, arXiv 2410.08115)."
    )

    def __post_init__(self):
        super().__post_init__()
        if (self.visibility == "graph") != bool(self.sees):
            raise ValueError("sees: names whom each agent sees, and goes with visibility: graph; give both or neither")
        check_speaks(self.speaks, self.turns)
        if self.speaks and len(set(self.order)) < len(self.order):
            raise ValueError(f"speaks: it counts rounds, but order {list(self.order)} lists an agent twice; remove one")
        if self.until_agreement and self.answering == "last":
            raise ValueError("until_agreement: it compares all agents, and answering: last has one answer; remove one")
        for agent, text in self.prompts.items():
            check_template(f"prompts.{agent}", text, {"question", "others", "reference"})

    def mentioned(self) -> set[str]:
        """Return the agents that the options name."""
        return {*self.order, *self.prompts, *self.speaks, *self.sees, *(b for seen in self.sees.values() for b in seen)}

    @property
    def every_step_scored(self) -> bool:  # type: ignore[override]  # it follows from the options
        """Whether every step ends with an answer: true unless only the last agent answers, or agents may decline."""
        return self.answering == "all" and self.pass_ is None

    @property
    def grade_between_turns(self) -> bool:  # type: ignore[override]  # it follows from the options
        """Whether it must know which answers are the same."""
        return self.until_agreement

    def check_players(self, players: tuple[str, ...]) -> None:
        """Check that these agents can play it.

        Raises:
            ValueError: nobody speaks in a round.
        """
        super().check_players(players)
        check_somebody_speaks(self.speaks, self.order or players, self.turns)

    def play(self, example: Example, agents: tuple[str, ...]) -> Play:
        """Ask every agent in order, ``turns`` times.

        The outcome is "agreement" if the dialogue ended early, else None.
        """
        order = self.order or agents
        said: list[Utterance] = []
        for turn in range(self.turns):
            for agent in speakers_of(self.speaks, order, turn):
                ask = self._ask(agent, example, said, answers=self._answers(agent, order))
                said += yield [replace(ask, turn=turn) if self.speaks else ask]
                if self.until_agreement and _agree(said, order):
                    return "agreement"
        return None

    def _answers(self, agent: str, order: tuple[str, ...]) -> bool:
        return self.answering == "all" or agent == order[-1]

    def _ask(self, agent: str, example: Example, said: list[Utterance], answers: bool) -> Ask:
        seen = self._seen(agent, said)
        others = self.separator.join(self.quote.format(name=u.agent, text=u.words()) for u in seen)
        template = self.prompts.get(agent, self.later if seen else self.opening)
        text = template.format(question=example.question, others=others, reference=example.answer)
        return Ask(agent, user_says(text), parents=tuple(u.id for u in seen), answers=answers)

    def _seen(self, agent: str, said: list[Utterance]) -> list[Utterance]:
        """Return what is new to the agent: the utterances since it last spoke that it may see."""
        last = max((i for i, u in enumerate(said) if u.agent == agent), default=-1)
        new = answered(said[last + 1 :])
        if self.visibility == "predecessor":
            return new[-1:]
        if self.visibility == "graph":
            return [u for u in new if u.agent in self.sees.get(agent, ())]
        return new


def _agree(said: list[Utterance], agents: Sequence[str]) -> bool:
    """Return whether all ``agents`` have answered, and their last answers are the same."""
    last = {u.agent: u.grade.answer for u in answered(said) if u.grade is not None}
    return set(last) == set(agents) and None not in last.values() and len(set(last.values())) == 1
