"""What a figure was measured on, in one line, which stands beside it."""

import datetime
import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

HALF = {"amx_bf16": "AMX", "avx512_bf16": "AVX512_BF16"}
"""The instructions for products in bfloat16, best first, by their flag in ``/proc/cpuinfo``. Without them a product in
bfloat16 is slower than one in float32."""


def _cpuinfo() -> dict[str, str]:
    if not (file := Path("/proc/cpuinfo")).exists():
        return {}
    lines = (line.partition(":") for line in file.read_text().splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


def processor() -> str:
    """Return the name of the processor."""
    return _cpuinfo().get("model name") or platform.processor() or platform.machine()


def machine() -> str:
    """Return the processor, its instructions for bfloat16, its cores, the versions, the commit and the day."""
    flags = _cpuinfo().get("flags", "").split()
    half = next((name for flag, name in HALF.items() if flag in flags), "no")
    wide = "AVX512, " if "avx512f" in flags else "AVX2, " if "avx2" in flags else ""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() or "unknown"
    return (
        f"{processor()} ({wide}{half} bfloat16 instructions), {os.cpu_count()} cores; torch {version('torch')}, "
        f"transformers {version('transformers')}, commit {commit}, {datetime.date.today()}"
    )


if __name__ == "__main__":
    print(machine())
