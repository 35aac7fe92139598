"""The isolation of the sandbox by the kernel (seccomp, Landlock, limits), which does not depend on Python.

Three means of Linux, none of which needs privileges. *Resource limits* bound CPU time and memory, and refuse new
descriptors, processes and growing files. *Landlock* (since Linux 5.13) takes every path from the worker once it has
loaded what it needs. *seccomp* leaves a snippet's process the few system calls with which it computes, waits, and reads
and writes the pipes that it was given; every other call fails. Without it nothing runs: the other two do not keep a
snippet from the worker's process. The worker runs without site-packages, so that ctypes is the only way to these calls.
"""

import ctypes
import os
import platform
import resource
import struct
import sys
from functools import cache
from typing import NamedTuple

_PR_GET_SECCOMP, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 21, 22, 2
_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 4, 38
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000 | 1, 0  # refused calls fail with EPERM
_PROT_EXEC = 4


class _Calls(NamedTuple):
    """The numbers of system calls on one architecture. ``plain`` are allowed with any arguments."""

    architecture: int
    mmap: int
    mprotect: int
    plain: tuple[int, ...]


# plain: read, write, munmap, brk, mremap, clock_gettime, gettimeofday, nanosleep, clock_nanosleep, getrandom,
# rt_sigreturn, exit, exit_group. What is read and written is what the process was given. The allocators do without
# madvise where it fails.
_CALLS = {
    "x86_64": _Calls(0xC000003E, 9, 10, (0, 1, 11, 12, 25, 228, 96, 35, 230, 318, 15, 60, 231)),
    "aarch64": _Calls(0xC00000B7, 222, 226, (63, 64, 215, 214, 216, 113, 169, 101, 115, 278, 139, 93, 94)),
}
_LANDLOCK_CREATE, _LANDLOCK_RESTRICT = 444, 446  # the same numbers on both architectures
_LANDLOCK_VERSION = 1
# bits of the rights that each version of Landlock knows: files, TCP ports, signals and abstract sockets
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 5: 16}
_PORT_RIGHTS = {4: 2}
_SCOPES = {6: 2}


def confine(cpu_seconds: int, memory_mb: int) -> None:
    """Have the kernel refuse new descriptors, processes, growing files, core files, and more memory or CPU time."""
    for name, soft, hard in (
        (resource.RLIMIT_CPU, cpu_seconds, cpu_seconds + 1),  # soft: SIGXCPU, which tells it from other deaths
        (resource.RLIMIT_AS, memory_mb << 20, memory_mb << 20),
        (resource.RLIMIT_FSIZE, 0, 0),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_NPROC, 0, 0),
        (resource.RLIMIT_NOFILE, 0, 0),  # what is open stays usable
    ):
        resource.setrlimit(name, (soft, hard))


def filter_missing() -> str | None:
    """Why system calls cannot be filtered here, or None if they can. It asks the kernel and changes nothing."""
    if sys.platform != "linux":
        return f"{sys.platform} has no seccomp"
    if platform.machine() not in _CALLS or struct.calcsize("P") != 8:
        return (
            f"no list of system calls for {platform.machine()} ({struct.calcsize('P') * 8} bits); there is one for "
            f"{', '.join(_CALLS)}"
        )
    try:
        if _libc().prctl(_PR_GET_SECCOMP, 0, 0, 0, 0) < 0:
            return "this kernel has no seccomp"
    except (ImportError, OSError, AttributeError) as error:
        return f"ctypes does not reach the C library: {error}"
    return None


class SystemCallFilter:
    """A seccomp filter that leaves a process what it needs to compute, to take memory, to wait, and to read and write
    pipes.

    Memory is never executable. The program is made once and serves every fork, because what a fork does by ctypes costs
    it a tenth of its time. Its calls are those of one architecture: another one's, with other numbers, end the process.

    Raises:
        OSError: the kernel refuses what a filter needs.
    """

    def __init__(self) -> None:
        calls = _CALLS[platform.machine()]
        self._steps = ctypes.create_string_buffer(b"".join(_program(calls)))
        count = len(self._steps.raw) // 8
        self._program = ctypes.create_string_buffer(struct.pack("@HP", count, ctypes.addressof(self._steps)))
        self._place, self._prctl = ctypes.addressof(self._program), _libc().prctl
        # forks inherit both: they gain no rights, and nobody reads the memory of one that crashes, nor attaches to it
        _prctl(_PR_SET_NO_NEW_PRIVS, 1, 0)
        _prctl(_PR_SET_DUMPABLE, 0, 0)

    def install(self) -> None:
        """Filter the calls of this process from now on. This cannot be undone.

        Raises:
            OSError: the kernel refuses.
        """
        if self._prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, self._place, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"seccomp: {os.strerror(ctypes.get_errno())}")


def forbid_paths() -> bool:
    """Take every path, TCP port and other process's signals from this process and its forks, as far as Landlock can.

    Returns:
        Whether this kernel has Landlock and grants it. What is open stays usable.
    """
    if sys.platform != "linux" or platform.machine() not in _CALLS:
        return False
    call = _libc().syscall
    version = call(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(_LANDLOCK_VERSION))
    if version < 1:
        return False
    rights = struct.pack("@QQQ", *(_rights(version, counts) for counts in (_FILE_RIGHTS, _PORT_RIGHTS, _SCOPES)))
    size = 8 if version < 4 else 16 if version < 6 else 24
    rules = call(_LANDLOCK_CREATE, rights, ctypes.c_size_t(size), ctypes.c_uint32(0))
    if rules < 0:
        return False
    _prctl(_PR_SET_NO_NEW_PRIVS, 1, 0)
    granted = call(_LANDLOCK_RESTRICT, ctypes.c_int(rules), ctypes.c_uint32(0)) == 0
    os.close(rules)
    return granted


def _rights(version: int, counts: dict[int, int]) -> int:
    """All rights that this version of Landlock can refuse, as a bit mask."""
    bits = max((count for since, count in counts.items() if since <= version), default=0)
    return (1 << bits) - 1


def _program(calls: _Calls) -> list[bytes]:
    """The filter as classic BPF over (number, architecture, instruction pointer, six arguments of 64 bits)."""
    load, equal, above, any_bit, end = 0x20, 0x15, 0x35, 0x45, 0x06
    number, architecture, argument = 0, 4, 16

    def step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
        return struct.pack("@HBBI", code, yes, no, value)

    steps = [step(load, architecture), step(equal, calls.architecture, 1), step(end, _KILL), step(load, number)]
    steps += [step(above, 0x40000000, 0, 1), step(end, _REFUSE)]  # the numbers of x32, which share the architecture
    for call in calls.plain:
        steps += [step(equal, call, 0, 1), step(end, _ALLOW)]
    for call in (calls.mmap, calls.mprotect):  # the third argument holds the rights of the memory
        steps += [step(equal, call, 0, 4), step(load, argument + 2 * 8), step(any_bit, _PROT_EXEC, 1, 0)]
        steps += [step(end, _ALLOW), step(end, _REFUSE)]
    return [*steps, step(end, _REFUSE)]


def _prctl(option: int, first: int, second: int) -> None:
    if _libc().prctl(option, first, second, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {first}): {os.strerror(ctypes.get_errno())}")


@cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)
    return library
