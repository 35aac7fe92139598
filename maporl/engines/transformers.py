"""The default engine: the team's own models, token-exact transcripts, one batch for all agents of one base."""

from collections.abc import Mapping
from typing import Literal

from peft import PeftModel

from maporl.engines.base import Engine, Reply, Request
from maporl.engines.build import EngineSetup
from maporl.team.team import Policy
from maporl.types import Stop
from trl_ext.kv_cache import KVCache
from trl_ext.lora_merge import merged, merges
from trl_ext.sampling import Sampled, Sampling, sample


class TransformersEngine(Engine):
    """Answers with the team's own models.

    What was read of a conversation is kept between its turns, where the model allows it (``keep_states``), until :meth:`sync`
    or :meth:`release`.

    ``adapters``: how LoRA policies of one base answer. ``mixed``: in one batch, each row through its own adapter; best where a
    step takes as long for many rows as for few (GPUs). ``merged``: one after the other, each added into the weights meanwhile;
    best where it does not (CPUs). ``plain``: one after the other. ``auto``: by the device.

    Args:
        policies: the team's policies by name.
        max_new_tokens, batch_size, batch_tokens: see :class:`trl_ext.sampling.Sampling`.
    """

    def __init__(
        self,
        policies: Mapping[str, Policy],
        max_new_tokens: int,
        batch_size: int,
        batch_tokens: int | None = None,
        keep_states: bool = True,
        adapters: Literal["auto", "mixed", "merged", "plain"] = "auto",
    ):
        self.policies, self.max_new_tokens = policies, max_new_tokens
        self.batch_size, self.batch_tokens, self.adapters = batch_size, batch_tokens, adapters
        self.kv_cache: KVCache | None = KVCache() if keep_states else None

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
        if self.kv_cache is not None:
            self.kv_cache.clear()

    def _group(self, policy: Policy) -> tuple:
        """Policies of one group answer in one batch."""
        if self._how(policy) == "mixed":
            return (id(policy.model), policy.stop_ids, policy.tokenizer.pad_token_id)
        return (policy.name,)

    def _how(self, policy: Policy) -> str:
        on_cpu = next(policy.model.parameters()).device.type == "cpu"
        wanted = ("merged" if on_cpu else "mixed") if self.adapters == "auto" else self.adapters
        return wanted if merges(policy.model, policy.adapter) else "plain"

    def _speak(self, requests: list[Request], temperature: float) -> list[Reply]:
        speaking = [self.policies[r.policy] for r in requests]
        known = [len(r.transcript.ids) for r in requests]
        prompts = [
            r.transcript.hear(r.ask.messages, p.tokenizer, p.stop_ids) for r, p in zip(requests, speaking, strict=True)
        ]
        for request, policy, ids in zip(requests, speaking, prompts, strict=True):
            policy.voice.check_length(len(ids), self.max_new_tokens, request.label)
        first = speaking[0]
        sampling = Sampling(
            self.max_new_tokens, temperature, first.stop_ids, self.batch_size, batch_tokens=self.batch_tokens
        )
        given = [r.rng_key for r in requests]
        keys = None if None in given else [key for key in given if key is not None]
        mixed = len({p.name for p in speaking}) > 1
        merge = self._how(first) == "merged" and isinstance(first.model, PeftModel)
        with merged(first.model, str(first.adapter)) if merge else first.active() as model:  # type: ignore[arg-type]
            answers = sample(
                first.model if mixed else model,
                prompts,
                first.tokenizer.pad_token_id,
                sampling,
                keys,
                [str(p.adapter) for p in speaking] if mixed else None,
                self.kv_cache,
                known,
                owners=[p.name for p in speaking],
            )
        return [reply_of(*place) for place in zip(requests, speaking, prompts, answers, strict=True)]


def reply_of(request: Request, policy: Policy, prompt: list[int], answer: Sampled) -> Reply:
    """What was sampled, as an engine replies; the transcript takes it in."""
    ended = answer.ids[-1] in policy.stop_ids
    request.transcript.say(request.utterance, answer.ids, ended)
    text = policy.tokenizer.decode(answer.ids, skip_special_tokens=True).strip()
    return Reply(text, Stop.EOS if ended else Stop.LENGTH, prompt, answer.ids, answer.logprobs)


def build(setup: EngineSetup) -> TransformersEngine:
    """The engine of :data:`maporl.engines.ENGINES`."""
    sampling = setup.sampling
    return TransformersEngine(
        setup.policies,
        sampling.response_length,
        sampling.local_rollout_forward_batch_size,
        sampling.max_tokens_per_generate,
        sampling.keep_states,
    )
