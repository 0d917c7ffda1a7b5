"""Tensor parallelism around context parallelism: shards of tensors that are themselves sharded along the sequence.

With both axes, a rank holds a shard of the features (heads, classes) of a shard of the sequence. The tensor runtime
unwraps the outer tensor and calls torch on its local part, which the context runtime unwraps in turn. Collectives of
the tensor group run on the innermost plain tensors: all tensor ranks of one context rank hold the same part of the
sequence.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from typing_extensions import override

from lightning_pardist.engines.tensor.layout import Layout
from lightning_pardist.engines.tensor.regions import TensorGroup
from lightning_pardist.engines.tensor.split_tensor import PartedTensor


class NestedGroup(TensorGroup):
    """Tensor ranks whose tensors may be sharded over context ranks as well.

    If both axes would shard the same dim, the sequence is gathered first.
    """

    def _inside(self, run: Callable[[Tensor], Tensor], tensor: Tensor, *dims: int) -> Tensor:
        if not isinstance(tensor, PartedTensor):
            return run(tensor)
        if tensor.split_layout.dim in dims:
            return run(tensor.runtime.gather(tensor))
        return type(tensor)(run(tensor.local), tensor.split_layout, tensor.runtime)

    @override
    def copy(self, tensor: Tensor) -> Tensor:
        return self._inside(super().copy, tensor)

    @override
    def reduce(self, partial: Tensor) -> Tensor:
        return self._inside(super().reduce, partial)

    @override
    def scatter(self, tensor: Tensor, layout: Layout) -> Tensor:
        scatter = super().scatter
        return self._inside(lambda part: scatter(part, layout), tensor, layout.dim)

    @override
    def gather(self, local: Tensor, layout: Layout) -> Tensor:
        gather = super().gather
        return self._inside(lambda part: gather(part, layout), local, layout.dim)

    @override
    def gather_into_split(self, local: Tensor, layout: Layout) -> Tensor:
        gather = super().gather_into_split
        return self._inside(lambda part: gather(part, layout), local, layout.dim)

    @override
    def reduce_into_split(self, partial: Tensor, layout: Layout) -> Tensor:
        reduce = super().reduce_into_split
        return self._inside(lambda part: reduce(part, layout), partial, layout.dim)

    @override
    def move(self, local: Tensor, source: Layout, target: Layout) -> Tensor:
        move = super().move
        return self._inside(lambda part: move(part, source, target), local, source.dim, target.dim)

    @override
    def assemble(self, local: Tensor, layout: Layout) -> Tensor:
        assemble = super().assemble
        return self._inside(lambda part: assemble(part, layout), local, layout.dim)

    @override
    def apply_rowwise(self, run: Callable[..., Tensor], rows: Tensor, of_rows: Tensor) -> Tensor:
        if not isinstance(rows, PartedTensor):
            whole = of_rows.runtime.gather(of_rows) if isinstance(of_rows, PartedTensor) else of_rows
            return super().apply_rowwise(run, rows, whole)
        layout = rows.split_layout
        if layout.dim == rows.dim() - 1:
            return self.apply_rowwise(run, rows.runtime.gather(rows), of_rows)
        if not isinstance(of_rows, PartedTensor):
            part = layout.take(of_rows, rows.runtime.group.rank, rows.runtime.group.size)
        elif of_rows.split_layout == layout:
            part = of_rows.local
        else:
            return self.apply_rowwise(run, rows, of_rows.runtime.gather(of_rows))
        return type(rows)(super().apply_rowwise(run, rows.local, part), layout, rows.runtime)
