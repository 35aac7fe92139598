"""Updates of recipes on random dialogues, for tests of what must not change a credit or an advantage.

Agents say random words that fit what they are asked. Critics and references have random numbers in place of what tiny
models would say, because those hardly differ. Processes that train together are threads of this process
(:class:`Processes`): the trainer's steps on 2 or 4 processes, in a moment. Threads take turns: one works until it must
wait for the others. What crosses between processes is pickled. What ``torch.distributed`` itself does is missing, which
``tests/system/test_distributed.py`` tests with real processes.
"""

import copy
import hashlib
import pickle
import random
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from perturbed_training import words
from scripted_training import one_minibatch, recipe_values, scripted_trainer

from maporl.engines.base import Request
from maporl.training.samples import TeamUpdateBatch, names_of
from maporl.training.trainer import MultiAgentPPOTrainer
from maporl.types import Dialogue, Utterance
from maporl.verifier.source import LearningVerifier
from trl_ext.process import distributed

QUESTIONS = 4
Place = tuple[int, int, str, int, int]
"""Where something was said: the number of the question and of the dialogue, the agent, and its turn and part of the
turn."""
Script = Callable[[Request], str]
Trained = tuple[str, list[float], list[float], float]


@dataclass
class Found:
    """What an update credits every utterance with, and what policies are trained on.

    Args:
        said: by place, what the policy sampled.
        rewards: by place, the utterance's rewards, of which one is its credit.
        rows: by place, the policy that is trained on it, the advantage and the return of each token, and the weight in
            the loss. None: no policy is. Copies of an utterance are one row.
        dialogues: the dialogues of all processes.
    """

    said: dict[Place, list[int]] = field(default_factory=dict)
    rewards: dict[Place, dict[str, float]] = field(default_factory=dict)
    rows: dict[Place, Trained | None] = field(default_factory=dict)
    dialogues: list[Dialogue] = field(default_factory=list)

    def teaches(self) -> bool:
        """Whether some advantage is not 0."""
        return any(row is not None and any(row[1]) for row in self.rows.values())


def number(*key: Hashable) -> float:
    """A number in [-1, 1] that depends on a key alone."""
    digest = hashlib.blake2b(repr(key).encode("utf-8", "surrogatepass"), digest_size=6).digest()
    return 2 * int.from_bytes(digest, "big") / 2**48 - 1


def place_of(dialogue: Dialogue, u: Utterance) -> Place:
    return (dialogue.prompt, u.tags.get("rollout before", dialogue.rollout), u.agent, u.turn, u.part)


def random_words(seed: int) -> Script:
    """A script of random words. They depend on the place of the request and on nothing else."""

    def script(request: Request) -> str:
        asked = copy.copy(request)
        part = 0 if request.ask.continues is None else 1 + request.ask.continues
        place = request.rng_key[:-1] if request.rng_key is not None else (str(request.transcript.messages),)
        asked.rng_key = (seed, *place, request.ask.agent, request.turn, part)
        return words(asked)

    return script


def values_of(name: str, folder: Path, questions: int = QUESTIONS) -> dict[str, Any]:
    """The values of a recipe's tiny version for ``questions`` questions."""
    values = recipe_values(name, folder / "run", training={"save_steps": 0})
    values["training"]["per_device_train_batch_size"] = questions
    one_minibatch(values)  # so that four processes can share the questions
    if (turns := values.get("schedule", {}).get("round_robin")) is not None:
        turns["agents"] = list(values["agents"])  # by default the order of declaration
    return values | {"evaluation": {"questions": 0}}


def guess(trainer: MultiAgentPPOTrainer, key: Callable[[Any], Hashable]) -> None:
    """Let critics and references of a trainer say random numbers, which depend on ``key(sample)`` and on the token.

    A verifier that has learned nothing yet gets random weights, because it gives every answer the same score. So do
    policies that teach, by their names, because the order in which they are declared would decide what they think.
    """
    for name, policy in trainer.team.policies.items() if trainer.distillation is not None else ():
        own = torch.Generator().manual_seed(sum(map(ord, name)))
        for weights in policy.model.parameters():
            torch.nn.init.normal_(weights, std=0.2, generator=own)
    for source in trainer.player.scorer.sources.values():
        if isinstance(source, LearningVerifier):
            torch.nn.init.normal_(
                source.learning.verifier.model.score.weight, generator=torch.Generator().manual_seed(0)
            )
    ask = trainer.learning.token_batches

    def token_batches(samples: Any, critic_only: Any) -> Any:
        batches, metrics = ask(samples, critic_only)
        for policy, batch in batches.items():
            for row, index in enumerate(batch.sample.tolist()):
                own = key(samples[policy][index])
                for place, column in enumerate(batch.sampled_mask[row].nonzero().flatten().tolist()):
                    if trainer.learners[policy].critic.gives_values:
                        batch.values[row, column] = number("value", own, place)
                    batch.ref_logprobs[row, column] = batch.old_logprobs[row, column] + number("kl", own, place)
        return batches, metrics

    trainer.learning.token_batches = token_batches


def by_name(sample: Any) -> Hashable:
    """Where a sample was said, and what it says.

    Copies of an utterance, which stand in several dialogues, have no number of theirs.
    """
    own, columns = sample.utterance, sample.columns
    first = 0 if own.sample is not None else own.tags.get("rollout before", columns.values["rollout"])
    return (columns.values["prompt"], first, own.agent, own.turn, own.part, tuple(sample.response_ids))


def by_words(sample: Any) -> Hashable:
    """What a sample's policy read and said."""
    return (tuple(sample.prompt_ids), tuple(sample.response_ids))


def update(
    trainer: MultiAgentPPOTrainer, change: Callable[[TeamUpdateBatch], None] = lambda batch: None
) -> TeamUpdateBatch:
    """Play, ``change`` what was played, score it and assign advantages."""
    batch = trainer.collected()
    change(batch)
    return trainer.advantage(trainer.score(batch))


def found_in(batches: list[TeamUpdateBatch]) -> Found:
    """What the updates of all processes found."""
    found = Found()
    for batch in batches:
        trained: dict[tuple, Trained] = {}
        for policy, tokens in batch.token_batches.items():
            for i, index in enumerate(tokens.sample.tolist()):
                mask, weight = tokens.sampled_mask[i], float(tokens.weight[i])
                numbers = tokens.advantages[i][mask].tolist(), tokens.returns[i][mask].tolist()
                trained[batch.samples[policy][index].columns.name] = (policy, *numbers, weight)
        found.dialogues += batch.dialogues
        for dialogue in batch.dialogues:
            for u in dialogue.utterances:
                place = place_of(dialogue, u)
                found.said[place] = u.response_ids
                found.rewards[place] = u.rewards
                found.rows[place] = trained.get(names_of(dialogue)[u.id])
    return found


def one_update(
    values: dict[str, Any],
    script: Script,
    change: Callable[[TeamUpdateBatch], None] = lambda batch: None,
    key: Callable[[Any], Hashable] = by_name,
) -> Found:
    trainer = scripted_trainer(copy.deepcopy(values), script)
    guess(trainer, key)
    return found_in([update(trainer, change)])


def telling(values: dict[str, Any], seed: int) -> tuple[Script, Found]:
    """The first random words, from ``seed`` on, from which somebody learns, and what an update with them finds.

    Where nobody does, as where all dialogues fail, everything is 0, and nothing could change it.
    """
    for own in range(seed, seed + 8):
        found = one_update(values, random_words(own))
        if found.teaches():
            return random_words(own), found
    raise AssertionError(f"nobody learns from the random words of the seeds {seed} to {seed + 7}")


def update_of(count: int, values: dict[str, Any], script: Script) -> Found:
    """What an update of ``count`` processes finds, which share the questions."""
    processes = Processes(count)
    own = copy.deepcopy(values)
    own["training"]["per_device_train_batch_size"] //= count
    with processes.together():
        trainers = [scripted_trainer(copy.deepcopy(own), script) for _ in range(count)]
        for trainer in trainers:
            guess(trainer, by_name)
        return found_in(processes.run([lambda t=t: update(t) for t in trainers]))


def shuffled(seed: int) -> Callable[[TeamUpdateBatch], None]:
    return lambda batch: random.Random(seed).shuffle(batch.dialogues)


def renumbered(seed: int) -> Callable[[TeamUpdateBatch], None]:
    """Give the dialogues of each question their numbers in a random order. :func:`place_of` then finds the old ones."""

    def change(batch: TeamUpdateBatch) -> None:
        rng = random.Random(seed)
        by_question: dict[int, list[Dialogue]] = {}
        for dialogue in batch.dialogues:
            by_question.setdefault(dialogue.prompt, []).append(dialogue)
        for own in by_question.values():
            numbers = [dialogue.rollout for dialogue in own]
            rng.shuffle(numbers)
            for dialogue, new in zip(own, numbers, strict=True):
                for u in dialogue.utterances:
                    u.tags["rollout before"] = dialogue.rollout
                for ablation in dialogue.ablations:
                    ablation.rollout = new
                dialogue.rollout = new

    return change


def alike_words(seed: int, turn: int, tossed: int) -> Script:
    """A script that what agents are shown decides, so that dialogues of a question are often alike.

    In one turn a coin decides too, in dialogues whose number is less than ``tossed``.
    """

    def script(request: Request) -> str:
        asked = copy.copy(request)
        place = request.rng_key or (0, 0, 0, 0, 0)
        heads = place[-2] < tossed and random.Random(f"{seed}/{place[-3]}/{place[-2]}").random() < 0.4
        coin = heads and request.turn == turn
        asked.rng_key = (seed, place[-3], request.ask.agent, str(request.transcript.messages), coin)
        return words(asked)

    return script


Result = TypeVar("Result")
_OWN = threading.local()


class Processes:
    """``count`` processes. What is built outside of :meth:`run` is built as the main process builds it."""

    def __init__(self, count: int):
        self.count = count
        self._turn = threading.Lock()
        self._met = threading.Barrier(count)
        self._values: list[bytes] = [b""] * count

    @contextmanager
    def together(self) -> Iterator[None]:
        """Let this library take the threads of :meth:`run` for processes."""
        names = {
            "size": lambda: self.count,
            "rank": self._rank,
            "is_main": lambda: self._rank() == 0,
            "all_gather": self._gathered,
            "to_main": lambda items: (
                [i for part in self._gathered(items) for i in part] if self._rank() == 0 else items
            ),
            "broadcast_from_main": lambda value: self._gathered(value)[0],
            "all_reduce_sum": lambda numbers, device: [sum(own) for own in zip(*self._gathered(numbers), strict=True)],
            "all_reduce_max": lambda number, device: max(self._gathered(number)),
            "all_reduce_tensors": self._refused,
            "broadcast_weights": lambda tensors: None,  # every thread builds the same weights
            "check_launcher": lambda: None,
            "barrier": lambda: self._gathered(None) and None,
        }
        with pytest.MonkeyPatch.context() as patch:
            for name, replacement in names.items():
                patch.setattr(distributed, name, replacement)
            yield

    def run(self, works: list[Callable[[], Result]]) -> list[Result]:
        """Run one work in each process, one at a time, and return their results.

        Raises:
            BaseException: the first that was raised by a work. The other threads then do not wait for it.
        """
        results: list[Any] = [None] * self.count
        errors: list[BaseException] = []

        def work(rank: int) -> None:
            _OWN.rank = rank
            with self._turn:
                try:
                    results[rank] = works[rank]()
                except BaseException as error:
                    errors.append(error)
                    self._met.abort()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        return results

    def _rank(self) -> int:
        return getattr(_OWN, "rank", 0)

    def _gathered(self, value: Any) -> list[Any]:
        if not hasattr(_OWN, "rank"):  # a process that is being built waits for nobody
            return [value] * self.count
        self._values[_OWN.rank] = pickle.dumps(value)
        self._wait()
        found = [pickle.loads(own) for own in self._values]
        self._wait()
        return found

    def _wait(self) -> None:
        self._turn.release()
        try:
            self._met.wait(timeout=100)
        finally:
            self._turn.acquire()

    def _refused(self, tensors: Any) -> None:
        raise AssertionError("gradients were exchanged, which these processes do not do")
