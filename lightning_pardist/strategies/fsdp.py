"""ZeRO-3, FSDP and HSDP strategy."""

from __future__ import annotations

import os
from typing import Any, Literal

from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_pardist.axes.fsdp import FSDPAxis
from lightning_pardist.engines.common.block_quantization import Compression
from lightning_pardist.engines.common.meta_init import InitFunction
from lightning_pardist.engines.fsdp.fsdp_units import MIN_UNIT_BYTES, UnitPolicy
from lightning_pardist.engines.fsdp.fully_sharded import Accumulate
from lightning_pardist.engines.fsdp.shard import Reshard
from lightning_pardist.strategies.strategy import PardistStrategy

_MIB = 2**20


class FSDPStrategy(PardistStrategy):
    """ZeRO-3, FSDP, HSDP: shards parameters, gradients and optimizer state; gathers parameters unit by unit.

    The module is split into units (repeated blocks, large layers), each all-gathered right before it runs and freed
    right after. Sends ``3 Psi (N-1)/N`` per rank and step and holds ``4 Psi/N`` plus the largest unit (fp32 Adam; Psi
    parameters, N ranks; ZeRO, arXiv 1910.02054, stage 3). With ``data_shard_size`` below the number of ranks,
    parameters are sharded within groups of that many ranks and replicated across groups (HSDP).

    Inside steps parameters are plain tensors. Outside of steps, and in ``configure_optimizers``, they are
    ``DTensor``s. Checkpoints have Lightning's format: full tensors under the module's own names, gathered to the first
    rank one at a time. In ``bf16-true`` and ``16-true`` the shards stay fp32 and parameters are all-gathered in half
    precision.

    A single rank may run the module at the end of a validation epoch (to print a sample, for example). In any other
    hook outside of steps, all ranks have to call it together.

    Args:
        units: Class names of units, or a function that returns whether a module is a unit. Chosen automatically if
            None.
        min_unit_size_mb: Units smaller than this, in MiB, are merged into their parent. Not applied to ``units``.
        reshard_after_forward: ``True`` frees units after forward, ``False`` keeps them until backward and sends
            ``2 Psi (N-1)/N``, ``"auto"`` keeps only units that backward needs right away; a number reshards over that
            many ranks.
        data_shard_size: Number of ranks to shard over: ``"auto"`` for all ranks, ``"node"`` for those of one node, or a
            number. Shards are replicated over the remaining ranks.
        accumulate: How gradients of all but the last micro-batch are kept: ``"sharded"`` reduce-scatters after every
            micro-batch, ``"unsharded"`` once per optimizer step and holds full gradients until then.
        mp_policy: torch's policy for the dtypes of gathered parameters and of reductions. By default derived from the
            Trainer's ``precision``.
        allow_divergent_forward: Whether ranks may use different units in a step, or return no loss from
            ``training_step`` on some ranks; costs a small exchange per unit.
        detect_direct_param_use: When to look for parameters that are used outside their module's call: in the
            ``"first"`` run of each step function, ``"always"`` or ``"never"``.
        init: For modules on ``meta``: a function that initializes the direct parameters of one module, in place of its
            ``reset_parameters``.
        unshard_after_fit_max_mb: A module of up to this many MiB is unsharded to plain parameters on every rank after a
            successful run. A larger module, or one whose run failed, stays sharded, and all ranks have to call it
            together.
        offload: Where optimizer state is stored and the update runs. ``"cpu"``: in host memory. The path of a folder on
            a local disk: in files there, with ``offload_window_mb`` resident at a time. ``"disk"``: in files in the
            Trainer's ``default_root_dir``. Parameter shards are kept on the host as well. Adam and AdamW then use
            torch's fused kernel unless set otherwise. The files are unlinked, so they are freed with the process,
            however it ends.
        offload_window_mb: With files, size of the state that is resident in memory at a time, in MiB.
        tile_linear_above_mb: Linear layers whose weight is larger than this many MiB run in tiles of up to this size,
            each gathered alone, so that no rank ever has the layer whole; results, names in checkpoints and optimizers
            stay as they are (memory-centric tiling, ZeRO-Infinity, arXiv 2104.07857). Their gathers do not overlap
            with computation.
        gather: Compression of all-gathered parameters (ZeRO++, arXiv 2306.10209): ``"int8"``, ``"int4"`` or ``"bf16"``,
            in blocks of 64 elements with one scale each; None for no compression. Owners update exact values, which
            validation, checkpoints and the trained module use; training steps use the compressed values on all ranks.
        reduce: Compression of gradients, which are sent once each to the rank that sums them in full precision. Saving
            a checkpoint resets the residuals of error feedback.
        error_feedback: Whether the compression error of ``reduce`` is kept on the rank, at one byte per parameter, and
            added to the next gradients. None means True.
        **kwargs: See :class:`~lightning_pardist.strategies.strategy.PardistStrategy`.

    Raises:
        ValueError: If a setting is out of range; during a run, if the trial of an optimizer fails or a callback needs
            full parameters, with its name, or the folder for offloaded state is not writable.
        RuntimeError: During ``fit``, if the disk is too small for offloaded state.
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
