"""Context-parallel axis: sequences sharded over ranks that hold the same parameters."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import lightning.pytorch as pl
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from typing_extensions import override

from lightning_pardist.axes.shared_batch import SharedBatchAxis
from lightning_pardist.compat.tensors import below_torch_functions
from lightning_pardist.engines.tensor import ContextRuntime
from lightning_pardist.engines.tensor.rows import Arguments, Rows, TakenRows
from lightning_pardist.mesh import Degree
from lightning_pardist.settings import one_of

ContextParallelSize = int | Literal["auto"]


class ContextAxis(SharedBatchAxis):
    """Shards activations along the sequence dim over context ranks.

    The arguments are those of :class:`~lightning_pardist.ContextParallelStrategy`.

    Raises:
        ValueError: If a setting is out of range; during a run, if the first step has no sequence to split.
    """

    name = "context"
    mesh_axes = ("context_parallel",)
    order = 15
    kind = "context"

    def __init__(self, *, context_parallel_size: ContextParallelSize = "auto", sequence_dim: int | None = None) -> None:
        super().__init__()
        if isinstance(context_parallel_size, str):
            one_of("context_parallel_size", context_parallel_size, ("auto",), or_else="a number of ranks")
        elif context_parallel_size < 1:
            raise ValueError(
                f"context_parallel_size={context_parallel_size} is not positive. Use 1 or more, or 'auto'."
            )
        self.context_parallel_size = context_parallel_size
        self.sequence_dim = sequence_dim
        #: Summary of what the first step has split: on this rank, and over all pipeline stages once gathered.
        self._seen = self._told = ""

    @override
    def degrees(self, num_nodes: int, ranks_per_node: int) -> dict[str, Degree]:
        return {"context_parallel": self.context_parallel_size}

    # --- the module ---------------------------------------------------------------------------------------------

    @override
    def transform(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self.runtime is not None:
            return
        mesh = self.context.mesh["context_parallel"]
        self._share_random_state(mesh.get_group())
        self.runtime = runtime = ContextRuntime(mesh, sequence_dim=self.sequence_dim)
        for axis in self.context.axes:
            if isinstance(axis, SharedBatchAxis) and axis is not self and axis.runtime is not None:
                # The tensor axis splits tensors first.
                axis.runtime.nest()
                runtime.nest()
        self._wrap_reports(module)

    @override
    def on_full_tensors(self) -> AbstractContextManager[None]:
        runtime = self.runtime
        if not isinstance(runtime, ContextRuntime):
            return nullcontext()
        # Inside a step, suspend only this axis' splitting: the tensor axis uses the same mechanism for parameters.
        return runtime.suspended() if runtime.is_inside else below_torch_functions()

    @override
    def take_rows(self, given: Arguments, rows: Rows) -> TakenRows | None:
        return self.runtime.take_rows(given, rows) if isinstance(self.runtime, ContextRuntime) else None

    # --- steps --------------------------------------------------------------------------------------------------

    @override
    def run_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        runtime, module = self.runtime, self.context.module
        if not isinstance(runtime, ContextRuntime):
            return step(*args, **kwargs)
        runtime.expect((args, kwargs))
        runtime.group.reset()
        try:
            return super().run_step(step, *args, **kwargs)
        finally:
            # In `finally`, since a pipeline stage leaves its run by an exception.
            if module is not None and module.trainer.training and not self._told:
                self._seen = runtime.summary() or self._seen

    @override
    def gradients_reduced(self) -> None:
        if isinstance(self.runtime, ContextRuntime) and not self._told:
            # With manual optimization the step has not returned yet.
            self._seen = self._seen or self.runtime.summary()
            self._log_sharding(self.runtime.group.size)

    @override
    def agree_on_counts(self, counts: Tensor) -> Tensor:
        # MAX: a rank whose part of a mask is empty may take a count of one for a clamped count of zero.
        return counts if self.runtime is None else self.runtime.group.all_reduce_(counts, dist.ReduceOp.MAX)

    def _log_sharding(self, size: int) -> None:
        """Log what the first step has split. Collective over the pipeline.

        Raises:
            ValueError: If no stage has split a sequence.
        """
        seen, stages = [self._seen], self.context.dims.pipeline_parallel
        if stages > 1:
            seen *= stages
            dist.all_gather_object(seen, self._seen, group=self.context.mesh["pipeline_parallel"].get_group())
        if not any(seen):
            raise ValueError(
                f"{self.context.name} found no sequence in {type(self.context.module).__name__}.training_step: no"
                " embedding of token ids, and no linear layer or norm of inputs [samples, sequence, features], that"
                f" {size} ranks can split. Set sequence_dim, or use pardist_ddp or pardist_zero3."
            )
        said = [text or "No sequences." for text in seen]
        self._told = (
            said[0] if stages == 1 else "\n".join(f"Stage rank {rank}: {text}" for rank, text in enumerate(said))
        )
        rank_zero_info(self._told)

    # --- description and teardown -------------------------------------------------------------------------------

    @override
    def describe(self) -> str:
        if self.runtime is None:
            return ""
        return self._told or f"Sequences over {self.runtime.group.size} context ranks, as the first step shows them."

    @override
    def teardown(self) -> None:
        self._unwrap()
        self.runtime, self._seen, self._told = None, "", ""
