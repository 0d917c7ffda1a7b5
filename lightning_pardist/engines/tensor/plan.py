"""The plan: how every parameter is split, why, and what a step sends because of it. Data, nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_pardist.engines.tensor.layout import Layout


@dataclass(frozen=True)
class TensorPlan:
    """One parameter or buffer.

    Attributes:
        name: Its first name.
        aliases: Other names, if it is tied.
        shape: Global shape.
        bytes: Size of the whole tensor.
        layout: How it is split; None if every rank holds all of it.
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
        kind: ``all_reduce``, ``all_gather`` or ``reduce_scatter``.
        phase: ``forward`` or ``backward``.
        count: How many.
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
    """An operator that will run on whole tensors.

    Attributes:
        operator: Plain name of the torch function.
        module: Submodule that calls it.
        calls: Calls a step.
        bytes: Bytes put together for it, a step.
        reason: What stood in the way.
    """

    operator: str
    module: str
    calls: int
    bytes: int
    reason: str


@dataclass(frozen=True)
class TensorParallelPlan:
    """How a module is split over ``tp_size`` tensor ranks; made by :func:`plan`, carried out by :func:`apply`.

    Attributes:
        tp_size: Number of tensor ranks.
        parameters: Every parameter, tied ones once.
        buffers: Every buffer.
        collectives: What one traced step sends.
        fallbacks: Operators that run on whole tensors.
        sequence_parallel: Results of row-wise layers stay split along the sequence.
    """

    tp_size: int
    parameters: tuple[TensorPlan, ...]
    buffers: tuple[TensorPlan, ...] = ()
    collectives: tuple[CollectivePlan, ...] = ()
    fallbacks: tuple[FallbackPlan, ...] = ()
    sequence_parallel: bool = False

    def layouts(self) -> dict[str, Layout]:
        """Layouts of all split parameters and buffers, by first name."""
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
        """Collectives in one phase of a step."""
        return sum(item.count for item in self.collectives if item.phase == phase)

    def __str__(self) -> str:
        """Tables of parameters, collectives and fallbacks."""
        rows = [
            (
                item.name + (f" (= {', '.join(item.aliases)})" if item.aliases else ""),
                "x".join(map(str, item.shape)) or "scalar",
                "whole" if item.layout is None else item.layout.describe(),
                f"{item.bytes if item.layout is None else item.bytes // self.tp_size:,}",
                item.why,
            )
            for item in (*self.parameters, *(buffer for buffer in self.buffers if buffer.layout is not None))
        ]
        share = self.bytes_per_rank / self.total_bytes if self.total_bytes else 1.0
        head = (
            f"Tensor parallel over {self.tp_size} ranks: {self.bytes_per_rank:,} of {self.total_bytes:,} bytes of"
            f" parameters on each ({share:.1%})"
        )
        text = [head, _table(("parameter", "shape", "split", "bytes/rank", "why"), rows)]
        sent = [
            (item.phase, item.kind, str(item.count), f"{item.bytes:,}", item.why)
            for item in sorted(self.collectives, key=lambda item: (item.phase != "forward", -item.bytes))
        ]
        text += ["Collectives of one step", _table(("phase", "kind", "count", "bytes", "why"), sent)] if sent else []
        if self.fallbacks:
            rows_back = [(i.operator, i.module, str(i.calls), f"{i.bytes:,}", i.reason) for i in self.fallbacks]
            text += [
                "On whole tensors for lack of a rule",
                _table(("operator", "module", "calls", "bytes", "why"), rows_back),
            ]
        return "\n".join(text)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)
    ]
    return "\n".join(f"  {line}" for line in [lines[0], "-" * (sum(widths) + 2 * len(widths) - 2), *lines[1:]])
