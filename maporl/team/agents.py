"""Agents, and the policies that speak for them. Several agents may share one policy."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from peft import PeftModel
from transformers import PreTrainedModel

from maporl.config.algorithm import OF_TEAM, Algorithm
from maporl.decoding import Sampling
from trl_ext.chat.encoding import Tokenizer, check_length
from trl_ext.chat.stop_strings import StopStrings
from trl_ext.learning.policy import Policy as Weights
from trl_ext.models.forward import base_of
from trl_ext.ppo.options import Decoding, Grammar, PPOOptions
from trl_ext.sampling.options import stop_ids_of
from trl_ext.sampling.request import Draw


@dataclass(frozen=True)
class Agent:
    """One speaker of a team.

    It is frozen, because a team reads it only once. :func:`dataclasses.replace` makes a changed copy.

    Args:
        name: the agent's name.
        model: the model that speaks for it. It is needed if ``engine`` is "transformers". Agents may share a
            ``PeftModel``.
        tokenizer: the model's tokenizer.
        policy: the name of the policy. By default each agent has its own. Agents that name the same policy share it,
            and it has the first agent's model, tokenizer and options.
        adapter: the agent's adapter of a ``PeftModel``.
        role: the agent's role, which its utterances record.
        system: the system prompt.
        trainable: whether the policy is trained.
        learning_rate: the policy's learning rate. By default it is the trainer's.
        critic: the policy's kind of critic: "head", "adapter", "model", "central" or "none". By default it is the
            trainer's.
        engine: the engine that answers for the agent, a name of ``ENGINES``: "transformers", "vllm", "human", "random"
            or "openai".
        by_turn: other weights at each turn. The entries speak for this agent in its first turn, its second turn, and so
            on. The last entry speaks in all later turns too. The entries' names are those of the policies. They need
            one tokenizer, because they continue one conversation.
        sampling: how its answers are sampled, where this differs from the run.
        algorithm: how the policy learns, where this differs from the run. Agents that share the policy have the same,
            but for its ``advantage``, which belongs to what an agent says.
    """

    name: str
    model: PreTrainedModel | PeftModel | None = None
    tokenizer: Tokenizer | None = None
    policy: str | None = None
    adapter: str | None = None
    role: str | None = None
    system: str | None = None
    trainable: bool = True
    learning_rate: float | None = None
    critic: str | None = None
    engine: str = "transformers"
    by_turn: tuple["Agent", ...] = ()
    sampling: Sampling | None = None
    algorithm: Algorithm = OF_TEAM

    @cached_property
    def learns_by(self) -> Algorithm:
        """The algorithm of the policy, with the agent's own ``critic`` and ``learning_rate``.

        Raises:
            ValueError: the agent and its algorithm have different values for one of them.
        """
        if not isinstance(self.algorithm, Algorithm):
            raise ValueError(f"agent {self.name!r}: algorithm: expected an Algorithm, got {self.algorithm!r:.80}")
        try:
            return self.algorithm.with_defaults(critic=self.critic, learning_rate=self.learning_rate)
        except ValueError as error:
            raise ValueError(f"agent {self.name!r}: {error}") from None


@dataclass
class Voice:
    """The text side of a policy: everything that prompts and completions need, without the weights.

    Args:
        name: the policy's name.
        tokenizer: its tokenizer.
        context: its model's context length in tokens. None means that the model does not give one.
        stop_ids: the token ids that end a completion (:meth:`end_at`).
        stop_strings: the strings that end a completion too.
    """

    name: str
    tokenizer: Tokenizer
    context: int | None = None
    stop_ids: frozenset[int] = frozenset()
    stop_strings: StopStrings | None = None

    def draw(self, sampling: Sampling | None, decoding: Decoding, max_tokens: int) -> Draw:
        """Return how an answer is drawn: as ``sampling`` says, and else as ``decoding`` and ``max_tokens`` of the run
        do."""
        strings = () if self.stop_strings is None else self.stop_strings.strings
        run = Draw(max_tokens, **vars(decoding), stop=strings, stop_ids=self.stop_ids)
        values = {} if sampling is None else sampling.at(0)
        if form := values.pop("structured_output", None):
            values["grammar"] = Grammar(form.text, tuple(sorted(self.stop_ids)))
        return replace(run, **values)

    @cached_property
    def digits(self) -> frozenset[int]:
        """Return the token ids whose text consists of digits only."""
        tokens = self.tokenizer.convert_ids_to_tokens(list(range(len(self.tokenizer))))
        return frozenset(i for i, t in enumerate(tokens) if t is not None and t.lstrip("\u0120\u2581 ").isdigit())

    def end_at(self, ids: frozenset[int], strings: Sequence[str] | None) -> None:
        """Let completions end with one of the token ``ids``, or with one of ``strings``."""
        self.stop_ids, self.stop_strings = ids, StopStrings.of(self.tokenizer, strings)

    def check_length(self, prompt: int, new: int, label: str) -> None:
        """Check that a prompt of ``prompt`` tokens leaves room for ``new`` more tokens.

        Raises:
            PromptTooLong: the model's context is too short for both. ``label`` says in the message whose prompt it is.
        """
        remedy = "shorten the prompt, lower ppo.response_length or protocol.turns, or use another model"
        check_length(prompt, new, self.context, label, f"policy {self.name!r}", remedy)


class Policy(Weights):
    """A policy of a team: its weights, its :class:`Voice`, and the ``agents`` for which it speaks.

    ``trainable`` and ``algorithm`` are those of :class:`Agent`.
    """

    def __init__(
        self,
        voice: Voice,
        model: PreTrainedModel | PeftModel,
        adapter: str | None,
        trainable: bool,
        algorithm: Algorithm = OF_TEAM,
        agents: Sequence[str] = (),
    ):
        super().__init__(voice.name, model, voice.tokenizer, adapter)
        self.voice, self.trainable, self.algorithm = voice, trainable, algorithm
        self.agents = list(agents)

    def find_stop_ids(self, options: PPOOptions) -> None:
        """Let its completions end as ``options`` and the model say. A trainer or a player does this when it is built.

        Raises:
            ValueError: the policy has no known end-of-sequence id.
        """
        ids = stop_ids_of(base_of(self.model), self.tokenizer, options.stop_token, options.stop_token_id)
        self.voice.end_at(ids, options.stop_strings)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Return the token ids that end its completions."""
        return self.voice.stop_ids

    @property
    def stop_strings(self) -> StopStrings | None:
        """Return the strings that end its completions too."""
        return self.voice.stop_strings

    @property
    def is_quantized(self) -> bool:
        """Return whether the weights are quantised. Quantised weights cannot be moved to another device."""
        return bool(getattr(self.model, "is_quantized", False))  # transformers sets it on quantised models only
