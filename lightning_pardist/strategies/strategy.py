"""Base strategy: the adapter between Lightning's Trainer and an ordered tuple of parallel axes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, ClassVar, TypeVar, get_args

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import LayerSync
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_only
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pardist.axes.base import DataParallelAxis, ParallelAxis, RunContext
from lightning_pardist.axes.refusals import (
    refuse_ddp_ignored,
    refuse_lazy,
    refuse_renormalized,
    refuse_sparse_buffers,
)
from lightning_pardist.axes.user_parallelized import UserParallelizedAxis, is_user_parallelized, note_user_parallelized
from lightning_pardist.collectives import barrier, broadcast_object, reduce, table_device, world_group
from lightning_pardist.compat.contract import warn_if_untested
from lightning_pardist.compat.default_group import in_step, world_size_read
from lightning_pardist.compat.lightning_functions import PATH, optimizers_to_device, seed_workers
from lightning_pardist.compat.lightning_loops import layer_sync as layer_sync_of
from lightning_pardist.compat.lightning_loops import lightning_optimizers, plain_optimizer, set_device_mesh, trainer_of
from lightning_pardist.engines.common import activation_checkpointing
from lightning_pardist.engines.common.activation_checkpointing import Checkpointing, check_checkpointing
from lightning_pardist.engines.common.allocator import keep_freed_memory
from lightning_pardist.engines.common.compilation import Backend, Compile
from lightning_pardist.engines.common.floored_counts import noted_floors
from lightning_pardist.engines.common.full_tensor_updates import updates_of
from lightning_pardist.engines.common.held_tensors import mark_held
from lightning_pardist.engines.common.loss_setting import LossWeight, check_loss_weight
from lightning_pardist.engines.common.memory import HeldBytes, held_bytes
from lightning_pardist.engines.common.plain_encoders import PlainEncoders
from lightning_pardist.engines.common.update_scope import (
    ScopeSetting,
    calls_closure_again,
    check_scope,
    known_scope,
)
from lightning_pardist.engines.data_engine import DataEngine
from lightning_pardist.engines.ddp.buffers import broadcast_module, describe_sparse_buffers
from lightning_pardist.foreign_settings import refuse_unknown
from lightning_pardist.mesh import REST_AXES, ParallelDims, experts_beside_context
from lightning_pardist.runtime.distributed_context import DistributedContext
from lightning_pardist.runtime.launchers import (
    MultiProcessLauncher,
    ScriptLauncher,
    StartMethod,
    choose_start_method,
)
from lightning_pardist.runtime.process_group import verify_same_module
from lightning_pardist.settings import one_of
from lightning_pardist.trainer import layer_sync
from lightning_pardist.trainer.auto_resume import AutoResume, Resume
from lightning_pardist.trainer.batch_ranks import show_batch_ranks
from lightning_pardist.trainer.checkpoints import Checkpoints, Form
from lightning_pardist.trainer.compiled_parts import CompiledParts
from lightning_pardist.trainer.data_duties import DataParallelDuties
from lightning_pardist.trainer.deepspeed_config import DeepSpeedConfig
from lightning_pardist.trainer.gradient_access import GradientAccess
from lightning_pardist.trainer.hook_calls import HookCalls
from lightning_pardist.trainer.isolated_ranks import IsolatedRanks
from lightning_pardist.trainer.kept_optimizers import KeptOptimizers
from lightning_pardist.trainer.loader_state import LoaderState
from lightning_pardist.trainer.logged_graphs import LoggedGraphs
from lightning_pardist.trainer.parameter_places import forbid_reassignment
from lightning_pardist.trainer.patch_stack import PatchStack
from lightning_pardist.trainer.preemption import PreemptionHandler
from lightning_pardist.trainer.random_numbers import sync_random_state
from lightning_pardist.trainer.resumable_loaders import keep_loaders
from lightning_pardist.trainer.sample_batches import SampleBatches
from lightning_pardist.trainer.skipped_steps import allow_skipped_steps, skipped_if_none
from lightning_pardist.trainer.state_dicts import StateDicts
from lightning_pardist.trainer.uneven_inputs import UnevenInputs

T = TypeVar("T")
A = TypeVar("A", bound=ParallelAxis)
#: Name of Lightning's barrier after prepare_data.
_DATA_IS_THERE = "pre_setup"


class PardistStrategy(ParallelStrategy):
    """Base class of all strategies: implements Lightning's strategy interface on top of a tuple of parallel axes.

    A run goes ``Trainer(...)`` -> :meth:`_configure_launcher` (settings are checked, nothing has started) -> the
    launcher starts ranks -> :meth:`setup_environment` (process group, mesh, watchdog) -> :meth:`setup` (the module is
    transformed, then optimizers, then the data axis' engine) -> the Trainer's loops -> :meth:`teardown`.

    The strategy's axes, one per kind of parallelism, define what is split and how; a subclass creates them from its
    settings. Axes and helpers share a :class:`~lightning_pardist.axes.base.RunContext` and reference neither the
    strategy nor each other. Further responsibilities are separate objects:

    - ``distributed``: process group, device meshes and watchdog of this rank;
    - ``data_duties``: data-parallel duties besides gradients, which ``data_engine`` handles;
    - ``states`` and ``checkpoints``: state dicts as they are saved, and when and on which ranks they are written and
      read;
    - ``loader_state``: the position in the training data at which a run resumes.

    Args:
        axes: The parallel axes; one of them is a :class:`~lightning_pardist.axes.base.DataParallelAxis`.
        accelerator: Set by the Trainer.
        parallel_devices: Devices of this node. Set by the Trainer.
        cluster_environment: Environment of the launcher that started the ranks. Detected by the Trainer if None.
        checkpoint_io: Plugin that writes checkpoint files. The default writes atomically and verifies files when it
            reads them.
        precision_plugin: Set by the Trainer from ``precision=``.
        process_group_backend: ``"gloo"``, ``"nccl"`` or a per-device string in torch's format. By default gloo on CPU;
            on CUDA, NCCL for device tensors and gloo for host tensors.
        timeout_s: Timeout of a collective, in seconds. If a rank does not join in time, the job ends.
        heartbeat_timeout_s: Seconds without a heartbeat after which a rank is considered dead or unreachable. With the
            default all other ranks have ended 60 seconds after the failure.
        start_method: How ranks are started if no external launcher does: ``"popen"`` runs the script once per rank,
            ``"spawn"`` and ``"fork"`` start workers from this process. By default fork in an interactive session,
            popen elsewhere.
        sync_metrics: Whether values logged for an epoch are reduced over the ranks that have different samples, also
            without ``sync_dist=True``.
        broadcast_buffers: Whether buffers are kept equal to those of the first rank.
        keep_freed_memory: Whether, on CPU, the allocator keeps the memory that a step frees for the next step: steps
            are faster, and memory stays resident at the step's peak.
        checkpoint: Format of checkpoints: ``"full"`` saves Lightning's single file, which loads without this package;
            ``"sharded"`` a folder that all ranks write in parallel. Every strategy loads both, from any strategy and
            number of ranks.
        async_save: Whether training continues while a checkpoint is written.
        activation_checkpointing: Class names of modules that keep only their inputs and recompute their forward in
            backward; ``"auto"`` for the model's repeated blocks. Results do not change, dropout and batch norm
            included.
        compile: What ``torch.compile`` is applied to in ``fit``: ``"blocks"`` compiles the model's repeated blocks, one
            class at a time, ``"step"`` all of ``training_step``; nothing if ``"auto"`` or None. Names in checkpoints
            do not change. Recompilations during training are reported by name.
        compile_backend: Backend of ``torch.compile``: a registered name, or a function of a graph and its inputs.
        resume: Whether ``fit`` resumes from the newest checkpoint of this job: ``"auto"`` if the launcher reports a
            restart (a SLURM requeue, a torchrun restart), ``"always"`` also if the same command is run again with the
            same ``default_root_dir``, ``"never"`` not at all. It takes precedence over ``ckpt_path``, which the first
            start has used.
        loss_weight: How the losses of ranks and micro-batches are weighted in the loss of the batch. ``"auto"`` derives
            weights from each loss' autograd graph: a mean is weighted by its divisor (tokens that are not ignored,
            class weights, samples), each of several means by its own count, and sums are added; the result is logged.
            ``"tokens"`` weights the whole loss by the first count that depends on values of the batch, ``"samples"`` by
            samples; ``"sum"`` adds losses; a function takes the batch (or micro-batch) and returns its weight.
            ``"ranks"`` weights all ranks and micro-batches equally, as Lightning's ``ddp`` does for ranks.
        uneven_inputs: What to do if ranks have different numbers of batches (streams, buckets by length). ``"join"``
            uses all batches: a rank without further batches repeats its last one at weight zero, which adds nothing to
            gradients, logged values and metrics; hooks run for it as well. ``"drop"`` ends the epoch as soon as one of
            the ranks has no further batch.
        check_samples: Whether to check for layers that mix the samples of a batch (for example an expert capacity over
            all of its tokens) if samples are split over ranks or micro-batches: calls of the first step are repeated
            without gradients on different companion samples, and results of the same samples are compared.
        update_scope: What an optimizer's update of an element depends on if tensors are sharded. ``"auto"`` tests each
            optimizer on small tensors. ``"elementwise"``: each rank updates its shards. ``"per_tensor"`` (Muon,
            Adafactor): each full tensor is updated by one rank. ``"joint"`` (LBFGS): all full tensors are updated by
            every rank.
        **unknown: Raise an error; for settings of Lightning's and DeepSpeed's strategies it names the replacement.

    Raises:
        ValueError: If a setting is out of range, or belongs to another strategy.
        TypeError: If a setting is unknown.
    """

    #: Settings that are dicts, with the callable that takes their values as keyword arguments.
    settings_inside: ClassVar[Mapping[str, Callable[..., Any]]] = {}

    def __init__(
        self,
        *,
        axes: Sequence[ParallelAxis],
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout_s: float = 1800.0,
        heartbeat_timeout_s: float = 50.0,
        start_method: StartMethod | None = None,
        sync_metrics: bool = True,
        broadcast_buffers: bool = True,
        keep_freed_memory: bool = True,
        activation_checkpointing: Checkpointing | None = None,
        compile: Compile | None = None,
        compile_backend: Backend = "inductor",
        checkpoint: Form = "full",
        async_save: bool = False,
        resume: Resume = "auto",
        loss_weight: LossWeight = "auto",
        uneven_inputs: UnevenInputs = "join",
        check_samples: bool = True,
        update_scope: ScopeSetting = "auto",
        **unknown: Any,
    ) -> None:
        refuse_unknown(type(self).__name__, unknown, _settings(type(self)), self.settings_inside)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        if activation_checkpointing is not None:
            check_checkpointing(activation_checkpointing)
        one_of("resume", resume, get_args(Resume))
        one_of("uneven_inputs", uneven_inputs, get_args(UnevenInputs))
        self.start_method = choose_start_method(start_method)
        warn_if_untested()
        self.keep_freed_memory = keep_freed_memory
        self.activation_checkpointing = activation_checkpointing
        self.resume: Resume = resume
        self.distributed = DistributedContext(
            process_group_backend=process_group_backend,
            timeout_s=timeout_s,
            heartbeat_timeout_s=heartbeat_timeout_s,
        )
        self.context = RunContext(
            type(self).__name__,
            self.distributed,
            loss_weight=check_loss_weight(loss_weight),
            update_scope=check_scope(update_scope),
            check_samples=check_samples,
        )
        self.compiled = CompiledParts(compile, compile_backend, self.context)
        self._axes_as_set = tuple(sorted(axes, key=lambda axis: axis.order))
        self._user_parallelized = UserParallelizedAxis()
        for axis in (*self._axes_as_set, self._user_parallelized):
            axis.bind(self.context)
        #: Trainer settings from a DeepSpeed configuration.
        self.deepspeed: DeepSpeedConfig | None = None
        self.states = StateDicts(self.context)
        self.kept_optimizers = KeptOptimizers(self.context, self.states)
        self.loader_state = LoaderState(self.context)
        self.checkpoints = Checkpoints(
            self.context, self.states, self.loader_state, io=checkpoint_io, form=checkpoint, async_save=async_save
        )
        self.data_duties = DataParallelDuties(
            self.context,
            broadcast_buffers=broadcast_buffers,
            sync_metrics=sync_metrics,
            uneven_inputs=uneven_inputs,
        )
        self._num_nodes = 1
        self._loads_after_setup: bool | None = None
        self._attached = PatchStack()
        self._isolated_ranks: IsolatedRanks | None = None
        #: Undoes this run's changes of the module and its loaders, latest first.
        self._changes = ExitStack()

    @property
    def dims(self) -> ParallelDims:
        """Degrees of parallelism; available once the number of ranks is known."""
        return self.distributed.dims

    @property
    def axes(self) -> tuple[ParallelAxis, ...]:
        """The axes in use, in the order in which they transform the module."""
        return self.context.axes

    def axis(self, kind: type[A]) -> A | None:
        """Return the strategy's axis of a class, in use or not; None if there is none."""
        return next((axis for axis in self._axes_as_set if isinstance(axis, kind)), None)

    @property
    def kept_on_host(self) -> list[str]:
        """See :attr:`~lightning_pardist.axes.base.ParallelAxis.kept_on_host`."""
        return [kind for axis in self._axes_as_set for kind in axis.kept_on_host]

    @property
    def resident_state_bytes(self) -> int | None:
        """See :attr:`~lightning_pardist.axes.base.ParallelAxis.resident_state_bytes`."""
        found = (axis.resident_state_bytes for axis in self._axes_as_set)
        return next((size for size in found if size is not None), None)

    @property
    def data_engine(self) -> DataEngine | None:
        """Engine that reduces gradients over the gradient mesh; None before the first ``fit``."""
        return self.context.data_engine

    def _choose_axes(self) -> None:
        """Choose the axes in use: the user-parallelized one if ``configure_model`` split the module, else those set."""
        module = self.lightning_module
        taken = module is not None and is_user_parallelized(module)
        axes = (self._user_parallelized,) if taken else self._axes_as_set
        self.context.axes = tuple(axis for axis in axes if axis.is_used(self.dims))

    def adopt_axes(self, other: PardistStrategy) -> None:
        """Adopt another strategy's axes, and its activation checkpointing if none is set here.

        Called before the module is set up. Collective over the world.

        Args:
            other: Strategy that is created for this call only.

        Raises:
            ValueError: If its degrees do not fit the number of ranks.
        """
        self._axes_as_set = other._axes_as_set
        for axis in self._axes_as_set:
            axis.bind(self.context)
        if self.activation_checkpointing is None:
            self.activation_checkpointing = other.activation_checkpointing
        self.distributed.change_dims(self.resolve_dims(self.world_size))
        self._choose_axes()
        self._loads_after_setup = None
        self._show_batch_ranks()

    def _show_batch_ranks(self) -> None:
        if self.lightning_module is not None:
            # A module's configure_model reads it as `self.device_mesh`.
            set_device_mesh(self.lightning_module, self.device_mesh)
            if self.distributed.default_group is not None:
                show_batch_ranks(self.lightning_module.trainer, self.distributed.default_group, self._attached)

    # --- ranks --------------------------------------------------------------------------------------------------

    @property
    def is_distributed(self) -> bool:
        """Whether samplers and metrics are distributed; Lightning reads this attribute of third-party strategies."""
        return True

    @property
    def num_nodes(self) -> int:
        """Number of nodes; set by the Trainer."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Number of ranks on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def num_isolated_ranks(self) -> int:
        """Number of the job's last ranks that do not train."""
        return sum(axis.num_isolated_ranks for axis in self._axes_as_set)

    @property
    def _has_isolated_workers(self) -> bool:
        """Whether each training rank has a separate world of size 1."""
        return any(axis.isolated_workers for axis in self._axes_as_set)

    @property
    def _has_several_ranks(self) -> bool:
        """Whether several ranks train, in one world or in separate ones. Valid after the rendezvous."""
        return self.world_size * self.distributed.worlds > 1

    @property
    @override
    def world_size(self) -> int:
        """Number of ranks that train together."""
        world_size = 1 if self._has_isolated_workers else super().world_size - self.num_isolated_ranks
        world_size_read(world_size)
        return world_size

    @property
    @override
    def root_device(self) -> torch.device:
        devices = self.parallel_devices or []
        if self.local_rank >= len(devices):
            raise ValueError(
                f"This process is local rank {self.local_rank}, but the Trainer has {len(devices)} device(s) a node."
                f" Set Trainer(devices={self.local_rank + 1}) or more, or start fewer processes a node."
            )
        return devices[self.local_rank]

    def set_world_ranks(self) -> None:
        """Set this process' rank in the cluster environment and Lightning's loggers. Called by the Trainer."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def resolve_dims(self, world_size: int) -> ParallelDims:
        """Return the degrees of parallelism for a number of ranks.

        Raises:
            ValueError: If they do not fit the number of ranks, with the values and the fix.
        """
        degrees = {
            axis: size
            for one in self._axes_as_set
            for axis, size in one.degrees(self.num_nodes, self.num_processes).items()
        }
        degrees = experts_beside_context(degrees)
        wants_rest = [axis for axis, size in degrees.items() if size == "auto"]
        if any(axis not in REST_AXES for axis in wants_rest):
            # Another axis is "auto" and takes all remaining ranks, so the data axis gets none.
            degrees = {axis: 1 if axis in REST_AXES and size == "auto" else size for axis, size in degrees.items()}
        return ParallelDims.resolve(world_size, **degrees)

    @override
    def _configure_launcher(self) -> None:
        environment = self.cluster_environment
        if environment is None:
            raise RuntimeError("A launcher needs the strategy's cluster environment; construct the Trainer first.")
        if any(device.type == "mps" for device in self.parallel_devices or ()):
            raise ValueError(
                f"{type(self).__name__} with accelerator='mps': strategies from the DDP family are not supported on the"
                " MPS accelerator, which has one device. Set accelerator='cpu', or leave strategy out."
            )
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        self.distributed.dims = self.resolve_dims(self.world_size)
        self._choose_axes()
        if self.start_method == "popen" or environment.creates_processes_externally:
            self._launcher = ScriptLauncher(
                environment,
                self.distributed,
                global_rank=self.global_rank,
                num_processes=self.num_processes,
                num_nodes=self.num_nodes,
            )
        else:
            self._launcher = MultiProcessLauncher(self, self.distributed, start_method=self.start_method)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Sampler arguments from the batch mesh: ranks of one tensor or pipeline group get the same samples."""
        if self.distributed.is_isolated:
            # Loaders whose length is read on such a rank have the same length as on the workers.
            shares = math.prod(axis.data_share[1] for axis in self.axes)
            return {"num_replicas": self.resolve_dims(self.world_size).batch_size * shares, "rank": 0}
        rank = self.dims.batch_rank(self.global_rank % self.dims.world_size)
        if self._evaluates:
            return {"num_replicas": self.dims.batch_size, "rank": rank}
        for axis in self.axes:
            share, shares = axis.data_share
            rank = rank * shares + share
        return {"num_replicas": self.context.replicas, "rank": rank}

    @property
    def _evaluates(self) -> bool:
        trainer = None if self.lightning_module is None else trainer_of(self.lightning_module)
        return trainer is not None and (trainer.evaluating or trainer.sanity_checking or trainer.predicting)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if self.keep_freed_memory and self.root_device.type == "cpu":
            keep_freed_memory()
        self.set_world_ranks()
        if self.cluster_environment is None:
            raise RuntimeError("The strategy has no cluster environment; construct a Trainer with it first.")
        if self.num_isolated_ranks:
            # Isolated ranks may have had other degrees since the last run.
            self.distributed.dims = self.resolve_dims(self.world_size)
        self.distributed.open(
            self.cluster_environment,
            global_rank=self.global_rank,
            local_rank=self.local_rank,
            device=self.root_device,
            num_isolated=self.num_isolated_ranks,
            worlds=super().world_size - self.num_isolated_ranks if self._has_isolated_workers else 1,
        )
        sync_random_state(self.distributed_sampler_kwargs["rank"], group=self.distributed.start_group)
        self._show_batch_ranks()
        if self.lightning_module is not None:
            trainer = self.lightning_module.trainer
            if self.num_isolated_ranks:
                self._isolated_ranks = IsolatedRanks(trainer, self.context)
                self._attached.attach(self._isolated_ranks)
            if trainer.state.fn == TrainerFn.FITTING:
                environment = self.cluster_environment
                resume = AutoResume(trainer, self.context, self.checkpoints, environment, self.resume)
                self._attached.attach(resume)
                self._attached.attach(PreemptionHandler(trainer, self.context, environment, resume.save))

    @property
    def device_mesh(self) -> DeviceMesh:
        """The job's mesh, with the axes of :data:`lightning_pardist.mesh.AXES` and ``"data_parallel"``.

        Raises:
            RuntimeError: If the process group does not exist yet, that is before ``configure_model``.
        """
        return self.context.mesh

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Restore the position of a resumed training loader, and put back batches taken as samples."""
        # Lightning would seed by the global rank, even if ranks have the same samples.
        seed_workers(dataloader, self.distributed_sampler_kwargs["rank"])
        module = self.lightning_module
        if module is None or trainer_of(module) is None:
            return dataloader
        samples = self.context.sample_batches
        whole = dataloader if samples is None else samples.replay_consumed(dataloader)
        return self.loader_state.prepare(module.trainer, dataloader, whole) if module.trainer.training else whole

    # --- the module ---------------------------------------------------------------------------------------------

    @override
    def connect(self, model: pl.LightningModule) -> None:
        super().connect(model)
        self.context.module = model

    @property
    @override
    def optimizers(self) -> list[Optimizer]:
        found: list[Optimizer] = ParallelStrategy.optimizers.fget(self)  # type: ignore[attr-defined]
        if not found and self.context.trial_optimizers is not None:
            return self.context.trial_optimizers()
        return found

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        ParallelStrategy.optimizers.fset(self, optimizers)  # type: ignore[attr-defined]
        self.context.optimizers = optimizers

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Context in which a module is built; ``empty_init`` uses ``meta`` for axes that materialize it in parts."""
        if not empty_init or not any(axis.creates_values for axis in self.axes) or len(self.context.model_axes) > 1:
            with super().tensor_init_context(empty_init):
                yield
            return
        with torch.device("meta"), self.precision_plugin.tensor_init_context():
            yield

    @override
    @in_step()
    def setup(self, trainer: pl.Trainer) -> None:
        if self.accelerator is None or self.lightning_module is None or self.model is None:
            raise RuntimeError("The strategy is set up by a Trainer's fit, validate, test or predict.")
        module = self.lightning_module
        if self.context.sample_batches is None:
            self.context.sample_batches = SampleBatches(trainer)
        # Cached: setup changes the state that this property is computed from.
        self._loads_after_setup = self.context.loads_after_setup = self.restore_checkpoint_after_setup
        self.context.precision = self.precision_plugin
        data = self.context.data_axis
        if self.deepspeed is not None and trainer.state.fn == TrainerFn.FITTING:
            self.deepspeed.apply(trainer, replicas=self.context.replicas)
        if self._has_several_ranks:
            refuse_lazy(module, type(self).__name__)
        for axis in self.axes:
            axis.check(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            self.compiled.check(trainer)
        self.checkpoints.check(trainer)
        if self.world_size > 1 and any(axis.splits_module or axis.creates_values for axis in self.axes):
            self._attached.attach(LoggedGraphs(trainer, module))
        self.accelerator.setup(trainer)
        shares = self.dims.context_parallel > 1 or any(axis.splits_module for axis in self.axes)
        if shares:
            self._attached.attach(PlainEncoders(module))
        # Also on one device, for the same results as on several.
        shares = shares or any(axis.splits_batch for axis in self._axes_as_set)
        if self.dims.batch_size == 1 and shares and all(axis.data_share[1] == 1 for axis in self.axes):
            self._changes.callback(keep_loaders(trainer))
        self.data_duties.attach_first(trainer)
        if fitting and self._has_several_ranks:
            refuse_ddp_ignored(module, type(self).__name__)
        start = self.distributed.start_group
        if start.size() > 1 and not all(isinstance(axis, DataParallelAxis) for axis in self.axes):
            refuse_sparse_buffers(module, type(self).__name__)
        verify_same_module(module, group=start, constants=describe_sparse_buffers(module))
        if fitting and self.dims.data_parallel * self.dims.tensor_parallel > 1:
            refuse_renormalized(module, type(self).__name__)
        if not fitting:
            self.states.remember_names()
        self.kept_optimizers.note(module)
        if fitting and layer_sync_of(self) is not None:
            self._convert_layers(layer_sync_of(self), self.model)
        data.convert_precision(module)
        for axis in self.axes:
            axis.materialize(trainer, module)
        self.model_to_device()
        if start.size() > 1 and not data.broadcasts and not self.restore_checkpoint_after_setup:
            broadcast_module(module, group=start)
        if data is not self._user_parallelized:
            note_user_parallelized(module)
        mark_held(module)
        if fitting and self._has_several_ranks:
            self._changes.enter_context(noted_floors())
        for axis in self.axes:
            axis.observe(trainer, module)
        for axis in self.context.model_axes:
            axis.transform(trainer, module)
        if fitting:
            # Before activation checkpointing, so that the recomputed forward in backward is compiled as well.
            self._changes.callback(self.compiled.undo)
            self.compiled.compile_blocks(module)
        if fitting and self.activation_checkpointing is not None:
            self._changes.callback(activation_checkpointing.checkpoint_blocks(module, self.activation_checkpointing))
        for axis in self.axes:
            if not axis.splits_module:
                axis.transform(trainer, module)
        if fitting:
            self.setup_optimizers(trainer)
            self.kept_optimizers.adopt(module, self.optimizers)
            self.states.check(self.optimizers)
            for axis in self.axes:
                axis.after_optimizers(trainer, self.optimizers)
        self.setup_precision_plugin()
        if fitting:
            optimizers_to_device(self.optimizers, self.root_device)
            self.context.data_engine = engine = data.make_engine(module, self.optimizers)
            self.states.record_names(module)
            self.kept_optimizers.load()
            self._attached.attach(GradientAccess(self.context, module, engine, lightning_optimizers(self)))
        for axis in self.axes:
            axis.ready(trainer, module)
        if self._has_several_ranks:
            allow_skipped_steps(trainer)
        self.data_duties.attach(trainer)
        if wrapping := [axis for axis in self.axes if axis.wraps_hooks]:
            self._attached.attach(HookCalls(trainer, wrapping))
        if fitting:
            self.compiled.compile_step(module)
            if self.dims.pipeline_parallel > 1 or any(isinstance(each, DTensor) for each in module.parameters()):
                self._changes.callback(forbid_reassignment(module, type(self).__name__))

    @override
    def model_to_device(self) -> None:
        if self.model is not None:
            self.context.data_axis.to_device(self.model)

    def _convert_layers(self, plugin: LayerSync, model: nn.Module) -> None:
        self.model, revert = layer_sync.convert_layers(
            plugin, model, self.context.data_group, self.data_duties.normalized_batch
        )

        def undo() -> None:
            if self.model is not None:
                self.model = revert(self.model)

        self._changes.callback(undo)

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether a checkpoint is loaded after setup: a module on ``meta`` has no storage to load into before it."""
        if self._loads_after_setup is None:
            self._choose_axes()
            return any(axis.loads_after_setup for axis in self.axes)
        return self._loads_after_setup

    # --- steps --------------------------------------------------------------------------------------------------

    def run_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run one of the module's four step functions, wrapped by all axes."""
        with in_step(), ExitStack() as around:
            for axis in self.axes:
                step = partial(axis.run_step, step)
            for axis in reversed(self.axes):
                # The axis that splits tensors first is entered last, so that it handles operators first.
                around.enter_context(axis.running())
            return step(*args, **kwargs)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.lightning_module is not None:
            self.data_duties.before_training_step(self.lightning_module.trainer, self.run_step)
        run = partial(self.run_step, super().training_step, *args, **kwargs)
        output = self.data_duties.training_step(run, next(iter((*args, *kwargs.values())), None))
        return skipped_if_none(output, self.lightning_module) if self._has_several_ranks else output

    @override
    @in_step()
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        module = self.lightning_module
        if module is None or self.data_engine is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        self.pre_backward(closure_loss)
        if not module.automatic_optimization and self.data_duties.loss_weights is not None:
            self.data_duties.loss_weights.before_manual_backward(closure_loss)
        elif self.data_duties.loss_weights is not None:
            self.data_duties.loss_weights.before_backward(accumulates=self.data_engine.has_gradients)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        # Gradients must be complete before post_backward, whose hooks expose them to the user.
        with ExitStack() as around:
            for axis in self.axes:
                around.enter_context(axis.around_backward())
            around.enter_context(self.data_engine.backward(closure_loss, overlap=not is_overridden("backward", module)))
            run = partial(self.precision_plugin.backward, closure_loss, module, optimizer, *args, **kwargs)
            for axis in self.axes:
                run = partial(axis.backward, run)
            run()
        if not module.automatic_optimization and self.data_duties.loss_weights is not None:
            self.data_duties.loss_weights.after_manual_backward()
        else:
            self._weigh_reduced()
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        if not module.automatic_optimization and self.data_engine.is_reduced:
            # The user may clip these gradients manually before the optimizer step.
            self._gradients_reduced()
        self.post_backward(closure_loss)
        return closure_loss

    def _weigh_reduced(self) -> None:
        """Multiply the reduced gradients by a factor of the loss that was not known before backward."""
        weights, engine, module = self.data_duties.loss_weights, self.data_engine, self.lightning_module
        if weights is None or engine is None or module is None:
            return
        if (factor := weights.after_backward()) != 1.0:
            for grad in engine.local_grads(module.parameters()):
                # A number, not a tensor of the gradient's dtype, to which it would be rounded.
                grad.mul_(factor)

    def _gradients_reduced(self) -> None:
        for axis in self.axes:
            axis.gradients_reduced()

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Context without gradient communication: gradients accumulate until the next backward outside of it."""
        if self.data_engine is None:
            yield
            return
        with self.data_engine.no_sync():
            yield

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer | LightningOptimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        plain = plain_optimizer(optimizer)
        completed = partial(self._completed, closure, plain)
        if calls_closure_again(plain) and self.data_duties.loss_weights is not None:
            completed = partial(self._with_loss_of_all, completed)
        self._average_assigned(plain)
        output = super().optimizer_step(optimizer, completed, model, **kwargs)  # type: ignore[arg-type]
        if self.data_engine is not None:
            self.data_engine.step_done()
        for axis in self.axes:
            axis.optimizer_stepped(plain)
        return output

    def _with_loss_of_all(self, closure: Callable[[], Any]) -> Any:
        """Run a closure whose loss the optimizer uses, and return the loss over all ranks, the same on each."""
        result, weights = closure(), self.data_duties.loss_weights
        if weights is None or not (result is None or isinstance(result, Tensor | float)):
            return result
        return weights.combined_loss(None if result is None else torch.as_tensor(result, device=self.root_device))

    def _average_assigned(self, optimizer: Optimizer) -> None:
        if self.data_engine is not None and self.data_duties.average_assigned(self.data_engine, optimizer):
            self._gradients_reduced()

    def _completed(self, closure: Callable[[], Any], optimizer: Optimizer) -> Any:
        """Run a step's closure; if ``training_step`` returned None on this rank, join the gradient reduction."""
        result = closure()
        module, engine = self.lightning_module, self.data_engine
        if engine is None or module is None:
            return result
        if not module.automatic_optimization:
            self._average_assigned(optimizer)
            return result
        late = not engine.is_reduced
        if late:
            if self.data_duties.loss_weights is not None:
                self.data_duties.loss_weights.before_backward(accumulates=engine.has_gradients)
            engine.reduce()
            self._weigh_reduced()
        self._gradients_reduced()
        if late and result is None and engine.has_gradients:
            # With None a gradient scaler would skip this step, unlike on the ranks with a loss.
            return torch.zeros((), device=self.root_device)
        return result

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.data_duties.evaluation_step():
            return self.run_step(super().validation_step, *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.data_duties.evaluation_step():
            return self.run_step(super().test_step, *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.run_step(super().predict_step, *args, **kwargs)

    def _synchronize(self, *, evaluation: bool = False) -> None:
        for axis in self.axes:
            axis.synchronize(evaluation=evaluation)
        self.data_duties.synchronize_buffers()

    def _start_evaluation(self) -> None:
        self.data_duties.start_evaluation()
        for axis in self.axes:
            axis.start_evaluation()

    def _end_evaluation(self) -> None:
        for axis in self.axes:
            axis.end_evaluation()

    @override
    def on_validation_start(self) -> None:
        self._synchronize(evaluation=True)
        self._start_evaluation()

    @override
    def on_test_start(self) -> None:
        self.on_validation_start()

    @override
    def on_predict_start(self) -> None:
        self._start_evaluation()

    @override
    def on_validation_end(self) -> None:
        self._end_evaluation()

    @override
    def on_test_end(self) -> None:
        self._end_evaluation()

    @override
    def on_predict_end(self) -> None:
        self._end_evaluation()

    @override
    def on_train_end(self) -> None:
        self.loader_state.training = False
        for axis in self.axes:
            axis.end_training()
        self._synchronize()

    @override
    def on_train_start(self) -> None:
        self.loader_state.training = True
        if self.lightning_module is not None:
            self.distributed.separate_worlds(self.lightning_module.trainer.num_training_batches)
        for axis in self.axes:
            axis.start_training()
        rank_zero_info(self.describe())

    # --- checkpoints --------------------------------------------------------------------------------------------

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        return self.checkpoints.io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self.checkpoints.io = io

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: PATH, storage_options: Any | None = None) -> None:
        """Write a checkpoint of the Trainer, or begin to under ``async_save``. Collective over the world."""
        if not self.distributed.is_isolated and not self.distributed.is_follower:
            self.checkpoints.save(checkpoint, filepath, storage_options)
        if self._isolated_ranks is not None:
            self._isolated_ranks.saved(self.checkpoints.finish)

    @override
    def remove_checkpoint(self, filepath: PATH) -> None:
        """Remove a checkpoint file or folder on the first rank, after pending writes are complete."""
        self.checkpoints.remove(filepath)

    @override
    def load_checkpoint(self, checkpoint_path: PATH, weights_only: bool | None = None) -> dict[str, Any]:
        """Verify and read a checkpoint file or folder. Collective over the world."""
        checkpoint = self.checkpoints.load(checkpoint_path, weights_only)
        self.states.take(checkpoint)
        self.loader_state.take(checkpoint)
        return checkpoint

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state dict, full at least on the first rank, or sharded if set so. Collective."""
        self.checkpoints.begin()
        for axis in self.axes:
            axis.synchronize()
        return self.states.of_module(super().lightning_module_state_dict())

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self.context.module is None:
            # In the process that launched the ranks, `connect` was not called.
            self.context.module = self.lightning_module
        self.states.load_module(checkpoint["state_dict"], strict=strict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state dict, full at least on the first rank, or sharded if set so. Collective."""
        plain = plain_optimizer(optimizer)
        for axis in self.axes:
            axis.show_state()
        if self.distributed.is_follower:
            # Only the first rank holds the state and saves it.
            return {}
        return self.states.of_optimizer(plain)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        # After a run, the module of the process that launched the ranks has no Trainer.
        if self.lightning_module is not None and trainer_of(self.lightning_module) is not None:
            self.loader_state.settle(self.lightning_module.trainer)
        self.states.load_optimizers(checkpoint["optimizer_states"])
        self.states.load_diverged()

    # --- collectives --------------------------------------------------------------------------------------------

    @override
    def reduce(
        self, tensor: Tensor | Any, group: Any | None = None, reduce_op: dist.ReduceOp | str | None = "mean"
    ) -> Tensor | Any:
        """Reduce a tensor over ``group``, by default the batch mesh; other objects are returned. Collective over it."""
        if not isinstance(tensor, Tensor) or not dist.is_initialized():
            return tensor
        self.context.before_collective()
        return self.data_duties.reduce(tensor, group, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Stack a tensor over ``group``, by default the batch mesh: shape ``[group size, ...]``. Collective over it."""
        if not dist.is_initialized():
            return tensor
        self.context.before_collective()
        return self.data_duties.all_gather(tensor, group, sync_grads)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether ``decision`` is true on all ranks (or any rank). Collective over the world."""
        if not dist.is_initialized():
            return decision
        self.context.before_collective()
        flag = torch.tensor(int(decision), device=table_device(world_group(), self.root_device))
        return bool(reduce(flag, group=world_group(), op="min" if all else "max"))

    @override
    def barrier(self, name: str | None = None) -> None:
        """Wait for every rank of the world, and before training also for ranks in separate worlds."""
        if not dist.is_initialized():
            return
        self.context.before_collective()
        barrier(self.root_device, group=self.distributed.start_group)
        if name == _DATA_IS_THERE and self._isolated_ranks is not None:
            self._isolated_ranks.wait_for_first_rank(name)

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return the object of rank ``src`` on every rank of the world. Collective."""
        if not dist.is_initialized():
            return obj
        self.context.before_collective()
        return broadcast_object(obj, src, group=self.distributed.start_group)

    # --- reporting ----------------------------------------------------------------------------------------------

    def held(self) -> HeldBytes:
        """Return the bytes that this rank currently holds, by kind. Not collective."""
        module = self.lightning_module
        extra = self.data_engine.held_bytes() if self.data_engine is not None else 0
        return held_bytes([] if module is None else [module], self.optimizers, buckets=extra)

    def describe(self) -> str:
        """Return a description of the degrees, axes, compilation and optimizers, for the log."""
        held = self.held()
        lines = [
            f"{type(self).__name__}: {self.dims.describe()}, {held.num_parameters:,} parameters"
            f" ({held.parameters / 1e6:.1f} MB on this rank)"
        ]
        lines += [text for axis in self.axes if (text := axis.describe())]
        if text := self.compiled.describe():
            lines.append(text)
        for optimizer in self.context.optimizers:
            updates, found = updates_of(optimizer), known_scope(optimizer)
            if updates is not None:
                lines.append(updates.describe())
            elif found is not None:
                lines.append(f"{type(optimizer).__name__} {found.describe()}")
        return "\n".join(lines)

    # --- teardown -----------------------------------------------------------------------------------------------

    @override
    def teardown(self) -> None:
        try:
            self.checkpoints.close(well=not self.axes or self.context.data_axis.ended_normally())
        finally:
            self._tear_down()

    def _tear_down(self) -> None:
        self._loads_after_setup = None
        self.loader_state.forget()
        if self.context.sample_batches is not None:
            self.context.sample_batches.detach()
            self.context.sample_batches = None
        self.data_duties.detach()
        self._attached.detach()
        if self._fit_succeeded():
            self.states.end_run()
            self.kept_optimizers.gather()
        self._share_paths()
        for axis in self.axes:
            axis.release()
        for axis in (*(axis for axis in self.axes if not axis.splits_module), *self.context.model_axes):
            axis.teardown()
        self.kept_optimizers.rebind()
        self._changes.close()
        if self.data_engine is not None:
            # Kept: a checkpoint saved after training reads the optimizers' state from it.
            self.data_engine.detach()
        try:
            super().teardown()
        except (AttributeError, RuntimeError):
            # Lightning moves the module to the host, which torch refuses for shards that a failure left in the middle
            # of a step. Then only the original failure is raised.
            if not self.axes or self.context.data_axis.ended_normally():
                raise
        self.distributed.close()

    def _share_paths(self) -> None:
        module = self.lightning_module
        if self._isolated_ranks is not None and module is not None and module.trainer.state.fn == TrainerFn.FITTING:
            well = self.data_engine is not None and self.context.data_axis.ended_normally()
            self._isolated_ranks.share_paths(well=well)

    def _fit_succeeded(self) -> bool:
        module = self.lightning_module
        if module is None or self.data_engine is None or not self.context.data_axis.ended_normally():
            return False
        if self.distributed.is_isolated or self.distributed.is_follower:
            return False
        return module.trainer.state.fn == TrainerFn.FITTING

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Do nothing: names are registered from the table in :mod:`lightning_pardist.registry`, not per class."""


def _settings(strategy: type) -> list[str]:
    """Return the names of all settings of a strategy class."""
    makers = [inspect.signature(base.__init__) for base in strategy.__mro__ if issubclass(base, PardistStrategy)]
    return [name for maker in makers for name in maker.parameters if name not in ("self", "kwargs", "unknown")]


# Lightning checks `isinstance(strategy, DDPStrategy)` for "runs a plain module on several ranks": to allow a compiled
# LightningModule, and to treat the strategy as distributed. Registration satisfies the check without inheriting code.
LightningDDPStrategy.register(PardistStrategy)
