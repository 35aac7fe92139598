"""Measures how fast this machine works with the base models of a plan: decoding, reading prompts, and an update.

The parts that are measured are those of a group's processes (:mod:`maporl.backends`), in this process and on one
device.
"""

import gc
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count, cycle

import numpy as np
import torch

from maporl.backends.engine_process import EngineProcess
from maporl.backends.learner_process import LearnerProcess
from maporl.backends.messages import Assigned, Samples
from maporl.backends.spec import GroupSpec
from maporl.config import Config
from maporl.config.threads import threads_of
from maporl.planning.devices import Cluster
from maporl.planning.estimates import Rates, Work, state_bytes
from maporl.planning.fitting import Step, Timings, fitted
from maporl.planning.placements import Group
from maporl.team.memory import training_on_cpu
from maporl.training.args import MultiAgentPPOConfig
from trl_ext.models.shape import Shape
from trl_ext.ppo.batch import Completion
from trl_ext.ppo.losses import OBJECTIVES
from trl_ext.process.devices import free_bytes
from trl_ext.process.threads import use
from trl_ext.sampling.request import Draw, TokenRequest

CLOCK = time.perf_counter
SECONDS = 1.0
"""The seconds for which a measurement is repeated. There are six for each base model."""
ROWS, MOST_ROWS = (1, 8, 32), 256
"""The rows of three decoding steps, and the most of the last one if steps are quick."""
MOST_TOKENS = 16_384
"""The most tokens of prompts that are read, and of an update."""
PROMPT, STEPS = 16, 8
"""The tokens before the first decoding step, and the number of steps."""
CONVERSATIONS = 8
"""Those of the larger one of two updates, and twice the prompts that are read, or more if they are quick.

The smaller update has a single one.
"""
LONG = 128
"""The tokens of a prompt that is read, and of a conversation that is trained on. Its second half is sampled."""
ROOM = 0.8
"""A model is measured if it takes less than this share of the free memory."""


def probed(config: Config, groups: Sequence[Group], cluster: Cluster) -> tuple[list[Group], list[str]]:
    """Return the groups with measured rates, and lines about what was measured where.

    Groups with equal models are measured once. Where a model does not fit this machine, its rates stay assumed.

    Raises:
        ConfigError: a model cannot be loaded.
    """
    use(threads_of(config))
    device = torch.device("cpu" if training_on_cpu(config) else "cuda")
    name = "CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
    said = [f"probe: measured on {name}, with one device"]
    if cluster.name.lower() not in name.lower():
        said.append(f"warning: the cluster has {cluster.name}; what is measured here is as fast as {name}")
    rates: dict[tuple, Rates | None] = {}
    rated = []
    for group in groups:
        key = (group.base, group.model, group.trained, group.work.critic)
        if key not in rates:
            timings = measured(config, group, device)
            rates[key] = None if timings is None else fitted(Rates.assumed(cluster.device), group.model, timings)
            if timings is None:
                said.append(f"warning: {group.name} does not fit the free memory here; nothing of it was measured")
            elif not timings.updates and group.trained:
                said.append(f"warning: learning of {group.name} does not fit the free memory here; it was not measured")
        rated.append(replace(group, rates=rates[key]))
    return rated, said


def measured(config: Config, group: Group, device: torch.device) -> Timings | None:
    """Return the seconds of a group's model on ``device``, or None if the model does not fit the free memory.

    Answers do not stop early, so that all rows have as many steps.
    """
    room = free_bytes(device)
    room = None if room is None else int(ROOM * room)
    if room is not None and group.model.weights > room:
        return None
    options = replace(
        config.ppo, stop_token="none", stop_token_id=None, num_ppo_epochs=1, num_mini_batches=1, keep_states=False
    )
    config = replace(config, ppo=options)
    timings = _decoding(config, group)
    _free(device)
    if group.trained and (room is None or state_bytes(group.model, group.work, 1) < room):
        timings = replace(timings, updates=_learning(config, group))
        _free(device)
    return timings


def _spec(config: Config, group: Group, trained: bool) -> GroupSpec:
    policies, args = group.policies or (group.name,), MultiAgentPPOConfig.from_config(config)
    return GroupSpec(
        name=group.name,
        config=config,
        policies=policies,
        trained=policies if trained else (),
        updates=1,
        critics=group.work.critic,
        outputs=1,
        devices=1,
        strategy="replicated",
        replicas=1,
        rows=None,
        args=args,
        objective=OBJECTIVES[args.objective],
        stops={name: (frozenset(), ()) for name in policies},
        seed=config.seed,
    )


def decoder(config: Config, group: Group) -> Callable[[int, int, int], Callable[[], object]]:
    """Return a function of rows, tokens of their prompts, and steps. It returns what samples so much, with ``group``'s
    models.

    This is transformers, also where agents have ``engine: vllm``.
    """
    engine = EngineProcess(_spec(config, group, trained=False))
    engine.build()
    policies, drawn = engine.spec.policies, random.Random(0)
    versions = dict.fromkeys(policies, 0)

    def ready(rows: int, prompt: int, steps: int) -> Callable[[], object]:
        asked = {
            n: TokenRequest(name, _ids(drawn, group.model, prompt), Draw(steps), ("probe", n))
            for n, name in zip(range(rows), cycle(policies), strict=False)
        }
        return lambda: engine.sample(asked, versions)

    return ready


def _decoding(config: Config, group: Group) -> Timings:
    ready = decoder(config, group)

    def step(rows: int) -> float:
        """Return the seconds of a step: those of many, without those of the first with its prompts."""
        first, steps = seconds_of(ready(rows, PROMPT, 1)), seconds_of(ready(rows, PROMPT, 1 + STEPS))
        return max(steps - first, 1e-9) / STEPS

    *few, last = ROWS
    measured = [(rows, step(rows)) for rows in few] + [_growing(last, MOST_ROWS, STEPS, step)]
    steps = tuple(Step(rows, PROMPT + STEPS / 2, seconds) for rows, seconds in measured)
    rows, reading = _growing(CONVERSATIONS // 2, MOST_TOKENS // LONG, 1, lambda rows: seconds_of(ready(rows, LONG, 1)))
    return Timings(steps, rows * LONG, reading)


def trainer(config: Config, group: Group) -> Callable[[Work], Callable[[], object]]:
    """Return a function of an update's work.

    It returns what makes such an update of the group's first policy that learns.
    """
    learner = LearnerProcess(_spec(config, group, trained=True), 0, "127.0.0.1")
    learner.build("", 0)
    name = next(iter(learner.learning.learners))
    drawn, done = random.Random(0), count(1)

    def ready(work: Work) -> Callable[[], object]:
        answer = work.answer
        rows = [_ids(drawn, group.model, work.question + answer) for _ in range(work.conversations)]
        samples = Samples.of(
            [
                Completion(ids[:-answer], ids[-answer:], True, f"row {n}", sampled_logprobs=[-1.0] * answer)
                for n, ids in enumerate(rows)
            ]
        )
        ones = np.ones(work.sampled, dtype=np.float32)
        numbers = {"advantages": ones, "returns": ones, "value_mask": ones.astype(bool)}
        assigned = Assigned(np.arange(len(rows)), numbers, np.ones(len(rows), dtype=np.float32), len(rows))

        def update() -> None:
            learner.annotate({name: samples}, False)
            learner.update({name: assigned}, next(done))

        return update

    return ready


def work_of(group: Group, rows: int) -> Work:
    """Return an update of ``rows`` conversations of one turn and :data:`LONG` tokens, in one pass."""
    half = LONG // 2
    return Work(rows, 1, half, 0, half, half, 1, group.work.kl, group.work.critic)


def _learning(config: Config, group: Group) -> tuple[tuple[Work, float], ...]:
    """Return two updates with their seconds. The first one has a single conversation."""
    ready = trainer(config, group)

    def seconds(rows: int) -> float:
        return seconds_of(ready(work_of(group, rows)))

    one = seconds(1)
    rows, more = _growing(CONVERSATIONS, MOST_TOKENS // LONG, 1, seconds)
    return (work_of(group, 1), one), (work_of(group, rows), more)


def _growing(size: int, most: int, times: int, measure: Callable[[int], float]) -> tuple[int, float]:
    """Double ``size`` until ``times`` of what is measured take half of :data:`SECONDS`. Return it with its seconds."""
    while (seconds := measure(size)) * times < SECONDS / 2 and size < most:
        size *= 2
    return size, seconds


def _ids(drawn: random.Random, model: Shape, count: int) -> list[int]:
    return [drawn.randrange(model.vocabulary) for _ in range(count)]


def seconds_of(work: Callable[[], object]) -> float:
    """Return the least seconds of ``work``, which other programs on the machine lengthen least.

    The first time prepares kernels and memory too, so that it is repeated, unless it took more than :data:`SECONDS`.
    """
    times: list[float] = []
    while not times or (len(times) < 2 and times[0] < SECONDS) or sum(times) < SECONDS:
        _finished()
        begin = CLOCK()
        work()
        _finished()
        times.append(CLOCK() - begin)
    return min(times)


def _finished() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
