"""What every strategy of this package answers to Lightning, whatever it shards."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar, get_args

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.seed import reset_seed
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_only
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pardist.collectives import barrier, broadcast_object, reduce
from lightning_pardist.engines import activation_checkpointing
from lightning_pardist.engines.activation_checkpointing import Checkpointing
from lightning_pardist.engines.allocator import keep_freed_memory
from lightning_pardist.engines.api import DataEngine
from lightning_pardist.engines.data_parallel.buffers import broadcast_module
from lightning_pardist.engines.memory import HeldBytes, held_bytes
from lightning_pardist.engines.process_group import check_backend, verify_same_module, world_group
from lightning_pardist.mesh import DATA_AXES, DATA_AXIS, ParallelDims
from lightning_pardist.strategies import layer_sync
from lightning_pardist.strategies.attachments import Attachments
from lightning_pardist.strategies.checkpoints import Checkpoints, Form, default_io
from lightning_pardist.strategies.connection import Connection
from lightning_pardist.strategies.continuing import Continuing
from lightning_pardist.strategies.data_axis import DataAxis
from lightning_pardist.strategies.deepspeed_config import DeepSpeedConfig
from lightning_pardist.strategies.gradient_access import GradientAccess
from lightning_pardist.strategies.launchers import (
    MultiProcessLauncher,
    ScriptLauncher,
    StartMethod,
    choose_start_method,
)
from lightning_pardist.strategies.parts import DataPart, Part
from lightning_pardist.strategies.parts.by_hand import SplitByHand, is_split_by_hand, note_own_split
from lightning_pardist.strategies.parts.part import refuse_renormalized
from lightning_pardist.strategies.resuming import Resume, Resuming
from lightning_pardist.strategies.sampling import keep_loaders
from lightning_pardist.strategies.settings import one_of, positive
from lightning_pardist.strategies.skipping import allow_skipped_steps, skipped_if_none
from lightning_pardist.strategies.states import States
from lightning_pardist.strategies.stopping import OrderlyStop

T = TypeVar("T")


class PardistStrategy(ParallelStrategy):
    """Base of all strategies: ranks, groups, samplers, metrics, gradients at the right time, an end for every run.

    A run goes ``Trainer(...)`` -> :meth:`_configure_launcher` (settings are checked, nothing has started) -> the
    launcher starts ranks -> :meth:`setup_environment` (process group, mesh, watchdog) -> :meth:`setup` (the module is
    transformed, then optimizers, then the data axis' engine) -> the Trainer's loops -> :meth:`teardown`.

    What is split, and how, is the business of the strategy's parts, one for each kind of parallelism; the order in
    which they come is here. A subclass makes parts from settings. Whatever else has a job of its own is an object, too:

    - ``connection``: this rank among the others, by process group, mesh and watchdog;
    - ``data_axis``: what ranks with different samples owe each other, and ``data_engine`` what of it is gradients;
    - ``states`` and ``checkpoints``: state dicts as they are saved, and when and by whom they are written and read;
    - ``continuing``: where in its data a run goes on.

    Args:
        data: What serves the data axis.
        tensor: What splits layers inside, if anything does.
        pipeline: What distributes layers over ranks, if anything does.
        accelerator: Set by the Trainer.
        parallel_devices: Set by the Trainer: the devices of this node.
        cluster_environment: Who started the ranks. Found by the Trainer if None.
        checkpoint_io: How checkpoint files are written. By default complete or not at all, and checked when read.
        precision_plugin: Set by the Trainer from ``precision=``.
        process_group_backend: ``"gloo"``, ``"nccl"`` or a per-device string as torch takes it. By default gloo on CPU,
            and on CUDA NCCL for tensors there with gloo for those in host memory.
        timeout_s: Seconds after which a collective that a rank does not join ends the job.
        heartbeat_timeout_s: Seconds of silence after which a rank is given up as dead or cut off. By default so many
            that every other rank has ended 60 seconds after the loss.
        start_method: How ranks are started where nobody else does: ``"popen"`` runs the script once per rank,
            ``"spawn"`` and ``"fork"`` start workers from this process. By default fork in an interactive session,
            popen elsewhere.
        sync_metrics: Whether values logged for an epoch are combined over the ranks that saw different samples, also
            without ``sync_dist=True``.
        broadcast_buffers: Whether buffers follow the first rank's.
        keep_freed_memory: Whether, on CPU, the allocator keeps what a step frees for the next one: steps
            are faster, and memory stays resident at the step's peak.
        checkpoint: ``"full"`` saves Lightning's single file, for programs without this package; ``"sharded"`` a
            folder that all ranks write in parallel. Every strategy loads both, of any strategy and number of ranks.
        async_save: Whether training goes on while a checkpoint is written.
        activation_checkpointing: Names of classes of modules that keep their inputs only, and run their forward again
            in backward; ``"auto"`` for the model's repeated blocks. Results do not change, dropout and batch norm
            included.
        resume: Whether ``fit`` goes on from the newest checkpoint that this job has written: ``"auto"`` where the
            launcher says that it was started before (a SLURM requeue, a torchrun restart), ``"always"`` also where the
            same command is started anew with the same ``default_root_dir``, ``"never"`` not. It comes before
            ``ckpt_path``, which the first start has used.
    """

    def __init__(
        self,
        *,
        data: DataPart,
        tensor: Part | None = None,
        pipeline: Part | None = None,
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
        checkpoint: Form = "full",
        async_save: bool = False,
        resume: Resume = "auto",
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        if heartbeat_timeout_s < 5:
            raise ValueError(f"heartbeat_timeout_s={heartbeat_timeout_s} is too short. Use 5 seconds or more.")
        check_backend(process_group_backend)
        one_of("resume", resume, get_args(Resume))
        self.process_group_backend = process_group_backend
        self.timeout_s = positive("timeout_s", timeout_s, "Use the seconds that a collective may take.")
        self.heartbeat_timeout_s = heartbeat_timeout_s
        self.start_method = choose_start_method(start_method)
        self.sync_metrics = sync_metrics
        self.broadcast_buffers = broadcast_buffers
        self.keep_freed_memory = keep_freed_memory
        self.activation_checkpointing = activation_checkpointing
        self.resume: Resume = resume
        self.data, self.tensor, self.pipeline = self._parts_as_set = data, tensor, pipeline
        self._by_hand = SplitByHand()
        for part in (data, tensor, pipeline, self._by_hand):
            if part is not None:
                part.bind(self)
        #: Settings for the Trainer from a DeepSpeed configuration.
        self.deepspeed: DeepSpeedConfig | None = None
        self.connection = Connection(self)
        self.states = States(self)
        self.checkpoints = Checkpoints(self, form=checkpoint, async_save=async_save)
        self.continuing = Continuing(self)
        self.data_axis = DataAxis(self)
        #: From the first ``fit`` on.
        self.data_engine: DataEngine | None = None
        self.dims = ParallelDims()
        self._num_nodes = 1
        self._loads_after_setup: bool | None = None
        self._attached = Attachments()
        #: Takes back what this run has changed in the module and its loaders, latest first.
        self._changes = ExitStack()

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts that have something to do, in the order in which they transform the module."""
        return (*self.model_axes, self.data)

    @property
    def model_axes(self) -> tuple[Part, ...]:
        """Those of tensor and pipeline part that split over more than one rank."""
        found = ((self.tensor, self.dims.tensor_parallel), (self.pipeline, self.dims.pipeline_parallel))
        return tuple(part for part, size in found if part is not None and size > 1)

    def _choose_parts(self) -> None:
        """A module that ``configure_model`` has split is taken as it is, any other by the parts as they were set."""
        self.data, self.tensor, self.pipeline = self._parts_as_set
        if self.lightning_module is not None and is_split_by_hand(self.lightning_module):
            self.data, self.tensor, self.pipeline = self._by_hand, None, None

    # --- ranks --------------------------------------------------------------------------------------------------

    @property
    def is_distributed(self) -> bool:
        """Lightning asks third-party strategies by this name whether samplers and metrics are to be distributed."""
        return True

    @property
    def num_nodes(self) -> int:
        """Number of hosts; the Trainer sets it."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Ranks on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

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
        """Tell the cluster environment and Lightning's loggers this process' rank. The Trainer calls it."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def resolve_dims(self, world_size: int) -> ParallelDims:
        """The degrees of parallelism for this many ranks.

        Raises:
            ValueError: If they do not fit, with the values and the fix.
        """
        parts = [part for part in self._parts_as_set if part is not None]
        degrees = {axis: size for part in parts for axis, size in part.degrees(self.num_processes).items()}
        if any(degrees.get(axis) == "auto" for axis in ("tensor_parallel", "pipeline_parallel")):
            # The data axis takes what others leave, and these want everything.
            degrees = {axis: 1 if axis in DATA_AXES and size == "auto" else size for axis, size in degrees.items()}
        return ParallelDims.resolve(world_size, **degrees)

    @override
    def _configure_launcher(self) -> None:
        if self.cluster_environment is not None:
            self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        self.dims = self.resolve_dims(self.world_size)
        if self.start_method == "popen" or (
            self.cluster_environment is not None and self.cluster_environment.creates_processes_externally
        ):
            self._launcher = ScriptLauncher(self)
        else:
            self._launcher = MultiProcessLauncher(self, start_method=self.start_method)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Replicas and rank along the data axes only: ranks of one tensor or pipeline group see the same samples."""
        rank = self.dims.coordinates(self.global_rank)[DATA_AXIS]
        return {"num_replicas": self.dims.data_parallel, "rank": rank}

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if self.keep_freed_memory and self.root_device.type == "cpu":
            keep_freed_memory()
        reset_seed()
        self.set_world_ranks()
        self.connection.open()
        if self.lightning_module is not None:
            # What `self.device_mesh` in a module's configure_model refers to.
            self.lightning_module._device_mesh = self.device_mesh
            trainer = self.lightning_module.trainer
            if trainer.state.fn == TrainerFn.FITTING:
                resuming = Resuming(trainer, self, self.resume)
                self._attached.attach(resuming)
                self._attached.attach(OrderlyStop(trainer, self, resuming.save))

    @property
    def device_mesh(self) -> DeviceMesh:
        """The job's mesh, with the axes of :data:`lightning_pardist.mesh.AXES` and ``"data_parallel"``.

        Raises:
            RuntimeError: Before the process group exists, that is before ``configure_model``.
        """
        return self.connection.mesh

    @property
    def data_group(self) -> dist.ProcessGroup:
        """The ranks that hold the same parameters and see different samples, this one among them.

        Raises:
            RuntimeError: Before the process group exists, that is before ``configure_model``.
        """
        return self.connection.data_group

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """A training loader of a resumed run goes on where the run was saved."""
        module = self.lightning_module
        if module is None or module._trainer is None or not module.trainer.training:
            return dataloader
        return self.continuing.prepare(module.trainer, dataloader)

    # --- the module ---------------------------------------------------------------------------------------------

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Where a module is built: if it is to be empty, on ``meta``, for a part that creates its values in pieces."""
        if not empty_init or not any(part.creates_values for part in self.parts) or len(self.model_axes) > 1:
            with super().tensor_init_context(empty_init):
                yield
            return
        with torch.device("meta"), self.precision_plugin.tensor_init_context():
            yield

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if self.accelerator is None or self.lightning_module is None or self.model is None:
            raise RuntimeError("The strategy is set up by a Trainer's fit, validate, test or predict.")
        module = self.lightning_module
        # Setting up changes what the answer is taken from.
        self._loads_after_setup = self.restore_checkpoint_after_setup
        if self.deepspeed is not None and trainer.state.fn == TrainerFn.FITTING:
            self.deepspeed.apply(trainer, replicas=self.dims.data_parallel)
        for part in self.parts:
            part.check(trainer)
        self.checkpoints.check(trainer)
        self.accelerator.setup(trainer)
        if self.dims.data_parallel == 1 and self.model_axes:
            # Tensor ranks draw random numbers of their own: only a seeded sampler shuffles alike on all of them.
            self._changes.callback(keep_loaders(trainer, shuffled=self.dims.tensor_parallel == 1))
        fitting = trainer.state.fn == TrainerFn.FITTING
        verify_same_module(module, group=world_group())
        if fitting and self.dims.data_parallel * self.dims.tensor_parallel > 1:
            refuse_renormalized(module, type(self).__name__)
        if fitting and self._layer_sync is not None:
            self._changes.callback(layer_sync.apply(self._layer_sync, self, self.model))
        self.data.convert_precision(module)
        for part in self.parts:
            part.materialize(trainer, module)
        self.model_to_device()
        if self.world_size > 1 and not self.data.broadcasts and not self.restore_checkpoint_after_setup:
            broadcast_module(module, group=world_group())
        if self.data is not self._by_hand:
            note_own_split(module)
        for part in self.parts:
            part.observe(trainer, module)
        for part in self.model_axes:
            part.transform(trainer, module)
        if fitting and self.activation_checkpointing is not None:
            self._changes.callback(activation_checkpointing.apply(module, self.activation_checkpointing))
        self.data.transform(trainer, module)
        if fitting:
            self.setup_optimizers(trainer)
            self.states.check(self.optimizers)
            for part in self.parts:
                part.after_optimizers(trainer, self.optimizers)
        self.setup_precision_plugin()
        if fitting:
            _optimizers_to_device(self.optimizers, self.root_device)
            self.data_engine = self.data.make_engine(module, self.optimizers)
            self.states.know_names(module)
            self._attached.attach(GradientAccess(self, module, self.data_engine))
        for part in self.parts:
            part.ready(trainer, module)
        if self.world_size > 1:
            allow_skipped_steps(trainer)
        self.data_axis.attach(trainer)

    @override
    def model_to_device(self) -> None:
        if self.model is not None:
            self.data.to_device(self.model)

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        """A module on ``meta`` has no values to load into before it is sharded."""
        if self._loads_after_setup is None:
            self._choose_parts()
            return any(part.loads_after_setup for part in self.parts)
        return self._loads_after_setup

    # --- steps --------------------------------------------------------------------------------------------------

    def run_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run one of the module's four step functions: the data axis outermost, split layers innermost."""
        with ExitStack() as around:
            for part in self.parts:
                step = partial(part.run_step, step)
                around.enter_context(part.running())
            return step(*args, **kwargs)

    def plain(self, tree: Any) -> Any:
        """What a module computed, without the forms in which parts hold tensors: as one process would have it."""
        for part in self.model_axes:
            tree = part.plain(tree)
        return tree

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.data_axis.training_step():
            output = self.run_step(super().training_step, *args, **kwargs)
        return skipped_if_none(output, self.lightning_module) if self.world_size > 1 else output

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        module = self.lightning_module
        if module is None or self.data_engine is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        # Gradients are complete before post_backward, whose hooks show them to the user.
        with self.data_engine.backward(closure_loss, overlap=not is_overridden("backward", module)):
            run = partial(self.precision_plugin.backward, closure_loss, module, optimizer, *args, **kwargs)
            for part in self.parts:
                run = partial(part.backward, run)
            run()
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Backward inside sends nothing; gradients accumulate until the next one outside."""
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
        output = super().optimizer_step(optimizer, partial(self._completed, closure), model, **kwargs)  # type: ignore[arg-type]
        if self.data_engine is not None:
            self.data_engine.step_done()
        return output

    def _completed(self, closure: Callable[[], Any]) -> Any:
        """Run a step's closure; where its ``training_step`` returned None on this rank, join the others' reduction."""
        result = closure()
        module = self.lightning_module
        if (
            self.data_engine is not None
            and module is not None
            and module.automatic_optimization
            and not self.data_engine.is_reduced
        ):
            self.data_engine.reduce()
            if result is None and self.data_engine.has_gradients:
                # None tells a gradient scaler to skip this step, which the ranks with a loss will not.
                return torch.zeros((), device=self.root_device)
        return result

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.run_step(super().validation_step, *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.run_step(super().test_step, *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.run_step(super().predict_step, *args, **kwargs)

    def _start_evaluation(self) -> None:
        for part in self.parts:
            part.start_evaluation()

    def _end_evaluation(self) -> None:
        for part in self.parts:
            part.end_evaluation()

    @override
    def on_validation_start(self) -> None:
        self.data_axis.synchronize_buffers()
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
        self.data_axis.synchronize_buffers()

    @override
    def on_train_start(self) -> None:
        rank_zero_info(self.describe())

    # --- checkpoints --------------------------------------------------------------------------------------------

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        self._checkpoint_io = default_io(self._checkpoint_io)
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        """Write what the Trainer has put together, or begin to under ``async_save``. Collective over the world."""
        self.checkpoints.save(checkpoint, filepath, storage_options)

    @override
    def remove_checkpoint(self, filepath: _PATH) -> None:
        """Remove a file or folder on the first rank, after what was begun before is complete."""
        self.checkpoints.remove(filepath)

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        """Check and read a file or a folder. Collective over the world."""
        checkpoint = self.checkpoints.load(checkpoint_path, weights_only)
        self.continuing.take(checkpoint)
        return checkpoint

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The state dict of one process, whole at least on the first rank; in shards if so set. Collective."""
        self.checkpoints.begin()
        return self.states.of_module(super().lightning_module_state_dict())

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self.states.load_module(checkpoint["state_dict"], strict=strict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """State as one process would have it, whole at least on the first rank; in shards if so set. Collective."""
        plain = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return self.states.of_optimizer(plain)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self.lightning_module is not None:
            self.continuing.settle(self.lightning_module.trainer)
        self.states.load_optimizers(checkpoint["optimizer_states"])

    # --- collectives --------------------------------------------------------------------------------------------

    def before_collective(self) -> None:
        """Called right before a collective that steps and hooks may lead to, on every rank that takes part."""
        for part in self.parts:
            part.before_collective()

    @override
    def reduce(
        self, tensor: Tensor | Any, group: Any | None = None, reduce_op: dist.ReduceOp | str | None = "mean"
    ) -> Tensor | Any:
        """Combine a tensor over ``group``, by default the data axis. Collective over it; anything else comes back."""
        if not isinstance(tensor, Tensor) or not dist.is_initialized():
            return tensor
        self.before_collective()
        return self.data_axis.reduce(tensor, group, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Stack a tensor over ``group``, by default the data axis: shape ``[group size, ...]``. Collective over it."""
        if not dist.is_initialized():
            return tensor
        self.before_collective()
        return self.data_axis.all_gather(tensor, group, sync_grads)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks (or any rank) of the world decide so. Collective over the world."""
        self.before_collective()
        flag = torch.tensor(int(decision), device=self.root_device)
        return bool(reduce(flag, group=world_group(), op="min" if all else "max"))

    @override
    def barrier(self, name: str | None = None) -> None:
        """Wait for every rank of the world."""
        if not dist.is_initialized():
            return
        self.before_collective()
        barrier(self.root_device)

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        """The object of global rank ``src``, on every rank of the world. Collective."""
        if not dist.is_initialized():
            return obj
        self.before_collective()
        return broadcast_object(obj, src)

    # --- for people ---------------------------------------------------------------------------------------------

    def held(self) -> HeldBytes:
        """Bytes that this rank holds at this moment, by kind. Not collective."""
        module = self.lightning_module
        extra = self.data_engine.held_bytes() if self.data_engine is not None else 0
        return held_bytes([] if module is None else [module], self.optimizers, buckets=extra)

    def describe(self) -> str:
        """What is split over what, for the log."""
        held = self.held()
        lines = [
            f"{type(self).__name__}: {self.dims.describe()}, {held.num_parameters:,} parameters"
            f" ({held.parameters / 1e6:.1f} MB on this rank)"
        ]
        lines += [text for part in self.parts if (text := part.describe())]
        return "\n".join(lines)

    # --- the end ------------------------------------------------------------------------------------------------

    @override
    def teardown(self) -> None:
        try:
            self.checkpoints.close(well=self.data.ended_well())
        finally:
            self._take_down()

    def _take_down(self) -> None:
        self._loads_after_setup = None
        self.continuing.forget()
        self.data_axis.detach()
        self._attached.detach()
        for part in self.parts:
            part.release()
        for part in (self.data, *self.model_axes):
            part.teardown()
        self._changes.close()
        if self.data_engine is not None:
            # Kept, since a checkpoint after training asks it for the optimizers' state.
            self.data_engine.detach()
        super().teardown()
        self.connection.close()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Names are registered from the table in :mod:`lightning_pardist.registry`, not class by class."""


# Lightning asks `isinstance(strategy, DDPStrategy)` where it means "runs a plain module on several ranks": to allow a
# compiled LightningModule, and to count the strategy as distributed. We answer yes without inheriting its code.
LightningDDPStrategy.register(PardistStrategy)
