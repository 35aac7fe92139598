"""The folders of an export: weights, tokenizers, and how answers are drawn. Nothing in them names this machine."""

import json
import shutil
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, set_seed
from transformers.utils import cached_file

from maporl.config import Config
from maporl.integrations.exporting.models import Model
from maporl.integrations.exporting.plain import plain_model
from maporl.integrations.exporting.template import Engine
from maporl.integrations.vllm.server import held_to
from maporl.team.loading import load_agents, load_tokenizers
from maporl.team.team import Team
from trl_ext.files.paths import below
from trl_ext.learning.policy import save_model
from trl_ext.models.adapters import base_state
from trl_ext.models.forward import base_of
from trl_ext.models.weights import ADAPTER_OPTIONS, ADAPTER_WEIGHTS, read_adapter, read_model, read_pretrained
from trl_ext.sharding.shards import SHARDS

WEIGHTS = ("config.json", "model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json")
PLACES = ("_name_or_path", "name_or_path")
"""The keys of JSON files in which libraries keep where a model was read."""


class Folders:
    """Writes the models of a team into a folder.

    Args:
        config: the team's configuration.
        models: its models.
        target: the folder.
        engine: what will serve them.
        merge: whether adapters are merged into their bases.
    """

    def __init__(self, config: Config, models: list[Model], target: Path, engine: Engine, merge: bool):
        self.config, self.models, self.target, self.engine, self.merge = config, models, target, engine, merge
        self.places: dict[str, str] = {}
        """Where the weights of each model are, or those below its adapter: a name on the hub, or a folder in
        ``target``."""
        self._bases: dict[str, str] = {}
        self._owners: dict[str, str] = {}

    def write(self, model: Model) -> None:
        """Write the folder of a model: its weights if it has its own, its tokenizer and how its answers are drawn."""
        folder, adapted = below(self.target, model.name), model.is_adapter and not self.merge
        folder.mkdir()
        whole = not adapted and model.has_own(self.merge)
        self.places[model.name] = self._whole(model, folder) if whole else self._base(model)
        if adapted:
            for name in (ADAPTER_OPTIONS, ADAPTER_WEIGHTS):
                shutil.copy(str(cached_file(str(model.weights), name)), folder / name)
            options = json.loads((folder / ADAPTER_OPTIONS).read_text(encoding="utf-8"))
            _write(folder / ADAPTER_OPTIONS, options | {"base_model_name_or_path": self.places[model.name]})
        model.tokenizer.save_pretrained(folder)
        _write(folder / "generation_config.json", generation(model, self.engine))
        _without_places(folder / "tokenizer_config.json")

    def _base(self, model: Model) -> str:
        """Return the name of a model on the hub, or its folder, seen from the export's, which is written the first
        time."""
        if model.base is not None and not Path(model.base).is_dir():
            return model.base
        key = model.base or f"tiny {model.policy.name}"
        if key not in self._bases:
            taken = {one.name for one in self.models} | set(self._bases.values())
            name = next(name for name in ("base", *map("base-{}".format, range(2, 99))) if name not in taken)
            self._bases[key] = name
            self._copy(model, model.base, self.target / name)
        return f"./{self._bases[key]}"  # a name without a slash could be one on the hub

    def _whole(self, model: Model, folder: Path) -> str:
        """Write a model's own weights, which vLLM needs only once for all agents of a policy. Return their folder."""
        name = model.name if self.engine == "transformers" else self._owners.setdefault(model.policy.name, model.name)
        if name == model.name:
            if model.is_adapter:
                self._merged(model, folder)
            else:
                self._copy(model, model.weights, folder)
        return f"./{name}"

    def _copy(self, model: Model, source: str | None, folder: Path) -> None:
        """Write a whole model from where it is, or a tiny one as the run built it, without its adapter."""
        if source is None:
            base = base_of(self._tinies.policies[model.policy.name].model)
            save_model(base, folder, base_state(base))
        elif (Path(source) / SHARDS).is_dir():
            plain_model(Path(source), folder)
        else:
            folder.mkdir(exist_ok=True)
            for file in [file for pattern in WEIGHTS for file in Path(source).glob(pattern)]:  # and not a critic's
                shutil.copy(file, folder / file.name)
        _without_places(folder / "config.json")

    def _merged(self, model: Model, folder: Path) -> None:
        """Write a model with its adapter in its weights."""
        if model.base is None:
            self._copy(model, None, folder)  # and read from there, without what the run's own adapter has
        base = read_model(AutoModelForCausalLM, model.base or folder, dtype=model.section.dtype)
        whole: Any = read_adapter(base, str(model.weights), model.policy.name, trainable=False)
        save_model(whole.merge_and_unload(), folder)
        _without_places(folder / "config.json")

    def dtype(self, model: Model) -> str:
        """Return the precision in which the weights are read, or "auto"."""
        if model.section.dtype != "auto":
            return model.section.dtype
        place = self.places[model.name]
        named = read_pretrained(AutoConfig, self.target / place if place.startswith("./") else place).dtype
        return "auto" if named is None else str(named).removeprefix("torch.")

    @cached_property
    def _tinies(self) -> Team:
        """The team with the tiny models that the run built, and no others."""
        tinies = {model.policy.name for model in self.models if model.section.tiny is not None}
        set_seed(self.config.seed)
        return Team(load_agents(self.config, load_tokenizers(self.config), only=tinies))


def generation(model: Model, engine: Engine) -> dict[str, Any]:
    """Return the generation configuration of a model: how evaluations draw its answers, and what ends them."""
    draw = model.draw
    values: dict[str, Any] = {"max_new_tokens": draw.max_tokens, "eos_token_id": sorted(draw.stop_ids) or None}
    values |= {"pad_token_id": model.tokenizer.pad_token_id, **({"stop_strings": list(draw.stop)} if draw.stop else {})}
    if draw.temperature > 0:
        return values | {"do_sample": True, "temperature": draw.temperature, "top_p": draw.top_p, "top_k": draw.top_k}
    # vLLM does not read do_sample, and transformers warns of a temperature beside it
    return values | ({"temperature": 0.0} if engine == "vllm" else {"do_sample": False})


def fields_of(model: Model) -> dict[str, Any]:
    """Return the fields of a request to vLLM with which it draws as evaluations do."""
    draw = model.draw
    values: dict[str, Any] = {"temperature": draw.temperature, "top_p": draw.top_p, "top_k": draw.top_k}
    values |= {"max_tokens": draw.max_tokens, "stop_token_ids": sorted(draw.stop_ids)}
    if model.tokenizer.eos_token_id not in draw.stop_ids:
        values["ignore_eos"] = True
    if draw.stop:
        values |= {"stop": list(draw.stop), "include_stop_str_in_output": True}
    if draw.grammar is not None:
        values["structured_outputs"] = held_to(draw.grammar)
    return values


def _write(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _without_places(file: Path) -> None:
    """Take out of a file of values where a library has read it on this machine."""
    values = json.loads(file.read_text(encoding="utf-8"))
    _write(file, {key: value for key, value in values.items() if key not in PLACES})
