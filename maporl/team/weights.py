"""Load the weights that a run's folder has: those with which it began, in ``initial``, and those that it trained."""

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path

from maporl.config import Config
from maporl.protocols import policy_names
from maporl.storage.run_folder import FINAL, INITIAL, has_final, weights_of
from maporl.team.agents import Policy
from trl_ext.files.checkpoints import list_checkpoints
from trl_ext.files.manifest import DamagedCheckpoint, verify
from trl_ext.files.paths import below
from trl_ext.learning.checkpoint import CheckpointError
from trl_ext.models.forward import base_of


def has_weights(folder: Path) -> bool:
    """Return whether ``folder`` is that of a saved model or adapter, and not of a tokenizer alone."""
    return (folder / "config.json").is_file() or (folder / "adapter_config.json").is_file()


def begin_from(folder: Path, config: Config | None) -> str:
    """Return, for a message, how another run begins from the weights that the run in ``folder`` has by now: those of
    its end, or else of its newest checkpoint. ``config`` is the run's. None names the folder alone.
    """
    root, written, saved = folder / FINAL, "", list_checkpoints(folder)
    if not has_final(folder):
        if not saved:
            return "because this one has saved no weights"
        root = Path(f"{folder}-weights")
        written = f" that `maporl export {shlex.quote(str(saved[-1]))} {shlex.quote(str(root))}` writes"
    if config is None:
        return f"from its weights, in {root}{written}"
    options = ["warm_start.steps=0"] if config.warm_start.steps else []
    for name, section in config.agents.items():
        if section.weights and section.trainable:
            kind = "adapter" if section.lora or section.adapter else "model"
            options.append(f"agents.{name}.{kind}={root}/{policy_names(name, section, config)[0]}")
            options += [f"seed={config.seed}"] if kind == "adapter" and section.tiny else []  # its base is drawn
    return f"from its weights, in {root}{written}: {' '.join(dict.fromkeys(options))}"


def load_trained_weights(policies: Mapping[str, Policy], folder: Path) -> None:
    """Load the weights of each policy from the folder of its name in ``policies``, if the run ``folder`` has one.

    Frozen policies are not saved at a run's end. They have at most the weights that they began with, in ``initial/``.

    Raises:
        CheckpointError: the weights cannot be read, or they are not exactly those of their policy.
    """
    for name, policy in policies.items():
        places = (below(weights_of(folder), name), below(folder / INITIAL, name))
        weights = next((path for path in places if has_weights(path)), None)
        loaded = policy.adapter is None and policy.model.config._name_or_path == str(weights)
        if weights is not None and not loaded:
            policy.load(weights)


def load_initial(policies: Iterable[Policy], initial: Path) -> None:
    """Load the weights in ``initial`` into those ``policies`` that have some there."""
    for policy in policies:
        if has_weights(weights := below(initial, policy.name)):
            load_unless_received(policy, weights)


def load_unless_received(policy: Policy, folder: Path) -> None:
    """Load the weights of ``policy``, unless the main process loads its model and sends it to this one later."""
    if policy.adapter is not None or base_of(policy.model).device.type != "meta":
        policy.load(folder)


def check_initial(initial: Path) -> None:
    """Check that the weights in ``initial`` are those that were written.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    try:
        verify(initial, required=())
    except DamagedCheckpoint as error:
        raise CheckpointError(
            f"{error}. These weights are the reference of the KL penalty; restore them, or remove {initial} to make "
            "the same warm start again"
        ) from None
