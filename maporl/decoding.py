"""How each agent's answers are sampled: by agent, role and turn. Imports no torch.

The nearest value wins. The order is: the protocol's request (``Ask.sampling``), the role (``protocol.sampling``), the
agent (``agents.NAME.sampling``), and the run. Evaluations take ``evaluation.sampling`` first, and then how evaluations
draw tokens.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from maporl.errors import Fault, one_line
from trl_ext.chat.template_worker import PARTED, VALUES
from trl_ext.chat.templates import fault_of_grammar
from trl_ext.ppo.options import Decoding, Natural, NotNegative, Positive, PositiveShare, option, options

BY_TURN = ("temperature", "top_p", "top_k", "max_tokens", "structured_output")
"""The values of a :class:`Sampling` that may be lists by turn, but for its stop strings."""

WRITTEN = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
"""Where JSON has spaces: as ``json.dumps`` writes them. An untrained model would write them up to the last token."""
OPEN = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties", "$ref"})
"""The keys of an object that say which other properties it may have."""
IN_EVALUATIONS = ("max_tokens", "stop", "structured_output")
"""Those that evaluations take over."""


def as_written(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON schema for what a model writes: an object that lists its properties has no others, unless it says
    ``additionalProperties``, because what nobody asked for has no end.

    >>> as_written({"properties": {"a": {}}})["additionalProperties"]
    False
    """

    def closed(part: Any, named: bool = False) -> Any:
        """Return a schema with closed objects, or a mapping of ``named`` ones."""
        if isinstance(part, list):
            return [closed(one) for one in part]
        if not isinstance(part, dict):
            return part
        kept = () if named else VALUES
        told = {key: one if key in kept else closed(one, not named and key in PARTED) for key, one in part.items()}
        is_open = named or not isinstance(part.get("properties"), dict) or not OPEN.isdisjoint(part)
        return told if is_open else told | {"additionalProperties": False}

    return WRITTEN | (schema if "allOf" in json.dumps(schema) else closed(schema))


@options(frozen=True)
class StructuredOutput:
    """The constraint of answers: a JSON schema, a regular expression or a grammar. Each token is drawn among those that
    may come next, and its probability is that among them, in training too.

    Raises:
        ValueError: not exactly one is given.
    """

    json_schema: str | dict[str, Any] | None = option(
        None,
        "A JSON schema, or the path of a file with one. Answers have spaces as json.dumps writes them, unless the "
        "schema has an x-guidance of its own.",
    )
    regex: str | None = option(None, "A regular expression, which the whole answer matches.")
    grammar: str | None = option(None, "A grammar in Lark's form, as the package llguidance reads it.")

    def __post_init__(self):
        given = [name for name, value in vars(self).items() if value is not None]
        if len(given) != 1:
            raise ValueError(f"expected one of json_schema, regex and grammar, got {given or 'none'}")

    @property
    def kind(self) -> str:
        """Return in words what it is."""
        if self.json_schema is not None:
            return "a JSON schema"
        return "a grammar" if self.regex is None else "a regular expression"

    @cached_property
    def schema(self) -> dict[str, Any] | None:
        """Return the JSON schema.

        Raises:
            ValueError: its file cannot be read.
        """
        if not isinstance(self.json_schema, str):
            return self.json_schema
        with open(self.json_schema, encoding="utf-8") as file:
            read = json.load(file)
        if not isinstance(read, dict):
            raise ValueError(f"{self.json_schema}: expected a JSON schema, got {read!r:.80}")
        return read

    @cached_property
    def text(self) -> str:
        """Return the grammar as :class:`trl_ext.ppo.options.Grammar` has it."""
        if self.grammar is not None:
            made: Any = {"lark_grammar": self.grammar}
        elif (schema := self.schema) is not None:
            made = {"json_schema": as_written(schema)}
        else:
            made = {"lark_grammar": f"start: {self.expression}"}
        return json.dumps({"grammars": [made]}, ensure_ascii=False)

    @property
    def expression(self) -> str:
        """Return it as a part of a grammar in Lark's form.

        Raises:
            ValueError: it is a whole grammar.
        """
        if (schema := self.schema) is not None:
            return f"%json {json.dumps(as_written(schema))}"
        if self.regex is None:
            raise ValueError("structured_output: a grammar cannot be joined with calls; give json_schema or regex")
        # a slash, escaped or not, would end the expression
        return "/" + re.sub(r"(?s)\\.|/", lambda found: r"\x2f" if found[0][-1] == "/" else found[0], self.regex) + "/"

    @property
    def response_format(self) -> dict[str, Any]:
        """Return what an OpenAI-compatible server is asked for.

        Raises:
            ValueError: it is a regular expression or a grammar.
        """
        if (schema := self.schema) is None:
            raise ValueError("structured_output: an API is asked for JSON schemas alone; give json_schema")
        if schema == {"type": "object"}:
            return {"type": "json_object"}
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}

    def faults(self, place: str) -> Iterator[Fault]:
        """Yield what is wrong with it. ``place`` is its key."""
        key = f"{place}.{next(name for name, value in vars(self).items() if value is not None)}"
        try:
            why = fault_of_grammar(self.text)
        except (OSError, ValueError) as error:
            why = str(error)
        if why:
            yield Fault(key, one_line(why, 300))


@options(frozen=True)
class Sampling:
    """The sampling parameters of answers. None takes the value from the next wider scope.

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

    structured_output: StructuredOutput | list[StructuredOutput] | None = option(
        None, "What answers are held to: {json_schema: FILE or mapping}, {regex: ...} or {grammar: ...}."
    )

    def __post_init__(self):
        for name in BY_TURN:
            if getattr(self, name) in ([], ()):
                raise ValueError(f"{name}: expected a value, or a list of one for each turn, got []")
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
        for name in BY_TURN:
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
    """The sampling parameters of one agent's answers, in training or in evaluations.

    Args:
        own: the agent's own values.
        roles: the values of roles.
        held_out: the agent's values in evaluations.
        training: whether the dialogues are those of training. If not, tokens are drawn as evaluations draw them, and
            ``own``, ``roles`` and the protocol decide only about the length of answers, their stop strings and what
            they are held to.
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
            values = {name: value for name, value in values.items() if name in IN_EVALUATIONS}
            values |= {} if self.held_out is None else self.held_out.at(turn)
        return Sampling(**{"temperature": decoding.temperature} | values) if values else None


@dataclass(frozen=True)
class TeamSampling:
    """The sampling parameters of a team, where they differ from the run's.

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
        own = self.agents.get(agent)
        lengths = [default] if own is None or own.max_tokens is None else []
        return max([*lengths, *self.every(agent, "max_tokens")])

    def every(self, agent: str, name: str) -> list[Any]:
        """Return all values of ``name`` with which answers of ``agent`` may be sampled."""
        sections = (self.agents.get(agent), self.held_out.get(agent), *self.roles.values())
        return [value for one in sections if one is not None for value in one.every(name)]


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
