"""The vocabulary: everything downstream of generation reads these records and nothing else. No torch.

Shape suffixes used throughout: ``_B`` dialogues, ``_A`` agents, ``_K`` turns, ``_N`` rows, ``_T`` tokens;
score arrays are ``[turn, agent, question]`` with NaN where a turn was not played. Turns count from 0.
"""

import enum
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

Message = dict[str, str]
"""``{"role": "system" | "user" | "assistant", "content": text}``."""


class Stop(enum.StrEnum):
    """Why an answer ended."""

    EOS = "eos"
    LENGTH = "length"
    FILTERED = "filtered"


@dataclass(frozen=True)
class Example:
    """One question with its label."""

    id: str
    question: str
    answer: str
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Grade:
    """What an answer was taken to be, whether it is right, and why. ``correct`` is None when it cannot be graded."""

    answer: str | None
    correct: bool | None
    reason: str


@dataclass(frozen=True)
class Ask:
    """What a protocol wants said next: ``messages`` are those that are *new* to the speaker.

    ``parents`` are ids of utterances whose words appear in the messages; ``caller`` the one that called this one.
    ``answers=False``: what is said does not answer the question (a summary, a hint): it is not graded, and its worth is
    that of the utterances it is a parent of. ``fresh=True``: it is asked apart from the agent's conversation, which
    neither shows in the prompt nor remembers the reply. ``tags`` are copied to the utterance: ``game``, ``seed`` and
    ``state`` are columns that advantages may be grouped by.
    """

    agent: str
    messages: list[Message]
    role: str | None = None
    parents: tuple[int, ...] = ()
    caller: int | None = None
    answers: bool = True
    fresh: bool = False
    tags: dict[str, Any] = field(default_factory=dict)


@dataclass
class Trace:
    """What training saw of an utterance, token by token; the lists are equally long, and ``pieces`` join to the whole answer, special
    tokens included. ``logprobs``: of the policy that was about to be updated, in nats. ``values``: of the critic, where there is one."""

    pieces: list[str]
    logprobs: list[float]
    advantages: list[float]
    values: list[float] | None = None


@dataclass
class Utterance:
    """One agent's words at one point of a dialogue, with the tokens that said them.

    ``id`` numbers the utterances of a dialogue; ``turn`` numbers this agent's own; ``order`` the step of the dialogue
    in which it was asked (utterances of one step are simultaneous). ``prompt_ids`` is everything the speaker saw.
    ``logprobs`` are the engine's own, where it gives them: a diagnostic, never trained on. ``restated`` is the final
    answer in the asked form where the untrained model had to find it in ``text``; others read it, nothing trains on it.
    ``trace`` is there for the dialogues of an update that are recorded, where somebody learned from the utterance.
    ``sample`` is a name that the copies of one utterance share, in dialogues of one prompt that were forked after it: the rollout in
    which it was first said, and its ``id`` there.
    """

    id: int
    agent: str
    policy: str
    turn: int
    order: int
    messages: list[Message]
    text: str
    role: str | None = None
    parents: tuple[int, ...] = ()
    caller: int | None = None
    prompt_ids: list[int] = field(default_factory=list)
    response_ids: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None
    stop: Stop = Stop.EOS
    trainable: bool = True
    answers: bool = True
    fresh: bool = False
    restated: str | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    grade: Grade | None = None
    tags: dict[str, Any] = field(default_factory=dict)
    sample: str | None = None
    trace: Trace | None = None

    def words(self) -> str:
        """What graders and other agents read: the text, and the restated final answer where there is one."""
        return self.text if self.restated is None else f"{self.text}\n{self.restated}"


@dataclass
class Dialogue:
    """One played example. ``prompt`` names the example in its batch, ``rollout`` tells siblings of one prompt apart."""

    example: Example
    utterances: list[Utterance]
    outcome: Any = None
    prompt: int = 0
    rollout: int = 0

    def answers(self) -> list[Utterance]:
        """The utterances that answer the question, in order of speaking."""
        return [u for u in self.utterances if u.answers]

    def turns(self) -> int:
        """Number of turns in which anyone answered."""
        return 1 + max((u.turn for u in self.answers()), default=-1)

    def at(self, turn: int) -> list[Utterance]:
        """The answers of one turn, in order of speaking."""
        return [u for u in self.answers() if u.turn == turn]


def without_tokens(dialogue: Dialogue) -> Dialogue:
    """``dialogue`` as text alone: for people, not for training."""
    bare: dict[str, Any] = {"prompt_ids": [], "response_ids": [], "logprobs": None}
    return replace(dialogue, utterances=[replace(u, **bare) for u in dialogue.utterances])


def to_record(dialogue: Dialogue) -> dict[str, Any]:
    """``dialogue`` as plain values, ready for JSON. :func:`from_record` reads them back equal."""
    record = asdict(dialogue)
    for utterance in record["utterances"]:
        utterance["stop"] = utterance["stop"].value
    return record


def from_record(record: Mapping[str, Any]) -> Dialogue:
    """Inverse of :func:`to_record`; ``record`` is left as it is.

    A field that the record lacks gets its default, because older versions wrote fewer fields. A field that this version does
    not know is passed over.

    Raises:
        KeyError: the record has no example or no utterances.
        TypeError: one of its parts lacks a field that has no default.
        ValueError: an utterance stopped for no known reason.
    """
    example = Example(**_known(Example, record["example"]))
    own = {name: record[name] for name in ("outcome", "prompt", "rollout") if name in record}
    return Dialogue(example, [_utterance(entry) for entry in record["utterances"]], **own)


def _utterance(entry: Mapping[str, Any]) -> Utterance:
    own = _known(Utterance, entry)
    if "parents" in own:
        own["parents"] = tuple(own["parents"])
    if "stop" in own:
        own["stop"] = Stop(own["stop"])
    for name, kind in (("grade", Grade), ("trace", Trace)):
        if own.get(name) is not None:
            own[name] = kind(**_known(kind, own[name]))
    return Utterance(**own)


def _known(kind: type, entry: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a record that are fields of ``kind``."""
    return {name: entry[name] for name in _FIELDS[kind] if name in entry}


_FIELDS: dict[type, list[str]] = {kind: [f.name for f in fields(kind)] for kind in (Example, Utterance, Grade, Trace)}


def to_json(dialogue: Dialogue) -> str:
    """One line of JSON that :func:`from_json` reads back equal."""
    return json.dumps(to_record(dialogue), ensure_ascii=False)


def from_json(line: str) -> Dialogue:
    """Inverse of :func:`to_json`; raises what :func:`from_record` raises."""
    return from_record(json.loads(line))
