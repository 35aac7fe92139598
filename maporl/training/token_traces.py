"""What training saw of single tokens, for the dialogues that are recorded."""

from collections.abc import Collection, Mapping, Sequence

from maporl.training.update_batch import TeamUpdateBatch
from maporl.types import Dialogue, Trace
from trl_ext.chat import Tokenizer

DIGITS = 4
"""Decimals that are recorded."""


def trace(
    batch: TeamUpdateBatch,
    recorded: Sequence[Dialogue],
    tokenizers: Mapping[str, Tokenizer],
    critics: Collection[str],
) -> None:
    """Give the utterances of the ``recorded`` dialogues that are trained on their :class:`~maporl.types.Trace`.

    ``batch`` has token batches with advantages; ``critics`` names the policies whose values mean something.
    """
    wanted = {id(u) for d in recorded for u in d.utterances}
    for policy, rows in batch.token_batches.items():
        names = ["old_logprobs", "advantages", *(["values"] if policy in critics else [])]
        for row, place in enumerate(rows.sample.tolist()):
            sample = batch.samples[policy][place]
            if id(sample.utterance) not in wanted:
                continue
            columns = rows.sampled_mask[row].nonzero().flatten()
            logprobs, advantages, *values = (
                [round(x, DIGITS) for x in getattr(rows, name)[row, columns].tolist()] for name in names
            )
            pieces_said = pieces(tokenizers[policy], sample.response_ids)
            sample.utterance.trace = Trace(pieces_said, logprobs, advantages, values[0] if values else None)


def pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The text that each token adds, special tokens included.

    A token that ends within a character adds nothing; the one that completes it adds it whole.
    """
    found: list[str] = []
    before = done = (
        0  # ids[before:done] are decoded again with what follows, because some tokenizers join words by context
    )
    for end in range(1, len(ids) + 1):
        known = tokenizer.decode(ids[before:done], clean_up_tokenization_spaces=False)
        text = tokenizer.decode(ids[before:end], clean_up_tokenization_spaces=False)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and end < len(ids):
            found.append("")
            continue
        found.append(text[len(known) :])
        before, done = done, end
    return found
