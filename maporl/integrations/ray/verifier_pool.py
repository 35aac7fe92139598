"""The processes that score with the verifier of a run: what each does, and all of them as the driver sees them.

A process that dies or hangs is replaced, and what it was asked is asked again. The reward source asks this pool as it
asks servers (:class:`maporl.verifier.client.VerifierClient`), with the same ``retries`` and ``on_failure``.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from maporl.errors import ConfigError
from maporl.integrations.ray.member import GroupSpec, Member, MemberDied, write_stacks
from maporl.rewards.base import RewardFailure
from maporl.rewards.identity import Identity
from maporl.types import Message
from maporl.verifier.client import Counted, Outcome, each_once
from maporl.verifier.encoding import TooLong, encode
from maporl.verifier.model import Verifier, VerifierError
from maporl.verifier.section import VerifierSection
from trl_ext.process.waits import result

# -- one of the processes, which knows nothing of the driver -----------------------------------------------------------


class VerifierProcess:
    """Scores chats with ``reward.verifier.model``.

    Args:
        spec: the run, with no policies.
    """

    def __init__(self, spec: GroupSpec):
        self.spec = spec

    def build(self) -> None:
        """Load the model.

        Raises:
            ConfigError: it cannot be loaded.
        """
        config = self.spec.config
        section = config.reward.verifier
        assert section is not None and section.model is not None, "maporl.integrations.ray.check asks for it"
        on_cpu = config.training.use_cpu or not torch.cuda.is_available()
        try:
            self.verifier = Verifier.load(
                section.model,
                "cpu" if on_cpu else "cuda",
                batch_size=section.batch_size,
                attn_implementation=section.attn_implementation,
            )
        except VerifierError as error:
            raise ConfigError(f"reward.verifier.model: {error}") from error

    def digest(self) -> str:
        """Return the digest of the verifier that was loaded."""
        return self.verifier.digest()

    def score(self, chats: Sequence[list[Message]], part: int, parts: int) -> dict[int, float | str]:
        """Return the scores of a part of ``chats``, by their places.

        All parts together make the forwards that one process would make of all chats, so that scores are the same to
        the bit.

        Args:
            chats: all chats that are asked for.
            part: the number of this part.
            parts: how many there are.

        Returns:
            By the place of a chat, its score in [0, 1]. For a chat that is too long, what is wrong with it, in every
            part.
        """
        scores: dict[int, float | str] = {}
        rows: dict[int, list[int]] = {}
        for place, chat in enumerate(chats):
            try:
                rows[place] = encode(self.verifier.tokenizer, chat, self.verifier.longest)
            except TooLong as error:
                scores[place] = str(error)
        places = list(rows)
        for batch in self.verifier.batches(list(rows.values()))[part::parts]:
            batched = [places[number] for number in batch]
            scores |= zip(batched, self.verifier.score_batch([rows[place] for place in batched]), strict=True)
        return scores


logger = logging.getLogger(__name__)


# -- as the driver sees them -------------------------------------------------------------------------------------------


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
