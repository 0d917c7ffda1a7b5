"""Network with latency between hosts of tests/helpers/hosts.py, for kernels without netem: ``python delay.py ...``.

Every host gets an ``eth0`` whose packets are read here, delayed, and written to the destination host. Run by
:meth:`Hosts.connect_slowly`; prints a line when the network is up.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import select
import struct
import subprocess
import sys
import time

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
#: Large packets keep the packet rate of this program low; on slow links, the size of Ethernet's jumbo frames.
_MTU, _FAST_MTU, _FAST_MBIT = 9_000, 60_000, 200
_SMALL = 200
_QUEUE_S = 1.0


def main(delay_ms: float, mbit: float, hosts: list[str]) -> None:
    """Forward packets until the process is killed.

    Args:
        delay_ms: One-way delay of a packet.
        mbit: Send rate of a host; 0 for no limit.
        hosts: ``NAMESPACE=ADDRESS/BITS`` of each host.
    """
    ends: dict[bytes, int] = {}
    for host in hosts:
        space, _, address = host.partition("=")
        octets = bytes(int(part) for part in address.partition("/")[0].split("."))
        ends[octets] = _open(space, address, _MTU if 0 < mbit <= _FAST_MBIT else _FAST_MTU)
    print("up", flush=True)
    free_at = dict.fromkeys(ends.values(), 0.0)
    flying: list[tuple[float, int, int, bytes]] = []
    count = 0
    while True:
        wait = max(0.0, flying[0][0] - time.monotonic()) if flying else 1.0
        # select() cannot sleep for shorter times than these.
        for end in select.select(list(free_at), [], [], wait if wait > 1e-4 else 0.0)[0]:
            for packet in _read(end):
                now = time.monotonic()
                target = ends.get(packet[16:20])
                if packet[0] >> 4 != 4 or target is None:
                    continue
                took = len(packet) * 8e-6 / mbit if mbit else 0.0
                # Models fair queueing, the hosts' default: small packets such as acknowledgements bypass queued data.
                leaves = now + took if len(packet) < _SMALL else max(now, free_at[end]) + took
                if leaves - now > _QUEUE_S:
                    continue
                free_at[end] = max(now, free_at[end]) + took
                count += 1
                heapq.heappush(flying, (leaves + delay_ms * 1e-3, count, target, packet))
        now = time.monotonic() + 5e-5
        while flying and flying[0][0] <= now:
            _, _, target, packet = heapq.heappop(flying)
            os.write(target, packet)


def _open(space: str, address: str, mtu: int) -> int:
    """Create an ``eth0`` in a namespace, and return the file descriptor of its packets."""
    libc = ctypes.CDLL(None, use_errno=True)
    subprocess.run(["ip", "-n", space, "link", "del", "eth0"], capture_output=True, check=False)
    with open(f"/run/netns/{space}") as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH", b"eth0", _IFF_TUN | _IFF_NO_PI))
    subprocess.run(["ip", "addr", "add", address, "dev", "eth0"], check=True)
    subprocess.run(["ip", "link", "set", "eth0", "mtu", str(mtu), "txqueuelen", "2000", "up"], check=True)
    return end


def _read(end: int) -> list[bytes]:
    packets = []
    for _ in range(16):
        try:
            packets.append(os.read(end, 65_535))
        except BlockingIOError:
            break
    return packets


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
