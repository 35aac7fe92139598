"""What works with which client: build an environment for each, run its programs, and write docs/howto/clients.md.

    python benchmarks/clients/table.py [NAME ...] [--environments .venv-clients] [--keep]

Each ``client_NAME.py`` and ``client_NAME.mjs`` of this folder is a client. Its first line says what is installed for
it, and its functions are what the client can do. Each is run as a command, which needs nothing of maporl, against the
server of a run and an agent who says the lines of a script. A cell of the table says what became of one:

- ``yes``: its answer came back, nothing was refused, and each request went on with the conversation before it;
- ``changed``: the same, but a request had changed what was said before, so that another conversation began;
- the name of a field: requests with it are refused, and all is well when ``protocol.ignore`` names it;
- ``no``: it fails.

Another column says what was refused or changed. The versions are the newest unless ``--keep`` takes environments as
they are. It ends with status 1, and names the cells, if something works no longer that has worked by the page.
"""

import argparse
import ast
import datetime
import json
import re
import subprocess
import sys
import venv
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs/howto/clients.md"
ASPECTS = ("chat", "tools", "stream", "responses", "structured")
HEAD = ("client", "version", "chat", "tools", "stream", "responses", "structured output", "refused or changed", "tried")
QUESTION = "What is 1200+34?"
ADD = '<call>{"name": "add", "arguments": {"a": 1200, "b": 34}}</call>'
SAYS = {"chat": ["4", "1234"], "structured": ['{"answer": 1234}']} | {
    aspect: ["I add." + ADD, "1234"] for aspect in ("tools", "stream", "responses")
}
"""What the agent says, where a file does not say otherwise. Only the tool knows the sum before the last line."""
MORE = ["1234"] * 9
"""What it says if it is asked more often. That is an error of the client, or of its file."""
sys.path += [str(ROOT / "tests/support"), str(ROOT / "tests/serving")]


@dataclass
class Client:
    """A client: a file of this folder.

    Args:
        file: the file.
        installer: pip or npm.
        packages: what it installs. The version of the first one is told.
        aspects: the functions of the file.
        says: what the agent says to each of them.
    """

    file: Path
    installer: str
    packages: list[str]
    aspects: list[str]
    says: dict[str, list[str]]

    @property
    def name(self) -> str:
        """What its environment is called."""
        return self.file.stem.removeprefix("client_")

    @property
    def package(self) -> str:
        """The package whose version is told."""
        return self.packages[0].partition("[")[0]

    @property
    def title(self) -> str:
        """What it is called in the table."""
        return f"`{self.package}`" + " (Node.js)" * (self.installer == "npm")

    def command(self, folder: Path, aspect: str) -> tuple[str, ...]:
        """Return the command that runs one of its functions in its environment, which is in ``folder``."""
        folder = folder.resolve() / self.name
        if self.installer == "npm":
            return ("node", str(HERE / "run.mjs"), str(folder), str(self.file), aspect)
        return (str(folder / "bin/python"), str(HERE / "run.py"), self.file.stem, aspect)

    def version(self, folder: Path) -> str:
        """Return the version that is installed in its environment."""
        folder = folder / self.name
        if self.installer == "npm":
            return json.loads((folder / "node_modules" / self.package / "package.json").read_text())["version"]
        ask = f"from importlib.metadata import version; print(version({self.package!r}))"
        return subprocess.run([folder / "bin/python", "-c", ask], capture_output=True, text=True).stdout.strip()


def install(folder: Path, installer: str, packages: Sequence[str], keep: bool = False) -> None:
    """Make an environment in ``folder`` with the newest versions of packages. One that is there is kept, or renewed."""
    if installer == "npm":
        folder.mkdir(parents=True, exist_ok=True)
        if not (keep and (folder / "node_modules").is_dir()):
            newest = [f"{package}@latest" for package in packages]
            subprocess.run(["npm", "install", "--silent", "--no-audit", "--prefix", folder, *newest], check=True)
    elif not (keep and (folder / "bin/python").exists()):
        venv.create(folder, with_pip=True)
        pip = [str(folder / "bin/python"), "-m", "pip", "--disable-pip-version-check", "-qqq"]
        subprocess.run([*pip, "install", "--no-compile", "--upgrade", *packages], check=True)


def clients() -> list[Client]:
    """Return the clients of this folder, by name."""
    found = []
    for file in sorted(HERE.glob("client_*.*")):
        text = file.read_text()
        installed = re.match(r'(?:"""|// )(pip|npm) install ([^"\n]+)', text)
        assert installed is not None, f"{file}: its first line should say what is installed, as in: pip install NAME"
        defined = re.findall(r"^(?:export )?(?:async )?(?:def|function) (\w+)\(", text, re.MULTILINE)
        lines = ast.parse(text).body if file.suffix == ".py" else []
        own = [ast.literal_eval(line.value) for line in lines if ast.unparse(line).startswith("SAYS = ")]  # type: ignore[attr-defined]
        says = {**SAYS, **(own[0] if own else {})}
        aspects = [aspect for aspect in ASPECTS if aspect in defined]
        found.append(Client(file, installed[1], installed[2].split(), aspects, says))
    return found


@dataclass
class Found:
    """What became of a function: a word for the table, and what was refused or changed."""

    word: str
    whys: list[str] = field(default_factory=list)


def tried(client: Client, aspect: str, run: Callable[..., Any] | tuple[str, ...], ignore: Sequence[str] = ()) -> Found:
    """Play a function of a client, or the command that runs it, with an agent of a script."""
    from test_clients import play

    says, options = client.says[aspect], {"seconds": 120, "ignore": tuple(ignore)}
    if not callable(run):
        options["command"] = run
    dialogue, bodies = play(run if callable(run) else None, {"solver": [*says, *MORE]}, QUESTION, own=True, **options)
    outcome = dialogue.outcome or {}
    refused = list(dict.fromkeys(outcome.get("refused", ())))
    fields = [why.partition(":")[0] for why in refused if "protocol.ignore" in why]
    if fields and not set(fields) <= set(ignore):
        further = tried(client, aspect, run, [*ignore, *fields])
        named = [f"`{name}`" for name in fields] + [further.word] * further.word.startswith("`")
        return Found("no" if further.word == "no" else ", ".join(named), [*refused, *further.whys])
    if refused or "failure" in outcome:
        return Found("no", refused or outcome["failure"].splitlines()[-1:])
    asked = len(dialogue.utterances)
    if not outcome["answer"].endswith("1234") or asked != len(says):
        return Found("no", [f"it answered {outcome['answer']!r:.60} after {asked} requests instead of {len(says)}"])
    if aspect in ("tools", "stream") and asked > 1 and "1234" not in json.dumps(bodies[-1]):
        return Found("no", ["it does not show what its tool returned"])
    if not all({"stream": body.get("stream"), "responses": "input" in body}.get(aspect, True) for body in bodies):
        return Found("no", [f"it asks for no {aspect}"])
    changed = [u.tags["history"] for u in dialogue.utterances if u.after is None and "history" in u.tags]
    return Found("changed" if changed else "yes", changed)


def row(client: Client, version: str, run: Callable[[str], Callable[..., Any] | tuple[str, ...]]) -> list[str]:
    """Run the functions of a client, each as ``run`` says, and return its row of the table."""
    found = {aspect: tried(client, aspect, run(aspect)) for aspect in client.aspects}
    whys = [re.split(r", got |; |, and nothing", why)[0] for one in found.values() for why in one.whys]
    told = "<br>".join(dict.fromkeys(why.replace("|", "\\|") for why in whys))
    cells = [found[aspect].word if aspect in found else "" for aspect in ASPECTS]
    return [client.title, version, *cells, told, str(datetime.date.today())]


def rows(page: str) -> dict[str, list[str]]:
    """Return the rows of the table in the text of a page, by client."""
    lines = re.findall(r"^\| (`.+) \|$", page, re.MULTILINE)
    return {cells[0]: cells for cells in (re.split(r" ?(?<!\\)\| ?", line) for line in lines)}


def written(page: str, told: dict[str, list[str]]) -> str:
    """Return the text of a page with these rows as its table."""
    table = [HEAD, ["---"] * len(HEAD), *(told[name] for name in sorted(told, key=str.lower))]
    text = "".join(f"| {' | '.join(cells)} |\n" for cells in table)
    return re.sub(r"^\| client \|.*?\n(?=\n)", lambda _: text, page, flags=re.MULTILINE | re.DOTALL)


def main() -> int:
    """Try the clients, print their rows and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="which clients. Default: all")
    parser.add_argument("--environments", type=Path, default=ROOT / ".venv-clients", help="where environments are")
    parser.add_argument("--keep", action="store_true", help="take environments as they are")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # of programs that fail
    chosen = [client for client in clients() if not options.names or client.name in options.names]
    if unknown := set(options.names) - {client.name for client in chosen}:
        parser.error(f"{', '.join(sorted(unknown))}: expected some of {', '.join(one.name for one in clients())}")
    worse, folder = [], options.environments
    for client in chosen:
        try:
            install(folder / client.name, client.installer, client.packages, options.keep)
        except subprocess.CalledProcessError as error:  # pip and npm have said why
            worse.append(f"{client.name}: it cannot be installed: {error}")
            continue
        told = row(client, client.version(folder), partial(client.command, folder))
        print(" | ".join(told), flush=True)
        before = rows(PAGE.read_text())
        cells = zip(HEAD, before.get(client.title, told), told, strict=True)
        worse += [f"{client.name}: {what}: yes, now {now}" for what, was, now in cells if was == "yes" != now]
        PAGE.write_text(written(PAGE.read_text(), {**before, client.title: told}))
    print(*worse, sep="\n")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
