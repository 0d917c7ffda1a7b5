"""The base classes of parallel axes, and the context that the axes of a run share."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, ClassVar, Protocol, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import RunningStage, TrainerStatus
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pardist.checkpoint.chunks import Shards
from lightning_pardist.collectives import broadcast_object
from lightning_pardist.compat.lightning_functions import update_device
from lightning_pardist.compat.lightning_loops import trainer_of
from lightning_pardist.compat.modules import apply_to_tensors
from lightning_pardist.engines.common.logged_weights import LoggedWeight
from lightning_pardist.engines.common.loss_setting import LossWeight
from lightning_pardist.engines.common.meta_init import on_meta
from lightning_pardist.engines.common.update_scope import Scope, ScopeSetting
from lightning_pardist.engines.data_engine import DataEngine
from lightning_pardist.engines.tensor.rows import Arguments, Rows, TakenRows
from lightning_pardist.mesh import EXPERT_AXES, PIPELINE_AXIS, TENSOR_AXIS, Degree, ParallelDims
from lightning_pardist.runtime.distributed_context import DistributedContext

T = TypeVar("T")
EnterParameters = Callable[[Callable[[Tensor], Tensor]], AbstractContextManager[None]]


class Samples(Protocol):
    """Protocol of sample batches for planning, see :class:`~lightning_pardist.trainer.sample_batches.SampleBatches`."""

    def first(self) -> Any:
        """Return a batch as the Trainer's first step will see it."""
        ...

    def of(self, stage: RunningStage) -> list[Any]:
        """Return the first batch of each loader of a stage."""
        ...

    def in_trial_run(self) -> AbstractContextManager[None]:
        """Return a context for a trial run that may set up loaders; sample batches are kept inside it."""
        ...

    def replay_consumed(self, loader: Any) -> Any:
        """Return a loader that yields the batches taken from it as samples first, then the rest."""
        ...

    def detach(self) -> None:
        """Undo all changes to the Trainer."""
        ...


class RunContext:
    """State that a strategy's axes and its Trainer helpers share during a run.

    Args:
        name: Name of the strategy, for messages.
        distributed: This rank's process groups, device meshes and device.
        loss_weight: How the losses of ranks and micro-batches are weighted.
        update_scope: What an optimizer's update of an element depends on.
        check_samples: Whether to detect layers that mix the samples of a batch.

    Attributes:
        axes: The axes in use, in the order in which they transform the module.
        module: The user's module, set as soon as a Trainer holds it.
        optimizers: The user's optimizers, once created.
        trial_optimizers: Returns stand-ins for them in a trial run of a step before they are created.
        precision: The Trainer's precision plugin.
        data_engine: Engine that synchronizes gradients over the gradient mesh; set from the first ``fit`` on.
        loads_after_setup: Whether this run loads checkpoints into the transformed module.
        sharded_checkpoints: Whether checkpoints hold each rank's shards, and no full tensors.
        sample_batches: First batches of this run's loaders.
        batch_counts: Returns whether the current training batch counts on this rank. The attribute, or its result, is
            None if every batch counts.
        stopping: Exit status with which all ranks stop because of a signal; None while they continue.
        value_weights: Weights of the values logged by the latest training step of a pipeline, by name.
        loss_count: Weight of that step's loss: a count, or None for a sum; NaN if the loss graph determines it.
        own_batch_counts: In an evaluation of exact shares, returns the number of batches that this rank has of each
            loader.
        found_once: Cache of findings about the module, by what they depend on, shared by ranks or runs with the same
            module and batches that are simulated in one process. None if there is only one.
        is_plan: Whether this is a simulated rank of a plan, which computes, sends and writes nothing.
    """

    def __init__(
        self,
        name: str,
        distributed: DistributedContext,
        *,
        loss_weight: LossWeight = "auto",
        update_scope: ScopeSetting = "auto",
        check_samples: bool = True,
    ) -> None:
        self.name = name
        self.check_samples = check_samples
        self.distributed = distributed
        self.loss_weight: LossWeight = loss_weight
        self.update_scope: ScopeSetting = update_scope
        self.axes: tuple[ParallelAxis, ...] = ()
        self.module: pl.LightningModule | None = None
        self.optimizers: list[Optimizer] = []
        self.trial_optimizers: Callable[[], list[Optimizer]] | None = None
        self.precision = Precision()
        self.data_engine: DataEngine | None = None
        self.loads_after_setup = False
        self.sharded_checkpoints = False
        self.sample_batches: Samples | None = None
        self.batch_counts: Callable[[], bool | None] | None = None
        self.stopping: int | None = None
        self.value_weights: dict[str, LoggedWeight] = {}
        self.loss_count: float | None = math.nan
        self.own_batch_counts: Callable[[], list[int]] | None = None
        self.found_once: dict[Any, Any] | None = None
        self.is_plan = False

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without what is bound to process groups: a Trainer may be pickled as a whole."""
        return self.__dict__ | {"data_engine": None, "own_batch_counts": None, "batch_counts": None, "found_once": None}

    @property
    def dims(self) -> ParallelDims:
        """The degrees of parallelism of the job."""
        return self.distributed.dims

    @property
    def replicas(self) -> int:
        """Number of shares of the training data, those of other jobs included."""
        return self.dims.batch_size * math.prod(axis.data_share[1] for axis in self.axes)

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return self.distributed.device

    @property
    def mesh(self) -> DeviceMesh:
        """The job's device mesh, with all axes by name."""
        return self.distributed.meshes.all

    @property
    def batch_group(self) -> dist.ProcessGroup:
        """Process group of the ranks that see different samples, this one included."""
        return self.distributed.meshes.batch.get_group()

    @property
    def gradient_group(self) -> dist.ProcessGroup:
        """Process group over which gradients are averaged in every step."""
        return self.distributed.meshes.gradients.get_group()

    def group_over(self, *axes: str) -> dist.ProcessGroup:
        """Return this rank's process group over several mesh axes. Collective over the world, the first time."""
        return self.distributed.meshes.over(axes)

    def update_group(self, scope: Scope, *axes: str) -> dist.ProcessGroup:
        """Return the group of ranks that together hold what one optimizer update reads.

        Collective over the world, the first time.

        Args:
            scope: What an element's update depends on. If it depends on all tensors (``"joint"``), the group includes
                the pipeline stages.
            *axes: Mesh axes over which each tensor is sharded, besides the tensor and expert axes.
        """
        stages = (PIPELINE_AXIS,) if scope == "joint" else ()
        return self.group_over(*stages, *axes, *(EXPERT_AXES if self.expert_ranks > 1 else ()), TENSOR_AXIS)

    @property
    def expert_ranks(self) -> int:
        """Number of ranks over which the experts of a layer are distributed; 1 without expert parallelism."""
        return self.dims.size(*EXPERT_AXES) if any(axis.divides_experts for axis in self.axes) else 1

    @property
    def data_group(self) -> dist.ProcessGroup:
        """Process group of the ranks that see different samples and average their gradients in every step."""
        return self.distributed.meshes.data.get_group()

    @property
    def samples(self) -> Samples:
        """Sample batches for planning.

        Raises:
            RuntimeError: Outside of a Trainer's run.
        """
        if self.sample_batches is None:
            raise RuntimeError("There are batches to plan with only during a Trainer's fit, validate, test or predict.")
        return self.sample_batches

    @property
    def loss_group(self) -> dist.ProcessGroup:
        """Process group of the ranks whose losses make up that of the next step."""
        return next((axis.loss_group for axis in self.axes if axis.loss_group is not None), self.data_group)

    @property
    def island(self) -> int:
        """Index of this rank's island among those that train models of their own; 0 if there is only one model."""
        axes = [name for axis in self.axes if axis.diverges for name in axis.mesh_axes]
        return self.mesh[axes[0]].get_local_rank() if axes else 0

    @property
    def in_lockstep(self) -> bool:
        """Whether all ranks take part in every step."""
        return all(axis.in_lockstep for axis in self.axes)

    @property
    def model_axes(self) -> tuple[ParallelAxis, ...]:
        """Axes whose ranks hold different parts of the module."""
        return tuple(axis for axis in self.axes if axis.splits_module)

    @property
    def data_axis(self) -> DataParallelAxis:
        """The axis that synchronizes gradients.

        Raises:
            RuntimeError: Before axes are chosen.
        """
        for axis in self.axes:
            if isinstance(axis, DataParallelAxis):
                return axis
        raise RuntimeError("The axes of a strategy are chosen when a Trainer has its module.")

    @property
    def boundaries(self) -> Sequence[Sequence[nn.Module]] | None:
        """Modules that an axis runs one at a time, see :attr:`ParallelAxis.boundaries`."""
        return next((axis.boundaries for axis in self.axes if axis.boundaries is not None), None)

    @property
    def closed(self) -> list[nn.Module]:
        """Modules that an axis runs with its own collectives, see :attr:`ParallelAxis.closed`."""
        return [module for axis in self.axes for module in axis.closed]

    @property
    def divided_parameters(self) -> list[str]:
        """Names of parameters that one axis divides itself, see :attr:`ParallelAxis.divided_parameters`."""
        return [name for axis in self.axes for name in axis.divided_parameters]

    @property
    def unsplittable_modules(self) -> list[str]:
        """Names of modules that no other axis splits, see :attr:`ParallelAxis.unsplittable_modules`."""
        return [name for axis in self.axes for name in axis.unsplittable_modules]

    def agree_on_microbatches(self, count: int) -> int:
        """Return the number of micro-batches of a step, given this rank's maximum. Collective over some data ranks."""
        for axis in self.axes:
            count = axis.agree_on_microbatches(count)
        return count

    @property
    def passes_per_step(self) -> int:
        """Number of forward and backward passes of the module per training step."""
        return max(axis.passes_per_step for axis in self.axes)

    @property
    def host_work(self) -> float:
        """Work of the host per training step that issues no operators, as a number of operators that take as long."""
        return sum(axis.host_work for axis in self.axes)

    def plain(self, tree: Any) -> Any:
        """Convert values computed by a module to full plain tensors. Collective if an axis split any."""
        for axis in self.axes:
            tree = axis.plain(tree)
        return tree

    def part_of(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Return this rank's part of a tensor, and its split for :meth:`of_part` (None if whole). Not collective."""
        how: list[tuple[str, Any]] = []
        for axis in self.axes:
            if (found := axis.part_of(tensor)) is not None:
                tensor, split = found
                how += [] if split is None else [(axis.name, split)]
        return tensor, tuple(how) or None

    def of_part(self, part: Tensor, how: Sequence[tuple[str, Any]]) -> Tensor:
        """Rebuild the split tensor from the results of :meth:`part_of` on a rank at the same coordinates of the axes.

        Not collective.
        """
        axes = {axis.name: axis for axis in self.axes}
        for name, split in reversed(how):
            part = axes[name].of_part(part, split)
        return part

    def on_plain(
        self, run: Callable[..., T], rows: Rows | None = None, enter: EnterParameters | None = None
    ) -> Callable[..., T]:
        """Wrap ``run`` so that it computes on plain tensors, even if its arguments are split.

        Calls are collective if an axis has split any.

        Args:
            run: A part of a step.
            rows: Rows of the arguments that ``run`` treats independently. If an axis has split the arguments along
                rows, ``run`` gets this rank's rows only.
            enter: Given a function, returns a context in which ``run`` uses that function of its parameters; used when
                it runs on this rank's rows only.
        """

        def call(*args: Any, **kwargs: Any) -> T:
            given, taken = (args, kwargs), None
            for axis in self.axes:
                found = None if rows is None else axis.take_rows(given, rows)
                given, taken = (axis.plain(given), taken) if found is None else (found.given, found)
            with ExitStack() as around:
                for axis in self.axes:
                    around.enter_context(axis.on_full_tensors())
                if taken is None:
                    return run(*given[0], **given[1])
                if enter is not None:
                    around.enter_context(enter(taken.enter))
                result = self.plain(run(*given[0], **given[1]))
            whole: T = taken.put_back(result)
            return whole

        return call

    def narrower_groups(self, module: nn.Module) -> dict[nn.Parameter, dist.ProcessGroup]:
        """Return the groups of parameters whose gradients are summed over other ranks than the gradient mesh.

        See :meth:`ParallelAxis.gradient_group`.
        """
        return {
            param: group
            for param in module.parameters()
            for axis in self.axes
            if (group := axis.gradient_group(param)) is not None
        }

    def agree_on_counts(self, counts: Tensor) -> Tensor:
        """Combine the loss counts of the ranks that work on parts of one batch. Collective over those ranks."""
        for axis in self.axes:
            counts = axis.agree_on_counts(counts)
        return counts

    def before_collective(self) -> None:
        """Prepare all axes for a collective that steps or hooks may start; call it on every rank that takes part."""
        for axis in self.axes:
            axis.before_collective()

    def broadcast(self, value: T) -> T:
        """Broadcast the first rank's object to every rank that begins the run with it. Collective over those ranks."""
        if not dist.is_initialized():
            return value
        self.before_collective()
        return broadcast_object(value, 0, group=self.distributed.start_group)


class ParallelAxis:
    """Base class of one kind of parallelism in a strategy. All hooks do nothing by default.

    The strategy sorts its axes by :attr:`order` and lets them transform the module in that order. :meth:`run_step`
    calls are nested with the last axis outermost. Loaded state is split by the model axes from last to first, then by
    the data axis; saved state is assembled from the parts that each axis holds.

    Attributes:
        name: Key of the axis' own state in a checkpoint.
        mesh_axes: Device mesh axes that it uses; the axis is in use if one of them has more than one rank.
        order: Position in the order of transforms, from the inside of layers outwards.
        splits_module: Whether its ranks hold different parts of the module.
        divides_experts: Whether the parts are experts.
        splits_batch: Whether it splits the batches of one process, whose loaders and sample order are kept.
        creates_values: Whether it initializes the values of a module built on ``meta``.
        diverges: Whether its ranks train different models between two synchronizations, so that a checkpoint keeps the
            optimizers of each.
        in_lockstep: Whether all ranks take part in every step, so that none gets far ahead of the others.
        num_isolated_ranks: Number of the job's last ranks that do not train but run :meth:`serve`, each its own world.
        isolated_workers: Whether each training rank is its own world.
        calls_may_differ: Whether ranks may call layers in different orders during an evaluation.
        calls_communicate: Whether layer calls run communication.
        wraps_hooks: Whether hooks of the user's run in :meth:`around_hook` and :meth:`around_gradient_hook`.
        context: Run state shared with the other axes.
    """

    name: ClassVar[str]
    mesh_axes: ClassVar[tuple[str, ...]] = ()
    order: ClassVar[int]
    splits_module: ClassVar[bool] = False
    divides_experts: ClassVar[bool] = False
    splits_batch: ClassVar[bool] = False
    creates_values: ClassVar[bool] = False
    diverges: ClassVar[bool] = False
    in_lockstep: bool = True
    num_isolated_ranks: int = 0
    isolated_workers: bool = False
    calls_may_differ: ClassVar[bool] = True
    calls_communicate: ClassVar[bool] = False
    wraps_hooks: ClassVar[bool] = False
    context: RunContext
    #: Whether the module was on ``meta`` at the start of this run.
    _built_on_meta = False

    def bind(self, context: RunContext) -> None:
        """Attach the axis to a strategy's context. Called once, when the strategy is created."""
        self.context = context

    def degrees(self, num_nodes: int, ranks_per_node: int) -> dict[str, Degree]:
        """Return the sizes of the axis' mesh axes, for :meth:`~lightning_pardist.mesh.ParallelDims.resolve`.

        Args:
            num_nodes: Number of hosts of the job.
            ranks_per_node: Number of ranks that the Trainer starts on each host.
        """
        return {}

    @property
    def data_share(self) -> tuple[int, int]:
        """Index of this job's share of the training data, and the number of shares over all jobs."""
        return 0, 1

    def is_used(self, dims: ParallelDims) -> bool:
        """Return whether the axis is in use under these degrees of parallelism."""
        return dims.size(*self.mesh_axes) > 1

    def check(self, trainer: pl.Trainer) -> None:
        """Check settings, module and callbacks before the module is changed. Not collective.

        Raises:
            ValueError: If a combination is unsupported; names the setting, what was found and the fix.
        """

    def compile_refusal(self, whole_step: bool) -> str:
        """Return why modules cannot be compiled under this axis, as the end of a sentence; empty if they can.

        Args:
            whole_step: Whether the whole step is to be compiled, not each block.
        """
        return ""

    # --- the module ---------------------------------------------------------------------------------------------

    @property
    def loads_after_setup(self) -> bool:
        """Whether a checkpoint cannot be loaded before :meth:`transform`, since the module is on ``meta``."""
        module = self.context.module
        return self.creates_values and module is not None and on_meta(module)

    def materialize(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Initialize the parts of a ``meta`` module that this rank needs. Collective over the world.

        The module has its final dtype; nothing has been moved or transformed yet.
        """

    def observe(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Analyze the module before any axis transforms it. Collective over the world."""

    def transform(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Transform the module in place for this axis. Collective over the world."""

    def after_optimizers(self, trainer: pl.Trainer, optimizers: Sequence[Optimizer]) -> None:
        """Called after optimizers are created from the transformed module, before the data axis creates its engine.

        Collective over the world.
        """

    def ready(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Called after all axes have transformed the module and optimizers exist, if any. Collective over the world."""

    @property
    def boundaries(self) -> Sequence[Sequence[nn.Module]] | None:
        """Modules that this axis calls one at a time through their ``forward``; None if steps run as written.

        Grouped by stage, in call order.
        """
        return None

    @property
    def closed(self) -> Sequence[nn.Module]:
        """Modules that this axis runs with its own collectives; no other axis may communicate inside them."""
        return ()

    @property
    def divided_parameters(self) -> Sequence[str]:
        """Names of parameters that this axis divides itself; known after :meth:`observe`.

        Axes that split layers leave them as full plain tensors.
        """
        return ()

    @property
    def unsplittable_modules(self) -> Sequence[str]:
        """Names of modules whose every call is collective over this axis; known after :meth:`observe`.

        No other axis splits them. All ranks call them in the same order and equally often.
        """
        return ()

    def agree_on_microbatches(self, count: int) -> int:
        """Return the number of micro-batches of a step on all ranks that run modules together. Collective over them.

        Args:
            count: Maximum on this rank; the result is not larger.
        """
        return count

    @property
    def kept_on_host(self) -> Sequence[str]:
        """What is kept in host memory while the device computes, out of parameters, gradients and optimizer."""
        return ()

    @property
    def resident_state_bytes(self) -> int | None:
        """Bytes of file-backed optimizer state resident in memory at a time; None if state is not kept in files."""
        return None

    @property
    def passes_per_step(self) -> int:
        """Number of forward and backward passes of the module per training step."""
        return 1

    @property
    def host_work(self) -> float:
        """Work of the host per training step that issues no operators, as a number of operators that take as long.

        For plans. Measured on CPU, with chains of 2, 16 and 64 layers of width 16, in addition to ``pardist_ddp``'s.
        """
        return 0.0

    # --- steps --------------------------------------------------------------------------------------------------

    def running(self) -> AbstractContextManager[None]:
        """Return a context around a step, including what the other axes do to run it."""
        return nullcontext()

    def run_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run one of the module's step functions."""
        return step(*args, **kwargs)

    def around_hook(self) -> AbstractContextManager[Any]:
        """Return a context for a hook outside of steps, in which user code may compute with the module's parameters."""
        return nullcontext()

    def around_gradient_hook(self) -> AbstractContextManager[Any]:
        """Return a context for a hook between backward and the update, in which user code may change gradients."""
        return nullcontext()

    def plain(self, tree: Any) -> Any:
        """Convert this axis's split tensors in a step's values to full plain tensors. Collective if there are any."""
        return tree

    def backward(self, run: Callable[[], None]) -> None:
        """Run the backward pass of a step's loss."""
        run()

    def start_training(self) -> None:
        """Called before the first step, after everything has been loaded. Not collective."""

    def end_training(self) -> None:
        """Called when the Trainer's loop has ended, before :meth:`synchronize`. Collective over the world."""

    def serve(self) -> dict[str, Any] | None:
        """Run on the last :attr:`num_isolated_ranks` ranks while the others train. Not collective.

        Returns:
            The outcome of their training, from :func:`~lightning_pardist.trainer.isolated_ranks.outcome_of`.
        """
        return None

    @property
    def loss_group(self) -> dist.ProcessGroup | None:
        """Process group of the ranks whose losses make up that of a step; None for the default, the data group."""
        return None

    def gradients_reduced(self) -> None:
        """Called after gradients are reduced over the gradient mesh, before clipping; possibly again before a step.

        Collective if the axis reduces them further.
        """

    def synchronize(self, *, evaluation: bool = False) -> None:
        """Called before validation or a test (``evaluation``), before a checkpoint, and after training.

        Collective over the world.
        """

    def show_state(self) -> None:
        """Called before optimizer state is read. Collective over the world if this rank's optimizers do not hold it."""

    def around_backward(self) -> AbstractContextManager[None]:
        """Return a context around a backward pass and the data engine's work for it. Not collective."""
        return nullcontext()

    def agree_on_counts(self, counts: Tensor) -> Tensor:
        """Combine a batch's loss counts if each rank has computed on a part of it. Collective over this axis."""
        return counts

    def part_of(self, tensor: Tensor) -> tuple[Tensor, Any] | None:
        """Return this rank's part of a tensor that this axis has split, and the split; None if not one of its tensors.

        Returns:
            A plain tensor, and the split that :meth:`of_part` needs (picklable); the split is None if the tensor is
            whole.
        """
        return None

    def of_part(self, part: Tensor, split: Any) -> Tensor:
        """Rebuild a split tensor from the result of :meth:`part_of` on a rank at the same coordinate of this axis.

        Raises:
            TypeError: If the axis splits no tensors.
        """
        raise TypeError(f"The {self.name} axis has been given a part of a tensor, and splits none.")

    def on_full_tensors(self) -> AbstractContextManager[None]:
        """Return a context for code that another axis runs on plain tensors: this axis splits none inside."""
        return nullcontext()

    def take_rows(self, given: Arguments, rows: Rows) -> TakenRows | None:
        """Return this rank's rows of the arguments, if the axis has split them along rows.

        Collective if arguments are split in several ways.

        Returns:
            None if they are not split, or not along rows.
        """
        return None

    def start_evaluation(self) -> None:
        """Called when validation, test or predict begins. Not collective: a rank without samples skips predict."""

    def end_evaluation(self) -> None:
        """Called after this rank has evaluated all its batches and run the epoch's hooks."""

    def sync_set_parameters(self) -> list[str]:
        """Restore consistency of sharded parameters that a training step has set to different values on ranks.

        The first rank's values are taken. Called after the first training step of a run, if the step's parameters are
        watched. Collective over gradient ranks.

        Returns:
            Names of these parameters.
        """
        return []

    def before_collective(self) -> None:
        """Called right before a collective that steps or hooks may start, on every rank that takes part."""

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """Called after one of the user's optimizers has stepped. Collective if the axis communicates between steps."""

    def gradient_group(self, param: nn.Parameter) -> dist.ProcessGroup | None:
        """Return the group over which this parameter's gradient is summed; None for the gradient mesh.

        It holds the ranks with this parameter, if these are not all of the gradient mesh, including tensor ranks with
        copies. Sums are divided by the size of the gradient mesh, as all others are, and by the number of copies. A
        data axis that shards parameters leaves these to this axis, which shards and reduces them itself.
        """
        return None

    def replicated_parameters(self) -> list[str]:
        """Return names of parameters replicated on several ranks of this axis, which update their copies separately.

        The copies stay equal as long as their gradients are equal. Available after :meth:`transform`; the same names
        on all ranks of the axis.
        """
        return []

    # --- the gradient norm --------------------------------------------------------------------------------------

    def counts(self, param: nn.Parameter) -> bool:
        """Return whether this rank counts a parameter's gradient in the norm; of several replicas, only one does."""
        return True

    def reduce_over_axis(self, value: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        """Reduce a tensor in place over this axis's ranks; a no-op for data axes. Collective over this axis."""

    # --- checkpoints --------------------------------------------------------------------------------------------

    def own_module_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state dict without the values that other ranks of this axis save. Not collective.

        Returns:
            The state dict with the other ranks' tensors on ``meta`` and without their other values. Tensors sharded
            over ranks are ``DTensor``s.
        """
        return state

    def local_module_state(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return this rank's part of a full state dict, to load into its module. Not collective."""
        return state

    def local_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's part of an optimizer's full state dict. Not collective."""
        return state

    def whole_values(self, tree: Any) -> Any:
        """Convert this axis's tensors in callbacks' checkpoint entries to full plain tensors. Collective if any are."""
        return tree

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's axis state to resume from, besides module and optimizers; empty if none. Not collective.

        A checkpoint keeps it for every rank under :attr:`name`. It holds plain values and tensors only, so that it
        loads with ``weights_only=True``.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the state of the rank that saw this rank's samples. Not collective.

        Called only if the number of ranks that see different samples is the one at the time of saving.
        """

    def adjust_saved_loops(self, loops: dict[str, Any]) -> None:
        """Edit in place the saved state of the Trainer's loops, if it would not be valid on other ranks.

        Not collective.
        """

    def shards(self) -> dict[str, Shards]:
        """Return what a checkpoint keeps of an axis that :attr:`diverges`, besides module and optimizers.

        Not collective.

        Returns:
            This rank's boxes of the axis' tensors, by key.
        """
        return {}

    def load_shards(self, saved: Callable[[str], Tensor | None]) -> None:
        """Restore the tensors of :meth:`shards`, after module and optimizers have been loaded. Not collective.

        Args:
            saved: Returns the full tensor of a key; None if the checkpoint has none.
        """

    # --- description and teardown -------------------------------------------------------------------------------

    def describe(self) -> str:
        """Return a description of the split for the log, one or more lines; may be empty."""
        return ""

    def release(self) -> None:
        """Undo :meth:`ready`, before any axis is torn down. Not collective."""

    def teardown(self) -> None:
        """Called at the end of the run, successful or not. Not collective, unless :meth:`ended_normally`."""

    def ended_normally(self) -> bool:
        """Return whether the run was not interrupted, so that collectives are still possible."""
        module = self.context.module
        if module is None or trainer_of(module) is None:
            return False
        return module.trainer.state.status != TrainerStatus.INTERRUPTED


class DataParallelAxis(ParallelAxis):
    """Axis over which gradients are averaged in every step; every strategy has one."""

    mesh_axes = ("data_replicate", "data_shard")
    order = 40

    @override
    def is_used(self, dims: ParallelDims) -> bool:
        """Return True: the axis synchronizes gradients for any number of ranks."""
        return True

    @property
    def broadcasts(self) -> bool:
        """Whether :meth:`transform` itself broadcasts the first rank's parameter values."""
        return False

    @property
    def steps_on_shards(self) -> bool:
        """Whether the engine makes optimizers step on this rank's part of each parameter."""
        return False

    def convert_precision(self, module: pl.LightningModule) -> None:
        """Convert the module to the dtype of ``Trainer(precision=...)``. Not collective."""
        self.context.precision.convert_module(module)

    def to_device(self, module: nn.Module) -> None:
        """Move the module to this rank's device; tensors that only other ranks hold stay on ``meta``."""
        device = self.context.device
        if not self.context.loads_after_setup:
            module.to(device)
            return
        apply_to_tensors(module, lambda tensor: tensor if tensor.is_meta else tensor.to(device))
        update_device(module, device=device)

    @abstractmethod
    def make_engine(self, module: nn.Module, optimizers: list[Optimizer]) -> DataEngine:
        """Create the engine that synchronizes gradients over the data axis. Collective over the data axis."""

    def full_module_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Assemble the full state dict, at least on the first rank, from this rank's. Collective.

        Called if no axis splits the module.
        """
        return state

    def load_module_state(self, module: nn.Module, state: Mapping[str, Any], *, strict: bool) -> None:
        """Load this rank's part of a state dict, from :meth:`local_module_state`. Not collective."""
        module.load_state_dict(state, strict=strict)
