"""World: what agents say is what they do in an environment, turn by turn, until it is over."""

from collections.abc import Mapping
from dataclasses import dataclass

from maporl.protocols.base import Play, Protocol
from maporl.text import text_option
from maporl.types import Act, Ask, Example
from trl_ext.ppo.options import Positive, option


@dataclass(frozen=True)
class PlayWorld(Protocol):
    """The agents act in the environment ``place`` in their order, each at most ``turns`` times, until it is over.

    What the environment pays for an action at once is the reward of the utterance, under the name ``place``. What it
    pays at the end goes to the last utterance of each agent.

    A result names who acts next by ``value={"next": AGENT}``. Otherwise it is the next agent in the order.

    Raises:
        ValueError: ``turns`` is below 1, ``place`` is empty, or a text lacks a placeholder or has an unknown one.
    """

    place: str = option("", "The name of the environment.")
    turns: Positive = option(8, "Most turns of each agent.")
    tool: str = option("act", "The environment's tool that acts.")
    argument: str = option("action", "The argument of the tool that has the whole reply of an agent.")
    opening: str = text_option(
        "{question}", "What an agent is asked first, with {question}. The environment adds how it begins."
    )
    later: str = text_option(
        "{news}",
        "Its later prompts, with {question} and {news!}: the result of its "
        "own action, and a quote of each action of another agent since then.",
    )
    quote: str = text_option(
        "{name}: {action}\n{result}", "An action of another agent in {{news}}, with {name}, {action} and {result!}."
    )
    every_step_scored = False

    def __post_init__(self):
        super().__post_init__()
        if not self.place:
            raise ValueError("place: expected the name of an environment, as under environments:; give one")

    @property
    def pays(self) -> frozenset[str]:  # type: ignore[override]  # it follows from the options
        """The name of the environment's reward."""
        return frozenset({self.place})

    @property
    def acts_in(self) -> frozenset[str]:  # type: ignore[override]  # it follows from the options
        """The environment in which it acts."""
        return frozenset({self.place})

    def play(self, example: Example, agents: tuple[str, ...]) -> Play:
        """Play until it is over. The outcome is the number of actions, and whether it was over at the end.

        Raises:
            ValueError: the environment names an agent that does not play.
        """
        news: dict[str, list[tuple[int, str]]] = {agent: [] for agent in agents}
        left = dict.fromkeys(agents, self.turns)
        number, agent = 0, agents[0]
        while left[agent]:
            heard = "\n\n".join(text for _, text in news[agent])
            parts = [self.opening] * (left[agent] == self.turns) + [self.later] * bool(heard)
            told = "\n\n".join(part.format(question=example.question, news=heard) for part in parts)
            parents = tuple(of for of, _ in news[agent])
            (said,) = yield [Ask(agent, [{"role": "user", "content": told}], parents=parents)]
            (result,) = yield [Act(agent, self.tool, {self.argument: said.text}, said.id, self.place)]
            if result.reward is not None:
                said.rewards[self.place] = result.reward
            number, left[agent], news[agent] = number + 1, left[agent] - 1, []
            for other in agents:
                quoted = self.quote.format(name=agent, action=said.text, result=result.text)
                news[other].append((said.id, result.text if other == agent else quoted))
            if result.done or result.error == "over":
                return {"actions": number, "over": True}
            named = result.value.get("next") if isinstance(result.value, Mapping) else None
            agent = agents[(agents.index(agent) + 1) % len(agents)] if named is None else named
            if agent not in agents:
                raise ValueError(f"environment {self.place!r}: it wants {named!r:.80} to act, of agents {list(agents)}")
        return {"actions": number, "over": False}
