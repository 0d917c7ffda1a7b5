"""Simulated hosts on this machine: network namespaces with their own names and addresses, connected by a switch."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil

from tests.helpers.scripts import ENVIRONMENT, ROOT

_NETWORK = "10.99.0"


def why_no_hosts() -> str | None:
    """Return why hosts cannot be created here, None if they can."""
    missing = [program for program in ("ip", "nsenter", "unshare") if shutil.which(program) is None]
    if missing:
        return f"{', '.join(missing)} not installed (iproute2, util-linux)"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    name = f"pardist-probe-{os.getpid()}"
    probe = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if probe.returncode:
        return f"no network namespaces here: {probe.stderr.strip()}"
    veth = ["ip", "-n", name, "link", "add", "veth0", "type", "veth", "peer", "name", "veth1"]
    made = subprocess.run(veth, capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", name], check=False)
    return f"no virtual links here: {made.stderr.strip()}" if made.returncode else None


class Hosts:
    """Context manager of simulated hosts: ``Hosts(2)`` makes h1 at 10.99.0.1 and h2 at 10.99.0.2; files are shared."""

    def __init__(self, count: int = 2) -> None:
        self.names = [f"h{index + 1}" for index in range(count)]
        self._mark = f"pardist{os.getpid()}"
        self._folder = Path(tempfile.mkdtemp(prefix="pardist-hosts-"))
        self._processes: list[subprocess.Popen[str]] = []
        self._switch: subprocess.Popen[str] | None = None

    def __enter__(self) -> Hosts:
        _remove_those_of_the_dead()
        switch = self._space("sw")
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        lines = ["127.0.0.1 localhost", *(f"{self.address(name)} {name}" for name in self.names)]
        (self._folder / "hosts").write_text("\n".join(lines) + "\n")
        for name in self.names:
            space, port = self._space(name), f"p{name}"
            _ip("netns", "add", space)
            _ip("-n", space, "link", "set", "lo", "up")
            _ip("-n", space, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", switch)
            _ip("-n", switch, "link", "set", port, "master", "br0", "up")
            _ip("-n", space, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
        return self

    def __exit__(self, *_: object) -> None:
        for name in (*self.names, "sw"):
            if name != "sw":
                self.kill(name)
            _ip("netns", "del", self._space(name), check=False)
        for process in self._processes:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def address(self, name: str) -> str:
        """Return a host's IP address."""
        return f"{_NETWORK}.{self.names.index(name) + 1}"

    def start(self, name: str, *command: str, cwd: Path | None = None, **variables: str) -> Running:
        """Start a command on a host."""
        inside, enter = self._inside(name), self._enter(name)
        clean = {key: value for key, value in os.environ.items() if key not in ("LOCAL_RANK", "WORLD_SIZE")}
        own = ENVIRONMENT | {"PYTHONUNBUFFERED": "1"}
        path = f"{Path(sys.executable).parent}:{clean['PATH']}"
        output = self._folder / f"{name}-{len(self._processes)}.txt"
        with output.open("w") as file:
            process = subprocess.Popen(
                [*enter, "sh", "-c", inside, name, *command],
                env=clean | own | {"PATH": path} | variables,
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                text=True,
                cwd=cwd,
            )
        self._processes.append(process)
        return Running(process, output)

    def remote_shell(self) -> Path:
        """Write a program that runs a command on a host like ``ssh``: ``PROGRAM HOST COMMAND...``; return its path."""
        script = self._folder / "shell"
        cases = ""
        for name in self.names:
            enter = [*self._enter(name), "sh", "-c", self._inside(name), name]
            cases += f'    {name}) exec {shlex.join(enter)} sh -c "$*";;\n'
        script.write_text(f'#!/bin/sh\nhost=$1\nshift\ncase "$host" in\n{cases}esac\necho "no host $host"\nexit 1\n')
        script.chmod(0o755)
        return script

    def _enter(self, name: str) -> list[str]:
        return ["nsenter", f"--net=/run/netns/{self._space(name)}", "unshare", "--uts", "--mount"]

    def _inside(self, name: str) -> str:
        return f'mount --bind {self._folder}/hosts /etc/hosts; hostname {name}; exec "$@"'

    def ranks(self, name: str) -> list[psutil.Process]:
        """Return the processes that torchrun's agent on a host has started."""
        found = []
        for pid in _pids(self._space(name)):
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                parent = process.parent()
                if parent is not None and "torch.distributed.run" in parent.cmdline() and _runs(process):
                    found.append(process)
        return found

    def kill(self, name: str) -> None:
        """Kill everything that runs on a host, as if it were powered off."""
        _kill_all_in(self._space(name))

    def cut(self, name: str) -> None:
        """Disconnect a host's link: packets are dropped, without any notification."""
        _ip("-n", self._space("sw"), "link", "set", f"p{name}", "down")

    def plug_in(self, name: str) -> None:
        """Reconnect a host's link."""
        _ip("-n", self._space("sw"), "link", "set", f"p{name}", "up")

    def limit(self, rate: str | None) -> None:
        """Limit every host's send and receive rate to ``rate``, for example ``"100mbit"``; None removes the limit."""
        links = [(name, "eth0") for name in self.names] + [("sw", f"p{name}") for name in self.names]
        for name, link in links:
            base = ["tc", "-n", self._space(name), "qdisc"]
            subprocess.run([*base, "del", "dev", link, "root"], capture_output=True, check=False)
            if rate is not None:
                shape = ["tbf", "rate", rate, "burst", "256kb", "latency", "100ms"]
                subprocess.run([*base, "add", "dev", link, "root", *shape], check=True)

    def connect_slowly(self, delay_ms: float, rate: str | None) -> None:
        """Replace the hosts' network by one with a delay. No processes may be running on them.

        Args:
            delay_ms: One-way delay.
            rate: Rate as for :meth:`limit`, in ``mbit`` or ``gbit``.
        """
        units = {"mbit": 1, "gbit": 1000}
        mbit = int(rate[:-4]) * units[rate[-4:]] if rate else 0
        if self._switch is not None:
            self._switch.kill()
            self._switch.wait()
        ends = [f"{self._space(name)}={self.address(name)}/24" for name in self.names]
        command = [sys.executable, str(ROOT / "tests" / "helpers" / "delay.py"), str(delay_ms), str(mbit), *ends]
        self._switch = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._processes.append(self._switch)
        if self._switch.stdout is None or self._switch.stdout.readline() != "up\n":
            raise RuntimeError("the slow network did not come up")

    def _space(self, name: str) -> str:
        return f"{self._mark}-{name}"


class Running:
    """Command running on a host."""

    def __init__(self, process: subprocess.Popen[str], output: Path) -> None:
        self._process = process
        self._output = output

    @property
    def output(self) -> str:
        """Output so far."""
        return self._output.read_text()

    def has_ended(self) -> bool:
        """Return whether the command has ended."""
        return self._process.poll() is not None

    def wait(self, timeout_s: float = 120.0) -> int:
        """Wait for the command to end, and return its exit status."""
        return self._process.wait(timeout=timeout_s)


def _remove_those_of_the_dead() -> None:
    """Remove the hosts of killed test processes."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    for line in listed.splitlines():
        space = line.split()[0]
        owner = re.fullmatch(r"pardist(\d+)-\w+", space)
        if owner is not None and not psutil.pid_exists(int(owner[1])):
            _kill_all_in(space)
            _ip("netns", "del", space, check=False)


def _kill_all_in(space: str) -> None:
    for pid in _pids(space):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _pids(space: str) -> list[int]:
    shown = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True, check=False).stdout
    return [int(pid) for pid in shown.split()]


def _runs(process: psutil.Process) -> bool:
    return bool(process.status() != psutil.STATUS_ZOMBIE)


def _ip(*arguments: str, check: bool = True) -> None:
    subprocess.run(["ip", *arguments], check=check, capture_output=not check)
