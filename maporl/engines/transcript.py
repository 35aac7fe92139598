"""The token-exact transcript of one agent in one dialogue: what it heard and said, as ids that only ever grow."""

from dataclasses import dataclass, field

from maporl.types import Dialogue, Message, Utterance
from trl_ext.chat import Tokenizer, encode_continuation, encode_prompt


@dataclass
class Transcript:
    """``ids`` of the whole conversation, ``own`` true where the agent sampled, ``spans`` [start, end) per utterance;
    ``closed`` says which of them ended by themselves, ``ended`` whether the last one did. ``messages`` is the same as text,
    for engines that keep no tokens."""

    ids: list[int] = field(default_factory=list)
    own: list[bool] = field(default_factory=list)
    spans: dict[int, tuple[int, int]] = field(default_factory=dict)
    ended: bool = True
    closed: dict[int, bool] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)

    def hear(self, messages: list[Message], tokenizer: Tokenizer, stop_ids: frozenset[int]) -> list[int]:
        """Append ``messages`` and the opening of the agent's next answer; returns the prompt: everything so far."""
        if self.ids:
            new = encode_continuation(tokenizer, messages, self.ended, stop_ids)
        else:
            new = encode_prompt(tokenizer, messages)
        self.ids += new
        self.own += [False] * len(new)
        return list(self.ids)

    def say(self, utterance: int, ids: list[int], ended: bool) -> None:
        """Append what was sampled, as it was sampled."""
        self.spans[utterance] = (len(self.ids), len(self.ids) + len(ids))
        self.ids += ids
        self.own += [True] * len(ids)
        self.ended = self.closed[utterance] = ended

    def after(self, said: list[Utterance]) -> "Transcript":
        """A copy as it was after these utterances, the first of those it holds."""
        messages = [m for u in said for m in (*u.messages, {"role": "assistant", "content": u.text})]
        if (last := said[-1].id) not in self.spans:  # an engine that keeps no tokens
            return Transcript(messages=messages)
        end = self.spans[last][1]
        closed = {u.id: self.closed[u.id] for u in said}
        spans = {u: self.spans[u] for u in closed}
        return Transcript(self.ids[:end], self.own[:end], spans, closed[last], closed, messages)


def conversations(
    dialogue: Dialogue, agent: str, policy: str, tokenizer: Tokenizer, stop_ids: frozenset[int]
) -> list[tuple[list[int], list[bool]]]:
    """(ids, own) of each conversation that ``agent`` would have had if it had said what it says with these tokens, each
    closed by EOS: the one it goes on with, and one for every answer it was asked for afresh.

    ``own`` is true on the words of ``policy``. For supervised training on words that somebody else may have chosen.
    """
    said = [u for u in dialogue.utterances if u.agent == agent]
    going_on = [u for u in said if not u.fresh]
    pieces = ([going_on] if going_on else []) + [[u] for u in said if u.fresh and u.answers]
    return [_spoken(piece, policy, tokenizer, stop_ids) for piece in pieces]


def _spoken(
    said: list[Utterance], policy: str, tokenizer: Tokenizer, stop_ids: frozenset[int]
) -> tuple[list[int], list[bool]]:
    transcript = Transcript()
    for utterance in said:
        transcript.hear(utterance.messages, tokenizer, stop_ids or frozenset([tokenizer.eos_token_id]))
        words = [*tokenizer.encode(utterance.text, add_special_tokens=False), tokenizer.eos_token_id]
        transcript.say(utterance.id, words, ended=True)
        if utterance.policy != policy:
            transcript.own[-len(words) :] = [False] * len(words)
    return transcript.ids, transcript.own
