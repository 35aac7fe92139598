"""The plain call formats: what stands inside an argument, in thinking, in the format of another family, and without
end."""

import pytest

from maporl.config.call_options import CallTexts
from maporl.environments.base import Tool
from maporl.environments.calls import JsonFormat, NativeFormat, TagsFormat, TypedFormat
from trl_ext.chat.written_calls import MOST


def python(code: str) -> str:
    """Run a program.

    Args:
        code: the program, in Python
    """
    return code


def ping() -> str:
    """Do nothing."""
    return ""


RUN = Tool.of(python)
TOOLS = [RUN, Tool.of(ping)]
CALL = '<call>{"name": "python", "arguments": {"code": "%s"}}</call>'
TELL = "calls are not written so here; write "


def read(text, kind=JsonFormat, tools=TOOLS, parallel=True):
    """The calls of a completion as (name, arguments), and the reasons of those that cannot be read."""
    options = () if kind is TypedFormat else (parallel,)
    return [one.error or (one.name, one.arguments) for one in kind(tools, CallTexts(), *options).read(text, [], [])]


def ran(code):
    return [("python", {"code": code})]


@pytest.mark.parametrize("mark", ["</call>", "<call>", "</think>", "<think>", "<tool_call>", "}</call>"])
def test_a_mark_inside_a_program_is_part_of_it(mark):
    assert read(CALL % f"print('{mark}')") == ran(f"print('{mark}')")
    assert read("<think>Hm.</think>" + CALL % f"print('{mark}')" + " " + CALL % "1") == ran(f"print('{mark}')") + ran(
        "1"
    )


def test_thinking():
    assert read("<think>" + CALL % "1" + "</think>4") == []
    assert read("hm " + CALL % "1" + "</think>4") == []  # the prompt had opened it
    assert read("<think>" + CALL % "1") == ["it stands in thinking that has no </think>"]
    assert read("<think>" + "on and on") == []
    assert read(CALL % "1" + " and so I <think> on") == ran("1")


def test_what_is_left_out_or_called_otherwise():
    assert read('<call>{"name": "python", "parameters": {"code": "1"}}</call>') == ran("1")
    assert read('<call>{"name": "python", "arguments": "{\\"code\\": \\"1\\"}"}</call>') == ran("1")
    assert read("<call>{'name': 'python', 'arguments': {'code': 'a\nb'}}</call>") == ran("a\nb")
    assert read('<call>{"name": "python", "code": "1"}</call>') == [
        'its arguments must stand under "arguments", and it has code'
    ]
    assert read('<call>{"name": "ping"}</call>') == [("ping", {})]
    assert read(CALL.removesuffix("</call>") % "1") == ["<call> has no </call>"]
    assert read(CALL.replace("}}</call>", "}} so</call>") % "1") == ["it is not JSON: more stands after it"]
    assert read(CALL % 'print("</call>")') == [
        "</call> stands in it, so that it is not clear where it ends",
    ]


def test_a_mark_too_many_and_marks_that_words_name():
    assert read((CALL % "1").replace("</call>", "<call>\n")) == ran("1")
    assert read((CALL % "1").replace("</call>", "<call>") + CALL % "2") != ran("1")
    for words in ("I use `<call>` for this.", "I would use <call> here", "It stands between <call> and </call>."):
        assert read(words) == [] and read(f"{words}\n{CALL % 1}") == ran("1")
    for words in ("I use `<python>`.", "Use <python> to run it."):
        assert read(f"{words}\n<python>1</python>", TagsFormat, [RUN]) == ran("1")
    assert read("Now <python> 1 </python>", TagsFormat, [RUN]) == ran("1")
    assert len(read("<python>print('<python>", TagsFormat, [RUN])) == 2
    for text in ('Action: python\nAction Input: {"code": "1"}', 'python\n{"code": "1"}'):
        assert read(text) == [TELL + '<call>{"name": NAME, "arguments": {...}}</call>']


def test_a_call_in_the_format_of_another_family_is_told_how_calls_are_written():
    json_told, tags_told = TELL + '<call>{"name": NAME, "arguments": {...}}</call>', TELL + "<python>code</python>"
    for text in (
        '<tool_call>\n{"name": "python", "arguments": {"code": "1"}}\n</tool_call>',
        '{"name": "python", "arguments": {"code": "1"}}',
        '[TOOL_CALLS]python[ARGS]{"code": "1"}',
        "<function=python>\n<parameter=code>\n1\n</parameter>\n</function>",
        '{"name": "python", "arguments": {"code": "1"}}</call>',
        "<tool_call>\nbroken",
    ):
        assert read(text) == [json_told], text
        assert read(text, TagsFormat, [RUN]) == [tags_told], text
    assert read("I answer 4.") == [] and read("2 < 3", TagsFormat, [RUN]) == []


def test_tags():
    def tags(text):
        return read(text, TagsFormat, [RUN])

    assert tags("<python> 1 + 1 </python>") == ran("1 + 1")
    assert tags("<python>1</python> and <python>2</python>") == ran("1") + ran("2")
    assert tags("<python>1") == ["<python> has no </python>"]
    assert tags('<python>print("</python>")</python>') == [
        "</python> stands in it, so that it is not clear where it ends"
    ]
    assert tags('<python>print("</think>")</python>') == ran('print("</think>")')
    assert tags("hm <python>1</python></think><python>2</python>") == ran("2")


def test_typed_calls():
    assert read('/python {"code": "1"}', TypedFormat) == ran("1")
    assert read("/python " + '{"code": ' + "[" * 500 + "]" * 500 + "}", TypedFormat) == [
        "it is not JSON: it has more than 64 lists and objects inside each other"
    ]


@pytest.mark.parametrize(
    "piece", ["<call>", "</call>", "<call>{", '<call>["', "<think>", "</think>", "<python>", "<call>{}</call>"]
)
def test_hostile_repetitions_end_with_a_bounded_number_of_calls(piece):
    for kind, tools in ((JsonFormat, TOOLS), (TagsFormat, [RUN])):
        found = read(piece * (600_000 // len(piece)), kind, tools)
        assert len(found) <= MOST + 1
    if piece == "<call>":
        assert read(piece * 1000)[-1] == f"there are more than {MOST} calls; what follows is not read"


def test_descriptions_of_arguments_reach_the_prompt_in_every_format():
    for kind in (JsonFormat, TagsFormat, TypedFormat):
        told = kind([RUN], CallTexts()).intro()
        assert "python(code: string): Run a program.\n  code: the program, in Python" in told
    assert JsonFormat([RUN], CallTexts(intro="", line="", json="")).intro() == ""

    class Reader:
        several = True

    (shown,) = NativeFormat([RUN], CallTexts(), Reader()).schemas()
    assert shown["function"]["parameters"]["properties"]["code"]["description"] == "the program, in Python"
