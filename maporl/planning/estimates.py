"""How many bytes and seconds the parts of an update take, by formulas. Imports no torch.

The formulas are those of a decoder with gated blocks and grouped keys. A number of the run itself or of a probe is better.
"""

from dataclasses import dataclass

from maporl.planning.devices import Device

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


@dataclass(frozen=True)
class Model:
    """The sizes of a model. ``queries`` and ``keys`` are the widths of all query heads and of all key heads."""

    parameters: int
    layers: int
    hidden: int
    intermediate: int
    queries: int
    keys: int
    vocabulary: int
    tied: bool

    @property
    def head(self) -> int:
        """Return the parameters of the output head."""
        return self.vocabulary * self.hidden

    @property
    def body(self) -> int:
        """Return the parameters without the embedding and the head."""
        return self.parameters - self.head * (1 if self.tied else 2)

    @property
    def weights(self) -> float:
        """Return the bytes of the weights in bfloat16."""
        return 2.0 * self.parameters

    @property
    def cache(self) -> int:
        """Return the bytes of the keys and values of a token, in bfloat16."""
        return 4 * self.layers * self.keys


@dataclass(frozen=True)
class Work:
    """What a policy does in an update. All lengths are in tokens.

    Args:
        conversations: how many it takes part in.
        turns: how often it answers in each.
        question: the first prompt.
        heard: what is new to it before each later answer.
        answer: the mean answer.
        longest: the longest answer.
        epochs: passes of PPO.
        kl: whether there is a reference.
    """

    conversations: int
    turns: int
    question: int
    heard: int
    answer: int
    longest: int
    epochs: int = 1
    kl: bool = True

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


def update_flops(model: Model, work: Work) -> float:
    """Return the operations of an update: a forward for old log-probabilities, one for a reference, and four forwards' worth a pass.

    The fourth is the forward that is computed again in the backward pass.
    """
    head = 2 * model.head * work.sampled / work.read
    token = 2 * model.body + head + 2 * model.layers * model.queries * work.conversation
    return work.read * token * (1 + work.kl + 4 * work.epochs)


def update_seconds(model: Model, work: Work, device: Device, ranks: int, spans: bool = False) -> tuple[float, float]:
    """Return the seconds of arithmetic and of moving shards in an update. They overlap, so the larger counts.

    ``ranks`` is the number of devices of the learner, and ``spans`` whether they are on several machines.
    """
    arithmetic = update_flops(model, work) / (ranks * device.flops * LEARNING)
    microbatches = -(-work.read // (ranks * MICROBATCH))
    moved = microbatches * model.parameters * (ranks - 1) / ranks * (2 * (1 + work.kl) + 8 * work.epochs)
    return arithmetic, moved / (MOVING * (device.network if spans else device.link))


def state_bytes(model: Model, work: Work, ranks: int) -> float:
    """Return the bytes a device that a learner keeps: float32 weights, gradients and two moments, and the reference."""
    return (16 + 2 * work.kl) * model.parameters / ranks


def learner_bytes(model: Model, work: Work, ranks: int, others: float = 0.0) -> float:
    """Return the bytes a device while a learner works. ``others`` are the states of learners that wait on the same devices."""
    block = model.body / model.layers
    gathered = 2 * 2 * 2 * block  # two blocks of bfloat16 weights, and as much for their gradients
    ends = 6.0 * model.head * (1 if model.tied else 2)
    activations = MICROBATCH * (2 * model.layers * model.hidden + 16 * model.hidden + 8 * model.intermediate)
    logits = CHUNK * model.vocabulary * 12
    return state_bytes(model, work, ranks) + others + gathered + ends + activations + logits + LEARNER


def engine_rows(model: Model, work: Work, device: Device, states: float = 0.0) -> int:
    """Return the conversations that an engine holds at one time. ``states`` are the bytes of learners on its device."""
    left = device.memory * (1 - LEFT_FREE) - model.weights - ENGINE - states
    return max(0, min(MOST_ROWS, round(left / (model.cache * work.conversation))))


def step_seconds(model: Model, rows: int, context: float, device: Device) -> float:
    """Return the seconds of a decoding step of ``rows`` rows, each with ``context`` tokens before it."""
    memory = (model.weights + rows * context * model.cache) / (device.bandwidth * DECODING)
    return max(memory, model.weights * rows / (device.flops * READING)) + STEP


def rollout_seconds(model: Model, work: Work, device: Device, replicas: int, rows: int) -> tuple[float, float]:
    """Return the seconds until the mean dialogue is over, and those of the tail, in which the longest answers end alone."""
    reading = model.weights * work.prompted / (replicas * device.flops * READING)
    rate = replicas * rows / step_seconds(model, rows, work.context, device)
    tail = (work.longest - work.answer) * step_seconds(model, 1, 0, device)
    return reading + work.sampled / rate, tail
