"""What training saw of single tokens, for the dialogues that are recorded."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from maporl.training.samples import TrainingSample
from maporl.types import Dialogue, Trace
from trl_ext.chat import Tokenizer
from trl_ext.token_batch import TokenBatch

DIGITS = 4
"""Decimals that are recorded."""


def trace(
    dialogues: Sequence[Dialogue],
    said: Mapping[str, Sequence[TrainingSample]],
    rows: Mapping[str, TokenBatch],
    tokenizers: Mapping[str, Tokenizer],
    critics: frozenset[str],
) -> None:
    """Give the utterances of ``dialogues`` that are trained on their :class:`~maporl.types.Trace`.

    ``said`` and ``rows`` are by policy; of ``rows``, which have advantages, some answers may be missing. ``critics`` names the
    policies whose values mean something.
    """
    wanted = {id(u) for d in dialogues for u in d.utterances}
    for policy, own in rows.items():
        numbers: dict[str, list[int]] = defaultdict(list)
        for number, label in enumerate(own.labels):
            numbers[label].append(number)
        for one in said.get(policy, ()):
            if not numbers[one.label]:
                continue
            row = numbers[one.label].pop(0)
            if id(one.utterance) not in wanted:
                continue
            columns = own.action_mask[row].nonzero().flatten()
            values = {
                name: [round(x, DIGITS) for x in getattr(own, name)[row, columns].tolist()]
                for name in ("logprobs", "advantages", "values")
            }
            if policy not in critics:
                del values["values"]
            one.utterance.trace = Trace(pieces(tokenizers[policy], one.response_ids), **values)


def pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The text that each token adds, special tokens included. A token that ends within a character adds nothing; the one that
    completes it adds it whole."""
    found: list[str] = []
    before = done = (
        0  # ids[before:done] have been written and are decoded again, because some tokenizers join words by context
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
