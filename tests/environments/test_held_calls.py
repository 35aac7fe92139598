"""Calls with named arguments, held to the schemas of their tools: what a grammar allows is read again as it was meant."""

import json
import random

import jsonschema
import numpy as np
import pytest
from chat_models import characters, trl_template

from maporl.config.call_options import CallTexts
from maporl.environments.base import Tool
from maporl.environments.calls import NativeFormat
from maporl.errors import ConfigError
from trl_ext.chat.tool_calls import NativeCalls
from trl_ext.ppo.options import Grammar
from trl_ext.sampling.grammar import Grammars

llguidance = pytest.importorskip("llguidance")
PARAMETERS = {
    "type": "object",
    "properties": {
        "whole": {"type": "integer", "minimum": 0, "maximum": 99},
        "short": {"type": "string", "minLength": 2, "maxLength": 6},
        "code": {"type": "string", "pattern": "^[a-c]{2,3}$"},
        "path": {"type": "string", "pattern": "x/y|z", "maxLength": 9},
        "word": {"enum": ["red", "it's blue", 3]},
        "perhaps": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "list": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
        "kind": {"$ref": "#/$defs/Maybe"},
        "sure": {"type": "boolean"},
        "any": {"type": ["string", "null"]},
    },
    "required": ["whole", "code", "word", "sure"],
    "additionalProperties": False,
    "$defs": {"Kind": {"enum": ["u", "v"]}, "Maybe": {"anyOf": [{"$ref": "#/$defs/Kind"}, {"type": "null"}]}},
}
TOOLS = [Tool("add", "Add.", PARAMETERS, print), Tool("stop", "Stop.", {}, print)]
GLM = ["<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"]


def format_of(name):
    """The call format of a template of TRL's, with what ends a completion."""
    tokenizer = characters(trl_template(name))
    if name == "glm4moe":  # a turn ends with the mark of whoever speaks next
        tokenizer.add_special_tokens({"additional_special_tokens": GLM, "eos_token": "<|endoftext|>"})
    stops = tokenizer.convert_tokens_to_ids(GLM[:1] + GLM[2:] if name == "glm4moe" else ["<|im_end|>"])
    return NativeFormat(TOOLS, CallTexts(), NativeCalls.of(tokenizer)), tuple(stops)


def written(form, stops, text, seed):
    """A completion of 2,000 characters or fewer that a grammar allows: random ones, and marks wherever they may
    stand. None if it came to no end."""
    tokenizer, rng, ids = form.reader.tokenizer, random.Random(seed), []
    matcher = Grammars(tokenizer, len(tokenizer)).matcher(
        Grammar(json.dumps({"grammars": [{"lark_grammar": text}]}), stops)
    )
    key, end = (json.loads(mark) for [mark] in (form.parts().key, form.parts().end))
    marks = [tokenizer.encode(mark) for mark in (end, end.strip(), "</tool_call>", key, "\n")]
    while len(ids) < 2_000:
        mark = rng.choice(marks)
        if rng.random() < 0.5 and matcher.validate_tokens(mark) == len(mark):
            assert matcher.consume_tokens(mark)
            ids += mark
            continue
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little"))
        if ended := set(stops) & set(allowed.tolist()):
            return [*ids, min(ended)]
        ids.append(int(rng.choice(allowed)))
        assert matcher.consume_token(ids[-1])
    return None


@pytest.mark.parametrize("name", ["qwen3_5_nothink", "qwen3_5_think", "glm4moe", "nemotron_3_nano"])
def test_a_call_that_the_grammar_allows_is_read_and_keeps_to_the_schema(name):
    form, stops = format_of(name)
    prompt = form.reader.tokenizer.apply_chat_template(
        [{"role": "user", "content": "."}], add_generation_prompt=True, return_dict=False
    )
    seen = []
    for choice in ("add", "required"):
        text = form.grammar(choice, (), None)
        for seed in range(25):
            ids = written(form, stops, text, seed)
            if ids is not None:
                (call,) = form.read("", prompt, ids)
                assert call.error is None, form.reader.tokenizer.decode(ids)
                jsonschema.validate(call.arguments, PARAMETERS if call.name == "add" else {"maxProperties": 0})
                seen.append(call)
    assert len(seen) > 20 and {call.name for call in seen} == {"add", "stop"}
    assert {key for call in seen for key in call.arguments} == set(PARAMETERS["properties"])


def test_words_may_stand_before_a_call_that_keeps_to_its_schema_and_another_tool_takes_anything():
    form, stops = format_of("qwen3_5_think")
    tokenizer, text = form.reader.tokenizer, form.grammar("auto", ("add",), None)
    grammar = Grammar(json.dumps({"grammars": [{"lark_grammar": text}]}), stops)

    def allows(said):
        ids = [*tokenizer.encode(said), stops[0]]
        return Grammars(tokenizer, len(tokenizer)).matcher(grammar).validate_tokens(ids) == len(ids)

    begun = "so\n</think>\n\nI call:\n<tool_call>\n<function="
    good = "add>\n<parameter=whole>\n4\n</parameter>\n<parameter=code>\nab\n</parameter>\n<parameter=word>\nred\n"
    good += "</parameter>\n<parameter=sure>\ntrue\n</parameter>\n</function>\n</tool_call>"
    assert allows("no call") and allows(begun + good) and allows(begun + good + " and " + begun + good)
    assert not allows(begun + good.replace("\n4\n", "\n400\n")) and not allows(begun + good.replace("ab", "ad"))
    assert allows(begun + "stop>\n<parameter=x>\nany thing\n</parameter>\n</function>\n</tool_call>")


def test_what_named_arguments_cannot_be_held_to_is_refused_by_name():
    form, _ = format_of("qwen3_5_nothink")
    form.tools["add"] = Tool("add", "Add.", {"type": "object", "properties": {}, "minProperties": 1}, print)
    with pytest.raises(ConfigError, match=r"minProperties cannot be held to .*call_format: json"):
        form.grammar("required", (), None)


@pytest.mark.parametrize("kind", [{"$ref": "#/$defs/Gone"}, {"$ref": "#/$defs/Loop"}, {"$ref": "#/properties/a"}, True])
def test_a_schema_in_which_no_text_is_found_is_held_to_as_json(kind):
    form, _ = format_of("qwen3_5_nothink")
    parameters = {"type": "object", "properties": {"a": kind}, "$defs": {"Loop": {"$ref": "#/$defs/Loop"}}}
    form.tools = {"add": Tool("add", "Add.", parameters, print)}
    assert '"a" ">\\n" %json {' in form.grammar("required", (), None)
