"""ZeRO-3, FSDP and HSDP axis: sharded parameters, gradients and optimizer state."""

from __future__ import annotations

import itertools
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.plugins.precision import HalfPrecision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.optim import Optimizer
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors
from typing_extensions import override

from lightning_pardist.axes.base import DataParallelAxis
from lightning_pardist.axes.compression_setting import CompressionSetting
from lightning_pardist.axes.module_copies import copies_of
from lightning_pardist.axes.offload_setting import OffloadSetting
from lightning_pardist.axes.refusals import refuse_averages_in_shards, refuse_callbacks, refuse_pruning
from lightning_pardist.axes.routed_lists import find_callers
from lightning_pardist.compat import pytree
from lightning_pardist.compat.lightning_functions import half_dtype, move_torchmetrics_to_device, update_device
from lightning_pardist.compat.modules import own_buffers
from lightning_pardist.engines.common.block_quantization import Compression
from lightning_pardist.engines.common.meta_init import InitFunction, on_meta
from lightning_pardist.engines.common.quantized_exchange import ErrorFeedback
from lightning_pardist.engines.data_engine import DataEngine
from lightning_pardist.engines.ddp.set_parameters import differing_values
from lightning_pardist.engines.ddp.sparse import sparse_parameters
from lightning_pardist.engines.fsdp import FullySharded, ShardedDataEngine, find_fsdp_units, shard
from lightning_pardist.engines.fsdp.comm import UnitCompression
from lightning_pardist.engines.fsdp.fsdp_units import MIN_UNIT_BYTES, UnitPolicy
from lightning_pardist.engines.fsdp.full_state import full_state, gather_to, load_full_state
from lightning_pardist.engines.fsdp.fully_sharded import Accumulate
from lightning_pardist.engines.fsdp.shard import Reshard
from lightning_pardist.engines.fsdp.tiling import find_tiled, weights
from lightning_pardist.engines.pipeline.placement import replace_in
from lightning_pardist.mesh import SHARD_AXES, Degree
from lightning_pardist.settings import one_of, positive

_MIB = 2**20


class FSDPAxis(DataParallelAxis):
    """Shards every parameter over the data axis and all-gathers the module's units while they run.

    The arguments are those of :class:`~lightning_pardist.FSDPStrategy`.

    Raises:
        ValueError: If a setting is out of range; during a run, if an optimizer's trial step fails, or a callback needs
            full parameters.
    """

    name = "fsdp"
    calls_communicate = True
    creates_values = True
    wraps_hooks = True

    def __init__(
        self,
        *,
        units: UnitPolicy | None = None,
        min_unit_size_mb: float = MIN_UNIT_BYTES / _MIB,
        reshard_after_forward: Reshard = "auto",
        data_shard_size: int | Literal["auto", "node"] = "auto",
        accumulate: Accumulate = "sharded",
        mp_policy: MixedPrecisionPolicy | None = None,
        allow_divergent_forward: bool = False,
        detect_direct_param_use: Literal["first", "always", "never"] = "first",
        init: InitFunction | None = None,
        unshard_after_fit_max_mb: float = 1024.0,
        offload: str | os.PathLike[str] | None = None,
        offload_window_mb: float = 64.0,
        tile_linear_above_mb: float | None = None,
        gather: Compression | None = None,
        reduce: Compression | None = None,
        error_feedback: bool | None = None,
    ) -> None:
        one_of("accumulate", accumulate, ("sharded", "unsharded"))
        one_of("detect_direct_param_use", detect_direct_param_use, ("first", "always", "never"))
        if not isinstance(data_shard_size, int):
            one_of("data_shard_size", data_shard_size, ("auto", "node"), or_else="a number of ranks")
        if isinstance(reshard_after_forward, str):
            one_of("reshard_after_forward", reshard_after_forward, ("auto", True, False))
        if min_unit_size_mb < 0:
            raise ValueError(f"min_unit_size_mb={min_unit_size_mb} is negative. Use 0 for units of any size.")
        if tile_linear_above_mb is not None:
            positive("tile_linear_above_mb", tile_linear_above_mb, "None runs every layer whole.")
        self.tile_linear_above_mb = tile_linear_above_mb
        self.units = units
        self.min_unit_size_mb = min_unit_size_mb
        self.reshard_after_forward: Reshard = reshard_after_forward
        self.data_shard_size: int | Literal["auto", "node"] = data_shard_size
        self.accumulate: Accumulate = accumulate
        self.mp_policy = mp_policy
        self.allow_divergent_forward = allow_divergent_forward
        self.detect_direct_param_use: Literal["first", "always", "never"] = detect_direct_param_use
        self.init = init
        self.unshard_after_fit_max_mb = unshard_after_fit_max_mb
        self.offload = OffloadSetting(offload, offload_window_mb)
        self.compression = CompressionSetting(gather, reduce, error_feedback)
        if tile_linear_above_mb is not None and (gather or reduce):
            raise ValueError(
                f"gather={gather!r} and reduce={reduce!r} do not support layers in tiles, which are sent"
                f" uncompressed, and tile_linear_above_mb={tile_linear_above_mb} is set. Leave one of them out."
            )
        self._sharded: FullySharded | None = None
        self._copies: list[FullySharded] = []
        self._evaluating = ExitStack()
        self._metrics: list[Metric] = []
        #: Names of modules whose listed experts are gathered together with them, so that all ranks gather in one order.
        self._callers: list[str] = []

    @property
    @override
    def host_work(self) -> float:
        return 340.0

    @override
    def degrees(self, num_nodes: int, ranks_per_node: int) -> dict[str, Degree]:
        if self.data_shard_size == "auto":
            return {"data_shard": "auto"}
        shards = ranks_per_node if self.data_shard_size == "node" else self.data_shard_size
        return {"data_replicate": "auto", "data_shard": shards}

    @property
    @override
    def kept_on_host(self) -> Sequence[str]:
        return () if self.offload.offload is None else ("parameters", "gradients", "optimizer")

    @property
    @override
    def resident_state_bytes(self) -> int | None:
        return self.offload.resident_bytes

    @override
    def check(self, trainer: pl.Trainer) -> None:
        self.offload.check(trainer, is_plan=self.context.is_plan)
        self.compression.check(self.context)
        refuse_pruning(trainer)
        refuse_averages_in_shards(trainer, self.context)
        if on_meta(trainer.lightning_module):
            refuse_callbacks(
                trainer,
                WeightAveraging,
                "copies a module that was built on the meta device, and has no values yet. Build it with values, or"
                " leave the callback out.",
            )

    # --- the module ---------------------------------------------------------------------------------------------

    @property
    @override
    def broadcasts(self) -> bool:
        return not self._has_unsharded_trial

    @property
    @override
    def steps_on_shards(self) -> bool:
        return True

    @override
    def convert_precision(self, module: pl.LightningModule) -> None:
        plugin = self.context.precision
        if not isinstance(plugin, HalfPrecision) or self._has_unsharded_trial:
            super().convert_precision(module)
            return
        # The optimizer updates fp32 shards; gathered parameters are in half precision.
        module.to(torch.float32)
        for child in module.modules():
            for name, buffer in own_buffers(child).items():
                if buffer is not None and buffer.is_floating_point():
                    own_buffers(child)[name] = buffer.to(half_dtype(plugin))

    @override
    def to_device(self, module: nn.Module) -> None:
        """Move the module only if it runs before it is sharded; else units move one by one when they are sharded."""
        if self._has_unsharded_trial:
            super().to_device(module)

    @property
    def _has_unsharded_trial(self) -> bool:
        """Whether the unsharded module is run for trial before sharding, with the first rank's values."""
        return self.context.dims.pipeline_parallel * self.context.expert_ranks > 1

    @property
    def _pipelined(self) -> bool:
        return self.context.dims.pipeline_parallel > 1

    @override
    def observe(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        training = self._pipelined and trainer.state.fn == TrainerFn.FITTING
        self._callers = find_callers(self.context, trainer, module) if training else []

    @property
    @override
    def unsplittable_modules(self) -> Sequence[str]:
        return self._callers

    @property
    @override
    def closed(self) -> Sequence[nn.Module]:
        module = self.context.module
        return [] if module is None else [module.get_submodule(name) for name in self._callers]

    @override
    def transform(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if not self._pipelined or trainer.state.fn != TrainerFn.FITTING:
            self._transform(trainer, module)

    @override
    def after_optimizers(self, trainer: pl.Trainer, optimizers: Sequence[Optimizer]) -> None:
        """Shard this rank's pipeline stage: its placement needs optimizers created from the full module."""
        if not self._pipelined:
            return
        module = trainer.lightning_module
        before = dict(module.named_parameters())
        self._transform(trainer, module)
        sharded = dict(module.named_parameters())
        replace_in(optimizers, {param: sharded[name] for name, param in before.items()})

    def _transform(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        copies = copies_of(module, trainer.callbacks)  # type: ignore[attr-defined]
        if self._sharded is not None and self._sharded.module is module:
            # Still sharded from the previous run.
            self._sharded.reset()
            self._sharded.sequencer.active = self.allow_divergent_forward
        else:
            sparse = dict.fromkeys(sparse_parameters(module))
            names = [name for name, param in module.named_parameters() if param in sparse and param.requires_grad]
            self._sharded = self._shard(module)
            if names and trainer.state.fn == TrainerFn.FITTING:
                rank_zero_info(
                    f"{type(trainer.strategy).__name__} sends slices of gradients, and sparse gradients have no"
                    f" slices: those of {', '.join(names)} (sparse=True) are made dense, with the same values."
                )
        before = {sharded.module: sharded for sharded in self._copies}
        for sharded in before.values():
            sharded.reset()
        self._copies = [before.get(copied) or self._shard(copied, is_copy=True) for copied in copies]
        self._sharded.on_differing_writes(lambda names: rank_zero_warn(differing_values(names)))
        device = self.context.device
        move_torchmetrics_to_device(module, device)
        update_device(module, device=device)
        self._sync_before_metrics(module)

    def _sync_before_metrics(self, module: nn.Module) -> None:
        """Synchronize units before metrics gather their states: other ranks may still need this rank's shards."""
        for metric in module.modules():
            if isinstance(metric, Metric) and metric.dist_sync_fn is None:
                metric.dist_sync_fn = self._gather_metric
                self._metrics.append(metric)

    def _gather_metric(self, value: Tensor, group: Any | None = None) -> list[Tensor]:
        self.before_collective()
        gathered: list[Tensor] = gather_all_tensors(value, group)
        return gathered

    @property
    def _shards_stay_on_host(self) -> bool:
        return self.offload.settings is not None and self.context.device.type != "cpu"

    def _shard(self, module: nn.Module, *, is_copy: bool = False) -> FullySharded:
        plugin = self.context.precision
        policy = self.mp_policy
        if policy is None and isinstance(plugin, HalfPrecision) and not self._has_unsharded_trial:
            policy = MixedPrecisionPolicy(param_dtype=half_dtype(plugin), reduce_dtype=torch.float32)
        tile_bytes = None if self.tile_linear_above_mb is None else self.tile_linear_above_mb * _MIB
        tiled = {} if tile_bytes is None else find_tiled(module, tile_bytes)
        # Parameters that other ranks hold, and those that another axis shards itself.
        elsewhere = {param for param in module.parameters() if param.is_meta} if self._has_unsharded_trial else set()
        elsewhere |= set(self.context.narrower_groups(module))
        boundaries = self.context.boundaries
        if is_copy and boundaries is not None:
            # The pipeline does not run copies.
            boundaries = []
        units = find_fsdp_units(
            module,
            policy=self.units,
            min_unit_bytes=int(self.min_unit_size_mb * _MIB),
            ignored={*weights(tiled.values()), *elsewhere},
            boundaries=None if boundaries is None else [*itertools.chain(*boundaries)],
            closed=self.context.closed,
        )
        return shard(
            module,
            self.context.distributed.meshes.shard,
            units=units,
            tile_above_bytes=tile_bytes,
            reshard_after_forward=self.reshard_after_forward,
            mp_policy=policy,
            offload_policy=CPUOffloadPolicy() if self._shards_stay_on_host else None,
            init=self.init,
            ignored=elsewhere,
            boundaries=boundaries,
            sync_values=is_copy or self.broadcasts,
            allow_divergent_forward=self.allow_divergent_forward,
            detect_direct_param_use=self.detect_direct_param_use,
            compression=UnitCompression(
                self.compression.gather,
                self.compression.reduce,
                ErrorFeedback() if self.compression.error_feedback else None,
                exact=is_copy,
            ),
        )

    @override
    def make_engine(self, module: nn.Module, optimizers: list[Optimizer]) -> DataEngine:
        self.compression.check_copies(self.context)
        for name in ("toggle_optimizer", "untoggle_optimizer"):
            module.__dict__[name] = self._with_requires_grad_sync(getattr(module, name))
        return ShardedDataEngine(
            self.sharded,
            optimizers,
            accumulate=self.accumulate,
            offload=self.offload.settings,
            update_group=lambda scope: self.context.update_group(scope, *SHARD_AXES),
            update_scope=self.context.update_scope,
            group=self.context.gradient_group,
            narrower=self.context.narrower_groups(module),
        )

    @property
    def sharded(self) -> FullySharded:
        """The handle of the sharded module.

        Raises:
            RuntimeError: Before ``setup``, and after the module was unsharded.
        """
        if self._sharded is None:
            raise RuntimeError("The module is sharded during fit, validate, test and predict only.")
        return self._sharded

    @property
    def _all_sharded(self) -> list[FullySharded]:
        """The sharded module, and the sharded copies of it that callbacks hold."""
        return self._copies if self._sharded is None else [self._sharded, *self._copies]

    def _with_requires_grad_sync(self, toggle: Callable[[Optimizer], None]) -> Callable[[Optimizer], None]:
        """Wrap ``toggle``: copy ``requires_grad``, which it sets on the optimizers' shards, to gathered parameters."""

        def followed(optimizer: Optimizer) -> None:
            toggle(optimizer)
            self.sharded.follow_requires_grad()

        return followed

    # --- steps --------------------------------------------------------------------------------------------------

    @override
    def run_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = self.sharded.run(step, *args, **kwargs)
        module = self.context.module
        if module is not None and not module.automatic_optimization:
            self.sharded.reshard_all()
        return result

    @override
    @contextmanager
    def around_hook(self) -> Iterator[None]:
        with ExitStack() as stack:
            for sharded in self._all_sharded:
                stack.enter_context(sharded.in_hook())
            yield

    @override
    def around_gradient_hook(self) -> AbstractContextManager[Any]:
        # Plain tensors (masks, noise) have the same elements on all ranks.
        return implicit_replication()

    @override
    def before_collective(self) -> None:
        for sharded in self._all_sharded:
            sharded.join_until_all()

    @override
    def sync_set_parameters(self) -> list[str]:
        return self.sharded.settle_written()

    @override
    def start_evaluation(self) -> None:
        for sharded in self._all_sharded:
            sharded.compression.exact = True
        # Ranks may have different numbers of batches, and one rank may run the module alone at the end of the epoch.
        for sharded in self._all_sharded:
            self._evaluating.enter_context(sharded.uneven())

    @override
    def end_evaluation(self) -> None:
        self._evaluating.close()
        if self._sharded is not None:
            self._sharded.compression.exact = False

    @override
    def synchronize(self, *, evaluation: bool = False) -> None:
        """Clear the gradients' compression error, which checkpoints do not keep; not before evaluation."""
        if self._sharded is not None and self._sharded.compression.error_feedback is not None and not evaluation:
            self._sharded.compression.error_feedback.clear()

    # --- checkpoints --------------------------------------------------------------------------------------------

    @override
    def full_module_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return full tensors in host memory on the first rank, and their names only on other ranks. Collective."""
        sharded = self._sharded
        return state if sharded is None else OrderedDict(full_state(sharded.module, sharded.writer, sharded.shards()))

    @override
    def whole_values(self, tree: Any) -> Any:
        """Gather full tensors on the first rank of those that shard the same part; ``meta`` tensors elsewhere."""
        if self._sharded is None:
            return tree
        writer = self._sharded.writer

        def whole(value: DTensor) -> Tensor:
            gathered = gather_to(value, writer)
            return torch.empty_like(value, device="meta") if gathered is None else gathered

        return pytree.tree_map_only(DTensor, whole, tree)

    @override
    def load_module_state(self, module: nn.Module, state: Mapping[str, Any], *, strict: bool) -> None:
        if self._sharded is None or self._sharded.module is not module:
            super().load_module_state(module, state, strict=strict)
        else:
            load_full_state(module, state, strict=strict, shards=self._sharded.shards())
            self._sharded.refresh()

    # --- description and teardown -------------------------------------------------------------------------------

    @override
    def describe(self) -> str:
        if self._sharded is None:
            return ""
        together = "".join(f"\nExperts of {name}: gathered with it, all of them." for name in self._callers)
        mesh, alone = self.context.distributed.meshes.shard, ""
        if mesh.size(mesh.ndim - 1) == 1 and self.offload.settings is None:
            alone = (
                "One rank holds every shard: gathers take time here and save no memory."
                ' Use pardist_ddp (data_parallel="ddp") for the same numbers in less time.'
            )
        plan = "\n".join(filter(None, [str(self._sharded) + together, self.compression.describe(), alone]))
        runs = self.context.passes_per_step
        if runs == 1:
            return plan
        sent = self._sharded.sent_bytes(runs, self.accumulate) / 1e6
        lines = [plan, f"Up to {sent:.1f} MB sent by this rank a step, for {runs} micro-batches."]
        if self.reshard_after_forward is not False or self.accumulate == "sharded":
            lines.append(
                "reshard_after_forward=False would all-gather parameters once a step, and accumulate='unsharded'"
                " would reduce gradients once a step. In return, the parameters or gradients of the whole stage"
                " stay in memory for that long."
            )
        return "\n".join(lines)

    @override
    def teardown(self) -> None:
        # Drop the context without exiting it, which would be collective.
        self._evaluating.pop_all()
        for metric in self._metrics:
            metric.dist_sync_fn = None
        self._metrics.clear()
        module = self.context.module
        if module is None:
            return
        for name in ("toggle_optimizer", "untoggle_optimizer"):
            module.__dict__.pop(name, None)
        # A single rank can always unshard, and must: shards cannot be accessed once its process group is destroyed.
        alone = self.context.distributed.world_size == 1
        if self._sharded is not None and (
            alone or (self.ended_normally() and (self._has_unsharded_trial or self._is_small(module)))
        ):
            for sharded in self._all_sharded:
                sharded.unshard_module()
            self._sharded = None
            self._copies = []
        elif not self.ended_normally():
            # Lightning moves the module to the CPU next, which torch supports for sharded parameters only.
            for sharded in self._all_sharded:
                sharded.abandon()

    def _is_small(self, module: nn.Module) -> bool:
        tensors = itertools.chain(module.parameters(), module.buffers())
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors) <= self.unshard_after_fit_max_mb * _MIB
