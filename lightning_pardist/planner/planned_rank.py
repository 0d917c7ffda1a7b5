"""Tracing of single ranks: two training steps of a Trainer with a real strategy, without the other ranks."""

from __future__ import annotations

import copy
import gc
import logging
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from threading import Thread
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor, nn
from typing_extensions import override

from lightning_pardist.compat.fake_group import fake_worlds_in_threads, in_fake_world
from lightning_pardist.compat.lightning_loops import run_references
from lightning_pardist.compat.optimizers import as_on_devices
from lightning_pardist.compat.pytree import tree_map_only
from lightning_pardist.mesh import ParallelDims
from lightning_pardist.planner.exchange import Exchange, Stuck, Turns
from lightning_pardist.planner.ledger import Event, FileTransfer, Held, HostStep, HostWork, Message, Operator
from lightning_pardist.planner.skipped_kernels import Forms, SkippedKernels
from lightning_pardist.planner.step_ledger import StepLedger
from lightning_pardist.runtime.distributed_context import trial_meshes
from lightning_pardist.strategies.strategy import PardistStrategy
from lightning_pardist.trainer.sample_batches import undisturbed_random

#: Buffers of up to this number of elements are copied with their values.
_SMALL_BUFFER = 1 << 20
#: Work of the host in a step of any strategy (the Trainer's loop), see :attr:`ParallelAxis.host_work`.
STEP_WORK = 170.0


@dataclass(frozen=True)
class RankTrace:
    """Trace of one rank's second step, in which optimizer state exists.

    Attributes:
        dims: Degrees of parallelism.
        rank: Global rank.
        held: Bytes by kind at the peak.
        peak_in: Part of the step with the peak: ``"forward"``, ``"backward"`` or ``"optimizer"``.
        events: Operators, messages and changes of memory, in order.
        before_optimizer: Number of events before the optimizer's step.
        looked_at: Places at which user code read unknown values.
        microbatches: Number of micro-batches of a step.
        on_host: Bytes in host memory that are offloaded from the device, not included in ``held``.
        in_files: Bytes of optimizer state in files; ``held`` or ``on_host`` include only its resident part.
    """

    dims: ParallelDims
    rank: int
    held: Held
    peak_in: str
    events: list[Event]
    before_optimizer: int
    looked_at: list[str]
    microbatches: int = 1
    on_host: int = 0
    in_files: int = 0


@dataclass(frozen=True)
class Place:
    """One rank of a job.

    Attributes:
        rank: Global rank.
        devices: Ranks per node.
        num_nodes: Number of nodes.
        stands_for: Backend of the job's collectives: ``"gloo"`` or ``"nccl"``.
    """

    rank: int
    devices: int
    num_nodes: int
    stands_for: str

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return self.devices * self.num_nodes


def trace_rank(
    module: pl.LightningModule,
    batch: Any,
    strategy: Callable[[], PardistStrategy],
    place: Place,
    *,
    trainer_settings: Mapping[str, Any] | None = None,
    forms: Forms | None = None,
    found: dict[Any, Any] | None = None,
) -> RankTrace:
    """Run two steps of one rank without computing kernels. Not collective; the module is not changed.

    Args:
        module: The module before training, with values or on ``meta``.
        batch: This rank's batch in a step, on the host.
        strategy: Function that creates the strategy.
        place: The rank to trace.
        trainer_settings: Further arguments of the Trainer, such as ``precision``.
        forms: Cache of the shapes of operators' results, shared with other traces.
        found: Findings about the module that are shared with other traces of the same module and batch: see
            :attr:`~lightning_pardist.axes.base.RunContext.found_once`.

    Raises:
        ValueError: From the strategy, if it refuses the module or a setting. Other errors of its start propagate.
    """
    if dist.is_initialized():
        # Run in a separate thread, which has its own registry of process groups.
        settings: dict[str, Any] = {"trainer_settings": trainer_settings, "forms": forms, "found": found}
        return trace_ranks(module, batch, strategy, [place], **settings)[0]
    with _undisturbed(), _optimizers_of(place):
        return _traced(module, batch, _sharing_findings(strategy, found), place, trainer_settings or {}, forms, None)


def trace_ranks(
    module: pl.LightningModule,
    batch: Any,
    strategy: Callable[[], PardistStrategy],
    places: Sequence[Place],
    *,
    trainer_settings: Mapping[str, Any] | None = None,
    forms: Forms | None = None,
    found: dict[Any, Any] | None = None,
) -> list[RankTrace]:
    """Trace several ranks that depend on each other's messages, such as the stages of a pipeline.

    Args:
        module: See :func:`trace_rank`.
        batch: The batch of all of these ranks.
        strategy: Function that creates a strategy, called for each rank.
        places: The ranks to trace.
        trainer_settings: See :func:`trace_rank`.
        forms: See :func:`trace_rank`.
        found: See :func:`trace_rank`.

    Raises:
        ValueError: As :func:`trace_rank`.
        Stuck: If all of them wait for each other.
    """
    settings, ranks = trainer_settings or {}, [place.rank for place in places]
    turns, box = Turns(len(places)), dict[Any, deque[Any]]()
    strategy = _sharing_findings(strategy, {} if found is None else found)
    traces: dict[int, RankTrace] = {}
    failures: list[BaseException] = []

    def run(index: int) -> None:
        turns.enter(index)
        failed = False
        try:
            exchange = Exchange(ranks[index], ranks, turns, box)
            traces[index] = _traced(module, batch, strategy, places[index], settings, forms, exchange)
        except BaseException as error:
            failed = True
            failures.append(error)
        finally:
            turns.leave(index, failed=failed)

    with _undisturbed(), _optimizers_of(places[0]), fake_worlds_in_threads(places[0].stands_for), SkippedKernels():
        threads = [Thread(target=run, args=(index,), daemon=True) for index in range(len(places))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        raise next((error for error in failures if not isinstance(error, Stuck)), failures[0])
    return [traces[index] for index in range(len(places))]


def _sharing_findings(
    strategy: Callable[[], PardistStrategy], found: dict[Any, Any] | None
) -> Callable[[], PardistStrategy]:
    """Wrap a strategy factory: its strategies share findings about the module, and skip checks that need values."""

    def make() -> PardistStrategy:
        made = strategy()
        made.context.found_once = found
        made.context.check_samples = False
        made.context.is_plan = True
        return made

    return make


def _traced(
    module: pl.LightningModule,
    batch: Any,
    strategy: Callable[[], PardistStrategy],
    place: Place,
    settings: Mapping[str, Any],
    forms: Forms | None,
    exchange: Exchange | None,
) -> RankTrace:
    accumulated = int(settings.get("accumulate_grad_batches", 1))
    broadcast = None if exchange is None else exchange.broadcast
    group = in_fake_world(place.world_size, rank=place.rank, stands_for=place.stands_for, broadcast=broadcast)
    with group, SkippedKernels(forms, exchange) as skipped:
        made = strategy()
        # On CPU, host and device memory are the same.
        hosted = made.kept_on_host if place.stands_for != "gloo" else []
        resident = made.resident_state_bytes
        away = hosted or ([] if resident is None else ["optimizer"])
        watch = StepLedger(ends=True, away=away)
        trainer = pl.Trainer(
            strategy=made,
            accelerator="cpu",
            devices=place.devices,
            num_nodes=place.num_nodes,
            plugins=[_PlannedEnvironment(place)],
            callbacks=[watch],
            # Ended by the loader: max_steps would count the steps of several optimizers separately.
            max_epochs=1,
            limit_val_batches=0,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **settings,
        )
        trainer.fit(without_values(module, skipped), train_dataloaders=_Batches(batch, 2 * accumulated))
    if watch.held is None:
        raise ValueError("The Trainer ended before its second step, so no step was recorded.")
    events, begins, held = watch.events, watch.before_optimizer, watch.held
    if hosted:
        events = _stepping_on_host(events, begins, _copied(watch.held_away))
    on_host = sum(watch.held_away[kind] for kind in hosted)
    if hosted and "parameters" not in hosted:
        # The device holds full parameters; the host holds this rank's slice of them, as large as its gradients.
        on_host += watch.held_away["gradients"]
    in_files = 0
    if resident is not None:
        in_files = watch.held_away["optimizer"]
        resident = min(resident, in_files)
        events = [*events, FileTransfer(2 * in_files)]
        if hosted:
            on_host -= in_files - resident
        else:
            held = Held({**held.by_kind, "optimizer": resident})
    work = accumulated * (STEP_WORK + watch.host_work)
    events, begins = _with_host_work(events, begins, work, in_stages=made.dims.pipeline_parallel > 1)
    return RankTrace(
        made.dims,
        place.rank,
        held,
        watch.peak_in,
        events,
        begins,
        list(skipped.looked_at),
        watch.microbatches,
        on_host,
        in_files,
    )


def _copied(away: Mapping[str, int]) -> int:
    """Return the bytes copied between host and device per step: gradients, and updated parameters or shards."""
    gradients = away["gradients"]
    return gradients + (2 * away["parameters"] if "parameters" in away else gradients)


def _stepping_on_host(events: Sequence[Event], begins: int, copied: int) -> list[Event]:
    """Return a step's events with the optimizer's operators replaced by one :class:`HostStep`."""
    last = events[begins:]
    works = [event for event in last if isinstance(event, Operator)]
    step = HostStep(sum(event.moved for event in works), copied, len(works))
    return [*events[:begins], step, *(each for each in last if not isinstance(each, Operator))]


def _with_host_work(events: Sequence[Event], begins: int, work: float, *, in_stages: bool) -> tuple[list[Event], int]:
    """Add the host's work to a step's events: divided over a stage's messages, or else before the optimizer's step.

    Args:
        events: The events.
        begins: Number of events before the optimizer's step.
        work: Work of the host, in operators.
        in_stages: Whether the rank runs a stage of a pipeline.

    Returns:
        All events, and the number of those before the optimizer's step.
    """
    messages = sum(map(_is_between_stages, events)) if in_stages else 0
    if not messages:
        return [*events[:begins], HostWork(work), *events[begins:]], begins + 1
    each = HostWork(work / messages)
    before, after = (
        [one for event in part for one in ((each, event) if _is_between_stages(event) else (event,))]
        for part in (events[:begins], events[begins:])
    )
    return [*before, *after], len(before)


def _is_between_stages(event: Event) -> bool:
    return isinstance(event, Message) and event.peer >= 0


def _optimizers_of(place: Place) -> AbstractContextManager[None]:
    return nullcontext() if place.stands_for == "gloo" else as_on_devices()


def dims_of(strategy: PardistStrategy, place: Place) -> ParallelDims:
    """Return the degrees of parallelism that a strategy would have in a job.

    Args:
        strategy: Strategy as passed to a Trainer.
        place: One of the job's ranks.

    Raises:
        ValueError: If they do not fit the number of ranks.
    """
    strategy.num_nodes = place.num_nodes
    strategy.parallel_devices = [torch.device("cpu")] * place.devices
    return strategy.resolve_dims(place.world_size)


def stage_places(dims: ParallelDims, first: Place) -> list[Place]:
    """Return one rank of each stage of a job's first pipeline; only the first rank without a pipeline.

    Args:
        dims: The job's degrees.
        first: Its first rank.
    """
    apart = dims.world_size // dims.size("outer_parallel", "pipeline_parallel")
    return [replace(first, rank=stage * apart) for stage in range(dims.pipeline_parallel)]


def without_values(module: pl.LightningModule, skipped: SkippedKernels) -> pl.LightningModule:
    """Return a copy with uninitialised parameters, inside :class:`SkippedKernels`."""
    memo: dict[int, Any] = {}
    for param in module.parameters():
        empty = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype)
        memo[id(param)] = nn.Parameter(empty, requires_grad=param.requires_grad)
    for buffer in module.buffers():
        if buffer.is_meta or buffer.numel() > _SMALL_BUFFER:
            memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype)
    skipped.forget(memo.values())
    # During fit, a module references its Trainer and device mesh, which must not be copied.
    memo |= {id(own): None for own in run_references(module) if own is not None}
    return copy.deepcopy(module, memo)


class _Batches:
    """Loader that repeats one batch."""

    def __init__(self, batch: Any, count: int) -> None:
        self._batch = batch
        self._count = count

    def __iter__(self) -> Iterator[Any]:
        return (tree_map_only(Tensor, torch.clone, self._batch) for _ in range(len(self)))

    def __len__(self) -> int:
        return self._count


class _PlannedEnvironment(ClusterEnvironment):
    """Cluster environment of a traced rank."""

    def __init__(self, place: Place) -> None:
        self._place = place

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @property
    @override
    def main_address(self) -> str:
        return "127.0.0.1"

    @property
    @override
    def main_port(self) -> int:
        return 0

    @staticmethod
    @override
    def detect() -> bool:
        return False

    @override
    def world_size(self) -> int:
        return self._place.world_size

    @override
    def set_world_size(self, size: int) -> None:
        """Do nothing: the plan's number is fixed."""

    @override
    def global_rank(self) -> int:
        return self._place.rank

    @override
    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the plan's number is fixed."""

    @override
    def local_rank(self) -> int:
        return self._place.rank % self._place.devices

    @override
    def node_rank(self) -> int:
        return self._place.rank // self._place.devices


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Context that disables logging and undoes a Trainer's changes of its process."""
    hook, threads = sys.excepthook, torch.get_num_threads()
    rank = getattr(rank_zero_only, "rank", None)
    before = logging.root.manager.disable
    with ExitStack() as stack:
        stack.enter_context(undisturbed_random())
        stack.enter_context(trial_meshes())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        logging.disable(logging.ERROR)
        stack.callback(logging.disable, before)
        # Objects kept by earlier traces are no garbage: do not scan them in every collection.
        gc.freeze()
        stack.callback(gc.unfreeze)
        try:
            yield
        finally:
            sys.excepthook = hook
            torch.set_num_threads(threads)
            if rank is not None:
                rank_zero_only.rank = rank  # type: ignore[attr-defined]
