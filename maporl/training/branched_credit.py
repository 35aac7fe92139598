"""Check that a branching fits the reward and the advantage, so that equal moves in equal states earn equal advantages.

A branching may compare answers as soon as they are given, and may continue only one candidate of each step. An answer
must then be credited with what it earned itself. Configurations are checked before a model loads. A trainer checks the
parts that it is given. Only the check of the advantage imports torch.
"""

from maporl.config.parse import entry_name
from maporl.config.schema import AdvantageConfig, BranchingSection, RewardSection
from maporl.errors import ConfigError
from maporl.protocols.base import Protocol
from maporl.rewards.rules import Along, build_rules
from maporl.rollout.branching import BRANCHINGS


def check_branched_credit(branching: BranchingSection, reward: RewardSection, protocol: Protocol, where: str) -> None:
    """Check that what ``reward`` credits an answer with is known, and equal for equal candidates.

    Raises:
        ConfigError: the branching compares answers that nothing scores yet, or by what other questions' answers are, or it continues one candidate of each step
            and the credit of an answer depends on what follows it. The message begins with ``where``.
    """
    kind = BRANCHINGS[branching.how]
    if kind.judges and not protocol.every_step_scored and "verdict" not in reward.sources:
        raise ConfigError(
            f"{where}: branching: {branching.how} compares answers as soon as they are given, but protocol "
            f"{protocol.label!r} has steps that nothing scores yet; use how: independent or fork_first"
        )
    if kind.judges and "repeats" in reward.sources:
        raise ConfigError(
            f"{where}: branching: {branching.how} compares the answers to each question while it is played, but reward.sources: repeats "
            "compares proposals with those to all questions of an update; use how: independent or fork_first, or leave repeats out"
        )
    if not kind.final:
        return
    for key, along in _looks_along(reward).items():
        if along != "utterance" and not (along == "turn" and protocol.simultaneous):
            raise ConfigError(
                f"{where}: branching: {branching.how} does not continue all candidates of a step, so only some have a future. "
                f"{key} looks at what follows an answer, so equal candidates would earn different credits; credit each "
                "answer with its own score (reward.rules: [own]), or use how: independent, fork_first or fork_every"
            )


def _looks_along(reward: RewardSection) -> dict[str, Along]:
    """Return, for each part of the reward that assigns credit, what an utterance's credit depends on."""
    if reward.rules:
        rules = zip(reward.rules, build_rules(reward.rules), strict=True)
        return {f"reward.rules: {entry_name(entry)}": rule.along for entry, rule in rules}
    shares: Along = "turn" if reward.share == "all" else "utterance"
    found = {f"reward.horizon: {reward.horizon}": shares if reward.horizon == "current" else "dialogue"}
    if reward.bonus is not None and any(reward.bonus.alpha[2:]):
        found["reward.bonus (its influence on the next turn)"] = "dialogue"
    return found


def check_branched_advantage(branching: BranchingSection, advantage: AdvantageConfig, where: str) -> None:
    """Check that an advantage compares utterances by what each of them earned itself, and not by what followed it.

    Raises:
        ConfigError: one candidate of each step continues, and the advantage looks at later utterances, so equal
            candidates would get different advantages. The message begins with ``where``.
    """
    if not BRANCHINGS[branching.how].final:
        return
    from maporl.advantages.returns import return_of
    from maporl.advantages.transforms import build_transforms

    ahead = [f"returns: {advantage.returns}"] if return_of(advantage).along != "utterance" else []
    ahead += ["unit: rollout"] if advantage.unit == "rollout" else []
    transforms = zip(advantage.post, build_transforms(advantage, f"{where}: advantage"), strict=True)
    ahead += [f"post: {entry_name(entry)}" for entry, transform in transforms if transform.compares_turns]
    if ahead:
        raise ConfigError(
            f"{where}: advantage.{ahead[0]} looks at other turns of a dialogue, but branching {branching.how} does not "
            "continue all candidates of a step, so only some have later turns; set advantage.returns: utterance, unit: row and no such "
            "transform, or branching.how: independent, fork_first or fork_every"
        )
