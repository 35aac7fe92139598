"""Protocols: who speaks when, and sees what. ``PROTOCOLS`` names them all."""

from typing import Any

from maporl.config import ConfigError, unknown, validated
from maporl.protocols.base import Play, Protocol
from maporl.protocols.debate import Debate

PROTOCOLS: dict[str, Any] = {
    "debate": Debate,
}


def build_protocol(section: dict[str, Any], agents: tuple[str, ...], where: str = "configuration") -> Protocol:
    """The protocol that a configuration's ``protocol:`` section describes; ``agents`` in it restricts who plays."""
    options = dict(section)
    name = options.pop("name", None)
    if not isinstance(name, str) or name not in PROTOCOLS:
        raise ConfigError(f"{where}: protocol.name: {unknown(name, PROTOCOLS)}")
    _check_players(section, agents, where)
    options.pop("agents", None)
    return validated(PROTOCOLS[name], options, f"{where}: protocol")


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


__all__ = ["PROTOCOLS", "Debate", "Play", "Protocol", "build_protocol", "opening_of", "speakers"]
