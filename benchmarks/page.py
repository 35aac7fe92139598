"""Run the commands of docs/performance.md one after the other, each with a log of its own.

    python benchmarks/page.py [--logs FOLDER] [--only 1 4] [--list]

The page itself says what runs: each command stands in a block of it, below a comment with its estimated minutes. The
page also says which variables the commands read. A log has the machine, the command, what it printed, and how it ended.
Later commands run even if one fails. The exit status is 1 if one failed.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from machine import machine

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/performance.md"


def commands(page: str) -> list[tuple[int, str]]:
    """Return the estimated minutes of each command of the page, and the command."""
    return [(int(minutes), line) for minutes, line in re.findall(r"^# (\d+) minutes?\n(.*)$", page, re.MULTILINE)]


def check_variables(wanted: list[str]) -> None:
    """Check before hours of work that every variable of the commands names a file or folder."""
    for name in sorted({name for line in wanted for name in re.findall(r"\$(\w+)", line)}):
        if not os.path.exists(os.environ.get(name, "")):
            sys.exit(f"{name}={os.environ.get(name, '')}: no such file or folder; set it as docs/performance.md says")


def run(command: str, log: Path, folder: Path) -> int:
    """Run a command in ``folder``, where it may leave files for the next ones. Return its exit status."""
    command = command.replace(" benchmarks/", f" {ROOT}/benchmarks/").replace("python ", f"{sys.executable} ", 1)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    begun = time.monotonic()
    with log.open("w") as file:
        file.write(f"{machine()}\n{command}\n\n")
        file.flush()
        ended = subprocess.run(
            ["bash", "-c", command], cwd=folder, env=environment, stdout=file, stderr=file
        ).returncode
        file.write(f"\nexit status {ended} after {(time.monotonic() - begun) / 60:.1f} minutes\n")
    return ended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logs", type=Path, default=Path("measured"), help="a folder for the logs")
    parser.add_argument("--only", type=int, nargs="+", metavar="NUMBER", help="numbers of --list")
    parser.add_argument("--list", action="store_true", help="print the commands and their estimated minutes")
    options = parser.parse_args()
    found = dict(enumerate(commands(PAGE.read_text()), 1))
    unknown = sorted(set(options.only or []) - set(found))
    if unknown:
        parser.error(f"--only {unknown[0]}: the page has commands 1 to {len(found)}")
    chosen = {number: found[number] for number in options.only or found}
    if options.list:
        for number, (minutes, command) in chosen.items():
            print(f"{number:2}  {minutes:3} min  {command}")
        print(f"{sum(minutes for minutes, _ in chosen.values())} minutes together, estimated")
        return
    check_variables([command for _, command in chosen.values()])
    options.logs.mkdir(parents=True, exist_ok=True)
    failed = []
    for number, (minutes, command) in chosen.items():
        log = options.logs / f"{number}.log"
        print(f"{number}: about {minutes} minutes, {log}: {command}", flush=True)
        if run(command, log.resolve(), options.logs.resolve()):
            failed.append(number)
            print(f"{number} FAILED; {log} says why", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
