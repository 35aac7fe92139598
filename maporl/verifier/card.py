"""The two reports on a trained verifier: the model card in its folder, and the table on the terminal."""

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from rich.table import Table

from maporl.text import markdown_table
from maporl.verifier.model import chance_of
from trl_ext.trainer.model_card import card_text

_BODY = """
# {name}

A verifier: it reads a question and an answer and says how likely the answer is right. Trained with `maporl verifier
train` on {trained} labelled answers ({data_sha256}), binary cross-entropy at {where} of the answer, LoRA merged.

{rows}
{doubt}
Temperature, fitted on half of the held-out questions: {temperature:.3f}. `verifier.json` has all measures, also by
question and by answer length, and as `bins` the calibration: answers, mean score and share right.

```python
from maporl.verifier.model import Verifier

verifier = Verifier.load("{name}")
verifier.score([[{{"role": "user", "content": question}}, {{"role": "assistant", "content": answer}}]])
```

The score is `sigmoid(output / temperature)` at the last token of the chat, as the tokenizer's template writes it. The
verifier was measured on answers of the kind that it was trained on. Measure it again before you use it on others.
"""
HEADINGS = ("held-out answers", "accuracy", "AUC", "ECE")


def write_card(folder: Path, name: str, record: dict[str, Any]) -> None:
    """Write ``folder/README.md`` from ``record``, which is the content of ``verifier.json``."""
    body = _BODY.format(
        name=name,
        trained=record["rows"]["trained_on"],
        data_sha256=f"SHA-256 of the data: {record['data_sha256'][:16]}",
        where="every token" if record["loss"] == "every" else "the last token",
        rows="\n".join(markdown_table(HEADINGS, _rows(record))),
        temperature=record["temperature"],
        doubt="" if (doubt := chance_of(record)) is None else f"\n**Warning**: {doubt}.\n",
    )
    card = card_text(
        body, library_name="transformers", base_model=record["base_model"], pipeline_tag="text-classification",
        tags=["maporl", "verifier", "reward-model"],
    )  # fmt: skip
    ModelCard(card).save(folder / "README.md")


def measures_table(record: dict[str, Any]) -> Table:
    """Accuracy, AUC and ECE of the held-out answers: all of them, by length, and before and after the temperature."""
    rows = record["rows"]
    by_question = record["metrics"]["by_question"]
    table = Table(
        title=f"{rows['trained_on']} answers trained on, {rows['dropped_too_long']} too long; held out: "
        f"{by_question['questions']} questions, mean accuracy {by_question['mean_accuracy']:.3f}, "
        f"mean AUC within a question {_cell(by_question['mean_auc_within'])}"
    )
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading.startswith("held") else "right", no_wrap=True)
    for row in _rows(record):
        table.add_row(*row)
    return table


def told(record: dict[str, Any]) -> str:
    """Return in words how good a verifier is on the held-out answers, for people who do not know the measures."""
    held_out, within = record["metrics"]["held_out"], record["metrics"]["by_question"]["mean_auc_within"]
    told = f"Of {held_out['answers']} answers that it has not seen, it judges {held_out['accuracy']:.0%} rightly"
    if held_out["auc"] is None:
        return f"{told}. They are all right or all wrong, so that this says little."
    reached = min(record["metrics"]["auc_reached_by_chance"], 1.0)
    told += (
        f". Of a right and a wrong answer it scores the right one higher in {held_out['auc']:.0%} of all pairs; a coin "
        f"does so in 50%, and in one of twenty cases in {reached:.0%} or more."
    )
    return told if within is None else f"{told} Where both answer the same question, it does so in {within:.0%}."


def _rows(record: dict[str, Any]) -> list[tuple[str, ...]]:
    metrics = record["metrics"]
    measured = [("all", metrics["held_out"])]
    measured += [("{} to {} tokens".format(*quarter["tokens"]), quarter) for quarter in metrics["by_answer_tokens"]]
    for key, name in (
        ("before", "half not fitted on, T = 1"),
        ("after", f"same half, T = {record['temperature']:.2f}"),
    ):
        if f"other_half_{key}_temperature" in metrics:
            measured.append((name, metrics[f"other_half_{key}_temperature"]))
    return [(f"{name} ({m['answers']})", *(_cell(m[k]) for k in ("accuracy", "auc", "ece"))) for name, m in measured]


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
