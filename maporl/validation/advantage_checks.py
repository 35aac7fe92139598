"""Check an advantage's configuration: its slots, and the columns that they need."""

from collections.abc import Sequence

from maporl.advantages.baselines import baseline_of
from maporl.advantages.estimator import check_columns
from maporl.advantages.returns import return_of
from maporl.advantages.transforms import build_transforms
from maporl.config.schema import AdvantageConfig
from maporl.errors import ConfigError

_PERSISTENT = ("agent", "role", "game", "turn")


def check_advantage(config: AdvantageConfig, recorded: Sequence[str], where: str) -> None:
    """Check that the slots of an advantage fit each other, and that the columns that they need are ``recorded``.

    Raises:
        ConfigError: two slots exclude each other, or a column is not recorded. The message begins with ``where``.
    """
    try:
        check_columns(config, recorded)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
    transforms = build_transforms(config, f"{where}: advantage")
    returns, baseline = return_of(config), baseline_of(config)
    if returns.needs_critic and not baseline.needs_critic:
        raise ConfigError(
            f"{where}: advantage: returns {config.returns} needs a critic's values, but baseline is {config.baseline!r}; set "
            "advantage.baseline: critic"
        )
    if baseline.reads_after and (returns.needs_critic or returns.per_token):
        raise ConfigError(
            f"{where}: advantage: baseline {config.baseline} reads the critic after an utterance, and returns {config.returns} before it; "
            "set advantage.returns: utterance (or reward_to_go, tree)"
        )
    if returns.per_token and config.baseline != "none" and not baseline.needs_critic:
        raise ConfigError(
            f"{where}: advantage: returns {config.returns} goes with baseline critic or none, got {config.baseline!r}; for a baseline "
            "over groups set advantage.returns: utterance (or reward_to_go, tree)"
        )
    per_utterance = transforms or config.ddof == 0 or config.unit != "row" or config.singleton != "error"
    if returns.per_token and per_utterance:
        raise ConfigError(
            f"{where}: advantage: returns {config.returns} runs over tokens, whitened with ddof 1; post, ddof: 0, unit: rollout "
            "and singleton: zero need one number per utterance: set advantage.returns: utterance, or remove them"
        )
    if any(transform.per_token for transform in transforms) and len(transforms) > 1:
        raise ConfigError(f"{where}: advantage.post: cumulative_kl works on tokens and stands alone; remove the others")
    for number, term in enumerate(config.plus):
        own = term.within(config)
        if return_of(own).needs_critic or return_of(own).per_token or baseline_of(own).needs_critic:
            raise ConfigError(
                f"{where}: advantage.plus.{number}: returns {own.returns} with baseline {own.baseline} needs a critic or runs over "
                "tokens; what is added compares rows, as returns: reward_to_go with baseline: mean"
            )
        if baseline_of(own).remembers:
            raise ConfigError(
                f"{where}: advantage.plus.{number}: baseline {own.baseline} keeps means between updates; use mean"
            )
    if config.plus and (returns.per_token or any(transform.per_token for transform in transforms)):
        raise ConfigError(
            f"{where}: advantage.plus adds numbers of utterances, and {config.returns} or post runs over tokens"
        )
    if config.multi_objective_aggregation == "normalize_then_sum" and (returns.needs_critic or returns.per_token):
        raise ConfigError(
            f"{where}: advantage.multi_objective_aggregation: normalize_then_sum compares the rewards of utterances, and returns "
            f"{config.returns} does not; set advantage.returns: utterance"
        )
    if baseline.remembers and (passing := [name for name in config.key if name not in _PERSISTENT]):
        raise ConfigError(
            f"{where}: advantage: baseline {config.baseline} keeps a mean for each {list(config.key)}, but {passing[0]!r} never has "
            f"the same value again, so no mean would ever be read; use columns of {list(_PERSISTENT)}"
        )


def needs_critic(config: AdvantageConfig) -> bool:
    """Return whether an advantage cannot be computed without a critic.

    PPO's ``token_gae`` can: without values it is the discounted sum of the rewards to come.
    """
    returns = return_of(config)
    return baseline_of(config).needs_critic and (returns.needs_critic or not returns.per_token)
