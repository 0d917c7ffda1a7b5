"""What every strategy of this package answers to Lightning, whatever it shards."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.seed import reset_seed
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import TorchSyncBatchNorm
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.apply_func import apply_to_collection
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_only
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pardist.collectives import all_gather, gather_among, reduce, reduce_among
from lightning_pardist.engines import activation_checkpointing, sync_batchnorm
from lightning_pardist.engines.activation_checkpointing import Checkpointing
from lightning_pardist.engines.allocator import keep_freed_memory
from lightning_pardist.engines.api import DataEngine
from lightning_pardist.engines.data_parallel import BufferSync
from lightning_pardist.engines.data_parallel.buffers import broadcast_module
from lightning_pardist.engines.gradient_norm import clip_grad_norm, clip_grad_value
from lightning_pardist.engines.memory import HeldBytes, held_bytes
from lightning_pardist.engines.process_group import destroy_alone, init_process_group, job_store, verify_same_module
from lightning_pardist.engines.watchdog import Watchdog
from lightning_pardist.environments.find import meeting_point
from lightning_pardist.mesh import DATA_AXES, DATA_AXIS, ParallelDims
from lightning_pardist.strategies.checkpoints import Checkpoints, Form, default_io
from lightning_pardist.strategies.continuing import Continuing
from lightning_pardist.strategies.deepspeed_config import DeepSpeedConfig
from lightning_pardist.strategies.evaluation import ExactEvaluation
from lightning_pardist.strategies.gradients import JobWideGradients
from lightning_pardist.strategies.launchers import (
    MultiProcessLauncher,
    ScriptLauncher,
    StartMethod,
    available_start_methods,
    children,
)
from lightning_pardist.strategies.parts import DataPart, Part
from lightning_pardist.strategies.parts.by_hand import SplitByHand, is_split_by_hand, note_own_split
from lightning_pardist.strategies.results import EpochResults
from lightning_pardist.strategies.resuming import RESUME_MODES, Resume, Resuming
from lightning_pardist.strategies.sampling import keep_loaders
from lightning_pardist.strategies.scaling import JobWideScaling
from lightning_pardist.strategies.skipping import allow_skipped_steps, skipped_if_none
from lightning_pardist.strategies.stopping import OrderlyStop

T = TypeVar("T")

#: Runs of a Trainer in this process: equal on all ranks, because they run the same program.
_runs = itertools.count()


class PardistStrategy(ParallelStrategy):
    """Base of all strategies: ranks, groups, samplers, metrics, gradients at the right time, an end for every run.

    A run goes ``Trainer(...)`` -> :meth:`_configure_launcher` (settings are checked, nothing has started) -> the
    launcher starts ranks -> :meth:`setup_environment` (process group, mesh, watchdog) -> :meth:`setup` (the module is
    transformed, then optimizers, then the data axis' engine) -> the Trainer's loops -> :meth:`teardown`.

    What is split, and how, is the business of the strategy's parts, one for each kind of parallelism; the order in
    which they come is here. A subclass makes parts from settings.

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
        if timeout_s <= 0:
            raise ValueError(f"timeout_s={timeout_s} is not positive. Use the seconds that a collective may take.")
        if heartbeat_timeout_s < 5:
            raise ValueError(f"heartbeat_timeout_s={heartbeat_timeout_s} is too short. Use 5 seconds or more.")
        if start_method is None:
            start_method = "fork" if _IS_INTERACTIVE else "popen"
        if start_method not in available_start_methods():
            raise ValueError(
                f"start_method={start_method!r} is not available here."
                f" Use one of {', '.join(available_start_methods())}."
            )
        if resume not in RESUME_MODES:
            raise ValueError(f"resume={resume!r} is unknown. Use one of {', '.join(RESUME_MODES)}.")
        known = dist.Backend.backend_list
        for setting in (process_group_backend or "").split(","):
            backend = setting.rpartition(":")[2].strip().lower()
            if backend and backend not in known:
                raise ValueError(
                    f"process_group_backend={process_group_backend!r} is not a backend that torch knows."
                    f" Use one of {', '.join(name for name in known if name != 'undefined')}, 'cpu:gloo,cuda:nccl', or"
                    " None to choose by device."
                )
        self.process_group_backend = process_group_backend
        self.timeout_s = timeout_s
        self.heartbeat_timeout_s = heartbeat_timeout_s
        self.start_method: StartMethod = start_method
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
        self.checkpoints = Checkpoints(self, form=checkpoint, async_save=async_save)
        self.continuing = Continuing(self)
        self.dims = ParallelDims()
        self._run = 0
        self.watchdog: Watchdog | None = None
        self._num_nodes = 1
        self._owns_group = False
        self._device_mesh: DeviceMesh | None = None
        self._data_group: dist.ProcessGroup | None = None
        self._engine: DataEngine | None = None
        self._buffer_sync: BufferSync | None = None
        self._evaluation: ExactEvaluation | None = None
        self._epoch_results: EpochResults | None = None
        self._user_gradients: JobWideGradients | None = None
        self._scaling: JobWideScaling | None = None
        #: What takes back changes to modules and loops, latest first.
        self._at_end: list[Callable[[], object]] = []
        self._restarts: list[Resuming | OrderlyStop] = []

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts that have something to do, in the order in which they transform the module."""
        return (*self._model_axes, self.data)

    @property
    def _model_axes(self) -> tuple[Part, ...]:
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
        if self.cluster_environment is None:
            raise RuntimeError("The strategy has no cluster environment; construct a Trainer with it first.")
        self._owns_group = not dist.is_initialized()
        init_process_group(
            self.process_group_backend,
            rank=self.global_rank,
            world_size=self.world_size,
            meeting=meeting_point(self.cluster_environment),
            device=self.root_device,
            timeout=timedelta(seconds=self.timeout_s),
        )
        self._run = next(_runs)
        if self.world_size > 1:
            self.watchdog = Watchdog(
                job_store(),
                rank=self.global_rank,
                world_size=self.world_size,
                run=self._run,
                heartbeat_timeout_s=self.heartbeat_timeout_s,
                on_exit=partial(children.end, 0.0),
            )
            self.watchdog.start()
            children.report_to(self.watchdog.blame)
        self._device_mesh, data_mesh = _mesh(self.dims, self.root_device.type)
        self._data_group = data_mesh.get_group()
        if self.lightning_module is not None:
            # What `self.device_mesh` in a module's configure_model refers to.
            self.lightning_module._device_mesh = self._device_mesh
            self._attach_restarts(self.lightning_module.trainer)

    def _attach_restarts(self, trainer: pl.Trainer) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            return
        resuming = Resuming(trainer, self, self.resume)
        self._restarts = [resuming, OrderlyStop(trainer, self, resuming.save)]
        for attached in self._restarts:
            attached.attach()

    def stop_watchdog(self) -> None:
        """This rank's work is done; its silence means nothing from now on. Not collective."""
        if self.watchdog is not None:
            self.watchdog.stop()
            self.watchdog = None

    @property
    def device_mesh(self) -> DeviceMesh:
        """The job's mesh, with the axes of :data:`lightning_pardist.mesh.AXES` and ``"data_parallel"``.

        Raises:
            RuntimeError: Before the process group exists, that is before ``configure_model``.
        """
        if self._device_mesh is None:
            raise RuntimeError("The device mesh exists once ranks are connected: use it in configure_model or later.")
        return self._device_mesh

    @property
    def data_group(self) -> dist.ProcessGroup:
        """The ranks that hold the same parameters and see different samples, this one among them."""
        if self._data_group is None:
            raise RuntimeError("Process groups exist once ranks are connected: use them in configure_model or later.")
        return self._data_group

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """A training loader of a resumed run goes on where the run was saved."""
        module = self.lightning_module
        if module is None or module._trainer is None or not module.trainer.training:
            return dataloader
        return self.continuing.prepare(module.trainer, dataloader)

    # --- the module ---------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if self.accelerator is None or self.lightning_module is None or self.model is None:
            raise RuntimeError("The strategy is set up by a Trainer's fit, validate, test or predict.")
        module = self.lightning_module
        self._choose_parts()
        if self.deepspeed is not None and trainer.state.fn == TrainerFn.FITTING:
            self.deepspeed.apply(trainer, replicas=self.dims.data_parallel)
        for part in self.parts:
            part.check(trainer)
        self.checkpoints.check(trainer)
        self.accelerator.setup(trainer)
        if self.dims.data_parallel == 1 and self._model_axes:
            # Tensor ranks draw random numbers of their own: only a seeded sampler shuffles alike on all of them.
            self._at_end.append(keep_loaders(trainer, shuffled=self.dims.tensor_parallel == 1))
        fitting = trainer.state.fn == TrainerFn.FITTING
        verify_same_module(module, group=_world())
        if fitting and self._layer_sync is not None:
            self._apply_layer_sync()
        self.data.convert_precision(module)
        for part in self.parts:
            part.materialize(trainer, module)
        self.model_to_device()
        if self.world_size > 1 and not self.data.broadcasts and not self.restore_checkpoint_after_setup:
            broadcast_module(module, group=_world())
        if self.data is not self._by_hand:
            note_own_split(module)
        for part in self.parts:
            part.observe(trainer, module)
        for part in self._model_axes:
            part.transform(trainer, module)
        if fitting and self.activation_checkpointing is not None:
            self._at_end.append(activation_checkpointing.apply(module, self.activation_checkpointing))
        self.data.transform(trainer, module)
        if fitting:
            self.setup_optimizers(trainer)
            for part in self.parts:
                part.after_optimizers(trainer, self.optimizers)
        self.setup_precision_plugin()
        if fitting:
            _optimizers_to_device(self.optimizers, self.root_device)
            self._engine = self.data.make_engine(module, self.optimizers)
            self.checkpoints.know_names(module)
            self.precision_plugin.__dict__.update(self._clipping())
            # No bound method: a deep copy of the module, as averages of weights need, would take the strategy along.
            module.__dict__["zero_grad"] = lambda set_to_none=True: self._zero_grad(set_to_none)
            self._user_gradients = JobWideGradients(module, self._engine, self._model_axes)
            self._user_gradients.attach()
            scaler = getattr(self.precision_plugin, "scaler", None)
            if scaler is not None:
                self._scaling = JobWideScaling(
                    scaler, self._engine, group=_world(), device=self.root_device, before=self.before_collective
                )
                self._scaling.attach()
            for wrapped in self._lightning_optimizers:
                # It took over what the optimizer had before the engine came.
                if "zero_grad" in wrapped._optimizer.__dict__:
                    wrapped.__dict__["zero_grad"] = wrapped._optimizer.zero_grad
        self._attach_to(trainer)

    def _apply_layer_sync(self) -> None:
        if self.model is None or self._layer_sync is None:
            return
        if isinstance(self._layer_sync, TorchSyncBatchNorm):
            # torch's own layer refuses CPU tensors and knows only the whole world.
            sync_batchnorm.convert(self.model, group=self.data_group)
        else:
            self.model = self._layer_sync.apply(self.model)

    def _revert_layer_sync(self) -> None:
        if self.model is None or self._layer_sync is None:
            return
        if isinstance(self._layer_sync, TorchSyncBatchNorm):
            sync_batchnorm.revert(self.model)
        elif self._engine is not None:
            self.model = self._layer_sync.revert(self.model)

    @override
    def model_to_device(self) -> None:
        if self.model is not None:
            self.data.to_device(self.model)

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        """A module on ``meta`` has no values to load into before it is sharded."""
        self._choose_parts()
        return any(part.loads_after_setup for part in self.parts)

    def _attach_to(self, trainer: pl.Trainer) -> None:
        if self.world_size > 1:
            allow_skipped_steps(trainer)
        if self.dims.data_parallel == 1 or self.lightning_module is None:
            return
        if trainer.predicting:
            loop = trainer.predict_loop
            loop.run = partial(self._predict, loop, loop.run)  # type: ignore[method-assign]
            self._at_end.append(partial(loop.__dict__.pop, "run", None))
        if self.broadcast_buffers:
            self._buffer_sync = BufferSync(self.lightning_module, group=self.data_group)
        self._evaluation = ExactEvaluation(trainer, group=self.data_group)
        self._evaluation.attach()
        if self.sync_metrics:
            self._epoch_results = EpochResults(trainer, group=self.data_group, before=self.before_collective)
            self._epoch_results.attach()

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
        for part in self._model_axes:
            tree = part.plain(tree)
        return tree

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._buffer_sync is not None:
            self._buffer_sync.before_training_step()
        output = self.run_step(super().training_step, *args, **kwargs)
        if self._buffer_sync is not None:
            self.before_collective()
            self._buffer_sync.after_training_step()
        return skipped_if_none(output, self.lightning_module) if self.world_size > 1 else output

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        module = self.lightning_module
        if module is None or self._engine is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        # Gradients are complete before post_backward, whose hooks show them to the user.
        with self._engine.backward(closure_loss, overlap=not is_overridden("backward", module)):
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
        if self._engine is None:
            yield
            return
        with self._engine.no_sync():
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
        if self._engine is not None:
            self._engine.step_done()
        return output

    def _completed(self, closure: Callable[[], Any]) -> Any:
        """Run a step's closure; where its ``training_step`` returned None on this rank, join the others' reduction."""
        result = closure()
        module = self.lightning_module
        if (
            self._engine is not None
            and module is not None
            and module.automatic_optimization
            and not self._engine.is_reduced
        ):
            self._engine.reduce()
            if result is None and self._engine.has_gradients:
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

    def _predict(self, loop: Any, run: Callable[[], T]) -> T:
        """A rank without samples leaves at once, without the hooks; others may still need what it holds."""
        predictions = run()
        if loop.skip:
            self._start_evaluation()
            self._end_evaluation()
        return predictions

    @override
    def on_validation_start(self) -> None:
        if self._buffer_sync is not None:
            self._buffer_sync.synchronize()
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
        if self._buffer_sync is not None:
            self._buffer_sync.synchronize()

    @override
    def on_train_start(self) -> None:
        rank_zero_info(self.describe())

    # --- gradients ----------------------------------------------------------------------------------------------

    def _clipping(self) -> dict[str, Callable[[Optimizer, int | float], None]]:
        """What stands in for methods of the precision plugin, which sees only what this rank's optimizer holds."""
        return {"clip_grad_by_norm": self._clip_grad_by_norm, "clip_grad_by_value": self._clip_grad_by_value}

    def _clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        if self._engine is not None:
            clip_grad_norm(self._engine, _params(optimizer), float(clip_val), axes=self._model_axes)

    def _clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        if self._engine is not None:
            clip_grad_value(self._engine, _params(optimizer), float(clip_val))

    def _zero_grad(self, set_to_none: bool = True) -> None:
        """Stands in for the module's ``zero_grad``, which does not know of gradients that the engine keeps."""
        if self.lightning_module is not None:
            nn.Module.zero_grad(self.lightning_module, set_to_none)
        if self._engine is not None:
            self._engine.zero_grad()

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
        state = super().lightning_module_state_dict()
        if not self._model_axes:
            return state if self.checkpoints.sharded else self.data.whole_module_state(state)
        own = state
        for part in self._model_axes:
            own = part.own_module_state(own)
        return own if self.checkpoints.sharded else self.checkpoints.whole_module_state(own, like=state)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self.lightning_module is None:
            raise RuntimeError("A checkpoint is loaded into a module: call a Trainer's fit, validate, test or predict.")
        state: Mapping[str, Any] = checkpoint["state_dict"]
        if self.checkpoints.fill_module(state, strict=strict):
            return
        for part in (*reversed(self._model_axes), self.data):
            state = part.local_module_state(state)
        self.data.load_module_state(self.lightning_module, state, strict=strict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """State as one process would have it, whole at least on the first rank; in shards if so set. Collective."""
        optimizer = _plain(optimizer)
        if self.checkpoints.sharded:
            return self.checkpoints.optimizer_state(optimizer)
        if self._model_axes:
            return self.checkpoints.whole_optimizer_state(optimizer)
        return super().optimizer_state(optimizer) if self._engine is None else self._engine.optimizer_state(optimizer)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self.lightning_module is not None:
            self.continuing.settle(self.lightning_module.trainer)
        states = checkpoint["optimizer_states"]
        if len(states) != len(self.optimizers):
            raise ValueError(
                f"The checkpoint holds {len(states)} optimizer(s), configure_optimizers made {len(self.optimizers)}."
                " Configure as many as when it was saved."
            )
        for index, (optimizer, state) in enumerate(zip(self.optimizers, states, strict=True)):
            if not self.checkpoints.fill_optimizer(index, optimizer, state):
                for part in reversed(self._model_axes):
                    state = part.local_optimizer_state(optimizer, state)
                # What torch takes as it is would keep a mapped file, and change with whoever writes to it.
                state = apply_to_collection(state, Tensor, torch.clone)
                if self._engine is None:
                    optimizer.load_state_dict(state)
                    _optimizers_to_device([optimizer], self.root_device)
                else:
                    self._engine.load_optimizer_state(optimizer, state)

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
        if (present := self._present_of(group)) is not None:
            return reduce_among(tensor, group=self.data_group, ranks=present, op=reduce_op)
        return reduce(tensor, group=self.data_group if group is None else group, op=reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Stack a tensor over ``group``, by default the data axis: shape ``[group size, ...]``. Collective over it."""
        if not dist.is_initialized():
            return tensor
        self.before_collective()
        if (present := self._present_of(group)) is not None:
            return gather_among(tensor, group=self.data_group, ranks=present)
        # LightningModule.all_gather names the world where it means the default.
        if group is None or group is dist.group.WORLD:
            group = self.data_group
        return all_gather(tensor, group=group, sync_grads=sync_grads)

    def _present_of(self, group: Any | None) -> list[int] | None:
        """In an evaluation step that not all ranks have a batch for: those that have. None anywhere else."""
        if self._evaluation is None or (group is not None and group is not dist.group.WORLD):
            return None
        return self._evaluation.present

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks (or any rank) of the world decide so. Collective over the world."""
        self.before_collective()
        flag = torch.tensor(int(decision), device=self.root_device)
        return bool(reduce(flag, group=_world(), op="min" if all else "max"))

    @override
    def barrier(self, name: str | None = None) -> None:
        """Wait for every rank of the world."""
        if not dist.is_initialized():
            return
        self.before_collective()
        if "nccl" in dist.get_backend():
            dist.barrier(device_ids=[self.root_device.index])
        else:
            dist.barrier()

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        """The object of global rank ``src``, on every rank of the world. Collective."""
        if not dist.is_initialized():
            return obj
        self.before_collective()
        objects: list[T] = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    # --- for people ---------------------------------------------------------------------------------------------

    def held(self) -> HeldBytes:
        """Bytes that this rank holds at this moment, by kind. Not collective."""
        module = self.lightning_module
        extra = self._engine.held_bytes() if self._engine is not None else 0
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
        self.continuing.forget()
        for attached in (self._evaluation, self._epoch_results, self._user_gradients, self._scaling):
            if attached is not None:
                attached.detach()
        self._evaluation = self._epoch_results = self._buffer_sync = None
        self._user_gradients = self._scaling = None
        while self._restarts:
            self._restarts.pop().detach()
        for part in (self.data, *self._model_axes):
            part.teardown()
        while self._at_end:
            self._at_end.pop()()
        self._revert_layer_sync()
        if self._engine is not None:
            # Kept, since a checkpoint after training asks it for the optimizers' state.
            self._engine.detach()
            for name in self._clipping():
                self.precision_plugin.__dict__.pop(name, None)
            if self.lightning_module is not None:
                self.lightning_module.__dict__.pop("zero_grad", None)
        super().teardown()
        self.stop_watchdog()
        if self._owns_group:
            destroy_alone()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Names are registered from the table in :mod:`lightning_pardist.registry`, not class by class."""


def _params(optimizer: Optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _plain(optimizer: Optimizer | LightningOptimizer) -> Optimizer:
    return optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


#: Meshes over the default process group of this moment.
_meshes: dict[tuple[ParallelDims, str], tuple[DeviceMesh, DeviceMesh]] = {}
_meshes_world: dist.ProcessGroup | None = None


def _mesh(dims: ParallelDims, device_type: str) -> tuple[DeviceMesh, DeviceMesh]:
    """A mesh for every run with these degrees: each new one would leave process groups and their threads behind."""
    global _meshes_world
    if _meshes_world is not _world():
        _meshes.clear()
        _meshes_world = _world()
    if (dims, device_type) not in _meshes:
        _meshes[dims, device_type] = dims.build(device_type)
    return _meshes[dims, device_type]


def _world() -> dist.ProcessGroup:
    return dist.distributed_c10d._get_default_group()


# Lightning asks `isinstance(strategy, DDPStrategy)` where it means "runs a plain module on several ranks": to allow a
# compiled LightningModule, and to count the strategy as distributed. We answer yes without inheriting its code.
LightningDDPStrategy.register(PardistStrategy)
