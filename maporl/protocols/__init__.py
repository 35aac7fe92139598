"""Protocols: who speaks when, and sees what. ``PROTOCOLS`` names them all."""

from typing import Any

from maporl.config import ConfigError, unknown, validated
from maporl.protocols.base import Play, Protocol
from maporl.protocols.call_return import CallReturn
from maporl.protocols.chain import Chain
from maporl.protocols.collaboration import Collaboration
from maporl.protocols.debate import Debate
from maporl.protocols.forum import Forum
from maporl.protocols.game import PlayGame
from maporl.protocols.refine import Refine

PROTOCOLS: dict[str, Any] = {
    "debate": Debate,
    "chain": Chain,
    "collaboration": Collaboration,
    "forum": Forum,
    "refine": Refine,
    "call_return": CallReturn,
    "game": PlayGame,
}


def build_protocol(section: dict[str, Any], agents: tuple[str, ...], where: str = "configuration") -> Protocol:
    """The protocol that a configuration's ``protocol:`` section describes; ``agents`` in it restricts who plays."""
    options = dict(section)
    name = options.pop("name", None)
    if not isinstance(name, str) or name not in PROTOCOLS:
        raise ConfigError(f"{where}: protocol.name: {unknown(name, PROTOCOLS)}")
    _check_players(section, agents, where)
    options.pop("agents", None)
    protocol = validated(PROTOCOLS[name], options, f"{where}: protocol")
    _check_mentioned(protocol, name, speakers(section, agents), where)
    return protocol


def _check_mentioned(protocol: Any, name: str, players: tuple[str, ...], where: str) -> None:
    """Agents in a protocol's options play; and there are as many players as it needs."""
    for agent in sorted(getattr(protocol, "mentioned", set)()):
        if agent not in players:
            raise ConfigError(
                f"{where}: protocol {name!r} names agent {agent!r} but agents are {list(players)}; add it under agents:"
            )
    needed = getattr(protocol, "players", None)
    if needed is not None and len(players) != needed:
        raise ConfigError(
            f"{where}: protocol {name!r}: {protocol.game} has {needed} players but agents are {list(players)}; list that many "
            "in protocol.agents"
        )
    if name in ("collaboration", "refine") and len(players) < 2:
        raise ConfigError(f"{where}: protocol {name!r} needs two agents, got {list(players)}; add one under agents:")


def _check_players(section: dict[str, Any], agents: tuple[str, ...], where: str) -> None:
    listed = section.get("agents")
    if listed is not None and (not isinstance(listed, list | tuple) or not listed):
        raise ConfigError(
            f"{where}: protocol.agents: expected a list of agents, got {listed!r:.80}; give some of {list(agents)}, or "
            "remove it so that all play"
        )
    players = speakers(section, agents)
    for agent in players:
        if agent not in agents:
            raise ConfigError(
                f"{where}: protocol {section['name']!r} names agent {agent!r} but agents are {list(agents)}; add it under agents:"
            )
        if players.count(agent) > 1:
            raise ConfigError(f"{where}: protocol.agents: {agent!r} stands {players.count(agent)} times; name it once")
    if players == (section.get("summariser"),):
        raise ConfigError(
            f"{where}: protocol.summariser: {players[0]!r} is the only agent, and it does not debate itself; let another "
            "agent play too, or remove summariser"
        )


def speakers(section: dict[str, Any], agents: tuple[str, ...]) -> tuple[str, ...]:
    """Who plays, in order: ``protocol.agents``, by default every agent; and a summariser."""
    playing = tuple(section.get("agents") or agents)
    helper = section.get("summariser")
    return playing if helper is None or helper in playing else (*playing, helper)


def opening_of(section: dict[str, Any]) -> str:
    """How the protocol of a ``protocol:`` section puts a question to begin with."""
    return str(section.get("opening", "{question}"))


__all__ = [
    "PROTOCOLS",
    "CallReturn",
    "Chain",
    "Collaboration",
    "Debate",
    "Forum",
    "Play",
    "PlayGame",
    "Protocol",
    "Refine",
    "build_protocol",
    "opening_of",
    "speakers",
]
