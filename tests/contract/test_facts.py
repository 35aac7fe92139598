"""Facts that several pages state stand in docs/facts.yaml, and the pages say what stands there."""

import re

import pytest
import yaml
from folders import ROOT

from maporl.config.parse import recipe_files

FACTS = yaml.safe_load((ROOT / "docs/facts.yaml").read_text())
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/howto/*.md")]


def versions():
    """The minor version of each package that was tried, and of TRL the oldest."""
    pinned = {
        f"{prefix}{name}": version
        for prefix, file in (("", "constraints.txt"), ("oldest_", "constraints-oldest.txt"))
        for name, version in re.findall(r"^(\w+)==(\d+\.\d+)", (ROOT / file).read_text(), re.MULTILINE)
    }
    return {name: pinned[name] for name in ("trl", "transformers", "peft", "oldest_trl")}


def words_of(page):
    """The text of a page in one line, without where its links lead."""
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(page.read_text(encoding="utf-8").split()))


def disagreements(name, fact, texts):
    """What pages say otherwise. ``texts`` has the words of each page by its path."""
    words = fact["words"].format(**versions())
    wrong = [f"{page}: does not say {words!r} ({name})" for page in fact["pages"] if words not in texts[page]]
    for pattern in fact.get("never", ()):
        wrong += [f"{page}: says {m[0]!r} ({name})" for page, text in texts.items() if (m := re.search(pattern, text))]
    return wrong + [f"{file}: is not there ({name})" for file in fact.get("files", ()) if not (ROOT / file).is_file()]


@pytest.fixture(scope="module")
def texts():
    return {page.relative_to(ROOT).as_posix(): words_of(page) for page in PAGES}


@pytest.mark.parametrize("name", FACTS)
def test_the_pages_say_what_the_file_of_facts_says(name, texts):
    assert disagreements(name, FACTS[name], texts) == []


def test_facts_that_can_be_counted_are_counted():
    assert versions() == {"trl": "1.16", "transformers": "5.24", "peft": "0.21", "oldest_trl": "1.14"}
    assert FACTS["recipes"]["words"] == "about eighty published methods" and 75 <= len(recipe_files()) < 90


def test_a_page_that_disagrees_is_named(texts):
    page = "docs/when.md"
    old = texts | {page: texts[page].replace("has run on single H100 and H200 GPUs", "has not run on a GPU yet")}
    assert disagreements("one_gpu", FACTS["one_gpu"], old) == [
        f"{page}: does not say 'has run on single H100 and H200 GPUs' (one_gpu)",
        f"{page}: says 'has not run on a GPU' (one_gpu)",
    ]


def test_every_system_of_the_page_about_others_has_a_version_and_a_day(texts):
    table = re.search(r"\| system \| read \|.*?\n\n", (ROOT / "docs/when.md").read_text(), re.DOTALL)[0]
    rows = [row.split("|") for row in table.strip().split("\n")[2:]]
    assert len(rows) == 7
    for row in rows:
        said = [f["words"] for name, f in FACTS.items() if name.startswith("read_") and f["words"] in row[2]]
        assert len(said) == 1 and re.search(r"\d+ \w+ 2026", said[0]), row[1]
