"""The engine of tokens of a backend, which samples in the processes of the groups."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from maporl.backends.engine_pool import EnginePool
from trl_ext.sampling.engine import TokenEngine
from trl_ext.sampling.options import Sampled
from trl_ext.sampling.request import TokenRequest


class RemoteEngine(TokenEngine):
    """Samples from policies that are in groups.

    Args:
        pools: the processes that sample from each policy.
        send: sends the present weights of a policy to the processes that sample from it, as those of a version.
        continuous: whether a dialogue goes on before others have their answers (``cluster.batching``).
        between: whether weights change between the answers of a dialogue (``cluster.on_update``).
    """

    remote = True

    def __init__(
        self, pools: Mapping[str, EnginePool], send: Callable[[str, int], None], continuous: bool, between: bool
    ):
        self.pools, self.send, self.continuous, self.between = pools, send, continuous, between

    def submit(self, requests: Sequence[TokenRequest]) -> list[Future[Sampled]]:
        """Begin to sample one completion for each request.

        Raises:
            GroupFailed: processes died too often.
        """
        futures: dict[int, Future[Sampled]] = {}
        for pool in dict.fromkeys(self.pools.values()):
            numbers = [number for number, request in enumerate(requests) if self.pools[request.policy] is pool]
            futures |= zip(numbers, pool.ask([requests[number] for number in numbers]), strict=True)
        return [futures[number] for number in range(len(requests))]

    def sync(self, policy: str, version: int) -> None:
        """Send the present weights of ``policy`` to the processes that sample from it."""
        self.send(policy, version)

    def release(self) -> None:
        """Drop the KV caches of all processes."""
        for pool in dict.fromkeys(self.pools.values()):
            pool.release()
