"""ZeRO-3, FSDP and HSDP: parameters, gradients and optimizer state sharded, parameters gathered unit by unit."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.strategies.fsdp import _move_torchmetrics_to_device
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.precision import HalfPrecision
from lightning.pytorch.trainer.states import TrainerStatus
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pardist.engines.api import DataEngine
from lightning_pardist.engines.fully_sharded import FullySharded, ShardedDataEngine, find_units, shard
from lightning_pardist.engines.fully_sharded.engine import Accumulate, Reshard
from lightning_pardist.engines.fully_sharded.materialize import InitFunction, on_meta
from lightning_pardist.engines.fully_sharded.state import full_state, load_full_state
from lightning_pardist.engines.fully_sharded.units import MIN_UNIT_BYTES, UnitPolicy
from lightning_pardist.mesh import ParallelDims
from lightning_pardist.strategies.base import PardistStrategy, _plain

_MIB = 2**20


class FSDPStrategy(PardistStrategy):
    """Every rank keeps a shard of parameters, gradients and optimizer state; parameters are gathered where they run.

    The module is split into units (repeated blocks, large layers), which are gathered right before they run and freed
    right after. Sends ``3 Psi (N-1)/N`` per rank and step and holds ``4 Psi/N`` plus the largest unit (fp32 Adam; Psi
    parameters, N ranks; ZeRO, arXiv 1910.02054, stage 3). With ``data_shard_size`` below the number of ranks, shards
    are replicated over groups of that many ranks (HSDP).

    Inside steps parameters are ordinary tensors. Outside of them, and in ``configure_optimizers``, they are
    ``DTensor``s. Checkpoints are Lightning's plain ones: whole tensors under the module's own names, put together on
    the first rank one at a time. In ``bf16-true`` and ``16-true`` the shards stay fp32 and parameters are gathered in
    half precision.

    The module may be run on one rank alone at the end of a validation epoch (to print a sample, say). Elsewhere, in
    hooks outside of steps, every rank has to call it.

    Args:
        units: Class names, or a function that says of a module whether it is a unit. Found by themselves if None.
        min_unit_size_mb: Smaller units, in MiB, stay with their parent. Not applied to ``units``.
        reshard_after_forward: ``True`` frees units after forward, ``False`` keeps them until backward and sends
            ``2 Psi (N-1)/N``, ``"auto"`` keeps those that backward needs at once; a number reshards to so many ranks.
        data_shard_size: Ranks over which to shard: ``"auto"`` for all of them, ``"node"`` for those of one node, or a
            number. The rest of the ranks replicates.
        accumulate: Where gradients of all but the last micro-batch stay: ``"sharded"`` sends every micro-batch,
            ``"unsharded"`` sends once an optimizer step and holds whole gradients until then.
        mp_policy: torch's policy for the dtypes of gathered parameters and of reductions. By default that of the
            Trainer's ``precision``.
        rank_dependent: Ranks may use different units in a step; costs a small exchange for each unit.
        watch: When to look for parameters used outside their module's call: in the ``"first"`` run of each step
            function, ``"always"`` or ``"never"``.
        init: For modules on ``meta``: initializes the own parameters of one module, in place of its
            ``reset_parameters``.
        whole_after_run_mb: A module of up to this many MiB is whole and ordinary again on every rank when a run has
            ended well. A larger one, or one whose run failed, stays sharded: every rank has to call it together.
        **kwargs: See :class:`~lightning_pardist.strategies.base.PardistStrategy`.

    Raises:
        ValueError: If a setting is out of range; during a run, if an optimizer needs whole parameters (LBFGS, Muon,
            Adafactor) or a callback does, with its name.
    """

    def __init__(
        self,
        *,
        units: UnitPolicy | None = None,
        min_unit_size_mb: float = MIN_UNIT_BYTES / _MIB,
        reshard_after_forward: Reshard = "auto",
        data_shard_size: int | Literal["auto", "node"] = "auto",
        accumulate: Accumulate = "sharded",
        mp_policy: MixedPrecisionPolicy | None = None,
        rank_dependent: bool = False,
        watch: Literal["first", "always", "never"] = "first",
        init: InitFunction | None = None,
        whole_after_run_mb: float = 1024.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        _one_of("accumulate", accumulate, ("sharded", "unsharded"))
        _one_of("watch", watch, ("first", "always", "never"))
        if isinstance(data_shard_size, str):
            _one_of("data_shard_size", data_shard_size, ("auto", "node", "a number of ranks"))
        if isinstance(reshard_after_forward, str):
            _one_of("reshard_after_forward", reshard_after_forward, ("auto", "True", "False"))
        if min_unit_size_mb < 0:
            raise ValueError(f"min_unit_size_mb={min_unit_size_mb} is negative. Use 0 for units of any size.")
        self.units = units
        self.min_unit_size_mb = min_unit_size_mb
        self.reshard_after_forward: Reshard = reshard_after_forward
        self.data_shard_size: int | Literal["auto", "node"] = data_shard_size
        self.accumulate: Accumulate = accumulate
        self.mp_policy = mp_policy
        self.rank_dependent = rank_dependent
        self.watch: Literal["first", "always", "never"] = watch
        self.init = init
        self.whole_after_run_mb = whole_after_run_mb
        self._sharded: FullySharded | None = None
        self._uneven: AbstractContextManager[None] | None = None
        self._built_on_meta = False

    @override
    def resolve_dims(self, world_size: int) -> ParallelDims:
        shards = self.num_processes if self.data_shard_size == "node" else self.data_shard_size
        if shards == "auto":
            return ParallelDims.resolve(world_size, data_shard="auto")
        return ParallelDims.resolve(world_size, data_replicate="auto", data_shard=shards)

    # --- the module ---------------------------------------------------------------------------------------------

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        """A module on ``meta`` has no values to load into before it is sharded."""
        return self._built_on_meta or (self.lightning_module is not None and on_meta(self.lightning_module))

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, StochasticWeightAveraging | WeightAveraging):
                raise ValueError(
                    f"{type(callback).__name__} averages whole parameters, which no rank has under"
                    f" {type(self).__name__}. Remove the callback, or use pardist_ddp, pardist_zero1 or pardist_zero2."
                )
        super().setup(trainer)

    @override
    def convert_precision(self) -> None:
        if not isinstance(self.precision_plugin, HalfPrecision) or self.lightning_module is None:
            super().convert_precision()
            return
        # The optimizer updates fp32 shards; what is gathered is half of that.
        self.lightning_module.to(torch.float32)
        for module in self.lightning_module.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    module._buffers[name] = buffer.to(self.precision_plugin._desired_input_dtype)

    @override
    def model_to_device(self) -> None:
        """Units move when they are sharded, so that no device holds the whole."""

    @override
    def transform_module(self) -> None:
        module = self.lightning_module
        if module is None:
            return
        if self._sharded is not None and self._sharded.module is module:
            # Left sharded by the run before.
            self._sharded.reset()
            self._sharded.meeting.active = self.rank_dependent
        else:
            self._built_on_meta = on_meta(module)
            self._sharded = self._shard(module)
        _move_torchmetrics_to_device(module, self.root_device)
        _update_properties(module, device=self.root_device)

    def _shard(self, module: pl.LightningModule) -> FullySharded:
        axes = ("data_shard",) if self.dims.data_replicate == 1 else ("data_replicate", "data_shard")
        policy = self.mp_policy
        if policy is None and isinstance(self.precision_plugin, HalfPrecision):
            policy = MixedPrecisionPolicy(
                param_dtype=self.precision_plugin._desired_input_dtype, reduce_dtype=torch.float32
            )
        return shard(
            module,
            self.device_mesh[axes],
            units=find_units(module, policy=self.units, min_unit_bytes=int(self.min_unit_size_mb * _MIB)),
            reshard_after_forward=self.reshard_after_forward,
            mp_policy=policy,
            init=self.init,
            rank_dependent=self.rank_dependent,
            watch=self.watch,
        )

    @override
    def make_data_engine(self, module: nn.Module, optimizers: list[Optimizer]) -> DataEngine:
        for name in ("toggle_optimizer", "untoggle_optimizer"):
            module.__dict__[name] = self._followed(getattr(module, name))
        return ShardedDataEngine(self.sharded, optimizers, accumulate=self.accumulate)

    @property
    def sharded(self) -> FullySharded:
        """The handle of the sharded module.

        Raises:
            RuntimeError: Before ``setup``, and after the module was made whole again.
        """
        if self._sharded is None:
            raise RuntimeError("The module is sharded during fit, validate, test and predict only.")
        return self._sharded

    def _followed(self, toggle: Callable[[Optimizer], None]) -> Callable[[Optimizer], None]:
        """Optimizers hold shards, while a step computes with gathered parameters."""

        def followed(optimizer: Optimizer) -> None:
            toggle(optimizer)
            self.sharded.follow_requires_grad()

        return followed

    # --- steps --------------------------------------------------------------------------------------------------

    @override
    def run_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.sharded.run(step, *args, **kwargs)

    @override
    def before_collective(self) -> None:
        if self._sharded is not None:
            self._sharded.meet()

    @override
    def _start_evaluation(self) -> None:
        super()._start_evaluation()
        # Ranks may have different numbers of batches, and one of them may run the module alone when the epoch ends.
        self._uneven = self.sharded.uneven()
        self._uneven.__enter__()

    @override
    def _end_evaluation(self) -> None:
        if self._uneven is not None:
            uneven, self._uneven = self._uneven, None
            uneven.__exit__(None, None, None)

    @override
    def gradient_clipping(self) -> dict[str, Callable[[Optimizer, int | float], None]]:
        return {**super().gradient_clipping(), "clip_grad_by_value": self._clip_grad_by_value}

    def _clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        if isinstance(self._engine, ShardedDataEngine):
            self._engine.clip_grad_value(_plain(optimizer), float(clip_val))

    # --- checkpoints --------------------------------------------------------------------------------------------

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole tensors in the first rank's host memory, their names alone on the others. Collective."""
        if self._sharded is None:
            return super().lightning_module_state_dict()
        return OrderedDict(full_state(self._sharded.module))

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._sharded is None or self._sharded.module is not self.lightning_module:
            super().load_model_state_dict(checkpoint, strict=strict)
        else:
            load_full_state(self._sharded.module, checkpoint["state_dict"], strict=strict)

    # --- for people ---------------------------------------------------------------------------------------------

    @override
    def describe(self) -> str:
        plan = "" if self._sharded is None else f"\n{self._sharded}"
        return super().describe() + plan

    # --- the end ------------------------------------------------------------------------------------------------

    @override
    def teardown(self) -> None:
        self._uneven = None
        module = self.lightning_module
        if module is not None:
            for name in ("toggle_optimizer", "untoggle_optimizer"):
                module.__dict__.pop(name, None)
            if self._sharded is not None and self._becomes_whole(module):
                self._sharded.dissolve()
                self._sharded = None
        super().teardown()

    def _becomes_whole(self, module: pl.LightningModule) -> bool:
        if module._trainer is None or module.trainer.state.status == TrainerStatus.INTERRUPTED:
            return False
        tensors = itertools.chain(module.parameters(), module.buffers())
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors) <= self.whole_after_run_mb * _MIB


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed or " " in value or value in ("True", "False"):
        raise ValueError(f"{name}={value!r} is unknown. Use {', '.join(allowed[:-1])} or {allowed[-1]}.")
