"""The engine of tokens of an address: completions join a batch that is being sampled, and leave it when they have
ended, whoever asks for them and whoever else waits.

Data flow: threads that play dialogues -> :meth:`ContinuousWeights.submit` -> one thread, which samples a token of every
completion in progress, again and again -> futures.
"""

import logging
import queue
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import ExitStack, suppress
from typing import Any

import torch

from trl_ext.models.forward import base_of
from trl_ext.models.lora_sampling import mixed
from trl_ext.process.devices import free_bytes
from trl_ext.process.waits import Threads, taken
from trl_ext.sampling.batch import Batch, Row
from trl_ext.sampling.engine import TokenEngine
from trl_ext.sampling.kv_cache import KVCache
from trl_ext.sampling.options import Sampled
from trl_ext.sampling.own_weights import OwnWeights, Weights
from trl_ext.sampling.packed_weights import packed
from trl_ext.sampling.request import TokenRequest
from trl_ext.sampling.sample import rows_may_join, rows_of

logger = logging.getLogger(__name__)
KEPT = 0.25
"""The most KV cache of conversations that have ended which is kept for a base, as a share of its weights' memory."""
FEWEST = 16
"""The fewest tokens at the beginning of a prompt that are taken from the kept KV cache, and not read."""
SAMPLES = "samples for the address"
"""The name of the thread that samples."""
Asked = tuple[TokenRequest, "Future[Sampled]"]


class ContinuousWeights(TokenEngine):
    """Samples from the models of ``policies``, in one batch for all adapters of one base, which takes in new requests
    at every token. What a prompt shares with an earlier conversation, such as the system prompt or all messages so far,
    is not read again.

    A model whose rows cannot join others, because it keeps another state than plain keys and values, answers those that
    wait together.

    Args:
        policies: the policies by name.
        batch_size: the most completions in progress of one base (:class:`trl_ext.sampling.own_weights.OwnWeights`).
        thread: the one that samples, for as long as the process lives. Give that which has loaded the weights: OpenMP
            keeps threads for each thread that has computed, and lets all of them sleep between two operations once
            there are more than cores. A step then takes up to twice as long.
    """

    continuous = True

    def __init__(self, policies: Mapping[str, Weights], batch_size: int | None = None, thread: Threads | None = None):
        self.weights = OwnWeights(policies, batch_size, keep_states=False)
        self._new: queue.SimpleQueue[Asked] = queue.SimpleQueue()
        self._groups: dict[tuple[str, Any], _Group] = {}
        self._group_of: dict[str, _Group] = {}
        self._watched: dict[Future[Sampled], Callable[[list[int]], None]] = {}
        (thread or Threads(1, SAMPLES, for_all=True)).submit(self._work)

    def submit(self, requests: Sequence[TokenRequest]) -> list["Future[Sampled]"]:
        """Begin to sample. A future that is cancelled leaves its batch."""
        asked: list[Asked] = [(request, Future()) for request in requests]
        for one in asked:
            self._new.put(one)
        return [future for _, future in asked]

    def watch(self, future: "Future[Sampled]", told: Callable[[list[int]], None]) -> None:
        """Tell the tokens of a completion so far whenever there are more, in the thread that samples."""
        self._watched[future] = told
        future.add_done_callback(lambda done: self._watched.pop(done, None))

    @property
    def running(self) -> int:
        """The number of completions that are being sampled."""
        return sum(len(group.running) for group in list(self._groups.values()))

    def _work(self) -> None:
        """Sample for as long as the process lives."""
        with torch.no_grad():
            while True:
                if not any(group.busy for group in self._groups.values()):
                    self._accept(taken(self._new))
                with suppress(queue.Empty):
                    while True:
                        self._accept(self._new.get_nowait())
                for group in self._groups.values():
                    try:
                        group.advance()
                        for row, future in group.running if self._watched else ():
                            self._watched.get(future, _nobody)(row.ids)
                    except Exception as error:
                        logger.exception("sampling failed; the requests in progress are answered with an error")
                        group.fail(error)

    def _accept(self, asked: Asked) -> None:
        name = asked[0].policy
        try:
            if name not in self._group_of:
                policy = self.weights.policies[name]
                how, key = self.weights.group(policy)
                if (how, key) not in self._groups:
                    self._groups[how, key] = _Group(self.weights, policy, how)
                self._group_of[name] = self._groups[how, key]
            self._group_of[name].waiting.append(asked)
        except Exception as error:  # the thread goes on for the others
            logger.exception("policy %r cannot be sampled from", name)
            _fail(asked[1], error)


class _Group:
    """The completions of policies that are sampled in one batch: one policy, or several adapters of one base."""

    def __init__(self, weights: OwnWeights, policy: Weights, how: str):
        self.weights, self.policy, self.how = weights, policy, how
        self.waiting: deque[Asked] = deque()
        self.running: list[tuple[Row, Future[Sampled]]] = []
        self.batch: Batch | None = None
        self.joins = rows_may_join(base_of(policy.model))
        most = int(KEPT * sum(parameter.nbytes for parameter in policy.model.parameters()))
        free = free_bytes(next(policy.model.parameters()).device)
        self.kept = KVCache(most if free is None else min(most, free // 8))
        self.adapters: dict[str, str] | None = None
        self.choose: Any = None
        self._held = ExitStack()
        if how == "mixed":
            members = [one for one in weights.policies.values() if weights.group(one) == weights.group(policy)]
            self.adapters = {one.name: str(one.adapter) for one in members}
            self.choose = self._held.enter_context(mixed(policy.model, self.adapters.values()))
        self._held.enter_context(packed(base_of(policy.model)))

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def advance(self) -> None:
        """Take in what waits, and sample a token of every completion."""
        if not self.busy:
            return
        if not self.joins:
            self._answer_together()
            return
        for row, future in self.running:
            row.ended = row.ended or future.cancelled()
        with self.weights.opened(self.policy, self.how) as model:
            self._take_in(model)
            if self.batch is not None and not self.batch.advance():
                self.batch = None
        for row, future in self.running:
            if row.ended:
                _settle(future, row.sampled)
        self.running = [(row, future) for row, future in self.running if not row.ended]

    def fail(self, error: Exception) -> None:
        """Answer all that is asked with an error."""
        asked = [future for _, future in self.running] + [future for _, future in self.waiting]
        self.running, self.batch = [], None
        self.waiting.clear()
        for future in asked:
            _fail(future, error)

    def _take_in(self, model: Any) -> None:
        """Read the prompts of those that wait, as far as there is room, and let them join the batch."""
        most = self.weights.rows(self.policy.model, [request for request, _ in self.waiting]) if self.waiting else 0
        asked = [self.waiting.popleft() for _ in range(min(len(self.waiting), most - len(self.running)))]
        asked = [one for one in asked if not one[1].cancelled()]
        if not asked:
            return
        requests = [request for request, _ in asked]
        tokenizers = {request.policy: self.weights.policies[request.policy].tokenizer for request in requests}
        rows = rows_of(requests, base_of(model), tokenizers, self.adapters)
        self.running += [(row, future) for row, (_, future) in zip(rows, asked, strict=True)]
        begun = [row for row in rows if not row.ended]  # one whose grammar cannot be read has ended
        if not begun:
            return
        for row in begun:
            row.past = self.kept.beginning(row.name(row.read_ids), FEWEST)
        new = Batch(model, begun, self.kept, self.choose, "everywhere")
        new.begin()
        if self.batch is None:
            self.batch = new
        else:
            self.batch.join(new)

    def _answer_together(self) -> None:
        asked = [(request, future) for request, future in self.waiting if not future.cancelled()]
        self.waiting.clear()
        self.running = [(Row(request, None), future) for request, future in asked]  # for :meth:`fail`
        sampled = self.weights.together([request for request, _ in asked], self.how) if asked else []
        self.running = []
        for (_, future), one in zip(asked, sampled, strict=True):
            _settle(future, one)


def _fail(future: "Future[Sampled]", error: Exception) -> None:
    with suppress(InvalidStateError):  # whoever asked has gone
        future.set_exception(error)


def _nobody(ids: list[int]) -> None:
    pass


def _settle(future: "Future[Sampled]", sampled: Sampled) -> None:
    with suppress(InvalidStateError):  # whoever asked has gone
        future.set_result(sampled)
