"""The vocabulary: everything downstream of generation reads these records and nothing else. No torch.

Shape suffixes used throughout: ``_B`` dialogues, ``_A`` agents, ``_K`` turns, ``_N`` rows, ``_T`` tokens;
score arrays are ``[turn, agent, question]`` with NaN where a turn was not played. Turns count from 0.
"""

import enum
import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any

Message = dict[str, str]
"""``{"role": "system" | "user" | "assistant", "content": text}``."""


class Stop(str, enum.Enum):
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
    ``answers=False``: what is said is no answer to the question (a summary, a hint): it is not graded, and its worth is
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


def to_json(dialogue: Dialogue) -> str:
    """One line of JSON that :func:`from_json` reads back equal."""
    return json.dumps(asdict(dialogue), ensure_ascii=False)


def from_json(line: str) -> Dialogue:
    """Inverse of :func:`to_json`."""
    record = json.loads(line)
    utterances = []
    for entry in record["utterances"]:
        grade, trace = entry.pop("grade"), entry.pop("trace", None)  # older records have none
        entry |= {"parents": tuple(entry["parents"]), "stop": Stop(entry["stop"])}
        entry |= {"grade": Grade(**grade) if grade else None, "trace": Trace(**trace) if trace else None}
        utterances.append(Utterance(**entry))
    return Dialogue(Example(**record["example"]), utterances, record["outcome"], record["prompt"], record["rollout"])
