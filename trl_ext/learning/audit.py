"""What a run did, held against what its parts promised when they were built. Imports no torch.

A *promise* is a row of a table: whose it is, which counts break it, how bad that is, and what to do. The built parts
are the subjects, with facts; an update adds to their counts. :func:`audit` holds one against the other. A new promise
is a new row and a test. :data:`LEARNER` has those of learners and of reward functions.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import pstdev
from typing import Any, Literal

from trl_ext.errors import UserError

AUDIT = "audit.json"
"""The file of a run's folder with its audit."""
COUNT = "audit/"
"""What the names of counts begin with among metrics."""
Severity = Literal["void", "idle", "doubt"]
"""How bad a broken promise is. *void*: nothing can come of the run, whatever happens later. *idle*: a learner that was
to learn never did. *doubt*: the result is weak."""
SEVERITIES: tuple[Severity, ...] = ("void", "idle", "doubt")
TOGETHER = 3
"""What does not stop a run is told by the counts of so many updates."""
LARGEST = 2**53
"""Counts are smaller."""
MOST = 0.5
"""A larger share than this is most of them."""
ALIKE = 1e-3
"""Values that are spread by less than this share of the largest are one value."""
Built = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Facts of the built parts, by kind of subject and by its name."""


def as_counts(counts: Mapping[str, float]) -> dict[str, float]:
    """Return ``counts`` of a learner among its metrics."""
    return {COUNT + name: number for name, number in counts.items()}


class VoidRun(UserError, RuntimeError):
    """Nothing can come of the run, whatever happens later. The message says why and what to do."""


class Numbers:
    """The facts and the counts of a subject as attributes. What was not counted is 0."""

    def __init__(self, named: Mapping[str, Any]):
        vars(self).update(named)

    def __getattr__(self, name: str) -> Any:
        return 0

    def share(self, some: str, of: str) -> str:
        """Return how many of all ``some`` are, in words, or a dash if all are 0."""
        part, whole = getattr(self, some), getattr(self, of)
        return f"{part:g} of {whole:g} ({part / whole:.0%})" if whole else "\u2013"


@dataclass(frozen=True)
class Promise:
    """A row of the table.

    Args:
        name: what is promised.
        kind: whose promise it is, a kind of subject such as ``learner``.
        severity: how bad it is if it is broken.
        broken: whether a subject's numbers, of an update or of a whole run, break it.
        told: what they show then, as the end of a sentence that begins with the subject.
        remedy: what to do.
    """

    name: str
    kind: str
    severity: Severity
    broken: Callable[[Numbers], Any]
    told: Callable[[Numbers], str]
    remedy: str


@dataclass(frozen=True)
class Finding:
    """A broken promise of a subject. ``text`` says what the counts show."""

    severity: Severity
    kind: str
    subject: str
    promise: str
    text: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.subject} {self.text}; {self.remedy}"


@dataclass(frozen=True)
class Audit:
    """The audit of a run: the facts of its components, its counts, and the broken promises, the worst first.

    ``note`` says how far the run came, or what is not known of it.
    """

    built: Built
    counts: Mapping[str, float]
    findings: tuple[Finding, ...] = ()
    note: str = ""

    def status(self, strict: bool = False) -> int:
        """Return 1 if something is void or idle, with ``strict`` also for a doubt, and otherwise 0."""
        return int(any(strict or finding.severity != "doubt" for finding in self.findings))

    def numbers(self, kind: str) -> dict[str, Numbers]:
        """Return the facts and counts of the subjects of a kind, by name."""
        return numbers_of(self.built, self.counts, kind)

    def to_json(self) -> dict[str, Any]:
        """Return it as values for JSON."""
        return {"note": self.note, "built": self.built, "counts": dict(self.counts), "findings": [asdict(f) for f in self.findings]}  # fmt: skip  # noqa: E501

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Audit":
        """Return what :meth:`to_json` returned.

        Raises:
            KeyError: a part is missing.
            TypeError, ValueError, AttributeError, OverflowError: a part is something else.
        """
        told = tuple(Finding(**finding) for finding in values["findings"])
        built = {kind: {name: dict(facts) for name, facts in some.items()} for kind, some in values["built"].items()}
        return cls(built, {key: float(number) for key, number in values["counts"].items()}, told, str(values["note"]))

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return the columns of a table with a line for each learner, and its lines."""
        learners = self.numbers("learner")
        shares = {
            title: (some, of)
            for title, (some, of) in _OF_A_LEARNER.items()
            if any(getattr(n, of) for n in learners.values())
        }
        rows = [
            [name, f"{n.asked:g}", f"{n.answered:g}", *(n.share(some, of) for some, of in shares.values())]
            for name, n in learners.items()
        ]
        return ["learner", "asked", "answered", *shares], rows

    def told(self) -> list[tuple[Severity, str]]:
        """Return what is broken in sentences, the worst first. Subjects with one remedy share a sentence."""
        together: dict[tuple[Severity, str], list[str]] = {}
        for f in self.findings:
            together.setdefault((f.severity, f.remedy), []).append(f"{f.subject} {f.text}")
        return [(severity, f"{', '.join(texts)}; {remedy}") for (severity, remedy), texts in together.items()]

    def lines(self) -> list[str]:
        """Return what is broken, a line each, or one line if nothing is, and the note."""
        told = [f"{severity}: {text}" for severity, text in self.told()] or ["audit: nothing is void, idle or in doubt"]
        return [*told, f"audited {self.note}"] if self.note else told


def numbers_of(built: Built, counts: Mapping[str, float], kind: str) -> dict[str, Numbers]:
    """Return facts and counts of the subjects of ``kind`` together."""
    found = {name: Numbers(facts) for name, facts in built.get(kind, {}).items()}
    for key, number in counts.items():
        of, _, rest = key.partition("/")
        name, _, count = rest.rpartition("/")
        if of == kind and name in found:
            vars(found[name])[count] = int(number) if float(number).is_integer() else number
    return found


def findings(
    built: Built, counts: Mapping[str, float], promises: Iterable[Promise], severities: Sequence[Severity] = SEVERITIES
) -> Iterator[Finding]:
    """Yield the promises of each subject that are broken, each once. After one that leaves nothing to learn from, the
    others follow from it and are not told."""
    kinds: dict[str, list[Promise]] = {}
    for promise in promises:
        if promise.severity in severities:
            kinds.setdefault(promise.kind, []).append(promise)
    for kind, rows in kinds.items():
        for name, numbers in numbers_of(built, counts, kind).items():
            told: set[str] = set()
            for row in rows:
                if row.name in told or not row.broken(numbers):
                    continue
                yield Finding(row.severity, kind, name, row.name, row.told(numbers), row.remedy)
                if row.severity != "doubt":
                    break
                told.add(row.name)


def audit(built: Built, counts: Mapping[str, float], promises: Iterable[Promise], note: str = "") -> Audit:
    """Return the audit of a run by the table ``promises``."""
    told = sorted(findings(built, counts, promises), key=lambda finding: SEVERITIES.index(finding.severity))
    return Audit(built, counts, tuple(told), note)


@dataclass
class Watch:
    """Counts a run while it goes on, and says what the updates show.

    Args:
        promises: the table.
        total: the counts of all updates.
        unlogged: those of updates that were not logged yet.
    """

    promises: Sequence[Promise]
    total: Counter = field(default_factory=Counter)
    unlogged: Counter = field(default_factory=Counter)
    _last: list[Mapping[str, float]] = field(default_factory=list)
    _told: set = field(default_factory=set)

    def add(self, built: Built, counts: Mapping[str, float]) -> Iterator[Finding]:
        """Add the counts of an update of a run that is ``built`` so. Yield what is void by it, and what else
        :data:`TOGETHER` updates show."""
        self.total.update(counts)
        self.unlogged.update(counts)
        self._last.append(counts)
        yield from findings(built, counts, self.promises, ("void",))
        if len(self._last) == TOGETHER:
            together, self._last = sum(map(Counter, self._last), Counter()), []
            for finding in findings(built, together, self.promises, ("idle", "doubt")):
                if (key := (finding.kind, finding.subject, finding.promise)) not in self._told:
                    self._told.add(key)
                    yield finding

    def logged(self) -> dict[str, float]:
        """Return what was not logged yet as metrics, and begin to count again."""
        counts, self.unlogged = self.unlogged, Counter()
        return {COUNT + key: float(number) for key, number in counts.items()}

    def state(self) -> dict[str, dict[str, float]]:
        """Return what a checkpoint keeps."""
        return {"total": dict(self.total), "unlogged": dict(self.unlogged)}

    def restore(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Go on with what a checkpoint has kept."""
        self.total, self.unlogged = Counter(state.get("total", {})), Counter(state.get("unlogged", {}))
        self._last = []


def learner_facts(learner: Any, args: Any) -> dict[str, Any]:
    """Return what a built ``learner`` is, as far as its audit and its description need it."""
    critic = learner.critic.kind if learner.critic.gives_values else ""
    return {
        "learning_rate": learner.learning_rate,
        "critic": critic,
        "critic_learning_rate": learner.value_learning_rate if critic else None,
        "objective": args.objective,
        "kl_coef": args.kl_coef,
    }


def source_counts(name: str, values: Sequence[float | None]) -> dict[str, float]:
    """Return the counts of a reward source in an update: its values, and whether they differ by more than a thousandth
    of the largest."""
    numbers = [value for value in values if value is not None]
    differs = len(numbers) > 1 and pstdev(numbers) > ALIKE * max(map(abs, numbers))
    counts = {"updates": 1.0, "values": float(len(numbers)), "differs": float(differs)}
    return {f"source/{name}/{count}": number for count, number in counts.items()}


def counted(metrics: Iterable[Mapping[str, Any]]) -> Counter:
    """Return the sums of the counts in records of metrics. Other values of a damaged record are left out."""
    total: Counter = Counter()
    for record in metrics:
        for key, number in record.items():
            if key.startswith(COUNT) and isinstance(number, int | float) and 0 <= number < LARGEST:
                total[key.removeprefix(COUNT)] += number  # type: ignore[assignment]  # a Counter of floats
    return total


_OF_A_LEARNER = {
    "told apart": ("differ", "compared"),
    "tokens learned from": ("learned", "tokens"),
    "updates that moved it": ("moved", "due"),
}
"""The columns of a learner: what share of what."""

LEARNER: tuple[Promise, ...] = (
    Promise("is not masked", "learner", "void", lambda n: n.due and n.advantaged and not n.learned,
        lambda n: f"had {n.advantaged} tokens with an advantage, and masks, caps or clips left none of them",
        "its answers are of other weights than a bound on the ratio to them allows (cliprange of objective: dis, "
        "engine_tis_cap with a mask): widen the bound, or lower the learning rate or async_depth"),
    Promise("chooses", "learner", "idle", lambda n: n.tokens and n.forced == n.tokens,
        lambda n: f"chose none of its {n.tokens} tokens, because its structured output allowed one alone at each",
        "hold it to a schema, an expression or a grammar that leaves something to say"),
    Promise("is told apart", "learner", "idle", lambda n: n.compared and not n.differ and not n.learned,
        lambda n: f"never had answers of different credit to compare, in {n.compared} {n.groups}",
        "ask questions of which it answers some right and some wrong, or score them more finely"),
    Promise("learns", "learner", "idle", lambda n: n.due and n.tokens and not n.learned,
        lambda n: f"learned from none of its {n.tokens} tokens",
        "see what the advantage and its transforms leave of the credits (dialogues.jsonl has both)"),
    Promise("moves", "learner", "idle", lambda n: n.learned and not n.moved,
        lambda n: f"had gradients, and its weights moved in none of {n.due} updates",
        "see its learning rate and its schedule, max_grad_norm and the optimizer"),
    Promise("has a critic", "learner", "idle", lambda n: n.critic and n.sequences and not n.valued,
        lambda n: f"has a critic ({n.critic}) that was trained on no value",
        "leave the critic out, or choose an advantage that reads values (baseline: critic)"),
    Promise("is told apart", "learner", "doubt", lambda n: n.compared - n.differ > MOST * n.compared,
        lambda n: f"was told nothing by {n.compared - n.differ} of {n.compared} {n.groups} "
        f"({1 - n.differ / n.compared:.0%}), in which all credits were equal",
        "ask questions of which it answers some right and some wrong, with more dialogues for each, or score more "
        "finely; where it answers all of them right, ask harder ones"),
    Promise("ends its answers", "learner", "doubt", lambda n: n.ends and n.sequences - n.ended > MOST * n.sequences,
        lambda n: f"did not end {n.sequences - n.ended} of {n.sequences} answers within the longest length",
        "raise response_length, or fine what does not end (missing_eos_penalty)"),
    Promise("scores", "source", "idle", lambda n: n.weight and n.updates and not n.values,
        lambda n: "scored nothing",
        "see whether it returns None for every answer, or leave it out"),
    Promise("tells answers apart", "source", "doubt", lambda n: n.weight and n.values > n.updates and not n.differs,
        lambda n: f"gave all {n.values} answers the same value, update by update",
        "a reward that never differs teaches nothing: see what it reads, or ask other questions"),
)  # fmt: skip
"""What learners and reward functions promise, in the order from the data to the weights."""
