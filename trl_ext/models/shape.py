"""The memory of a model by its sizes: its weights, what training adds, and what forwards keep. Imports no torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

PLANNED = 0.8
"""The share of a device's free memory that is planned for. The rest is for fragments and for what is not counted."""
EIGHT_BIT = 1 + 4 / 256
"""Bytes of a moment in an 8-bit optimizer, which has one float32 scale for 256 moments."""


class TrainingBytes(NamedTuple):
    """The bytes that training keeps for one weight, besides the weight: of gradients, a float32 copy, and AdamW's two
    moments."""

    gradients: float
    copy: float
    moments: float


def training_bytes(weight: int, optim: str) -> TrainingBytes:
    """Return what training keeps for a weight of ``weight`` bytes with the optimizer ``optim``.

    Weights in half precision have float32 copies, and one micro-batch has gradients in their dtype, which are added to
    float32 sums.
    """
    half = weight == 2
    return TrainingBytes(4 + (2 if half else 0), 4 if half else 0, 2 * (EIGHT_BIT if "8bit" in optim else 4))


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that determine its memory.

    Args:
        parameters: the number of its weights.
        layers: the number of layers.
        hidden: the width of the model.
        intermediate: the width inside a block.
        queries: the width of all query heads.
        keys: the width of all key heads.
        vocabulary: the number of tokens.
        tied: whether the head has the weights of the embedding.
        bytes: those of a weight.
        matrices: the names of the modules whose weight is a matrix, which are those that a LoRA can adapt.
        adapters: the number of weights of all adapters that are trained on it. 0: all weights are trained.
    """

    parameters: int
    layers: int
    hidden: int
    intermediate: int
    queries: int
    keys: int
    vocabulary: int
    tied: bool
    bytes: int = 2
    matrices: tuple[str, ...] = ()
    adapters: int = 0

    @classmethod
    def of(cls, model: Any, dtype: "torch.dtype") -> "Shape":
        """Return the sizes of a Hugging Face model whose weights are in ``dtype``."""
        from trl_ext.models.adapters import beyond_lora  # it imports torch

        text = model.config.get_text_config()
        heads = getattr(text, "num_attention_heads", None) or 1  # recurrent models have none
        head = getattr(text, "head_dim", None) or text.hidden_size // heads
        beyond = tuple(f".{layer}.weight" for layer in beyond_lora(model))
        return cls(
            parameters=sum(p.numel() for p in model.parameters()),
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
            queries=head * heads,
            keys=head * (getattr(text, "num_key_value_heads", None) or heads),
            vocabulary=text.vocab_size,
            tied=bool(model.config.tie_word_embeddings),
            bytes=dtype.itemsize,
            matrices=tuple(
                name.removesuffix(".weight")
                for name, parameter in model.named_parameters(remove_duplicate=False)
                if name.endswith(".weight") and parameter.ndim > 1 and not name.endswith(beyond)
            ),
        )

    @property
    def head(self) -> int:
        """Return the parameters of the output head."""
        return self.vocabulary * self.hidden

    @property
    def body(self) -> int:
        """Return the parameters without the embedding and the head."""
        return self.parameters - self.head * (1 if self.tied else 2)

    @property
    def weights(self) -> float:
        """Return the bytes of the weights, those of the adapters included."""
        return float(self.bytes * (self.parameters + self.adapters))

    @property
    def sent(self) -> float:
        """Return the bytes that engines are sent after an update: of the adapters, or of all weights."""
        return float(self.bytes * (self.adapters or self.parameters))

    @property
    def layer(self) -> int:
        """Return the bytes that one layer computes for a token: about eight tensors of the hidden size and four of the
        intermediate size."""
        return self.bytes * (8 * self.hidden + 4 * self.intermediate)

    def activations(self, tokens: int, checkpointing: bool) -> float:
        """Return the bytes that the backward pass needs of each forward."""
        inputs = self.layers * self.bytes * self.hidden
        return tokens * (inputs + self.layer if checkpointing else self.layers * self.layer)

    def logits(self, tokens: int) -> float:
        """Return the bytes of logits for ``tokens`` tokens, of their float32 copies, and of the gradients of both."""
        return tokens * self.vocabulary * 2 * (self.bytes + 4)

    def kv_cache(self, tokens: int) -> int:
        """Return the bytes of the keys and values of ``tokens`` tokens."""
        return tokens * self.layers * 2 * self.keys * self.bytes
