"""The weights with which a run began, in the folder ``initial`` of its output folder."""

from collections.abc import Iterable
from pathlib import Path

from maporl.team.agents import Policy
from maporl.team.pretrained import has_weights
from trl_ext.files.manifest import MANIFEST, DamagedCheckpoint, verify
from trl_ext.files.paths import below
from trl_ext.learning.checkpoint import CheckpointError, load_weights
from trl_ext.models.forward import base_of

INITIAL = "initial"


def load_initial(policies: Iterable[Policy], initial: Path) -> None:
    """Load the weights in ``initial`` into those ``policies`` that have some there."""
    for policy in policies:
        if has_weights(own := below(initial, policy.name)):
            load_unless_received(policy, own)


def load_unless_received(policy: Policy, folder: Path) -> None:
    """Load the weights of ``policy``, unless the main process loads its model and sends it to this one later."""
    if policy.adapter is not None or base_of(policy.model).device.type != "meta":
        load_weights(policy.model, policy.adapter, folder)


def check_initial(initial: Path) -> None:
    """Check that the weights in ``initial`` are those that were written. Earlier versions wrote no manifest.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    try:
        if (initial / MANIFEST).exists():
            verify(initial, required=())
    except DamagedCheckpoint as error:
        raise CheckpointError(
            f"{error}. These weights are the reference of the KL penalty; restore them, or remove {initial} to make the same "
            "warm start again"
        ) from None
