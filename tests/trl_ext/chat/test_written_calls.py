"""Calls as the models of each family write them, literally: as their makers document them, and as they come out at
times."""

import json
import random

import pytest
from chat_models import trl_template

from maporl import TinySection, Tool, build_tiny_tokenizer
from maporl.types import Dialogue, Example, to_json
from trl_ext.chat.templates import read_calls
from trl_ext.chat.thoughts import THINKING
from trl_ext.chat.tool_calls import NativeCalls
from trl_ext.chat.written_calls import MARKS, MOST, TOLD, call_of, read_written_calls
from trl_ext.chat.written_values import DEEPEST, Unreadable, read_value, whole_value


def add(a: int, b: int = 0) -> int:
    """Add.

    Args:
        a: a number
        b: a number
    """
    return a + b


def weather(city: str, unit: str = "celsius") -> str:
    """Say the weather.

    Args:
        city: the city
        unit: the unit
    """
    return city + unit


def python(code: str) -> str:
    """Run a program.

    Args:
        code: the program
    """
    return code


def ping() -> str:
    """Do nothing."""
    return ""


SCHEMAS = [Tool.of(one).schema() for one in (add, weather, python, ping)]
ADDED = ("add", {"a": 1, "b": 2})
PARIS = ("weather", {"city": "Paris"})
B, E = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
BB, EE = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
SEP, D = "<\uff5ctool\u2581sep\uff5c>", "\uff5cDSML\uff5c"
EOS = "<\uff5cend\u2581of\u2581sentence\uff5c>"


def read(text, prefix=""):
    """The calls of a completion as (name, arguments), and the reasons of those that cannot be read."""
    return [one.get("error") or (one["name"], one["arguments"]) for one in read_written_calls(text, prefix, SCHEMAS)]


FAMILIES = {
    "Hermes, Qwen 2.5 and 3, SmolLM3, Granite 4": [
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>', [ADDED]),
        ('<think>\nI add.\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>', [ADDED]),
        (
            'Both.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>\n<tool_call>\n'
            '{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>',
            [ADDED, PARIS],
        ),
        ('<tool_call>{"arguments": {"a": 1, "b": 2}, "name": "add"}</tool_call>', [ADDED]),
        ("<tool_call>\n{'arguments': {'a': 1, 'b': 2}, 'name': 'add'}\n</tool_call>", [ADDED]),  # as Hermes 2 was shown them
    ],
    "Qwen3-Coder, Qwen 3.5, Nemotron 3": [
        (
            "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>\n"
            "</tool_call><|im_end|>",
            [ADDED],
        ),
        (
            "<tool_call>\n<function=python>\n<parameter=code>\n  x = 1\n\n  "
            "print(x)\n</parameter>\n</function>\n</tool_call>",
            [("python", {"code": "  x = 1\n\n  print(x)"})],
        ),
        (
            "<tool_call>\n<function=weather>\n<parameter=city>\n75001\n</parameter>\n</function>\n</tool_call>",
            [("weather", {"city": "75001"})],
        ),
        ("<tool_call>\n<function=ping>\n</function>\n</tool_call>", [("ping", {})]),
    ],
    "Llama 3 and 4": [
        ('{"name": "add", "parameters": {"a": 1, "b": 2}}<|eot_id|>', [ADDED]),
        ('<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}<|eom_id|>', [ADDED]),
        ('{"type": "function", "name": "add", "parameters": {"a": "1", "b": "2"}}', [("add", {"a": "1", "b": "2"})]),
        ('<function=add>{"a": 1, "b": 2}</function><|eom_id|>', [ADDED]),
        ("[add(a=1, b=2)]<|eot_id|>", [ADDED]),
        ('[add(a=1, b=2), weather(city="Paris")]', [ADDED, PARIS]),
        ('<|python_tag|>weather.call(city="Paris")<|eom_id|>', [PARIS]),
        (
            '{"name": "add", "parameters": {"a": 1, "b": 2}}; {"name": "weather", "parameters": {"city": "Paris"}}',
            [ADDED, PARIS],
        ),
    ],
    "Mistral": [
        ('[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}}]</s>', [ADDED]),
        ('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}, "id": "VvvODy9mT"}]</s>', [ADDED]),
        ('[TOOL_CALLS]add{"a": 1, "b": 2}</s>', [ADDED]),
        ('[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}[TOOL_CALLS]weather[ARGS]{"city": "Paris"}</s>', [ADDED, PARIS]),
        ('[TOOL_CALLS]add[CALL_ID]VvvODy9mT[ARGS]{"a": 1, "b": 2}</s>', [ADDED]),
        ('[THINK]I add.[/THINK][TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}</s>', [ADDED]),
    ],
    "gpt-oss": [
        (
            "<|channel|>analysis<|message|>Need to use function add.<|end|><|start|>assistant<|channel|>commentary "
            'to=functions.add <|constrain|>json<|message|>{"a": 1, "b": 2}<|call|>',
            [ADDED],
        ),
        (' to=functions.add<|channel|>commentary json<|message|>{"a": 1, "b": 2}<|call|>', [ADDED]),
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.add<|channel|>commentary"
            '<|message|>{"a": 1, "b": 2}<|call|>',
            [ADDED],
        ),
        (
            "<|channel|>commentary<|message|>I will add.<|end|><|start|>assistant<|channel|>commentary "
            "to=functions.add "
            '<|constrain|>json<|message|>{"a": 1, "b": 2}<|call|>',
            [ADDED],
        ),
        ('<|channel|>analysis to=add code<|message|>{"a": 1, "b": 2}<|call|>', [ADDED]),
        ("<|channel|>analysis to=python code<|message|>print(1)<|call|>", [("python", {"code": "print(1)"})]),
        ("<|channel|>commentary to=functions.ping <|constrain|>json<|message|><|call|>", [("ping", {})]),
        ('<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1, "b": 2}', [ADDED]),
    ],
    "DeepSeek V3, R1, V3.1 and V3.2": [
        (f'{BB}{B}function{SEP}add\n```json\n{{"a": 1, "b": 2}}\n```{E}{EE}{EOS}', [ADDED]),
        (
            f'{BB}{B}function{SEP}add\n```json\n{{"a": 1, "b": 2}}\n```{E}\n{B}function{SEP}weather\n```json\n'
            f'{{"city": "Paris"}}\n```{E}{EE}{EOS}',
            [ADDED, PARIS],
        ),
        (f'{BB}{B}add{SEP}{{"a": 1, "b": 2}}{E}{EE}{EOS}', [ADDED]),
        (f'{BB}function{SEP}add\n```json\n{{"a": 1, "b": 2}}\n```{EE}', [ADDED]),
        (f'function{SEP}add\n```json\n{{"a": 1, "b": 2}}\n```{E}{EE}', [ADDED]),
        (
            f'<{D}function_calls>\n<{D}invoke name="add">\n<{D}parameter name="a" string="false">1</{D}parameter>\n'
            f'<{D}parameter name="b" string="false">2</{D}parameter>\n</{D}invoke>\n</{D}function_calls>{EOS}',
            [ADDED],
        ),
    ],
    "GLM 4.5": [
        (
            "<think></think>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
            "<arg_value>2</arg_value>\n</tool_call><|observation|>",
            [ADDED],
        ),
        ("<tool_call>weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>", [PARIS]),
        ("<tool_call>ping\n</tool_call>", [("ping", {})]),
        ("weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>", [PARIS]),
    ],
    "Gemma 4 and FunctionGemma": [
        ("<|tool_call>call:add{a:1,b:2}<tool_call|>", [ADDED]),
        ('<|channel>thought\nI ask.\n<channel|><|tool_call>call:weather{city:<|"|>Paris<|"|>}<tool_call|>', [PARIS]),
        ("<start_function_call>call:weather{city:<escape>Paris<escape>}<end_function_call>", [PARIS]),
        ("call:add{a:1,b:2}<tool_call|>", [ADDED]),
        ('```tool_code\nweather(city="Paris")\n```', [PARIS]),
        ('```tool_code\nprint(default_api.weather(city="Paris"))\nprint(add(a=1, b=2))\n```', [PARIS, ADDED]),
    ],
    "Phi-4, Granite 3, Hunyuan, Nemotron Nano 2, Cohere, InternLM": [
        ('<|tool_call|>[{"name": "add", "arguments": {"a": 1, "b": 2}}]<|/tool_call|><|end|>', [ADDED]),
        ('functools[{"name": "add", "arguments": {"a": 1, "b": 2}}]', [ADDED]),
        ('<|tool_call|>[{"name": "add", "arguments": {"a": 1, "b": 2}}]<|end_of_text|>', [ADDED]),
        ('<tool_call>[{"name": "add", "arguments": {"a": 1, "b": 2}}]', [ADDED]),
        ('<tool_calls>[{"name": "add", "arguments": {"a": 1, "b": 2}}]</tool_calls>', [ADDED]),
        (
            "<tool_calls><tool_call>add<tool_sep>\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
            "<arg_value>2</arg_value>\n</tool_call></tool_calls>",
            [ADDED],
        ),
        ('<tool_call>add<tool_sep>```json\n{"a": 1, "b": 2}\n```</tool_call>', [ADDED]),
        ('<TOOLCALL>[{"name": "add", "arguments": {"a": 1, "b": 2}}]</TOOLCALL>', [ADDED]),
        (
            '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "add", "parameters": {"a": 1, "b": 2}}\n]'
            "<|END_ACTION|><|END_OF_TURN_TOKEN|>",
            [ADDED],
        ),
        ('<|action_start|><|plugin|>\n{"name": "add", "parameters": {"a": 1, "b": 2}}<|action_end|>\n', [ADDED]),
    ],
    "LFM2, OLMo 3, Kimi K2, MiniMax M2, Seed-OSS, Muse": [
        ("<|tool_call_start|>[add(a=1, b=2)]<|tool_call_end|><|im_end|>", [ADDED]),
        ("<|tool_call_start|>[weather(city='Paris'), ping()]<|tool_call_end|>", [PARIS, ("ping", {})]),
        ("<function_calls>\nadd(a=1, b=2)\n</function_calls>", [ADDED]),
        ('<function_calls>\nadd(a=1, b=2)\nweather(city="Paris")\nping()\n</function_calls>', [ADDED, PARIS, ("ping", {})]),
        ("<function_calls>[add(a=1, b=2), ping()]</function_calls>", [ADDED, ("ping", {})]),
        (
            "<longcat_tool_call>add\n<longcat_arg_key>a</longcat_arg_key>\n<longcat_arg_value>1</longcat_arg_value>\n"
            "<longcat_arg_key>b</longcat_arg_key>\n<longcat_arg_value>2</longcat_arg_value>\n</longcat_tool_call>",
            [ADDED],
        ),
        (
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
            '{"a": 1, "b": 2}<|tool_call_end|><|tool_calls_section_end|><|im_end|>',
            [ADDED],
        ),
        (
            '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n<parameter name="b">2</parameter>\n'
            "</invoke>\n</minimax:tool_call>",
            [ADDED],
        ),
        (
            "<seed:tool_call>\n<function=add>\n<parameter=a>1</parameter>\n<parameter=b>2</parameter>\n</function>\n"
            "</seed:tool_call>",
            [ADDED],
        ),
        (
            ' to=weather<|message|><atem:function_calls>\n<atem:invoke name="weather">\n'
            '<atem:parameter name="city">Paris</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eot|>',
            [PARIS],
        ),
    ],
    "ReAct": [
        ('Thought: I add.\nAction: add\nAction Input: {"a": 1, "b": 2}', [ADDED]),
        ('**Action:** `add`\n**Action Input:** {"a": 1, "b": 2}\nObservation: 3', [ADDED]),
        ('Action: add\nAction Input:\n```json\n{"a": 1, "b": 2}\n```<|im_end|>', [ADDED]),
        ("Action: weather\nAction Input: Paris \nObservation: warm", [PARIS]),
        ('Action: weather\nAction Input: "Paris"<|im_end|>', [PARIS]),
        ('Action: python\nAction Input: {"code": "Action: add\\nAction Input: 1"}', [("python", {"code": "Action: add\nAction Input: 1"})]),
        ("Action: python\nAction Input: x = 1\nprint(x)", ["Expecting value at character 0"]),
        ("Action: add\nAction Input: 1 and 2", ["its arguments are not an object: 1"]),
        ("Action: Finish\nAction Input: 4", []),
        ("Action: I add\nAction Input: 4", []),
    ],
    "Functionary 3.2": [
        ('add\n{"a": 1, "b": 2}<|eot_id|>', [ADDED]),
        ('all\nI add.>>>add\n{"a": 1, "b": 2}>>>weather\n{"city": "Paris"}<|eot_id|>', [ADDED, PARIS]),
        ('>>>add\n{"x": 1}', [("add", {"x": 1})]),
        ('>>>add\n{"x": 1', ["Expecting ',' delimiter at character 7"]),
    ],
    "GLM 4": [
        ('add\n{"a": 1, "b": 2}<|observation|>', [ADDED]),
        ('Both.<|assistant|>add\n{"a": 1, "b": 2}<|assistant|>weather\n{"city": "Paris"}<|observation|>', [ADDED, PARIS]),
        ("ping\n{}", [("ping", {})]),
        ('add\n{"result": 3}', []),
        ('add\n{"a": 1} is how one writes it.', []),
        ('add\n{"a": 1', []),
        ('sum\n{"a": 1, "b": 2}', []),
        ('else\n{"a": 1}\n' * 300, []),
    ],
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_as_their_makers_document_them(family):
    for text, calls in FAMILIES[family]:
        assert read(text) == calls, text


@pytest.mark.parametrize(
    ("name", "several", "ends"),
    [
        ("qwen2_5", True, ("</tool_call>",)),
        ("qwen3", True, ("</tool_call>",)),
        ("qwen3_5_think", True, ("</tool_call>",)),
        ("glm4moe", True, ("</tool_call>",)),
        ("gemma4", True, ("<tool_call|>",)),
        ("deepseekv3", True, ("<\uff5ctool\u2581call\u2581end\uff5c>",)),
        ("lfm2_2_5", True, ()),
        ("llama3_1", False, ()),
        ("llama3_2", False, ()),
        ("gptoss", False, ()),
    ],
)
def test_the_mark_that_ends_the_first_of_several_calls_is_the_templates(name, several, ends):
    tokenizer = build_tiny_tokenizer(TinySection(context=800))
    tokenizer.chat_template = trl_template("gemma")
    assert NativeCalls.of(tokenizer) is None, "this template shows no calls"
    tokenizer.chat_template = trl_template(name)
    native = NativeCalls.of(tokenizer)
    assert (native.several, native.ends, native.template) == (several, ends, None)


WITHOUT = {
    "no end mark": ('<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}<|im_end|>', [ADDED]),
    "no opening mark": ('{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>', [ADDED]),
    "no marks": ('{"name": "add", "arguments": {"a": 1, "b": 2}}<|im_end|>', [ADDED]),
    "a fence": ('I add.\n```json\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n```', [ADDED]),
    "XML without marks": ("<function=add>\n<parameter=a>\n1\n</parameter>\n</function>", [("add", {"a": 1})]),
    "no end of a parameter": (
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</function>\n</tool_call>",
        [("add", {"a": 1})],
    ),
    "no end of the first parameter": (
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n<parameter=b>\n2\n</parameter>\n</function>\n</tool_call>",
        [ADDED],
    ),
    "no end of the function": (
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</tool_call>",
        [("add", {"a": 1})],
    ),
    "parameters": ('<tool_call>\n{"name": "add", "parameters": {"a": 1, "b": 2}}\n</tool_call>', [ADDED]),
    "args": ('<tool_call>\n{"tool": "add", "args": {"a": 1, "b": 2}}\n</tool_call>', [ADDED]),
    "as OpenAI's API has it": (
        '<tool_call>{"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}}</tool_call>',
        [ADDED],
    ),
    "a message of OpenAI's API": (
        '{"tool_calls": [{"type": "function", "function": {"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}}]}',
        [ADDED],
    ),
    "a brace too many": ('<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}}\n</tool_call>', [ADDED]),
    "a fence within": ('<tool_call>\n```json\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n```\n</tool_call>', [ADDED]),
    "a comment": ('<tool_call>{"name": "add", "arguments": {"a": 1, // one "}"\n"b": 2 /* two */}}</tool_call>', [ADDED]),
    "its opening mark at its end": ('<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n<tool_call><|im_end|>', [ADDED]),
    "the same after XML": ("<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n<tool_call>", [("add", {"a": 1})]),
    "another after its end": (
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>\n<tool_call>',
        [ADDED, "nothing stands in it"],
    ),
    "an end too many after a number": (
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</function>\n</tool_call>",
        [("add", {"a": 1})],
    ),
    "an end too many after nothing": ("<function=ping>\n</function>\n</function>", [("ping", {})]),
    "an end too many after JSON": (
        '<function=python>{"code": "1"}</function></function></tool_call></tool_call>',
        [("python", {"code": "1"})],
    ),
    "an end too many after a text": (
        "<function=python>\n<parameter=code>\n1\n</parameter>\n</function>\n</function>",
        ["</function> stands in an argument, so that it is not clear where this ends"],
    ),
    "the mark twice": ('<tool_call>\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>', [ADDED]),
    "two in one mark": (
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n{"name": "ping", "arguments": {}}\n</tool_call>',
        [ADDED, ("ping", {})],
    ),
    "a line end in a text": (
        '<tool_call>\n{"name": "python", "arguments": {"code": "x = 1\nprint(x)"}}\n</tool_call>',
        [("python", {"code": "x = 1\nprint(x)"})],
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WITHOUT)
def test_what_models_leave_out_or_call_otherwise(what):
    text, calls = WITHOUT[what]
    assert read(text) == calls


NAMED = {
    "I would use <tool_call> here": [],
    "`<tool_call>` is what begins a call, and `</tool_call>` ends it.": [],
    "Write it in <tool_call></tool_call> tags.": [],
    "One uses [TOOL_CALLS], <function=add> or <function=...> then, or [ARGS] and `<arg_key>`.": [],
    "Now: <tool_call>add 1 and 2</tool_call>": ["it does not have the form of a call"],
    "Now: <tool_call> add 1 and 2 </tool_call>": ["</tool_call> ends a call that begins nowhere"],
    "Now: <tool_call>\nadd": ["it does not have the form of a call"],
    "Now: <function=add>\n<parameter=a>": ["the parameter a has no end"],
    'Now: <invoke name="add" id="1">\n': ["it names no tool"],
}


@pytest.mark.parametrize("words", NAMED)
def test_a_mark_that_words_name_is_no_call(words):
    assert read(words) == NAMED[words]
    for call in ('<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>', 'add\n{"a": 1, "b": 2}'):
        assert NAMED[words] or read(f"{words}\n{call}") == [ADDED]
    calls = read(f"Between <tool_call> and </tool_call>: <tool_call>{RESULT}</tool_call>")
    assert calls == [ADDED]


INSIDE = [
    "<|channel|>", "<|start|>", "<parameter=x>", "</tool_call>", "</think>", "<tool_call>", "<|call|>", "[TOOL_CALLS]",
    "<think>", "</parameter>", "</function>", "<|im_end|>",
]  # fmt: skip


@pytest.mark.parametrize("mark", INSIDE)
def test_a_mark_inside_a_program_is_part_of_it(mark):
    code = f'print("{mark}")'
    escaped = code.replace('"', '\\"')
    json_call = f'{{"name": "python", "arguments": {{"code": "{escaped}"}}}}'
    whole = [("python", {"code": code})]
    for text in (
        f"<tool_call>\n{json_call}\n</tool_call><|im_end|>",
        f"<think>Hm.</think><tool_call>\n{json_call}\n</tool_call>",
        f"[TOOL_CALLS][{json_call}]</s>",
        f'<|channel|>commentary to=functions.python <|constrain|>json<|message|>{{"code": "{escaped}"}}<|call|>',
        json_call,
        f"<tool_call>\n<function=python>\n<parameter=code>\n{code}\n</parameter>\n</function>\n</tool_call>",
    ):
        assert read(text) == whole, text


@pytest.mark.parametrize("text", [
    '<tool_call>\n<function=python>\n<parameter=code>\nprint("</parameter>\n</function>")\nboom()\n</parameter>\n</function>\n</tool_call>',
    '<tool_call>\n<function=python>\n<parameter=code>\nprint("</parameter></function></tool_call>")\n</parameter>\n</function>\n</tool_call>',
    "<tool_call>\n<function=python>\n<parameter=code>\nprint(1)\n",
    "<function=weather>\n<parameter=city>\nParis\n<parameter=unit>\ncelsius\n</parameter>\n</function>",
    "<function=weather>\n<parameter=city>\nParis\n<parameter=unit>\ncelsius\n</function>",
    "<tool_call>\n<function=python>\n<parameter=code>\nprint(1)",
    "<tool_call>python\n<arg_key>code</arg_key>\n<arg_value>print('</arg_value></tool_call>')</arg_value>\n</tool_call>",
    '<tool_call>\n{"name": "python", "arguments": {"code": "print(1)\n</tool_call>',
    "<tool_call>\n<function=python>\n<parameter=code>\na\n</parameter>\n<parameter=code>\nb\n</parameter>\n</function>\n</tool_call>",
])  # fmt: skip
def test_a_program_that_may_be_cut_is_not_run(text):
    found = read(text)
    assert found and all(isinstance(one, str) for one in found)


UNREAD = {
    "<tool_call>\n{}\n</tool_call>": 'it is not an object with "name" and "arguments"',
    "<tool_call></tool_call>": "nothing stands in it",
    "<tool_call>\nadd 1 and 2\n</tool_call>": "it does not have the form of a call",
    '<tool_call>\n{"name": "add", "arguments": [1]}\n</tool_call>': "its arguments are not an object: [1]",
    '<tool_call>\n{"name": "add", "a": 1}\n</tool_call>': 'its arguments must stand under "arguments", and it has a',
    '<tool_call>\n{"name": "add", "arguments": {"a": 1}, "parameters": {"a": 2}}\n</tool_call>': (
        'its arguments must stand under "arguments", and it has arguments, parameters'
    ),
    '<tool_call>\n{"name": "add", "arguments": {"a": 1}} really\n</tool_call>': (
        "other words stand between the call and </tool_call>"
    ),
    '<tool_call>\n{"name": "add", "arguments": {"a": NaN}}\n</tool_call>': "JSON has no number NaN",
    '<tool_call>\n{"name": "add", "arguments": {"a": 1e999}}\n</tool_call>': "a number in it is not finite",
    'You could write {"name": "add", "arguments": {"a": 1}} here.': (
        "it stands in the midst of other words; write it alone, with the marks of a call"
    ),
    "To add, one writes call:add{a:1,b:2}, but I will not.": (
        "it stands in the midst of other words; write it alone, with the marks of a call"
    ),
    'To add, one writes add[ARGS]{"a": 1, "b": 2}, but I will not.': (
        "it stands in the midst of other words; write it alone, with the marks of a call"
    ),
    '<tool_call>{"name": "ping", "arguments": {}}</tool_call> The tag </think> ends a thought.': (
        "it stands before the end of a thought that nothing began"
    ),
    '<tool_call>{"name": "add", "parameters": {"type": "object", "properties": {}}}</tool_call>': (
        "it describes a tool; a call has the values of its arguments"
    ),
    '{"name": "add", "description": "Add.", "parameters": {"a": 1, "b": 2}}': (
        'a description stands beside its parameters; a call has "name" and "arguments" only'
    ),
    '[{"name": "ping", "arguments": {}}, {"name": "add", "description": "Add.", "parameters": {}}]': (
        "a call stands among the descriptions of tools"
    ),
    '<function_calls>\nadd(a=1)\nadd(a=\n</function_calls>': "Expecting value at character 0",
    '[add(a=1, b=[7 // 2\n])]': "Expecting ',' delimiter at character 3",
    "add 1 and 2</tool_call>": "</tool_call> ends a call that begins nowhere",
    '<think>I call <tool_call>{"name": "ping", "arguments": {}}</tool_call>': "it stands in thinking that has no </think>",
    "<|channel|>commentary <|constrain|>json<|message|>{\"a\": 1}<|call|>": (
        "its header names no tool, as in to=functions.NAME"
    ),
    "<|channel|>commentary to=functions.add <|constrain|>json{\"a\": 1}<|call|>": "its header has no <|message|>",
    "<|channel|>commentary to=functions.add <|constrain|>json<|message|>{\"a\": 1<|call|>": (
        "Expecting ',' delimiter at character 7"
    ),
    "<|python_tag|>import os": "it does not have the form of a call",
    "[TOOL_CALLS]": "nothing stands in it",
    "[add(a=1, b=2": "the arguments of add have no end",
}  # fmt: skip


@pytest.mark.parametrize("text", UNREAD)
def test_what_looks_like_a_call_and_is_none_is_told(text):
    assert read(text) == [UNREAD[text]]


@pytest.mark.parametrize("text", [
    "The answer is 4.",
    "I use the tool add: add(1, 2) gives 3, and [1, 2] is a list.",
    'As JSON: {"name": "Ann", "type": "person"}',
    '{"name": "ping"}',
    '```python\ndef add(a, b):\n    return a + b\n```',
    "<|channel|>analysis<|message|>I could call "
    "to=functions.add<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>",
    '<think>First <tool_call>{"name": "ping", "arguments": {}}</tool_call></think>4',
    'so I could use <tool_call></think>4',
    "<think>I think on and on",
    "<html><body>a < b</body></html>",
])  # fmt: skip
def test_what_is_no_call(text):
    assert read(text) == []


SCHEMA = (
    '{"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}'
)
RESULT = '{"name": "add", "arguments": {"a": 1, "b": 2}}'


@pytest.mark.parametrize("text", [
    SCHEMA,
    f"[{SCHEMA}]",
    f'{{"type": "function", "function": {SCHEMA}}}',
    '{"name": "add", "parameters": {"type": "object", "properties": {}}}',
    '{"name": "add", "arguments": {"type": "object", "required": []}}',
    '{"name": "add", "description": "Add.", "parameters": {"a": {"type": "integer"}}}',
    '{"name": "add", "description": "Add.", "inputSchema": {"type": "object"}}',
    f"<tools>\n{SCHEMA}\n</tools>",
    f"<tools>\n{RESULT}\n</tools>",
    f"<tool_response>\n{RESULT}\n</tool_response>",
    f"<tool_response>\n{RESULT}",
    f"<tool_response><tool_call>{RESULT}</tool_call></tool_response>",
    f"[TOOL_RESULTS]{RESULT}[/TOOL_RESULTS]",
    "I use functools[0] and recall:add{a:1}.",
])  # fmt: skip
def test_what_the_model_was_told_is_no_call(text):
    assert read(text) == []
    call = '\n<tool_call>{"name": "ping", "arguments": {}}</tool_call>'
    assert read(text + call) == [("ping", {})]


def test_a_tool_may_have_arguments_that_are_called_as_those_of_a_schema():
    parameters = {"type": "object", "properties": {"type": {"type": "string"}, "properties": {"type": "object"}}}
    tool = {"type": "function", "function": {"name": "make", "description": "", "parameters": parameters}}
    text = '{"name": "make", "parameters": {"type": "object", "properties": {"x": 1}}}'
    given = {"type": "object", "properties": {"x": 1}}
    assert read_written_calls(text, "", [tool]) == [{"name": "make", "arguments": given}]


def test_thinking_that_the_prompt_opened():
    call = '<tool_call>{"name": "ping", "arguments": {}}</tool_call>'
    assert read(f"Hm {call} </think> 4", "<think>\n") == []
    assert read(f"Hm </think> {call}", "<think>\n") == [("ping", {})]
    assert read(f"Hm {call}", "<think>\n") == ["it stands in thinking that has no </think>"]
    assert read(call, "<think>\n\n</think>\n\n") == [("ping", {})]
    assert read(f"<think>Hm</think> {call} </think>") == [("ping", {})]
    assert read(f"<think>I write <think></think> and then {call} </think> 4") == []


def test_a_good_and_a_broken_call_are_read_apart():
    text = '<tool_call>{"name": "ping"</tool_call><tool_call>{"name": "ping", "arguments": {}}</tool_call>'
    assert read(text) == ["Expecting ',' delimiter at character 15", ("ping", {})]


def test_deep_arguments_are_refused_and_what_is_read_can_be_recorded():
    for depth in (1, 60, 64, 65, 300, 500, 5000, 100_000):
        text = f'<tool_call>{{"name": "add", "arguments": {{"a": {"[" * depth}{"]" * depth}}}}}</tool_call>'
        (found,) = read(text)
        if depth <= 60:
            to_json(Dialogue(Example("e", "", "", {"found": found[1]}), []))
        else:
            assert found == f"it has more than {DEEPEST} lists and objects inside each other"


def test_values_that_are_nearly_json():
    for text, value in [
        ("{'a': True, 'b': None}", {"a": True, "b": None}),
        ('{"a": 1,}', {"a": 1}),
        ("[1, -2.5, .5]", [1, -2.5, 0.5]),
        ("{a: 'it\\'s', b: \"\\u00e9\\n\"}", {"a": "it's", "b": "\u00e9\n"}),
        ('(\'x\', """a "q" b""")', ["x", 'a "q" b']),
        ("'\\ud83d\\ude00'", "\U0001f600"),
    ]:
        assert whole_value(text) == value
    for text in ("", "{", "[1", "'a", "{a 1}", "word", "[1 2]", "1 2", "9" * 5000 + "x", "-", "<escape>x"):
        with pytest.raises(Unreadable):
            whole_value(text)
    assert read_value("  [1] rest") == ([1], 5)
    with pytest.raises(Unreadable):
        call_of(3)


def _pieces():
    ends = [m for m in MARKS.values() if m]
    marks = [*MARKS, *ends, *THINKING, *THINKING.values(), *INSIDE, *TOLD, *TOLD.values()]
    marks += ["<arg_key>", "<tool_sep>", "//", "/*", "print(", "```json", "[ARGS]", SEP]
    return [*marks, '{"name": "add", "arguments": {"a": 1}}', "{", "}", "[", "]", '"', "'", "\n", " ", "add", "add(a=1)", "(", ")",
            "<function=add>", "<parameter=a>", "</arg_value>", "to=functions.add", "<|channel|>", "<|message|>", "call:add{", "word", "1", ":"]  # fmt: skip


def test_random_texts_around_calls_raise_nothing_and_lose_no_call():
    pieces, rng = _pieces(), random.Random(0)
    for _ in range(3000):
        text = "".join(rng.choice(pieces) for _ in range(rng.randrange(1, 40)))
        for one in read_written_calls(text, rng.choice(["", "<think>\n"]), SCHEMAS):
            assert set(one) in ({"error"}, {"name", "arguments"}) and isinstance(one.get("arguments", {}), dict)
    words = [
        "Ann has 3 apples.",
        "x < 4",
        "{1, 2}",
        "\n",
        "(a, b)",
        '"quoted"',
        "f(x) = 2",
        "\u4f60\u597d",
        "'s",
        "<b>",
    ]
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    for _ in range(500):
        before, after = (" ".join(rng.choice(words) for _ in range(rng.randrange(8))) for _ in range(2))
        assert read(before + "\n" + call + after) == [ADDED]


@pytest.mark.parametrize("piece", ["<tool_call>", '<tool_call>{"a":', "<function=f>", "<think>", "</think>", '{"name":', "<tool_call>add", "add(a=1)\n", "<tools>", '{"name":/*',
                                   "<|channel|>", "<|channel|>x<|message|>", "[TOOL_CALLS]", "</tool_call>", "<arg_key>", "call:f{", "\\", '"',
                                   "<function=f><parameter=a>", "</parameter>", "a ", " ", "<|start|>", '<tool_call>["', "to=functions.f "])  # fmt: skip
def test_hostile_repetitions_end_with_a_bounded_number_of_calls(piece):
    found = read_written_calls(piece * (60_000 // len(piece)), "", SCHEMAS)
    assert len(found) <= MOST + 1


@pytest.mark.slow
def test_the_time_is_linear_in_the_length():
    import time

    for piece in _pieces():
        seconds = []
        for size in (100_000, 400_000):
            began = time.process_time()
            read_written_calls(piece * (size // len(piece)), "", SCHEMAS)
            seconds.append(time.process_time() - began)
        assert seconds[1] < 12 * max(seconds[0], 0.02), (piece, seconds)


def test_a_response_template_is_used_where_no_way_of_writing_is_known():
    template = {
        "fields": {"tool_calls": {"open_pattern": r"CALL (?P<name>\w+) ", "close_pattern": "DONE", "repeats": True, "content": "json",
                                  "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}}},
        "defaults": {"role": "assistant"}, "start_anchor": "A:",
    }  # fmt: skip
    assert read_calls('CALL add {"a": 1}DONE', "", template, SCHEMAS) == [{"name": "add", "arguments": {"a": 1}}]
    call = '<tool_call>{"name": "ping", "arguments": {}}</tool_call>'
    assert read_calls(call, "", template, SCHEMAS) == [{"name": "ping", "arguments": {}}]


def _written(code):
    """A call of ``python`` as several families write it: where its text is in quotes, and where it is bare."""
    arguments = json.dumps({"code": code}, ensure_ascii=False)
    call = f'{{"name": "python", "arguments": {arguments}}}'
    quoted = [
        f"<tool_call>\n{call}\n</tool_call><|im_end|>",
        f"<think>\nx\n</think>\n<tool_call>\n{call}\n</tool_call>",
        f"{call}<|eot_id|>",
        f"[TOOL_CALLS]python[ARGS]{arguments}</s>",
        f"<|channel|>commentary to=functions.python <|constrain|>json<|message|>{arguments}<|call|>",
        f"{BB}{B}function{SEP}python\n```json\n{arguments}\n```{E}{EE}",
        f"<|tool_call|>[{call}]<|/tool_call|>",
        f"<|tool_call_start|>[python(code={json.dumps(code)})]<|tool_call_end|>",
    ]
    bare = [
        f"<tool_call>\n<function=python>\n<parameter=code>\n{code}\n</parameter>\n</function>\n</tool_call>",
        f"<tool_call>python\n<arg_key>code</arg_key>\n<arg_value>{code}</arg_value>\n</tool_call>",
        f'<minimax:tool_call>\n<invoke name="python">\n<parameter name="code">{code}</parameter>\n</invoke>\n</minimax:tool_call>',
    ]
    return quoted, bare


def test_random_programs_full_of_marks_are_read_whole_or_not_at_all():
    pieces = [
        *_pieces(),
        "<parameter=x>\n",
        "</parameter>\n",
        "\n</function>\n</tool_call>",
        "\\",
        "x = 1",
        "```",
        "</",
    ]
    rng, refused = random.Random(1), 0
    for _ in range(400):
        code = "".join(rng.choice(pieces) for _ in range(rng.randrange(1, 12)))
        quoted, bare = _written(code)
        for text in quoted:
            assert read(text) == [("python", {"code": code})], text
        for text in bare:
            whole = [{"code": code}, {"code": code.removeprefix("\n").removesuffix("\n")}]
            found = read(text)
            run = [one for one in found if not isinstance(one, str) and not set(one[1]) - {"code"}]
            assert found and all(one[0] == "python" and one[1] in whole for one in run), text
            refused += not run
    assert 0 < refused < 300
