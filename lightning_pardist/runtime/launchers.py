"""Launchers: start one rank per device, and end all ranks when one fails.

[Note: who sees what] With ``start_method="popen"`` the script that the user started is the first rank and starts the
other ranks of its host as child processes. A thread of the first rank watches the children, and a thread of each child
watches its parent. A failure inside ``fit`` is handled by every rank's watchdog (runtime/watchdog.py); this module
handles failures before, after and outside it: a child that dies while the first rank waits for it to connect, one that
fails after ``fit``, and the order in which reports are printed.
"""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from types import FrameType, TracebackType
from typing import Any, Literal, Protocol

import torch.multiprocessing as mp
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.multiprocessing.spawn import ProcessException, ProcessRaisedException
from typing_extensions import override

from lightning_pardist.compat.lightning_functions import (
    HYDRA_AVAILABLE,
    IS_INTERACTIVE,
    MultiProcessingLauncher,
    SubprocessScriptLauncher,
    TunerExitException,
    basic_subprocess_cmd,
    check_can_spawn_children,
    hydra_subprocess_cmd,
    set_num_threads_if_needed,
    start_method,
)
from lightning_pardist.compat.lightning_loops import return_predictions
from lightning_pardist.runtime.environments.launched import child_environment, launcher_pid, wants_full_tracebacks
from lightning_pardist.runtime.failed_runs import Failure
from lightning_pardist.runtime.failure_text import format_failure, is_refusal
from lightning_pardist.runtime.process_exit import exit_now, write_stderr
from lightning_pardist.runtime.returned_failures import ReturnedFailures
from lightning_pardist.runtime.returned_predictions import ReturnedPredictions
from lightning_pardist.runtime.watchdog import GRACE_S, FailureReport, PeerFailedError, Watchdog, where

#: The last line of output of a run that was stopped by Ctrl-C.
INTERRUPTED = "The run was interrupted (KeyboardInterrupt)."

StartMethod = Literal["popen", "spawn", "fork"]

_POLL_S = 0.2
#: Seconds for which the first rank waits for the others at the end of the script before it ends them.
_EXIT_WAIT_S = 600.0


class Watched(Protocol):
    """Interface between a launcher and the strategy: rank, watchdog and failure."""

    global_rank: int
    watchdog: Watchdog | None
    #: How the last run has failed on this rank; None if it has not.
    failure: Failure | None

    def stop_watchdog(self) -> None:
        """Stop the watchdog: this rank's work is done."""
        ...


class ScriptLauncher(SubprocessScriptLauncher):
    """Runs the user's script once more for each further device of this node, unless another launcher started the ranks.

    Args:
        environment: Cluster environment of this process.
        rank: This rank; its watchdog exists during a run.
        global_rank: Global rank of this process.
        num_processes: Number of ranks on this node.
        num_nodes: Number of hosts of the job.
    """

    def __init__(
        self, environment: ClusterEnvironment, rank: Watched, *, global_rank: int, num_processes: int, num_nodes: int
    ) -> None:
        super().__init__(environment, num_processes, num_nodes)
        self._rank = rank
        self._global_rank = global_rank

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Start the other ranks of this node, unless they are started externally, and call ``function`` here."""
        alone = self.num_processes * self.num_nodes == 1
        try:
            if not alone and not self.cluster_environment.creates_processes_externally:
                self._call_children_scripts()
                children.adopt(self.procs)
            elif (parent := launcher_pid()) is not None:
                watch_parent(parent)
            show_failures_last(is_first=self._global_rank == 0)
            set_num_threads_if_needed(num_processes=self.num_processes)
            return guarded(self._rank, function, *args, **kwargs)
        except KeyboardInterrupt:
            # Raised anywhere, also while another failure was being handled.
            children.interrupt(is_first=self._global_rank == 0)
            raise
        except SIGTERMException as stop:
            children.stopped = stop.code
            raise
        except SystemExit:
            # Or a print to a closed pipe: unless the others exit as well, they wait for this rank.
            children.failing = True
            raise

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the child processes: a Trainer may be pickled as a whole."""
        return self.__dict__ | {"procs": []}

    @override
    def _call_children_scripts(self) -> None:
        check_can_spawn_children(self)
        os.environ["MASTER_ADDR"] = self.cluster_environment.main_address
        os.environ["MASTER_PORT"] = str(self.cluster_environment.main_port)
        os.environ["NODE_RANK"] = str(self.cluster_environment.node_rank())
        os.environ["LOCAL_RANK"] = str(self.cluster_environment.local_rank())
        os.environ["WORLD_SIZE"] = str(self.num_processes * self.num_nodes)
        for local_rank in range(1, self.num_processes):
            command, cwd = _command(local_rank)
            self.procs.append(subprocess.Popen(command, env=child_environment(local_rank), cwd=cwd))


class StartedRankFailedError(PeerFailedError, ProcessRaisedException):
    """A rank started by spawn or fork failed; also of torch's class, which callers of such ranks expect."""

    def __init__(self, report: FailureReport) -> None:
        super().__init__(report)
        self.msg, self.error_index, self.pid = str(self), max(0, report.rank), 0


class MultiProcessLauncher(MultiProcessingLauncher):
    """Runs every rank in a new process by ``spawn`` or ``fork``; the calling process only waits.

    Args:
        strategy: Passed on to the new processes, as by Lightning's own launcher.
        rank: The rank that a new process becomes; passed on with the strategy.
        start_method: ``"spawn"`` or ``"fork"``.
    """

    def __init__(self, strategy: ParallelStrategy, rank: Watched, *, start_method: Literal["spawn", "fork"]) -> None:
        super().__init__(strategy, start_method=start_method)
        self._rank = rank

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Start the ranks, call ``function`` on each, and return the first rank's result.

        SIGTERM, which a scheduler may send to this process alone, is forwarded to the ranks.

        Raises:
            StartedRankFailedError: If a rank failed, with the report of the one that failed first.
            SystemExit: If the ranks have exited by one; a SIGTERMException if a signal has stopped all of them.
        """
        # Reset once the run has ended without error.
        self._rank.failure = Failure.in_started_ranks(start_method(self))
        predicting = trainer is not None and trainer.state.fn == TrainerFn.PREDICTING
        self._predictions = ReturnedPredictions() if predicting else None
        self._failures = ReturnedFailures()
        self.procs = []
        try:
            with self._forwarding_sigterm():
                result = super().launch(function, *args, trainer=trainer, **kwargs)
            self._rank.failure = None
            return result if self._predictions is None else self._predictions.receive()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            if start_method(self) != "spawn" or "pickle" not in str(error):
                raise
            raise ValueError(
                f"start_method='spawn' sends the Trainer and the module to new processes by pickle, which cannot take"
                f" {_unpicklable(trainer) or 'one of them'}: {error}. Define functions and classes at the top of a"
                " module (no lambda), or set start_method='popen', or 'fork'."
            ) from None
        except ProcessException:
            # Its message is that of the process that ended first, which need not be the one that failed first.
            if (report := self._failures.first()) is None:
                raise
            raise StartedRankFailedError(report) from None
        except KeyboardInterrupt:
            children.interrupt(is_first=True)
            for process in self.procs:
                process.join(GRACE_S)
            raise
        finally:
            # Only needed by new processes; they would prevent a Trainer from being pickled.
            if self._predictions is not None:
                self._predictions.close()
            self._failures.close()
            del self._failures, self._predictions

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
                result = guarded(self._rank, function, *call_args, **call_kwargs)
                return result if self._predictions is None else self._send(trainer, result)
            except PeerFailedError:
                raise
            except SIGTERMException:
                # Lightning does this in the calling process only, and serving ranks wait for the notice of it.
                trainer.state.status = TrainerStatus.INTERRUPTED
                self._strategy.teardown()
                raise
            except BaseException as exception:
                rank = self._strategy.global_rank
                self._failures.send(FailureReport(rank, f"pid {os.getpid()}", format_failure(exception)))
                raise

        if signal.getsignal(signal.SIGTERM) == self._forward_signal:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        watch_parent(os.getppid())
        if self._predictions is not None:
            return_predictions(trainer, if_asked=start_method(self) == "fork")
        try:
            super()._wrapping_function(process_idx, trainer, call, args, kwargs, return_queue, global_states)
        except (SystemExit, KeyboardInterrupt) as stop:
            if isinstance(stop, SystemExit) and not isinstance(stop, SIGTERMException) and stop.code:
                raise
            # A process that exits this way would be taken for one that has failed, or that has a result.
            if process_idx == 0:
                return_queue.put(stop)

    @override
    def _recover_results_in_main_process(self, worker_output: Any, trainer: Any) -> None:
        if isinstance(worker_output, (SystemExit, KeyboardInterrupt)):
            raise worker_output
        super()._recover_results_in_main_process(worker_output, trainer)

    @contextmanager
    def _forwarding_sigterm(self) -> Iterator[None]:
        main = threading.current_thread() is threading.main_thread()
        # A handler of the user's own is kept.
        if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            yield
            return
        signal.signal(signal.SIGTERM, self._forward_signal)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _forward_signal(self, number: int, frame: FrameType | None) -> None:
        if self.procs:
            self.kill(signal.SIGTERM)
            return
        # No ranks are running yet.
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _send(self, trainer: Any, predictions: Any) -> None:
        if self._predictions is None or not trainer.predict_loop.return_predictions:
            return
        self._predictions.send(
            predictions,
            batch_rank=self._strategy.distributed_sampler_kwargs["rank"],
            several_loaders=trainer.predict_loop.num_dataloaders > 1,
        )


def guarded(rank: Watched, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function``, and end all ranks if one fails.

    Raises:
        PeerFailedError: Instead of this rank's own exception, if another rank failed first with another message.
    """
    try:
        result = function(*args, **kwargs)
    except (KeyboardInterrupt, SystemExit, SIGTERMException, TunerExitException) as exception:
        if isinstance(exception, (KeyboardInterrupt, SystemExit)):
            rank.failure = Failure.of(exception)
        if isinstance(exception, KeyboardInterrupt) and rank.watchdog is not None:
            rank.watchdog.publish_reason(INTERRUPTED)
        rank.stop_watchdog()
        raise
    except BaseException as exception:
        rank.failure = Failure.of(exception)
        watchdog = rank.watchdog
        if watchdog is None:
            raise
        first = watchdog.failed(exception)
        if first.rank == rank.global_rank:
            raise
        if first.is_same_failure(exception):
            exception.__dict__[_REPORTED] = first
            raise
        raise PeerFailedError(first) from None
    rank.stop_watchdog()
    return result


class _Poll(threading.Thread):
    """Daemon thread that calls a function repeatedly until it returns True or the thread is stopped."""

    def __init__(self, name: str, function: Callable[[], bool], *, every_s: float) -> None:
        super().__init__(name=name, daemon=True)
        self._function = function
        self._every_s = every_s
        self._over = threading.Event()

    @override
    def run(self) -> None:
        while not self._over.wait(self._every_s) and not self._function():
            pass

    def stop(self) -> None:
        """Stop the thread."""
        self._over.set()
        self.join()


class Children:
    """Child processes with the ranks that this process started, over all Trainers of the script."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._known: set[int] = set()
        self._blame: Callable[[int, str, bool], bool] | None = None
        #: Deaths after the end of a run, for the next one.
        self._unreported: list[tuple[int, str, bool]] = []
        self._between_runs = False
        #: Indices of children without which the job continues.
        self._lost: set[int] = set()
        #: Whether this process is ending because of an exception, which it shows itself.
        self.failing = False
        #: Whether this process is ending because of an interrupt.
        self.interrupted = False
        #: The exit status of all ranks, if a signal has stopped them together.
        self.stopped: Any = None

    def adopt(self, processes: list[subprocess.Popen[bytes]]) -> None:
        """Watch these processes until the script ends."""
        if not processes:
            return
        first = not self._processes
        self._processes.extend(processes)
        if first:
            atexit.register(self._at_exit)
            _Poll("pardist-children", self._poll_children, every_s=_POLL_S).start()

    def interrupt(self, *, is_first: bool) -> None:
        """Record a Ctrl-C: Lightning ends the other ranks, and their exit is not reported."""
        if is_first and not self.interrupted:
            atexit.register(self._print_interrupted)
        self.interrupted = True

    def _print_interrupted(self) -> None:
        self.end(GRACE_S)
        write_stderr(INTERRUPTED)

    def report_to(self, blame: Callable[[int, str, bool], bool] | None) -> None:
        """Set the function that is called when a child dies.

        Args:
            blame: It gets the local rank, a description and whether a signal killed it, and returns whether the job
                continues. None at the end of a run: children that die until the next one are reported to that.
        """
        self._blame, self._between_runs = blame, blame is None
        if blame is not None:
            waiting, self._unreported = self._unreported, []
            for death in waiting:
                self._report(*death)

    def drop_rank(self, local_rank: int) -> None:
        """Continue without a rank of this host; its process is killed if it is still running after a grace period."""
        index = local_rank - 1
        if not 0 <= index < len(self._processes):
            return
        self._lost.add(index)
        # It may be about to exit, and still have output.
        timer = threading.Timer(GRACE_S, self._processes[index].kill)
        timer.daemon = True
        timer.start()

    def end(self, patience_s: float) -> None:
        """Wait for the children, and kill those that are still there after ``patience_s`` seconds."""
        deadline = time.monotonic() + patience_s
        for process in self._processes:
            try:
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def has_shown(self, report: FailureReport) -> bool:
        """Return whether a child process, which has ended, has shown the failure that it reported."""
        failed = (process for process in self._processes if process.returncode == 1)
        return report.where in [where(process.pid) for process in failed]

    def _poll_children(self) -> bool:
        for index, process in enumerate(self._processes):
            if index in self._known or process.poll() is None:
                continue
            self._known.add(index)
            if process.returncode not in (0, self.stopped):
                self._died(index + 1, process)
        return len(self._known) == len(self._processes)

    def _is_ending(self) -> bool:
        return self.failing or self.interrupted

    def _died(self, local_rank: int, process: subprocess.Popen[bytes]) -> None:
        if self._is_ending():
            return
        interrupted = process.returncode == -signal.SIGINT
        text = INTERRUPTED if interrupted else _exit_message(local_rank, process)
        killed = process.returncode < 0 and not interrupted
        if self._between_runs:
            self._unreported.append((local_rank, text, killed))
            return
        if self._blame is not None:
            self._report(local_rank, text, killed)
            return
        # No watchdog yet: the main thread waits for a rank that will never connect.
        time.sleep(1.0)
        if self._is_ending():
            return
        text = text if interrupted else f"{text} Training had not begun. Its own output is above."
        write_stderr(text)
        self.end(GRACE_S)
        exit_now()

    def _report(self, local_rank: int, text: str, killed: bool) -> None:
        # If the rank could report by itself, its report came first and this one is ignored.
        if self._blame is not None and self._blame(local_rank, text, killed):
            self._lost.add(local_rank - 1)

    def _at_exit(self) -> None:
        self.end(GRACE_S if self.failing or self.interrupted else _EXIT_WAIT_S)
        if self.interrupted:
            return
        failed = [
            (index + 1, process)
            for index, process in enumerate(self._processes)
            if process.returncode not in (0, self.stopped) and index not in self._lost
        ]
        if failed and not self.failing:
            for local_rank, process in failed:
                write_stderr(_exit_message(local_rank, process))
            exit_now()


children = Children()


_hook_installed = False
#: Set on an exception: the report of another rank with the same message.
_REPORTED = "_pardist_reported"


def _shown_by_another_rank(exception: BaseException) -> FailureReport | None:
    return None if wants_full_tracebacks() else exception.__dict__.get(_REPORTED)


def show_failures_last(*, is_first: bool) -> None:
    """Install an excepthook that prints this rank's failure after the other ranks' output.

    A failure of another rank is printed without this rank's own traceback.

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
            # The first rank shows the report and the others only its first line, unless the first rank is the failed
            # one.
            text = str(exception) if is_first or exception.report.rank == 0 else str(exception).splitlines()[0]
            # Not sys.stderr: torch's excepthook has replaced it by a stream that prefixes lines with this rank.
            print(text, file=sys.__stderr__, flush=True)
        elif is_refusal(exception):
            # An error raised by this package's checks on every rank: only the first rank prints it.
            if is_first:
                print(format_failure(exception), file=sys.__stderr__, flush=True)
        elif (report := _shown_by_another_rank(exception)) is None:
            show(kind, exception, trace)
        elif is_first and not children.has_shown(report):
            who = report.message().splitlines()[0].rstrip(":")
            print(f"{who}, as this rank did; its own output shows it.", file=sys.__stderr__, flush=True)

    sys.excepthook = hook


_parent_watched = False


def watch_parent(pid: int) -> None:
    """End this process when its parent process is gone, so that no rank is left running."""
    global _parent_watched
    if _parent_watched:
        return
    _parent_watched = True

    def look() -> bool:
        if os.getppid() != pid:
            write_stderr(
                f"Process {os.getpid()} ends because process {pid}, which started it, is gone.", sys.__stderr__
            )
            exit_now()
        return False

    _Poll("pardist-parent", look, every_s=1.0).start()


def _command(local_rank: int) -> tuple[Any, str | None]:
    if HYDRA_AVAILABLE:
        from hydra.core.hydra_config import HydraConfig

        if HydraConfig.initialized():
            return hydra_subprocess_cmd(local_rank)
    return basic_subprocess_cmd(), None


_HINTS = {
    "SIGKILL": " (the kernel does that when memory runs out)",
    "SIGABRT": (
        " (gloo does that to a rank that receives more or fewer bytes than it expects: ranks called a collective with"
        " tensors of different sizes)"
    ),
}


def _exit_message(local_rank: int, process: subprocess.Popen[bytes]) -> str:
    who, code = f"Rank {local_rank} (pid {process.pid})", process.returncode
    if code < 0:
        # Real-time signals have no names.
        name = signal.Signals(-code).name if -code in list(signal.Signals) else f"signal {-code}"
        return f"{who} was killed by {name}{_HINTS.get(name, '')}."
    return f"{who} ended with exit code {code}."


def _unpicklable(trainer: Any) -> str | None:
    """Return the path, by the user's names, of an object that a Trainer would send and that cannot be pickled."""
    roots = [trainer.lightning_module, getattr(trainer, "datamodule", None), *trainer.callbacks]
    found = (_unpicklable_in(root, type(root).__name__, set()) for root in roots if root is not None)
    return next((path for path in found if path is not None), None)


def _unpicklable_in(value: Any, path: str, seen: set[int]) -> str | None:
    items = value.items() if isinstance(value, dict) else getattr(value, "__dict__", {}).items()
    for name, item in items:
        # References to the Trainer lead to every other object.
        if name in ("_trainer", "trainer") or id(item) in seen:
            continue
        seen.add(id(item))
        try:
            ForkingPickler.dumps(item)
        except Exception:
            inner = path if name in ("_modules", "_buffers", "_parameters") else f"{path}.{name}"
            return _unpicklable_in(item, inner, seen) or inner
    return None


def choose_start_method(asked: StartMethod | None) -> StartMethod:
    """Return the requested start method; by default ``fork`` in an interactive session, ``popen`` elsewhere.

    Raises:
        ValueError: If this platform does not support it, with the supported ones.
    """
    chosen: StartMethod = asked or ("fork" if IS_INTERACTIVE else "popen")
    available = ["popen", *(method for method in mp.get_all_start_methods() if method != "forkserver")]
    if chosen not in available:
        use = f"Use start_method={' or '.join(available)}."
        if chosen == "fork":
            raise ValueError(f"start_method='fork': process forking is not supported on this platform. {use}")
        raise ValueError(f"start_method={chosen!r} is not available here. {use}")
    return chosen
