"""Rendezvous: the job's key-value store on the first rank's host, before a process group exists.

[Note: whose store is it] The port is computed before ranks can communicate (from job number and step number), so it may
be in use by another program or by the store of another job. The first rank therefore takes the first free port of a few
candidates and writes the job's token into its store; the others try the candidates in turn, and keep the store that
has this token.

[Note: stores that outlive a start] A launcher that restarts ranks may keep the store and all its contents (torchrun
does, and so does a file). The ranks of one start then use a common prefix that no earlier start has used.
"""

from __future__ import annotations

import fcntl
import ipaddress
import itertools
import os
import socket
import struct
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

from lightning_pardist.compat.process_groups import FileStore, PrefixStore, Store, TCPStore

_POLL_S = 0.1
_CONNECT_TIMEOUT_S = 3.0
#: Seconds for which only rank 0's expected host is tried, before the other possible hosts.
_SEARCH_AFTER_S = 5.0
_TOKEN = "pardist/token"
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class RendezvousEndpoint:
    """Address of the rendezvous of a job's ranks.

    Attributes:
        address: Host of the first rank.
        ports: Candidate ports, the same on all ranks.
        token: Identifies this job among others that might use the same ports. Empty if the only candidate is this
            job's.
        hosted: Whether a launcher holds the store, so that the first rank must not create one.
        others: Further hosts on which the first rank may be, if the launcher does not determine it.
        one_host: Whether all ranks are known to run on this host, whatever the address is.
        path: A file on a file system that all ranks share, instead of address and ports.
    """

    address: str = "127.0.0.1"
    ports: tuple[int, ...] = ()
    token: str = ""
    hosted: bool = False
    others: tuple[str, ...] = ()
    one_host: bool = False
    path: str | None = None

    @property
    def is_local(self) -> bool:
        """Whether all ranks run on this host."""
        return self.one_host or (self.path is None and _is_loopback(self.address))


def open_store(meeting: RendezvousEndpoint, *, rank: int, world_size: int, timeout: timedelta) -> Store:
    """Connect to the job's store, which the first rank creates. Every rank calls it once per start.

    Args:
        meeting: Rendezvous endpoint; the same on all ranks.
        rank: Global rank.
        world_size: Number of ranks.
        timeout: How long to wait for the first rank; the first rank waits as long for the others if the store is
            reused.

    Raises:
        TimeoutError: If ranks do not connect, with the address and what to check.
        OSError: If the first rank finds no free port.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    if meeting.path is not None:
        return _fresh(FileStore(meeting.path, world_size), rank, world_size, deadline, meeting.path)
    if meeting.hosted:
        store = _connect(meeting, deadline)
        return _fresh(store, rank, world_size, deadline, f"{meeting.address}:{meeting.ports[0]}")
    if rank == 0:
        return _host(meeting, timeout)
    store = _connect(meeting, deadline)
    store.set_timeout(timeout)
    return store


def _host(meeting: RendezvousEndpoint, timeout: timedelta) -> Store:
    busy: OSError | None = None
    for port in meeting.ports:
        try:
            listener = _listen(meeting.address, port)
        except OSError as error:
            busy = error
            continue
        store = TCPStore(
            meeting.address if meeting.is_local else listener.getsockname()[0],
            port,
            None,
            True,
            timeout,
            False,
            master_listen_fd=listener.detach(),
        )
        store.set(_TOKEN, meeting.token)
        return store
    ports = ", ".join(map(str, meeting.ports))
    raise OSError(
        f"Rank 0 cannot listen on {meeting.address}, port {ports}: {busy}. Set MASTER_PORT to a free port, the same on"
        " every rank, or end the program that holds this one."
    )


def _listen(address: str, port: int) -> socket.socket:
    """Listen on that address only if this host has it, and on all interfaces if peers reach it by another address."""
    hosts = [""]
    with suppress(OSError):
        found = socket.getaddrinfo(address, port, socket.AF_INET, socket.SOCK_STREAM)
        # A host's own name often maps to loopback in its hosts file, where peers cannot connect.
        if found and (_is_loopback(address) or not _is_loopback(str(found[0][4][0]))):
            hosts.insert(0, str(found[0][4][0]))
    for host in hosts:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(4096)
            return listener
        except OSError:
            listener.close()
            if host == hosts[-1]:
                raise
    raise OSError(f"no address to listen on for {address}")


def _connect(meeting: RendezvousEndpoint, deadline: float) -> Store:
    seen = "nothing was tried"
    search_from = time.monotonic() + _SEARCH_AFTER_S
    while time.monotonic() < deadline:
        others = meeting.others if time.monotonic() > search_from else ()
        for address, port in itertools.product((meeting.address, *others), meeting.ports):
            try:
                # Quiet if nothing listens yet; torch's own attempt would log errors.
                socket.create_connection((address, port), timeout=_CONNECT_TIMEOUT_S).close()
                store = _client(address, port)
                if store is not None and (meeting.hosted or _is_ours(store, meeting.token)):
                    return store
                seen = f"port {port} on {address} belongs to another {'program' if store is None else 'job'}"
            except (OSError, RuntimeError) as error:
                seen = f"port {port} on {address}: {str(error).splitlines()[0]}"
        time.sleep(_POLL_S)
    raise TimeoutError(
        f"Rank 0 was not found at {meeting.address}, port {', '.join(map(str, meeting.ports))} ({seen}). Check that"
        " every rank was started, that this host resolves and reaches that address, and that no firewall blocks it."
        " `pardist doctor`, started in the same way as the training, finds which of these fails."
    )


def _client(address: str, port: int) -> Store | None:
    """Connect to a store; None if the listener does not behave like one, for which torch would wait for ever."""
    found: list[Store] = []

    def connect() -> None:
        with suppress(RuntimeError):
            found.append(TCPStore(address, port, None, False, timedelta(seconds=_CONNECT_TIMEOUT_S), False))

    thread = threading.Thread(target=connect, name="pardist-connect", daemon=True)
    thread.start()
    thread.join(2 * _CONNECT_TIMEOUT_S)
    return found[0] if found else None


def _is_ours(store: Store, token: str) -> bool:
    store.set_timeout(timedelta(seconds=_CONNECT_TIMEOUT_S))
    return store.get(_TOKEN).decode() == token


def _fresh(store: Store, rank: int, world_size: int, deadline: float, where: str) -> Store:
    """Return a prefix of the store that no earlier start has written to.

    The first rank publishes a new id; each other rank answers with an id of its own, which the first rank repeats. Keys
    of an earlier start match neither.
    """
    own = uuid.uuid4().hex
    missing = list(range(1, world_size))
    if rank == 0:
        store.set("pardist/start", own)
        while missing and time.monotonic() < deadline:
            for other in list(missing):
                if not store.check([f"pardist/answer/{own}/{other}"]):
                    continue
                answer = store.get(f"pardist/answer/{own}/{other}").decode()
                store.set(f"pardist/welcome/{own}/{other}", answer)
                missing.remove(other)
            if missing:
                time.sleep(_POLL_S)
        if not missing:
            return PrefixStore(f"pardist/{own}", store)
        who = f"{len(missing)} of {world_size} ranks (rank {missing[0]}, for example)"
    else:
        answered: set[str] = set()
        while time.monotonic() < deadline:
            if store.check(["pardist/start"]):
                start = store.get("pardist/start").decode()
                if start not in answered:
                    store.set(f"pardist/answer/{start}/{rank}", own)
                    answered.add(start)
                key = f"pardist/welcome/{start}/{rank}"
                if store.check([key]) and store.get(key).decode() == own:
                    return PrefixStore(f"pardist/{start}", store)
            time.sleep(_POLL_S)
        who = "Rank 0"
    raise TimeoutError(f"{who} did not connect to the store at {where}. Check that every rank was started.")


def interface_towards(meeting: RendezvousEndpoint) -> str | None:
    """Return the network interface that leads to the other ranks; None if it cannot be determined."""
    interfaces = _interfaces()
    if meeting.is_local:
        return next((name for name, own in interfaces.items() if _is_loopback(own)), None)
    if meeting.path is not None:
        return None
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # No packet is sent: the system only looks up its routes.
        probe.connect((meeting.address, 9))
        own = probe.getsockname()[0]
        if not _is_loopback(own):
            return next((name for name, known in interfaces.items() if known == own), None)
    return next((name for name, own in interfaces.items() if not _is_loopback(own)), None)


def interface_address(interface: str | None) -> str | None:
    """Return the IPv4 address of a network interface; None if it has none."""
    return _interfaces().get(interface) if interface is not None else None


def _interfaces() -> dict[str, str]:
    found: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", os.fsencode(name)[:15]))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def _is_loopback(address: str) -> bool:
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
