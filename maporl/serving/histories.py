"""Which conversation of an agent a request goes on with: the one whose messages and replies it repeats unchanged.

A client sends the whole conversation with each request. Where this is what the agent has seen and said, its tokens are
there, and only what is new is added to them. Where a program has changed it (a summary, another formatting of a call),
a new conversation begins.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from maporl.serving.wire import ChatRequest
from maporl.types import Message


@dataclass(frozen=True)
class Place:
    """Where a request stands.

    Args:
        after: the id of the utterance with which its conversation goes on, or None for a new conversation.
        new: the messages that the agent has not seen in this conversation. Its own words have no name of a speaker.
        history: ``continued`` or ``changed: WHY`` if the request holds something that the agent seems to have said, and
            otherwise None.
    """

    after: int | None
    new: tuple[Message, ...]
    history: str | None


@dataclass
class Histories:
    """The conversations of a dialogue, by what a client would send to go on with them."""

    _ends: dict[str, int | None] = field(default_factory=dict)
    """The utterance with which a conversation ended, by the digest of all its messages. None: it is one of several."""
    _known: dict[str, list[list[str]]] = field(default_factory=dict)
    """The conversations of each agent, as digests of their messages."""
    _speakers: dict[str, set[str]] = field(default_factory=dict)
    """Who has said a reply, by its digest. What nobody has said, although a request had it, is the program's."""

    def place(self, request: ChatRequest) -> Place:
        """Return where ``request`` stands."""
        digests = _digests(request.messages)
        chain = _chain(request, digests)
        said = [number for number, message in enumerate(request.messages) if message["role"] == "assistant"]
        end = next((number for number in reversed(said) if self._ends.get(chain[number]) is not None), None)
        if any(self._seems_own(request.agent, digests[n], end) for n in said if end is None or n > end):
            history: str | None = f"changed: {self._change(request, digests)}"
        else:
            history = None if end is None else "continued"
        new = tuple(
            {name: value for name, value in message.items() if name != "name"}
            if message["role"] == "assistant" and request.agent in self._speakers.get(digest, ())
            else message
            for message, digest in zip(request.messages, digests, strict=True)
        )
        return Place(None, new, history) if end is None else Place(self._ends[chain[end]], new[end + 1 :], history)

    def _seems_own(self, agent: str, digest: str, end: int | None) -> bool:
        """Return whether ``agent`` seems to have said a message, which is not where it has said anything.

        Programs show an agent what others have said as messages of an assistant too, and examples.
        """
        speakers = self._speakers.get(digest, set())
        others = bool(speakers - {agent}) and (end is not None or agent not in speakers)
        return agent in self._known and not others

    def add(self, request: ChatRequest, reply: Message, utterance: int) -> None:
        """Remember that ``request`` was answered with ``reply``, which is the text of ``utterance``.

        A client may leave out the text beside its calls, as long as these say which reply it was.
        """
        messages = [*request.messages, reply]
        digests = _digests(messages)
        texts = [reply, {"role": "assistant", "content": reply["content"]}]  # others are often not shown its calls
        self._ends[_chain(request, digests)[-1]] = utterance
        if reply["content"].strip() and reply.get("tool_calls"):
            texts.append({**reply, "content": ""})
            called = _chain(request, _digests([*request.messages, texts[-1]]))[-1]
            self._ends[called] = None if called in self._ends else utterance
        self._known.setdefault(request.agent, []).append([_tools(request), *digests])
        for one, digest in zip(request.messages, digests, strict=False):
            if one["role"] == "assistant":
                self._speakers.setdefault(digest, {""})
        for digest in _digests(texts):
            self._speakers.setdefault(digest, set()).add(request.agent)

    def _change(self, request: ChatRequest, digests: Sequence[str]) -> str:
        """Return how a request differs from the earlier conversation that it has most in common with."""
        known = self._known.get(request.agent, [])
        sent = [_tools(request), *digests]
        common = [_common(one, sent) for one in known]
        most = max(common, default=1)
        if not most:
            return "other tools are given"
        number = most - 1
        if number == len(request.messages):
            return "its last message is missing"
        longest = known[common.index(most)] if known else []
        role = request.messages[number]["role"]
        if digests[number] in longest[most:]:
            return f"a message is missing before message {number + 1}, of the role {role}"
        return f"message {number + 1}, of the role {role}, is not the one that the agent knows"


def _common(first: Sequence[str], second: Sequence[str]) -> int:
    return next(
        (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def _tools(request: ChatRequest) -> str:
    return _digest(request.schemas)


def _digests(messages: Sequence[Message]) -> list[str]:
    """Return what tells messages apart. The space around a reply does not, because many clients leave it out, and
    neither does who is named as its speaker, because some add that."""
    return [
        _digest({**message, "content": message["content"].strip(), "name": None})
        if message["role"] == "assistant"
        else _digest(message)
        for message in messages
    ]


def _chain(request: ChatRequest, digests: Sequence[str]) -> list[str]:
    """Return for each message the digest of all messages up to it, in a conversation of the agent with its tools."""
    chain, before = [], _digest([request.agent, _tools(request)])
    for digest in digests:
        before = hashlib.blake2b(f"{before} {digest}".encode(), digest_size=16).hexdigest()
        chain.append(before)
    return chain


def _digest(value: Any) -> str:
    written = json.dumps(value, sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.blake2b(written.encode(), digest_size=16).hexdigest()
