"""Read the folder of a trained team, here or on the hub: its configuration, and whether it is complete. No model is
loaded."""

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from maporl.config import Config, parse_config, read_yaml
from maporl.config.agents import name_faults, section_faults
from maporl.config.imports import extension, with_imports
from maporl.config.parse import override
from maporl.errors import RunError, refuse
from maporl.protocols import policy_names
from maporl.rewards.build import asks_untrained
from maporl.storage.run_folder import own_places, weights_of
from trl_ext.files.paths import below


def read_team(name: str | Path, overrides: Sequence[str] = ()) -> tuple[Config, Path]:
    """Return the configuration of the team ``name``, and its folder.

    What was saved in the folder is read from there, wherever the folder lies now. So the models that fully trained ones
    started from are not needed. With ``restate: base_model`` they are, because they restate answers. A configuration
    from the hub may name things on the hub only (:mod:`maporl.integrations.hub.reach`). What ``overrides`` set is the
    user's own, and may name anything. Modules that a local configuration names are imported
    (:mod:`maporl.config.imports`). ``only_in_python`` is left with what playing needs.

    Raises:
        RunError: no such team exists, or its configuration refers to something outside its folder.
        ConfigError: this version cannot read its configuration, or a module that it names cannot be imported.
    """
    local, hub, what = Path(name).is_dir(), "maporl.integrations.hub", f"the team {name}"
    folder = _local(Path(name)) if local else extension(f"{hub}.pull:download", what)(str(name))
    file, root = folder / "config.yaml", weights_of(folder)
    # a team from the hub brings no code: what the user's own overrides name is in the present folder
    values = override(read_yaml(file, extends=False), overrides, [folder if local else Path.cwd()])
    overridden = override({}, overrides, [Path.cwd()])
    parsed = parse_config(values, str(file))  # the types are right from here on
    refuse(name_faults(parsed), str(file))
    for agent, section in values["agents"].items():
        if section:
            agent_overrides = (overridden.get("agents") or {}).get(agent) or {}
            section |= own_places(section, values["output_dir"], folder)
            if (
                not asks_untrained(values.get("restate", "off"), (values.get("reward") or {}).get("sources") or ())
                and not {"model", "adapter", "tokenizer"} & agent_overrides.keys()
            ):
                section |= _trained(section, below(root, policy_names(agent, parsed.agents[agent], parsed)[0]))
    if not local and (reach := extension(f"{hub}.reach:reach_of", what)(values, overridden, root)):
        raise RunError(
            f"{name}: its config.yaml sets {reach}, with which its author could reach your files, your environment or "
            f"your network; override it (KEY=VALUE), or read the file and, if you trust it: hf download {name} "
            "--local-dir DIR, and give DIR"
        )
    config = with_imports(parse_config(values, str(file)), str(file))
    refuse(section_faults(config), str(file))
    needed = {key: what for key, what in config.only_in_python.items() if not key.startswith("training.")}
    output = str(folder) if local else Path(str(name)).name
    return dataclasses.replace(config, output_dir=output, only_in_python=needed), folder


def _local(folder: Path) -> Path:
    if not (folder / "config.yaml").is_file():
        raise RunError(f"{folder}: has no config.yaml; give a run's output_dir, or the hub name of a team")
    return folder


def _trained(section: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the values that replace those of an agent's ``section``, from its policy's ``folder`` of weights."""
    values: dict[str, Any] = {}
    if section.get("adapter") and (folder / "adapter_config.json").is_file():
        values["adapter"] = str(folder)
    elif (folder / "config.json").is_file() and not any(section.get(key) for key in ("tiny", "lora", "adapter")):
        values["model"] = str(folder)
    if section.get("tiny") is None and (folder / "tokenizer_config.json").is_file():
        # its chat template was saved with the options in it
        values |= {"tokenizer": str(folder), "chat_template": None, "template_options": {}}
    return values


def check_complete(config: Config, folder: Path) -> None:
    """Check that the folder of a team has weights for every policy that was trained.

    Raises:
        RunError: weights are missing. The message names the first such policy.
    """
    root = weights_of(folder)
    trained = [(name, s) for name, s in config.agents.items() if s.weights and s.trainable]
    policies = [policy for name, section in trained for policy in policy_names(name, section, config)]
    missing = [policy for policy in policies if not below(root, policy).is_dir()]
    if missing:
        again = f"maporl train {shlex.quote(str(folder / 'config.yaml'))} --resume"
        why = f"the run has not ended ({again}), or this is not a team"
        raise RunError(f"{root}: has no folder for policy {missing[0]!r}; {why}")
