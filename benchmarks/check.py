"""Measure what ``maporl check`` takes beyond the imports, for the quickstart and the tiny version of every recipe.

    python benchmarks/check.py [--most 5]

Each is read and checked once, in one process that has imported everything. Seconds of the processor count, which other
programs on the machine do not lengthen, and seconds of the wall beside them. What waits for servers, such as games in
processes of their own, is in the latter.
"""

import argparse
import os
import time

from machine import machine

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=5, help="how many of the slowest are listed")
    options = parser.parse_args()
    began = time.process_time()
    from maporl.cli.common import load_libraries

    load_libraries()
    from maporl.config.recipes import recipe_files
    from maporl.errors import UserError
    from maporl.methods.tiny_versions import tiny_version
    from maporl.validation.load import from_dict, load
    from maporl.validation.preflight import check_run

    print(machine())
    print(f"imports: {time.process_time() - began:.1f} s of the processor")
    taken: list[tuple[float, float, str]] = []
    for name in ("quickstart", *recipe_files()):
        cpu, wall = time.process_time(), time.monotonic()
        try:
            check_run(load(name) if name == "quickstart" else from_dict(tiny_version(name, "runs/check"), name))
        except UserError as error:
            print(f"{name}: {error}")
            continue
        taken.append((time.process_time() - cpu, time.monotonic() - wall, name))
    quickstart = next(row for row in taken if row[2] == "quickstart")
    print(f"quickstart: {quickstart[0]:.2f} s of the processor, {quickstart[1]:.2f} s of the wall")
    print(
        f"{len(taken)} configurations, {sum(cpu for cpu, _, _ in taken) / len(taken):.2f} s in the mean; the slowest:"
    )
    for cpu, wall, name in sorted(taken, reverse=True)[: options.most]:
        print(f"{name}: {cpu:.2f} s of the processor, {wall:.2f} s of the wall")


if __name__ == "__main__":
    main()
