"""A process that scores with the verifier of a run. It knows nothing of the driver, and nothing of Ray."""

from collections.abc import Sequence

import torch

from maporl.backends.member import GroupSpec
from maporl.errors import ConfigError
from maporl.rewards.verifier.encoding import TooLong, encode
from maporl.rewards.verifier.model import Verifier, VerifierError
from maporl.types import Message


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
        assert section is not None and section.model is not None, "maporl.backends.check asks for it"
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
