"""Connections between workers and servers on real ranks: every wait ends, and a failure does not end training."""

import time

import torch
import torch.distributed as dist
from torch import nn

from lightning_pardist.engines.common.update_scope import FoundScope
from lightning_pardist.engines.servers import ParameterServer
from lightning_pardist.engines.servers.messages import Connection, Kind, Message
from lightning_pardist.engines.servers.share import Share
from lightning_pardist.engines.servers.worker_connections import RemoteServer, WorkerThreads
from tests.helpers.ranks import run_ranks


def _caught(run):
    begin = time.monotonic()
    try:
        run()
    except Exception as error:
        return str(error), time.monotonic() - begin
    return "", time.monotonic() - begin


def _unheard():
    group = dist.new_group(backend="gloo")
    found = None
    if dist.get_rank() == 0:
        line = Connection(group, 1, 7, timeout_s=0.3)
        line.send(Message(Kind.UPDATE, payload=torch.zeros(2**22, dtype=torch.uint8)))
        found = _caught(line.flush)
    dist.barrier()
    return found


def test_nobody_waits_forever_for_who_does_not_listen():
    (text, seconds), _ = run_ranks(2, _unheard)
    assert text
    assert seconds < 10


def _failing():
    group = dist.new_group(backend="gloo")
    server = None
    if dist.get_rank() == 0:
        param = nn.Parameter(torch.zeros(2))
        share = Share(torch.optim.SGD([param], lr=1.0), [True], FoundScope("elementwise"))
        server = ParameterServer([share], workers=range(3), max_staleness=1, timeout_s=20.0)
        threads = WorkerThreads(server, group, (0, 1), 20.0)
        threads.start()
        found = _caught(lambda: server.meet(0))
        # One worker sends nothing: the timeout covers all threads together.
        joined = _caught(lambda: threads.join(0.5))[1]
        dist.barrier()
        return (*found, joined, threads.join(20.0))
    remote = RemoteServer(group, 0, (0, 1), 20.0)
    if dist.get_rank() == 1:
        remote.leave(ValueError("the reason"), 5.0)
    dist.barrier()
    if dist.get_rank() == 2:
        remote.leave(None, 5.0)
    return None


def test_a_worker_that_fails_does_not_look_like_one_that_is_done():
    (text, seconds, joined, ended), *_ = run_ranks(3, _failing)
    assert "Worker 1 ended by an error: ValueError: the reason" in text
    assert seconds < 10
    assert joined < 2
    assert ended
