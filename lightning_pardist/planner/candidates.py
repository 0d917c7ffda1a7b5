"""Candidates of a plan: strategies with their degrees of parallelism."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_pardist.axes.ddp import DDPAxis
from lightning_pardist.axes.fsdp import FSDPAxis
from lightning_pardist.axes.local_sgd import LocalSGDAxis
from lightning_pardist.axes.pipeline import PipelineAxis
from lightning_pardist.axes.pipeline.microbatching import Microbatching
from lightning_pardist.axes.zero import ZeroAxis
from lightning_pardist.engines.common.activation_checkpointing import Checkpointing
from lightning_pardist.engines.pipeline import UnevenBatchError
from lightning_pardist.engines.pipeline.clock import expected_idle_share
from lightning_pardist.registry import TABLE, Entry

#: Names whose engines differ; the others are variants with another start method or other degrees.
DEFAULT = (
    "pardist_ddp",
    "pardist_zero1",
    "pardist_zero2",
    "pardist_zero3",
    "pardist_hsdp",
    "pardist_tp",
    "pardist_cp",
    "pardist_ep",
    "pardist_ep_zero3",
    "pardist_pp",
    "pardist_pp_interleaved",
    "pardist_3d",
    "pardist_zero2_offload",
    "pardist_zero3_offload",
)
#: Names that cannot be planned, and why.
NOT_PLANNED = {
    "pardist_dp": "its devices are threads of one process, and a plan simulates one device per process",
    "pardist_ps_async": "its ranks are not synchronized, and a plan assumes a step of all ranks together",
    "pardist_auto": "it makes a plan itself to choose another strategy",
}
_LARGEST_TENSOR_GROUP = 8
_LARGEST_PIPELINE = 8
#: Strategies whose groups send several messages per layer, with the setting of the group size.
_INSIDE_A_NODE = {"pardist_tp": "tensor_parallel_size", "pardist_cp": "context_parallel_size"}
_EXPERTS = "expert_parallel_size"
_SIZES = (*_INSIDE_A_NODE.values(), _EXPERTS, "pipeline_parallel_size")


@dataclass(frozen=True)
class Candidate:
    """A strategy with settings.

    Attributes:
        strategy: Registered name.
        settings: Arguments of its class in addition to the preset of the name.
    """

    strategy: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def entry(self) -> Entry:
        """Entry of the name in the table of strategies."""
        return next(entry for entry in TABLE if entry.name == self.strategy)

    def make(self) -> Any:
        """Create the strategy for a plan, without changing the process' allocator."""
        entry = self.entry
        return entry.make(**{**entry.preset, **self.settings, "keep_freed_memory": False})

    def is_wider_than(self, other: Candidate) -> bool:
        """Return whether this is the same candidate with larger groups of ranks."""
        sizes = [(self.settings[name], other.settings[name]) for name in _SIZES
                 if name in self.settings and name in other.settings]  # fmt: skip
        rest, others = ({name: value for name, value in each.settings.items() if name not in _SIZES}
                        for each in (self, other))  # fmt: skip
        return self.strategy == other.strategy and rest == others and any(own > size for own, size in sizes)

    @property
    def replicates(self) -> bool:
        """Whether parameters and optimizer state are replicated over ranks with different samples."""
        return self.make().axis(DDPAxis) is not None

    @property
    def shards(self) -> bool:
        """Whether states are sharded over ranks with different samples, and communicated without compression."""
        made = self.make()
        coded = any({**self.entry.preset, **self.settings}.get(name) is not None for name in ("gather", "reduce"))
        return not coded and (made.axis(ZeroAxis) is not None or made.axis(FSDPAxis) is not None)

    @property
    def offloads(self) -> bool:
        """Whether states are offloaded to the host, where the optimizer steps."""
        return bool(self.make().kept_on_host)

    @property
    def takes_microbatches(self) -> bool:
        """Whether the number of micro-batches is a setting of the class itself, and not fixed by the name."""
        return self.strategy.startswith("pardist_pp") and "num_microbatches" not in self.entry.preset

    def with_settings(self, **settings: Any) -> Candidate:
        """Return the candidate with further settings."""
        return Candidate(self.strategy, {**self.settings, **settings})

    def microbatches(self, num_ranks: int, batch: Any) -> int:
        """Return the number of micro-batches of a batch in a pipeline; 1 if it is unknown before a trial.

        Args:
            num_ranks: Ranks of a pipeline.
            batch: Batch of the module.
        """
        axis = self.make().axis(PipelineAxis)
        if axis is None or num_ranks == 1:
            return 1
        try:
            return Microbatching(axis.settings, num_ranks).count(batch)
        except UnevenBatchError:
            return 1

    def least_idle_share(self, num_stages: int, num_microbatches: int) -> float:
        """Return a lower bound of the idle fraction of a pipeline.

        Args:
            num_stages: Ranks of a pipeline.
            num_microbatches: See :meth:`microbatches`.
        """
        settings = {**self.entry.preset, **self.settings}
        schedule = settings.get("schedule", "1f1b")
        if num_stages == 1 or num_microbatches == 1 or schedule not in ("gpipe", "1f1b", "interleaved"):
            return 0.0
        chunks = settings.get("chunks_per_rank", 1)
        return expected_idle_share(schedule, num_stages, num_microbatches, chunks_per_rank=chunks)

    def by_sync_interval(self) -> tuple[int, Candidate, Candidate] | None:
        """Return for local SGD the steps between averages, and the candidates that never average and that always do.

        None for candidates whose steps are all equal. ``start_local_step`` is ignored.
        """
        axis = self.make().axis(LocalSGDAxis)
        if axis is None or axis.sync_every == "epoch" or axis.sync_every == 1:
            return None
        settings = {**self.settings, "start_local_step": 0}
        apart, together = (Candidate(self.strategy, {**settings, "sync_every": every}) for every in (1 << 20, 1))
        return axis.sync_every, apart, together

    @property
    def line(self) -> str:
        """Expression for ``strategy=`` of a Trainer."""
        if not self.settings:
            return repr(self.strategy)
        entry = self.entry
        settings = {**entry.preset, **self.settings}
        arguments = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        return f"lightning_pardist.{entry.path.rpartition('.')[2]}({arguments})"

    def __str__(self) -> str:
        if not self.settings:
            return self.strategy
        return f"{self.strategy}({', '.join(f'{name}={value}' for name, value in self.settings.items())})"


def enumerate_candidates(names: Sequence[str], *, devices: int, num_nodes: int) -> Iterator[Candidate]:
    """Yield every candidate of some names for a number of ranks, the simplest first.

    Args:
        names: Registered names; degrees that a name does not set are varied.
        devices: Ranks per node.
        num_nodes: Number of nodes.
    """
    world_size = devices * num_nodes
    for name in names:
        if name == "pardist_hsdp" and num_nodes == 1 and len(names) > 1:
            continue
        if name in _INSIDE_A_NODE:
            for size in _sizes_inside(devices):
                yield Candidate(name, {_INSIDE_A_NODE[name]: size})
                if world_size > size:
                    yield Candidate(name, {_INSIDE_A_NODE[name]: size, "data_parallel": "zero3"})
        elif name.startswith("pardist_ep"):
            sizes = _sizes_inside(devices)
            yield from (Candidate(name, {_EXPERTS: size}) for size in sizes)
            if not sizes:
                yield Candidate(name)
        elif name.startswith("pardist_pp"):
            sizes = [size for size in range(2, min(world_size, _LARGEST_PIPELINE) + 1) if world_size % size == 0]
            for size in sizes:
                yield Candidate(name, {"pipeline_parallel_size": size})
            if not sizes:
                yield Candidate(name)
        elif name != "pardist_3d" or world_size >= 4 or len(names) == 1:
            yield Candidate(name)


def _sizes_inside(devices: int) -> list[int]:
    return [size for size in range(2, min(devices, _LARGEST_TENSOR_GROUP) + 1) if devices % size == 0]


def with_checkpointing(candidate: Candidate, setting: Checkpointing = "auto") -> Candidate:
    """Return the candidate with activation checkpointing, by default of the model's repeated blocks."""
    blocks = setting if isinstance(setting, str) else tuple(sorted(setting))
    return candidate.with_settings(activation_checkpointing=blocks)
