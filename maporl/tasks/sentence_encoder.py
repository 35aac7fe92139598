"""Sentence embeddings by a transformer encoder, loaded once per process."""

import functools
from collections.abc import Sequence
from typing import Any

from maporl.tasks.base import TaskError

MAX_TOKENS = 128
"""Longer texts are cut, because the all-* encoders of sentence-transformers were trained on no more tokens."""
MAX_CHARACTERS = 10_000
"""Longer texts are cut before they are tokenised, because a tokenizer reads a text to its end.

These hold 128 tokens.
"""


class SentenceEncoder:
    """Embeds a text as the mean of a transformer's last hidden states over its tokens, scaled to length 1.

    Args:
        name: the encoder's hub name or folder.

    Raises:
        TaskError: it cannot be loaded, or its weights are not complete.
    """

    def __init__(self, name: str):
        import torch
        from transformers import AutoModel, AutoTokenizer

        from trl_ext.models.weights import WeightsError, read_model, read_pretrained
        from trl_ext.process.devices import process_device

        self.device = process_device()
        try:
            self.tokenizer = read_pretrained(AutoTokenizer, name)
            # the pooler is not read, and many encoders come without one
            self.model = read_model(AutoModel, name, new="pooler", dtype=torch.float32).to(self.device).eval()
        except WeightsError as error:
            raise TaskError(f"task.encoder: {error}; give the hub name or folder of a sentence encoder") from error
        self.max_tokens = min(MAX_TOKENS, self.tokenizer.model_max_length)
        self._references: dict[str, Any] = {}

    def embed(self, texts: Sequence[str], batch: int = 32) -> Any:
        """The unit vectors of ``texts`` as a float32 tensor [text, width] on the CPU."""
        import torch

        vectors = []
        with torch.no_grad():
            for start in range(0, len(texts), batch):
                part = [_readable(text[:MAX_CHARACTERS]) for text in texts[start : start + batch]]
                encoded = self.tokenizer(
                    part,
                    padding=True,
                    truncation=True,
                    max_length=self.max_tokens,
                    split_special_tokens=True,  # a text that spells [SEP] is a text
                    return_tensors="pt",
                ).to(self.device)
                hidden = self.model(**encoded).last_hidden_state
                mask = encoded["attention_mask"].unsqueeze(-1)
                mean = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)
                vectors.append(torch.nn.functional.normalize(mean, dim=-1).cpu())
        return torch.cat(vectors)

    def references(self, texts: Sequence[str]) -> Any:
        """:meth:`embed` for texts that come again; each is embedded once and kept."""
        import torch

        new = [text for text in dict.fromkeys(texts) if text not in self._references]
        if new:
            self._references |= zip(new, self.embed(new), strict=True)
        return torch.stack([self._references[text] for text in texts])


def _readable(text: str) -> str:
    """``text`` with question marks for halves of surrogate pairs, which JSON may hold and no tokenizer reads."""
    return text.encode("utf-8", "replace").decode("utf-8")


@functools.cache
def load_encoder(name: str) -> SentenceEncoder:
    """The encoder ``name`` (hub name or folder), loaded at the first call.

    Raises:
        TaskError: it cannot be loaded, or its weights are not complete.
    """
    return SentenceEncoder(name)
