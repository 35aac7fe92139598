"""Upload whole teams to the hub: each policy's adapter or model, the configuration, and a card with the results."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import CommitOperationAdd, HfApi, ModelCardData
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError
from huggingface_hub.utils import validate_repo_id

from maporl.config.safe_yaml import dump_yaml, parse_yaml
from maporl.errors import RunError
from maporl.report.failures import failures
from maporl.report.page import payload, render, results
from maporl.report.read import Run, read_run
from maporl.report.story import story
from maporl.rewards.likelihood import asks_untrained
from maporl.runs.public import ADDRESSES, TEXTS, Scrubber, must_not_be_links, team_files
from maporl.team.initial import INITIAL
from maporl.team.pretrained import first_line, own_places, weights_of
from maporl.team.pulled import code_in
from maporl.training.run_record import FINAL, TOKENIZERS

EVALUATIONS = ("evaluation_before.json", "evaluation_after.json")

_CARD = """---
{data}
---

# {name}

A team of language models that talk to each other, {made} with `maporl`.

{story}

{failures}

{results}

## Use

```python
from maporl import Team

team = Team.from_pretrained("{name}")  # to evaluate, play with, or train further
```

```bash
maporl play {name}    # play in place of one of the agents
maporl eval {name}    # held-out accuracy per turn
```

Each policy has a folder with a model or an adapter: {policies}. The folder `critic` in it is for further training
only. `config.yaml` is what is recorded of the run, and `report.html` is its report.

{method}

## Citation

MAPoRL: Park et al., *MAPoRL: Multi-Agent Post-Co-Training for Collaborative Large Language Models with Reinforcement Learning*, ACL
2025, arXiv:2502.18439.
"""


@dataclasses.dataclass(frozen=True)
class Pushed:
    """The content of a push: its address, the path and size in bytes of each file, and notes for the user.

    The notes say what was taken out, and what everybody can read.
    """

    address: str
    files: list[tuple[str, int]]
    notes: list[str]


def push(run: str | Path, name: str, private: bool = False, dry_run: bool = False) -> Pushed:
    """Upload the team of a finished run to the hub as ``name``.

    Other files of the repository stay. Only the files that a team consists of are uploaded. Paths of this machine, and
    what looks like a secret, are taken out of the configuration, the cards and the report.

    Args:
        run: the run's folder.
        name: the repository, ORG/NAME.
        private: whether a new repository is private.
        dry_run: whether to upload nothing, and only to return what would be uploaded.

    Raises:
        RunError: the run has not ended, records of it are damaged, a file of the team is a link, ``name`` is not a name on the hub, or the upload
            failed.
    """
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise RunError(f"{name!r}: is not a name on the hub ({first_line(error)}); expected ORG/NAME") from None
    if "/" not in name:
        raise RunError(f"{name!r}: expected ORG/NAME, an organisation's or your own name before the team's")
    record = read_run(run)
    if record.damaged:
        raise RunError(f"{record.damaged[0]} Mend it, or remove it, and push again")
    must_not_be_links(record.folder / FINAL)
    if not record.config or not _policies(record):
        raise RunError(
            f"{run}: has no final weights and config.yaml; push a run that has ended, or a folder that Team.save wrote"
        )
    contents, notes = pack(record, name)
    files = [(path, len(c) if isinstance(c, bytes) else c.stat().st_size) for path, c in sorted(contents.items())]
    address = f"https://huggingface.co/{name}"
    if dry_run:
        return Pushed(address, files, notes)
    try:
        api = HfApi()
        repository = api.create_repo(name, private=private, exist_ok=True).repo_id
        operations = [CommitOperationAdd(path, c if isinstance(c, bytes) else str(c)) for path, c in contents.items()]
        done = api.create_commit(repository, operations, commit_message="Team trained with maporl")
        address = str(done.repo_url)
    except LocalTokenNotFoundError:
        raise RunError(f"{name}: nobody is logged in; run: hf auth login") from None
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise RunError(
            f"{name}: could not be pushed ({first_line(error)}); an empty repository may have been made"
        ) from None
    return Pushed(address, files, notes)


def pack(run: Run, name: str) -> tuple[dict[str, bytes | Path], list[str]]:
    """Return the repository's content by path, and the notes for the user.

    The content of a path is bytes, or a file that is uploaded as it is. Only files that a team consists of are in it
    (:mod:`maporl.runs.public`). Secrets and paths of this machine are taken out of all texts.

    Raises:
        RunError: the run has no final weights, or a file of the team is a link.
    """
    root, policies = weights_of(run.folder), _policies(run)
    own, more = _own_folders(run)
    folders = {**more, **{policy: root / policy for policy in policies}}
    must_not_be_links(root, *(run.folder / file for file in EVALUATIONS), *folders.values())
    files, left_out = team_files(folders)
    left_out += [p.name for p in sorted(root.iterdir()) if root != run.folder and p.name not in policies]
    scrubber = Scrubber(run.folder)
    public = {key: value for key, value in run.config.items() if key != "pythonpath"}  # folders of this machine
    config = scrubber.config({**public, "output_dir": name.split("/")[1]})
    for agent, places in own.items():
        config["agents"][agent] |= places
    for section in config.get("agents", {}).values():
        if section.get("engine") == "vllm":  # the server belongs to whoever trained the team
            section |= {"engine": "transformers", "vllm": None}
    shown = dataclasses.replace(run, config=config)
    page = scrubber.values(payload([shown]), "report.html")
    contents: dict[str, bytes | Path] = {
        "config.yaml": dump_yaml(config).encode(),
        "report.html": render(page).encode(),
        "README.md": scrubber.text(card(shown, name, policies), "README.md").encode(),
    }
    for file in EVALUATIONS:
        if (run.folder / file).is_file():
            values = scrubber.values(json.loads((run.folder / file).read_text(encoding="utf-8")), file)
            contents[file] = json.dumps(values, indent=1).encode()
    for path, kept in files.items():
        contents[path] = _public_text(kept, path, name, scrubber) if kept.name in TEXTS else kept
    bases = [
        n
        for n, s in config.get("agents", {}).items()
        if s.get("model") in scrubber.places.values() and (s.get("lora") or not s.get("trainable", True))
    ]
    notes = [*scrubber.notes, *(f"left out: {root.name}/{path}" for path in left_out)]
    notes += [
        f"agents.{n}: its base is a folder of this machine; who loads the team must give agents.{n}.model"
        for n in bases
    ]
    notes += [
        f"left out: the module of {key}={imported}; who loads the team must have it, and name it again (KEY=VALUE)"
        for key, imported in code_in(public)
    ]
    notes += [f"everybody can read: {address}" for address in _addresses(config)]
    return contents, [*notes, f"everybody can read: the {run.recorded} recorded dialogues, in report.html"]


def _policies(run: Run) -> list[str]:
    """Return the names of the policies of the run's agents that have a folder of weights."""
    known: list[str] = []
    for name, section in run.agents().items():
        turns = section.get("policy_per")
        known += turns if isinstance(turns, list) else [str(section.get("policy") or name)]
    ours = re.compile(f"({'|'.join(map(re.escape, known))})(-turn\\d+|-first|-rest)?")
    root = weights_of(run.folder)
    return sorted(path.name for path in root.iterdir() if path.is_dir() and ours.fullmatch(path.name))


def _own_folders(run: Run) -> tuple[dict[str, dict[str, str]], dict[str, Path]]:
    """Return the places in each agent's section that the run has saved, as they are named in the repository, and the folders
    of these names.

    Such are the weights of frozen agents, and models below adapters.
    """
    own: dict[str, dict[str, str]] = {}
    folders: dict[str, Path] = {}
    if asks_untrained(
        run.config.get("restate", "off"), (run.config.get("reward") or {}).get("sources") or ()
    ):  # final weights must not take the place of those before training
        return own, folders
    for agent, section in run.agents().items():
        places = own_places(section, str(run.config.get("output_dir")), run.folder)
        inside = {key: Path(place).relative_to(run.folder).parts for key, place in places.items()}
        names = {key: "/".join(parts[parts[0] in (INITIAL, TOKENIZERS, FINAL) :]) for key, parts in inside.items()}
        # where a tokenizer lies alone, and weights elsewhere under the same name, the weights' folder has a tokenizer too
        folders |= {names[key]: Path(places[key]) for key in sorted(places, key=lambda key: key != "tokenizer")}
        own[agent] = {key: f"./{name}" for key, name in names.items()}
    return own, folders


def _public_text(file: Path, path: str, name: str, scrubber: Scrubber) -> bytes:
    """Return a policy's text file without secrets and local paths, and with the policy's new address.

    Raises:
        RunError: the file cannot be read as text, or as JSON if its name ends so.
    """
    policy = file.parent.name
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".json":
            return json.dumps(scrubber.config(json.loads(text), at=path), indent=2).encode()
        text = scrubber.text(text, path)
        if file.name == "README.md":
            text = re.sub(r"^(?:base_model:.*\n)(?:- .*\n)*", _hub_names, text, flags=re.MULTILINE)
            text = text.replace(f'"{policy}")', f'"{name}", subfolder="{policy}")')
    except (ValueError, yaml.YAMLError) as error:
        raise RunError(f"{file}: cannot be read ({first_line(error)}); mend it, or save the team again") from None
    return text.encode()


def _hub_names(found: re.Match[str]) -> str:
    """Return the front matter's base models that may be on the hub."""
    bases = parse_yaml(found[0])["base_model"]
    known = [base for base in ([bases] if isinstance(bases, str) else bases or []) if _hub_name(base)]
    return yaml.safe_dump({"base_model": known}) if known else ""


def _hub_name(name: str) -> bool:
    return re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) is not None


def _addresses(value: Any, at: str = "") -> list[str]:
    """Return the addresses in a configuration, as ``key=value``."""
    if isinstance(value, dict):
        return [found for key, entry in value.items() for found in _addresses(entry, f"{at}.{key}" if at else str(key))]
    if isinstance(value, list):
        return [found for entry in value for found in _addresses(entry, at)]
    return [f"{at}={value}"] if value and at.split(".")[-1] in ADDRESSES else []


def card(run: Run, name: str, policies: list[str]) -> str:
    """Return the README of a pushed team."""
    bases = sorted({a["model"] for a in run.agents().values() if _hub_name(a.get("model") or "")})
    data = ModelCardData(
        library_name="maporl",
        base_model=bases or None,
        tags=["maporl", "trl", "ppo", "multi-agent", "reinforcement-learning"],
    )
    summary = "\n\n".join(f"**{part['title']}** {part['text']}" for part in story(run))
    failed = failures(run)
    lines = "\n".join(f"- {line['text']}" for line in failed["lines"])
    return _CARD.format(
        data=data.to_yaml(),
        name=name,
        story=summary,
        failures=f"**Where it still fails** (counted over {failed['scope']}):\n\n{lines}" if lines else "",
        results=_results(run),
        policies=", ".join(f"`{policy}`" for policy in policies),
        made="trained together" if run.updates() else "saved",
        method=_method(run),
    )


def _method(run: Run) -> str:
    """Return the card's section on the training, with what the run's folder tells of it."""
    updates = run.updates()
    if not updates:
        return ""
    ppo = run.section("ppo")
    known = {
        "protocol": run.section("protocol").get("name"),
        "task": run.section("task").get("name"),
        "updates": updates[-1]["step"],
        "objective": ppo.get("objective"),
        "KL coefficient": ppo.get("kl_coef"),
    }
    told = ", ".join(f"{what} `{value}`" for what, value in known.items() if value is not None)
    return f"## Method\n\nReinforcement learning on the team's own dialogues: {told}."


def _results(run: Run) -> str:
    """Return the report's table of results as Markdown."""
    shown = [(row, row["after"]) for row in results(run) if row["after"] and row["after"]["value"] is not None]
    if not shown:
        return ""
    rows = [f"| {r['turn']} | {r['who']} | {s['value']:.1%} | {s['low']:.1%} to {s['high']:.1%} |" for r, s in shown]
    return "\n".join(["| turn | who | right, held out | 95% interval |", "|---|---|---|---|", *rows])
