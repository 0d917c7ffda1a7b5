"""Tensor-parallel plan as data: layouts of parameters with reasons, collectives of a step, fallbacks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_pardist.engines.common.tables import fold, starred, table
from lightning_pardist.engines.tensor.layout import Layout


@dataclass(frozen=True)
class TensorPlan:
    """Plan of one parameter or buffer.

    Attributes:
        name: Its first name.
        aliases: Other names, if it is tied.
        shape: Global shape.
        bytes: Size of the full tensor.
        layout: Its sharding; None if replicated.
        why: The reason, in words.
        buffer: Whether it is a buffer.
    """

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    bytes: int
    layout: Layout | None
    why: str
    buffer: bool = False


@dataclass(frozen=True)
class CollectivePlan:
    """Collectives of one step that have the same reason.

    Attributes:
        kind: ``all_reduce``, ``all_gather``, ``reduce_scatter`` or ``all_to_all``.
        phase: ``forward`` or ``backward``.
        count: Number of collectives.
        bytes: Sum of the sizes of the tensors involved, before any algorithm's factor.
        why: What needs them.
    """

    kind: str
    phase: Literal["forward", "backward"]
    count: int
    bytes: int
    why: str


@dataclass(frozen=True)
class FallbackPlan:
    """An operator that will run on full tensors.

    Attributes:
        operator: Plain name of the torch function.
        module: Submodule that calls it.
        calls: Calls per step.
        bytes: Bytes gathered for it per step.
        reason: Why it cannot run on local shards.
    """

    operator: str
    module: str
    calls: int
    bytes: int
    reason: str


@dataclass(frozen=True)
class TensorParallelPlan:
    """Sharding of a module over ``tp_size`` tensor ranks: made by :func:`plan_layout`, for :func:`apply_layout`.

    Attributes:
        tp_size: Number of tensor ranks.
        parameters: Every parameter, tied ones once.
        buffers: Every buffer.
        collectives: Collectives of one traced step.
        fallbacks: Operators that run on full tensors.
        sequence_parallel: Whether results of row-wise layers stay sharded along the sequence.
    """

    tp_size: int
    parameters: tuple[TensorPlan, ...]
    buffers: tuple[TensorPlan, ...] = ()
    collectives: tuple[CollectivePlan, ...] = ()
    fallbacks: tuple[FallbackPlan, ...] = ()
    sequence_parallel: bool = False

    def layouts(self) -> dict[str, Layout]:
        """Return the layouts of all sharded parameters and buffers, by first name."""
        return {item.name: item.layout for item in (*self.parameters, *self.buffers) if item.layout is not None}

    @property
    def total_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(item.bytes for item in self.parameters)

    @property
    def bytes_per_rank(self) -> int:
        """Bytes of parameters that each rank holds."""
        return sum(item.bytes if item.layout is None else item.bytes // self.tp_size for item in self.parameters)

    def collective_count(self, phase: Literal["forward", "backward"]) -> int:
        """Return the number of collectives in one phase of a step."""
        return sum(item.count for item in self.collectives if item.phase == phase)

    def headline(self) -> str:
        """Return one line with the parameter bytes per rank and the number of collectives in a step."""
        share = self.bytes_per_rank / self.total_bytes if self.total_bytes else 1.0
        names = ", ".join(sorted({fallback.operator for fallback in self.fallbacks}))
        whole = f"; on whole tensors: {names}" if names else ""
        return (
            f"Tensor parallel over {self.tp_size} ranks: {self.bytes_per_rank:,} of {self.total_bytes:,} bytes of"
            f" parameters on each ({share:.1%}), {self.collective_count('forward')} collectives forward and"
            f" {self.collective_count('backward')} backward{whole}"
        )

    def __str__(self) -> str:
        """Return the headline and tables of parameters, collectives and fallbacks; repeated blocks share one line."""
        shown = (*self.parameters, *(buffer for buffer in self.buffers if buffer.layout is not None))
        rows = [
            (
                name + (f" (= {', '.join(items[0].aliases)})" if items[0].aliases else ""),
                str(len(items)),
                "x".join(map(str, items[0].shape)) or "scalar",
                "whole" if items[0].layout is None else items[0].layout.describe(),
                f"{sum(i.bytes if i.layout is None else i.bytes // self.tp_size for i in items):,}",
                items[0].why if len(items) == 1 else starred(items[0].why),
            )
            for name, items in fold(
                shown, lambda i: i.name, lambda i: (i.aliases, i.shape, i.layout, i.bytes, starred(i.why))
            )
        ]
        text = [self.headline(), table(("parameter", "tensors", "shape", "split", "bytes/rank", "why"), rows)]
        sent = [
            (item.phase, item.kind, str(item.count), f"{item.bytes:,}", item.why)
            for item in sorted(self.collectives, key=lambda item: (item.phase != "forward", -item.bytes))
        ]
        text += ["Collectives of one step", table(("phase", "kind", "count", "bytes", "why"), sent)] if sent else []
        if self.fallbacks:
            rows_back = [(i.operator, i.module, str(i.calls), f"{i.bytes:,}", i.reason) for i in self.fallbacks]
            text += [
                "On whole tensors for lack of a rule",
                table(("operator", "module", "calls", "bytes", "why"), rows_back),
            ]
        return "\n".join(text)
