"""Ranks find their own job's store, and no other job's."""

import socket
import threading
import time
from datetime import timedelta

import pytest
from torch.distributed import FileStore, TCPStore

from lightning_pardist.runtime import rendezvous
from lightning_pardist.runtime.rendezvous import RendezvousEndpoint, interface_towards, open_store
from tests.helpers.ranks import free_port

WAIT = timedelta(seconds=20)


def _together(meeting, world_size=2):
    stores, errors = {}, []

    def join(rank):
        try:
            stores[rank] = open_store(meeting, rank=rank, world_size=world_size, timeout=WAIT)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    return stores


def _listeners(port):
    found = []
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(path) as lines:
            rows = [line.split() for line in list(lines)[1:]]
        found += [row[1].split(":")[0] for row in rows if row[3] == "0A" and int(row[1].split(":")[1], 16) == port]
    return found


def test_one_host_listens_on_loopback_alone():
    port = free_port()
    stores = _together(RendezvousEndpoint(ports=(port,), token="a"))
    stores[1].set("key", "value")
    assert stores[0].get("key") == b"value"
    assert _listeners(port) == ["0100007F"]


def test_port_that_another_program_holds():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        stores = _together(RendezvousEndpoint(ports=(taken, free_port()), token="a"))
        stores[0].set("key", "value")
        assert stores[1].get("key") == b"value"
    # The thread that probed the other program ends once that has closed its connection.
    deadline = time.monotonic() + 10
    while any("pardist" in thread.name for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.1)


def test_store_of_another_job():
    port, own = free_port(), free_port()
    theirs = open_store(RendezvousEndpoint(ports=(port,), token="theirs"), rank=0, world_size=2, timeout=WAIT)
    stores = _together(RendezvousEndpoint(ports=(port, own), token="ours"))
    stores[0].set("key", "value")
    assert stores[1].get("key") == b"value"
    assert not theirs.check(["key"])


def test_first_rank_on_another_host_than_expected(monkeypatch):
    monkeypatch.setattr(rendezvous, "_SEARCH_AFTER_S", 0.0)
    ports = (free_port(),)
    store = open_store(RendezvousEndpoint("127.0.0.2", ports, "a"), rank=0, world_size=2, timeout=WAIT)
    store.set("key", "value")
    elsewhere = RendezvousEndpoint("127.0.0.1", ports, "a", others=("127.0.0.3", "127.0.0.2"))
    assert open_store(elsewhere, rank=1, world_size=2, timeout=WAIT).get("key") == b"value"


def test_no_free_port_is_an_error_of_the_first_rank():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        meeting = RendezvousEndpoint(ports=(other.getsockname()[1],))
        with pytest.raises(OSError, match="Set MASTER_PORT to a free port"):
            open_store(meeting, rank=0, world_size=2, timeout=WAIT)


def test_first_rank_that_never_comes():
    with pytest.raises(TimeoutError, match="Rank 0 was not found at 127"):
        open_store(RendezvousEndpoint(ports=(free_port(),)), rank=1, world_size=2, timeout=timedelta(seconds=1))


def test_each_start_has_its_own_part_of_a_store_that_stays():
    port = free_port()
    agent = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    meeting = RendezvousEndpoint(ports=(port,), hosted=True)
    for start in range(3):
        stores = _together(meeting, world_size=3 - start % 2)
        assert not stores[1].check(["key"])
        stores[0].set("key", str(start))
        assert stores[1].get("key") == str(start).encode()
    del agent


def test_a_file_is_met_at_again(tmp_path):
    meeting = RendezvousEndpoint(path=str(tmp_path / "meet"))
    FileStore(meeting.path, 2).set("pardist/start", "an earlier one")
    for _ in range(2):
        stores = _together(meeting)
        assert not stores[1].check(["key"])
        stores[0].set("key", "value")
        assert stores[1].get("key") == b"value"


def test_interface():
    assert interface_towards(RendezvousEndpoint(address="127.0.0.1")) == "lo"
    assert interface_towards(RendezvousEndpoint(address="anywhere", one_host=True)) == "lo"
