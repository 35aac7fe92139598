"""Options of a protocol that change from update to update. Imports no torch."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from maporl.config.imports import unknown
from maporl.errors import ConfigError, Fault
from maporl.protocols.base import Protocol
from maporl.schedules import Growth

WHERE = "schedule.growth.options"


def grown(protocol: Protocol, growth: Growth, update: int) -> Protocol:
    """Return ``protocol`` with the options that ``growth`` gives it in ``update``, counted from 1.

    Raises:
        ConfigError: the protocol has no such option, or refuses a value.
    """
    for name, value in growth.at(update).items():
        try:
            protocol = _with(protocol, name, value)
        except ValueError as error:
            raise ConfigError(f"{WHERE}: {name}: {value}: {error}") from None
    return protocol


def faults(protocol: Protocol, growth: Growth | None, players: tuple[str, ...]) -> Iterator[Fault]:
    """Yield why ``players`` cannot play ``protocol`` at some stage, and stages with more turns than ``protocol``."""
    if growth is None:
        return
    for update in range(1, growth.stages * growth.every + 1, growth.every):
        try:
            stage = grown(protocol, growth, update)
            stage.check_players(players)
        except ValueError as error:
            yield Fault.of(error)
            return
        if stage.turns > protocol.turns:
            what = (
                f"an agent has up to {stage.turns} turns from update {update} on, but {protocol.turns} in the section "
                "protocol, which evaluations play"
            )
            yield Fault(WHERE, what, "give protocol the longest values")


def _with(protocol: Protocol, name: str, value: int) -> Protocol:
    """Return ``protocol`` with another value of an option. A name ``options.limit`` is a key of a mapping."""
    first, _, key = name.partition(".")
    options: list[str] = [f.name for f in fields(protocol) if f.init] if is_dataclass(protocol) else []
    if first not in options:
        raise ValueError(f"protocol {protocol.label}: {unknown(first, options)}")
    present: Any = getattr(protocol, first)
    if key and isinstance(present, Mapping):
        return replace(protocol, **{first: {**present, key: value}})  # type: ignore[type-var]  # it is a dataclass
    if key or isinstance(present, bool) or not isinstance(present, int):
        raise ValueError(f"protocol {protocol.label}: expected an option that is whole, got {name}={present!r:.40}")
    return replace(protocol, **{first: value})  # type: ignore[type-var]
