"""Hang diagnosis: reports of ranks' stacks, and detection of stalled processes."""

import threading
import time

from lightning_pardist.runtime.hang_diagnosis import (
    StallDetector,
    is_in_engines,
    main_stack,
    places,
    waits_in_collective,
)

STACK = """\
  File "/home/me/train.py", line 9, in <module>
    trainer.fit(module)
  File "/lib/lightning/pytorch/trainer.py", line 70, in fit
    run()
  File "/home/me/module.py", line 12, in training_step
    torch.distributed.{name}()
  File "/lib/torch/distributed/distributed_c10d.py", line 5000, in {name}
    work.wait()
"""


def test_places_are_grouped_and_show_the_users_lines():
    barrier, reduce = (STACK.format(name=name) for name in ("barrier", "all_reduce"))
    text = places({0: barrier, 1: reduce, 2: barrier})
    assert "Rank 0, 2 waits in" in text
    assert "Rank 1 waits in" in text
    assert "/home/me/module.py" in text
    assert "lightning/pytorch/trainer.py" not in text
    assert waits_in_collective(barrier)
    assert not waits_in_collective("  File x, line 1, in y\n    time.sleep(1)\n")


def test_slow_disk_is_no_collective():
    frame = '  File "/lib/lightning_pardist/checkpoint/files.py", line 76, in write\n    {}\n'
    assert not waits_in_collective(frame.format("os.fsync(stream.fileno())"))
    assert waits_in_collective(frame.format("self._store.wait([key], self._timeout)"))


def test_all_ranks_may_wait_for_a_process_that_each_has_started():
    stack = '  File "/lib/python/subprocess.py", line 1, in wait\n    return self._wait(timeout) or proc.wait()\n'
    assert waits_in_collective(stack)
    assert not is_in_engines(stack)
    assert is_in_engines(STACK.format(name="barrier"))


def test_a_process_that_sends_does_not_stand(tmp_path):
    go_on = threading.Event()
    thread = threading.Thread(target=go_on.wait)
    thread.start()
    still = StallDetector(thread.ident)
    still.seconds()
    time.sleep(0.2)
    assert still.seconds() > 0.1
    (tmp_path / "sent").write_bytes(bytes(2**20))
    assert still.seconds() == 0.0
    go_on.set()
    thread.join()


def test_stillness(monkeypatch):
    go_on, end = threading.Event(), threading.Event()

    def work():
        go_on.wait()
        end.wait()

    thread = threading.Thread(target=work)
    thread.start()
    still = StallDetector(thread.ident)
    still.seconds()
    time.sleep(0.3)
    assert still.seconds() > 0.2
    assert "go_on.wait()" in main_stack(thread.ident)
    go_on.set()
    time.sleep(0.1)
    assert still.seconds() == 0.0, "the thread has moved"
    time.sleep(0.2)
    assert still.seconds() > 0.1
    worked = time.process_time()
    # Faked: on a busy machine, using that much CPU time could take arbitrarily long.
    monkeypatch.setattr(time, "process_time", lambda: worked + 60.0)
    assert still.seconds() == 0.0, "the process has worked"
    end.set()
    thread.join()
