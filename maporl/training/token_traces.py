"""Record log-probabilities, values and advantages of single tokens in the dialogues that are logged."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from maporl.training.update_batch import TeamUpdateBatch
from maporl.types import Dialogue, Trace
from trl_ext.chat.encoding import Tokenizer

DIGITS = 4
"""The number of decimals that are recorded."""


def trace(batch: TeamUpdateBatch, recorded: Sequence[Dialogue], learners: Mapping[str, Any]) -> None:
    """Fill in the :class:`~maporl.types.Trace` of the trained utterances in the ``recorded`` dialogues.

    ``batch`` has token batches with advantages. Values are recorded of those of ``learners`` that have a critic.
    """
    wanted = {id(u) for d in recorded for u in d.utterances}
    for policy, rows in batch.token_batches.items():
        names = ["old_logprobs", "advantages", *(["values"] if learners[policy].critic.gives_values else [])]
        samples = [batch.samples[policy][place] for place in rows.sample.tolist()]
        wanted_rows = [row for row, sample in enumerate(samples) if id(sample.utterance) in wanted]
        row, column = rows.sampled_on_host
        chosen = torch.isin(row, torch.tensor(wanted_rows, dtype=torch.long))
        place = row[chosen], column[chosen]
        # all tokens at once, to wait for the device once
        numbers = torch.stack([getattr(rows, name)[place] for name in names]).tolist()
        rounded = [[round(number, DIGITS) for number in each] for each in numbers]
        start = 0
        for sample in [samples[number] for number in wanted_rows]:
            end = start + len(sample.response_ids)
            logprobs, advantages, *values = [each[start:end] for each in rounded]
            start = end
            texts = pieces(learners[policy].tokenizer, sample.response_ids)
            sample.utterance.trace = Trace(texts, logprobs, advantages, values[0] if values else None)


def pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds, special tokens included.

    A token that ends within a character adds the empty text. The token that completes the character adds all of it.
    """
    texts: list[str] = []
    # ids[before:done] are decoded together with the next token, because some tokenizers join words by their context
    before = done = 0
    for end in range(1, len(ids) + 1):
        prefix = tokenizer.decode(ids[before:done], clean_up_tokenization_spaces=False)
        text = tokenizer.decode(ids[before:end], clean_up_tokenization_spaces=False)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and end < len(ids):
            texts.append("")
            continue
        texts.append(text[len(prefix) :])
        before, done = done, end
    return texts
