"""The records of dialogues. Everything after generation reads these records and nothing else. No torch.

Shape suffixes: ``_B`` dialogues, ``_A`` agents, ``_K`` turns, ``_N`` rows, ``_T`` tokens. Score arrays are
``[turn, agent, question]``, with NaN where a turn was not played. Turns count from 0.
"""

import enum
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from maporl.decoding import Sampling, StructuredOutput
from trl_ext.ppo.options import Grammar

Message = dict[str, Any]
"""``{"role": "system" | "user" | "assistant" | "tool", "content": text}``.

A message of the role ``tool`` is the result of a call. It has the ``name`` of the tool too.
"""


def user_says(text: str) -> list[Message]:
    """Return the messages of a conversation in which the user says ``text``."""
    return [{"role": "user", "content": text}]


def message_fault(messages: Any) -> str | None:
    """Return what is wrong with ``messages``, or None if they are messages of texts.

    An object of a client, such as OpenAI's ``ChatCompletionMessage``, is named by its class, with what to write in its
    place.

    >>> message_fault([{"role": "user", "content": ["a"]}])
    "message 1 has a content of type list, expected a text, as {'role': 'user', 'content': 'a text'}"
    """
    example = "{'role': 'user', 'content': 'a text'}"
    if not isinstance(messages, list | tuple):
        return f"expected a list of messages, as [{example}], got {messages!r:.80}"
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping):
            kind = type(message)
            name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
            if hasattr(message, "role") and hasattr(message, "content"):
                remedy = "write {'role': message.role, 'content': message.content} in its place"
                return f"message {number} is an object of a client, {name}, and no dict; {remedy}"
            return f"message {number} is {message!r:.80} of type {name}, expected a dict, as {example}"
        for part in ("role", "content"):
            if not isinstance(message.get(part), str):
                kind = type(message.get(part))
                return f"message {number} has a {part} of type {kind.__name__}, expected a text, as {example}"
    return None


def has_calls(messages: Sequence[Message]) -> bool:
    """Return whether ``messages`` show calls or their results."""
    return any(message["role"] == "tool" or "tool_calls" in message for message in messages)


class Stop(enum.StrEnum):
    """Why a completion ended: a stop token, a stop string, its length, or a filter of the engine."""

    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"
    FILTERED = "filtered"

    @property
    def whole(self) -> bool:
        """Whether the completion ended by itself: with a stop token or a stop string."""
        return self in (Stop.EOS, Stop.STOP)

    @classmethod
    def of(cls, reason: Any) -> "Stop | None":
        """Return why a completion ended, by the ``finish_reason`` of any server, or None for one that is not whole.

        A reason that is not known, such as ``abort``, ends no whole completion, and neither does none at all: a server
        says nothing where its own connection broke.

        >>> Stop.of("MAX_TOKENS"), Stop.of("abort"), Stop.of(None)
        (<Stop.LENGTH: 'length'>, None, None)
        """
        return _REASONS.get(reason.lower()) if isinstance(reason, str) else None


_REASONS = {
    **dict.fromkeys(("stop", "eos", "eos_token", "stop_sequence", "end_turn", "complete"), Stop.EOS),
    **dict.fromkeys(("tool_calls", "function_call", "tool_call", "tool_use"), Stop.EOS),
    **dict.fromkeys(("length", "max_tokens", "model_length", "model_context_window_exceeded"), Stop.LENGTH),
    **dict.fromkeys(("content_filter", "safety", "refusal", "sensitive"), Stop.FILTERED),
    **dict.fromkeys(("recitation", "prohibited_content", "blocklist", "spii"), Stop.FILTERED),
}
"""The reasons for which servers end whole completions, in small letters: OpenAI's, and those of servers like it."""


class TurnEnd(enum.StrEnum):
    """Why an agent's turn ended.

    It answered without a call. Or it may not call any more (``limit``), or its completion was cut (``length``). Or its
    environment is over, the next completion would not fit the context, or an environment was lost.
    """

    ANSWER = "answer"
    LIMIT = "limit"
    LENGTH = "length"
    OVER = "over"
    CONTEXT = "context"
    LOST = "lost"


CallError = Literal["unread", "unknown", "arguments", "raised", "timeout", "limit", "over", "lost"]
"""Why a call failed: it could not be read, its tool is unknown, its arguments do not fit the schema, the tool raised
an error or took too long, the agent may not call any more, or the environment is over or lost."""


@dataclass(frozen=True)
class Result:
    """The result of a call.

    Args:
        text: what the agent is shown, after cutting.
        value: a value for protocols and rewards, which JSON can hold. No agent is shown it.
        error: why the call failed, or None.
        reward: what the call pays its agent at once.
        done: whether the environment is over after it.
        seconds: how long it took.
        left_out: the number of tokens that were cut from ``text``.
    """

    text: str
    value: Any = None
    error: CallError | None = None
    reward: float | None = None
    done: bool = False
    seconds: float = 0.0
    left_out: int = 0


@dataclass
class Call:
    """One call of a tool.

    Args:
        id: ``"{utterance}.{index}"``.
        name: the name of the tool, or "" if the call could not be read.
        arguments: the arguments by name.
        place: the name of the environment to which the tool belongs. None is a tool that keeps no state.
        result: what it returned. None: it has not been carried out.
    """

    id: str
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    place: str | None = None
    result: Result | None = None


IN_PLAY = frozenset({"rollout", "draw", "bare_question", "shown_meta"})
"""What ``meta`` of the :class:`Example` that a protocol plays has besides what the task gives it."""


@dataclass(frozen=True)
class Example:
    """One question with its right answer.

    In a protocol, ``question`` is what agents are asked: the task's question with its instruction, which asks for the
    form that grading reads.
    """

    id: str
    question: str
    answer: str
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def bare_question(self) -> str:
        """The question as the data have it, without the task's instruction: for an agent that does not answer it."""
        return self.meta.get("bare_question", self.question)


@dataclass(frozen=True)
class Grade:
    """The final answer that grading found, whether it is right, and why. ``correct`` is None if it cannot be graded."""

    answer: str | None
    correct: bool | None
    reason: str


@dataclass(frozen=True)
class Ask:
    """A protocol's request for one utterance.

    Args:
        agent: the agent that speaks.
        messages: the messages that are *new* to the agent.
        role: the role in which it speaks. By default it is the agent's own role.
        parents: the ids of the utterances whose text is in the messages.
        caller: the id of the utterance that called for this one.
        answers: whether the utterance answers the question. If not, for example a summary or a hint, it is not graded.
            Its credit is then its own score, if a reward source or the protocol gives it one, and otherwise the mean
            credit of the utterances that it is a parent of. Without both it is not trained on.
        fresh: whether the request stands apart from the agent's conversation. The prompt then does not show the
            conversation, and the conversation does not remember the reply.
        tags: values that the utterance keeps. ``game``, ``seed``, ``state`` and ``action`` are columns for grouping
            advantages.
        taught: the texts of which a warm start teaches the agent a random one here, such as the legal moves of a game.
            By default the task writes what the agent says (:meth:`maporl.Lessons.write_reply`).
        turn: the number of the agent's new turn, from 0. An agent that was silent in turns skips their numbers. By
            default it is the number after that of its last turn.
        continues: the id of the agent's utterance whose turn goes on, because it called tools. The messages are the
            results. None begins a new turn.
        sampling: how the answer is sampled, where this differs from the agent's own sampling.
        example: the question that the utterance answers, if it was made in play. None: that of the dialogue.
        after: the id of the agent's utterance whose conversation goes on in a new turn, from its tokens on. The request
            must be ``fresh``. So an agent may have several conversations, and one may go on in several ways.
        schemas: the tools that the agent may call in this conversation, as ``{"type": "function", "function": {...}}``.
            The protocol carries out the calls, which stand in the utterance's ``calls``.
        refusable: whether what cannot be answered, such as a prompt that does not fit the context, makes an utterance
            without text whose tag ``refused`` says why. If not, it stops the run.
        single: whether the utterance ends right after its first call of ``schemas``. If not, the agent's call format
            says how many it may have.
        tokens: whether the utterance shows its ``tokens``. Engines that do not know them refuse a refusable ask.
        structured_output: what the answer is held to. It is part of ``sampling``.
        tool_choice: ``auto``, ``required`` for one call of any of ``schemas``, or the name of one of them for a call of
            it.
        strict: the names of those whose arguments keep to their schemas.
        alternatives: how many of the likeliest tokens at each place these show.
        seed: numbers that decide, in this dialogue, about the random numbers of the utterance. Without them its place
            in the dialogue does.

    Raises:
        ValueError: ``parents`` or ``taught`` is not a tuple, or ``after`` is given without ``fresh``.
    """

    agent: str
    messages: list[Message]
    role: str | None = None
    parents: tuple[int, ...] = ()
    caller: int | None = None
    answers: bool = True
    fresh: bool = False
    tags: dict[str, Any] = field(default_factory=dict)
    taught: tuple[str, ...] = ()
    turn: int | None = None
    continues: int | None = None
    sampling: Sampling | None = None
    example: Example | None = None
    after: int | None = None
    schemas: tuple[dict[str, Any], ...] = ()
    refusable: bool = False
    single: bool = False
    tokens: bool = False
    structured_output: StructuredOutput | None = None
    tool_choice: str = "auto"
    strict: tuple[str, ...] = ()
    alternatives: int = 0
    seed: tuple[int, ...] = ()

    def __post_init__(self):
        if self.structured_output is not None:
            sampling = replace(self.sampling or Sampling(), structured_output=self.structured_output)
            object.__setattr__(self, "sampling", sampling)
        if self.after is not None and not self.fresh:
            raise ValueError("Ask: after: expected fresh=True, because the agent's ongoing conversation goes on anyway")
        for name, value, example in (
            ("parents", self.parents, "(said.id,)"),
            ("taught", self.taught, '("left", "right")'),
        ):
            if not isinstance(value, (tuple, list)):
                raise ValueError(f"Ask: {name}: expected a tuple, such as {example}, got {value!r:.80}")


@dataclass(frozen=True)
class Act:
    """A protocol's request to call a tool for an agent.

    Args:
        agent: the agent for which the tool is called.
        name: the name of the tool.
        arguments: the arguments by name.
        of: the id of the utterance that the act carries out. The call is recorded there.
        place: the name of the environment to which the tool belongs. None is a tool that keeps no state.
        call: the id of the recorded call that it carries out. None records a new one.
    """

    agent: str
    name: str
    arguments: dict[str, Any]
    of: int
    place: str | None = None
    call: str | None = None


@dataclass(frozen=True)
class Wait:
    """A protocol's request to be asked again when ``until`` is done, because something outside of the dialogue must
    happen first. It receives an empty list then. Other dialogues go on meanwhile.

    A play of a fork receives what was asked next when the dialogue was first played, as long as it is played again.
    """

    until: Future[Any]


@dataclass
class Trace:
    """The training values of an utterance's tokens. The lists of its tokens are equally long.

    Args:
        pieces: the text of each token. Together they are the whole completion, special tokens included.
        logprobs: the log-probabilities of the policy before the update, in nats.
        advantages: the advantages.
        values: the critic's values, or None without a critic.
        earned: the ids of the utterances whose scores are part of its credit, with these parts
            (:func:`maporl.rewards.credit.origins`).
        compared: the utterances of the update that it is compared with: ``by`` what (``baseline`` or ``scale``) and its
            ``name``, the ``key`` that they have in common, how many ``utterances`` and ``questions`` they are, and the
            mean of their ``credit``. None: it is compared with no other utterance.
        advantage: the mean of ``advantages``. Where an utterance has one advantage, each of its tokens has it.
    """

    pieces: list[str]
    logprobs: list[float]
    advantages: list[float]
    values: list[float] | None = None
    compared: dict[str, Any] | None = None
    earned: list[tuple[int, float]] = field(default_factory=list)
    advantage: float | None = None


@dataclass
class Utterance:
    """A completion of one agent in a dialogue, as text and as tokens.

    Args:
        id: the number of the utterance in its dialogue.
        agent: the agent that speaks.
        policy: the policy whose weights speak.
        turn: the number of the agent's turn. If a protocol lets agents be silent in turns, these count too.
        order: the step of the dialogue. Utterances of one step are simultaneous.
        messages: the messages that were new to the agent.
        text: what it said.
        role: the role in which it spoke.
        parents: the ids of the utterances whose text is in the messages.
        caller: the id of the utterance that called for this one.
        prompt_ids: the token ids of everything that the agent saw.
        response_ids: the sampled token ids.
        logprobs: their log-probabilities by the sampling engine, if it gives them.
        stop: why the completion ended.
        trainable: whether the policy may be trained on the utterance.
        answers: whether the utterance answers the question.
        fresh: whether it stands apart from the agent's conversation.
        restated: the final answer, if the untrained model had to find it in ``text``. Graders and other agents read it.
        rewards: the rewards, scores and credit by name.
        grade: the task's grade.
        tags: values from the protocol.
        sample: the name that an utterance shares with its copies in dialogues that were forked after it.
        settles: the ids of earlier utterances that it made final, such as the draft that a verdict approves. A protocol
            may set it. If nobody is shown the verdict, it has the credit of the draft. In the dialogue of a program it
            is the answer, for what nobody was shown.
        trace: the training values of its tokens, if they are recorded.
        part: the number of the utterance in its turn. A turn in which the agent called tools has several utterances.
        calls: what it called, in order.
        turn_end: why the turn ended, on the last utterance of a turn of an agent with tools.
        temperature: the temperature at which it was sampled. None: that of the run.
        example: the question that it answers, if it was made in play (:meth:`Dialogue.asked`).
        version: the number of updates that the policy's weights had had. None if it is not trained.
        after: the id of the agent's utterance whose conversation it continues, if the agent has several.
        submitted: what a program gave as the answer of the dialogue, which graders read in place of ``text``.
        schemas: the tools that a protocol has brought to the conversation that begins with it.
        grammar: what its tokens were held to, or None.
        tokens: each sampled token but a stop token at the end, if they were asked for (:attr:`Ask.tokens`): its text,
            its log-probability, and the likeliest tokens in its place with theirs (:attr:`Ask.alternatives`). The
            distribution is the one from which it was drawn, so a greedy token has 0 and no other alternative. The
            record leaves them out.
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
    settles: tuple[int, ...] = ()
    trace: Trace | None = None
    part: int = 0
    calls: list[Call] = field(default_factory=list)
    turn_end: TurnEnd | None = None
    temperature: float | None = None
    example: Example | None = None
    version: int | None = None
    after: int | None = None
    submitted: str | None = None
    schemas: tuple[dict[str, Any], ...] = ()
    grammar: Grammar | None = None
    tokens: list[tuple[str, float, list[tuple[str, float]]]] = field(default_factory=list, repr=False, compare=False)

    @property
    def is_thought(self) -> bool:
        """Whether it was cut off in a thought that the prompt had begun, so that its text holds no answer."""
        return self.tags.get("no_text") == "thinking"

    def words(self) -> str:
        """Return what graders and other agents read: the text, and the restated final answer if there is one."""
        if self.submitted is not None:
            return self.submitted
        return self.text if self.restated is None else f"{self.text}\n{self.restated}"


@dataclass
class Dialogue:
    """One dialogue on an example.

    Args:
        example: the question.
        utterances: what was said, in order.
        outcome: what the protocol returned at the end.
        prompt: the number of the question in its batch.
        rollout: the number of the dialogue among those on the same question.
        lost: the environments that did not answer in time. The dialogue ended there, and is not trained on.
        environments: the opened environments by name, which reward functions may read
            (:class:`maporl.environments.rooms.Room`). The record leaves them out.
        without: the agents that were left out, if this is an ablation.
        ablations: this dialogue without some of its agents, for counterfactual credit (:mod:`maporl.rollout.ablation`).
            They are scored, and not trained on.
        unscored: the reward sources that an evaluation has left out of its scores, and why.
    """

    example: Example
    utterances: list[Utterance]
    outcome: Any = None
    prompt: int = 0
    rollout: int = 0
    lost: tuple[str, ...] = ()
    environments: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    without: tuple[str, ...] = ()
    ablations: list["Dialogue"] = field(default_factory=list)
    unscored: dict[str, str] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "environments": {}}  # another process cannot use them

    def asked(self, utterance: Utterance) -> Example:
        """Return the question that one of the utterances answers: one that was made in play, or that of the
        dialogue."""
        return utterance.example or self.example

    def answers(self) -> list[Utterance]:
        """Return the utterances that answer the question, in order of speaking."""
        return [u for u in self.utterances if u.answers]

    def turns(self) -> int:
        """Return the number of turns with an answer."""
        turns = [u.turn if u.submitted is None else 0 for u in self.utterances if u.answers]
        return 1 + max(turns, default=-1)

    def at(self, turn: int) -> list[Utterance]:
        """Return the answers of one turn, in order of speaking.

        What a program has submitted is the only answer of its dialogue, and so of turn 0.
        """
        return [u for u in self.utterances if u.answers and (u.turn if u.submitted is None else 0) == turn]


def is_program(dialogue: Dialogue) -> bool:
    """Return whether a program of the user's played the dialogue, and left the outcome of one."""
    outcome = dialogue.outcome
    return (
        isinstance(outcome, dict)
        and all(isinstance(outcome.get(name), str | None) for name in ("answer", "failure", "nobody"))
        and all(isinstance(outcome.get(name, 0), int) for name in ("requests", "answered"))
        and isinstance(outcome.get("calls"), int)
        and isinstance(outcome.get("refused", []), list)
        and bool(outcome.get("answer") is not None or outcome.get("failure"))
    )


def why_nobody(dialogues: Sequence[Dialogue]) -> str | None:
    """Return why the programs that played ``dialogues`` asked no agent in any of them: the most frequent cause.

    None: one was asked, or no program has played.
    """
    causes = Counter(d.outcome.get("nobody") for d in dialogues if is_program(d))
    return None if None in causes else next((str(cause) for cause, _ in causes.most_common(1)), None)


def without_tokens(dialogue: Dialogue) -> Dialogue:
    """Return a copy of ``dialogue`` without token ids and log-probabilities, for reading and not for training."""
    bare: dict[str, Any] = {"prompt_ids": [], "response_ids": [], "logprobs": None}
    utterances = [replace(u, **bare) for u in dialogue.utterances]
    return replace(dialogue, utterances=utterances, ablations=[without_tokens(d) for d in dialogue.ablations])


def to_record(dialogue: Dialogue) -> dict[str, Any]:
    """Return ``dialogue`` as plain values for JSON. :func:`from_record` turns them into an equal dialogue.

    Turns count from 1 there, as in metrics and on pages, which ``first_turn`` says. In older records they count from 0.
    """
    record = asdict(replace(dialogue, environments={}, ablations=[]))
    del record["environments"]
    record |= {"first_turn": 1, "ablations": [to_record(ablation) for ablation in dialogue.ablations]}
    for utterance in record["utterances"]:
        del utterance["tokens"]
        utterance["turn"] += 1
        key = ((utterance["trace"] or {}).get("compared") or {}).get("key", {})
        if key.get("turn") is not None:
            key["turn"] += 1
        for name in ("stop", "turn_end"):
            utterance[name] = utterance[name] and utterance[name].value
    return record


def from_record(record: Mapping[str, Any]) -> Dialogue:
    """Return the dialogue of a record that :func:`to_record` made. ``record`` does not change.

    A missing field gets its default, because older versions wrote fewer fields. An unknown field is ignored.

    Raises:
        KeyError: the record has no example or no utterances.
        TypeError: a part of it lacks a field without a default.
        ValueError: an utterance has an unknown reason for its end.
    """
    example = Example(**_known(Example, record["example"]))
    values = {name: record[name] for name in ("outcome", "prompt", "rollout", "unscored") if name in record}
    values |= {name: tuple(record.get(name, ())) for name in ("lost", "without")}
    values["ablations"] = [from_record(ablation) for ablation in record.get("ablations", ())]
    first = int(record.get("first_turn") == 1)
    return Dialogue(example, [_utterance(entry, first) for entry in record["utterances"]], **values)


def _utterance(entry: Mapping[str, Any], first: int) -> Utterance:
    values = _known(Utterance, entry)
    if isinstance(values.get("turn"), int):
        values["turn"] = max(values["turn"] - first, 0)
    for name in ("parents", "settles", "schemas"):
        if name in values:
            values[name] = tuple(values[name])
    if "stop" in values:
        values["stop"] = Stop(values["stop"])
    if values.get("turn_end") is not None:
        values["turn_end"] = TurnEnd(values["turn_end"])
    for name, kind in (("grade", Grade), ("trace", Trace), ("example", Example)):
        if values.get(name) is not None:
            values[name] = kind(**_known(kind, values[name]))
    if values.get("grammar") is not None:
        values["grammar"] = Grammar(values["grammar"]["text"], tuple(values["grammar"]["stop_ids"]))
    if values.get("trace") is not None:
        values["trace"].earned = [(int(number), float(part)) for number, part in values["trace"].earned]
        if (compared := values["trace"].compared) is not None:
            turn = compared["key"].get("turn")
            moved = {} if turn is None else {"turn": max(turn - first, 0)}
            values["trace"].compared = compared | {"key": compared["key"] | moved}
    if "calls" in values:
        values["calls"] = [_call(call) for call in values["calls"]]
    return Utterance(**values)


def _call(entry: Mapping[str, Any]) -> Call:
    values = _known(Call, entry)
    if values.get("result") is not None:
        values["result"] = Result(**_known(Result, values["result"]))
    return Call(**values)


def _known(kind: type, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a record that are fields of ``kind``."""
    return {name: entry[name] for name in _FIELDS[kind] if name in entry}


_FIELDS: dict[type, list[str]] = {
    kind: [f.name for f in fields(kind)] for kind in (Example, Utterance, Grade, Trace, Call, Result)
}


def to_json(dialogue: Dialogue) -> str:
    """Return ``dialogue`` as one line of JSON. :func:`from_json` turns it into an equal dialogue.

    Half a character, which UTF-8 cannot hold, is escaped as JSON does it.
    """
    line = json.dumps(to_record(dialogue), ensure_ascii=False)
    return line.encode("utf-8", "backslashreplace").decode()


def from_json(line: str) -> Dialogue:
    """Return the dialogue of a line that :func:`to_json` made. It raises the errors of :func:`from_record`."""
    return from_record(json.loads(line))
