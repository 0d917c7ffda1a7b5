"""Outer server: membership of a round, responses to late or repeated requests, and refusals."""

import contextlib
import socket
import threading
import time

import pytest
import torch

from lightning_pardist.engines.averaging import IslandPart, OuterClient, OuterServer, OuterSettings

START = torch.tensor([1.0, 2.0, 3.0])


@pytest.fixture
def server():
    found = OuterServer("127.0.0.1", 0, timeout_s=0.5)
    threading.Thread(target=found.serve, daemon=True).start()
    yield found
    found.close()


def _client(server, island, *, rank=0, ranks=1, islands=2, momentum=0.0, token=None, layout=b"l" * 32):
    settings = OuterSettings(islands, ranks, 1.0, momentum)
    token = token or bytes([island]) * 16
    part = IslandPart(settings, island, rank, 3, 2, torch.float32, token, layout)
    return OuterClient("127.0.0.1", server.address[1], part)


def _joined(server, island, **kwargs):
    client = _client(server, island, **kwargs)
    return client, client.join(START.clone(), lambda: torch.zeros(2))


def _at_once(*calls):
    results = [None] * len(calls)

    def run(index):
        results[index] = calls[index]()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


def test_a_round_is_the_mean_of_all(server):
    one, first = _joined(server, 0)
    other, second = _joined(server, 1)
    assert torch.equal(first.values, second.values)
    found = _at_once(lambda: one.meet(torch.ones(3)), lambda: other.meet(torch.full((3,), 3.0)))
    for meeting in found:
        assert meeting.values.tolist() == [-1.0, 0.0, 1.0]
        assert (meeting.generation, meeting.islands) == (1, 2)


def test_momentum_is_that_of_nesterov_and_not_of_the_rest(server):
    client, _ = _joined(server, 0, islands=1, momentum=0.5)
    param = torch.nn.Parameter(START[:2].clone())
    wanted = torch.optim.SGD([param], lr=1.0, momentum=0.5, nesterov=True)
    for _ in range(3):
        found = client.meet(torch.ones(3))
        param.grad = torch.ones(2)
        wanted.step()
    assert torch.allclose(found.values[:2], param.data)
    assert found.values[2] == 0.0
    momentum, generation = client.momentum()
    assert torch.allclose(momentum, wanted.state[param]["momentum_buffer"])
    assert generation == 3


def test_who_dies_is_not_waited_for_and_who_is_late_does_not_count(server):
    one, _ = _joined(server, 0)
    other, _ = _joined(server, 1)
    begun = time.monotonic()
    # The timeout has expired: the other island is still training.
    assert one.meet(torch.ones(3)).islands == 1
    assert 0.4 < time.monotonic() - begun < 5
    late = other.meet(torch.full((3,), 100.0))
    assert (late.islands, late.generation, late.values.tolist()) == (0, 1, [0.0, 1.0, 2.0])
    other.close()
    server.timeout_s = 60.0
    begun = time.monotonic()
    assert one.meet(torch.ones(3)).values.tolist() == [-1.0, 0.0, 1.0]
    assert time.monotonic() - begun < 5


def test_who_comes_back_begins_with_the_next_round(server):
    server.timeout_s = 60.0
    one, _ = _joined(server, 0)
    other, _ = _joined(server, 1)
    _at_once(lambda: one.meet(torch.ones(3)), lambda: other.meet(torch.ones(3)))
    other.close()
    back = []
    waiting = threading.Thread(target=lambda: back.append(_joined(server, 1, token=b"again" + bytes(11))))
    waiting.start()
    waiting.join(0.5)
    assert waiting.is_alive()
    assert one.meet(torch.ones(3)).islands == 1
    waiting.join(10)
    [(again, begun)] = back
    assert begun.values.tolist() == [-1.0, 0.0, 1.0]
    found = _at_once(lambda: one.meet(torch.ones(3)), lambda: again.meet(torch.ones(3)))
    assert [meeting.islands for meeting in found] == [2, 2]


def test_an_island_counts_with_all_of_its_ranks_or_not_at_all(server):
    ranks = _at_once(*(lambda rank=rank: _joined(server, 0, rank=rank, ranks=2)[0] for rank in range(2)))
    others = _at_once(*(lambda rank=rank: _joined(server, 1, rank=rank, ranks=2)[0] for rank in range(2)))
    calls = [lambda client=client: client.meet(torch.ones(3)) for client in (*ranks, others[0])]
    found = _at_once(*calls)
    assert [meeting.islands for meeting in found] == [1, 1, 0]
    assert others[1].meet(torch.ones(3)).islands == 0
    # A lost rank makes its whole island lost.
    others[1].close()
    server.timeout_s = 60.0
    assert [meeting.islands for meeting in _at_once(*calls[:2])] == [1, 1]


def test_the_weights_outlive_islands_that_die_and_not_those_that_end(server):
    one, _ = _joined(server, 0, islands=1)
    one.meet(torch.ones(3))
    one.close()
    again, begun = _joined(server, 0, islands=1, token=b"again" + bytes(11))
    assert begun.values.tolist() == [0.0, 1.0, 2.0]
    again.leave()
    deadline = time.monotonic() + 10
    while server.generation and time.monotonic() < deadline:
        time.sleep(0.01)
    _, begun = _joined(server, 0, islands=1, momentum=0.9)
    assert begun.values.tolist() == START.tolist()


def test_a_founder_that_dies_has_begun_nothing(server):
    founder = _client(server, 0, ranks=2)
    thread = threading.Thread(target=lambda: _swallow(founder))
    thread.start()
    time.sleep(0.3)
    # Its second rank never connects; the first one's contribution must not be used.
    founder._connection.shutdown(socket.SHUT_RDWR)
    thread.join(10)
    found = _at_once(*(lambda rank=rank: _joined(server, 1, rank=rank, ranks=2) for rank in range(2)))
    assert all(meeting.values.tolist() == START.tolist() for _, meeting in found)


def _swallow(client):
    with contextlib.suppress(ConnectionError):
        client.join(torch.full((3,), 9.0), lambda: torch.zeros(2))


def test_a_deadline_goes_with_the_island_that_set_it(server):
    server.timeout_s = 2.0
    one, _ = _joined(server, 0)
    other, _ = _joined(server, 1)
    thread = threading.Thread(target=lambda: _meets(one))
    thread.start()
    time.sleep(0.3)
    again, _ = _joined(server, 0, token=b"again" + bytes(11))
    thread.join(10)
    time.sleep(2.0)
    begun = time.monotonic()
    threading.Timer(0.5, lambda: again.meet(torch.ones(3))).start()
    assert other.meet(torch.ones(3)).islands == 2
    assert time.monotonic() - begun > 0.3


def _meets(client):
    with contextlib.suppress(ConnectionError):
        client.meet(torch.ones(3))


def test_momentum_is_that_of_the_step_an_island_goes_on_from(server):
    one, _ = _joined(server, 0, momentum=0.9)
    other, _ = _joined(server, 1, momentum=0.9)
    _at_once(lambda: one.meet(torch.ones(3)), lambda: other.meet(torch.ones(3)))
    before, _ = one.momentum()
    assert other.meet(torch.ones(3)).islands == 1
    now, generation = one.momentum()
    assert generation == 1
    assert torch.equal(before, now)
    assert torch.allclose(other.momentum()[0], torch.tensor([1.9, 1.9]))
    other.meet(torch.ones(3))
    assert one.momentum()[1] == 3


def test_weights_are_kept_for_islands_that_died(server):
    one, _ = _joined(server, 0)
    other, _ = _joined(server, 1)
    _at_once(lambda: one.meet(torch.ones(3)), lambda: other.meet(torch.ones(3)))
    other.close()
    deadline = time.monotonic() + 10
    while len(server._islands) > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    one.leave()
    back, begun = _joined(server, 1, token=b"again" + bytes(11))
    assert begun.values.tolist() == [0.0, 1.0, 2.0]
    assert begun.generation == 1
    back.leave()


def test_differences_that_are_no_numbers_end_their_island(server):
    one, _ = _joined(server, 0)
    other, _ = _joined(server, 1)
    with pytest.raises(ValueError, match="NaN or infinity"):
        one.meet(torch.tensor([1.0, float("nan"), 1.0]))
    server.timeout_s = 60.0
    assert other.fetch().values.tolist() == START.tolist()


def test_what_cannot_be_is_refused(server):
    kept = _joined(server, 0)
    with pytest.raises(ValueError, match="Use the same settings for all islands, or restart the server"):
        _joined(server, 1, momentum=0.5)
    with pytest.raises(ValueError, match="names, shapes or dtypes"):
        _joined(server, 1, layout=b"m" * 32)
    stranger = socket.create_connection(server.address)
    stranger.sendall(b"GET / HTTP/1.1\r\nHost: me\r\n\r\n")
    stranger.settimeout(5)
    with stranger.makefile("rb") as answer:
        assert b"does not speak" in answer.read()
    assert kept[0].fetch().generation == 0


def test_a_second_job_of_one_number_takes_the_place_of_the_first(server):
    first, _ = _joined(server, 0)
    second, _ = _joined(server, 0, token=b"again" + bytes(11))
    with pytest.raises(ConnectionError, match="another job has connected as island 0"):
        first.meet(torch.ones(3))
    assert second.fetch().generation == 0


def test_no_server_is_one_sentence(monkeypatch):
    monkeypatch.setattr("lightning_pardist.engines.averaging.client._REACH_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = OuterSettings(2, 1, 1.0, 0.0)
    part = IslandPart(settings, 0, 0, 3, 2, torch.float32, b"t" * 16, b"l" * 32)
    with pytest.raises(ConnectionError, match=f"pardist outer-server --port {port}"):
        OuterClient("127.0.0.1", port, part)
