"""Configure glibc's allocator to keep memory freed by a training step."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_LARGEST = 2**31 - 1

_done = False


def keep_freed_memory() -> bool:
    """Make glibc's allocator keep freed memory for the next step. Once per process; it cannot be undone.

    By default glibc returns large freed blocks to the kernel at once. A training step on CPU frees and allocates the
    same tensors repeatedly, which costs thousands of page faults per step. With this setting the memory stays resident
    at the step's peak.

    Returns:
        Whether the allocator accepted the setting; False if it is not glibc's.
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
