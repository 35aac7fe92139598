"""The token-exact transcript of one agent in one dialogue: what it heard and said, as ids that only ever grow."""

from dataclasses import dataclass, field

from maporl.types import Message
from trl_ext.chat import Tokenizer, encode_continuation, encode_prompt


@dataclass
class Transcript:
    """``ids`` of the whole conversation, ``own`` true where the agent sampled, ``spans`` [start, end) per utterance."""

    ids: list[int] = field(default_factory=list)
    own: list[bool] = field(default_factory=list)
    spans: dict[int, tuple[int, int]] = field(default_factory=dict)
    ended: bool = True

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
        self.ended = ended
