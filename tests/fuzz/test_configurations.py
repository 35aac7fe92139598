"""Values that no configuration expects: each is read, or refused in one line that names the key."""

import dataclasses
import datetime
import random
import typing

import pytest
import yaml
from hostile_runs import nested
from pydantic.fields import FieldInfo

from maporl.config import parse
from maporl.config.parse import apply_overrides, parse_config, read_values
from maporl.config.schema import Config
from maporl.errors import ConfigError, UserError
from maporl.validation.load import from_dict, load
from maporl.validation.preflight import check_run

ODD = [
    None, True, 0, -1, 10**400, 10**5000, 2**63, 1.5, float("nan"), float("inf"), "", "x", "9" * 400, "\ud800", "a\x00b",
    "\x1b[31m", [], [1, [2]], ["a", None], [10**400], nested(100), {}, {"a": 1}, {1: 2}, {None: None}, {"a": {"b": [1]}},
    {10**5000: 1}, {"a\ud800": 1}, datetime.date(2020, 1, 1), b"x", {1, 2},
]  # fmt: skip
BASE = {
    "output_dir": "/nonexistent/run", "task": {"name": "toy_sum"}, "agents": {"ann": {"tiny": {}}, "bob": {"tiny": {}}},
    "evaluation": {"questions": 0}, "protocol": {"name": "debate", "later": "{others};{question}", "quote": "{text}"},
    "ppo": {"response_length": 4},
}  # fmt: skip
FREE = [("agent_defaults",), ("recipe",), (5,), ("agents", 5), ("meta",), ("task", "name"), ("task", "largest"), ("protocol", "name"),
        ("protocol", "turns"), ("protocol", "game"), ("protocol", "options"), ("reward", "sources", "label"), ("reward", "rules", 0, "last")]  # fmt: skip
"""Keys that the schema leaves to tasks, protocols and rules, and keys that nobody has."""


def section_in(hint):
    """The dataclass in a type, as in ``dict[str, PupilSection]``; None without one."""
    return hint if dataclasses.is_dataclass(hint) else next(filter(None, map(section_in, typing.get_args(hint))), None)


def keys(kind, at=()):
    """Every key of the schema, as a path. An entry of a mapping has the name "ann", and one of a list the number 0."""
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        yield (*at, field.name)
        section, hint = section_in(hints[field.name]), str(hints[field.name])
        if section is not None:
            entry = ("ann",) if "dict[" in hint else (0,) if "tuple[" in hint or "list[" in hint else ()
            yield (*at, field.name, *entry)
            yield from keys(section, (*at, field.name, *entry))


def put(values, path, value):
    key, *rest = path
    if key == 0:
        return [put({}, rest, value) if rest else value]
    values = dict(values) if isinstance(values, dict) else {}
    return values | {key: put(values.get(key, {}), rest, value) if rest else value}


def refusal(values, deep=False):
    try:
        config = from_dict(values, "c.yaml")
        if deep:
            check_run(config)
    except UserError as error:
        return str(error)
    return None


KEYS = list(dict.fromkeys([*keys(Config), *FREE]))


def check_all(cases, deep):
    refused = 0
    for path, value in cases:
        message = refusal(put(BASE, path, value), deep)
        if message is not None:
            refused += 1
            assert message.isprintable() and len(message) < 2500, (path, message)
    return refused


def test_every_key_takes_or_refuses_every_kind_of_value():
    assert refusal(BASE, deep=True) is None and len(KEYS) > 200
    rng = random.Random(0)
    cases = [(path, value) for path in KEYS for value in rng.sample(ODD, 6)]
    assert check_all(cases, deep=False) > 0.8 * len(cases)


@pytest.mark.slow
def test_every_key_takes_or_refuses_all_values_and_the_check_does_too():
    cases = [(path, value) for path in KEYS for value in ODD]
    assert len(cases) > 7000 and check_all(cases, deep=True) > 0.8 * len(cases)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"agents": ["ann", "bob"]}, r"c.yaml: agents: expected a mapping of keys to values, got \['ann', 'bob'\]"),
        ({"agents": {"ann": {"tiny": {}, "policy": 5}}}, "c.yaml: agents.ann.policy: expected a text, got 5; put a text"),
        ({"meta": 5}, "c.yaml: unknown key 'meta'"),
        ({"updates": 10**5000}, "c.yaml: updates: expected a number of at most 64 bits, got one of 16610 bits"),
        ({"task": {"name": "toy_sum", "largest": "9" * 400}}, "c.yaml: task: largest: expected a number of at most 64 bits"),
        ({"output_dir": "a\x00b"}, r"c.yaml: output_dir: expected a text that a file can hold, got 'a\\x00b'"),
        ({"output_dir": "x" * 5000}, r"c.yaml: output_dir: cannot be used \(File name too long\)"),
        ({"agents": {"a\ud800": {"tiny": {}}}}, "c.yaml: a key of agents: expected a text that a file can hold"),
        ({"task": nested(100)}, "levels deep"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named_by_its_key(change, message):
    with pytest.raises(ConfigError, match=message):
        from_dict({**BASE, **change}, "c.yaml")


def test_values_that_hold_themselves_or_are_named_often_are_read_once():
    own = []
    own.append(own)
    bomb = ["x"] * 9
    for _ in range(35):
        bomb = [bomb] * 9
    for value in (own, bomb):
        with pytest.raises(ConfigError):
            parse_config({**BASE, "nobody": value})


@pytest.mark.parametrize(
    "override",
    ["=1", "x", "", "a." * 3000 + "b=1", "updates=" + "[" * 3000, "updates=2020-99-99", "updates=" + "9" * 5000, "updates=&a [*a]",
     "agents.ann=5", "updates.x=1", "\x1b[31m", "updates=!!python/name:os.system"],
    ids=lambda override: repr(override[:30]),
)  # fmt: skip
def test_an_override_that_is_no_value_is_one_line(tmp_path, override):
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(BASE))
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "c.yaml", [override])
    assert str(caught.value).isprintable() and len(str(caught.value)) < 3000


def test_a_command_line_has_no_comments():
    for text, value in {
        "runs/try #2": "runs/try #2",
        "Answer #1:": "Answer #1:",
        "#4 # 5": "#4 # 5",
        "'#1'": "#1",
        '"\\u0023 x #"': "# x #",
        "[a #b, '#c']": ["a #b", "#c"],
        "{a: x #1, '#b': 2}": {"a": "x #1", "#b": 2},
        "Answer:": "Answer:",
        "{a: }": {"a": None},
        "label: 0.5": {"label": 0.5},
        "\ue000 #": "\ue000 #",
        "1e-4": 1e-4,
        "": None,
        "null": None,
    }.items():
        assert apply_overrides({}, [f"a.b={text}"]) == {"a": {"b": value}}, text
    with pytest.raises(ConfigError, match=r"--set a=\[#: the value is not YAML") as caught:
        apply_overrides({}, ["a=[#"])
    assert "\ue000" not in str(caught.value)


def test_an_override_below_a_default_adds_to_the_default():
    """These are all options that are mappings and not empty by default."""
    found = {}

    def walk(kind, place):
        for field in dataclasses.fields(kind):
            here, default = f"{place}{field.name}", field.default
            if isinstance(default, FieldInfo):
                default = default.get_default(call_default_factory=True)
            elif default is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
                default = field.default_factory()
            if isinstance(default, dict) and default:
                found[here] = default
            if dataclasses.is_dataclass(inner := typing.get_type_hints(kind)[field.name]):
                walk(inner, f"{here}.")

    walk(Config, "")
    assert found == parse._DEFAULTS == {"reward.sources": {"label": 1.0}, "protocol": {"name": "debate"}}
    assert apply_overrides({}, ["reward.sources.format=0.1"]) == {"reward": {"sources": {"label": 1.0, "format": 0.1}}}
    own = {"reward": {"sources": {"judge": 2.0}, "rules": ["own"]}}
    assert apply_overrides(own, ["reward.sources.format=0.1"]) == {
        "reward": {"sources": {"judge": 2.0, "format": 0.1}, "rules": ["own"]}
    }
    assert apply_overrides({}, ["reward.sources={format: 0.1}"]) == {"reward": {"sources": {"format": 0.1}}}
    assert apply_overrides({}, ["protocol.turns=3"]) == {"protocol": {"name": "debate", "turns": 3}}
    assert apply_overrides({}, ["protocol.name=chain"]) == {"protocol": {"name": "chain"}}


def test_a_file_has_comments(tmp_path):
    (tmp_path / "c.yaml").write_text("output_dir: runs/try #2\n# x\n")
    assert read_values(tmp_path / "c.yaml")["output_dir"] == "runs/try"
    assert read_values(tmp_path / "c.yaml", ["output_dir=runs/try #3"])["output_dir"] == "runs/try #3"
