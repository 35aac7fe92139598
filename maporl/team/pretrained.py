"""Read a trained team from a run's folder or from the hub, for evaluation, play or further training."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id

from maporl.config import Config, parse_config, read_values
from maporl.errors import RunError
from maporl.protocols import turns_of
from maporl.team.agents import Policy
from maporl.team.checks import check_agents
from maporl.team.loading import policy_names
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
    ``restate: base_model`` they are, because they restate answers. A configuration from the hub may not refer to
    anything outside its repository.

    Raises:
        RunError: no such team exists, or its configuration refers to something outside its folder.
        ConfigError: this version cannot read its configuration.
    """
    folder = find_run(name)
    file, root = folder / "config.yaml", weights_of(folder)
    values = read_values(file, list(overrides))
    started_from = values.get("restate") == "base_model"
    for agent, section in (values.get("agents") or {}).items():
        own = root / ((section or {}).get("policy") or agent)
        alone = section and not started_from and all(section.get(key) is None for key in ("tiny", "lora", "adapter"))
        if alone and section.get("model") and section.get("policy_per", "agent") == "agent" and own.is_dir():
            # its tokenizer's chat template was saved with the options in it
            section |= {"model": str(own), "tokenizer": None, "chat_template": None, "template_options": {}}
    config = parse_config(values, str(file))
    check_agents(config, str(file))
    local = Path(name).is_dir()
    if not local and (reach := _reaches_out(config, root)):
        raise RunError(
            f"{name}: its config.yaml sets {reach}, with which its author could reach your files, your environment or your network; "
            f"override it, or read the file and, if you trust it: hf download {name} --local-dir DIR, and give DIR"
        )
    return dataclasses.replace(config, output_dir=str(folder) if local else Path(str(name)).name), folder


def _reaches_out(config: Config, root: Path) -> str:
    """Return the first option that names an address or a path, or an empty text without such an option."""
    for name, section in config.agents.items():
        paths = {key: getattr(section, key) for key in ("model", "tokenizer", "adapter", "chat_template")}
        for key, value in paths.items():
            if (
                value is not None
                and Path(value).parent != root
                and (_is_path(value) or (key == "chat_template" and value != "fallback"))
            ):
                return f"agents.{name}.{key}={value!r:.60}"
        for key in ("api", "vllm"):
            if getattr(section, key) is not None:
                return f"agents.{name}.{key}"
    for key in ("source", "eval_source"):
        if _is_path(str(config.task.get(key) or "")):
            return f"task.{key}={config.task[key]!r:.60}"
    verifier = config.reward.verifier
    if verifier is not None and (verifier.urls or _is_path(verifier.model or "")):
        return "reward.verifier"
    return ""


def _is_path(value: str) -> bool:
    """Return whether ``value`` names a path of this machine rather than a name on the hub."""
    return value.startswith(("/", "~", ".", "file:")) or "\\" in value or ".." in Path(value).parts


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
