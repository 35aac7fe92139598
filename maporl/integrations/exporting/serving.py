"""How the models of an export are served, and its page: the script ``serve.sh`` for vLLM, and ``README.md``."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from maporl.integrations.exporting import agents
from maporl.integrations.exporting.folders import Folders, fields_of
from maporl.integrations.exporting.models import RANKS, Model, groups_of
from maporl.integrations.exporting.template import with_systems
from maporl.integrations.vllm.server import OLDEST

PORT = 8000
"""The port of the first server."""
TEXTS = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("texts")),
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    undefined=StrictUndefined,
)
NOT_IN_FILES = {"stop", "ignore_eos", "structured_outputs"}
"""What vLLM reads of no generation configuration."""


def write_texts(folders: Folders, notes: Sequence[str]) -> None:
    """Write ``README.md`` with ``notes``, and for vLLM ``serve.sh`` and what it needs besides the models' folders."""
    groups = groups_of(folders.models, folders.merge) if folders.engine == "vllm" else []
    differing = [model for group in groups if _differ(group) for model in group]
    fields = {model.name: fields_of(model) for model in differing}
    servers = [_server(folders, number, group) for number, group in enumerate(groups)]
    models = [_told(folders, model) for model in folders.models]
    shown = {"models": models, "servers": servers, "fields": fields, "notes": notes}
    for name in ("README.md", "serve.sh") if servers else ("README.md",):
        text = TEXTS.get_template(f"{name}.jinja").render(shown, version=".".join(map(str, OLDEST)))
        (folders.target / name).write_text(text, encoding="utf-8")
    if servers:
        (folders.target / "serve.sh").chmod(0o755)
    if fields:
        shutil.copy(str(agents.__file__), folders.target / "agents.py")
        (folders.target / "agents.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def _server(folders: Folders, number: int, group: Sequence[Model]) -> dict[str, Any]:
    """Return what ``serve.sh`` says of the ``number``-th server, and write its chat template if it needs its own."""
    adapters = [model for model in group if model.is_adapter and not folders.merge]
    whole = [model.name for model in group if model not in adapters]
    first = next((model for model in group if model.name in whole), group[0])
    names = {model.name for model in folders.models}
    file = f"chat_template-{number + 1}.jinja" if _differ(group) else None
    if file is not None:
        template = with_systems(first.template, {model.name: model.system for model in group})
        (folders.target / file).write_text(template, encoding="utf-8")
    return {
        "place": folders.places[first.name],
        "first": first.name,
        "dtype": folders.dtype(first),
        "names": whole or ["base" if "base" not in names else "base-model"],
        "models": [model.name for model in group],
        "adapters": [model.name for model in adapters],
        "rank": next(rank for rank in RANKS if rank >= max([0, *(model.options.r for model in adapters)])),
        "port": PORT + number,
        "template": file,
        "held": any(model.draw.grammar is not None for model in group),
    }


def _differ(group: Sequence[Model]) -> bool:
    """Return whether a server needs to know which of its models is asked: they have other system prompts or are drawn
    otherwise, or a generation configuration cannot say how."""
    kinds = {json.dumps([model.system, fields_of(model)], sort_keys=True) for model in group}
    return len(kinds) > 1 or not NOT_IN_FILES.isdisjoint(fields_of(group[0]))


def _told(folders: Folders, model: Model) -> dict[str, Any]:
    """Return what the page says of a model."""
    system = " ".join((model.system or "none").replace("|", r"\|").split())
    adapter = model.is_adapter and not folders.merge
    told = {"name": model.name, "place": folders.places[model.name], "dtype": folders.dtype(model), "adapter": adapter}
    return told | {"system": system if len(system) < 100 else f"{system[:100]}..."}
