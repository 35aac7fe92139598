"""Change one key of a recipe at a time, and train three tiny updates: which keys change nothing that is measured?

A key of which no other value changes a metric is inert. Either it is a defect, or the recipe's card gives the reason.
"""

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from maporl.advantages import BASELINES, RETURNS, SCALES, TRANSFORMS
from maporl.config.parse import read_yaml
from maporl.config.recipes import recipe_file, shrunk
from maporl.errors import ConfigError
from maporl.rewards.rules import RULES
from maporl.rollout.branching import BRANCHINGS
from maporl.runs.build import build_trainer
from maporl.training.trainer import MultiAgentPPOTrainer
from maporl.validation.load import from_dict
from trl_ext.checkpoint import CheckpointError

# what is no option of the method: where a run writes, how long it is, which models and questions it has; what saves
# memory without changing a number; and the names of the parts that the other keys belong to
NO_OPTIONS = (
    "recipe", "output_dir", "updates", "task", "agent_defaults.model", "agents.*.model", "agent_defaults.dtype",
    "training.gradient_checkpointing", "protocol.name", "protocol.game",
)  # fmt: skip
# the other values of a key that is not a number
NAMES: dict[str, tuple[Any, ...]] = {
    "returns": tuple(RETURNS), "baseline": tuple(BASELINES), "scale": tuple(SCALES), "post": tuple(TRANSFORMS),
    "rules": tuple(RULES), "how": tuple(BRANCHINGS), "unit": ("row", "rollout"), "singleton": ("error", "zero"),
    "policy_per": ("agent", "turn", "first_and_rest"), "policy": ("another",), "lora": ({"r": 2}, {"r": 2, "alpha": 64}),
    "joint": ("aligned", "cross"), "pick": ("best", "sample"), "after_illegal": ("end", "replace"),
    "objective": ("ppo", "reinforce"), "ratio": ("token", "sequence", "sequence_mean", "trajectory"),
    "kl_in": ("reward", "loss"), "kl_estimator": ("k1", "k2", "k3"), "value_loss": ("clipped", "huber"),
    "aggregation": ("token_mean", "sequence_mean", "sequence_sum", "per_main_rollout"),
    "horizon": ("current", "last", "discounted_sum"), "share": ("individual", "all"), "to": ("all", "itself"),
    "over": ("dialogue", "turn"), "mode": ("hint", "critic"), "visibility": ("predecessor", "all"),
    "answering": ("all", "last"), "lr_scheduler_type": ("linear", "cosine"), "critic": ("head", "model", "central"),
    "key": ("agent", "turn"), "critic_context": ("dialogue", "answer", "joint"), "by": ("legal",), "grounding": ("env",), "proximity": ("label",),
}  # fmt: skip
NEAR_ONE = {"dual_clip": (1.001,)}
NO_TIMES = ("time/", "memory/", "tokens_per_second")
WARM_START = {"steps": 25, "batch_size": 8, "learning_rate": 1e-2}
Keys = tuple[str | int, ...]
Metrics = dict[str, float]


def leaves(values: Any, path: Keys = ()) -> Iterator[Keys]:
    """Yield the path of every value that is neither a mapping with keys nor a list that contains mappings."""
    if isinstance(values, dict) and values:
        for key, value in values.items():
            yield from leaves(value, (*path, key))
    elif isinstance(values, list) and any(isinstance(v, dict) for v in values):
        for number, value in enumerate(values):
            yield from leaves(value, (*path, number))
    else:
        yield path


def is_option(path: Keys) -> bool:
    """Return whether a key is an option of the method."""
    patterns = [pattern.split(".") for pattern in NO_OPTIONS]
    words = [str(part) for part in path]
    if words[0] == "agents" and len(words) == 2:
        return False  # an agent without options of its own
    return not any(
        len(parts) <= len(words) and all(a in ("*", b) for a, b in zip(parts, words, strict=False)) for parts in patterns
    )


def at(values: Any, path: Keys) -> Any:
    """Return the value at a path."""
    for part in path:
        values = values[part]
    return values


def with_value(values: dict[str, Any], path: Keys, value: Any) -> dict[str, Any]:
    """Return a copy of ``values`` with another value at a path.

    If the value names an agent, two agents change places. Adapters change in all agents, because schedules let agents
    exchange them.
    """
    changed = copy.deepcopy(values)
    for agent in changed["agents"] if path[0] == "agents" and "lora" in path else ():
        at(changed, ("agents", agent, *path[2:-1]))[path[-1]] = value
    section, key = at(changed, path[:-1]), path[-1]
    if value in list(values["agents"]):
        section |= {other: section[key] for other, named in section.items() if named == value}
    section[key] = value
    return changed


def others(path: Keys, value: Any) -> list[Any]:
    """Return other values for a key, the most telling first."""
    key = next(part for part in reversed(path) if isinstance(part, str))
    if isinstance(value, bool):
        found: list[Any] = [not value]
    elif key in NEAR_ONE:
        found = [*NEAR_ONE[key]]
    elif isinstance(value, int):
        found = [2 * value, 1, 2, value + 1, 0]
    elif isinstance(value, float):
        found = [value / 1000, 2 * value, 1.0, value + 0.5]
    elif isinstance(value, list):
        found = [value[::-1], *([name] for name in NAMES.get(key, ())), *(value[:n] + value[n + 1 :] for n in range(len(value)))]
    else:
        found = [*NAMES.get(key, (f"So, {value}",))]
    return [other for other in found if other != value]


class Record(TrainerCallback):
    """Records the metrics of updates without times, and ends the training after the first that is not ``expected``."""

    def __init__(self, expected: list[Metrics] | None):
        self.expected, self.found = expected, []

    def on_log(self, args, state, control, logs, **kwargs):
        self.found.append({key: value for key, value in logs.items() if not key.startswith(NO_TIMES)})
        control.should_training_stop = self.expected is not None and self.differs()

    def differs(self) -> bool:
        """Return whether an update measured something else."""
        return self.found != self.expected[: len(self.found)]


class Perturbed:
    """A recipe's tiny version, and whether three updates of it measure something else if one key is changed.

    An adapter on a random base cannot learn enough to earn a reward. So all weights are trained, except where the options
    of ``adapters`` are the ones that are changed.
    """

    def __init__(self, name: str, folder: Path, adapters: bool = False):
        self.recipe, self.folder, self.adapters = read_yaml(recipe_file(name)), folder, adapters
        self.values = self._tiny(self.recipe)
        self.plain: list[Metrics] | None = None
        self.plain = self._train(self._built(self.values)).found
        assert len(self.plain) == 3
        assert self.differs(self.values) is False, f"{name}: the same run measured something else"

    def _tiny(self, recipe: dict[str, Any]) -> dict[str, Any]:
        values = shrunk(recipe, "") | {"warm_start": WARM_START, "evaluation": {"questions": 0}}
        values["training"]["save_steps"] = 0
        for agent in values["agents"].values() if not self.adapters else ():
            agent.pop("lora", None)
        return values

    def _built(self, values: dict[str, Any], begin: Path | None = None) -> MultiAgentPPOTrainer:
        """Return a trainer that begins with the warm start of ``begin``, or else with its own.

        Raises:
            ConfigError: the configuration is refused.
        """
        folder = self.folder / ("base" if self.plain is None else "changed")
        shutil.rmtree(folder, ignore_errors=True)
        config = from_dict(values | {"output_dir": str(folder)}, "test")
        if begin is not None:
            shutil.copytree(begin, folder / "initial")
        return build_trainer(config, quiet=True)

    def _train(self, trainer: MultiAgentPPOTrainer) -> Record:
        record = Record(self.plain)
        trainer.add_callback(record)
        trainer.train()
        return record

    def differs(self, values: dict[str, Any]) -> bool | None:
        """Return whether a configuration measures something else, or stops. None means that it is refused.

        It begins with the same weights as the tiny version. Only weights of another kind have a warm start of their own.
        """
        try:
            trainer = self._built(values, self.folder / "base/initial")
        except (CheckpointError, OSError, RuntimeError):
            trainer = self._built(values)
        except ConfigError:
            return None
        try:
            return self._train(trainer).differs()
        except ValueError:
            return True

    def changed(self, path: Keys, other: Any) -> dict[str, Any]:
        """Return the tiny version with another value of the recipe's key, or of its own key if it has replaced it."""
        values = self._tiny(with_value(self.recipe, path, other))
        return with_value(self.values, path, other) if values == self.values else values

    def options(self) -> Iterator[tuple[str, Keys, list[Any]]]:
        """Yield every option that the recipe sets: its name, its path, and other values.

        Each column of the advantage's key is an option.
        """
        for path in leaves(self.recipe):
            name = ".".join(map(str, path))
            if not is_option(path) or ("lora" in path) != self.adapters:
                continue
            if path[-1] == "key" and (columns := at(self.recipe, path)):
                for column in columns:
                    yield f"{name}.{column}", path, [[other for other in columns if other != column]]
            else:
                yield name, path, self._others(path)

    def _others(self, path: Keys) -> list[Any]:
        try:
            value = at(self.values, path)
        except (KeyError, IndexError, TypeError):  # the tiny version says it in another way
            value = at(self.recipe, path)
        agents = list(self.recipe["agents"])
        return [a for a in agents if a != value] if value in agents else others(path, value)

    def acts(self, path: Keys, values: list[Any]) -> bool | None:
        """Return whether one of these values of a key changes a metric. None means that all of them are refused."""
        found = []
        for value in values:
            found.append(self.differs(self.changed(path, value)))
            if found[-1]:
                return True
        return False if False in found else None

    def inert(self) -> dict[str, bool | None]:
        """Return the options that do not act."""
        found = {name: self.acts(path, values) for name, path, values in self.options()}
        return {name: acts for name, acts in found.items() if not acts}


def inert_options(name: str, folder: Path) -> dict[str, bool | None]:
    """Return the options of a recipe that do not act: False, or None if every other value is refused."""
    found = Perturbed(name, folder / "all").inert()
    adapters = any("lora" in path for path in leaves(read_yaml(recipe_file(name))))
    return found | (Perturbed(name, folder / "adapters", adapters=True).inert() if adapters else {})
