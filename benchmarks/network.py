"""Count of bytes actually sent, read from the loopback interface's counter.

[Note: a loopback of our own] The counter sums over all traffic on the host. The ranks are therefore put into a network
namespace of their own if the kernel allows it: nothing else is counted there, however busy the host. Otherwise, other
local traffic is estimated from the counter while all ranks wait, and subtracted.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys
from pathlib import Path

_COUNTERS = Path("/proc/self/net/dev")
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 0x1


def loopback_bytes() -> int | None:
    """Return the bytes sent over the loopback interface since its creation, None if there is no counter."""
    if not _COUNTERS.exists():
        return None
    for line in _COUNTERS.read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])
    return None


def isolate() -> bool:
    """Give this process, and the children it starts from now on, a loopback interface of their own.

    Returns:
        Whether it succeeded. If not, nothing has changed.
    """
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    uid, gid = os.getuid(), os.getgid()
    if libc.unshare(_CLONE_NEWNET) != 0:
        # Without CAP_SYS_ADMIN, a new user namespace grants the required capability.
        if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
            return False
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            Path(f"/proc/self/{name}").write_text(text)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh", b"lo", _IFF_UP))
    return True
