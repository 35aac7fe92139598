"""Everything that touches weights in an update, for one learner or several, perhaps with a central critic, and where
these weights are."""

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from trl_ext.errors import UserError
from trl_ext.learning.audit import as_counts
from trl_ext.learning.central_critic import CentralCritic
from trl_ext.learning.checkpoint import Learners, Saving
from trl_ext.learning.invariants import check_samples, check_unmoved
from trl_ext.learning.learner import Forward, Learner
from trl_ext.learning.metrics import Metrics, mean, peak_memory, update_metrics
from trl_ext.models.forward import base_of
from trl_ext.models.shape import PLANNED, Shape, training_bytes
from trl_ext.ppo.batch import Completion, TokenBatch, build_token_batch
from trl_ext.ppo.losses import Totals, engine_gap
from trl_ext.process import distributed
from trl_ext.process.devices import free_bytes
from trl_ext.process.waits import Threads, finished, result
from trl_ext.sharding.choice import check_bases
from trl_ext.sharding.holder import Holder

Result = TypeVar("Result")


class Learning:
    """The learners of a run by name, and the two steps that an update needs of them.

    Data flow: completions -> :meth:`token_batches` -> advantages -> :meth:`update`. The first step computes old
    log-probabilities, reference log-probabilities and values under the present weights. The caller fills in the
    advantages. The last step computes losses and gradients and changes the weights.

    Learners on different devices (``placement: split``) work at the same time, each device in a thread. They share no
    weights and draw no random numbers, so the results are those of one after the other.

    Raises:
        ValueError: DeepSpeed would move a policy while its critic makes further steps (``critic_updates``).
    """

    def __init__(
        self, learners: dict[str, Learner], args: Any, device: torch.device, central: CentralCritic | None = None
    ):
        for name, learner in learners.items():
            if learner.args.critic_updates > 1 and learner.strategy.steps_all:
                raise ValueError(
                    f"critic_updates: while the critic of policy {name!r} learns alone, DeepSpeed would move its "
                    "policy by the moments of earlier steps; set it to 1, or use FSDP or neither"
                )
        self.learners, self.args, self.device, self.central = Learners(learners), args, device, central
        self.holders: dict[str, Holder] = {name: learner.strategy for name, learner in learners.items()}
        """How the processes hold the weights of each policy. A trainer adds policies that do not learn."""
        self._limited = False
        self._gaps: dict[str, tuple[float, float]] = {}
        """``engine_gap`` and ``engine_kl`` of the present update, by learner."""
        self._forwards: dict[str, Forward | None] = {}
        """What the first minibatch of the present update may reuse, by learner."""

    def token_batches(
        self, completions: Mapping[str, Sequence[Completion]], critic_only: Collection[str] = ()
    ) -> tuple[dict[str, TokenBatch], dict[str, Metrics]]:
        """Build each learner's token batch, with old log-probabilities and values.

        All processes call this together.

        Args:
            completions: what each learner is trained on.
            critic_only: the learners whose critics alone are trained, while their policies keep their weights.

        Returns:
            The token batches and their statistics, both by learner.

        Raises:
            ValueError: ``critic_only`` does not go together with DeepSpeed's weight decay.
            NonFiniteError: a log-probability or a value is NaN or infinite.
            DoesNotFit: gradients and moments need more memory than the device has left.
        """
        if not self._limited:  # the first rollouts are over, and everything but gradients and moments is in memory
            limit_microbatches(self.learners.values(), free_bytes)
            self._limited = True
        built = self._on_all_devices(
            completions, lambda name: self._token_batch(name, completions[name], name in critic_only)
        )
        return {name: batch for name, (batch, _) in built.items()}, {name: more for name, (_, more) in built.items()}

    def _token_batch(self, name: str, sampled: Sequence[Completion], critic_only: bool) -> tuple[TokenBatch, Metrics]:
        """Return the token batch of a learner and its statistics."""
        learner = self.learners[name]
        if critic_only and learner.strategy.steps_all and learner.args.weight_decay:
            raise ValueError(
                f"critic_warmup: DeepSpeed would decay the weights of policy {name!r} while its critic learns; "
                f"expected weight_decay 0, got {learner.args.weight_decay}; set it to 0, or use FSDP"
            )
        device = learner.device
        batch = build_token_batch(sampled, device, critic_only)
        self._forwards.pop(name, None)  # no step has reused it, and it has a graph
        metrics, self._forwards[name] = learner.annotate(batch)
        distance, difference, tokens = distributed.all_reduce_sum(engine_gap(batch), device)
        if tokens:
            metrics |= {"policy/engine_gap": distance / tokens, "policy/engine_kl": difference / tokens}
            self._gaps[name] = distance / tokens, difference / tokens
        ends = [c.ended for c in sampled].count(True)
        counts = [float(len(sampled)), float(ends), float(len(batch.sampled_on_host[0]))]
        answers, ended, length = distributed.all_reduce_sum(counts, device)
        metrics["val/num_eos_tokens"] = ended
        metrics["completions/mean_length"] = length / max(answers, 1.0)
        metrics["completions/clipped_ratio"] = 1.0 - ended / max(answers, 1.0)
        forced = round(length * metrics.get("policy/forced_tokens", 0.0))
        counted = {"sequences": answers, "ended": ended, "tokens": length, **({"forced": forced} if forced else {})}
        return batch, metrics | as_counts(counted)

    def update(self, batches: dict[str, TokenBatch], step: int) -> tuple[dict[str, Metrics], float]:
        """Train every learner: ``num_ppo_epochs`` passes over its batch, with ``num_mini_batches`` steps in each, both
        of its own arguments. The k-th passes of all learners, and in them their k-th steps, are made together.

        Args:
            batches: the token batches by learner, with advantages.
            step: the number of updates made so far. Minibatches are drawn from it and from the run's seed.

        Returns:
            The metrics by learner, with the norm of the ``central_critic`` if there is one, and the first learner's
            learning rate in this update.

        Raises:
            NonFiniteError: a loss or a gradient is NaN or infinite.
            ForwardsDiffer: in a learner's first minibatch, two forwards of the same weights differ, or in the run's
                first update what was sampled is not what is trained on.
        """
        options = {name: self.learners[name].args for name in batches}
        collected: dict[str, list[Metrics]] = {name: [] for name in batches}
        central_norms: list[float] = []
        active = set(batches)  # learners that target_kl has not stopped
        counts = {name: dict.fromkeys(("learned", "advantaged", "valued"), 0.0) for name in batches}
        probes = {name: self.learners[name].strategy.probe() for name in batches}
        if step == 0:
            for name, gap in self._gaps.items():
                check_samples(self.learners[name], batches.get(name), gap)
        for epoch in range(max((own.num_ppo_epochs for own in options.values()), default=0)):
            passing = {name: batch for name, batch in batches.items() if epoch < options[name].num_ppo_epochs}
            minibatches = {name: self.minibatches(name, batch, step, epoch) for name, batch in passing.items()}
            for number in range(max(map(len, minibatches.values()))):
                there = [name for name, parts in minibatches.items() if number < len(parts) and name in active]
                stepping = [name for name in there if self._any_rows(minibatches[name][number])]
                indices = {name: minibatches[name][number] for name in stepping}
                for name, measures in self._accumulated(batches, indices).items():
                    collected[name].append(measures)
                    if epoch == 0:  # each token once
                        counts[name] = {key: count + measures[key] for key, count in counts[name].items()}
                    if epoch == number == 0:
                        check_unmoved(self.learners[name], batches[name], indices[name], measures)
                # all gradients are computed before any weights change
                norms = self._on_all_devices(stepping, lambda name: self.learners[name].step())
                for name, norm in norms.items():
                    collected[name][-1]["grad_norm"] = norm
                    most = options[name].target_kl
                    if most is not None and collected[name][-1]["approx_kl"] > most:
                        active.discard(name)
                if self.central is not None and self._read_central(stepping):
                    central_norms.append(self.central.step())
                self._train_critics(batches, indices)
        merged = {name: update_metrics(c) | self.learners[name].trained.rates() for name, c in collected.items()}
        for name, before in probes.items():
            moved = int(not torch.equal(before, self.learners[name].strategy.probe()))
            counts[name]["moved"] = float(distributed.all_reduce_max(moved, self.device))
            merged[name] |= as_counts(counts[name])
        for name in merged:
            if options[name].target_kl is not None:
                merged[name]["policy/stopped_early"] = float(name not in active)
        if self.central is not None and central_norms:
            merged["central_critic"] = {"grad_norm": mean([*central_norms])} | self.central.trained.rates()
        rate = next(iter(self.learners.values())).trained.rates()["lr"]
        with warnings.catch_warnings():  # torch warns if a policy's schedule steps before its first optimizer step
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step", category=UserWarning)
            for learner in self.learners.values():
                learner.scheduler.step()
            if self.central is not None:
                self.central.trained.scheduler.step()
        return merged, rate

    def _train_critics(self, batches: Mapping[str, TokenBatch], indices: Mapping[str, torch.Tensor]) -> None:
        """Make the further steps of the critics for a step of the policies (``critic_updates``), on minibatches."""
        learners = {name: self.learners[name] for name in indices if self.learners[name].critic.gives_values}
        for further in range(1, max((learner.args.critic_updates for learner in learners.values()), default=1)):
            again = [name for name, learner in learners.items() if further < learner.args.critic_updates]
            rows = {name: indices[name] for name in again}
            self._accumulated({name: replace(batches[name], critic_only=True) for name in again}, rows)
            self._on_all_devices(again, lambda name: self.learners[name].step())
            if self.central is not None and self._read_central(again):
                self.central.step()

    def _read_central(self, names: Iterable[str]) -> bool:
        """Return whether one of the learners ``names`` has the central critic."""
        return any(self.learners[name].critic.kind == "central" for name in names)

    def logprobs(self, name: str, completions: Sequence[Completion]) -> list[list[float]]:
        """Return the log-probability of each token of ``completions`` under the present weights of a learner.

        All processes call this together.
        """
        learner = self.learners[name]
        rows = build_token_batch(completions, learner.device)
        found = learner.logprobs(rows).tolist()
        return [own[first:end] for own, first, end in zip(found, rows.first, rows.tree.lengths, strict=True)]

    def gradient_norms(self, name: str, batch: TokenBatch, parts: torch.Tensor, step: int) -> list[float]:
        """Return the norms of the parts, at a policy's parameters, of which the first minibatch's gradient is the sum.

        Nothing is trained, and no gradient is left. A single process must hold the policy whole.

        Args:
            name: the learner.
            batch: its token batch, with advantages.
            parts: [N] for each row the part of the loss that it belongs to, from 0 on.
            step: the number of updates made so far, which decides about the minibatch.
        """
        learner, norms = self.learners[name], []
        index = self.minibatches(name, batch, step, 0)[0]
        totals = Totals.of(batch, index, learner.args)
        for part in range(int(parts.max()) + 1):
            learner.accumulate(batch, index[parts[index] == part], totals=totals)
            gradients = [p.grad.norm() for p in learner.policy.parameters().values() if p.grad is not None]
            norms.append(float(torch.stack(gradients).float().norm()) if gradients else 0.0)
            learner.optimizer.zero_grad(set_to_none=True)
            if self.central is not None:
                self.central.trained.optimizer.zero_grad(set_to_none=True)
        return norms

    def minibatches(self, name: str, batch: TokenBatch, step: int, epoch: int) -> list[torch.Tensor]:
        """Deal the inseparable rows of all processes to a learner's ``num_mini_batches`` minibatches, by seed.

        They have nearly equal sizes: of as many successive rows as there are minibatches, each gets one at random. So a
        minibatch has the same rows however many processes there are, and every process has nearly equally many of them.
        All processes call this together.

        Returns:
            The indices of this process's rows in each minibatch.
        """
        together, most = batch.inseparable(), self.learners[name].args.num_mini_batches
        counts: list[int] = distributed.all_gather(len(together))
        first = sum(counts[: distributed.rank()])
        rng = np.random.default_rng([self.args.seed, step, epoch])
        rounds = np.tile(np.arange(most), (math.ceil(sum(counts) / most), 1))
        dealt = rng.permuted(rounds, axis=1).ravel()[first : first + len(together)]
        minibatches = [[together[i] for i in np.flatnonzero(dealt == number)] for number in range(most)]
        return [torch.tensor([row for rows in part for row in rows], dtype=torch.long) for part in minibatches]

    @contextmanager
    def whole_weights(self, names: Collection[str] | None = None, references: bool = False) -> Iterator[None]:
        """Give every process the whole weights of the policies ``names``, to sample or to save; by default of all.

        ``references`` asks for the references of learners too. All processes enter together.
        """
        wanted = list(self.holders if names is None else names)
        held: list[Holder] = [self.holders[name] for name in wanted]
        if references:
            held += [self.learners[name].frozen for name in wanted if name in self.learners]
        with ExitStack() as stack:
            for holder in {id(holder): holder for holder in held}.values():  # adapters of one base have one holder
                stack.enter_context(holder.whole())
            yield

    def autocast(self) -> AbstractContextManager:
        """Return a context manager for the precision of the training forward (``bf16``)."""
        return next(iter(self.learners.values())).autocast()

    def begin_saving(self, folder: Path) -> Saving:
        """Begin to write every policy into ``folder/NAME``. All processes call this together."""
        return self.learners.begin_saving(folder)

    def load(self, folder: Path) -> None:
        """Load every policy from ``folder/NAME``. All processes call this together.

        Raises:
            CheckpointError: a policy is missing, or its files are not those of its learner.
        """
        self.learners.load(folder)

    def save_policy(self, name: str, folder: Path) -> None:
        """Save a policy as a ``from_pretrained`` folder, inside of :meth:`whole_weights`."""
        self.learners[name].save(folder)

    def trained_bytes(self) -> int:
        """Return the bytes of all weights that are trained, which a checkpoint takes at the least."""
        trained = {
            id(p): p for learner in self.learners.values() for p in learner.model.parameters() if p.requires_grad
        }
        return sum(p.numel() * p.element_size() for p in trained.values())

    def peak_memory(self) -> float:
        """Return the largest memory in use so far (:func:`trl_ext.learning.metrics.peak_memory`)."""
        return peak_memory(learner.device for learner in self.learners.values())

    def _accumulated(self, batches: Mapping[str, TokenBatch], index: Mapping[str, torch.Tensor]) -> dict[str, Metrics]:
        """Add every learner's gradient of its minibatch and return the statistics by learner."""

        def accumulate(name: str) -> Metrics:
            return self.learners[name].accumulate(batches[name], index[name], self._forwards.pop(name, None))

        return self._on_all_devices(index, accumulate)

    def _on_all_devices(self, names: Iterable[str], work: Callable[[str], Result]) -> dict[str, Result]:
        """Return ``work(name)`` for every learner of ``names``, in order."""
        # Learners on one device work one after the other, as without threads. Processes that train together exchange
        # messages, whose order must be the same in all of them, and a central critic belongs to all learners: neither
        # has threads.
        by_device: dict[torch.device, list[str]] = {}
        for name in names:
            by_device.setdefault(self.learners[name].device, []).append(name)
        if len(by_device) < 2 or self.central is not None or distributed.size() > 1:
            return {name: work(name) for name in names}
        with Threads(len(by_device), "learns") as threads:
            ends = [
                threads.submit(lambda here: [(name, work(name)) for name in here], here) for here in by_device.values()
            ]
            finished(ends)  # also where one has failed, so that none is at work afterwards
            results = dict(entry for end in ends for entry in result(end))
        return {name: results[name] for name in names}

    def _any_rows(self, index: torch.Tensor) -> bool:
        """Return whether any process has rows in a minibatch."""
        return distributed.all_reduce_max(len(index), self.device) > 0


class Home:
    """The launcher's processes: each of them holds all weights of the run, or its share of them.

    A subclass may hold the weights elsewhere. The loop asks these methods and nothing else.

    Args:
        learners: the learners by name.
        optimizers: the first learner's optimizer and scheduler. None builds them from the trainer's arguments.
        central: the critic that the learners share, if there is one.
    """

    references_sample = False
    """Whether references sample too, and must be whole for it."""
    keeps = "files"
    """Where checkpoints have the weights. A run cannot resume where others are kept."""

    def __init__(
        self, learners: dict[str, Learner], optimizers: tuple = (None, None), central: CentralCritic | None = None
    ):
        self.learners: dict[str, Any] = dict(learners)
        self.optimizers, self.central = optimizers, central

    def start(self, args: Any, accelerator: Any, updates: int) -> Learning:
        """Bring the learners to their devices, build their optimizers, and return what trains them.

        Args:
            args: the trainer's arguments.
            accelerator: the trainer's ``accelerate.Accelerator``.
            updates: the number of updates of the run.

        Raises:
            ValueError: a policy or its value model could not be saved.
        """
        check_bases({name: learner.model for name, learner in self.learners.items()}, accelerator)
        self.devices, first = self.base_devices(args), next(iter(self.learners.values()))
        for learner in self.learners.values():
            distributed.on_main(learner.try_saving)
            optimizer, scheduler = self.optimizers if learner is first else (None, None)
            learner.prepare(accelerator, updates, optimizer, scheduler, self.devices.get(id(base_of(learner.model))))
        if self.central is not None:
            self.central.prepare(accelerator, updates)
        return Learning(self.learners, args, accelerator.device, self.central)

    def base_devices(self, args: Any) -> dict[int, torch.device]:
        """Return devices by the ``id`` of the base model. Other models use the accelerator's device."""
        return {}

    def sampled_here(self) -> Collection[str]:
        """Return the policies whose own weights sample in this process."""
        return self.learners

    def stop_sampling(self) -> None:
        """End the processes that sample, because a signal ends the run. Those that train are asked to save next."""

    def metrics(self) -> dict[str, float]:
        """Return what other processes did since the last time, to log after every update."""
        return {}

    def facts(self) -> dict[str, dict[str, Any]]:
        """Return what was measured of each place where the run trains, by name, for the audit."""
        return {}

    def run_ended(self) -> None:
        """End what :meth:`start` started, because the run is over."""

    def end_hung(self) -> None:
        """Replace the processes that train and do not answer at all, because a signal has come. A thread asks this."""


class DoesNotFit(UserError, MemoryError):
    """A device is too small for what is trained on it. The message has the sizes, and settings that need less."""


def fitting_tokens(learners: Collection[Learner], free: int, device: torch.device) -> int:
    """Return the most tokens that one training forward can read on a device with ``free`` bytes.

    The learners share the device. Gradients and moments that they have not allocated yet are counted. All tokens may be
    sampled ones, and each learner may keep the graph of one forward. The result is a power of two, so that
    small differences in free memory cut the same micro-batches.

    Raises:
        DoesNotFit: gradients and moments need more than is free.
    """
    to_come = sum(map(_to_come, learners))
    left = PLANNED * (free - to_come)
    shapes = [(learner, Shape.of(base_of(learner.model), base_of(learner.model).dtype)) for learner in learners]
    chunk = next(iter(learners)).args.logits_chunk
    if chunk is not None:
        left -= max(shape.logits(chunk) for _, shape in shapes)
    if left <= 0:
        raise DoesNotFit(
            f"{device}: {free / 2**30:.1f} GiB are free, and gradients and moments of {len(learners)} policies need "
            f"{to_come / 2**30:.1f} GiB before any activation; train LoRAs (agents.NAME.lora), set training.optim: "
            "adamw_bnb_8bit, or start with zero3.yaml or fsdp2.yaml on more devices"
        )
    each = 0.0
    for learner, shape in shapes:
        each += learner.critic.trunks * shape.activations(1, bool(learner.args.gradient_checkpointing))
        each += shape.logits(1) if chunk is None else 0.0
    return 2 ** max(0, int(math.log2(max(1.0, left / each))))


def limit_microbatches(learners: Collection[Learner], free_of: Callable[[torch.device], int | None]) -> None:
    """Choose how many tokens a training forward of each learner reads on an accelerator, unless the options say it.

    ``free_of`` returns the free bytes of a device (:func:`trl_ext.process.devices.free_bytes`).

    Raises:
        DoesNotFit: gradients and moments need more than is free.
    """
    devices: dict[torch.device, list[Learner]] = {}
    for learner in learners:
        if learner.args.max_tokens_per_microbatch is None and learner.device.type != "cpu":
            devices.setdefault(learner.device, []).append(learner)
    for device, group in devices.items():
        free = free_of(device)
        tokens = None if free is None else fitting_tokens(group, free, device)
        for learner in group:
            learner.most_tokens = tokens


def _to_come(learner: Learner) -> float:
    """Return the bytes of gradients, and of the two moments of AdamW before the first step, in this process."""
    each = training_bytes(2 if learner.strategy.half else 4, str(learner.args.optim))
    return learner.strategy.stepped_here() * (each.gradients + (0.0 if learner.optimizer.state else each.moments))
