"""Every causal architecture of transformers is trained as a plain forward says, or refused in one sentence
(docs/models.md)."""

import json
from importlib.metadata import version

import conformance
import pytest
from conformance import CRITICS, METHODS, PAGE, PATHS, RESULTS, Cell, architectures, cells, conform, page, tried

FOUND = json.loads(RESULTS.read_text())
DOZEN = [
    Cell("llama", "LoRA", "adapter", None, False, "own"),
    Cell("gpt2", "LoRA, embeddings", "head", 4, True, "own"),
    Cell("gpt_neox", "LoRA, bias all", "head", 4, False, "mixed"),
    Cell("qwen3", "LoRA, trained tokens", "none", None, True, "mixed"),
    Cell("gemma2", "PiSSA", "head", 4, False, "own"),
    Cell("mixtral", "LoRA, modules_to_save", "head", 4, False, "mixed"),
    Cell("phi3", "LoRA", "model", None, False, "mixed"),
    Cell("opt", "IA3", "model", 4, False, "plain"),
    Cell("bart", "all weights", "head", 4, False, "own"),
    Cell("roberta", "LoRA, lora_bias", "head", None, False, "own"),
    Cell("mamba", "all weights", "head", 4, True, "own"),
    Cell("modernbert-decoder", "DoRA", "model", 4, False, "plain"),
]


QUICK = {"llama", "mamba"}
"""The rest are left to ``make test-slow``."""


@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, marks=() if cell.architecture in QUICK else pytest.mark.slow) for cell in DOZEN],
    ids=lambda cell: f"{cell.architecture}, {cell}",
)
def test_a_cell_is_trained_as_a_plain_forward_says(cell):
    assert conform(cell) == ("checked", "")


def test_options_meet_each_other():
    dealt = cells(architectures())
    assert len(dealt) == len(architectures()) > 100
    assert {cell.method for cell in dealt} == METHODS.keys()
    for name, values in (("critic", CRITICS), ("path", PATHS), ("chunk", (None, 4)), ("checkpointing", (True, False))):
        for other in ("critic", "path", "chunk", "checkpointing"):
            met = {(getattr(cell, name), getattr(cell, other)) for cell in dealt}
            apart = {("adapter", True), (True, "adapter")}  # a critic's adapter is not recomputed
            others = {"critic": CRITICS, "path": PATHS, "chunk": (None, 4), "checkpointing": (True, False)}[other]
            assert name == other or met >= {(a, b) for a in values for b in others} - apart


def test_the_page_is_that_of_the_results_and_nothing_in_it_fails():
    assert PAGE.read_text() == page(FOUND), "python benchmarks/conformance.py --page"
    assert {row["outcome"] for row in FOUND["cells"]} == {"checked", "refused", "unbuilt"}
    assert sum(row["outcome"] == "checked" for row in FOUND["cells"]) > 120
    if version("transformers") == FOUND["versions"]["transformers"]:
        assert [row["architecture"] for row in FOUND["cells"]] == architectures()


@pytest.mark.slow
@pytest.mark.parametrize("cell", cells(architectures()), ids=lambda cell: cell.architecture)
def test_every_architecture_is_as_the_page_says(cell):
    known = {row["architecture"]: row["outcome"] for row in FOUND["cells"]}
    assert tried(cell)[1] == known.get(cell.architecture, "checked")


def test_what_is_wrong_fails_the_sweep(monkeypatch):
    forward = conformance.PPOv2Trainer.score

    def loud(self, batch):
        for parameter in self.learners["policy"].model.parameters():
            parameter.data += 0.01  # between sampling and training
        return forward(self, batch)

    monkeypatch.setattr(conformance.PPOv2Trainer, "score", loud)
    outcome, reason = conform(Cell("llama", "all weights", "none"))
    assert outcome == "fails" and "before any update, the log-probabilities of its tokens differ" in reason
