"""Arguments as models write them, and the schemas of strangers: what they mean, what is named at the start, what is
bounded."""

import random

import pytest

from maporl.environments import schemas
from maporl.environments.arguments import ArgumentCheck
from maporl.environments.base import CallRefused, Tool
from maporl.errors import ConfigError

INTEGER, TEXT = {"type": "integer"}, {"type": "string"}


def schema(more=None, **properties):
    return {"type": "object", "properties": properties, **(more or {})}


def check(parameters, arguments):
    """The arguments that arrive, or why they are refused."""
    try:
        return ArgumentCheck(Tool("act", "Act.", parameters, str))(arguments)
    except CallRefused as error:
        return str(error)


def of(kind, value):
    """What becomes of one optional argument."""
    got = check(schema(a=kind), {"a": value})
    return got.get("a", "left out") if isinstance(got, dict) else got


PLACE = {"type": "object", "properties": {"row": INTEGER, "column": INTEGER}, "required": ["row"]}
MEANT = [
    (INTEGER, "4", 4),
    (INTEGER, " 4 ", 4),
    (INTEGER, "4.0", 4),
    (INTEGER, 4.0, 4),
    (INTEGER, "4.5", "a: '4.5' is not of type 'integer'"),
    (INTEGER, "four", "a: 'four' is not of type 'integer'"),
    (INTEGER, True, "a: True is not of type 'integer'"),
    (INTEGER, "true", "a: 'true' is not of type 'integer'"),
    (INTEGER, None, "left out"),
    ({"type": "number"}, "2.5", 2.5),
    ({"type": "number"}, "3", 3),
    ({"type": "number"}, "nan", "a: 'nan' is not of type 'number'"),
    ({"type": "number"}, "1e999", "a: '1e999' is not of type 'number'"),
    ({"type": ["integer", "number"]}, "4", 4),
    ({"type": "boolean"}, "True", True),
    ({"type": "boolean"}, "false", False),
    ({"type": "boolean"}, "yes", "a: 'yes' is not of type 'boolean'"),
    (TEXT, "4", "4"),
    (TEXT, "null", "null"),
    (TEXT, 4, "a: 4 is not of type 'string'"),
    ({}, "4", "4"),
    ({"type": "integer", "nullable": True}, None, None),
    ({"type": "integer", "nullable": True}, "null", None),
    ({"type": "string", "nullable": True, "enum": ["x"]}, None, None),
    ({"anyOf": [INTEGER, {"type": "null"}], "default": None}, "4", 4),
    ({"anyOf": [INTEGER, {"type": "null"}], "default": None}, None, None),
    ({"anyOf": [INTEGER, {"type": "string", "enum": ["all"]}]}, "4", 4),
    ({"anyOf": [INTEGER, {"type": "string", "enum": ["all"]}]}, "all", "all"),
    ({"oneOf": [TEXT, INTEGER]}, "4", "4"),
    ({"enum": [1, 2]}, "2", 2),
    ({"enum": ["x", "y"]}, None, "left out"),
    ({"type": "array", "items": INTEGER}, ["1", "2"], [1, 2]),
    ({"type": "array", "items": INTEGER}, "[1, 2]", [1, 2]),
    ({"type": "array", "items": TEXT}, "['a', 'b']", ["a", "b"]),
    ({"type": "array", "prefixItems": [INTEGER], "items": TEXT}, ["1", "2"], [1, "2"]),
    ({"anyOf": [{"type": "array", "items": INTEGER}, {"type": "null"}]}, '[1, "2"]', [1, 2]),
    (PLACE, {"row": "1", "column": None}, {"row": 1}),
    (PLACE, '{"row": "1"}', {"row": 1}),
    (PLACE, {"column": 1}, "a: 'row' is a required property"),
    ({"type": "object", "additionalProperties": INTEGER}, {"x": "1"}, {"x": 1}),
    ({"allOf": [PLACE]}, {"row": "1"}, {"row": 1}),
    ({"type": "number", "multipleOf": 0.1}, 0.3, 0.3),
    ({"type": "array", "uniqueItems": True}, [[1], [1.0]], "a: [1.0] stands in it more than once"),
    ({"type": "array", "uniqueItems": True}, [1, True, "1"], [1, True, "1"]),
    ({"type": "string", "pattern": r"^\d{4}$"}, "2024", "2024"),
    ({"type": "string", "pattern": r"^\d{4}$"}, "2024\n", r"a: '2024\n' does not match '^\\d{4}$'"),
    ({"type": "string", "pattern": r"^[\d]$"}, "\u0663", "a: '\u0663' does not match '^[\\\\d]$'"),
    ({"type": "string", "pattern": r"^[^\D]\W$"}, "1\u00e9", "1\u00e9"),
    ({"type": "string", "pattern": "^[^][$]$"}, "\n$", "\n$"),
    ({"type": "string", "pattern": "[]"}, "x", "a: 'x' does not match '[]'"),
    ({"type": "string", "pattern": r"^\cA[\cB]\u{1F600}$"}, "\x01\x02\U0001f600", "\x01\x02\U0001f600"),
    ({"type": "string", "pattern": r"^(?<q>['\"]).*\k<q>\$$"}, "'x'$", "'x'$"),
    ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, "4", 4),
    ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, "3", "a: 3 is less than or equal to the minimum of 3"),
    ({"type": "integer", "maximum": 3, "exclusiveMaximum": False}, "3", 3),
    ({"type": "array", "items": [INTEGER, TEXT]}, ["1", "2"], [1, "2"]),
    ({"type": "array", "items": [], "additionalItems": INTEGER}, ["1", "2"], [1, 2]),
    ({"type": "string", "pattern": r"^\p{L}+$"}, "\u00e9t\u00e9", "\u00e9t\u00e9"),
    ({"type": "string", "pattern": "^[a-z]+$"}, "A1", "a: 'A1' does not match '^[a-z]+$'"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "value", "want"), MEANT, ids=str)
def test_what_is_meant_by_an_argument(kind, value, want):
    got = of(kind, value)
    assert got == want and type(got) is type(want)


def test_references_are_followed():
    local = schema(
        {"$defs": {"place": PLACE, "a /b": INTEGER}}, a={"$ref": "#/$defs/place"}, b={"$ref": "#/$defs/a%20~1b"}
    )
    assert check(local, {"a": {"row": "1"}, "b": "2"}) == {"a": {"row": 1}, "b": 2}
    tree = {
        "type": "object",
        "properties": {"v": INTEGER, "inner": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
    }
    recursive = schema({"$defs": {"tree": tree}}, a={"$ref": "#/$defs/tree"})
    assert check(recursive, {"a": {"v": "1", "inner": [{"v": "2", "inner": "[]"}]}}) == {
        "a": {"v": 1, "inner": [{"v": 2, "inner": []}]}
    }
    elsewhere = schema({"components": {"schemas": {"P": PLACE}}}, a={"$ref": "#/components/schemas/P"})
    assert check(elsewhere, {"a": '{"row": "3"}'}) == {"a": {"row": 3}}
    named = {"$id": "http://example.org/s", **schema({"$defs": {"n": INTEGER}}, a={"$ref": "#/$defs/n"})}
    assert check(named, {"a": "4"}) == {"a": 4}


def test_references_by_a_name_are_followed_too():
    anchor = schema({"$defs": {"n": {"$anchor": "num", **INTEGER}}}, a={"$ref": "#num"})
    assert check(anchor, {"a": "5"}) == {"a": 5}
    number = {"$id": "num", "$defs": {"q": INTEGER}, "type": "array", "items": {"$ref": "#/$defs/q"}}
    named = {"$id": "http://example.org/s", **schema({"$defs": {"n": number}}, a={"$ref": "num"}, id=INTEGER)}
    assert check(named, {"a": ["5"], "id": "6"}) == {"a": [5], "id": 6}
    draft = "http://json-schema.org/draft-0{}/schema#"
    for number, key in ((4, "id"), (7, "$id")):
        older = schema(
            {"$schema": draft.format(number), "definitions": {"n": {key: "#n", **INTEGER}}}, a={"$ref": "#n"}
        )
        assert check(older, {"a": "5"}) == {"a": 5}
    tree = {"$anchor": "tree", **schema(v=INTEGER, inner={"type": "array", "items": {"$ref": "#tree"}})}
    assert check(schema({"$defs": {"t": tree}}, a={"$ref": "#tree"}), {"a": {"inner": [{"v": "2"}]}}) == {
        "a": {"inner": [{"v": 2}]}
    }


def test_a_schema_without_a_type_is_one_of_arguments():
    assert check({}, {}) == {} and check({}, {"a": 1}) == "unknown a; it takes nothing"
    assert check({"$schema": "https://json-schema.org/draft/2020-12/schema"}, {}) == {}
    assert check({"properties": {"a": INTEGER}}, {"a": "1"}) == {"a": 1}
    assert check({"$ref": "#/$defs/x", "$defs": {"x": schema(a=INTEGER)}}, {"a": "1"}) == {"a": 1}
    assert Tool("act", "Act.", {}, str).parameters == {"type": "object", "properties": {}}
    for parameters in ({"type": "string"}, {"a": "integer"}, {"items": INTEGER}, {"type": None}):
        with pytest.raises(ConfigError, match="tool act: expected parameters to be a JSON schema of an object"):
            Tool("act", "Act.", parameters, str)


def test_drafts_and_properties_that_are_called_as_keywords_are():
    draft3 = {"$schema": "http://json-schema.org/draft-03/schema#", **schema(a={"type": "integer", "required": True})}
    draft7 = {"$schema": "http://json-schema.org/draft-07/schema#", **schema(a={"type": "array", "items": [INTEGER]})}
    unknown = {"$schema": "http://127.0.0.1:9/schema", **schema(a=INTEGER)}
    assert [check(draft3, {"a": "5"}), check(draft7, {"a": ["5", "x"]}), check(unknown, {"a": "5"})] == [
        {"a": 5}, {"a": [5, "x"]}, {"a": 5},
    ]  # fmt: skip
    words = schema(const=INTEGER, default=INTEGER, pattern=TEXT, enum=TEXT, required=INTEGER)
    given = {"const": "1", "default": "2", "pattern": "(", "enum": "x", "required": 3}
    assert check(words, given) == {"const": 1, "default": 2, "pattern": "(", "enum": "x", "required": 3}


def test_further_arguments():
    assert check(schema(a=INTEGER), {"a": 1, "b": 2}) == "unknown b; it takes a"
    assert check(schema({"additionalProperties": True}, a=INTEGER), {"b": 2}) == {"b": 2}
    both = schema({"allOf": [schema(b=INTEGER)]}, a=INTEGER)
    assert check(both, {"a": "1", "b": "2"}) == {"a": 1, "b": 2}
    either = schema({"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, a=INTEGER, b=INTEGER)
    assert check(either, {"a": "1", "b": None}) == {"a": 1}
    assert check(either, {}) == "{} is not valid under any of the given schemas"
    inner = schema(a={"type": "object", "properties": {"x": {}}, "additionalProperties": False})
    assert check(inner, {"a": {"y": 1}}) == "a: unknown y; it takes x"


BAD = {
    "$ref missing": (schema(a={"$ref": "#/$defs/none"}), "properties.a.$ref: '#/$defs/none' is not in the schema"),
    "$ref to a file": (schema(a={"$ref": "file:///etc/passwd"}), "'file:///etc/passwd' is not in the schema"),
    "$ref to an address": ({"$id": "http://127.0.0.1:9/s", **schema(a={"$ref": "t"})}, "'t' is not in the schema"),
    "$dynamicRef": (schema(a={"$dynamicRef": "#x"}), "'#x' is not in the schema"),
    "itself": (schema(a={"allOf": [{"$ref": "#/properties/a"}]}), "allOf.0.$ref: it refers to itself without end"),
    "itself through another": (
        schema({"$defs": {"x": {"$ref": "#/$defs/y"}, "y": {"not": {"$ref": "#/$defs/x"}}}}, a={"$ref": "#/$defs/x"}),
        "it refers to itself without end",
    ),
    "itself, seen from within": (
        schema({"$defs": {"y": {"properties": {"p": {"$ref": "#/$defs/x"}}, "$ref": "#/$defs/x"}, "x": {"$ref": "#/$defs/y"}}}),
        "it refers to itself without end",
    ),
    "a bad pattern": (schema(a={"pattern": "("}), "properties.a.pattern: '(' is not a regular expression"),
    "a bad name pattern": (schema(a={"patternProperties": {"[": {}}}), "'[' is not a regular expression"),
    "a deep pattern": (schema(a={"pattern": "(" * 900 + ")" * 900}), "is not a regular expression"),
    "a long pattern": (schema(a={"pattern": "a" * 3000}), "a pattern of 3000 characters"),
    "a pattern that repeats": (schema(a={"pattern": "((a|b){200}){200}"}), "repeats something more than 10000 times"),
    "no type": (schema(a={"type": "int"}), "properties.a.type: 'int' is not valid"),
    "no list": (schema({"required": "a"}), "required: 'a' is not of type 'array'"),
    "no draft": (schema({"$schema": [1]}), "$schema: expected the name of a draft, got [1]"),
    "no alternatives": (schema(a={"allOf": 1}), "properties.a.allOf: 1 is not of type 'array'"),
    "no object": ({"type": "object", "properties": []}, "properties: [] is not of type 'object'"),
    "too large": (schema(**{f"p{n}": {} for n in range(25_000)}), "it has more than 20000 parts"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_a_bad_schema_is_named_before_anybody_calls(what):
    parameters, words = BAD[what]
    tool = Tool("act", "Act.", parameters, str)
    assert tool.told().startswith("act(")
    with pytest.raises(ConfigError) as raised:
        ArgumentCheck(tool)
    assert str(raised.value).startswith("tool act: parameters") and words in str(raised.value)


def nested(depth):
    inner = TEXT
    for _ in range(depth):
        inner = {"type": "object", "properties": {"x": inner}}
    return schema(a=inner)


def test_deep_schemas_and_deep_arguments():
    assert check(nested(50), {"a": {}}) == {"a": {}}
    with pytest.raises(ConfigError, match="tool act: parameters: it is nested too deep"):
        ArgumentCheck(Tool("act", "Act.", nested(700), str))
    deep = "it has more than 64 lists and objects inside each other"
    value = []
    for _ in range(500):
        value = [value]
    assert of({}, value) == deep
    assert of({"type": "array"}, "[" * 500 + "]" * 500).startswith("a: '[[[[")


def many(keyword):
    parts = {f"n{n}": {keyword: [{"$ref": f"#/$defs/n{n + 1}"}] * 8} for n in range(9)}
    return schema({"$defs": parts | {"n9": INTEGER}}, a={"$ref": "#/$defs/n0"})


@pytest.mark.parametrize("keyword", ["anyOf", "oneOf", "allOf"])
def test_alternatives_of_alternatives_are_counted(keyword, monkeypatch):
    monkeypatch.setattr(schemas, "MOST_STEPS", 2000)
    assert check(many(keyword), {"a": "x"}) == "it takes too long to be checked"


SLOW = "^(a|a)*$"


@pytest.mark.parametrize(("parameters", "arguments"), [
    (schema(a={"type": "string", "pattern": SLOW}), {"a": "a" * 40 + "!"}),
    (schema(a={"type": "array", "items": {"pattern": SLOW}}), {"a": ["a" * 40 + "!"] * 50}),
    (schema({"patternProperties": {SLOW: {}}}), {"a" * 40 + "!": 1}),
    (schema(a={"patternProperties": {SLOW: {}}, "additionalProperties": False}), {"a": {"a" * 40 + "!": 1}}),
    (schema(a={"propertyNames": {"pattern": SLOW}}), {"a": {"a" * 40 + "!": 1}}),
    (schema(a={"$schema": "http://json-schema.org/draft-07/schema#", "pattern": SLOW}), {"a": "a" * 40 + "!"}),
])  # fmt: skip
def test_a_pattern_that_takes_for_ever_is_given_up(parameters, arguments, monkeypatch):
    monkeypatch.setattr(schemas, "PATTERN_SECONDS", 0.02)
    assert check(parameters, arguments) == f"the pattern '{SLOW}' takes too long to be looked for in it"


def test_long_lists_are_compared_without_pairs(monkeypatch):
    monkeypatch.setattr(schemas, "SECONDS", 1e9)
    value = [{"n": number} for number in range(20_000)]
    assert of({"type": "array", "uniqueItems": True}, value) == value
    assert (
        of({"type": "array", "uniqueItems": True}, [*value, {"n": 7.0}]) == "a: {'n': 7.0} stands in it more than once"
    )


def test_random_schemas_and_arguments_end_with_a_value_or_a_reason():
    rng = random.Random(0)

    def made(depth):
        if depth == 0:
            return rng.choice([INTEGER, TEXT, {}, {"type": ["number", "null"]}, {"enum": [1, "a", None]}, True])
        kind = rng.randrange(6)
        if kind == 0:
            return {"type": "array", "items": made(depth - 1), "uniqueItems": rng.random() < 0.5}
        if kind == 1:
            return schema(x=made(depth - 1), y=made(depth - 1))
        if kind == 2:
            return {rng.choice(["anyOf", "oneOf", "allOf"]): [made(depth - 1), made(depth - 1)]}
        if kind == 3:
            return {"$ref": "#/$defs/t"}
        return {"not": made(0)} if kind == 4 else {**INTEGER, "nullable": True, "minimum": rng.randrange(5)}

    def value(depth):
        if depth == 0:
            return rng.choice([1, 2.0, "3", "x", None, True, "[1]", '{"x": 1}', "null", "1e999"])
        return rng.choice([[value(depth - 1) for _ in range(3)], {"x": value(depth - 1), "z": value(0)}, value(0)])

    outcomes = [0, 0]
    for _ in range(400):
        parameters = schema({"$defs": {"t": made(1) if rng.random() < 0.5 else INTEGER}}, a=made(3))
        try:
            got = check(parameters, {"a": value(3)})
        except ConfigError as error:
            assert "itself without end" in str(error)
            continue
        outcomes[isinstance(got, dict)] += 1
        assert isinstance(got, dict) or got
    assert min(outcomes) > 50


SHOWN = {
    "n: integer or null": {"type": "integer", "nullable": True},
    "n: integer": INTEGER,
    "n: integer or number": {"type": ["integer", "number"]},
    "n: string or null": {"anyOf": [TEXT, {"type": "null"}]},
    "n: array of integer": {"type": "array", "items": INTEGER},
    "n: {row: integer, column: integer}": {"$ref": "#/$defs/place"},
    "n: {row: integer, column: integer} or null": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]},
    "n: one of 'a', 'b'": {"enum": ["a", "b"]},
    "n: 3": {"const": 3},
    "n: array of {inner: array of any}": {"type": "array", "items": {"$ref": "#/$defs/list"}},
    "n: any": {"$ref": "#/$defs/none"},
}


@pytest.mark.parametrize("words", SHOWN)
def test_types_are_shown_in_words(words):
    inner = schema(inner={"type": "array", "items": {"$ref": "#/$defs/list"}})
    tool = Tool("act", "Act.", schema({"$defs": {"place": PLACE, "list": inner}}, n=SHOWN[words]), str)
    assert tool.line() == f"act({words}): Act."


def test_descriptions_of_arguments_stand_below_the_line():
    described = schema(a={**INTEGER, "description": "the first\n  of two"}, b=INTEGER, c={"description": " "}, d=True)
    assert Tool("act", "Act.", described, str).told() == (
        "act(a: integer, b: integer, c: any, d: any): Act.\n  a: the first of two"
    )
