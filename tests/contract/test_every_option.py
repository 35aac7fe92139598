"""No option of a configuration is without effect: a tiny run with another value measures, writes, computes or says
something else, or a test that is named shows it.

In CI, a few options are tried that change with the day. ``MAPORL_TEST_DAY=2026-11-28`` tries those of a day again.
"""

import datetime
import os
import random
from pathlib import Path

import pytest
from every_option import difference, evidence, filled, leaf_of, leaves, put
from option_cases import CASES, ELSEWHERE, UNREAD

from maporl.errors import ConfigError
from maporl.validation.load import from_dict
from maporl.validation.preflight import check_run

UNREAD_WORDS = "it is set, and nothing reads it"
ROOT = Path(__file__).parents[2]
DAY = os.environ.get("MAPORL_TEST_DAY") or datetime.date.today().isoformat()
SAMPLED = {name: random.Random(f"{DAY}{name}") for name in random.Random(DAY).sample(sorted(CASES), 2)}
"""The runs of the day."""
LEAVES = set(leaves())


def tried() -> set[str]:
    return {leaf_of(path, LEAVES) for case in CASES.values() for path in (*case.changes, *case.refused)}


def test_each_option_is_tried_or_a_test_shows_it():
    assert len(LEAVES) > 350
    missing = sorted(LEAVES - tried() - ELSEWHERE.keys())
    assert not missing, (
        f"give {', '.join(missing)} another value in a case of tests/support/option_cases.py, where a tiny run shows the "
        "effect, or name in ELSEWHERE the test that shows it"
    )
    assert tried() | ELSEWHERE.keys() <= LEAVES
    assert not tried() & ELSEWHERE.keys()


def test_the_tests_that_show_the_other_options_exist():
    for option, (reason, test) in ELSEWHERE.items():
        file, _, name = test.partition("::")
        assert reason.endswith("."), option
        assert f"def {name}(" in (ROOT / file).read_text(), f"{option}: {test}"


def said_unread(path: str, lines: list[str]) -> bool:
    """Return whether one of the lines of ``check`` says that nothing reads an option, or its section."""
    return any(
        line.startswith("warning: ") and f"{path}.".startswith(f"{line.split(': ')[1]}.") and UNREAD_WORDS in line
        for line in lines
    )


def without_effect(name: str, folder: Path, most: int | None = None) -> list[str]:
    """Return the options of a case, at most so many of them, of which another value changes nothing."""
    case, found = CASES[name], []
    changes = list(case.changes.items())
    values = filled(case.values | {"output_dir": str(folder / "run")})
    plain = evidence(values, case.script)
    for path, value in changes if most is None else SAMPLED[name].sample(changes, min(most, len(changes))):
        other = evidence(put(values, path, filled(value)), case.script)
        if difference(plain, other) is None or said_unread(path, other["said"]):
            found.append(path)
    for path, value in case.refused.items() if most is None else ():
        with pytest.raises(ConfigError, match=path.rpartition(".")[2]):
            evidence(put(values, path, value), case.script)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_option_has_an_effect(name, tmp_path):
    assert without_effect(name, tmp_path) == []


@pytest.mark.parametrize("name", SAMPLED)
def test_options_of_the_day_have_an_effect(name, tmp_path):
    assert without_effect(name, tmp_path, 2) == [], f"MAPORL_TEST_DAY={DAY}"


@pytest.mark.parametrize("name", UNREAD)
def test_an_option_that_nothing_reads_is_named(name, tmp_path):
    case = UNREAD[name]
    values = case.values | {"output_dir": str(tmp_path / "run")}
    before = check_run(from_dict(values, "c.yaml"))
    for path, value in case.changes.items():
        after = check_run(from_dict(put(values, path, value), "c.yaml"))
        assert not said_unread(path, before) or name == "no KL", path
        assert said_unread(path, after), (path, after)
    for path, value in case.refused.items():
        with pytest.raises(ConfigError, match=path):
            check_run(from_dict(put(values, path, value), "c.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize("name", UNREAD)
def test_what_is_said_to_be_read_by_nothing_changes_nothing(name, tmp_path):
    case = UNREAD[name]
    values = case.values | {"output_dir": str(tmp_path / "run")}
    plain = evidence(values)
    for path, value in case.changes.items():
        assert difference(plain, evidence(put(values, path, value))) == "said", path
