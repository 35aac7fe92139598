"""Writes the table of dependencies in docs/howto/operations.md, from the metadata of the installed packages:
python docs/make_licences.py."""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/howto/operations.md"
BEGIN, END = "<!-- made by docs/make_licences.py -->\n", "<!-- end -->\n"
SPELLED = {
    "BSD": "BSD-3-Clause",
    "BSD License": "BSD-3-Clause",
    "BSD 3-Clause License": "BSD-3-Clause",
    "3-Clause BSD License": "BSD-3-Clause",
    "MIT License": "MIT",
    "Apache": "Apache-2.0",
    "Apache 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "Apache Software License 2.0": "Apache-2.0",
    "Dual License": "Apache-2.0 or BSD-3-Clause",
    "Python Software Foundation License": "PSF-2.0",
    "GNU Lesser General Public License v2 or later (LGPLv2+)": "LGPL-2.0-or-later",
    "LGPL": "LGPL-2.1-or-later",
}
"""Names of licences as packages write them, and as SPDX does."""


def licence(name: str, page: str) -> str:
    """Return the licence that a package states, or what the ``page`` says of one that is not installed.

    Some extras do not fit beside the others, and tests do without those of notebooks and pages.
    """
    try:
        about: Any = metadata(name)
    except PackageNotFoundError:
        written = re.search(rf"^\| `{re.escape(name)}` \|.*\| (.+) \|$", page, re.MULTILINE)
        if written is None:
            raise SystemExit(f"{PAGE.name} does not have {name}: install it first") from None
        return written.group(1)
    classified = [line.split(" :: ")[-1] for line in about.get_all("Classifier") or [] if line.startswith("License ::")]
    stated = about.get("License-Expression") or (about.get("License") or "").strip()
    if not stated or "\n" in stated:  # the whole text
        stated = classified[0] if classified else stated.split("\n")[0]
    return SPELLED.get(stated, stated)


def rows(page: str) -> list[str]:
    """Return the rows of the table: each direct dependency, for what it is, and its licence."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted: dict[str, list[str]] = {}
    for extra, requirements in {"maporl": project["dependencies"], **project["optional-dependencies"]}.items():
        for one in map(Requirement, requirements):
            if extra != "dev" and one.name != "maporl":
                wanted.setdefault(one.name.lower(), []).append(extra)
    return [f"| `{name}` | {', '.join(extras)} | {licence(name, page)} |" for name, extras in sorted(wanted.items())]


def text(page: str) -> str:
    """Return the ``page`` with the table as it is now."""
    table = "\n".join(["| package | for `maporl`, or the extra | licence |", "|---|---|---|", *rows(page)]) + "\n"
    return re.sub(f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}\n{table}\n{END}", page, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(text(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
