"""ZeRO-3, FSDP and HSDP strategy."""

from __future__ import annotations

import os
from typing import Any, Literal

from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_pardist.axes.fsdp import FSDPAxis
from lightning_pardist.engines.common.block_codes import Compression
from lightning_pardist.engines.common.meta_init import InitFunction
from lightning_pardist.engines.fsdp.fsdp_units import MIN_UNIT_BYTES, UnitPolicy
from lightning_pardist.engines.fsdp.fully_sharded import Accumulate
from lightning_pardist.engines.fsdp.shard import Reshard
from lightning_pardist.strategies.strategy import PardistStrategy

_MIB = 2**20


class FSDPStrategy(PardistStrategy):
    """ZeRO-3, FSDP, HSDP: shards parameters, gradients and optimizer state; gathers parameters unit by unit.

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
        allow_divergent_forward: Ranks may use different units in a step, or some of them return no loss from
            ``training_step``; costs a small exchange for each unit.
        detect_direct_param_use: When to look for parameters used outside their module's call: in the ``"first"`` run
            of each step function, ``"always"`` or ``"never"``.
        init: For modules on ``meta``: initializes the own parameters of one module, in place of its
            ``reset_parameters``.
        unshard_after_fit_max_mb: A module of up to this many MiB is whole and ordinary again on every rank when a run
            has ended well. A larger one, or one whose run failed, stays sharded: every rank has to call it together.
        offload: Where optimizer state lives and steps are taken. ``"cpu"``: in host memory. The path of a folder on a
            local disk: in files there, of which ``offload_window_mb`` are resident at a time. ``"disk"``: in files in
            the Trainer's ``default_root_dir``. Shards of parameters rest on the host as well. Adam and AdamW take
            torch's fused kernel then, unless told otherwise. The files have no names, and are gone with the process,
            however it ends.
        offload_window_mb: With files, state that is resident at a time, in MiB.
        tile_linear_above_mb: Linear layers whose weight is larger than this many MiB run in tiles of up to this size,
            each gathered alone, so that no rank ever has the layer whole; results, names in checkpoints and optimizers
            stay as they are (memory-centric tiling, ZeRO-Infinity, arXiv 2104.07857). Their gathers do not overlap
            with computation.
        gather: How parameters travel: as ``"int8"``, ``"int4"`` or ``"bf16"``, blocks of 64 elements with a scale of
            their own, or as they are if None (ZeRO++, arXiv 2306.10209). Owners update exact values, which validation,
            checkpoints and the trained module have; training steps compute with what was received, on all ranks.
        reduce: How gradients travel, once each, to the rank that sums them in full precision. A checkpoint starts
            what error feedback has kept anew.
        error_feedback: Whether what ``reduce`` leaves behind on a rank is added to the next gradients, for a byte a
            parameter; it is if None.
        **kwargs: See :class:`~lightning_pardist.strategies.strategy.PardistStrategy`.

    Raises:
        ValueError: If a setting is out of range; during a run, if an optimizer cannot be tried or a callback needs
            whole parameters, with its name, or the folder for offloaded state cannot be written to.
        RuntimeError: During ``fit``, if the disk has no room for offloaded state.
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
        **kwargs: Any,
    ) -> None:
        data = FSDPAxis(
            units=units,
            min_unit_size_mb=min_unit_size_mb,
            reshard_after_forward=reshard_after_forward,
            data_shard_size=data_shard_size,
            accumulate=accumulate,
            mp_policy=mp_policy,
            allow_divergent_forward=allow_divergent_forward,
            detect_direct_param_use=detect_direct_param_use,
            init=init,
            unshard_after_fit_max_mb=unshard_after_fit_max_mb,
            offload=offload,
            offload_window_mb=offload_window_mb,
            tile_linear_above_mb=tile_linear_above_mb,
            gather=gather,
            reduce=reduce,
            error_feedback=error_feedback,
        )
        super().__init__(axes=[data], **kwargs)
