"""What ``maporl export`` does: plain folders of the policies in a checkpoint."""

import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from maporl.storage.run_folder import RunExists
from trl_ext.files.atomic import new_folder
from trl_ext.files.manifest import verify
from trl_ext.learning.critics import CRITIC
from trl_ext.learning.policy import SHARDED_POLICY, save_model
from trl_ext.models.weights import read_pretrained
from trl_ext.sharding.optimizer_files import OPTIMIZER
from trl_ext.sharding.shards import SHARDS, Shards, load_model


def export(checkpoint: Path, target: Path) -> list[Path]:
    """Write the policies of ``checkpoint`` as plain model and adapter folders, with their tokenizers, into ``target``.

    ``from_pretrained`` loads them, and so does vLLM. Critics and optimizers stay behind. Main memory holds one policy
    at a time.

    Returns:
        The folders, one for each policy.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged.
        RunExists: ``target`` exists already and is not empty.
    """
    verify(checkpoint)
    must_be_new(target)
    with new_folder(target) as partial:
        for policy in sorted((checkpoint / "policies").iterdir()):
            shutil.copytree(policy, partial / policy.name, ignore=shutil.ignore_patterns(CRITIC, OPTIMIZER, SHARDS))
            if (policy / SHARDS).is_dir():
                plain_model(policy, partial / policy.name)
    return sorted(path for path in target.iterdir() if path.is_dir())


def must_be_new(target: Path) -> None:
    """Check that a folder to write does not exist, or is empty.

    Raises:
        RunExists: it holds something.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise RunExists(f"{target}: exists already and is not empty; choose a new folder")


def plain_model(policy: Path, target: Path) -> None:
    """Write the model whose shards are in the folder of a policy as ``from_pretrained`` reads it."""
    config = read_pretrained(AutoConfig, policy)
    model = AutoModelForCausalLM.from_config(config, dtype=config.dtype or torch.float32)
    load_model(model, Shards(policy / SHARDS), SHARDED_POLICY)
    save_model(model, target)
