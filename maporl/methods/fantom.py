"""FANToM (Kim et al. 2023, arXiv 2310.15421): who believes what in a conversation that people leave and join.

Answers are sentences. An answer is right if its embedding lies nearer that of the correct reference than of the wrong
one.
"""

import functools
import hashlib
import json
import random
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from maporl.tasks.base import ReadTask, TaskError, examples_of, meta_of, read_rows, text_of
from maporl.text import asked_with
from maporl.types import Example, Grade
from trl_ext.ppo.options import Positive, ProperShare, option

ARCHIVED = "fantom_v1.json"
"""The file of the published archive that holds the sets of questions, as a list."""


@dataclass(frozen=True)
class FANToM(ReadTask):
    """Questions about what the people of a conversation believe (FANToM).

    The archive is at https://storage.googleapis.com/ai2-mosaic-public/projects/fantom/fantom.tar.gz. Nothing is
    unpacked to disk. As in MAPoRL's code, the document of a question is ``short_context``, and the questions are those
    about beliefs (``beliefQAs``). Sets whose ``set_id`` begins with the same number belong to one conversation.

    Rows of one's own have ``question``, ``document``, ``correct_answer`` and ``wrong_answer``. They are in a ``.jsonl``
    file or on the hub. Rows with equal ``conversation`` (in the row or in its ``meta``) belong together; rows without
    it, by their document.

    Raises:
        ValueError: an option is outside its range, or ``instruction`` lacks ``{question}`` or ``{document}``.
        TaskError: at the first use, if the source cannot be read, or a row lacks a part.
    """

    source: str = option(help="The published archive fantom.tar.gz, its file fantom_v1.json, or rows of one's own.")
    eval_source: str | None = option(None, "What evaluations ask, in the same form.")
    held_out: ProperShare = option(
        0.1, "Without eval_source, the share of the conversations that is the evaluation split."
    )
    limit: Positive | None = option(None, "Take the first rows only, so many.")
    encoder: str = option(
        "sentence-transformers/all-roberta-large-v1", "Hub name or folder of the sentence encoder that grades."
    )
    instruction: str = asked_with(
        "{document}\n\nQuestion: {question}\n\nAnswer in one sentence.", ("document", "question")
    )
    split: Literal["train", "eval"] = option("train", "The split. A run sets it.")
    seed: int = option(0, "Seed of what is drawn. Default: that of the run.")

    labels_graded = 0  # every sentence can be read
    shown_meta = ("document",)

    @cached_property
    def _examples(self) -> list[Example]:
        if self.eval_source is not None:
            source = self.source if self.split == "train" else self.eval_source
            return _read(source, self.split)[: self.limit]
        examples = _read(self.source, "train")
        held_out = self._held_out_conversations(examples)
        return [e for e in examples if (e.meta["conversation"] in held_out) == (self.split == "eval")][: self.limit]

    def _held_out_conversations(self, examples: list[Example]) -> set[str]:
        conversations = sorted({example.meta["conversation"] for example in examples})
        if len(conversations) < 2:
            raise TaskError(f"fantom: {self.source} holds one conversation, and two are needed; set task.eval_source")
        random.Random(self.seed).shuffle(conversations)
        count = min(max(1, round(len(conversations) * self.held_out)), len(conversations) - 1)
        return set(conversations[:count])

    def question(self, example: Example) -> str:
        before, _, after = self.instruction.partition("{document}")
        parts = (part.replace("{question}", example.question) for part in (before, after))
        return example.meta["document"].join(parts)

    def grade(self, example: Example, text: str) -> Grade:
        return self.grade_many([example], [text])[0]

    def grade_many(self, examples: Sequence[Example], texts: Sequence[str]) -> list[Grade]:
        """Take each text for the reference that it is nearer to. An empty text is wrong."""
        grades = [Grade(None, False, "the answer is empty")] * len(texts)
        said = [index for index, text in enumerate(texts) if text.strip()]
        if not said:
            return grades
        encoder = load_encoder(self.encoder)
        answers = encoder.embed([texts[index].strip() for index in said])
        right = encoder.references([examples[index].answer for index in said])
        wrong = encoder.references([examples[index].meta["wrong_answer"] for index in said])
        nearer = (answers * right).sum(-1) > (answers * wrong).sum(-1)
        for index, is_right in zip(said, nearer.tolist(), strict=True):
            which = examples[index].answer if is_right else examples[index].meta["wrong_answer"]
            reason = "nearer the correct reference" if is_right else "not nearer the correct than the wrong reference"
            grades[index] = Grade(which, is_right, reason)
        return grades


def _read(source: str, split: str) -> list[Example]:
    if source.endswith((".tar.gz", ".tgz", ARCHIVED)):
        rows: Sequence[dict[str, Any]] = _published_rows(Path(source))
    else:
        rows = read_rows(source, "test" if split == "eval" else "train")
    examples = examples_of(rows, source, _example)
    for number, example in enumerate(examples, 1):
        where = f"fantom: {source}: row {number} ({example.id})"
        for part in ("document", "wrong_answer"):
            if not example.meta[part].strip():
                raise TaskError(f"{where} has no {part}; remove the row or fill it in")
        if example.answer == example.meta["wrong_answer"]:
            raise TaskError(f"{where}: correct_answer and wrong_answer are equal; remove the row")
    return examples


def _published_rows(path: Path) -> list[dict[str, Any]]:
    """Return a row for each question about beliefs of the published archive or of its file."""
    try:
        text = path.read_bytes() if path.suffix == ".json" else _archived(path)
        sets = json.loads(text)
        return [
            {
                "id": f"{part['set_id']}:belief-{number}",
                "document": part["short_context"].strip(),
                "conversation": part["set_id"].split("-")[0],
                **{key: qa[key] for key in ("question", "correct_answer", "wrong_answer")},
            }
            for part in sets
            for number, qa in enumerate(part["beliefQAs"])
        ]
    except OSError as error:
        raise TaskError(f"fantom: {path}: cannot be read ({error}); give the path of fantom.tar.gz") from error
    except (tarfile.TarError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TaskError(
            f"fantom: {path}: expected the published archive, whose {ARCHIVED} is a list of sets with set_id, "
            f"short_context and beliefQAs, got {type(error).__name__}: {error}; download it again"
        ) from error


def _archived(path: Path) -> bytes:
    """Return the content of ``fantom_v1.json``, wherever it lies in the archive."""
    with tarfile.open(path) as archive:
        for member in archive:
            if Path(member.name).name == ARCHIVED and (file := archive.extractfile(member)) is not None:
                return file.read()
    raise KeyError(ARCHIVED)


def _example(row: dict[str, Any], number: int) -> Example:
    row = {**meta_of(row), **row}
    texts = {part: text_of(row.get(part), part) for part in ("document", "question", "correct_answer", "wrong_answer")}
    document = texts["document"]
    conversation = row.get("conversation")
    if conversation is None:
        conversation = hashlib.sha256(document.encode()).hexdigest()
    meta = {
        "document": document,
        "wrong_answer": texts["wrong_answer"].strip(),
        "conversation": str(conversation),
    }
    answer = texts["correct_answer"].strip()
    return Example(str(row.get("id", f"fantom-{number}")), texts["question"], answer, meta)


MAX_TOKENS = 128
"""Longer texts are cut, because the all-* encoders of sentence-transformers were trained on no more tokens."""
MAX_CHARACTERS = 10_000
"""Longer texts are cut before they are tokenised, because a tokenizer reads a text to its end.

These hold 128 tokens.
"""


class SentenceEncoder:
    """Embeds a text as the mean of a transformer's last hidden states over its tokens, scaled to length 1.

    Args:
        name: the encoder's hub name or folder.

    Raises:
        TaskError: it cannot be loaded, or its weights are not complete.
    """

    def __init__(self, name: str):
        import torch
        from transformers import AutoModel, AutoTokenizer

        from trl_ext.models.weights import WeightsError, read_model, read_pretrained
        from trl_ext.process.devices import process_device

        self.device = process_device()
        try:
            self.tokenizer = read_pretrained(AutoTokenizer, name)
            # the pooler is not read, and many encoders come without one
            self.model = read_model(AutoModel, name, new="pooler", dtype=torch.float32).to(self.device).eval()
        except WeightsError as error:
            raise TaskError(f"task.encoder: {error}; give the hub name or folder of a sentence encoder") from error
        self.max_tokens = min(MAX_TOKENS, self.tokenizer.model_max_length)
        self._references: dict[str, Any] = {}

    def embed(self, texts: Sequence[str], batch: int = 32) -> Any:
        """The unit vectors of ``texts`` as a float32 tensor [text, width] on the CPU."""
        import torch

        vectors = []
        with torch.no_grad():
            for start in range(0, len(texts), batch):
                part = [_readable(text[:MAX_CHARACTERS]) for text in texts[start : start + batch]]
                encoded = self.tokenizer(
                    part,
                    padding=True,
                    truncation=True,
                    max_length=self.max_tokens,
                    split_special_tokens=True,  # a text that spells [SEP] is a text
                    return_tensors="pt",
                ).to(self.device)
                hidden = self.model(**encoded).last_hidden_state
                mask = encoded["attention_mask"].unsqueeze(-1)
                mean = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)
                vectors.append(torch.nn.functional.normalize(mean, dim=-1).cpu())
        return torch.cat(vectors)

    def references(self, texts: Sequence[str]) -> Any:
        """:meth:`embed` for texts that come again; each is embedded once and kept."""
        import torch

        new = [text for text in dict.fromkeys(texts) if text not in self._references]
        if new:
            self._references |= zip(new, self.embed(new), strict=True)
        return torch.stack([self._references[text] for text in texts])


def _readable(text: str) -> str:
    """``text`` with question marks for halves of surrogate pairs, which JSON may hold and no tokenizer reads."""
    return text.encode("utf-8", "replace").decode("utf-8")


@functools.cache
def load_encoder(name: str) -> SentenceEncoder:
    """The encoder ``name`` (hub name or folder), loaded at the first call.

    Raises:
        TaskError: it cannot be loaded, or its weights are not complete.
    """
    return SentenceEncoder(name)
