"""How many bytes and seconds the parts of an update take, by formulas. Imports no torch.

The formulas are those of a decoder with gated blocks and grouped keys. How fast a device works is assumed.
"""

from dataclasses import dataclass

from maporl.studies.planning.devices import Device
from trl_ext.models.shape import Shape, training_bytes

LEARNING = 0.40
"""The share of a device's operations per second that learning reaches."""
READING = 0.5
"""The share that reading prompts, and decoding many rows, reach."""
DECODING = 0.65
"""The share of the memory bandwidth that decoding reaches."""
MOVING = 0.6
"""The share of a link's bandwidth that gathering and scattering weights reach."""
STEP = 0.003
"""Seconds of a decoding step besides arithmetic and memory."""
LEFT_FREE = 0.1
"""The share of a device's memory that engines leave free."""
ENGINE = 3e9
"""Bytes of an engine besides weights and cache."""
LEARNER = 4e9
"""Bytes of a learner besides what is computed here."""
WAKING = 25e9
"""Bytes per second at which an engine on the learner's own devices wakes and takes weights."""
SENDING = 8e9
"""Bytes per second that one rank sends to engines elsewhere; at most four ranks add up."""
MOST_ROWS = 256
"""The most rows of an engine."""
MICROBATCH = 16_384
"""Tokens of a micro-batch."""
CHUNK = 4_096
"""Tokens whose logits exist at one time."""

TRAINED = 4 + sum(training_bytes(4, "adamw"))
"""Bytes of a weight that is trained, in float32: itself, its gradient and its two moments."""


@dataclass(frozen=True)
class Work:
    """The work of the policies of a group in an update. All lengths are in tokens.

    Args:
        conversations: how many they take part in.
        turns: how often a policy answers in each.
        question: the first prompt.
        heard: what is new to it before each later answer.
        answer: the mean answer.
        longest: the longest answer.
        epochs: passes of PPO.
        kl: whether there is a reference.
        critic: whether a critic reads with a model, or an adapter, of its own.
        steps: steps of the optimizer.
    """

    conversations: int
    turns: int
    question: int
    heard: int
    answer: int
    longest: int
    epochs: int = 1
    kl: bool = True
    critic: bool = False
    steps: int = 1

    @property
    def conversation(self) -> int:
        """Return the length of a whole conversation."""
        return self.question + self.turns * self.answer + (self.turns - 1) * self.heard

    @property
    def read(self) -> int:
        """Return the tokens that a learner reads in a pass."""
        return self.conversations * self.conversation

    @property
    def sampled(self) -> int:
        """Return the tokens that engines sample."""
        return self.conversations * self.turns * self.answer

    @property
    def prompted(self) -> int:
        """Return the tokens that engines read without having sampled them."""
        return self.conversations * (self.question + (self.turns - 1) * self.heard)

    @property
    def context(self) -> float:
        """Return the mean number of tokens before a sampled one."""
        return self.question + (self.turns - 1) * (self.answer + self.heard) / 2 + self.answer / 2


@dataclass(frozen=True)
class Rates:
    """The speed of one device with one model.

    Args:
        learning: operations per second of an update.
        reading: operations per second of reading prompts.
        decoding: operations per second of decoding many rows.
        bandwidth: bytes of weights and cache per second that decoding reads.
        step: seconds of a decoding step besides.
    """

    learning: float
    reading: float
    decoding: float
    bandwidth: float
    step: float

    @classmethod
    def assumed(cls, device: Device) -> "Rates":
        """Return the rates that nobody has measured: shares of what the device's maker promises."""
        flops = device.flops
        return cls(flops * LEARNING, flops * READING, flops * READING, device.bandwidth * DECODING, STEP)


def update_flops(model: Shape, work: Work) -> float:
    """Return the operations of an update: a forward for old log-probabilities, one for a reference, and four forwards'
    worth a pass.

    The fourth is the forward that is computed again in the backward pass. With adapters it is three, because the base
    has no gradients; their own products are left out. A critic with a model of its own costs all but the reference once
    more.
    """
    if not work.read:
        return 0.0
    head = 2 * model.head * work.sampled / work.read
    token = 2 * model.body + head + 2 * model.layers * model.queries * work.conversation
    trained = (1 + (3 if model.adapters else 4) * work.epochs) * (2 if work.critic else 1)
    return work.read * token * (work.kl + trained)


def update_seconds(model: Shape, work: Work, device: Device, ranks: int, spans: bool = False) -> tuple[float, float]:
    """Return the seconds of arithmetic, and of moving shards in an update. They overlap, so the larger counts.

    Nothing is sharded on one device, or where adapters are trained, whose gradients are small.

    Args:
        model: the model.
        work: the update.
        device: each device.
        ranks: the number of devices of the learner.
        spans: whether they are on several machines.
    """
    arithmetic = update_flops(model, work) / (ranks * Rates.assumed(device).learning)
    if model.adapters:
        return arithmetic, 0.0
    microbatches = -(-work.read // (ranks * MICROBATCH))
    moved = microbatches * model.parameters * (ranks - 1) / ranks * (2 * (1 + work.kl) + 8 * work.epochs)
    return arithmetic, moved / (MOVING * (device.network if spans else device.link))


def state_bytes(model: Shape, work: Work, ranks: int) -> float:
    """Return the bytes a device that a learner keeps: float32 weights, gradients and two moments, and the reference.

    With adapters these are theirs alone, and every device has the whole base, which is the reference too.
    """
    copies = 2 if work.critic else 1
    if model.adapters:
        return 2 * model.parameters + TRAINED * copies * model.adapters
    return (TRAINED * copies + 2 * work.kl) * model.parameters / ranks


def learner_bytes(model: Shape, work: Work, ranks: int, others: float = 0.0) -> float:
    """Return the bytes a device while a learner works.

    ``others`` are the states of learners that wait on the same devices.
    """
    block = 0 if model.adapters else model.body / model.layers
    gathered = 2 * 2 * 2 * block  # two blocks of bfloat16 weights, and as much for their gradients
    ends = 0.0 if model.adapters else 6.0 * model.head * (1 if model.tied else 2)
    moving = model.activations(MICROBATCH, checkpointing=True) + model.logits(CHUNK)
    return state_bytes(model, work, ranks) + others + gathered + ends + moving + LEARNER


def engine_rows(model: Shape, work: Work, device: Device, states: float = 0.0) -> int:
    """Return the conversations that an engine has room for at one time.

    ``states`` are the bytes of learners on its device.
    """
    left = device.memory * (1 - LEFT_FREE) - model.weights - ENGINE - states
    return max(0, min(MOST_ROWS, round(left / model.kv_cache(work.conversation))))


def step_seconds(model: Shape, rows: float, context: float, device: Device) -> float:
    """Return the seconds of a decoding step of ``rows`` rows, each with ``context`` tokens before it."""
    rates = Rates.assumed(device)
    cache = rows * context * model.kv_cache(1) / rates.bandwidth
    return max(model.weights / rates.bandwidth + cache, 2 * model.parameters * rows / rates.decoding) + rates.step


def rollout_seconds(model: Shape, work: Work, device: Device, replicas: int, rows: float) -> tuple[float, float]:
    """Return the seconds until the mean dialogue is over, and those of the tail, in which the longest answers end
    alone."""
    if not work.conversations:
        return 0.0, 0.0
    reading = 2 * model.parameters * work.prompted / (replicas * Rates.assumed(device).reading)
    rate = replicas * rows / step_seconds(model, rows, work.context, device)
    tail = (work.longest - work.answer) * step_seconds(model, 1, 0, device)
    return reading + work.sampled / rate, tail
