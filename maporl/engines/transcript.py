"""The token-exact transcript of one agent in one dialogue. Its ids are only ever appended to."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from maporl.environments.calls import CallFormat
from maporl.environments.turns import AgentTools
from maporl.types import Dialogue, Message, Utterance, has_calls
from trl_ext.chat.control_tokens import encode_words
from trl_ext.chat.encoding import Tokenizer, encode_continuation, encode_prompt, turn_end, with_names

if TYPE_CHECKING:  # it imports torch
    from maporl.team.agents import Policy


@dataclass
class Transcript:
    """A conversation as token ids.

    Args:
        ids: the token ids of the whole conversation.
        sampled_mask: for each id, whether the agent sampled it.
        spans: for each utterance id, the positions [start, end) of its tokens.
        ended: whether the last completion ended with a stop token.
        closed: for each utterance id, whether its completion ended with a stop token.
        messages: the conversation as messages, for engines that work on text.
        said: for each utterance id, the number of messages up to and including it.
        tools: the schemas of the tools that the chat template shows, or None.
    """

    ids: list[int] = field(default_factory=list)
    sampled_mask: list[bool] = field(default_factory=list)
    spans: dict[int, tuple[int, int]] = field(default_factory=dict)
    ended: bool = True
    closed: dict[int, bool] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    said: dict[int, int] = field(default_factory=dict)
    tools: list[dict[str, Any]] | None = None

    def add_messages(self, messages: list[Message], tokenizer: Tokenizer, stop_ids: frozenset[int]) -> list[int]:
        """Append ``messages`` and the opening of the agent's next message. Return the prompt, which is all ids so far.

        Raises:
            ChatError: the chat template does not show earlier assistant messages.
        """
        messages = with_names(tokenizer, messages)
        if self.ids:
            new = encode_continuation(tokenizer, messages, self.ids[-1] if self.ended else None, stop_ids)
        else:
            new = encode_prompt(tokenizer, messages, self.tools)
        self.ids += new
        self.sampled_mask += [False] * len(new)
        return list(self.ids)

    def add_completion(self, utterance: int, ids: list[int], ended: bool) -> None:
        """Append the sampled ids of an utterance. ``ended`` says whether they end with a stop token."""
        self.spans[utterance] = (len(self.ids), len(self.ids) + len(ids))
        self.ids += ids
        self.sampled_mask += [True] * len(ids)
        self.ended = self.closed[utterance] = ended

    def after(self, last: int) -> "Transcript":
        """Return a copy as it was after the utterance ``last`` of the conversation."""
        said = {u: number for u, number in self.said.items() if number <= self.said[last]}
        messages = self.messages[: said[last]]
        if last not in self.spans:  # the engine keeps no tokens
            return Transcript(messages=messages, said=said, tools=self.tools)
        end = self.spans[last][1]
        closed = {u: self.closed[u] for u in said}
        spans = {u: self.spans[u] for u in closed}
        mask = self.sampled_mask[:end]
        return Transcript(self.ids[:end], mask, spans, closed[last], closed, messages, said, self.tools)

    def add_words(self, utterance: int, text: str) -> None:
        """Append the text of an utterance to the messages."""
        self.messages.append({"role": "assistant", "content": text})
        self.said[utterance] = len(self.messages)


def taught_apart(last: Utterance) -> bool:
    """Return whether a conversation apart that ends with ``last`` is taught: an answer, or one of a program."""
    return last.answers or "program" in last.tags


def written_transcripts(
    dialogue: Dialogue,
    agent: str,
    policy: str,
    tokenizer: Tokenizer,
    stop_ids: frozenset[int],
    form: CallFormat | None = None,
    apart: Callable[[Utterance], bool] = taught_apart,
    brought: Callable[[tuple[dict[str, Any], ...]], CallFormat] | None = None,
) -> list[Transcript]:
    """Return the transcripts of the conversations of ``agent``. What ``policy`` said counts as sampled, once.

    This encodes the texts of the dialogue as if the agent had sampled them. Every utterance ends as the chat template
    ends an answer (:func:`trl_ext.chat.encoding.turn_end`). Supervised training uses it, because an oracle may have
    written the texts. The utterances of the agent's ongoing conversation form one conversation. Every answer that was
    asked for apart from it (``fresh``) forms another one, with the calls that led to it. ``form`` is the call format of
    an agent with tools, and ``brought`` returns that of tools which a program has brought. ``apart`` says of the last
    utterance of such a turn whether it forms one. What was refused is left out.
    """
    utterances = [u for u in dialogue.utterances if u.agent == agent and "refused" not in u.tags]
    ongoing = [u for u in utterances if not u.fresh]
    turns: dict[int, list[Utterance]] = {}
    for u in utterances:
        if u.fresh:
            turns.setdefault(u.turn, []).append(u)
    begun = {turn[-1].id: turn for turn in turns.values()}
    for turn in turns.values():
        if turn[0].after is not None:  # it goes on in the conversation of an earlier one
            turn[:0] = begun[turn[0].after]
    continued = {u.after for u in utterances}
    ends = [turn for turn in turns.values() if turn[-1].id not in continued and apart(turn[-1])]
    encoded: list[Transcript] = []
    taught = set[int]()
    for part in ([ongoing] if ongoing else []) + ends:
        shown = form is None and any(has_calls(u.messages) for u in part)  # calls of others
        used = brought(part[0].schemas) if brought is not None and (part[0].schemas or shown) else form
        encoded.append(_encoded(part, policy, tokenizer, stop_ids, used, taught))
        taught |= {u.id for u in part}
    return encoded


def supervised_rows(
    policy: "Policy",
    dialogues: Sequence[Dialogue],
    tools: Mapping[str, AgentTools],
    apart: Callable[[Utterance], bool] = taught_apart,
    formats: Mapping[str, Callable[[tuple[dict[str, Any], ...]], CallFormat]] | None = None,
) -> list[tuple[list[int], list[bool]]]:
    """Return the token ids of the conversations in which ``policy`` speaks (:func:`written_transcripts`), each with a
    mask of its own tokens.

    ``tools`` are the agents', and ``formats`` return the call format of each agent for tools of a program.
    """
    rows: list[Transcript] = []
    for dialogue in dialogues:
        for agent in policy.agents:
            form = tools[agent].format if agent in tools else None
            brought = (formats or {}).get(agent)
            voice = policy.tokenizer, policy.stop_ids
            rows += written_transcripts(dialogue, agent, policy.name, *voice, form, apart, brought)
    return [(written.ids, written.sampled_mask) for written in rows if any(written.sampled_mask)]


def _encoded(
    utterances: list[Utterance],
    policy: str,
    tokenizer: Tokenizer,
    stop_ids: frozenset[int],
    form: CallFormat | None,
    taught: Collection[int],
) -> Transcript:
    """Return the transcript of a conversation, with what ``policy`` said and is not ``taught`` elsewhere as sampled."""
    transcript = Transcript(tools=None if form is None else form.schemas())
    for utterance in utterances:
        messages = utterance.messages if form is None else form.heard(utterance.messages)
        transcript.add_messages(messages, tokenizer, stop_ids or frozenset([tokenizer.eos_token_id]))
        # only special tokens are text here: others, such as <think>, are words that the agent itself may say
        ids = [*encode_words(tokenizer, utterance.text, special=True), *turn_end(tokenizer).ids]
        transcript.add_completion(utterance.id, ids, ended=True)
        if utterance.policy != policy or utterance.id in taught:
            transcript.sampled_mask[-len(ids) :] = [False] * len(ids)
    return transcript
