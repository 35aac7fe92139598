"""The section ``loop:`` of a configuration: an outer loop of sampling, building a data set, and training on it.

Imports no torch.
"""

import dataclasses
from typing import Any, Literal

from maporl.config.numbers import AboveZero, NotNegative, Positive, section
from maporl.text import check_placeholders
from trl_ext.ppo.options import option

PRIVILEGED = "In light that the final answer is: {answer}.\n\n"
DPO_ONLY, CRITIC_ONLY, PPO_ONLY = {"joint", "norm", "likelihood"}, {"privileged", "mean_over"}, {"updates", "group"}

UNREAD = {
    "sft": {"beta", "reference"} | DPO_ONLY | CRITIC_ONLY | PPO_ONLY,
    "kto": DPO_ONLY | CRITIC_ONLY | PPO_ONLY,
    "dpo": CRITIC_ONLY | PPO_ONLY,
    "turn_critic": {"reference"} | DPO_ONLY | PPO_ONLY,
    "reward": {"roles", "beta", "reference"} | DPO_ONLY | CRITIC_ONLY | PPO_ONLY,
    "ppo": {"build", "roles", "epochs", "batch_size", "beta", "reference", "replay", "replay_size"}
    | DPO_ONLY
    | CRITIC_ONLY,
}
"""The options of a stage that its trainer does not read."""


@section()
class StageSection:
    """One training stage of a round (:mod:`maporl.loops`).

    Raises:
        ValueError: a trainer lacks an option or is given one that it does not read, joint training has no whole number of epochs
            or divides by lengths, KTO has a batch of one row, or ``privileged`` or ``replay`` is something else.
    """

    train: Literal["sft", "dpo", "kto", "reward", "ppo", "turn_critic"] = option(
        help="What is trained: sft, dpo, kto (TRL's trainers), reward (TRL's reward trainer, on the verifier of "
        "reward.verifier; a later stage ppo is then paid that verifier's score, and nothing else), turn_critic (a "
        "critic of turns for each policy, by which the builder rank_halves of a later stage ranks), or ppo "
        "(on-policy updates, as the other sections describe them).",
    )
    build: str | dict[str, Any] | None = option(
        None,
        "How the data set is made of the round's dialogues: a builder, or one {name: options}. Updates have none.",
    )
    roles: tuple[str, ...] = option(
        (),
        "Only what was said in these roles is trained on; empty: everything. An agent without a role has its name.",
    )
    start: Literal["last", "initial"] = option(
        "last",
        "The weights that the stage starts from: those of the stage before it (last), or those with which the "
        "loop began (initial). A critic of turns starts from the policy's, which are its reference too.",
    )
    epochs: AboveZero = option(1.0, "Passes over the data set.")
    learning_rate: AboveZero = option(5e-6, "Learning rate at the start. It falls linearly to 0.")
    batch_size: Positive = option(8, "Rows, or pairs, of a step. kto needs at least 2.")
    beta: AboveZero | None = option(
        None,
        "How much dpo or kto holds the policy to its reference, or a critic of turns its turns' advantages. None: 0.1.",
    )
    reference: Literal["stage", "round", "initial", "none"] | None = option(
        None,
        "The reference of dpo or kto: the weights at the start of the stage (stage), of the round (round) or of "
        "the loop (initial), or none, whose log-probabilities count as 0 (none). None: stage.",
    )
    joint: bool = option(
        False,
        "For dpo: compare what all agents of a dialogue said together (MADPO): the log-ratios of the other agents "
        "are added to a policy's own. They are computed before each pass over the data set.",
    )
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
    updates: Positive | None = option(None, "For ppo: the number of updates.")
    group: Positive | None = option(
        None,
        "For ppo: the number of dialogues for each question of these updates. None: branching.group.",
    )
    norm: bool = option(False, "For dpo: divide the log-ratio of each answer by its number of tokens.")
    likelihood: NotNegative = option(
        0.0,
        "For dpo: the weight of a second loss, the mean negative log-probability of the chosen answers' tokens.",
    )
    privileged: str = option(
        PRIVILEGED,
        "For turn_critic: what it reads before everything that the agent saw, with the right {answer}. Empty: nothing.",
    )
    mean_over: Literal["turn", "dialogue"] = option(
        "turn",
        "For turn_critic: what a dialogue is worth: the sum of the means over the tokens of each turn (turn), or "
        "one mean over the tokens of all its turns (dialogue).",
    )

    def __post_init__(self):
        changed = [f.name for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]  # type: ignore[arg-type]
        if given := [name for name in changed if name in UNREAD[self.train]]:
            raise ValueError(f"{given[0]}: train: {self.train} does not read it; remove it")
        if self.train == "ppo" and self.updates is None:
            raise ValueError("updates: train: ppo needs their number, got none; give one")
        if self.train != "ppo" and self.build is None:
            raise ValueError(f"build: train: {self.train} needs a builder that makes its rows, got none; name one")
        if self.train == "kto" and self.batch_size < 2:
            raise ValueError("batch_size: train: kto compares the rows of a batch, got 1; give at least 2")
        if self.joint and self.epochs != int(self.epochs):
            raise ValueError(f"epochs: joint training makes whole passes, got {self.epochs}; give a whole number")
        if self.joint and self.norm:
            raise ValueError(
                "norm: joint adds the log-ratios of whole answers, and norm would divide their sum by one length; remove one"
            )
        try:
            check_placeholders(self.privileged, ("answer",))
        except ValueError as error:
            raise ValueError(f"privileged: it may use ['answer'] in braces, but has {error}") from None
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


@section()
class LoopSection:
    """An outer loop: rounds of sampling, building data sets, training on them, and evaluating.

    A configuration with stages is trained in rounds, and not by PPO.
    """

    rounds: Positive = option(1, "Number of rounds.")
    questions: Positive = option(256, "Questions that are sampled in a round.")
    stages: list[StageSection] = option(
        [],
        "What is trained in a round, in order, e.g. [{train: sft, build: {threshold: {above: 0.5}}}].",
    )
    accept: Literal["always", "not_worse"] = option(
        "always",
        "always, or not_worse: a round whose held-out score fell is not kept, and the next one begins where it "
        "did. The score is the accuracy of the last answers, or without labels the mean score.",
    )
