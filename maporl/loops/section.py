"""The section ``loop:`` of a configuration: an outer loop of sampling, building a data set, and training on it.

Imports no torch.
"""

import dataclasses
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from maporl.sections import AboveZero, NotNegative, Positive, section
from maporl.text import text_option
from trl_ext.ppo.options import option, rate_of

PRIVILEGED = "In light that the final answer is: {answer}.\n\n"


@section(kw_only=True)
class StageSection:
    """A training stage of a round (:mod:`maporl.loops`): what the stages of all trainers have. :data:`STAGES` has their
    classes."""

    train: str
    start: Literal["last", "initial"] = option(
        "last",
        "The weights that the stage starts from: those of the stage before it (last), or those with which the "
        "loop began (initial). A critic of turns starts from the policy's, which are its reference too.",
    )
    learning_rate: AboveZero | None = option(
        None,
        "Learning rate at the start. It falls linearly to 0. None: 1e-4 for an adapter such as a LoRA, and 5e-6 where "
        "all weights are trained (train: ppo: 3e-6).",
    )

    def rate(self, adapter: str | None) -> float:
        """Return the learning rate of a stage that trains an ``adapter`` by TRL, or whole weights if it is None."""
        return rate_of(self.learning_rate, adapter=adapter is not None, whole=5e-6)


@section(kw_only=True)
class RowsStage(StageSection):
    """A stage that trains on a data set, which a builder makes of the round's dialogues.

    Raises:
        ValueError: ``replay`` is something else, or ``replay_size`` draws from the present round alone.
    """

    takes: ClassVar[tuple[str, ...]] = ()
    """The kinds of rows that the trainer takes, of which a builder makes one."""
    build: str | dict[str, Any] = option(
        help="How the data set is made of the round's dialogues: a builder, or one {name: options}.",
    )
    epochs: AboveZero = option(1.0, "Passes over the data set.")
    batch_size: Positive = option(8, "Rows, or pairs, of a step. train: kto needs at least 2.")
    replay: Literal["current", "all"] | dict[Literal["nearest", "decay"], AboveZero] = option(
        "current",
        "The rounds whose rows are trained on: the present one (current), all so far (all), the last N ({nearest: "
        "N}), or all with the share `rate ** age` of their rows ({decay: rate}).",
    )
    replay_size: Literal["all", "current"] = option(
        "all",
        "Train on all these rows (all), or on as many as the present round has, each of which comes from a round "
        "with a chance in proportion to the round's share (current, as MADPO and MARLHF).",
    )

    def __post_init__(self):
        if self.replay_size == "current" and self.replay == "current":
            raise ValueError("replay_size: the present round alone is replayed, so nothing is drawn; set replay")
        if isinstance(self.replay, dict):
            self._check_replay(self.replay)

    def _check_replay(self, replay: dict[Literal["nearest", "decay"], float]) -> None:
        if len(replay) != 1:
            raise ValueError(f"replay: expected current, all, {{nearest: N}} or {{decay: rate}}, got {replay}")
        if (count := replay.get("nearest", 1)) != int(count):
            raise ValueError(f"replay.nearest: expected a whole number of rounds, got {count}")
        if (rate := replay.get("decay", 0.5)) >= 1:
            raise ValueError(f"replay.decay: expected a rate between 0 and 1, got {rate}; replay: all takes all rows")


@section(kw_only=True)
class PolicyStage(RowsStage):
    """A stage that trains each policy, or a critic of it, on what it said."""

    roles: tuple[str, ...] = option(
        (),
        "Only what was said in these roles is trained on; empty: everything. An agent without a role has its name.",
    )


@section(kw_only=True)
class SFTStage(PolicyStage):
    """A stage of TRL's SFT trainer."""

    takes: ClassVar[tuple[str, ...]] = ("single rows",)
    train: Literal["sft"] = option(help="TRL's SFT trainer.")


@section(kw_only=True)
class PreferenceStage(PolicyStage):
    """A stage that holds a policy to a reference."""

    beta: AboveZero | None = option(
        None,
        "How much the policy is held to its reference, or a critic of turns to its turns' advantages. None: 0.1.",
    )
    reference: Literal["stage", "round", "initial", "none"] | None = option(
        None,
        "The reference: the weights at the start of the stage (stage), of the round (round) or of "
        "the loop (initial), or none, whose log-probabilities count as 0 (none). None: stage.",
    )


@section(kw_only=True)
class DPOStage(PreferenceStage):
    """A stage of TRL's DPO trainer.

    Raises:
        ValueError: joint training has no whole number of epochs, or divides by lengths.
    """

    takes: ClassVar[tuple[str, ...]] = ("pairs", "states")  # in a state, it ranks candidates first
    train: Literal["dpo"] = option(help="TRL's DPO trainer.")
    joint: bool = option(
        False,
        "Compare what all agents of a dialogue said together (MADPO): the log-ratios of the other agents "
        "are added to a policy's own. They are computed before each pass over the data set.",
    )
    norm: bool = option(False, "Divide the log-ratio of each answer by its number of tokens.")
    likelihood: NotNegative = option(
        0.0,
        "Weight of a second loss, the mean negative log-probability of the chosen answers' tokens.",
    )

    def __post_init__(self):
        super().__post_init__()
        if self.joint and self.epochs != int(self.epochs):
            raise ValueError(f"epochs: joint training makes whole passes, got {self.epochs}; give a whole number")
        if self.joint and self.norm:
            raise ValueError(
                "norm: joint adds the log-ratios of whole answers, and norm would divide their sum by one length; "
                "remove one"
            )


@section(kw_only=True)
class KTOStage(PreferenceStage):
    """A stage of TRL's KTO trainer.

    Raises:
        ValueError: the batch has one row.
    """

    takes: ClassVar[tuple[str, ...]] = ("signed rows",)
    train: Literal["kto"] = option(help="TRL's KTO trainer.")

    def __post_init__(self):
        super().__post_init__()
        if self.batch_size < 2:
            raise ValueError("batch_size: train: kto compares the rows of a batch, got 1; give at least 2")


@section(kw_only=True)
class RewardStage(RowsStage):
    """A stage of TRL's reward trainer."""

    takes: ClassVar[tuple[str, ...]] = ("comparisons",)
    train: Literal["reward"] = option(
        help="TRL's reward trainer, on the verifier of reward.verifier. A later stage ppo is then paid that verifier's score, "  # noqa: E501
        "and nothing else."
    )


@section(kw_only=True)
class TurnCriticStage(PolicyStage):
    """A stage that trains a critic of turns for each policy (:mod:`maporl.loops.turn_critic`).

    Raises:
        ValueError: ``privileged`` has another placeholder.
    """

    takes: ClassVar[tuple[str, ...]] = ("trajectory pairs",)
    train: Literal["turn_critic"] = option(
        help="A critic of turns for each policy, by which the builder rank_halves of a later stage ranks."
    )
    beta: AboveZero | None = option(
        None,
        "How much the policy is held to its reference, or a critic of turns to its turns' advantages. None: 0.1.",
    )
    privileged: str = text_option(
        PRIVILEGED,
        "What it reads before everything that the agent saw, with the right {answer}. Empty: nothing.",
    )
    mean_over: Literal["turn", "dialogue"] = option(
        "turn",
        "What a dialogue is worth: the sum of the means over the tokens of each turn (turn), or "
        "one mean over the tokens of all its turns (dialogue).",
    )


@section(kw_only=True)
class PPOStage(StageSection):
    """A stage of on-policy updates."""

    train: Literal["ppo"] = option(help="On-policy updates, as the other sections of the configuration describe them.")
    updates: Positive = option(help="Number of updates.")
    group: Positive | None = option(
        None,
        "Number of dialogues for each question of these updates. None: branching.group.",
    )


STAGES: dict[str, type[StageSection]] = {
    "sft": SFTStage,
    "dpo": DPOStage,
    "kto": KTOStage,
    "reward": RewardStage,
    "ppo": PPOStage,
    "turn_critic": TurnCriticStage,
}
"""The stages, by what they ``train``. Each class has the keys that its trainer reads."""
_ALL = {f.name: f for kind in STAGES.values() for f in dataclasses.fields(kind)}


def _read(values: Any) -> Any:
    """Return the values of a stage without those keys of other stages that have their defaults."""
    train = values.get("train") if isinstance(values, dict) else None
    if not isinstance(train, str) or train not in STAGES:
        return values
    left = dict(values)
    for name in [name for name in values if name in _ALL.keys() - {f.name for f in dataclasses.fields(STAGES[train])}]:
        value, default = left.pop(name), _ALL[name].default
        if (tuple(value) if isinstance(value, list) else value) != (
            None if default is dataclasses.MISSING else default
        ):
            raise ValueError(f"{name}: train: {train} does not read it; remove it")
    return left


Stage = Annotated[
    SFTStage | DPOStage | KTOStage | RewardStage | PPOStage | TurnCriticStage,
    Field(discriminator="train"),
    BeforeValidator(_read),
]


@section()
class LoopSection:
    """An outer loop: rounds of sampling, building data sets, training on them, and evaluating.

    A configuration with stages is trained in rounds, and not by PPO.

    Raises:
        ValueError: there are recorded dialogues, and no stage that is trained on them.
    """

    rounds: Positive = option(1, "Number of rounds.")
    questions: Positive = option(256, "Questions that are sampled in a round.")
    stages: list[Stage] = option(
        [],
        "What is trained in a round, in order, e.g. [{train: sft, build: {threshold: {above: 0.5}}}].",
    )
    accept: Literal["always", "not_worse"] = option(
        "always",
        "always, or not_worse: a round whose held-out score fell is not kept, and the next one begins where it "
        "did. The score is the accuracy of the last answers, or without labels the mean score.",
    )
    dialogues: str | None = option(
        None,
        "A dialogues.jsonl, such as maporl record writes. The first round is trained on it and samples nothing. Later "
        "rounds sample.",
    )

    def __post_init__(self):
        if self.dialogues is not None and not self.stages:
            raise ValueError("dialogues: no stage is trained on them; add stages, such as {train: sft, build: best_of}")
