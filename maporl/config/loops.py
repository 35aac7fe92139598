"""The section ``loop:`` of a configuration: an outer loop of sampling, building a data set, and training on it.

Imports no torch.
"""

import dataclasses
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

STRICT = ConfigDict(extra="forbid")
Count = Annotated[int, Field(ge=1)]
Above0 = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, config=STRICT)
class StageSection:
    """One training stage of a round (:mod:`maporl.loops`).

    Args:
        train: the trainer: TRL's SFT trainer or its DPO trainer.
        build: how the data set is made of the round's dialogues: the name of a builder, or one ``{name: options}``.
        roles: only what was said in these roles is trained on; empty: everything. An agent without a role has its name.
        start: the weights that the stage starts from: those of the stage before it (last), or those with which the loop
            began (initial).
        epochs: the number of passes over the data set.
        learning_rate: the learning rate at the start. It falls linearly to 0.
        batch_size: the number of rows, or of pairs, of a step.
        beta: how much DPO holds the policy to its reference. None: 0.1.
        reference: the reference of DPO: the weights at the start of the stage (stage), of the round (round) or of the loop
            (initial), or none, whose log-probabilities count as 0 (none). None: stage.
        joint: whether DPO compares what all agents of a dialogue said together (MADPO): the log-ratios of
            the other agents are added to a policy's own. They are computed before each pass over the data set.

    Raises:
        ValueError: SFT is given an option of DPO, or joint training has no whole number of epochs.
    """

    train: Literal["sft", "dpo"]
    build: str | dict[str, Any]
    roles: tuple[str, ...] = ()
    start: Literal["last", "initial"] = "last"
    epochs: Above0 = 1.0
    learning_rate: Above0 = 5e-6
    batch_size: Count = 8
    beta: Above0 | None = None
    reference: Literal["stage", "round", "initial", "none"] | None = None
    joint: bool = False

    def __post_init__(self):
        given = [name for name in ("beta", "reference", "joint") if getattr(self, name) not in (None, False)]
        if self.train == "sft" and given:
            raise ValueError(f"{given[0]}: it is an option of train: dpo, and sft does not read it; remove it")
        if self.joint and self.epochs != int(self.epochs):
            raise ValueError(f"epochs: joint training makes whole passes, got {self.epochs}; give a whole number")


@dataclass(frozen=True, config=STRICT)
class LoopSection:
    """An outer loop: rounds of sampling, building data sets, training on them, and evaluating.

    A configuration with stages is trained in rounds, and not by PPO.

    Args:
        rounds: the number of rounds.
        questions: the number of questions that are sampled in a round.
        stages: what is trained in a round, in this order.
    """

    rounds: Count = 1
    questions: Count = 256
    stages: list[StageSection] = dataclasses.field(default_factory=list, hash=False)
