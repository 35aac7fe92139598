"""HotpotQA (Yang et al. 2018, arXiv 1809.09600): questions whose answer needs two paragraphs."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from maporl.datasets.search import passages_of
from maporl.grading.spans import grade_span
from maporl.tasks.base import ReadTask, meta_of, read_examples, source_of
from maporl.text import asked_with
from maporl.types import Example, Grade
from trl_ext.errors import retold
from trl_ext.ppo.options import Positive, option


@dataclass(frozen=True)
class HotpotQA(ReadTask):
    """Questions that are answered with a few words from two of their ten paragraphs (HotpotQA).

    Agents are shown the question only. The paragraphs are in ``meta.paragraphs`` of each example, where the environment
    ``bm25`` searches them. A question without paragraphs is refused, because a search could not find its answer.
    """

    source: str = option(
        "hotpotqa/hotpot_qa:distractor",
        "The hub's hotpotqa/hotpot_qa:distractor, or a .jsonl file of rows with `question`, `answer` and "
        "`paragraphs`, a list of {title: ..., text: ...}. The paragraphs may stand in `meta` too.",
    )
    eval_source: str | None = option(
        None, "What evaluations ask, in the same form. Default: the validation split of the data set on the hub."
    )
    limit: Positive | None = option(None, "Take the first rows only, so many.")
    instruction: str = asked_with("{question}\n\nReason briefly, then end with one line: Answer: <a few words>")
    split: Literal["train", "eval"] = option("train", "The split. A run sets it.")
    seed: int = option(0, "Seed of what is drawn. Default: that of the run.")

    answer_form = "Answer: <a few words>"
    shown_meta = ("paragraphs",)

    @cached_property
    def _examples(self) -> list[Example]:
        split = "train" if self.split == "train" else "validation"
        return read_examples(source_of(self), split, _example)[: self.limit]

    def grade(self, example: Example, text: str) -> Grade:
        return grade_span(text, example.answer)


def _example(row: dict[str, Any], number: int) -> Example:
    """Return the example in a row of the hub, which has ``context``, or of a file, which has ``paragraphs``."""
    name = str(row.get("id") or f"hotpotqa-{number}")
    meta = dict(meta_of(row))
    paragraphs = next(
        (place[key] for place, key in ((row, "paragraphs"), (meta, "paragraphs"), (row, "context")) if place.get(key)),
        None,
    )
    if paragraphs is None:
        raise ValueError(f"({name}) has no paragraphs to search; take hotpotqa/hotpot_qa:distractor, or another file")
    with retold((ValueError, TypeError), lambda error: ValueError(f"({name}): paragraphs: {error}")):
        passages = passages_of(paragraphs)
    meta |= {key: row[key] for key in ("type", "level") if row.get(key) is not None}
    facts = row.get("supporting_facts")
    if isinstance(facts, dict) and isinstance(facts.get("title"), list):
        meta["supporting"] = sorted(set(map(str, facts["title"])))
    meta["paragraphs"] = [{"title": p.title, "text": p.text} for p in passages]
    return Example(name, row.get("question", ""), row.get("answer", ""), meta)
