"""Pack a team's folder: which files of it are uploaded, and what stands in the public forms of its texts."""

import dataclasses
import json
import re
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from maporl.config.safe_yaml import dump_yaml, parse_yaml
from maporl.errors import RunError, one_line
from maporl.integrations.hub.card import card, is_hub_name
from maporl.integrations.hub.reach import code_in
from maporl.integrations.hub.scrub import ADDRESSES, Scrubber, mark
from maporl.report.page import payload, render
from maporl.report.read import Run
from maporl.rewards.build import asks_untrained
from maporl.storage.run_folder import FINAL, INITIAL, TOKENIZERS, own_places, weights_of

EVALUATIONS = ("evaluation_before.json", "evaluation_after.json")
WEIGHTS = (
    "model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json", "adapter_model.safetensors",
    "value_head.safetensors", "tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "*.model",
)  # fmt: skip
"""The files of a policy that are uploaded as they are: weights, and vocabularies."""
TEXTS = (
    "config.json", "generation_config.json", "adapter_config.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "README.md",
)  # fmt: skip
"""The files of a policy that are uploaded without secrets and local paths."""
FOLDERS = (".", "critic")
"""The folders of a policy that are uploaded."""


def pack(run: Run, name: str, allow: Collection[str] = ()) -> tuple[dict[str, bytes | Path], list[str]]:
    """Return the repository's content by path, and the notes for the user.

    The content of a path is bytes, or a file that is uploaded as it is. Only files that a team consists of are in it
    (:func:`team_files`). Secrets and paths of this machine are taken out of all texts (:mod:`.scrub`), and all
    that is uploaded is searched for secrets, but for the tensors of weights.

    Raises:
        RunError: the run has no final weights, a file of the team is a link, or a text looks like a secret whose mark
            is not in ``allow``. The notes of the error name each mark and place.
    """
    root, policies = weights_of(run.folder), policies_in(run)
    agent_places, more = _own_folders(run)
    folders = {**more, **{policy: root / policy for policy in policies}}
    must_not_be_links(root, *(run.folder / file for file in EVALUATIONS), *folders.values())
    files, left_out = team_files(folders)
    left_out += [p.name for p in sorted(root.iterdir()) if root != run.folder and p.name not in policies]
    scrubber = Scrubber(run.folder, allow)
    public = {key: value for key, value in run.config.items() if key != "pythonpath"}  # folders of this machine
    config = scrubber.config({**public, "output_dir": name.split("/")[1]})
    for agent, places in agent_places.items():
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
    for path, source in files.items():
        contents[path] = _public_text(source, path, name, scrubber) if source.name in TEXTS else source
        if source.name not in TEXTS:
            scrubber.vocabulary(_words_of(source), path)
    if scrubber.suspected:
        raise _suspicion(run.folder, scrubber.suspected)
    bases = [
        n
        for n, s in config.get("agents", {}).items()
        if s.get("model") in scrubber.places.values()
        and (s.get("lora") or s.get("adapter") or not s.get("trainable", True))
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


def policies_in(run: Run) -> list[str]:
    """Return the names of the policies of the run's agents that have a folder of weights."""
    names: list[str] = []
    for name, section in run.agents().items():
        turns = section.get("policy_per")
        names += turns if isinstance(turns, list) else [str(section.get("policy") or name)]
    ours = re.compile(f"({'|'.join(map(re.escape, names))})(-turn\\d+|-first|-rest)?")
    root = weights_of(run.folder)
    return sorted(path.name for path in root.iterdir() if path.is_dir() and ours.fullmatch(path.name))


def _own_folders(run: Run) -> tuple[dict[str, dict[str, str]], dict[str, Path]]:
    """Return each agent's saved places, as named in the repository, and the folders of these names."""
    # such are the weights of frozen agents, and models below adapters
    agent_places: dict[str, dict[str, str]] = {}
    folders: dict[str, Path] = {}
    if asks_untrained(
        run.config.get("restate", "off"), (run.config.get("reward") or {}).get("sources") or ()
    ):  # final weights must not take the place of those before training
        return agent_places, folders
    for agent, section in run.agents().items():
        places = own_places(section, str(run.config.get("output_dir")), run.folder)
        inside = {key: Path(place).relative_to(run.folder).parts for key, place in places.items()}
        names = {key: "/".join(parts[parts[0] in (INITIAL, TOKENIZERS, FINAL) :]) for key, parts in inside.items()}
        # where a tokenizer lies alone, and weights elsewhere under the same name, the weights' folder has a tokenizer
        # too
        folders |= {names[key]: Path(places[key]) for key in sorted(places, key=lambda key: key != "tokenizer")}
        agent_places[agent] = {key: f"./{name}" for key, name in names.items()}
    return agent_places, folders


def team_files(policies: Mapping[str, Path]) -> tuple[dict[str, Path], list[str]]:
    """Return the files that a team consists of, by their path in the repository, and the files that are left out.

    ``policies`` maps the folders of the repository to those here.

    Raises:
        RunError: a file or a folder of the team is a link. It may lead to anything on this machine.
    """
    files: dict[str, Path] = {}
    left_out = []
    for policy, root in policies.items():
        inner = tuple(f"{other}/" for other in policies if other.startswith(f"{policy}/"))
        for path in sorted(root.rglob("*")):
            inside = path.relative_to(root).as_posix()
            folder = path.parent.relative_to(root).as_posix()
            wanted = folder in FOLDERS and any(fnmatchcase(path.name, pattern) for pattern in (*WEIGHTS, *TEXTS))
            if path.is_symlink() and (wanted or inside == "critic"):
                raise RunError(
                    f"{path}: is a link, and what it leads to may not be the team's; put a copy of the file in its "
                    "place"
                )
            if wanted and path.is_file():
                files[f"{policy}/{inside}"] = path
            elif (path.is_symlink() or not path.is_dir()) and not f"{policy}/{inside}".startswith(inner):
                left_out.append(f"{policy}/{inside}")
    return files, left_out


def must_not_be_links(*paths: Path) -> None:
    """Check that none of ``paths`` is a link.

    Raises:
        RunError: one is. The message names it.
    """
    for path in paths:
        if path.is_symlink():
            raise RunError(f"{path}: is a link, and what it leads to may not be the team's; put a copy in its place")


def _words_of(file: Path) -> bytes:
    """Return what can hold words in a file that is uploaded as it is. Of safetensors it is the header."""
    with file.open("rb") as content:
        if file.suffix == ".safetensors":
            return content.read(min(int.from_bytes(content.read(8), "little"), 100_000_000))  # the format's own bound
        return content.read()


def _suspicion(folder: Path, suspected: Mapping[str, tuple[str, Iterable[str]]]) -> RunError:
    """Return the error that says where in ``folder`` each suspected secret stands, and never the secret."""
    stands: dict[str, list[str]] = {secret: [] for secret in suspected}
    for file in sorted(f for f in folder.iterdir() if f.suffix in (".json", ".jsonl", ".yaml") and f.is_file()):
        for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").split("\n"), 1):
            for secret in stands:
                if secret in line or json.dumps(secret)[1:-1] in line:
                    stands[secret].append(f"{file.name}:{number}")
    error = RunError(
        f"{folder}: nothing was pushed, because {len(suspected)} of its texts look like secrets. Remove each from the "
        "places below, and replace a key that others may have seen; or allow what is not one: --allow MARK"
    )
    for secret, (kind, places) in suspected.items():
        more = f" and {len(stands[secret]) - 5} more lines" if len(stands[secret]) > 5 else ""
        error.add_note(f"  {mark(secret)}: {kind}, in {', '.join([*sorted(places), *stands[secret][:5]])}{more}")
    return error


def _public_text(file: Path, path: str, name: str, scrubber: Scrubber) -> bytes:
    """Return a policy's text file without secrets and local paths, and with the policy's new address."""
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
        raise RunError(f"{file}: cannot be read ({one_line(error, 200)}); mend it, or save the team again") from None
    return text.encode()


def _hub_names(match: re.Match[str]) -> str:
    """Return the front matter's base models that may be on the hub."""
    bases = parse_yaml(match[0])["base_model"]
    names = [base for base in ([bases] if isinstance(bases, str) else bases or []) if is_hub_name(base)]
    return yaml.safe_dump({"base_model": names}) if names else ""


def _addresses(value: Any, at: str = "") -> list[str]:
    """Return the addresses in a configuration, as ``key=value``."""
    if isinstance(value, dict):
        return [pair for key, entry in value.items() for pair in _addresses(entry, f"{at}.{key}" if at else str(key))]
    if isinstance(value, list):
        return [pair for entry in value for pair in _addresses(entry, at)]
    return [f"{at}={value}"] if value and at.split(".")[-1] in ADDRESSES else []
