"""Whether a verifier can read a run's chats is said before the run, and also if it cannot be loaded."""

import pytest
from tiny_runs import config_of

from maporl import TinySection, build_tiny_tokenizer
from maporl.run import ResolvedRun
from maporl.tiny import build_tiny_classifier
from maporl.validation.preflight import check_run
from maporl.verifier import check as lengths


def faults(folder, verifier, response=3, questions=6):
    sections = {
        "reward": {"sources": {"verifier": 1.0}, "verifier": verifier},
        "ppo": {"response_length": response, "temperature": 1.0},
        "evaluation": {"questions": questions},
    }
    return list(lengths.lengths(ResolvedRun(config_of(folder, 1, sections))))


@pytest.fixture
def saved(tmp_path):
    """``saved(context)``: the section of a verifier that reads so many tokens."""

    def build(context):
        section = TinySection(alphabet="0123456789+=;", hidden_size=32, layers=1, context=context)
        tokenizer = build_tiny_tokenizer(section)
        for part in (build_tiny_classifier(section, tokenizer), tokenizer):
            part.save_pretrained(tmp_path / f"reads-{context}")
        return {"model": str(tmp_path / f"reads-{context}")}

    return build


def test_what_a_verifier_cannot_read_is_found_before_the_run(saved, tmp_path):
    """A question such as 9+9= has 4 characters, and its chat 5 tokens without an answer."""
    (shortest,) = faults(tmp_path, saved(5))
    assert shortest.severity == "error" and shortest.key == "reward.verifier.model"
    assert "it reads at most 5 tokens, and the longest question has 5 without an answer" in str(shortest)
    assert faults(tmp_path, saved(8)) == [], "an answer of 3 tokens fits"
    (warning,) = faults(tmp_path, saved(8), response=5)
    assert warning.severity == "warning" and "may have 10" in str(warning)
    assert "set ppo.response_length to at most 3" in str(warning)
    (all_turns,) = faults(tmp_path, saved(8) | {"reads": "dialogue"})
    assert "with 4 answers of ppo.response_length may have 17" in str(all_turns)


def test_a_verifier_that_cannot_be_read_is_said_by_check(tmp_path):
    (fault,) = faults(tmp_path, {"model": str(tmp_path / "none")})
    assert fault.key == "reward.verifier.model" and "could not be loaded" in str(fault)
    assert faults(tmp_path, {"urls": ["http://127.0.0.1:9"]}) == [], "a server says it by itself"


def test_check_says_it(saved, tmp_path):
    sections = {"reward": {"sources": {"verifier": 1.0}, "verifier": saved(8)}, "ppo": {"response_length": 6}}
    lines = check_run(config_of(tmp_path / "run", 1, sections))
    assert any(line.startswith("warning: reward.verifier.model: it reads at most 8 tokens") for line in lines)
