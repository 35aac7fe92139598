"""The options of supervised training. They have their own module, so that the command line shows them without torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SFTOptions:
    """How :func:`maporl.loops.sft.train_supervised` trains: passes over the data, learning rate, rows of a step."""

    epochs: float = 1.0
    learning_rate: float = 5e-5
    batch_size: int = 8
