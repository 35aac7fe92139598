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

from maporl.programs.wire import ChatRequest
from maporl.types import Message


@dataclass(frozen=True)
class Place:
    """Where a request stands.

    Args:
        after: the id of the utterance with which its conversation goes on, or None for a new conversation.
        new: the messages that the agent has not seen in this conversation.
        history: ``continued`` or ``changed: WHY`` if the request holds something that the agent seems to have said, and
            otherwise None.
    """

    after: int | None
    new: tuple[Message, ...]
    history: str | None


@dataclass
class Histories:
    """The conversations of a dialogue, by what a client would send to go on with them."""

    _ends: dict[str, int] = field(default_factory=dict)
    """The utterance with which a conversation ended, by the digest of all its messages."""
    _known: dict[str, list[list[str]]] = field(default_factory=dict)
    """The conversations of each agent, as digests of their messages."""

    def place(self, request: ChatRequest) -> Place:
        """Return where ``request`` stands."""
        digests = _digests(request.messages)
        chain = _chain(request, digests)
        said = [number for number, message in enumerate(request.messages) if message["role"] == "assistant"]
        for number in reversed(said):
            if (after := self._ends.get(chain[number])) is not None:
                whole = number == said[-1]
                history = "continued" if whole else f"changed: {self._change(request, digests)}"
                return Place(after, request.messages[number + 1 :], history)
        return Place(None, request.messages, f"changed: {self._change(request, digests)}" if said else None)

    def add(self, request: ChatRequest, reply: Message, utterance: int) -> None:
        """Remember that ``request`` was answered with ``reply``, which is the text of ``utterance``."""
        messages = [*request.messages, reply]
        digests = _digests(messages)
        self._ends[_chain(request, digests)[-1]] = utterance
        self._known.setdefault(request.agent, []).append([_tools(request), *digests])

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
        what = "a message is missing before" if most < len(longest) and digests[number] in longest[most:] else "not"
        if what == "not":
            return f"message {number + 1}, of the role {role}, is not the one that the agent knows"
        return f"{what} message {number + 1}, of the role {role}"


def _common(first: Sequence[str], second: Sequence[str]) -> int:
    return next(
        (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def _tools(request: ChatRequest) -> str:
    return _digest(request.schemas)


def _digests(messages: Sequence[Message]) -> list[str]:
    return [_digest(message) for message in messages]


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
