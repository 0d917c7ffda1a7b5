"""Parts of parameter servers in one process: clocks, messages, shares, and staleness bounds."""

import threading
import time

import pytest
import torch
from torch import nn

from lightning_pardist.engines.common.update_scope import FoundScope
from lightning_pardist.engines.servers import ParameterServer
from lightning_pardist.engines.servers.clocks import WorkerClocks
from lightning_pardist.engines.servers.messages import Unpacked, pack_parts, unpack_parts
from lightning_pardist.engines.servers.server import DroppedWorkerError, MeetingKey, Purpose
from lightning_pardist.engines.servers.share import GroupNumbers, Share, write_changes
from lightning_pardist.engines.servers.update_log import Entry, UpdateLog, next_run, read_logs

EACH = FoundScope("elementwise")


def test_clocks_keep_the_bound():
    clocks = WorkerClocks(range(3), 2)
    assert [clocks.tick(0), clocks.tick(0)] == [1, 2]
    assert not clocks.may_proceed(0)
    clocks.tick(1)
    assert not clocks.may_proceed(0)
    clocks.exclude(2)
    assert clocks.may_proceed(0)
    clocks.tick(0)
    clocks.synchronize()
    assert clocks.tick(2) == 1
    assert clocks.tick(2) == 2
    with pytest.raises(RuntimeError, match="3 updates ahead of the slowest; 2 are allowed"):
        clocks.tick(2)


def test_messages_keep_every_kind_of_part():
    sparse = torch.sparse_coo_tensor([[4, 1, 4]], torch.ones(3, 2), (6, 2))
    parts = [torch.randn(3, 5), None, sparse, torch.tensor(2.0, dtype=torch.bfloat16), torch.randn(0, 4)]
    likes = [torch.empty(3, 5), torch.empty(7), torch.empty(6, 2), parts[3], parts[4]]
    first = torch.tensor([1.0], dtype=torch.float64)
    packed = Unpacked(pack_parts([first], parts))
    assert torch.equal(packed.take([1], torch.float64), first)
    for got, want in zip(unpack_parts(packed, likes), parts, strict=True):
        if want is None:
            assert got is None
            continue
        assert got.dtype == want.dtype
        assert got.is_sparse == want.is_sparse
        assert torch.equal(got.to_dense(), want.to_dense())


def _share(optimizer):
    return Share(optimizer, [True] * sum(len(group["params"]) for group in optimizer.param_groups), EACH)


def test_workers_get_the_rows_that_changed():
    table, bias = nn.Parameter(torch.randn(8, 2)), nn.Parameter(torch.randn(2))
    share = _share(torch.optim.SGD([table, bias], lr=1.0))
    numbers = share.numbers.read()
    share.update([torch.sparse_coo_tensor([[3]], torch.ones(1, 2), (8, 2)), None], numbers)
    share.update([torch.sparse_coo_tensor([[5]], torch.ones(1, 2), (8, 2)), torch.ones(2)], numbers)
    rows, whole = share.changes_since(0)
    assert rows.indices().tolist() == [[3, 5]]
    assert not whole.is_sparse
    rows, _ = share.changes_since(1)
    assert rows.indices().tolist() == [[5]]
    assert share.changes_since(2) == [None, None]
    write_changes([table.detach(), bias.detach()], share.changes_since(0))
    assert torch.equal(table, share.params[0])
    assert torch.equal(bias, share.params[1])


def test_updates_wait_for_a_compiler_in_another_thread():
    """Optimizers check for compilation in any thread, and would then compute their bias corrections in fp32."""
    grads = torch.randn(3, 8, dtype=torch.float64)

    def share():
        values = torch.linspace(0, 1, 8, dtype=torch.float64)
        return _share(torch.optim.AdamW([nn.Parameter(values)], lr=0.1, eps=1e-3))

    want, got = share(), share()
    for grad in grads:
        want.update([grad.clone()], want.numbers.read())
        thread = threading.Thread(target=got.update, args=([grad.clone()], got.numbers.read()))

        def backend(graph, inputs, thread=thread):
            thread.start()
            thread.join(0.2)
            return graph

        torch.compiler.reset()
        torch.compile(torch.sin, backend=backend)(torch.ones(3))
        thread.join()
    assert torch.equal(got.params[0], want.params[0])


def test_each_update_has_the_settings_of_its_worker():
    def made():
        return torch.optim.Adam([nn.Parameter(torch.zeros(2))], lr=0.1, betas=(0.9, 0.99))

    first, second = GroupNumbers(one := made()), GroupNumbers(other := made())
    server = GroupNumbers(theirs := made())
    one.param_groups[0].update(lr=0.5, betas=(0.8, 0.99))
    server.apply(first.to_send())
    assert theirs.param_groups[0]["lr"] == 0.5
    assert theirs.param_groups[0]["betas"] == (0.8, 0.99)
    server.apply(second.to_send())
    assert theirs.param_groups[0]["lr"] == 0.1
    # Changes by the optimizer itself are published, and are not sent back as a worker's.
    theirs.param_groups[0]["eps"] = 0.25
    second.publish(server.of_server())
    assert other.param_groups[0]["eps"] == 0.25
    theirs.param_groups[0]["eps"] = 0.125
    server.apply(second.to_send())
    assert theirs.param_groups[0]["eps"] == 0.125
    other.param_groups[0]["lr"] = 0.3
    second.publish(server.of_server())
    assert other.param_groups[0]["lr"] == 0.3


def _server(max_staleness=1, timeout_s=5.0, may_be_lost=()):
    param = nn.Parameter(torch.zeros(2))
    share = _share(torch.optim.SGD([param], lr=1.0))
    return ParameterServer(
        [share], workers=range(2), max_staleness=max_staleness, timeout_s=timeout_s, may_be_lost=may_be_lost
    )


def _turn(server, worker):
    staleness = server.update(worker, 0, [torch.ones(2)], server.shares[0].numbers.read())
    server.take_turn(worker, 0, lambda changes: None)
    return staleness


def test_the_fast_worker_waits_for_the_slow_one_and_no_longer():
    server = _server()
    done = []
    fast = threading.Thread(target=lambda: done.append([_turn(server, 0) for _ in range(3)]))
    fast.start()
    fast.join(0.2)
    assert server.shares[0].version == 1
    assert _turn(server, 1) == 1
    fast.join(0.2)
    assert server.shares[0].version == 3
    # Workers do not wait for one that has left.
    server.leave(1)
    fast.join(5)
    assert done == [[0, 0, 0]]
    assert server.staleness == {0: 3, 1: 1}


def test_workers_that_step_other_optimizers_do_not_wait_for_each_other_in_a_circle():
    params = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    shares = [_share(torch.optim.SGD([param], lr=1.0)) for param in params]
    server = ParameterServer(shares, workers=range(2), max_staleness=1, timeout_s=5.0)

    def train(worker):
        for optimizer in (worker, worker, 1 - worker, 1 - worker):
            server.update(worker, optimizer, [torch.ones(2)], shares[optimizer].numbers.read())
            server.take_turn(worker, optimizer, lambda changes: None)

    threads = [threading.Thread(target=train, args=(worker,)) for worker in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(4)
    assert [share.version for share in shares] == [4, 4]


def test_a_share_has_the_attributes_of_its_parameters():
    param = nn.Parameter(torch.zeros(3))
    param.mask, param.scale, param.kind = torch.tensor([1.0, 0.0, 1.0]), torch.tensor(2.0), "special"
    found = _share(torch.optim.SGD([param], lr=1.0)).params[0]
    assert (torch.equal(found.mask, param.mask), float(found.scale), found.kind) == (True, 2.0, "special")
    assert found.mask is not param.mask


def test_runs_in_one_folder_keep_their_logs_apart(tmp_path):
    for number in range(2):
        folder = next_run(tmp_path)
        log = UpdateLog(folder, server=0, owners=[[0]], workers=range(2))
        log.add(Entry("update", number, 1, 0))
        log.close()
        assert [entry.worker for entry in read_logs(folder)[0].entries] == [number]
        if number == 0:
            assert read_logs(tmp_path) == read_logs(folder)
    with pytest.raises(RuntimeError, match=r"several runs \(run0, run1\)"):
        read_logs(tmp_path)


def test_every_wait_ends():
    server = _server(timeout_s=0.1)
    with pytest.raises(TimeoutError, match="the slowest worker in vain"):
        _turn(server, 0)
    with pytest.raises(TimeoutError, match="all workers at a meeting"):
        server.meet(0)
    server.fail(ValueError("the reason"))
    with pytest.raises(RuntimeError, match="the reason"):
        _turn(server, 1)


def test_updates_wait_behind_a_meeting_until_the_rank_has_read():
    server = _server()
    meeting = threading.Thread(target=server.meet, args=(0,))
    meeting.start()
    assert _turn(server, 1) == 0
    server.meet(1)
    meeting.join(5)
    numbers = server.shares[0].numbers.read()
    late = threading.Thread(target=server.update, args=(1, 0, [torch.ones(2)], numbers))
    late.start()
    late.join(0.1)
    assert server.shares[0].version == 1
    server.release(0)
    server.release(1)
    late.join(5)
    assert server.shares[0].version == 2


def test_nobody_waits_for_a_worker_that_is_gone_and_it_counts_no_more():
    server = _server(max_staleness=2, may_be_lost=[1])
    numbers = server.shares[0].numbers.read()
    server.update(1, 0, [torch.ones(2)], numbers, (3, 1, 10))
    server.update(1, 0, [torch.ones(2)], numbers, (3, 2, 10))
    done = []
    # In a turn, and at a meeting.
    other = threading.Thread(target=lambda: done.append(([_turn(server, 0) for _ in range(5)], server.meet(0))))
    other.start()
    other.join(0.2)
    assert not done
    server.mark_lost(1, "it was killed")
    other.join(5)
    assert done
    with pytest.raises(DroppedWorkerError, match="gone on without worker 1"):
        server.update(1, 0, [torch.ones(2)], numbers)
    (loss,) = server.lost_workers
    assert loss.describe() == (
        "Worker 1 has gone after 2 updates (it was killed); the others go on without it, and its share of the data is"
        " not trained on: 8 of 10 batches in epoch 3, and all of later epochs."
    )
    # A worker that has left cannot be lost.
    server.leave(0)
    server.mark_lost(0, "its connection was closed")
    assert server.lost == {1}


def test_a_worker_for_which_others_wait_in_vain_is_gone_if_it_may():
    server = _server(timeout_s=0.1, may_be_lost=[1])
    assert [_turn(server, 0) for _ in range(3)] == [0, 0, 0]
    assert [loss.why for loss in server.lost_workers] == ["the others waited 0.1 s for it in vain, timeout_s"]
    server = _server(timeout_s=0.1, may_be_lost=[1])
    server.meet(0)
    assert server.lost == {1}
    server = _server(timeout_s=0.1, may_be_lost=[1])
    with pytest.raises(TimeoutError, match="the slowest worker in vain"):
        _turn(server, 1)


def test_what_no_optimizer_updates_is_averaged_over_who_meets():
    server = _server(may_be_lost=[1])
    first = threading.Thread(target=server.meet, args=(0, torch.tensor([1.0, 2.0])))
    first.start()
    server.meet(1, torch.tensor([3.0, 6.0]))
    first.join(5)
    assert server.rest.tolist() == [2.0, 4.0]
    for worker in range(2):
        server.release(worker)
    server.mark_lost(1, "it was killed")
    server.meet(0, torch.tensor([5.0, 7.0]))
    assert server.rest.tolist() == [5.0, 7.0]


def test_everybody_at_a_meeting_hears_of_the_same_losses():
    server = _server(may_be_lost=[1])
    first = threading.Thread(target=server.meet, args=(0,))
    first.start()
    server.meet(1)
    first.join(5)
    # After the meeting, before the first worker's request.
    server.mark_lost(1, "it was killed")
    assert server.gone == []
    server.release(0)
    server.meet(0)
    assert [loss.worker for loss in server.gone] == [1]
    text = server.lost_workers[0].describe("it has ended", is_shared=True)
    assert text == (
        "Worker 1 has gone after 0 updates (it has ended); the others go on without it, and take over the rest of"
        " its share of the data."
    )


def test_a_worker_that_asks_now_and_then_is_not_gone():
    server = _server(timeout_s=0.4, may_be_lost=[1])
    numbers, words = server.shares[0].numbers.read(), []
    server.on_wait = words.append
    other = threading.Thread(target=server.meet, args=(0,))
    other.start()
    for _ in range(6):
        time.sleep(0.2)
        server.update(1, 0, [torch.ones(2)], numbers)
    assert not server.lost
    assert set(words) == {0}
    server.meet(1)
    other.join(5)
    assert not other.is_alive()


def test_workers_at_different_meetings_end_the_job():
    server = _server(may_be_lost=[1])
    failed = []

    def meet():
        with pytest.raises(RuntimeError) as found:
            server.meet(0, place=MeetingKey(Purpose.EVALUATION, 2, 1))
        failed.append(str(found.value))

    other = threading.Thread(target=meet)
    other.start()
    while not server._waiting:
        time.sleep(0.01)
    with pytest.raises(RuntimeError, match=r"Worker 1 is at end, but worker 0 is at evaluation 1 of epoch 2") as found:
        server.meet(1, place=MeetingKey(Purpose.END))
    server.fail(found.value)
    other.join(5)
    assert failed


def test_who_is_silent_behind_the_first_is_gone():
    server = _server(timeout_s=0.1, may_be_lost=[1])
    server.mark_silent_lost()
    server.leave(0)
    server.mark_silent_lost()
    assert not server.lost
    time.sleep(0.15)
    server.mark_silent_lost()
    assert server.lost == {1}
