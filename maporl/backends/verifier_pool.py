"""The processes that score with the verifier of a run, as the driver sees them.

A process that dies or hangs is replaced, and what it was asked is asked again. The reward source asks this pool as it
asks servers (:class:`maporl.rewards.verifier.client.VerifierClient`), with the same ``retries`` and ``on_failure``.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from maporl.backends.member import Member, MemberDied, write_stacks
from maporl.config.schema import VerifierSection
from maporl.rewards.base import RewardFailure
from maporl.rewards.verifier.client import Counted, Outcome, each_once
from maporl.rewards.verifier.identity import Identity
from maporl.types import Message
from trl_ext.process.waits import result

logger = logging.getLogger(__name__)


class VerifierPool(Counted):
    """Scores chats in processes that each have the verifier. Processes that were replaced count as ``ejected``.

    Args:
        section: the verifier.
        replicas: the number of processes.
        start: starts process number k in the place of number n of ``replicas``.
        deadline: the seconds after which a call that has not been answered counts as failed.
        folder: the run's folder.
    """

    def __init__(
        self,
        section: VerifierSection,
        replicas: int,
        start: Callable[[int, int], Member],
        deadline: float,
        folder: Path,
    ):
        super().__init__()
        self.section, self.replicas, self.deadline, self.folder = section, replicas, deadline, folder
        self.urls: tuple[str, ...] = (str(section.model),)
        """What errors call the verifier."""
        self.identity = Identity(section.on_change)
        self._start = start
        self._lock = threading.Lock()
        self.members: list[Member] = []
        self.started = 0

    def build(self) -> None:
        """Start the processes, and load the model in them.

        Raises:
            ConfigError: it cannot be loaded.
            MemberDied: a process died at once.
        """
        begun = [self._begin(part) for part in range(self.replicas)]
        self.members = [member for member, _ in begun]
        for part, (_, built) in enumerate(begun):
            result(built, self.deadline)
            self._see(part)

    def scores(self, chats: Sequence[list[Message]], references: Sequence[str | None]) -> list[Outcome]:
        """Return a score in [0, 1] for the last message of each chat, in order. ``references`` are not used. Equal
        chats are read once.

        With ``on_failure: label``, a chat that was not scored has the failure in the place of its score.

        Raises:
            RewardFailure: a chat was not scored, and ``on_failure`` is not ``label``.
        """
        with self._lock:
            return each_once(chats, [None] * len(chats), lambda once, _: self._scores(once))

    def _scores(self, chats: Sequence[list[Message]]) -> list[Outcome]:
        scores: dict[int, float | str] = {}
        failed: dict[int, MemberDied] = {}
        waiting, tries = list(range(self.replicas if chats else 0)), 0
        while waiting:
            answers, failed = self._ask(chats, waiting)
            scores |= answers
            waiting = list(failed)
            tries += 1
            if waiting and tries > self.section.retries:
                if self.section.on_failure != "wait":
                    self.count("failures", len(waiting))
                    break
                self.count("waits", len(waiting))
            self.count("retries", len(waiting))
        died = f"{next(iter(failed.values()))}; asked {tries} times (reward.verifier.retries)" if failed else ""
        return [self._outcome(scores.get(place, died)) for place in range(len(chats))]

    def end(self) -> None:
        """End the processes."""
        for member in self.members:
            member.end()
        self.members = []

    def _ask(
        self, chats: Sequence[list[Message]], parts: Sequence[int]
    ) -> tuple[dict[int, float | str], dict[int, MemberDied]]:
        """Return what the processes of ``parts`` answer, and the errors of those that did not. These are replaced."""
        calls = {part: self.members[part].call("score", list(chats), part, self.replicas) for part in parts}
        self.count("requests", len(calls))
        until = time.monotonic() + self.deadline
        scores: dict[int, float | str] = {}
        failed: dict[int, MemberDied] = {}
        for part, call in calls.items():
            try:
                scores |= result(call, max(0.0, until - time.monotonic()))
            except MemberDied as error:
                failed[part] = error
            except TimeoutError:
                failed[part] = self._hung(self.members[part])
        for part, died in failed.items():
            self._replace(part, died)
        return scores, failed

    def _outcome(self, score: float | str) -> Outcome:
        if isinstance(score, float):
            return score
        failure = RewardFailure(f"verifier {self.urls[0]}: could not score an answer: {score}")
        if self.section.on_failure != "label":
            raise failure
        return failure

    def _see(self, part: int) -> None:
        """Take note of the verifier that a process has loaded: the model's folder may have changed since."""
        member = self.members[part]
        self.identity.see(result(member.call("digest"), self.deadline), self.urls[0], f"verifier {self.urls[0]}")

    def _begin(self, part: int) -> tuple[Member, Any]:
        member = self._start(self.started, part)
        self.started += 1
        return member, member.call("build")

    def _hung(self, member: Member) -> MemberDied:
        file = write_stacks(self.folder, member.name, member.stacks())
        return MemberDied(
            f"{member.name}: no answer after {self.deadline:g} s (cluster.failures.deadline); its stacks are in {file}"
        )

    def _replace(self, part: int, error: MemberDied) -> None:
        """Put a new process in the place of one. If that one dies too, the next question finds it dead."""
        old = self.members[part]
        logger.warning("%s is replaced: %s", old.name, error)
        old.end()
        self.count("ejected")
        self.members[part], built = self._begin(part)
        try:
            result(built, self.deadline)
            self._see(part)
        except (MemberDied, TimeoutError) as again:
            logger.warning("%s: %s", self.members[part].name, again)
