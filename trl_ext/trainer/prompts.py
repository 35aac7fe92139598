"""Turn tokenised, text or chat rows into token ids, in a seeded order that can resume at any row."""

import json
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

from trl_ext.chat.control_tokens import encode_words, special_ends
from trl_ext.chat.encoding import Tokenizer, encode_prompt
from trl_ext.errors import ArgumentError

PROMPT_COLUMNS = ("input_ids", "prompt", "messages")
MOST_READ, MOST_TOKENISED = 20_000, 200
"""The most rows that are looked at before a run starts, and the most of these that are tokenised: the longest ones."""


@dataclass
class Prompt:
    """One row of the data set: its token ids, its readable prompt (text or messages), its other columns, and the words
    with which the completion has begun."""

    ids: list[int]
    prompt: Any
    columns: dict[str, Any]
    begun: str = ""


def read_prompt(row: dict[str, Any], tokenizer: Tokenizer) -> Prompt:
    """Read a row's prompt from ``input_ids``, ``prompt`` (text or messages) or ``messages``.

    Messages are read as TRL does: if the last one is the assistant's, it begins the completion in ``prompt``, and is
    the answer in ``messages``, which is dropped. The columns ``chat_template_kwargs`` and ``tools`` (a list of schemas,
    or its JSON) go to the chat template, and are columns of reward functions too. Only messages are guarded against
    words that spell control tokens (:mod:`trl_ext.chat.control_tokens`): a prompt that is one text is taken as it is,
    because it may have been rendered by a chat template already. It begins with the tokenizer's BOS token once, and
    never ends with an EOS token that the tokenizer adds, because the completion goes on from there. Keys without a
    value in the tool calls of messages, which Arrow fills in, are left out.

    Padding of ``input_ids`` is dropped. An ``attention_mask`` says what is padding, whatever its ids. Without one it is
    the tokenizer's padding token at both ends, unless it is its EOS or BOS token too.

    Raises:
        ValueError: the row has none of these columns, they are empty, or they have other types.
    """
    filled = [column for column in PROMPT_COLUMNS if _is_filled(row.get(column))]
    if not filled:
        raise ValueError(f"a row of the data set has no prompt: expected one of {PROMPT_COLUMNS}, got {row!r:.200}")
    columns = {k: v for k, v in row.items() if k not in (*PROMPT_COLUMNS, "attention_mask", "lengths")}
    if filled[0] == "input_ids":
        ids = _without_padding(row, tokenizer)
        return Prompt(ids, tokenizer.decode(ids, skip_special_tokens=True), columns)
    prompt: Any = row[filled[0]]
    if isinstance(prompt, str):
        return Prompt(_not_empty(_encode_open(tokenizer, prompt), row), prompt, columns)
    if not all(isinstance(message, Mapping) and "role" in message and "content" in message for message in prompt):
        raise ValueError(f"a row of the data set has {filled[0]}={prompt!r:.120}; expected a text, or role and content")
    messages, begun = [without_nones(message) for message in prompt], ""
    if messages[-1]["role"] == "assistant":
        last = messages.pop()
        begun = last["content"] if filled[0] == "prompt" else ""
        if not isinstance(begun, str) or (begun and "tool_calls" in last):
            raise ValueError(f"a row of the data set has an answer that is begun by more than a text: {row!r:.200}")
    if not messages:
        raise ValueError(f"a row of the data set has only an answer, and no prompt: {row!r:.200}")
    ids = encode_prompt(tokenizer, messages, *_for_template(row))
    return Prompt(_not_empty([*ids, *encode_words(tokenizer, begun)], row), messages, columns, begun)


def _for_template(row: dict[str, Any]) -> tuple[list[dict[str, Any]] | None, dict[str, Any]]:
    """Return the tools and the options that a row has for the chat template."""
    options, tools = row.get("chat_template_kwargs") or {}, row.get("tools") or None
    try:
        tools = json.loads(tools) if isinstance(tools, str) else tools
        if tools is not None:
            tools = [without_nones(tool) for tool in tools]
        return tools, without_nones(options)
    except (ValueError, TypeError, AttributeError):
        raise ValueError(
            f"a row of the data set has chat_template_kwargs={options!r:.80} and tools={tools!r:.80}; expected a "
            "mapping, and a list of JSON schemas of functions"
        ) from None


def _is_filled(value: Any) -> bool:
    """Return whether a column has a prompt: a text, messages or ids, and not nothing."""
    if value is not None and not hasattr(value, "__len__"):
        raise ValueError(f"a row of the data set has a prompt {value!r:.80}; expected a text, messages or token ids")
    return value is not None and len(value) > 0


def _not_empty(ids: list[int], row: dict[str, Any]) -> list[int]:
    if not ids:
        raise ValueError(f"a row of the data set has a prompt without a token: {row!r:.200}")
    return ids


def _without_padding(row: dict[str, Any], tokenizer: Tokenizer) -> list[int]:
    try:
        ids = [int(i) for i in row["input_ids"]]
    except (TypeError, ValueError):
        ids = [-1]
    mask = row.get("attention_mask")
    if min(ids) < 0 or (mask is not None and len(mask) != len(ids)):
        raise ValueError(
            f"a row of the data set has input_ids={row['input_ids']!r:.80} and attention_mask={mask!r:.80}; expected "
            "one list of token ids, each at least 0, and a mask of the same length"
        )
    if mask is not None:
        prompt_ids = [i for i, real in zip(ids, mask, strict=True) if real]
    else:
        padding = {tokenizer.pad_token_id} - {tokenizer.eos_token_id, tokenizer.bos_token_id}
        real = [n for n, i in enumerate(ids) if i not in padding]
        prompt_ids = ids[real[0] : real[-1] + 1] if real else []
    if not prompt_ids:
        raise ValueError(f"a row of the data set has no prompt: its input_ids are padding only, {row!r:.200}")
    return prompt_ids


def _encode_open(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of a text that a completion continues, with the tokenizer's first tokens once."""
    before, _ = special_ends(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False)
    return ids if before and ids[: len(before)] == before else [*before, *ids]


def without_nones(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without the keys that have no value, as Arrow fills them in where rows have different keys.

    The content of a message with tool calls may be None. Values in lists stay.
    """

    def cleaned(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: cleaned(part) for key, part in value.items() if part is not None}
        return [cleaned(part) for part in value] if isinstance(value, list | tuple) else value

    return {key: cleaned(part) for key, part in message.items() if part is not None or key == "content"}


def keeps_padding(row: dict[str, Any], tokenizer: Tokenizer) -> bool:
    """Return whether :func:`read_prompt` keeps what looks like padding, because nothing tells it from an EOS token.

    One such token may be a real BOS or EOS. Two in a row at an end look like padding.
    """
    ids, padding = row.get("input_ids"), tokenizer.pad_token_id
    if ids is None or row.get("attention_mask") is not None:
        return False
    ends = ([int(i) for i in ids[:2]], [int(i) for i in ids[-2:]])
    return padding in (tokenizer.eos_token_id, tokenizer.bos_token_id) and [padding] * 2 in ends


def longest_first(dataset: Sequence[dict]) -> list[int]:
    """Return the numbers of the rows of a data set, those with the longest prompts first.

    Of a large data set these are :data:`MOST_READ` rows at even distances. Texts are measured in characters.
    """
    size = len(dataset)
    numbers = [n * size // MOST_READ for n in range(MOST_READ)] if size > MOST_READ else range(size)
    lengths = {n: _length(dataset[n]) for n in numbers}
    return sorted(lengths, key=lambda n: -lengths[n])


def _length(row: dict[str, Any]) -> int:
    prompt = next((row[column] for column in PROMPT_COLUMNS if row.get(column) is not None), ())
    messages = isinstance(prompt, list | tuple) and len(prompt) and isinstance(prompt[0], Mapping)
    return sum(len(str(message.get("content"))) for message in prompt) if messages else len(prompt)


def rows_of(batch: Any) -> list[dict[str, Any]]:
    """Return the rows of what a data collator returned: a list of rows, or a padded batch with an attention mask.

    Raises:
        ValueError: the collator returned anything else.
    """
    if isinstance(batch, list):
        return batch
    if not isinstance(batch, Mapping) or "input_ids" not in batch or "attention_mask" not in batch:
        raise ValueError(f"data_collator: expected rows, or input_ids with attention_mask, got {type(batch).__name__}")
    others = {k: v for k, v in batch.items() if k not in ("input_ids", "attention_mask")}
    return [
        {
            "input_ids": [int(i) for i, real in zip(ids, mask, strict=True) if real],
            **{k: v[n] for k, v in others.items()},
        }
        for n, (ids, mask) in enumerate(zip(batch["input_ids"], batch["attention_mask"], strict=True))
    ]


def check_dataset(dataset: Sequence[dict] | None, name: str) -> None:
    """Check that ``dataset`` has rows and one of the prompt columns.

    Raises:
        ValueError: it is missing, is empty, is a stream or a mapping of data sets, or lacks a prompt column. ``name``
            is its name in the message.
    """
    if isinstance(dataset, Mapping):
        raise ValueError(
            f"{name}: expected one data set, got a {type(dataset).__name__} with {', '.join(map(str, dataset))}; pass "
            f"one of them, such as dataset[{next(iter(dataset), 'train')!r}]"
        )
    if hasattr(dataset, "iloc"):
        raise ValueError(f"{name}: expected rows, got a {type(dataset).__name__} of columns; pass Dataset.from_pandas")
    if dataset is not None and not isinstance(dataset, Sized):
        raise ValueError(
            f"{name}: expected rows that have a number and can be counted, got a {type(dataset).__name__}; load it "
            "without streaming, or take the first rows: Dataset.from_list(list(dataset.take(10_000)))"
        )
    if dataset is None or len(dataset) == 0:
        raise ValueError(f"{name}: expected at least one row, got {'None' if dataset is None else 'an empty data set'}")
    if not any(column in dataset[0] for column in PROMPT_COLUMNS):
        raise ValueError(f"{name}: expected one of the columns {PROMPT_COLUMNS}, got {sorted(dataset[0])}; rename one")


def check_columns(dataset: Sequence[dict] | None, name: str, reserved: Sequence[str]) -> None:
    """Check that no column has one of the ``reserved`` names, which reward functions get for other things.

    Raises:
        ArgumentError: a column has one.
    """
    taken = [column for column in reserved if dataset and column in dataset[0]]
    if taken:
        raise ArgumentError(f"{name}: the column {taken[0]!r} has the name of what a reward function gets; rename it")
