"""Read a trained team from a run's folder or from the hub, for evaluation, play or further training."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id

from maporl.config import Config, parse_config, read_yaml
from maporl.config.imports import with_imports
from maporl.config.parse import override
from maporl.errors import RunError
from maporl.protocols import turns_of
from maporl.team.agents import Policy
from maporl.team.checks import check_agents
from maporl.team.loading import policy_names
from maporl.team.pulled import reach_of
from trl_ext.checkpoint import load_weights


def find_run(name: str | Path) -> Path:
    """Return the folder of a run or of a pushed team: a local folder, or else a download of the hub's ``ORG/NAME``.

    Raises:
        RunError: neither exists, or it cannot be read.
    """
    folder = Path(name)
    if folder.is_dir():
        if not (folder / "config.yaml").is_file():
            raise RunError(f"{folder}: has no config.yaml; give a run's output_dir, or the hub name of a team")
        return folder
    try:
        validate_repo_id(str(name))
        return Path(
            snapshot_download(
                str(name), allow_patterns=["*.json", "*.yaml", "*.safetensors", "*.jinja", "*.txt", "*.model"]
            )
        )
    except (HFValidationError, HfHubHTTPError, OSError) as error:
        raise RunError(
            f"{name}: neither a folder here nor a team on the hub that can be read ({first_line(error)})"
        ) from None


def weights_of(folder: Path) -> Path:
    """Return the folder with the policies' folders: ``final`` in a run, and ``folder`` itself in a pushed team."""
    return folder / "final" if (folder / "final").is_dir() else folder


def read_team(name: str | Path, overrides: Sequence[str] = ()) -> tuple[Config, Path]:
    """Return the configuration of the team ``name``, and its folder.

    Fully trained models are read from their own folders there, so the models that they started from are not needed. With
    ``restate: base_model`` they are, because they restate answers. A configuration from the hub may name things on the
    hub only (:mod:`maporl.team.pulled`). What ``overrides`` set is the user's own, and may name anything. Modules that a local
    configuration names are imported (:mod:`maporl.config.imports`).

    Raises:
        RunError: no such team exists, or its configuration refers to something outside its folder.
        ConfigError: this version cannot read its configuration, or a module that it names cannot be imported.
    """
    folder, local = find_run(name), Path(name).is_dir()
    file, root = folder / "config.yaml", weights_of(folder)
    # a team from the hub brings no code: what the user's own overrides name is in the present folder
    values = override(read_yaml(file, extends=False), overrides, [folder if local else Path.cwd()])
    parse_config(values, str(file))  # the types are right from here on
    started_from = values.get("restate") == "base_model"
    for agent, section in values["agents"].items():
        own = root / ((section or {}).get("policy") or agent)
        alone = section and not started_from and all(section.get(key) is None for key in ("tiny", "lora", "adapter"))
        if alone and section.get("model") and section.get("policy_per", "agent") == "agent" and own.is_dir():
            # its tokenizer's chat template was saved with the options in it
            section |= {"model": str(own), "tokenizer": None, "chat_template": None, "template_options": {}}
    if not local and (reach := reach_of(values, override({}, overrides, [Path.cwd()]), root)):
        raise RunError(
            f"{name}: its config.yaml sets {reach}, with which its author could reach your files, your environment or your network; "
            f"override it (KEY=VALUE), or read the file and, if you trust it: hf download {name} --local-dir DIR, and give DIR"
        )
    config = with_imports(parse_config(values, str(file)), str(file))
    check_agents(config, str(file))
    return dataclasses.replace(config, output_dir=str(folder) if local else Path(str(name)).name), folder


def check_complete(config: Config, folder: Path) -> None:
    """Check that the folder of a team has weights for every policy that was trained.

    Raises:
        RunError: weights are missing. The message names the first such policy.
    """
    root = weights_of(folder)
    trained = [(name, s) for name, s in config.agents.items() if s.weights and s.trainable]
    policies = [policy for name, section in trained for policy in policy_names(name, section, turns_of(config))]
    missing = [policy for policy in policies if not (root / policy).is_dir()]
    if missing:
        raise RunError(f"{root}: has no folder for policy {missing[0]!r}; the run has not ended, or this is not a team")


def load_trained_weights(policies: Mapping[str, Policy], folder: Path) -> None:
    """Load the weights of each policy from the folder of its name in ``policies``, if the run ``folder`` has one.

    Frozen policies are not saved. They have at most the weights that a warm start left, in ``initial/``.

    Raises:
        CheckpointError: the weights cannot be read, or they are not exactly those of their policy.
    """
    for name, policy in policies.items():
        own = next((path for path in (weights_of(folder) / name, folder / "initial" / name) if path.is_dir()), None)
        known = policy.adapter is None and policy.model.config._name_or_path == str(own)
        if own is not None and not known:
            load_weights(policy.model, policy.adapter, own)


def first_line(error: BaseException) -> str:
    """Return a library's error message, which may have many lines, as one line of at most 200 characters."""
    return " ".join(str(error).split())[:200]
