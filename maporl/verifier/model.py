"""A verifier: a causal model whose one output, at the last token of a chat, says how likely the answer is right."""

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from maporl.errors import UserError
from maporl.types import Message
from maporl.verifier.encoding import encode
from trl_ext.chat.encoding import ChatError, Tokenizer, check_tokenizer, context_of
from trl_ext.models.weights import WeightsError, read_model, read_pretrained
from trl_ext.process.devices import process_device

RECORD = "verifier.json"
"""The file beside the weights of a trained verifier: its ``temperature``, its data and its measures."""


class VerifierError(UserError, ValueError):
    """A model that cannot be used as a verifier."""


@dataclass
class Verifier:
    """Scores a chat by ``sigmoid(output / temperature)`` at its last token, a number between 0 and 1.

    ``longest``: the most tokens of a chat. ``record``: the content of ``verifier.json``, or None for a model without
    it. ``begins``: whether it gives every answer the same score, because it has learned nothing yet.
    """

    model: Any
    tokenizer: Tokenizer
    name: str
    temperature: float = 1.0
    longest: int | None = None
    batch_size: int = 16
    record: dict[str, Any] | None = None
    begins: bool = False

    @classmethod
    def load(
        cls,
        source: str,
        device: str | torch.device | None = None,
        dtype: str = "auto",
        batch_size: int = 16,
        attn_implementation: str | None = None,
        may_begin: bool = False,
    ) -> "Verifier":
        """The verifier in a folder or on the hub: a sequence-classification model with one output.

        With ``may_begin`` it may be a causal language model too, which gets one output that is 0 for every answer.

        ``device`` None: the device of this process, which is the CPU with ``training.use_cpu``. ``dtype`` "auto": as
        the weights were saved. ``attn_implementation`` None: what transformers chooses.

        Raises:
            VerifierError: it cannot be loaded, or it is another kind of model.
        """
        try:
            tokenizer = read_pretrained(AutoTokenizer, source)
            config = read_pretrained(AutoConfig, source)
            outputs, begins = config.num_labels, may_begin and _is_causal(config)
            if outputs != 1 and not begins:
                raise VerifierError(
                    f"{source!r} has {outputs} outputs; expected a sequence-classification model with one "
                    "(num_labels=1), such as 'maporl verifier train' makes; a causal language model cannot score"
                )
            options: dict[str, Any] = {"new": "score", "num_labels": 1} if begins else {}
            if attn_implementation is not None:
                options["attn_implementation"] = attn_implementation
            model: Any = read_model(AutoModelForSequenceClassification, source, dtype=dtype, **options)
            if begins:
                model.score.weight.data.zero_()  # the random one of transformers would differ from process to process
        except WeightsError as error:
            raise VerifierError(
                f"{error}; expected the folder or hub name of a sequence-classification model with one output"
            ) from error
        try:
            check_tokenizer(tokenizer, repr(source))
        except ChatError as error:
            raise VerifierError(str(error)) from error
        return cls.of(model, tokenizer, source, device, batch_size, read_record(source), begins)

    @classmethod
    def of(
        cls,
        model: Any,
        tokenizer: Tokenizer,
        name: str,
        device: str | torch.device | None = None,
        batch_size: int = 16,
        record: dict[str, Any] | None = None,
        begins: bool = False,
    ) -> "Verifier":
        """The verifier whose ``model`` is in memory."""
        temperature = temperature_of(record)
        model = model.requires_grad_(False).eval().to(process_device() if device is None else device)
        return cls(model, tokenizer, name, temperature, context_of(model.config), batch_size, record, begins)

    def score(self, chats: list[list[Message]]) -> list[float]:
        """The probability that the last message of each chat is right, in order.

        Raises:
            TooLong: a chat has more tokens than the model reads.
        """
        return self.score_ids([encode(self.tokenizer, chat, self.longest) for chat in chats])

    def outputs(self, chats: list[list[Message]]) -> list[float]:
        """The output for each chat, in order, of which :meth:`score` is the sigmoid after the division by
        ``temperature``.

        Raises:
            TooLong: a chat has more tokens than the model reads.
        """
        rows = [encode(self.tokenizer, chat, self.longest) for chat in chats]
        with torch.no_grad():
            return self._read(rows, lambda read: last_outputs(self.model, read).tolist())

    def score_ids(self, rows: list[list[int]], batch_size: int | None = None) -> list[float]:
        """The scores of encoded chats, in order. Rows of similar length share a forward; padding changes no score."""
        return self._read(rows, self.score_batch, batch_size)

    def _read(
        self, rows: list[list[int]], read: Callable[[list[list[int]]], list[float]], batch_size: int | None = None
    ) -> list[float]:
        """Return what ``read`` makes of each row."""
        # equal rows are read once: the last bits depend on the forward, and rules that compare answers would see them
        distinct = [list(row) for row in dict.fromkeys(map(tuple, rows))]
        values: dict[tuple[int, ...], float] = {}
        for chunk in self.batches(distinct, batch_size):
            together = [distinct[i] for i in chunk]
            values |= zip(map(tuple, together), read(together), strict=True)
        return [values[tuple(row)] for row in rows]

    def batches(self, rows: list[list[int]], batch_size: int | None = None) -> list[list[int]]:
        """The places of the rows of each forward: those of similar length share one."""
        size = batch_size or self.batch_size
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        return [order[start : start + size] for start in range(0, len(order), size)]

    @torch.no_grad()
    def score_batch(self, rows: list[list[int]]) -> list[float]:
        """The scores of encoded chats by one forward."""
        return (last_outputs(self.model, rows) / self.temperature).sigmoid().tolist()

    def digest(self) -> str:
        """SHA-256 over what decides its scores, which tells one verifier from another.

        That is the names of the weights and their values in bfloat16, the temperature, the chat template and the
        vocabulary. A verifier has the same digest whether it was loaded in float32 or in bfloat16, as servers do on an
        accelerator.
        """
        reads = [self.temperature, self.tokenizer.chat_template, sorted(self.tokenizer.get_vocab().items())]
        digest = hashlib.sha256(json.dumps(reads).encode())
        for name, value in sorted(self.model.state_dict().items()):
            digest.update(name.encode())
            value = value.detach().cpu()
            narrow = value.to(torch.bfloat16) if value.is_floating_point() else value
            digest.update(narrow.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def _is_causal(config: Any) -> bool:
    return any(name.endswith("ForCausalLM") for name in config.architectures or ())


def read_record(source: str) -> dict[str, Any] | None:
    """What ``maporl verifier train`` wrote beside the weights in the folder ``source``; None for any other model.

    Raises:
        VerifierError: the file is there but holds no JSON, or its temperature is not a number above 0.
    """
    path = Path(source) / RECORD
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise VerifierError(f"{path}: not readable as JSON ({error}); train the verifier again") from error
    temperature = record.get("temperature", 1.0) if isinstance(record, dict) else None
    if not isinstance(temperature, int | float) or not 0 < temperature < math.inf:
        raise VerifierError(
            f"{path}: expected a temperature above 0, got {temperature!r:.80}; train the verifier again"
        )
    return record


def chance_of(record: dict[str, Any] | None) -> str | None:
    """Return what a verifier's record says against it, in words: that it is not better than chance.

    None if it says nothing.
    """
    metrics = (record or {}).get("metrics")
    if not isinstance(metrics, dict) or "auc_reached_by_chance" not in metrics:
        return None  # of another trainer
    reached, held_out = metrics["auc_reached_by_chance"], metrics["held_out"]
    if reached is None or held_out["auc"] is None:
        return (
            "the verifier was measured on answers that are all right or all wrong, so that nothing shows what its "
            "scores are worth"
        )
    if held_out["auc"] > reached:
        return None
    return (
        f"the verifier is not better than chance: its AUC on {held_out['answers']} held-out answers is "
        f"{held_out['auc']:.3f}, and scores without any meaning reach {min(reached, 1.0):.3f} in one of twenty cases"
    )


def temperature_of(record: dict[str, Any] | None) -> float:
    """The number by which outputs are divided before the sigmoid; 1 without a record."""
    return float((record or {}).get("temperature", 1.0))


def token_outputs(model: Any, input_ids: Tensor) -> Tensor:
    """The model's output [N, T] at every token of right-padded rows, float32.

    Right padding needs no mask: in a causal model no real token sees a later column.
    """
    trunk = getattr(model, model.base_model_prefix)
    return model.score(trunk(input_ids=input_ids, use_cache=False).last_hidden_state).squeeze(-1).float()


def last_outputs(model: Any, rows: list[list[int]]) -> Tensor:
    """The model's output [N] at the last token of each row."""
    width = max(map(len, rows))
    device = next(model.parameters()).device
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device)
    last = torch.tensor([len(row) - 1 for row in rows], device=device)
    trunk = getattr(model, model.base_model_prefix)
    hidden = trunk(input_ids=ids, use_cache=False).last_hidden_state
    return model.score(hidden[torch.arange(len(rows), device=device), last]).squeeze(-1).float()
