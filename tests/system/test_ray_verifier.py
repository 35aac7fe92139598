"""A run on Ray whose verifier has processes of its own, which are killed."""

from importlib.util import find_spec

import pytest
import torch
from killed_at import killed_after
from tiny_runs import config_of, end_of

from maporl.config.schema import TinySection
from maporl.runs import train as run
from maporl.runs.build import build_trainer
from maporl.tiny import build_tiny_classifier, build_tiny_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("ray") is None, reason="the extra ray is not installed")]


def test_a_run_whose_verifier_is_killed_ends_as_a_local_one(tmp_path, monkeypatch):
    """SIGKILL of one of two processes after the first update. The local run has the same verifier in its process."""
    model = tmp_path / "verifier"
    section = TinySection(alphabet="0123456789+=;", hidden_size=32, layers=1)
    tokenizer = build_tiny_tokenizer(section)
    torch.manual_seed(5)
    build_tiny_classifier(section, tokenizer).save_pretrained(model)
    tokenizer.save_pretrained(model)
    reward = {"sources": {"verifier": 1.0, "label": 0.5}, "verifier": {"model": str(model), "batch_size": 8}}
    sections = {"reward": reward, "evaluation": {"questions": 8}}
    run.train(config_of(tmp_path / "local", 3, sections), resume=False, quiet=True)
    cluster = {"backend": "ray", "scoring": {"verifier": {"replicas": 2}}}
    trainer = build_trainer(config_of(tmp_path / "run", 3, sections | {"cluster": cluster}), quiet=True)
    pool, names, end = trainer.home.verifier, [], trainer.home.verifier.end
    # the processes end with the run
    monkeypatch.setattr(pool, "end", lambda: (names.extend(member.name for member in pool.members), end()))
    try:
        with killed_after(trainer, 1, pool.members[1].pid()):
            trainer.train()
        assert pool.started == 3 and names == ["scoring verifier 0", "scoring verifier 2"]
    finally:
        trainer.home.end()
    (weights, records, dialogues), (expected, calm, spoken) = end_of(tmp_path / "run", 3), end_of(tmp_path / "local", 3)
    assert dialogues == spoken and weights.keys() == expected.keys() and len(weights) > 6
    for name, tensors in expected.items():
        assert all(value.equal(weights[name][key]) for key, value in tensors.items()), name
    kept = ("reward", "loss", "objective", "policy")
    for one, other in zip(records, calm, strict=True):
        assert {k: v for k, v in one.items() if k.split("/")[-1].startswith(kept)} == {
            k: v for k, v in other.items() if k.split("/")[-1].startswith(kept)
        }
    assert sum(record["verifier/ejected"] for record in records) == 1
    logs = {path.name for path in (tmp_path / "run/logs").iterdir()}
    assert logs >= {"scoring-verifier-0.log", "scoring-verifier-2.log"}
