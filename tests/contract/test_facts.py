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


@pytest.fixture(scope="module")
def texts():
    return {page.relative_to(ROOT).as_posix(): words_of(page) for page in PAGES}


@pytest.mark.parametrize("name", FACTS)
def test_the_pages_say_what_the_file_of_facts_says(name, texts):
    fact = FACTS[name]
    words = fact["words"].format(**versions())
    assert [page for page in fact["pages"] if words not in texts[page]] == [], f"they do not say {words!r}"
    for pattern in fact.get("never", ()):
        assert {page: found[0] for page, text in texts.items() if (found := re.search(pattern, text))} == {}
    assert [file for file in fact.get("files", ()) if not (ROOT / file).is_file()] == []


def test_facts_that_can_be_counted_are_counted():
    assert versions() == {"trl": "1.16", "transformers": "5.24", "peft": "0.21", "oldest_trl": "1.14"}
    published = [name for name, file in recipe_files().items() if "url:" in file.read_text()]  # the others are variants
    assert FACTS["recipes"]["words"] == "about eighty published methods"
    assert 75 <= len(published) < 85, "say another number in docs/facts.yaml, on the pages that it names, and here"
