"""Rows of a data set mean here what they mean to TRL: an answer that has begun, tools, and options of the template."""

import json

import pytest
from datasets import Dataset
from one_policy import config

from trl_ext.trainer.ppov2 import PPOv2Trainer
from trl_ext.trainer.prompts import read_prompt

TEMPLATE = (
    "{% if tools %}[{{ tools[0]['function']['name'] }}]{% endif %}"
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% if not enable_thinking | default(true) %}no;{% endif %}{% endif %}"
)
CHAT = [{"role": "user", "content": "1+1"}]
BEGUN = [*CHAT, {"role": "assistant", "content": "It is"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
def built(tiny):
    model, tokenizer = tiny(alphabet="Iadinostu1+:;[] ")
    tokenizer.chat_template = TEMPLATE
    return model, tokenizer


@pytest.fixture
def tokenizer(built):
    return built[1]


@pytest.mark.parametrize("row, text", [
    ({"prompt": CHAT}, "u:1+1;a:"),
    ({"prompt": BEGUN}, "u:1+1;a:It is"),
    ({"messages": BEGUN}, "u:1+1;a:"),
    ({"prompt": CHAT, "chat_template_kwargs": {"enable_thinking": False}}, "u:1+1;a:no;"),
    ({"prompt": BEGUN, "chat_template_kwargs": {"enable_thinking": False, "other": None}}, "u:1+1;a:no;It is"),
    ({"prompt": CHAT, "tools": [TOOL]}, "[add]u:1+1;a:"),
    ({"prompt": CHAT, "tools": json.dumps([TOOL])}, "[add]u:1+1;a:"),
    ({"prompt": CHAT, "tools": None, "chat_template_kwargs": None}, "u:1+1;a:"),
])  # fmt: skip
def test_a_row_is_rendered_as_trl_renders_it(row, text, tokenizer):
    assert tokenizer.decode(read_prompt(row, tokenizer).ids) == text


@pytest.mark.parametrize("row", [
    {"prompt": CHAT, "chat_template_kwargs": "no"},
    {"prompt": CHAT, "tools": "add"},
    {"prompt": CHAT, "tools": [3]},
    {"prompt": CHAT, "tools": 3},
])  # fmt: skip
def test_other_types_are_refused_by_name(row, tokenizer):
    with pytest.raises(ValueError, match=r"chat_template_kwargs=.* and tools=.*; expected a mapping, and a list"):
        read_prompt(row, tokenizer)


def test_an_answer_that_calls_tools_is_no_beginning(tokenizer):
    call = {"role": "assistant", "content": "It is", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    with pytest.raises(ValueError, match="an answer that is begun by more than a text"):
        read_prompt({"prompt": [*CHAT, call]}, tokenizer)


def test_reward_functions_read_the_whole_answer_and_only_its_sampled_tokens_are_trained(built, tmp_path):
    seen, (model, tokenizer) = [], built

    def reward(prompts, completions, completion_ids, **columns):
        seen.extend(zip(prompts, completions, completion_ids, strict=True))
        return [1.0] * len(completions)

    args = config(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=1, response_length=4)
    rows = Dataset.from_list([{"prompt": BEGUN}] * 2)
    trainer = PPOv2Trainer(args, tokenizer, model, train_dataset=rows, reward_funcs=reward)
    batch = trainer.score(trainer.collect(trainer.next_batch()))
    assert len(seen) == 2
    for (prompt, answer, ids), completion in zip(seen, batch.completions, strict=True):
        assert prompt == CHAT and answer == "It is" + completion.text
        assert ids == completion.response_ids and len(ids) <= 4
        assert tokenizer.decode(completion.prompt_ids) == "u:1+1;a:It is"
