"""The engine of a backend: it reads and writes text here, and samples in the processes of the groups."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future

from maporl.backends.engine_pool import EnginePool
from maporl.engines.base import Engine, Pending, Reply, Request
from maporl.engines.token_sampler import TokenRow
from maporl.engines.transformers import reply_of, token_row
from maporl.team.agents import Policy
from trl_ext.ppo_options import Decoding
from trl_ext.sampling_options import Sampled


class RemoteEngine(Engine):
    """Answers for agents whose policies are in groups.

    Args:
        policies: the text sides of the policies, by name.
        pools: the processes that sample from each policy.
        max_new_tokens: the most tokens of an answer.
        send: sends the present weights of a policy to the processes that sample from it.
        continuous: whether a dialogue goes on before others have their answers (``cluster.batching``).
    """

    remote = True

    def __init__(
        self,
        policies: Mapping[str, Policy],
        pools: Mapping[str, EnginePool],
        max_new_tokens: int,
        send: Callable[[str], None],
        continuous: bool,
    ):
        self.policies, self.pools, self.max_new_tokens, self.send = policies, pools, max_new_tokens, send
        self.continuous = continuous

    def generate(self, requests: list[Request], decoding: Decoding) -> list[Reply]:
        """Return one reply for each request, in order.

        Raises:
            PromptTooLong: a prompt and its completion do not fit the model's context.
            GroupFailed: processes died too often.
        """
        return [pending.reply() for pending in self.submit(requests, decoding)]

    def submit(self, requests: list[Request], decoding: Decoding) -> list[Pending]:
        """Begin to answer, and return one pending answer for each request, in order."""
        rows = [token_row(r, self.policies[r.policy], decoding, self.max_new_tokens) for r in requests]
        answers: dict[int, Future[Sampled]] = {}
        for pool in dict.fromkeys(self.pools.values()):
            own = [number for number, row in enumerate(rows) if self.pools[row.policy] is pool]
            answers |= zip(own, pool.ask([rows[number] for number in own]), strict=True)
        return [self._pending(answers[n], requests[n], rows[n]) for n in range(len(rows))]

    def _pending(self, answer: Future[Sampled], request: Request, row: TokenRow) -> Pending:
        def read(found: Sampled) -> Reply:
            return reply_of(request, self.policies[row.policy], row.prompt, found)

        return Pending(answer, read)

    def sync(self, policy: str) -> None:
        """Send the present weights of ``policy`` to the processes that sample from it."""
        self.send(policy)

    def release(self) -> None:
        """Drop the KV caches of all processes."""
        for pool in dict.fromkeys(self.pools.values()):
            pool.release()
