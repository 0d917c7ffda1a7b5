"""Lets the allocator keep what a training step frees."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_LARGEST = 2**31 - 1

_done = False


def keep_freed_memory() -> bool:
    """Tell glibc's allocator to keep freed memory for the next step. Once per process; it cannot be undone.

    By default glibc gives large freed blocks back to the kernel at once. A training step on CPU frees and allocates
    the same tensors again and again, and pays thousands of page faults a step for that. Kept, the memory stays
    resident at the step's peak.

    Returns:
        Whether the allocator took the setting: False where it is not glibc's.
    """
    global _done
    if _done:
        return True
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    _done = bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, _LARGEST))
    return _done
