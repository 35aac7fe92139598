"""Debate (Du et al. 2023, arXiv 2305.14325; trained: MAPoRL, arXiv 2502.18439).

All agents answer at once, for several turns. From the second turn each agent is shown the others' last answers; its
own it remembers, because its conversation continues.
"""

from dataclasses import dataclass

from maporl.protocols.base import Play
from maporl.types import Ask, Example, Utterance

OTHERS = (
    "These are answers of other agents to the same question:\n\n{others}\n\n"
    "Weigh them against your own. Correct yourself where you were wrong, keep what is right, do not merely repeat, and "
    "justify your answer briefly.\n\n{question}"
)


@dataclass(frozen=True)
class Debate:
    """``turns`` simultaneous turns.

    ``opening`` may use ``{question}``; ``later`` may use ``{question}`` and ``{others}``, which joins one ``quote`` for
    each other agent (``{number}`` counts from 1, ``{name}`` and ``{text}``) with ``separator``.
    """

    turns: int = 2
    opening: str = "{question}"
    later: str = OTHERS
    quote: str = "Agent {number}:\n```\n{text}\n```"
    separator: str = "\n\n"

    def __post_init__(self):
        if self.turns < 1:
            raise ValueError(f"turns: a debate has at least 1 turn, got {self.turns}")
        for name, allowed in (
            ("opening", {"question"}),
            ("later", {"question", "others"}),
            ("quote", {"number", "name", "text"}),
        ):
            try:
                getattr(self, name).format(**dict.fromkeys(allowed, ""))
            except (KeyError, IndexError, ValueError) as error:
                raise ValueError(f"{name}: it may use {sorted(allowed)} in braces, but has {error}") from None

    def play(self, example: Example, agents: tuple[str, ...]) -> Play:
        """Outcome: None; everything is in the utterances."""
        said: list[Utterance] = []
        for turn in range(self.turns):
            asks = []
            for agent in agents:
                others = [u for u in said if u.agent != agent]
                text = (
                    self._message(example.question, others) if turn else self.opening.format(question=example.question)
                )
                asks.append(Ask(agent, [{"role": "user", "content": text}], parents=tuple(u.id for u in others)))
            said = yield asks

    def _message(self, question: str, others: list[Utterance]) -> str:
        quotes = [self.quote.format(number=n, name=u.agent, text=u.text) for n, u in enumerate(others, 1)]
        return self.later.format(question=question, others=self.separator.join(quotes))
