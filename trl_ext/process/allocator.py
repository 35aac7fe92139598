"""Let a CPU process reuse freed memory. By default glibc returns large blocks to the system at once."""

import ctypes
import os
import platform

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4


def reuse_memory() -> bool:
    """Let glibc keep freed memory for reuse, in the whole process. Return whether the setting was changed.

    Without it, every large tensor costs page faults. A forward and backward pass then takes up to 1.4 times as long
    (``docs/lab/speed.md`` has the measurement). The setting stays as it is on systems without glibc, and where the
    environment variable ``MAPORL_REUSE_MEMORY`` is 0.
    """
    if platform.libc_ver()[0] != "glibc" or os.environ.get("MAPORL_REUSE_MEMORY") == "0":
        return False
    libc = ctypes.CDLL("libc.so.6")
    settings = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 2**26))
    return all(libc.mallopt(parameter, value) for parameter, value in settings)
