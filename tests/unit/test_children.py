"""Child processes of a script: whom their deaths are reported to."""

import subprocess
import sys
import time

from lightning_pardist.runtime.launchers import Children


def _child(status):
    return subprocess.Popen([sys.executable, "-c", f"import os; os._exit({status})"])


def _wait_for(condition):
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert condition()


def test_a_child_that_dies_between_two_runs_is_reported_to_the_second(monkeypatch):
    monkeypatch.setattr("atexit.register", lambda *_: None)
    children, first, second = Children(), [], []
    processes = [_child(0), _child(3)]
    children.report_to(lambda *death: first.append(death))
    children.report_to(None)
    children.adopt(processes)
    _wait_for(lambda: len(children._known) == 2)
    time.sleep(0.2)
    children.report_to(lambda *death: second.append(death))
    assert first == []
    ((rank, text, killed),) = second
    assert (rank, killed) == (2, False)
    assert "exit code 3" in text
    # Once.
    children.report_to(lambda *death: first.append(death))
    assert first == []
