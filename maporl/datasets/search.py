"""Search in a local corpus by BM25: a tool over one file, and an environment over the paragraphs of each question.

The index is that of ``bm25s`` (extra ``search``), over the words of :mod:`maporl.datasets.search_words`. Nothing
outside the corpus is read, and no network is used.
"""

import difflib
import hashlib
import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from maporl.datasets.search_words import indexed_words, wanted_words
from maporl.environments.base import Environment, Tool
from maporl.errors import ConfigError, install_command
from maporl.storage.disk_cache import CacheUnusable, cache_folder
from maporl.text import BOM, encoding_of
from maporl.types import Result
from trl_ext.errors import retold
from trl_ext.files.atomic import new_folder

logger = logging.getLogger(__name__)
NOTHING = "No passage has any of these words."
"""What an agent is told if its search found nothing."""
_VERSION = 3
"""It is part of the name of a stored index, and rises when the way in which passages are indexed changes."""
_PARAMETERS = {
    "type": "object",
    "properties": {"query": {"type": "string", "description": "The words to look for."}},
    "required": ["query"],
}


@dataclass(frozen=True)
class Passage:
    """A paragraph of a corpus with its title, which may be empty."""

    title: str
    text: str


def passages_of(value: Any) -> list[Passage]:
    """Return the passages in a list of ``{"title": ..., "text": ...}``, or in HotpotQA's ``context``.

    The latter is ``{"title": [...], "sentences": [[...], ...]}``. A passage may be given as a text too.

    >>> passages_of([{"title": "Emma", "text": "A novel."}, "Bare."])
    [Passage(title='Emma', text='A novel.'), Passage(title='', text='Bare.')]
    >>> passages_of({"title": ["Emma"], "sentences": [["A novel.", " Of 1815."]]})
    [Passage(title='Emma', text='A novel. Of 1815.')]

    Raises:
        ValueError: it is something else, or a passage has no text.
    """
    if isinstance(value, Mapping) and {"title", "sentences"} <= value.keys():
        pairs = zip(value["title"], value["sentences"], strict=True)
        value = [{"title": title, "text": "".join(sentences)} for title, sentences in pairs]
    if not isinstance(value, list | tuple):
        raise ValueError(f"expected a list of paragraphs with title and text, got {value!r:.80}")
    return [_passage(entry) for entry in value]


def _passage(entry: Any) -> Passage:
    entry = {"text": entry} if isinstance(entry, str) else entry
    title, text = (entry.get(name) for name in ("title", "text")) if isinstance(entry, Mapping) else (None, None)
    if not isinstance(text, str) or not text.strip() or not isinstance(title, str | None):
        raise ValueError(f'expected a paragraph as {{"title": ..., "text": ...}}, got {entry!r:.80}')
    return Passage(title or "", text)


class Index:
    """A BM25 index of passages. Several threads may search it at the same time.

    Args:
        passages: the passages. Their numbers, from 1, are their order.
        k1: how much a repeated word counts.
        b: how much a long passage is held back.
        folder: where the index is stored. None stores nothing.

    Raises:
        ConfigError: ``passages`` is empty or has no words, ``k1`` or ``b`` is out of range, or bm25s is not installed.
    """

    def __init__(self, passages: Sequence[Passage], k1: float = 1.5, b: float = 0.75, folder: Path | None = None):
        if not passages:
            raise ConfigError("search: the corpus holds no passages")
        if not (k1 >= 0 and 0 <= b <= 1):
            raise ConfigError(f"search: expected k1 of at least 0 and b in [0, 1], got k1={k1}, b={b}")
        self.passages = list(passages)
        self._library = _bm25s()
        # bm25s warns of itself at each index without this
        logging.getLogger("bm25s").setLevel(logging.WARNING)
        self._bm25 = self._built(k1, b) if folder is None else self._stored(folder, k1, b)

    def search(self, query: str, k: int) -> list[tuple[int, float]]:
        """Return the numbers and scores of the best ``k`` passages, the best first.

        Of two equal scores the one with the lower number comes first. A passage without any of the words is left out.
        """
        import numpy as np

        words = wanted_words(query, self._bm25.vocab_dict)
        if not words:
            return []
        scores = self._bm25.get_scores(words)
        matching = np.flatnonzero(scores > 0)
        if len(matching) > k:
            least = np.partition(scores[matching], -k)[-k]
            matching = matching[scores[matching] >= least]
        order = np.lexsort((matching, -scores[matching]))[:k]
        return [(int(matching[place]) + 1, float(scores[matching[place]])) for place in order]

    def _built(self, k1: float, b: float) -> Any:
        words = [indexed_words(p.title, common=True) + indexed_words(p.text) for p in self.passages]
        if not any(words):
            raise ConfigError("search: the passages have no words that can be looked for")
        bm25 = self._library.BM25(k1=k1, b=b)
        bm25.index(words, show_progress=False)
        return bm25

    def _stored(self, folder: Path, k1: float, b: float) -> Any:
        """Return the index from ``folder``, or build it and store it there."""
        from filelock import FileLock

        place = folder / self._key(k1, b)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(place.with_suffix(".lock")):  # two processes would write the same files
                if (stored := self._loaded(place)) is not None:
                    return stored
                bm25 = self._built(k1, b)
                with new_folder(place) as new:
                    bm25.save(new, show_progress=False)
                return bm25
        except OSError as error:
            logger.warning("%s: the search index cannot be stored (%s); the next run builds it again", place, error)
            return self._built(k1, b)

    def _loaded(self, place: Path) -> Any:
        if not place.is_dir():
            return None
        try:
            bm25 = self._library.BM25.load(place, show_progress=False)
            if bm25.scores["num_docs"] == len(self.passages):
                return bm25
            why = f"{bm25.scores['num_docs']} passages"
        except Exception as error:  # what a damaged file raises depends on where it is damaged
            why = f"{type(error).__name__}: {error}"
        aside = place.with_name(f"{place.name}.damaged")
        logger.warning("%s: the search index is damaged (%s); it is built again", place, why)
        if aside.exists():
            shutil.rmtree(aside)
        place.rename(aside)
        return None

    def _key(self, k1: float, b: float) -> str:
        digest = hashlib.sha256(repr((_VERSION, self._library.__version__, k1, b)).encode())
        for passage in self.passages:
            digest.update(json.dumps([passage.title, passage.text]).encode())
        return digest.hexdigest()


def read_corpus(corpus: str) -> list[Passage]:
    """Return the passages of a ``.jsonl`` file, without repetitions.

    A line has ``title`` and ``text``, or it is a question with ``paragraphs``, or with ``meta.paragraphs``.

    Raises:
        ConfigError: the file does not exist, cannot be read, or has a line without a passage.
    """
    path = Path(corpus).expanduser().absolute()
    if not path.is_file():
        there = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, there, 1)
        hint = f"did you mean {near[0]!r}?" if near else "give the path of a .jsonl file of passages"
        raise ConfigError(f"search: corpus: {path}: no such file; {hint}")
    passages: dict[Passage, None] = {}
    try:
        with path.open("rb") as file:
            encoding = encoding_of(file.read(4))
        with path.open(encoding=encoding) as lines:
            for number, line in enumerate((line.removeprefix(BOM) for line in lines), 1):
                if line.strip():
                    passages.update(dict.fromkeys(_passages_of_line(line, f"search: corpus: {path}: line {number}")))
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"search: corpus: {path}: cannot be read: {error}; save it as UTF-8") from None
    if not passages:
        raise ConfigError(f"search: corpus: {path}: it holds no passages")
    return list(passages)


def _passages_of_line(line: str, where: str) -> list[Passage]:
    with retold((ValueError, RecursionError), lambda error: ConfigError(f"{where}: {error}")):
        row = json.loads(line)
        meta = row.get("meta") if isinstance(row, dict) else None
        paragraphs = [place["paragraphs"] for place in (row, meta) if isinstance(place, dict) and "paragraphs" in place]
        return passages_of(paragraphs[0] if paragraphs else [row])


def bm25(corpus: str, k: int = 3, k1: float = 1.5, b: float = 0.75, name: str = "search") -> Tool:
    """Return the tool ``search(query)`` over the passages of a file.

    The index is stored in maporl's cache, under the hash of the corpus.

    Args:
        corpus: a ``.jsonl`` file (:func:`read_corpus`).
        k: the most passages that a call returns.
        k1: how much a repeated word counts.
        b: how much a long passage is held back.
        name: the name by which agents call it.

    Raises:
        ConfigError: the corpus cannot be read, an option is out of range, or bm25s is not installed.
    """
    _check_k(k)
    _bm25s()  # it is missed before a large file is read
    try:
        folder: Path | None = cache_folder() / "bm25"
    except CacheUnusable as error:
        logger.warning("search: %s; the index is not stored", error)
        folder = None
    index = Index(read_corpus(corpus), k1, b, folder)

    def search(query: str) -> Result:
        return _result(index, query, k)

    return Tool(name, f"Search a collection of texts. Returns the {k} passages that fit best.", _PARAMETERS, search)


class QuestionSearch(Environment):
    """An environment with the tool ``search(query)`` over the paragraphs of the question (``meta.paragraphs``).

    Args:
        k: the most passages that a call returns.
        k1: how much a repeated word counts.
        b: how much a long passage is held back.

    Raises:
        ConfigError: an option is out of range, or bm25s is not installed.
    """

    forks = "copy"

    def __init__(self, k: int = 3, k1: float = 1.5, b: float = 0.75):
        _check_k(k)
        _bm25s()
        self._k, self._k1, self._b = k, k1, b
        self._index: Index | None = None

    def reset(self, seed: int, row: Mapping[str, Any]) -> None:
        """Index the paragraphs of the question.

        Raises:
            ConfigError: the question has none.
        """
        try:
            passages = passages_of(row.get("paragraphs"))
        except ValueError as error:
            raise ConfigError(f"search: question {row.get('id')}: {error}; or use bm25 with a corpus") from None
        self._index = Index(passages, self._k1, self._b)

    def tools(self, agent: str) -> list[Tool]:
        """Return the tool, which every agent has."""
        description = f"Search the texts for this question. Returns the {self._k} passages that fit best."
        return [Tool("search", description, _PARAMETERS, self._search)]

    def can_pay(self, agents: Sequence[str]) -> bool:
        """Return False."""
        return False

    def _search(self, query: str) -> Result:
        assert self._index is not None, "an environment is reset before it is used"
        return _result(self._index, query, self._k)

    def fork(self) -> "QuestionSearch":
        """Return another one over the same index, which no search changes."""
        fork = QuestionSearch(self._k, self._k1, self._b)
        fork._index = self._index
        return fork


def _result(index: Index, query: str, k: int) -> Result:
    """Return the passages as a text for the agent, and their numbers, titles and scores as the value."""
    hits = index.search(query, k)
    shown = [(number, index.passages[number - 1], score) for number, score in hits]
    texts = [f"[{number}] {f'{p.title}: ' if p.title else ''}{p.text}" for number, p, _ in shown]
    value = [{"number": number, "title": p.title, "score": score} for number, p, score in shown]
    return Result("\n\n".join(texts) or NOTHING, value=value)


def _check_k(k: int) -> None:
    if not isinstance(k, int) or isinstance(k, bool) or k < 1:
        raise ConfigError(f"search: k: expected the number of passages, at least 1, got {k!r:.80}")


def _bm25s() -> ModuleType:
    try:
        import bm25s
    except ImportError as error:
        raise ConfigError(f"search: needs the package bm25s ({error}): {install_command('search')}") from None
    return bm25s
