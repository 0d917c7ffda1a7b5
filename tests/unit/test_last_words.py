"""Processes exit although their output cannot be written, and no rank is left behind."""

import os
import threading
from contextlib import suppress

import pytest

from lightning_pardist.runtime import launchers, process_exit


@pytest.fixture
def unread(monkeypatch):
    """Replace standard error by a pipe without reader, and record exits."""
    reading, writing = os.pipe()
    os.close(reading)
    left = []

    def leave(status):
        left.append(status)
        raise SystemExit

    with suppress(BrokenPipeError), os.fdopen(writing, "w", buffering=1) as stream:
        monkeypatch.setattr("sys.stderr", stream)
        monkeypatch.setattr("sys.__stderr__", stream)
        monkeypatch.setattr(os, "_exit", leave)
        yield left


def test_a_line_that_nobody_reads_is_no_error(unread):
    process_exit.write_stderr("gone")
    with pytest.raises(SystemExit):
        process_exit.exit_now(3)
    assert unread == [3]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_rank_ends_with_the_process_that_started_it(unread, monkeypatch):
    monkeypatch.setattr(launchers, "_parent_watched", False)
    launchers.watch_parent(0)
    thread = next(thread for thread in threading.enumerate() if thread.name == "pardist-parent")
    thread.join(10)
    assert unread == [1]
