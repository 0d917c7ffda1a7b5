"""Count of bytes actually sent between ranks on this machine."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist

_COUNTERS = Path("/proc/net/dev")


def sent_bytes(call: Callable[[], object], rounds: int = 4) -> int:
    """Return the bytes that all ranks together send over loopback in one ``call``: the minimum of ``rounds`` calls."""
    counts: list[int] = []
    for _ in range(rounds):
        with counting(counts):
            call()
    return min(counts)


@contextmanager
def counting(counts: list[int]) -> Iterator[None]:
    """Append the bytes sent over loopback inside the block, TCP headers included; for ``alone`` tests, on every rank.

    Take the minimum of several: retransmissions and other programs only add to the count. Skips the test if there is no
    counter.
    """
    dist.barrier()
    before = _loopback_bytes()
    # No rank starts before all have read the counter.
    dist.barrier()
    yield
    dist.barrier()
    counts.append(_loopback_bytes() - before)


def _loopback_bytes() -> int:
    if not _COUNTERS.exists():
        pytest.skip("no /proc/net/dev to count bytes with")
    line = next(line for line in _COUNTERS.read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])
