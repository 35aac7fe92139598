"""The default engine: the team's own models, token-exact transcripts, one batch for all agents of one base."""

from typing import Literal

from peft import PeftModel

from maporl.agents import Policy
from maporl.engines.base import Reply, Request
from maporl.types import Stop
from trl_ext.generation import Sampled, Sampling, sample
from trl_ext.merging import merged, merges
from trl_ext.states import States


class TransformersEngine:
    """Answers with the team's own models.

    What was read of a conversation is kept between its turns, where the model allows it (``keep_states``), until :meth:`sync`
    or :meth:`release`.

    ``adapters``: how LoRA policies of one base answer. ``mixed``: in one batch, each row through its own adapter; best where a
    step takes as long for many rows as for few (GPUs). ``merged``: one after the other, each added into the weights meanwhile;
    best where it does not (CPUs). ``plain``: one after the other. ``auto``: by the device.

    Args:
        policies: the team's policies by name.
        max_new_tokens, batch_size, batch_tokens: see :class:`trl_ext.generation.Sampling`.
    """

    def __init__(
        self,
        policies: dict[str, Policy],
        max_new_tokens: int,
        batch_size: int,
        batch_tokens: int | None = None,
        keep_states: bool = True,
        adapters: Literal["auto", "mixed", "merged", "plain"] = "auto",
    ):
        self.policies, self.max_new_tokens = policies, max_new_tokens
        self.batch_size, self.batch_tokens, self.adapters = batch_size, batch_tokens, adapters
        self.states: States | None = States() if keep_states else None

    def generate(self, requests: list[Request], temperature: float) -> list[Reply]:
        """Replies in the order of ``requests``."""
        replies: list[Reply | None] = [None] * len(requests)
        group_of = {name: self._group(self.policies[name]) for name in {r.policy for r in requests}}
        groups: dict[tuple, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(group_of[request.policy], []).append(i)
        for rows in groups.values():
            for row, reply in zip(rows, self._speak([requests[i] for i in rows], temperature), strict=True):
                replies[row] = reply
        return replies  # type: ignore[return-value]  # every request names a policy

    def sync(self, policy: str) -> None:
        """The engine samples from the very weights that are trained; what was read with earlier ones is dropped."""
        self.release()

    def release(self) -> None:
        """Drop what was read of conversations; they are read again if they go on."""
        if self.states is not None:
            self.states.clear()

    def _group(self, voice: Policy) -> tuple:
        """Policies of one group answer in one batch."""
        if self._how(voice) == "mixed":
            return (id(voice.model), voice.stop_ids, voice.tokenizer.pad_token_id)
        return (voice.name,)

    def _how(self, voice: Policy) -> str:
        on_cpu = next(voice.model.parameters()).device.type == "cpu"
        wanted = ("merged" if on_cpu else "mixed") if self.adapters == "auto" else self.adapters
        return wanted if merges(voice.model, voice.adapter) else "plain"

    def _speak(self, requests: list[Request], temperature: float) -> list[Reply]:
        voices = [self.policies[r.policy] for r in requests]
        known = [len(r.transcript.ids) for r in requests]
        prompts = [
            r.transcript.hear(r.ask.messages, v.tokenizer, v.stop_ids) for r, v in zip(requests, voices, strict=True)
        ]
        for request, voice, ids in zip(requests, voices, prompts, strict=True):
            voice.check_length(len(ids), self.max_new_tokens, request.label)
        first = voices[0]
        sampling = Sampling(
            self.max_new_tokens, temperature, first.stop_ids, self.batch_size, batch_tokens=self.batch_tokens
        )
        draws = [r.draw for r in requests]
        keys = None if None in draws else [d for d in draws if d is not None]
        mixed = len({v.name for v in voices}) > 1
        merge = self._how(first) == "merged" and isinstance(first.model, PeftModel)
        with merged(first.model, str(first.adapter)) if merge else first.active() as model:  # type: ignore[arg-type]
            answers = sample(
                first.model if mixed else model,
                prompts,
                first.tokenizer.pad_token_id,
                sampling,
                keys,
                [str(v.adapter) for v in voices] if mixed else None,
                self.states,
                known,
                owners=[v.name for v in voices],
            )
        return [reply_of(*place) for place in zip(requests, voices, prompts, answers, strict=True)]


def reply_of(request: Request, voice: Policy, prompt: list[int], answer: Sampled) -> Reply:
    """What was sampled, as an engine replies; the transcript takes it in."""
    ended = answer.ids[-1] in voice.stop_ids
    request.transcript.say(request.utterance, answer.ids, ended)
    text = voice.tokenizer.decode(answer.ids, skip_special_tokens=True).strip()
    return Reply(text, Stop.EOS if ended else Stop.LENGTH, prompt, answer.ids, answer.logprobs)
