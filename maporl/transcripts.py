"""The token-exact transcript of one agent in one dialogue: what it heard and said, as ids that only ever grow."""

from dataclasses import dataclass, field

from maporl.types import Dialogue, Message
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


def conversation(
    dialogue: Dialogue, agent: str, policy: str, tokenizer: Tokenizer, stop_ids: frozenset[int]
) -> tuple[list[int], list[bool]]:
    """(ids, own): what ``agent``'s transcript would be if it had said its answers with these tokens, each closed by EOS.

    ``own`` is true on the words of ``policy``. For supervised training on words that somebody else may have chosen.
    """
    transcript = Transcript()
    for utterance in (u for u in dialogue.answers() if u.agent == agent):
        transcript.hear(utterance.messages, tokenizer, stop_ids or frozenset([tokenizer.eos_token_id]))
        said = [*tokenizer.encode(utterance.text, add_special_tokens=False), tokenizer.eos_token_id]
        transcript.say(utterance.id, said, ended=True)
        if utterance.policy != policy:
            transcript.own[-len(said) :] = [False] * len(said)
    return transcript.ids, transcript.own
