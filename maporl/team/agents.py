"""Agents and policies: who speaks, and the weights that speak for them. Agents are not policies: several agents may share one."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property

from peft import PeftModel
from transformers import PreTrainedModel

from trl_ext.chat import Tokenizer, check_length
from trl_ext.forward import base_of


@dataclass(frozen=True)
class Agent:
    """One speaker of a team; frozen, because a team reads it once: :func:`dataclasses.replace` makes another one.

    ``model`` and ``tokenizer`` are needed if ``engine`` is "transformers"; ``adapter`` names the adapter of a
    ``PeftModel`` (which agents may share). ``policy`` names the weights: by default each agent has its own; agents that
    name the same policy share it, and then the first one's model, tokenizer and options count.

    ``by_turn``: other weights at every turn: entries that stand for this agent in its first turn, its second, ..., the
    last one in all later turns too. Their names are the policies'; they need one tokenizer, because they continue one
    conversation.
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


@dataclass
class Voice:
    """What it takes to put words to a policy and to read its answers: everything of it but the weights.

    ``context``: most tokens that its model reads, None where it says nothing. ``stop_ids``: what ends an answer, settled when a
    trainer or player is built.
    """

    name: str
    tokenizer: Tokenizer
    context: int | None = None
    stop_ids: frozenset[int] = frozenset()

    @cached_property
    def digits(self) -> frozenset[int]:
        """Token ids that are nothing but digits."""
        tokens = self.tokenizer.convert_ids_to_tokens(list(range(len(self.tokenizer))))
        return frozenset(i for i, t in enumerate(tokens) if t is not None and t.lstrip("\u0120\u2581 ").isdigit())

    def check_length(self, prompt: int, new: int, label: str) -> None:
        """Check that a prompt of ``prompt`` tokens leaves room for ``new`` more.

        Raises:
            PromptTooLong: the model's context is too short for both; ``label`` says whose answer it is.
        """
        remedy = "shorten the prompt, lower ppo.response_length or protocol.turns, or use another model"
        check_length(prompt, new, self.context, label, f"policy {self.name!r}", remedy)


@dataclass
class Policy:
    """Weights that speak: a model (perhaps one adapter of a shared base) and its :class:`Voice`; ``agents`` are who it speaks for."""

    voice: Voice
    model: PreTrainedModel | PeftModel
    adapter: str | None
    trainable: bool
    learning_rate: float | None
    critic: str | None
    agents: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """What metrics, errors and folders call it."""
        return self.voice.name

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of its voice."""
        return self.voice.tokenizer

    @property
    def stop_ids(self) -> frozenset[int]:
        """What ends its answers."""
        return self.voice.stop_ids

    @property
    def is_quantized(self) -> bool:
        """Whether its weights are quantised, and therefore in their place already."""
        return bool(getattr(self.model, "is_quantized", False))  # transformers sets it on quantised models only

    @contextmanager
    def active(self) -> Iterator[PreTrainedModel]:
        """The Hugging Face model with this policy's adapter switched on."""
        if self.adapter is not None and self.model.active_adapters != [self.adapter]:
            self.model.set_adapter(self.adapter)
        yield base_of(self.model)

    def with_adapter(self, adapter: str) -> Callable[[], AbstractContextManager[PreTrainedModel]]:
        """Opens the model with another adapter of the same base switched on."""

        @contextmanager
        def opened() -> Iterator[PreTrainedModel]:
            self.model.set_adapter(adapter)
            yield base_of(self.model)

        return opened

    @contextmanager
    def without_adapter(self) -> Iterator[PreTrainedModel]:
        """The Hugging Face model with all adapters switched off."""
        with self.model.disable_adapter():  # type: ignore[operator]  # a PeftModel
            yield base_of(self.model)
