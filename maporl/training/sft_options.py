"""The options of supervised training, apart from it, so that the command line can show them without torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SFTOptions:
    """How :func:`maporl.training.sft.train_supervised` trains: passes over the data, step size, dialogues at a time."""

    epochs: float = 1.0
    learning_rate: float = 5e-5
    batch_size: int = 8
