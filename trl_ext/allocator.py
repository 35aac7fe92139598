"""Memory that a CPU process reuses instead of giving it back to the system after every operation."""

import ctypes
import os
import platform

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4


def reuse_memory() -> bool:
    """Let glibc keep what is freed: large tensors otherwise cost page faults every time (up to 1.4 times the seconds of a
    forward and backward, ``DECISIONS.md``). For the whole process; ``MAPORL_REUSE_MEMORY=0`` leaves it alone. Whether it
    was done."""
    if platform.libc_ver()[0] != "glibc" or os.environ.get("MAPORL_REUSE_MEMORY") == "0":
        return False
    libc = ctypes.CDLL("libc.so.6")
    settings = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 2**26))
    return all(libc.mallopt(parameter, value) for parameter, value in settings)
