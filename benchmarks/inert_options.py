"""Which keys of a recipe change nothing that three tiny updates measure, if each key is changed alone.

    python benchmarks/inert_options.py [RECIPE ...]

A key is inert if every other value that the configuration accepts leaves all metrics as they were. An inert key is either
a defect or has a reason that belongs on the recipe's card.
"""

import copy
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from maporl.advantages import BASELINES, RETURNS, SCALES, TRANSFORMS
from maporl.config.recipes import recipe_file, recipe_files, tiny_version
from maporl.errors import ConfigError
from maporl.rewards.rules import RULES
from maporl.rollout.branching import BRANCHINGS
from maporl.runs.build import build_trainer
from maporl.validation.load import from_dict
from maporl.validation.preflight import check_run

# what the tiny version replaces, and what names the part that the other keys belong to
SIZES = {
    "extends", "recipe", "task", "output_dir", "updates", "seed", "evaluation", "agents.*.model", "agents.*.system",
    "agents.*.dtype", "agents.*.lora", "ppo.response_length", "training.learning_rate", "training.value_learning_rate",
    "training.per_device_train_batch_size", "training.gradient_accumulation_steps", "training.gradient_checkpointing",
    "training.warmup_steps", "protocol.name", "agent_defaults",
}  # fmt: skip
NAMES = {
    "returns": RETURNS, "baseline": BASELINES, "scale": SCALES, "post": TRANSFORMS, "rules": RULES, "how": BRANCHINGS,
    "unit": ("row", "rollout"), "policy_per": ("agent", "turn"), "pick": ("best", "random"), "joint": ("zip", "cross"), "singleton": ("error", "zero"),
    "objective": ("ppo", "reinforce", "cispo", "gspo"), "ratio": ("token", "sequence", "sequence_mean", "trajectory"),
    "kl_in": ("reward", "loss"), "kl_estimator": ("k1", "k2", "k3"), "value_loss": ("clipped", "huber", "mse"),
    "aggregation": ("token_mean", "sequence_mean", "per_main_rollout"), "after_illegal": ("end", "replace"), "horizon": ("own_turn", "discounted_sum"),
    "share": ("own", "all", "mean"), "lr_scheduler_type": ("linear", "cosine", "cosine_warmup_with_min_lr"), "critic": ("head", "model", "central", "none"),
    "critic_context": ("dialogue", "answer", "joint"), "answering": ("all", "last"), "policy": ("another", ),
}  # fmt: skip


def leaves(values: Any, path: tuple = ()) -> Iterator[tuple]:
    """Yield the path of every value that is neither a mapping nor a list of mappings or names."""
    if isinstance(values, dict) and values:
        for key, value in values.items():
            yield from leaves(value, (*path, key))
    elif isinstance(values, list) and any(isinstance(v, dict) for v in values):
        for number, value in enumerate(values):
            yield from leaves(value, (*path, number))
    else:
        yield path


def skipped(path: tuple) -> bool:
    words = [str(part) for part in path]
    for pattern in SIZES:
        parts = pattern.split(".")
        if len(parts) <= len(words) and all(a in ("*", b) for a, b in zip(parts, words, strict=False)):
            return True
    return False


def at(values: Any, path: tuple) -> Any:
    for part in path:
        values = values[part]
    return values


def alternatives(path: tuple, value: Any) -> list[Any]:
    """Return other values for a key: names of the same kind, near numbers, a list without its last entry, other words."""
    key = next(part for part in reversed(path) if isinstance(part, str))
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [v for v in (1, 2, value * 2, value + 1, value - 1) if v != value]
    if isinstance(value, float):
        return [value * 2, value / 2, value + 0.5, min(1.0, value / 2)] if value else [0.5, 1.0]
    if isinstance(value, list):
        shorter = [value[:n] + value[n + 1 :] for n in range(len(value))]
        swapped = [[name] for name in NAMES.get(key, ()) if [name] != value]
        return [v for v in (*shorter, value[::-1], *swapped) if v != value]
    if value is None:
        return [0.1, 1, 2]
    if key in NAMES:
        return [name for name in NAMES[key] if name != value]
    return [f"So, {value}"]


def outcome(values: dict[str, Any], folder: Path, initial: Path | None) -> list[dict[str, float]] | None:
    """Return the metrics of three updates without times, or None if the configuration is refused."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        config = from_dict(values | {"output_dir": str(folder)}, "test")
        check_run(config)
        if initial is not None:
            shutil.copytree(initial, folder / "initial")
        trainer = build_trainer(config, quiet=True)
        trainer.train()
    except (ConfigError, ValueError):
        return None
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    changing = ("time/", "memory/", "tokens_per_second")
    return [{k: v for k, v in line.items() if not k.startswith(changing)} for line in lines]


def inert_keys(name: str, root: Path) -> list[str]:
    """Return the keys of the recipe ``name`` that change no metric."""
    own = yaml.safe_load(recipe_file(name).read_text())
    values = tiny_version(name, str(root / "base"))
    values["warm_start"] = {"steps": 25, "batch_size": 8, "learning_rate": 1e-2}
    values["evaluation"] = {"questions": 0}
    plain = outcome(values, root / "base", None)
    if plain is None:
        raise SystemExit(f"{name}: its tiny version is refused")
    inert = []
    for path in leaves(own):
        if skipped(path):
            continue
        try:
            value = at(values, path)
        except (KeyError, IndexError, TypeError):
            continue  # the tiny version does not have this key
        accepted = []
        for other in alternatives(path, value):
            changed = copy.deepcopy(values)
            at(changed, path[:-1])[path[-1]] = other
            measured = outcome(changed, root / "changed", root / "base/initial")
            accepted += [] if measured is None else [measured != plain]
            if any(accepted):
                break
        if accepted and not any(accepted):
            inert.append(".".join(map(str, path)))
    return inert


def main() -> None:
    """Print the inert keys of every recipe that is named, or of all."""
    for name in sys.argv[1:] or sorted(recipe_files()):
        with tempfile.TemporaryDirectory() as root:
            print(name, inert_keys(name, Path(root)), flush=True)


if __name__ == "__main__":
    main()
