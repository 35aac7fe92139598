#!/usr/bin/env bash
# Installs what is given into an empty environment, away from the checkout, and runs the quickstart there for two updates.
set -euo pipefail
given=$(realpath "$1")
constraints=$(realpath "$(dirname "$0")/../constraints.txt")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
environment/bin/python -m pip install --quiet --disable-pip-version-check -c "$constraints" torch
environment/bin/python -m pip install --quiet --disable-pip-version-check -c "$constraints" "$given"
environment/bin/maporl --version
environment/bin/maporl train quickstart output_dir=run updates=2 warm_start.steps=5 evaluation.questions=20 --quiet
test -s run/report.html && test -d run/final/ann && test -d run/final/bob
environment/bin/maporl report run
environment/bin/maporl recipes list > /dev/null
echo "$(basename "$given"): installs and runs"
