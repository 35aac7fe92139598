"""A reward model behind a server, as a reward function of trainers of one policy."""

from collections.abc import Sequence
from typing import Any, cast

from maporl.config.parse import validated
from maporl.errors import ConfigError
from maporl.rewards.base import RewardFailure
from maporl.rewards.identity import KnowsVerifier
from maporl.tasks.base import text_of
from maporl.types import Message
from maporl.verifier.client import URLS_VARIABLE, VerifierClient, server_urls
from maporl.verifier.section import VerifierSection


class ServedReward(KnowsVerifier):
    """Scores completions by asking servers: ``maporl serve``, or vLLM with a reward model.

    A score is the sigmoid of the model's output for a chat of a user and an assistant. The same model as
    ``reward_model=`` of :class:`trl_ext.PPOv2Trainer` gives its output itself, for prompt and completion without a chat
    template.

    It is a reward function with the signature of TRL's trainers: pass it as ``reward_funcs`` to
    :class:`trl_ext.PPOv2Trainer` or to ``trl.GRPOTrainer``. A failed request is sent again, to the next server, and
    ends the run if no server answers. A failure is never a score.

    Args:
        urls: the addresses of the servers, which take turns. By default the environment variable
            ``MAPORL_VERIFIER_URLS`` has them, with commas between them.
        reference: the column of the data set with the right answers, for a server that grades (``maporl serve
            --labels``).
        name: the name of the reward in metrics and errors.
        options: ``api``, ``model``, ``batch_size``, ``timeout``, ``retries``, ``concurrency``, ``on_failure`` (stop or
            wait) and ``on_change``, which are those of the YAML section ``reward.verifier``.

    Raises:
        ConfigError: an option or an address cannot be used, or no address was given.
    """

    def __init__(
        self, urls: str | Sequence[str] = (), reference: str | None = None, name: str = "served_reward", **options: Any
    ):
        where = "ServedReward"
        if options.get("on_failure") == "label" or options.get("learn_every"):
            raise ConfigError(f"{where}: on_failure: label and learn_every need a team's task; leave them out")
        urls = [urls] if isinstance(urls, str) else list(urls)
        section: VerifierSection = validated(VerifierSection, {"urls": urls, **options}, where)
        if not (servers := server_urls(section)):
            raise ConfigError(
                f"{where}: expected the urls of servers, or {URLS_VARIABLE} in the environment; got neither"
            )
        self.client, self.reference = VerifierClient(section, servers), reference
        self.identity, self.asked = self.client.identity, f"verifier {' or '.join(self.client.urls)}"
        self.__name__ = name
        """The name by which trainers call the function."""

    def __call__(self, prompts: list, completions: list, **columns: Any) -> list[float]:
        """Return each completion's score, a number in [0, 1].

        Prompts and completions are texts or lists of messages.

        Raises:
            RewardFailure: no server scored a completion, or the data set has no column ``reference``, or no text there.
        """
        chats = [_messages("user", p) + _messages("assistant", c) for p, c in zip(prompts, completions, strict=True)]
        if self.reference is not None and self.reference not in columns:
            raise RewardFailure(f"the data set has no column {self.reference!r} (reference); it has {sorted(columns)}")
        try:
            column = self.reference
            answers = [None] * len(chats) if column is None else [text_of(a, column) or None for a in columns[column]]
        except ValueError as error:
            raise RewardFailure(f"the data set {error}") from None
        return cast(list[float], self.client.scores(chats, answers))  # without "label" it raises where a score fails


def _messages(role: str, content: Any) -> list[Message]:
    """Return a text as one message of ``role``, and messages as they are."""
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    return [{"role": message["role"], "content": message["content"]} for message in content]
