"""Which verifier gives the rewards of a run. Another one would go on with other rewards, and nothing else would show
it.

A server that was killed may come back with another verifier at the same address, and the folder of a verifier may be
replaced between two starts of a run. So a run remembers which one it has, in its checkpoints and in ``verifiers.json``,
and compares. A verifier that is trained beside the team changes by the run's own doing, and is not compared. Imports no
torch.
"""

import json
import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from maporl.rewards.base import RewardFailure, RewardSource
from maporl.text import visible
from trl_ext.files.atomic import replace_file

VERIFIERS = "verifiers.json"
"""The file in a run's folder: for each reward source with a verifier, a list of those that it has had, each with the
update (in a loop, the round) from which on its scores count."""
logger = logging.getLogger(__name__)


class VerifierChanged(RewardFailure):
    """The scores come from another verifier than before."""


class Identity:
    """The verifier that a reward source has. Several threads may see it.

    Args:
        on_change: whether another one stops the run, or is warned of.
    """

    def __init__(self, on_change: Literal["stop", "warn"] = "stop"):
        self.on_change = on_change
        self._lock = threading.Lock()
        self._known: dict[str, str] = {}

    def see(self, sha256: str | None, name: str, where: str) -> None:
        """Take note of the verifier behind some scores.

        Args:
            sha256: its digest (:meth:`maporl.verifier.model.Verifier.digest`), or None if it does not say. That
                is accepted only before any has said it.
            name: what it is called.
            where: who has it, for messages.

        Raises:
            VerifierChanged: it is another one than before, and ``on_change`` is ``stop``.
        """
        with self._lock:
            before, now = self._known.get("sha256"), {"sha256": sha256 or "", "name": visible(name)}
            if sha256 == before or (sha256 is None and not before):
                return
            told = (
                f"{where}: is another verifier now, {now['name']!r:.100} with sha256 "
                f"{now['sha256'][:16] or 'unknown'}; the run has had {self._known.get('name', '')!r:.100} with sha256 "
                f"{(before or '')[:16]}, whose scores cannot be compared with these"
            )
            if before and self.on_change == "stop":
                raise VerifierChanged(f"{told}; serve the first and resume, or --set reward.verifier.on_change=warn")
            self._known = now
        if before:
            logger.warning("%s; it goes on with the new one (reward.verifier.on_change: warn)", told)

    def remembered(self) -> dict[str, str]:
        """Return what a checkpoint keeps: ``sha256`` and ``name``, or nothing before any score."""
        with self._lock:
            return dict(self._known)

    def recall(self, kept: Mapping[str, str], where: str) -> None:
        """Compare with what an earlier process of the run had, now if there was a score, and else with the first one.

        Raises:
            VerifierChanged: it is another one, and ``on_change`` is ``stop``.
        """
        with self._lock:
            now, self._known = self._known, dict(kept)
        if now:
            self.see(now["sha256"] or None, now["name"], where)


class KnowsVerifier:
    """A source of scores that remembers whose they are.

    ``identity`` is who that is, and ``asked`` what messages call it.
    """

    identity: Identity
    asked: str

    def remembered(self) -> dict[str, str]:
        """Return which verifier has scored, for checkpoints."""
        return self.identity.remembered()

    def recall(self, kept: Mapping[str, str]) -> None:
        """Compare it with the one that an earlier process of the run has had.

        Raises:
            VerifierChanged: it is another one, and ``on_change`` is ``stop``.
        """
        self.identity.recall(kept, self.asked)


def record_verifiers(folder: Path, number: int, sources: Mapping[str, RewardSource]) -> None:
    """Write into ``verifiers.json`` of the run in ``folder`` which verifiers the update or round ``number`` has had."""
    verifiers = {name: verifier for name, source in sources.items() if (verifier := source.remembered())}
    if not verifiers:
        return
    was = _read(folder)
    now = {name: [one for one in had if one["since"] < number] for name, had in was.items()}
    for name, verifier in verifiers.items():
        had = now.setdefault(name, [])
        if not had or {key: had[-1].get(key) for key in verifier} != verifier:
            had.append({"since": number, **verifier})
    if now != was:
        replace_file(folder / VERIFIERS, json.dumps(now, indent=1))


def recall_verifiers(folder: Path, number: int, sources: Mapping[str, RewardSource]) -> None:
    """Compare with those that ``verifiers.json`` names for the updates or rounds before ``number``.

    Raises:
        VerifierChanged: a source has another one, and stops the run for it.
    """
    for name, had in _read(folder).items():
        earlier = [one for one in had if one["since"] < number]
        if earlier and name in sources:
            sources[name].recall({key: earlier[-1][key] for key in ("sha256", "name")})


def _read(folder: Path) -> dict[str, list[dict[str, Any]]]:
    file = folder / VERIFIERS
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
