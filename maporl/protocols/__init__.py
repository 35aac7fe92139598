"""Protocols decide who speaks when, and what each speaker sees. ``PROTOCOLS`` names them, and imports none of them."""

from typing import Any

from maporl.config import Config, validated
from maporl.config.imports import Parts, look_up, member, unknown
from maporl.config.schema import AgentSection
from maporl.errors import ConfigError
from maporl.protocols.base import Play as Play
from maporl.protocols.base import Protocol as Protocol
from maporl.protocols.base import must_be_protocol
from maporl.protocols.judging import StepJudge, judge_of, judged
from trl_ext.errors import retold

PROTOCOLS = Parts(
    {
        "debate": "maporl.protocols.debate:Debate",
        "chain": "maporl.protocols.chain:Chain",
        "collaboration": "maporl.protocols.collaboration:Collaboration",
        "forum": "maporl.methods.forum:Forum",
        "refine": "maporl.protocols.refine:Refine",
        "call_return": "maporl.protocols.call_return:CallReturn",
        "orchestrate": "maporl.methods.orchestrate:Orchestrate",
        "game": "maporl.protocols.game:PlayGame",
        "route": "maporl.methods.route:Route",
        "world": "maporl.protocols.world:PlayWorld",
        "code": "maporl.methods.code:Code",
        "propose": "maporl.methods.propose:Propose",
        "attempts": "maporl.methods.attempts:Attempts",
        "design": "maporl.methods.design:Design",
        "program": "maporl.serving.program:Program",
    }
)


def __getattr__(name: str) -> Any:
    return member(PROTOCOLS, name, __name__)


def build_protocol(section: dict[str, Any], agents: tuple[str, ...], where: str = "configuration") -> Protocol:
    """Build the protocol that a configuration's ``protocol:`` section describes.

    ``agents`` in the section restricts who plays.

    Raises:
        ConfigError: no protocol has this name, an option is wrong, or these agents cannot play it.
    """
    _check_listed(section, agents, where)
    protocol = _build(section, where)
    players = speakers(section, agents, protocol)
    judge = judge_of(protocol)
    if judge is not None and judge.agent not in agents:
        raise ConfigError(f"{where}: protocol.step_judge.agent: expected one of {list(agents)}, got {judge.agent!r}")
    if players == protocol.helpers():
        key = "summariser" if judge is None else "step_judge"
        raise ConfigError(f"{where}: protocol.{key}: {players[0]!r} is the only agent; add another, or remove {key}")
    for agent in sorted(protocol.mentioned()):
        if agent not in players:
            raise ConfigError(f"{where}: protocol {section['name']!r}: agent: {unknown(agent, players)}")
    with retold(ValueError, lambda error: ConfigError(f"{where}: protocol {section['name']!r}: {error}")):
        protocol.check_players(players)
    return protocol


def _build(section: dict[str, Any], where: str) -> Protocol:
    options = {key: value for key, value in section.items() if key not in ("name", "agents", "sampling", "step_judge")}
    name = section.get("name")
    kind = look_up(name, PROTOCOLS, f"{where}: protocol.name", Protocol)
    if "pass" in options and "pass_" in getattr(kind, "__dataclass_fields__", ()):
        options["pass_"] = options.pop("pass")  # Python has a keyword of this name, so a field cannot have it
    protocol = must_be_protocol(validated(kind, options, f"{where}: protocol"), f"{where}: protocol {name!r}")
    if (judge := section.get("step_judge")) is None:
        return protocol
    if not isinstance(judge, dict):
        raise ConfigError(f"{where}: protocol.step_judge: expected options, as {{agent: judge}}, got {judge!r:.80}")
    return judged(protocol, validated(StepJudge, judge, f"{where}: protocol.step_judge"))


def _check_listed(section: dict[str, Any], agents: tuple[str, ...], where: str) -> None:
    listed = section.get("agents")
    if listed is not None and (not isinstance(listed, list | tuple) or not listed):
        raise ConfigError(f"{where}: protocol.agents: expected some of {list(agents)}, got {listed!r:.80}; null: all")
    for agent in (listed := listed or []):
        if agent not in agents:
            raise ConfigError(f"{where}: protocol {section.get('name')!r}: agent: {unknown(agent, agents)}")
        if list(listed).count(agent) > 1:
            raise ConfigError(f"{where}: protocol.agents: {agent!r} is listed several times; list it once")


def speakers(section: dict[str, Any], agents: tuple[str, ...], protocol: Protocol) -> tuple[str, ...]:
    """Return who plays, in order: the agents in the section's ``agents``, by default all, and the helpers of
    ``protocol``."""
    playing = tuple(section.get("agents") or agents)
    return (*playing, *(name for name in protocol.helpers() if name not in playing))


def turns_of(config: Config) -> int:
    """Return the largest number of answers that an agent gives in the protocol of ``config``.

    Raises:
        ConfigError: the section describes no protocol.
    """
    return _build(config.protocol, "protocol").turns


def policy_names(agent: str, section: AgentSection, config: Config) -> tuple[str, ...]:
    """Return the names of the policies that speak for an agent, by turn. The last one speaks in all later turns too."""
    if isinstance(section.policy_per, list):
        return tuple(section.policy_per)
    policy = section.policy or agent
    if section.policy_per == "turn":
        return tuple(f"{policy}-turn{turn}" for turn in range(1, turns_of(config) + 1))
    return (f"{policy}-first", f"{policy}-rest") if section.policy_per == "first_and_rest" else (policy,)
