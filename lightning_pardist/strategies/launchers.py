"""Starting a rank per device, and ending all of them when one fails.

[Note: who sees what] With ``start_method="popen"`` the script that the user started is the first rank and starts the
others as its children. A thread of it watches them, and a thread of each child watches it. A
failure inside ``fit`` is handled by every rank's watchdog (engines/watchdog.py); this module covers what happens
before, after and beside it: a child that dies while the first rank waits for it to connect, one that fails after
``fit``, and the order in which reports are printed.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import torch.multiprocessing as mp
from lightning.fabric.strategies.launchers.subprocess_script import (
    _HYDRA_AVAILABLE,
    _basic_subprocess_cmd,
    _hydra_subprocess_cmd,
)
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.pytorch.utilities.exceptions import SIGTERMException, _TunerExitException
from torch.multiprocessing.spawn import ProcessException
from typing_extensions import override

from lightning_pardist.engines.watchdog import GRACE_S, FailureReport, PeerFailedError, format_failure
from lightning_pardist.environments.launched import child_environment, launcher_pid

if TYPE_CHECKING:
    from lightning_pardist.strategies.base import PardistStrategy

StartMethod = Literal["popen", "spawn", "fork"]

_POLL_S = 0.2
#: How long the first rank waits for the others at the end of the script before it ends them.
_EXIT_WAIT_S = 600.0


class ScriptLauncher(_SubprocessScriptLauncher):
    """Runs the user's script once more for each further device of this node, unless somebody else started the ranks.

    Args:
        strategy: Whose ranks are started.
    """

    def __init__(self, strategy: PardistStrategy) -> None:
        environment = strategy.cluster_environment
        if environment is None:
            raise RuntimeError("A launcher needs the strategy's cluster environment; construct the Trainer first.")
        super().__init__(environment, strategy.num_processes, strategy.num_nodes)
        self._strategy = strategy

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Start the other ranks of this node, if that is ours to do, and call ``function`` on this one."""
        alone = self.num_processes * self.num_nodes == 1
        if not alone and not self.cluster_environment.creates_processes_externally:
            self._call_children_scripts()
            children.adopt(self.procs)
        elif (parent := launcher_pid()) is not None:
            watch_parent(parent)
        show_failures_last(is_first=self._strategy.global_rank == 0)
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return guarded(self._strategy, function, *args, **kwargs)

    @override
    def _call_children_scripts(self) -> None:
        self._check_can_spawn_children()
        os.environ["MASTER_ADDR"] = self.cluster_environment.main_address
        os.environ["MASTER_PORT"] = str(self.cluster_environment.main_port)
        os.environ["NODE_RANK"] = str(self.cluster_environment.node_rank())
        os.environ["LOCAL_RANK"] = str(self.cluster_environment.local_rank())
        os.environ["WORLD_SIZE"] = str(self.num_processes * self.num_nodes)
        for local_rank in range(1, self.num_processes):
            command, cwd = _command(local_rank)
            self.procs.append(subprocess.Popen(command, env=child_environment(local_rank), cwd=cwd))


class MultiProcessLauncher(_MultiProcessingLauncher):
    """Runs every rank in a new process by ``spawn`` or ``fork``; the calling process only waits."""

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Start the ranks, call ``function`` on each, and return the first rank's result.

        Raises:
            PeerFailedError: With the report of the rank that failed first.
        """
        self._failures = mp.get_context(self._start_method).SimpleQueue()
        try:
            return super().launch(function, *args, trainer=trainer, **kwargs)
        except ProcessException:
            # It tells of the process that ended first, which need not be the one that failed first.
            if self._failures.empty():
                raise
            raise PeerFailedError(self._failures.get()) from None

    @override
    def _wrapping_function(
        self,
        process_idx: int,
        trainer: Any,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        return_queue: Any,
        global_states: Any = None,
    ) -> None:
        def call(*call_args: Any, **call_kwargs: Any) -> Any:
            try:
                return guarded(self._strategy, function, *call_args, **call_kwargs)  # type: ignore[arg-type]
            except PeerFailedError:
                raise
            except BaseException as exception:
                rank = self._strategy.global_rank
                self._failures.put(FailureReport(rank, f"pid {os.getpid()}", format_failure(exception)))
                raise

        watch_parent(os.getppid())
        super()._wrapping_function(process_idx, trainer, call, args, kwargs, return_queue, global_states)


def guarded(strategy: PardistStrategy, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` and let a failure on any rank end all of them.

    Raises:
        PeerFailedError: In place of this rank's own exception where another rank failed first, in other words.
    """
    try:
        result = function(*args, **kwargs)
    except (KeyboardInterrupt, SystemExit, SIGTERMException, _TunerExitException):
        strategy.connection.stop_watchdog()
        raise
    except BaseException as exception:
        watchdog = strategy.connection.watchdog
        if watchdog is None:
            raise
        first = watchdog.failed(exception)
        if first.rank == strategy.global_rank or first.says_the_same(exception):
            raise
        raise PeerFailedError(first) from None
    strategy.connection.stop_watchdog()
    return result


class Children:
    """The ranks that this process started, over all Trainers of the script."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._blame: Callable[[int, str], None] | None = None
        #: Whether this process is ending because of an exception, which it shows itself.
        self.failing = False

    def adopt(self, processes: list[subprocess.Popen[bytes]]) -> None:
        """Watch these processes until the script ends."""
        if not processes:
            return
        first = not self._processes
        self._processes.extend(processes)
        if first:
            atexit.register(self._at_exit)
            threading.Thread(target=self._watch, name="pardist-children", daemon=True).start()

    def report_to(self, blame: Callable[[int, str], None]) -> None:
        """From now on tell ``blame`` (a watchdog's) which local rank died and how."""
        self._blame = blame

    def end(self, patience_s: float) -> None:
        """Wait for the children, and kill those that are still there after ``patience_s`` seconds."""
        deadline = time.monotonic() + patience_s
        for process in self._processes:
            try:
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _watch(self) -> None:
        known: set[int] = set()
        while len(known) < len(self._processes):
            time.sleep(_POLL_S)
            for index, process in enumerate(self._processes):
                if index in known or process.poll() is None:
                    continue
                known.add(index)
                if process.returncode:
                    self._died(index + 1, process)

    def _died(self, local_rank: int, process: subprocess.Popen[bytes]) -> None:
        if self.failing:
            return
        text = _obituary(local_rank, process)
        if self._blame is not None:
            # If the rank could report by itself, its report stands already and this one is not taken.
            self._blame(local_rank, text)
            return
        # No watchdog yet: the main thread waits for a rank that will never connect.
        time.sleep(1.0)
        print(f"{text} Training had not begun. Its own output is above.", file=sys.stderr, flush=True)
        self.end(GRACE_S)
        os._exit(1)

    def _at_exit(self) -> None:
        self.end(GRACE_S if self.failing else _EXIT_WAIT_S)
        failed = [(index + 1, process) for index, process in enumerate(self._processes) if process.returncode]
        if failed and not self.failing:
            for local_rank, process in failed:
                print(_obituary(local_rank, process), file=sys.stderr, flush=True)
            sys.stdout.flush()
            os._exit(1)


children = Children()


_hook_installed = False


def show_failures_last(*, is_first: bool) -> None:
    """Print an uncaught exception after the other ranks' output, and another rank's failure without our own traceback.

    Args:
        is_first: Whether this is the first rank.
    """
    global _hook_installed
    if _hook_installed:
        return
    _hook_installed = True
    show = sys.excepthook

    def hook(kind: type[BaseException], exception: BaseException, trace: TracebackType | None) -> None:
        children.failing = True
        children.end(2 * GRACE_S)
        if isinstance(exception, PeerFailedError):
            # The first rank shows the report, the others point to it, unless it is the first that cannot.
            text = str(exception) if is_first or exception.report.rank == 0 else str(exception).splitlines()[0]
            # Not sys.stderr: torch's own hook has put a collector there, that prefixes lines with this rank.
            print(text, file=sys.__stderr__, flush=True)
        else:
            show(kind, exception, trace)

    sys.excepthook = hook


_parent_watched = False


def watch_parent(pid: int) -> None:
    """End this process when the one that started it is gone, so that no rank is left behind."""
    global _parent_watched
    if _parent_watched:
        return
    _parent_watched = True

    def watch() -> None:
        while os.getppid() == pid:
            time.sleep(1.0)
        print(f"Process {os.getpid()} ends because process {pid}, which started it, is gone.", file=sys.__stderr__)
        os._exit(1)

    threading.Thread(target=watch, name="pardist-parent", daemon=True).start()


def _command(local_rank: int) -> tuple[Any, str | None]:
    if _HYDRA_AVAILABLE:
        from hydra.core.hydra_config import HydraConfig

        if HydraConfig.initialized():
            return _hydra_subprocess_cmd(local_rank)
    return _basic_subprocess_cmd(), None


def _obituary(local_rank: int, process: subprocess.Popen[bytes]) -> str:
    who, code = f"Rank {local_rank} (pid {process.pid})", process.returncode
    if code < 0:
        name = signal.Signals(-code).name
        hint = " (the kernel does that when memory runs out)" if name == "SIGKILL" else ""
        return f"{who} was killed by {name}{hint}."
    return f"{who} ended with exit code {code}."


def choose_start_method(asked: StartMethod | None) -> StartMethod:
    """The start method that was asked for; by default ``fork`` in an interactive session, ``popen`` elsewhere.

    Raises:
        ValueError: If this platform does not have it, with those that it has.
    """
    chosen: StartMethod = asked or ("fork" if _IS_INTERACTIVE else "popen")
    available = ["popen", *(method for method in mp.get_all_start_methods() if method != "forkserver")]
    if chosen not in available:
        raise ValueError(f"start_method={chosen!r} is not available here. Use one of {', '.join(available)}.")
    return chosen
