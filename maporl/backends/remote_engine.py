"""The engine of a backend: it reads and writes text here, and samples in the processes of the groups."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace

from maporl.backends.engine_pool import Answer, EnginePool
from maporl.engines.base import Engine, Pending, Reply, Request
from maporl.engines.transformers import reply_of, token_request
from maporl.team.agents import Policy
from trl_ext.ppo.options import Decoding
from trl_ext.sampling.request import TokenRequest


class RemoteEngine(Engine):
    """Answers for agents whose policies are in groups.

    Args:
        policies: the policies, of which only the text sides are used, by name.
        pools: the processes that sample from each policy.
        max_new_tokens: the most tokens of an answer.
        send: sends the present weights of a policy to the processes that sample from it, as those of a version.
        continuous: whether a dialogue goes on before others have their answers (``cluster.batching``).
        between: whether weights change between the answers of a dialogue (``cluster.on_update``).
    """

    remote = True

    def __init__(
        self,
        policies: Mapping[str, Policy],
        pools: Mapping[str, EnginePool],
        max_new_tokens: int,
        send: Callable[[str, int], None],
        continuous: bool,
        between: bool,
    ):
        self.policies, self.pools, self.max_new_tokens, self.send = policies, pools, max_new_tokens, send
        self.continuous, self.between = continuous, between

    def generate(self, requests: list[Request], decoding: Decoding) -> list[Reply]:
        """Return one reply for each request, in order.

        Raises:
            PromptTooLong: a prompt and its completion do not fit the model's context.
            GroupFailed: processes died too often.
        """
        return [pending.reply() for pending in self.submit(requests, decoding)]

    def submit(self, requests: list[Request], decoding: Decoding) -> list[Pending]:
        """Begin to answer, and return one pending answer for each request, in order."""
        asked = [token_request(r, self.policies[r.policy].voice, decoding, self.max_new_tokens) for r in requests]
        answers: dict[int, Future[Answer]] = {}
        for pool in dict.fromkeys(self.pools.values()):
            numbers = [number for number, tokens in enumerate(asked) if self.pools[tokens.policy] is pool]
            answers |= zip(numbers, pool.ask([asked[number] for number in numbers]), strict=True)
        return [self._pending(answers[n], requests[n], asked[n]) for n in range(len(asked))]

    def _pending(self, answer: Future[Answer], request: Request, asked: TokenRequest) -> Pending:
        def read(answered: Answer) -> Reply:
            reply = reply_of(request, self.policies[asked.policy].voice, asked, answered.sampled)
            return replace(reply, version=answered.version)

        return Pending(answer, read)

    def sync(self, policy: str) -> None:
        """Send the present weights of ``policy`` to the processes that sample from it."""
        self.send(policy, self.version)

    def release(self) -> None:
        """Drop the KV caches of all processes."""
        for pool in dict.fromkeys(self.pools.values()):
            pool.release()
