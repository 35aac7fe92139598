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
    if name not in PROTOCOLS:
        raise ConfigError(f"{where}: protocol.name: {unknown(name, PROTOCOLS)}")
    for agent in speakers(section, agents):
        if agent not in agents:
            raise ConfigError(
                f"{where}: protocol {name!r} names agent {agent!r} but agents are {list(agents)}; add it under agents:"
            )
    options.pop("agents", None)
    return validated(PROTOCOLS[name], options, f"{where}: protocol")


def speakers(section: dict[str, Any], agents: tuple[str, ...]) -> tuple[str, ...]:
    """Who plays, in order: ``protocol.agents``, by default every agent; and a summariser."""
    playing = tuple(section.get("agents") or agents)
    helper = section.get("summariser")
    return playing if helper is None or helper in playing else (*playing, helper)


__all__ = ["PROTOCOLS", "Debate", "Play", "Protocol", "build_protocol", "speakers"]
