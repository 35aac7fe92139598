"""The parts of a trainer from a recipe, for a team and data of one's own in Python."""

from typing import Any

from maporl.errors import ConfigError
from maporl.run import ResolvedRun
from maporl.training.args import MultiAgentPPOConfig
from maporl.validation.load import load


def recipe_parts(name: str, overrides: list[str] | None = None) -> dict[str, Any]:
    """Return the method of a recipe as arguments of :class:`maporl.MultiAgentPPOTrainer`.

    They are ``args``, ``protocol``, ``reward``, ``advantage``, ``branching`` and ``schedule``. The team and the
    questions are yours::

        MultiAgentPPOTrainer(team=team, train_dataset=rows, reward_funcs=f, **recipe_parts("grpo_single"))

    Args:
        name: a recipe (``maporl recipes list``), or a YAML file.
        overrides: values to override, such as ``["branching.group=4", "updates=20", "output_dir=runs/grpo"]``. The keys
            are those of the YAML file.

    Raises:
        ConfigError: the recipe does not exist, a value is wrong, or the recipe has a warm start or a curriculum, which
            belong to its own team and task.
    """
    config = load(name, overrides)
    if config.warm_start.steps or config.schedule.curriculum:
        part = "warm_start" if config.warm_start.steps else "schedule.curriculum"
        raise ConfigError(
            f"recipe_parts: {name}: {part} belongs to the configuration's own team and task; run it with 'maporl "
            "train', or remove it and call maporl.warm_start, or pass curriculum="
        )
    return {
        "args": MultiAgentPPOConfig.from_config(config),
        "protocol": ResolvedRun(config).protocol,
        "reward": config.reward,
        "advantage": config.advantage,
        "branching": config.branching,
        "schedule": config.schedule,
    }
