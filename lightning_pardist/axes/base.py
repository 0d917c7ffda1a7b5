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
    """Batches to plan with, see :class:`~lightning_pardist.trainer.sample_batches.SampleBatches`."""

    def first(self) -> Any:
        """A batch as the Trainer's first step will see it."""
        ...

    def of(self, stage: RunningStage) -> list[Any]:
        """The first batch of each loader of a stage."""
        ...

    def rehearsed(self) -> AbstractContextManager[None]:
        """Around a trial run in which loaders may be set up."""
        ...

    def put_back(self, loader: Any) -> Any:
        """A loader with what was taken of it in front again."""
        ...

    def detach(self) -> None:
        """Leave the Trainer as it was."""
        ...


class RunContext:
    """State that a strategy's axes and its Trainer helpers share during a run.

    Args:
        name: Of the strategy, for messages.
        distributed: This rank among the others.
        loss_weight: How losses of ranks and micro-batches are weighed.
        update_scope: What an optimizer's update of an element depends on.
        check_samples: Whether layers that mix the samples of a batch are looked for.

    Attributes:
        axes: Those that are in use, in the order in which they transform the module.
        module: The user's, from the moment at which a Trainer has it.
        optimizers: The user's, once made.
        precision: The Trainer's plugin.
        data_engine: Keeps gradients right over the gradient mesh; from the first ``fit`` on.
        loads_after_setup: Whether this run loads checkpoints into the transformed module.
        sharded_checkpoints: Whether checkpoints hold what each rank has, and nothing whole.
        sample_batches: First batches of the loaders of this run.
        batch_counts: Whether the batch of a training step counts on this rank; None in place of an answer where each
            one does.
        stopping: Exit status with which all ranks stop because of a signal; None while they go on.
        value_weights: What weighs the values that the latest training step of a pipeline has logged, by name: a count,
            or None for a sum.
        loss_count: What weighs the loss of that step: a count, or None for a sum; NaN where its graph shows it.
        batches_of_own: In an evaluation of exact shares, the batches that this rank has of each loader.
        found_once: Where ranks, or runs, that have the same module and the same batches are rehearsed in one process:
            what one of them has found out about the module, by what it depends on. None where there are no others.
        is_plan: Whether this is the rank of a plan, which computes, sends and writes nothing.
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
        self.precision = Precision()
        self.data_engine: DataEngine | None = None
        self.loads_after_setup = False
        self.sharded_checkpoints = False
        self.sample_batches: Samples | None = None
        self.batch_counts: Callable[[], bool | None] | None = None
        self.stopping: int | None = None
        self.value_weights: dict[str, Tensor | float | None] = {}
        self.loss_count: float | None = math.nan
        self.batches_of_own: Callable[[], list[int]] | None = None
        self.found_once: dict[Any, Any] | None = None
        self.is_plan = False

    def __getstate__(self) -> dict[str, Any]:
        """All but what is bound to process groups: a Trainer may be saved as a whole."""
        return self.__dict__ | {"data_engine": None, "batches_of_own": None, "batch_counts": None, "found_once": None}

    @property
    def dims(self) -> ParallelDims:
        """The degrees of parallelism of the job."""
        return self.distributed.dims

    @property
    def replicas(self) -> int:
        """How many shares the training data is divided into, those of other jobs included."""
        return self.dims.batch_size * math.prod(axis.data_share[1] for axis in self.axes)

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.distributed.device

    @property
    def mesh(self) -> DeviceMesh:
        """The job's mesh, every axis by name."""
        return self.distributed.meshes.all

    @property
    def batch_group(self) -> dist.ProcessGroup:
        """Ranks that see different samples, this one among them."""
        return self.distributed.meshes.batch.get_group()

    @property
    def gradient_group(self) -> dist.ProcessGroup:
        """Ranks whose gradients are averaged in every step, this one among them."""
        return self.distributed.meshes.gradients.get_group()

    def group_over(self, *axes: str) -> dist.ProcessGroup:
        """This rank's group over some axes of the mesh together. Collective over the world, the first time."""
        return self.distributed.meshes.over(axes)

    def update_group(self, scope: Scope, *axes: str) -> dist.ProcessGroup:
        """Ranks that take an optimizer's steps on whole tensors together. Collective over the world, the first time.

        Args:
            scope: What an element's update depends on: where it is all tensors, the stages of a pipeline take part.
            *axes: Over which each tensor is sharded, beside the tensor axis and that of experts.
        """
        stages = (PIPELINE_AXIS,) if scope == "joint" else ()
        return self.group_over(*stages, *axes, *(EXPERT_AXES if self.expert_ranks > 1 else ()), TENSOR_AXIS)

    @property
    def expert_ranks(self) -> int:
        """Number of ranks that hold the experts of a layer together; 1 if none are apart."""
        return self.dims.size(*EXPERT_AXES) if any(axis.divides_experts for axis in self.axes) else 1

    @property
    def data_group(self) -> dist.ProcessGroup:
        """Ranks that see different samples and average their gradients in every step, this one among them."""
        return self.distributed.meshes.data.get_group()

    @property
    def samples(self) -> Samples:
        """Batches to plan with.

        Raises:
            RuntimeError: Outside of a Trainer's run.
        """
        if self.sample_batches is None:
            raise RuntimeError("Batches to plan with are those of a Trainer's fit, validate, test or predict.")
        return self.sample_batches

    @property
    def loss_group(self) -> dist.ProcessGroup:
        """Ranks whose losses make up that of the next step, this one among them."""
        return next((axis.loss_group for axis in self.axes if axis.loss_group is not None), self.data_group)

    @property
    def island(self) -> int:
        """Which of the models that are trained apart this rank works on; 0 if there is one."""
        axes = [name for axis in self.axes if axis.diverges for name in axis.mesh_axes]
        return self.mesh[axes[0]].get_local_rank() if axes else 0

    @property
    def in_lockstep(self) -> bool:
        """Whether every rank takes part in each step of the others."""
        return all(axis.in_lockstep for axis in self.axes)

    @property
    def model_axes(self) -> tuple[ParallelAxis, ...]:
        """Axes whose ranks hold different parts of the module."""
        return tuple(axis for axis in self.axes if axis.splits_module)

    @property
    def data_axis(self) -> DataParallelAxis:
        """The axis that keeps gradients right.

        Raises:
            RuntimeError: Before axes are chosen.
        """
        for axis in self.axes:
            if isinstance(axis, DataParallelAxis):
                return axis
        raise RuntimeError("The axes of a strategy are chosen when a Trainer has its module.")

    @property
    def boundaries(self) -> Sequence[Sequence[nn.Module]] | None:
        """Modules that an axis runs one by one, see :attr:`ParallelAxis.boundaries`."""
        return next((axis.boundaries for axis in self.axes if axis.boundaries is not None), None)

    @property
    def closed(self) -> list[nn.Module]:
        """Modules that an axis runs in collectives of its own, see :attr:`ParallelAxis.closed`."""
        return [module for axis in self.axes for module in axis.closed]

    @property
    def divided_parameters(self) -> list[str]:
        """Names of parameters that no other axis splits, see :attr:`ParallelAxis.divided_parameters`."""
        return [name for axis in self.axes for name in axis.divided_parameters]

    @property
    def in_one_piece(self) -> list[str]:
        """Names of modules that no cut goes through, see :attr:`ParallelAxis.in_one_piece`."""
        return [name for axis in self.axes for name in axis.in_one_piece]

    def agree_on_microbatches(self, count: int) -> int:
        """How many micro-batches a step makes, given how many this rank can make. Collective over some data ranks."""
        for axis in self.axes:
            count = axis.agree_on_microbatches(count)
        return count

    @property
    def runs_a_step(self) -> int:
        """How often a training step runs forward and backward of the module."""
        return max(axis.runs_a_step for axis in self.axes)

    def plain(self, tree: Any) -> Any:
        """Values that a module computed, as ordinary whole tensors. Collective if an axis split any."""
        for axis in self.axes:
            tree = axis.plain(tree)
        return tree

    def part_of(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """What this rank holds of a tensor, and for :meth:`of_part` how; None if it holds all of it. Not collective."""
        how: list[tuple[str, Any]] = []
        for axis in self.axes:
            if (found := axis.part_of(tensor)) is not None:
                tensor, split = found
                how += [] if split is None else [(axis.name, split)]
        return tensor, tuple(how) or None

    def of_part(self, part: Tensor, how: Sequence[tuple[str, Any]]) -> Tensor:
        """The tensor of which this rank holds a part, as :meth:`part_of` said on a rank in the same place.

        Not collective.
        """
        axes = {axis.name: axis for axis in self.axes}
        for name, split in reversed(how):
            part = axes[name].of_part(part, split)
        return part

    def on_plain(
        self, run: Callable[..., T], rows: Rows | None = None, enter: EnterParameters | None = None
    ) -> Callable[..., T]:
        """``run`` on ordinary tensors, whatever is given to it. Collective if an axis has split any.

        Args:
            run: A part of a step.
            rows: What it computes each by itself. If an axis has split them, it runs on those of this rank.
            enter: Has ``run`` compute with what a function makes of its parameters, where it runs on some rows.
        """

        def call(*args: Any, **kwargs: Any) -> T:
            given, taken = (args, kwargs), None
            for axis in self.axes:
                found = None if rows is None else axis.take_rows(given, rows)
                given, taken = (axis.plain(given), taken) if found is None else (found.given, found)
            with ExitStack() as around:
                for axis in self.axes:
                    around.enter_context(axis.on_wholes())
                if taken is None:
                    return run(*given[0], **given[1])
                if enter is not None:
                    around.enter_context(enter(taken.enter))
                result = self.plain(run(*given[0], **given[1]))
            whole: T = taken.put_back(result)
            return whole

        return call

    def narrower_groups(self, module: nn.Module) -> dict[nn.Parameter, dist.ProcessGroup]:
        """Parameters whose gradients are summed over fewer ranks than the gradient mesh, and over which."""
        return {
            param: group
            for param in module.parameters()
            for axis in self.axes
            if (group := axis.gradient_group(param)) is not None
        }

    def agree_on_counts(self, counts: Tensor) -> Tensor:
        """What a batch's losses count, of what each rank has seen that works on it. Collective over those ranks."""
        for axis in self.axes:
            counts = axis.agree_on_counts(counts)
        return counts

    def before_collective(self) -> None:
        """Called right before a collective that steps and hooks may lead to, on every rank that takes part."""
        for axis in self.axes:
            axis.before_collective()

    def broadcast(self, value: T) -> T:
        """The first rank's object, on every rank that begins a run with it. Collective over these."""
        if not dist.is_initialized():
            return value
        self.before_collective()
        return broadcast_object(value, 0, group=self.distributed.start_group)


class ParallelAxis:
    """One kind of parallelism under a strategy. Every hook does nothing by default.

    The strategy holds its axes in the order of :attr:`order`, in which they transform the module. A step runs inside
    the last of them, inside that the one before, and so on. What is loaded is taken apart from the last model axis to
    the first, then by the data axis; what is saved is put together from where each axis says it is.

    Attributes:
        name: Under which a checkpoint keeps the axis' own state.
        mesh_axes: Axes of the device mesh that it uses; it is in use where one of them has more than one rank.
        order: When it transforms the module, from the inside of layers outwards.
        splits_module: Whether its ranks hold different parts of the module.
        divides_experts: Whether these are experts.
        splits_batch: Whether it takes the batches of one process apart, whose loaders and order are kept.
        creates_values: Whether a module built on ``meta`` gets its values from it.
        diverges: Whether its ranks train models of their own between two meetings, so that a checkpoint keeps the
            optimizers of each.
        in_lockstep: Whether every rank takes part in each step of the others, so that they are never far apart.
        ranks_apart: How many of the job's last ranks do not train: worlds of their own, which :meth:`serve`.
        workers_apart: Whether each rank that trains is a world of its own.
        calls_may_differ: Whether ranks may call layers in their own order between start and end of an evaluation.
        calls_communicate: Whether calls of layers talk to other ranks by themselves.
        context: The run, shared with the other axes.
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
    ranks_apart: int = 0
    workers_apart: bool = False
    calls_may_differ: ClassVar[bool] = True
    calls_communicate: ClassVar[bool] = False
    context: RunContext
    #: Whether the module came without values to this run.
    _built_on_meta = False

    def bind(self, context: RunContext) -> None:
        """Become part of a strategy. Called once, when the strategy is made."""
        self.context = context

    def degrees(self, num_nodes: int, ranks_per_node: int) -> dict[str, Degree]:
        """Sizes of the axis' mesh axes, for :meth:`~lightning_pardist.mesh.ParallelDims.resolve`.

        Args:
            num_nodes: Hosts of the job.
            ranks_per_node: Ranks that the Trainer starts on each of them.
        """
        return {}

    @property
    def data_share(self) -> tuple[int, int]:
        """Which share of the training data is this job's, and how many there are where other jobs have the others."""
        return 0, 1

    def is_used(self, dims: ParallelDims) -> bool:
        """Whether the axis has anything to do under these degrees."""
        return dims.size(*self.mesh_axes) > 1

    def check(self, trainer: pl.Trainer) -> None:
        """Refuse what cannot be right, before the module is changed. Not collective.

        Raises:
            ValueError: With what was set, what was found and the fix.
        """

    def why_not_compiled(self, whole_step: bool) -> str:
        """Why modules cannot be compiled under this axis, as the end of a sentence; empty if they can.

        Args:
            whole_step: Whether all of a step is to be compiled, and not blocks one by one.
        """
        return ""

    # --- the module ---------------------------------------------------------------------------------------------

    @property
    def loads_after_setup(self) -> bool:
        """Whether the module has nowhere to load a checkpoint to before :meth:`transform`."""
        module = self.context.module
        return self.creates_values and module is not None and on_meta(module)

    def materialize(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Give values to a module built on ``meta``, as far as this rank needs them. Collective over the world.

        The module has its final dtype; nothing has been moved or transformed yet.
        """

    def observe(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Look at the module while it is plain and whole, before any axis transforms it. Collective over the world."""

    def transform(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Change the module in place to what this axis runs. Collective over the world."""

    def after_optimizers(self, trainer: pl.Trainer, optimizers: Sequence[Optimizer]) -> None:
        """Optimizers were made from the transformed module; the engine of the data axis does not exist yet.

        Collective over the world.
        """

    def ready(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Every axis has transformed the module, and optimizers exist if there are any. Collective over the world."""

    @property
    def boundaries(self) -> Sequence[Sequence[nn.Module]] | None:
        """Modules that this axis runs one by one, by their ``forward``; None if steps run as they were written.

        Stage by stage, in the order in which they are called.
        """
        return None

    @property
    def closed(self) -> Sequence[nn.Module]:
        """Modules that this axis runs in collectives of its own, inside of which no other axis is to communicate."""
        return ()

    @property
    def divided_parameters(self) -> Sequence[str]:
        """Names of parameters that this axis is going to divide itself, once the module has been observed.

        Axes that split layers leave them whole, and plain.
        """
        return ()

    @property
    def in_one_piece(self) -> Sequence[str]:
        """Names of modules whose ranks of this axis run each call together, once the module has been observed.

        No other axis cuts them, and ranks call them in one order as often as each other.
        """
        return ()

    def agree_on_microbatches(self, count: int) -> int:
        """How many micro-batches a step makes on all ranks that run modules together. Collective over these.

        Args:
            count: How many this rank can make; no more than that.
        """
        return count

    @property
    def kept_on_host(self) -> Sequence[str]:
        """What rests in the host's memory where a device computes: of parameters, gradients and optimizer."""
        return ()

    @property
    def resident_state_bytes(self) -> int | None:
        """Bytes of optimizer state in memory at a time where it is kept in files; None where it is not."""
        return None

    @property
    def runs_a_step(self) -> int:
        """How often a training step runs forward and backward of the module."""
        return 1

    # --- steps --------------------------------------------------------------------------------------------------

    def running(self) -> AbstractContextManager[None]:
        """Around a step and everything that other axes do to run it."""
        return nullcontext()

    def run_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run one of the module's step functions."""
        return step(*args, **kwargs)

    def plain(self, tree: Any) -> Any:
        """Values of a step with ordinary, whole tensors in place of this axis's. Collective if there are any."""
        return tree

    def backward(self, run: Callable[[], None]) -> None:
        """Run backward from a step's loss."""
        run()

    def start_training(self) -> None:
        """The first step comes next, and everything has been loaded. Not collective."""

    def end_training(self) -> None:
        """The Trainer's loop has come to its end, before anything is synchronized. Collective over the world."""

    def serve(self) -> dict[str, Any] | None:
        """In the place of training on a rank that is set apart: return when the others have trained. Not collective.

        Returns:
            What they have left behind, of :func:`~lightning_pardist.trainer.ranks_apart.outcome_of`.
        """
        return None

    @property
    def loss_group(self) -> dist.ProcessGroup | None:
        """Ranks whose losses make up that of a step, if others than those of the gradient mesh."""
        return None

    def gradients_reduced(self) -> None:
        """Gradients of a step are those of the gradient mesh, and clipping is next; may be called again before a step.

        Collective where the axis has more to do.
        """

    def synchronize(self, *, evaluation: bool = False) -> None:
        """Validation or a test (``evaluation``) or a checkpoint comes next, or training has ended.

        Collective over the world.
        """

    def show_state(self) -> None:
        """The state of optimizers is about to be read. Collective over the world where they do not have it."""

    def around_backward(self) -> AbstractContextManager[None]:
        """Around a backward pass, and what the engine of the data axis does for it. Not collective."""
        return nullcontext()

    def agree_on_counts(self, counts: Tensor) -> Tensor:
        """What a batch's losses count, where this rank has seen a part of them. Collective over this axis."""
        return counts

    def part_of(self, tensor: Tensor) -> tuple[Tensor, Any] | None:
        """What this rank holds of a tensor that this axis has split, and how; None if it has nothing to do with it.

        Returns:
            An ordinary tensor, and what :meth:`of_part` needs, which can be sent; None where the tensor is whole.
        """
        return None

    def of_part(self, part: Tensor, split: Any) -> Tensor:
        """The opposite of :meth:`part_of`, for what was split so by a rank in the same place on this axis.

        Raises:
            TypeError: If the axis splits no tensors.
        """
        raise TypeError(f"The {self.name} axis has been given a part of a tensor, and splits none.")

    def on_wholes(self) -> AbstractContextManager[None]:
        """Around a part of a step that another axis runs on ordinary tensors: this one splits none inside."""
        return nullcontext()

    def take_rows(self, given: Arguments, rows: Rows) -> TakenRows | None:
        """This rank's rows of arguments, if the axis has split these along rows.

        Collective where arguments are split in several ways.

        Returns:
            None if they are not split, or not along rows.
        """
        return None

    def start_evaluation(self) -> None:
        """Validation, test or predict begins on this rank. Not collective: a rank without samples skips predict."""

    def end_evaluation(self) -> None:
        """Every batch of this rank has been evaluated, and the epoch's hooks have run."""

    def settle_set_parameters(self) -> list[str]:
        """Take the first rank's values of parameters held in parts that a training step has set differently on ranks.

        After the first training step of a run, where the step's parameters are watched. Collective over gradient ranks.

        Returns:
            Their names.
        """
        return []

    def before_collective(self) -> None:
        """Called right before a collective that steps and hooks may lead to, on every rank that takes part."""

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """One of the user's optimizers has stepped. Collective where the axis communicates between steps."""

    def gradient_group(self, param: nn.Parameter) -> dist.ProcessGroup | None:
        """Ranks that hold this parameter, if not all of the gradient mesh do: its gradients are summed over them.

        Tensor ranks with copies are among them. Sums are divided as all others are, by the size of the gradient mesh,
        and by the number of copies. A data axis that shards parameters leaves these to this axis, which shards and sums
        them itself.
        """
        return None

    def copied_parameters(self) -> list[str]:
        """Parameters of which several ranks of this axis have a copy, updated by each: alike if gradients are.

        Once the module is transformed; the same names on all ranks of the axis.
        """
        return []

    # --- the gradient norm --------------------------------------------------------------------------------------

    def counts(self, param: nn.Parameter) -> bool:
        """Whether this rank counts a parameter's gradient: of what several ranks of this axis hold alike, one does."""
        return True

    def reduce_over_axis(self, value: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        """Combine a tensor in place over this axis's axis, the data axis excepted. Collective over it."""

    # --- checkpoints --------------------------------------------------------------------------------------------

    def own_module_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state dict without the values that other ranks of this axis answer for. Not collective.

        Returns:
            Their tensors on ``meta``, and no other values of theirs; what is split over ranks as ``DTensor``s.
        """
        return state

    def local_module_state(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """The part of a state dict of one process that this rank's module takes. Not collective."""
        return state

    def local_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """As :meth:`local_module_state`, for an optimizer's state dict. Not collective."""
        return state

    def whole_values(self, tree: Any) -> Any:
        """What callbacks add to a checkpoint, with ordinary tensors in place of this axis's. Collective if any are."""
        return tree

    def state_dict(self) -> dict[str, Any]:
        """What this rank's axis goes on from, beside module and optimizers; empty if nothing. Not collective.

        Every rank's is saved in a checkpoint under :attr:`name`. Plain values and tensors, so that it loads with
        ``weights_only=True``.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the state of a rank that saw this rank's samples. Not collective.

        It is called only where as many ranks see different samples as when the state was saved.
        """

    def saved_loops(self, loops: dict[str, Any]) -> None:
        """Change in place what a checkpoint keeps of the Trainer's loops, where others would not understand it.

        Not collective.
        """

    def shards(self) -> dict[str, Shards]:
        """What a checkpoint keeps of an axis that :attr:`diverges`, beside module and optimizers. Not collective.

        Returns:
            By key, this rank's boxes of its tensors.
        """
        return {}

    def load_shards(self, saved: Callable[[str], Tensor | None]) -> None:
        """Go on from what :meth:`shards` gave, after module and optimizers have been loaded. Not collective.

        Args:
            saved: The whole tensor with a key; None if the checkpoint has none.
        """

    # --- for people, and the end --------------------------------------------------------------------------------

    def describe(self) -> str:
        """What is split over what, in lines for the log; empty if there is nothing to say."""
        return ""

    def release(self) -> None:
        """Take back what :meth:`ready` did, before any axis is torn down. Not collective."""

    def teardown(self) -> None:
        """The run has ended, well or not. Not collective, unless :meth:`ended_well`."""

    def ended_well(self) -> bool:
        """Whether the run came to its end on every rank, so that they may still talk to each other."""
        module = self.context.module
        if module is None or trainer_of(module) is None:
            return False
        return module.trainer.state.status != TrainerStatus.INTERRUPTED


class DataParallelAxis(ParallelAxis):
    """The axis over which gradients are averaged in every step; every strategy has one."""

    mesh_axes = ("data_replicate", "data_shard")
    order = 40

    @override
    def is_used(self, dims: ParallelDims) -> bool:
        """Always: it keeps gradients, whatever number of ranks there is."""
        return True

    @property
    def broadcasts(self) -> bool:
        """Whether :meth:`transform` gives every rank the first rank's values by itself."""
        return False

    @property
    def steps_on_parts(self) -> bool:
        """Whether the engine sees to it that optimizers step on what this rank holds of each parameter."""
        return False

    def convert_precision(self, module: pl.LightningModule) -> None:
        """Bring the module to the dtype that ``Trainer(precision=...)`` stands for. Not collective."""
        self.context.precision.convert_module(module)

    def to_device(self, module: nn.Module) -> None:
        """Move the module to this rank's device; what other ranks alone have created stays on ``meta``."""
        device = self.context.device
        if not self.context.loads_after_setup:
            module.to(device)
            return
        apply_to_tensors(module, lambda tensor: tensor if tensor.is_meta else tensor.to(device))
        update_device(module, device=device)

    @abstractmethod
    def make_engine(self, module: nn.Module, optimizers: list[Optimizer]) -> DataEngine:
        """The engine that keeps gradients right over the data axis. Collective over the data axis."""

    def whole_module_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """This rank's state dict to that of one process, whole at least on the first rank. Collective.

        Called where no axis splits the module.
        """
        return state

    def load_module_state(self, module: nn.Module, state: Mapping[str, Any], *, strict: bool) -> None:
        """Load what :meth:`local_module_state` left of a state dict. Not collective."""
        module.load_state_dict(state, strict=strict)
