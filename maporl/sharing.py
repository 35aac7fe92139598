"""Whole teams to and from the hub: adapters or models per policy, heads, the configuration, and a card with the results."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCardData, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError
from huggingface_hub.utils import validate_repo_id

from maporl.agents import Team, policies_of
from maporl.config import Config, from_dict, read_values
from maporl.report.read import Run, RunError, read_run
from maporl.report.story import failures, story
from maporl.sections import WITH_WEIGHTS
from trl_ext.checkpoint import load_weights

RECORDS = ("config.yaml", "evaluation_before.json", "evaluation_after.json", "report.html")

_CARD = """---
{data}
---

# {name}

A team of language models that talk to each other, trained together with [`maporl`](https://pypi.org/project/maporl/).

{story}

{failures}

{results}

## Use

```python
from maporl import Team

team = Team.from_pretrained("{name}")  # to evaluate, play with, or train further
```

```bash
maporl play {name}    # take a seat at the table
maporl eval {name}    # held-out accuracy per turn
```

Each policy's folder is a model (or an adapter) of its own: {policies}. `value_head.safetensors` is a critic's head, needed only to go
on training. `config.yaml` is the whole configuration of the run, `report.html` its report.

## Method

Multi-agent PPO on dialogues: protocol `{protocol}`, task `{task}`, {updates} updates; objective `{objective}`, KL coefficient {kl_coef}.

## Citation

MAPoRL: Park et al., *MAPoRL: Multi-Agent Post-Co-Training for Collaborative Large Language Models with Reinforcement Learning*, ACL
2025, arXiv:2502.18439.
"""


def find_run(name: str | Path) -> Path:
    """The folder of a run or of a team that was pushed: a local one, else the hub's ``ORG/NAME``."""
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
            f"{name}: is no folder here, and no team on the hub that can be read ({_first_line(error)})"
        ) from None


def weights_of(folder: Path) -> Path:
    """Where the policies' folders are: in ``final`` of a run, beside the configuration of a pushed team."""
    return folder / "final" if (folder / "final").is_dir() else folder


def team_config(folder: Path, overrides: list[str] | None = None) -> Config:
    """The configuration of the team in ``folder``. Whole models are read from their own folders there: their base, which was only
    their beginning, is not needed."""
    file, root = folder / "config.yaml", weights_of(folder)
    values = read_values(file, overrides)
    agents: dict[str, dict[str, Any]] = values.get("agents") or {}
    for name, section in agents.items():
        own = root / (section.get("policy") or name)
        whole = (
            all(section.get(key) is None for key in ("tiny", "lora", "adapter")) and section.get("model") is not None
        )
        if whole and section.get("policy_per", "agent") == "agent" and own.is_dir():
            section |= {"model": str(own), "tokenizer": None, "chat_template": None}
    return from_dict(values, str(file))


def load_team(name: str | Path) -> Team:
    """What :meth:`maporl.Team.from_pretrained` returns."""
    folder = find_run(name)
    config, root = team_config(folder), weights_of(folder)
    missing = [policy for policy in _policies(config) if not (root / policy).is_dir()]
    if missing:
        raise RunError(f"{root}: has no folder for policy {missing[0]!r}; the run has not ended, or this is no team")
    team = Team.from_config(config)
    for policy in team.policies.values():
        if (root / policy.name).is_dir():  # frozen ones are as they were
            load_weights(policy.model, policy.adapter, root / policy.name)
    return team


def _policies(config: Config) -> list[str]:
    """The policies that were trained."""
    trained = [(name, s) for name, s in config.agents.items() if s.engine in WITH_WEIGHTS and s.trainable]
    return [policy for name, section in trained for policy in policies_of(name, section, config.turns())]


def push(run: str | Path, name: str, private: bool = False, dry_run: bool = False) -> tuple[str, list[tuple[str, int]]]:
    """Upload the team of a finished run as ``name``; returns its address, and (path, bytes) of what it holds.

    With ``dry_run`` nothing leaves this machine. What a repository holds besides stays.
    """
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise RunError(f"{name!r}: is no hub name ({_first_line(error)}); expected ORG/NAME") from None
    folder = Path(run)
    record = read_run(folder)
    if not (folder / "final").is_dir() or not record.config:
        raise RunError(f"{folder}: has no final weights and config.yaml; push a run that has ended")
    with tempfile.TemporaryDirectory() as staging:
        files = _pack(record, name, Path(staging))
        address = f"https://huggingface.co/{name}"
        if not dry_run:
            try:
                api = HfApi()
                api.create_repo(name, private=private, exist_ok=True)
                address = str(
                    api.upload_folder(
                        repo_id=name, folder_path=staging, commit_message="Team trained with maporl"
                    ).repo_url
                )
            except LocalTokenNotFoundError:
                raise RunError(f"{name}: nobody is logged in; run: hf auth login") from None
            except (HfHubHTTPError, OSError) as error:
                raise RunError(
                    f"{name}: could not be pushed ({_first_line(error)}); nothing else was changed"
                ) from None
    return address, files


def _pack(run: Run, name: str, staging: Path) -> list[tuple[str, int]]:
    """Lay out the repository in ``staging``."""
    final = run.folder / "final"
    policies = sorted(path.name for path in final.iterdir() if path.is_dir())
    if not policies:
        raise RunError(f"{final}: holds no policy; push a run that has ended")
    for policy in policies:
        shutil.copytree(final / policy, staging / policy)
        _address(staging / policy / "README.md", policy, name)
    for file in RECORDS:
        if (run.folder / file).is_file():
            shutil.copy2(run.folder / file, staging / file)
    (staging / "README.md").write_text(card(run, name, policies), encoding="utf-8")
    return [
        (str(path.relative_to(staging)), path.stat().st_size) for path in sorted(staging.rglob("*")) if path.is_file()
    ]


def _address(file: Path, policy: str, name: str) -> None:
    """Let a policy's card say where the policy is now."""
    if file.is_file():
        text = file.read_text(encoding="utf-8")
        file.write_text(text.replace(f'"{policy}")', f'"{name}", subfolder="{policy}")'), encoding="utf-8")


def card(run: Run, name: str, policies: list[str]) -> str:
    """The README of a pushed team."""
    config = run.config
    bases = sorted({a["model"] for a in (config.get("agents") or {}).values() if a and a.get("model")})
    data = ModelCardData(
        library_name="maporl",
        base_model=bases or None,
        tags=["maporl", "trl", "ppo", "multi-agent", "reinforcement-learning"],
    )
    told = "\n\n".join(f"**{part['title']}** {part['text']}" for part in story(run))
    failed = failures(run)
    lines = "\n".join(f"- {line['text']}" for line in failed["lines"])
    return _CARD.format(
        data=data.to_yaml(),
        name=name,
        story=told,
        failures=f"**Where it still fails** (of {failed['scope']}):\n\n{lines}" if lines else "",
        results=_results(run),
        policies=", ".join(f"`{policy}`" for policy in policies),
        protocol=(config.get("protocol") or {}).get("name"),
        task=(config.get("task") or {}).get("name"),
        updates=config.get("updates"),
        objective=(config.get("ppo") or {}).get("objective"),
        kl_coef=(config.get("ppo") or {}).get("kl_coef"),
    )


def _results(run: Run) -> str:
    if run.after is None:
        return ""
    rows = ["| turn | who | right, held out | 95% interval |", "|---|---|---|---|"]
    for number, turn in enumerate(run.after["turns"], 1):
        shares: dict[str, Any] = {**turn["agents"], "all agents": turn["team"], "majority vote": turn["majority"]}
        rows += [
            f"| {number} | {who} | {s['value']:.1%} | {s['low']:.1%} to {s['high']:.1%} |" for who, s in shares.items()
        ]
    return "\n".join(rows)


def _first_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
