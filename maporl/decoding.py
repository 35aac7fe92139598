"""How each agent's answers are sampled: by agent, role and turn. Imports no torch.

The nearest value wins. The order is: the protocol's request (``Ask.sampling``), the role (``protocol.sampling``), the
agent (``agents.NAME.sampling``), and the run. Evaluations take ``evaluation.sampling`` first, and then how evaluations
draw tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from maporl.errors import Fault
from trl_ext.ppo.options import Decoding, Natural, NotNegative, Positive, PositiveShare, option, options


@options(frozen=True)
class Sampling:
    """How answers are sampled. None leaves a value as it is elsewhere.

    Each value may be a list of values, one for each turn. The last one is for all later turns.

    Raises:
        ValueError: a value is out of its range, or a list of values is empty.
    """

    temperature: NotNegative | list[NotNegative] | None = option(
        None,
        "Sampling temperature; 0 is greedy, and for agents that are not trained.",
    )
    top_p: PositiveShare | list[PositiveShare] | None = option(
        None, "Share of the probability to sample from, from 0 to 1."
    )
    top_k: Natural | list[Natural] | None = option(None, "Number of likeliest tokens to sample from; 0: all.")
    max_tokens: Positive | list[Positive] | None = option(None, "Most tokens of an answer.")
    stop: list[str] | list[list[str]] | None = option(
        None,
        "Strings that end an answer, or a list of such lists by turn. They take the place of ppo.stop_strings.",
    )

    def __post_init__(self):
        for name in ("temperature", "top_p", "top_k", "max_tokens"):
            if getattr(self, name) in ([], ()):
                raise ValueError(f"{name}: expected a number, or a list of one for each turn, got []")
        lists = self._stops()
        texts = all(isinstance(one, list | tuple) and all(isinstance(s, str) and s for s in one) for one in lists)
        if self.stop is not None and (not lists or not texts):
            raise ValueError(f"stop: expected a list of texts that are not empty, or such lists, got {self.stop!r:.80}")

    def _stops(self) -> Sequence[Any]:
        """Return the stop strings of each turn."""
        if not isinstance(self.stop, list | tuple):
            return []
        return self.stop if any(isinstance(one, list | tuple) for one in self.stop) else [self.stop]

    def at(self, turn: int) -> dict[str, Any]:
        """Return the values at ``turn``, counted from 0, by name. Values that are None are left out."""
        values = {}
        for name in ("temperature", "top_p", "top_k", "max_tokens"):
            value = getattr(self, name)
            if value is not None:
                values[name] = _of_turn(value, turn) if isinstance(value, list | tuple) else value
        if self.stop is not None:
            values["stop"] = tuple(_of_turn(self._stops(), turn))
        return values

    def every(self, name: str) -> list[Any]:
        """Return all values of ``name``, of whatever turn."""
        value = getattr(self, name)
        if value is None:
            return []
        return list(value) if isinstance(value, list | tuple) else [value]


def _of_turn(values: Sequence[Any], turn: int) -> Any:
    return values[min(turn, len(values) - 1)]


@dataclass(frozen=True)
class SpeakerSampling:
    """How one agent's answers are sampled, in training or in evaluations.

    Args:
        own: the agent's own values.
        roles: the values of roles.
        held_out: the agent's values in evaluations.
        training: whether the dialogues are those of training. If not, tokens are drawn as evaluations draw them, and
            ``own``, ``roles`` and the protocol decide only about the length of answers and their stop strings.
    """

    own: Sampling | None = None
    roles: Mapping[str, Sampling] = field(default_factory=dict)
    held_out: Sampling | None = None
    training: bool = False

    def at(self, asked: Sampling | None, role: str | None, turn: int, decoding: Decoding) -> Sampling | None:
        """Return how an answer is sampled, or None if it is sampled as the whole run.

        It has one value of each kind, and always a temperature, which utterances record.

        Args:
            asked: the sampling that the protocol asks for.
            role: the role in which the agent speaks.
            turn: the agent's turn, from 0.
            decoding: how the run draws tokens.
        """
        layers = [self.own, self.roles.get(role or ""), asked]
        values: dict[str, Any] = {}
        for layer in layers:
            values |= {} if layer is None else layer.at(turn)
        if not self.training:
            values = {name: value for name, value in values.items() if name in ("max_tokens", "stop")}
            values |= {} if self.held_out is None else self.held_out.at(turn)
        return Sampling(**{"temperature": decoding.temperature} | values) if values else None


@dataclass(frozen=True)
class TeamSampling:
    """How the answers of a team are sampled, where this differs from the run.

    Args:
        agents: the values of agents, in training. Those of ``maporl.Agent`` need not stand here.
        roles: the values of roles, in training. They win over those of agents.
        held_out: the values of agents in evaluations.
    """

    agents: Mapping[str, Sampling] = field(default_factory=dict)
    roles: Mapping[str, Sampling] = field(default_factory=dict)
    held_out: Mapping[str, Sampling] = field(default_factory=dict)

    def of(self, agent: str, training: bool) -> SpeakerSampling:
        """Return how the answers of ``agent`` are sampled, in training or in evaluations."""
        return SpeakerSampling(self.agents.get(agent), self.roles, self.held_out.get(agent), training)

    def longest(self, agent: str, default: int) -> int:
        """Return the most tokens that an answer of ``agent`` may have. ``default`` is the length of the run."""
        lengths = [default] if not (sampling := self.agents.get(agent)) or sampling.max_tokens is None else []
        for one in (sampling, self.held_out.get(agent), *self.roles.values()):
            lengths += one.every("max_tokens") if one is not None else []
        return max(lengths)


def greedy_learners(sampling: TeamSampling, learners: Mapping[str, str | None], gives_roles: bool) -> Iterator[Fault]:
    """Yield the sampling of each agent that is trained and would answer greedily in training.

    Args:
        sampling: how the answers of the team are sampled.
        learners: the agents that are trained, with their own roles.
        gives_roles: whether the protocol gives agents roles.
    """
    places = {f"agents.{name}.sampling": (name, sampling.agents.get(name)) for name in learners}
    for role, values in sampling.roles.items():
        playing = [name for name, declared in learners.items() if gives_roles or declared == role]
        if playing:
            places[f"protocol.sampling.{role}"] = (playing[0], values)
    for place, (name, section) in places.items():
        if section is not None and 0 in section.every("temperature"):
            yield Fault(
                f"{place}.temperature",
                f"it is 0, and agent {name!r} is trained; PPO needs the probability of each answer",
                f"so set it above 0, or set agents.{name}.trainable: false; greedy answers of evaluations are set by "
                "evaluation.temperature",
            )
