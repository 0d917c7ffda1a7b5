"""Bytes really sent, read off the loopback interface's counter.

[Note: a loopback of our own] The counter sums over everything on the host. So the ranks are put into a network
namespace of their own where the kernel lets us make one: there nothing else is counted, however busy the host. Where it
does not, other local traffic is estimated from the counter while all ranks wait, and subtracted.
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
    """Bytes sent over the loopback interface since it was made, None where there is no counter."""
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
        Whether it could be done. If not, nothing has changed.
    """
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    uid, gid = os.getuid(), os.getgid()
    if libc.unshare(_CLONE_NEWNET) != 0:
        # Without the right to do so, there is still a user namespace in which we have it.
        if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
            return False
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            Path(f"/proc/self/{name}").write_text(text)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh", b"lo", _IFF_UP))
    return True
