"""Silence of other ranks, as the watchdog counts it."""

import time
from datetime import timedelta

import pytest
from torch.distributed import PrefixStore, TCPStore

from lightning_pardist.runtime import watchdog
from lightning_pardist.runtime.hang_diagnosis import StallDetector


class Clock:
    """Module ``time`` whose monotonic clock can be moved on, as that of a process that was suspended."""

    def __init__(self) -> None:
        self.suspended_s = 0.0

    def __getattr__(self, name):
        return getattr(time, name)

    def monotonic(self) -> float:
        return time.monotonic() + self.suspended_s


def _beat(peer, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        peer.add("beat/1", 1)
        time.sleep(0.1)


@pytest.mark.parametrize("resumes", [True, False])
def test_a_suspended_job_is_not_taken_for_silent_ranks(monkeypatch, resumes):
    clock, ends = Clock(), []
    monkeypatch.setattr(watchdog, "time", clock)
    monkeypatch.setattr(watchdog, "exit_now", lambda: ends.append(True))
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), False)
    dog = watchdog.Watchdog(store, rank=0, world_size=2, run=0, heartbeat_timeout_s=5)
    peer = PrefixStore("pardist/watchdog/0", store.clone())
    dog.start()
    try:
        _beat(peer, 1.2)
        # The watchdog looks once more before all of them are suspended.
        time.sleep(0.8)
        clock.suspended_s = 60.0
        time.sleep(1.2)
        assert dog._cause() is None
        if resumes:
            _beat(peer, 1.2)
        else:
            time.sleep(6.0)
        assert (dog._cause() is None) == resumes
    finally:
        dog.stop()


def test_a_suspended_process_is_not_taken_for_a_stalled_one(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("lightning_pardist.runtime.hang_diagnosis.time", clock)
    monkeypatch.setattr(clock, "process_time", lambda: 0.0, raising=False)
    stall = StallDetector(-1)
    stall.seconds()
    clock.suspended_s = 60.0
    assert stall.seconds() < 5.0
