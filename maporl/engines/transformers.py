"""The default engine: Hugging Face ``generate``, one batched call per policy and step, token-exact transcripts."""

from maporl.agents import Policy
from maporl.engines.base import Reply, Request
from maporl.types import Stop
from trl_ext.generation import Sampling, generate


class TransformersEngine:
    """Answers with the team's own models.

    Args:
        policies: the team's policies by name.
        max_new_tokens, batch_size: see :class:`trl_ext.generation.Sampling`.
    """

    def __init__(self, policies: dict[str, Policy], max_new_tokens: int, batch_size: int):
        self.policies, self.max_new_tokens, self.batch_size = policies, max_new_tokens, batch_size

    def generate(self, requests: list[Request], temperature: float) -> list[Reply]:
        """Replies in the order of ``requests``; those of one policy are sampled together."""
        replies: list[Reply | None] = [None] * len(requests)
        for policy in dict.fromkeys(r.policy for r in requests):
            rows = [i for i, r in enumerate(requests) if r.policy == policy]
            answers = self._speak(self.policies[policy], [requests[i] for i in rows], temperature)
            for row, reply in zip(rows, answers, strict=True):
                replies[row] = reply
        return replies  # type: ignore[return-value]  # every request names a policy

    def sync(self, policy: str) -> None:
        """Nothing to do: the engine samples from the very weights that are trained."""

    def _speak(self, voice: Policy, requests: list[Request], temperature: float) -> list[Reply]:
        prompts = [r.transcript.hear(r.ask.messages, voice.tokenizer, voice.stop_ids) for r in requests]
        for request, ids in zip(requests, prompts, strict=True):
            voice.check_length(len(ids), self.max_new_tokens, request.label)
        sampling = Sampling(self.max_new_tokens, temperature, voice.stop_ids, self.batch_size)
        with voice.active() as model:
            answers = generate(model, prompts, voice.tokenizer.pad_token_id, sampling)
        replies = []
        for request, prompt, ids in zip(requests, prompts, answers, strict=True):
            ended = ids[-1] in voice.stop_ids
            request.transcript.say(request.utterance, ids, ended)
            text = voice.tokenizer.decode(ids, skip_special_tokens=True).strip()
            replies.append(Reply(text, Stop.EOS if ended else Stop.LENGTH, prompt, ids))
        return replies
