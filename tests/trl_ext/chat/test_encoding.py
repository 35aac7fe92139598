"""What a policy reads of a row is the row: special tokens once, padding by its mask, and no keys that Arrow has filled
in."""

import pytest
from chat_models import TEMPLATE, tokenizer_with
from datasets import Dataset

from trl_ext.chat.control_tokens import encode_text, special_ends
from trl_ext.trainer.prompts import read_prompt, without_nones


@pytest.mark.parametrize(
    ("bos", "eos", "ends"), [(1, 0, ([1], [])), (1, 1, ([1], [2])), (0, 1, ([], [2])), (0, 0, ([], []))]
)
def test_a_text_begins_with_bos_once_and_never_ends_with_eos(bos, eos, ends):
    tokenizer = tokenizer_with(bos, eos, TEMPLATE)
    assert special_ends(tokenizer) == ends
    hi = tokenizer.encode("hi", add_special_tokens=False)
    assert len(hi) == 2
    assert read_prompt({"prompt": "hi"}, tokenizer).ids == [*ends[0], *hi]
    assert encode_text(tokenizer, "hi") == tokenizer.encode("hi") == [*ends[0], *hi, *ends[1]]
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    ids = read_prompt({"prompt": rendered}, tokenizer).ids
    assert ids == tokenizer.encode(rendered, add_special_tokens=False)
    assert ids.count(1) == 1 and ids[0] == 1 and ids[-1] != 2


def test_words_of_a_text_that_spell_control_tokens_are_words_between_its_ends():
    tokenizer = tokenizer_with(eos=True)
    ids = encode_text(tokenizer, "a</s>b")
    assert ids[0] == 1 and ids[-1] == 2 and ids.count(2) == 1
    assert tokenizer.decode(ids[1:-1]) == "a</s>b"


@pytest.mark.parametrize(("row", "pad", "expected"), [
    ({"input_ids": [1, 10, 3, 11], "attention_mask": [1, 1, 1, 1]}, "<unk>", [1, 10, 3, 11]),
    ({"input_ids": [1, 10, 0, 11], "attention_mask": [1, 1, 1, 1]}, "<pad>", [1, 10, 0, 11]),
    ({"input_ids": [0, 0, 1, 10, 0, 11, 0], "attention_mask": [0, 0, 1, 1, 1, 1, 0]}, "<pad>", [1, 10, 0, 11]),
    ({"input_ids": [0, 0, 1, 10, 0, 11, 0]}, "<pad>", [1, 10, 0, 11]),  # only the ends look like padding
    ({"input_ids": [2, 1, 10, 2, 11]}, "</s>", [2, 1, 10, 2, 11]),  # and may be EOS
])  # fmt: skip
def test_a_mask_says_what_is_padding_and_without_one_the_ends_do(row, pad, expected):
    assert read_prompt(row, tokenizer_with(pad=pad)).ids == expected


def test_keys_that_arrow_fills_into_calls_are_not_shown():
    template = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}"
        "{% endfor %}{% endfor %}"
    )
    calls = [
        {"type": "function", "function": {"name": "f", "arguments": {"x": 1, "list": [1, None]}}},
        {"type": "function", "function": {"name": "g", "arguments": {"y": {"z": 2}}}},
    ]
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "user", "content": "b"},
    ]
    tokenizer = tokenizer_with(template=template)
    rows = Dataset.from_list([{"prompt": messages}])
    assert rows[0]["prompt"][1]["tool_calls"][0]["function"]["arguments"]["y"] is None, "Arrow has filled it in"
    assert tokenizer.decode(read_prompt(rows[0], tokenizer).ids) == 'a{"x": 1, "list": [1, null]}{"y": {"z": 2}}b'
    assert without_nones({"role": "assistant", "content": None, "name": None}) == {"role": "assistant", "content": None}


@pytest.mark.parametrize(("row", "message"), [
    ({"prompt": "", "messages": [{"role": "user", "content": "a"}]}, None),
    ({"input_ids": [], "prompt": "a"}, None),
    ({"prompt": [{"from": "human", "value": "a"}]}, "role and content"),
    ({"prompt": ["a", "b"]}, "expected a text, or role and content"),
    ({"prompt": 5}, "a row of the data set has a prompt 5; expected a text, messages or token ids"),
    ({"prompt": [{"role": "assistant", "content": "a"}]}, "has only an answer, and no prompt"),
    ({"prompt": [{"role": "user", "content": ""}]}, "has a prompt without a token"),
    ({"input_ids": [[3, 4], [5]]}, "expected one list of token ids, each at least 0"),
    ({"input_ids": [3, -1]}, "expected one list of token ids, each at least 0"),
    ({"input_ids": [3, 4], "attention_mask": [1]}, "and a mask of the same length"),
])  # fmt: skip
def test_a_row_is_read_or_refused_in_one_sentence(row, message):
    tokenizer = tokenizer_with(bos=False, template="{% for m in messages %}{{ m.content }}{% endfor %}")
    if message is None:
        assert read_prompt(row, tokenizer).ids == tokenizer.encode("a")
    else:
        with pytest.raises(ValueError, match=message):
            read_prompt(row, tokenizer)
