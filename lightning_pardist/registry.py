"""Every strategy's name, in one table."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import StrategyRegistry

from lightning_pardist._other_lightning import refuse_names
from lightning_pardist.environments.find import choose_for

if TYPE_CHECKING:
    from lightning_pardist.strategies.base import PardistStrategy


@dataclass(frozen=True)
class Entry:
    """One registered name.

    Attributes:
        name: What ``Trainer(strategy=...)`` takes.
        path: Module in :mod:`lightning_pardist.strategies` and class behind the name, imported when it is used.
        shards: What is split, in a few words.
        when: When to choose it, in one line.
        preset: Arguments of the class that the name stands for.
    """

    name: str
    path: str
    shards: str
    when: str
    preset: dict[str, Any] = field(default_factory=dict)

    @property
    def strategy(self) -> type[PardistStrategy]:
        """The class behind the name."""
        module, _, name = self.path.rpartition(".")
        found: type[PardistStrategy] = getattr(importlib.import_module(f"lightning_pardist.strategies.{module}"), name)
        return found

    def make(self, **settings: Any) -> PardistStrategy:
        """What Lightning calls for the name, with the preset as settings."""
        return self.strategy(**settings)


_DDP, _ZERO, _FSDP = "ddp.DDPStrategy", "zero.ZeroStrategy", "fsdp.FSDPStrategy"
_TENSOR, _PIPELINE, _HYBRID = "tensor.TensorParallelStrategy", "pipeline.PipelineStrategy", "hybrid.HybridStrategy"

TABLE: tuple[Entry, ...] = (
    Entry("pardist_ddp", _DDP, "samples", "the model and its optimizer fit one device"),
    Entry("pardist_ddp_bf16", _DDP, "samples", "the network is the limit: gradients travel as bf16",
          {"gradient_compression": "bf16"}),
    Entry("pardist_ddp_fp16", _DDP, "samples", "the network is the limit: gradients travel as fp16",
          {"gradient_compression": "fp16"}),
    Entry("pardist_ddp_powersgd", _DDP, "samples", "the network is slow: gradients travel as low-rank factors",
          {"gradient_compression": "powersgd"}),
    Entry("pardist_ddp_spawn", _DDP, "samples", "ranks are to be started by spawn", {"start_method": "spawn"}),
    Entry("pardist_ddp_fork", _DDP, "samples", "ranks are to be started by fork", {"start_method": "fork"}),
    Entry("pardist_ddp_notebook", _DDP, "samples", "in a notebook (ranks by fork)", {"start_method": "fork"}),
    Entry("pardist_zero1", _ZERO, "samples, optimizer state", "optimizer state is what does not fit",
          {"zero_stage": 1}),
    Entry("pardist_zero2", _ZERO, "samples, optimizer state, gradients", "parameters fit, the rest does not",
          {"zero_stage": 2}),
    Entry("pardist_zero3", _FSDP, "samples, optimizer state, gradients, parameters",
          "parameters do not fit either"),
    Entry("pardist_zero2_offload", _ZERO, "samples, optimizer state, gradients",
          "the device has room for parameters only: the optimizer works on the host",
          {"zero_stage": 2, "offload": "cpu"}),
    Entry("pardist_zero3_offload", _FSDP, "samples, optimizer state, gradients, parameters",
          "devices have room for a few layers: all else is on the host", {"offload": "cpu"}),
    Entry("pardist_zero3_nvme", _FSDP, "samples, optimizer state, gradients, parameters",
          "the host has no room for optimizer state either: it is in files on a local disk", {"offload": "disk"}),
    Entry("pardist_fsdp", _FSDP, "samples, optimizer state, gradients, parameters",
          "the same, with units and policies of your own"),
    Entry("pardist_hsdp", _FSDP, "samples; the rest inside each node",
          "nodes are connected slowly: shards inside a node, replicas across", {"data_shard_size": "node"}),
    Entry("pardist_tp", _TENSOR, "layers inside", "single layers are large, or a batch is small"),
    Entry("pardist_tp_ddp", _TENSOR, "layers inside each node, samples across nodes",
          "a node's devices are connected well: layers split inside it, replicas across",
          {"tensor_parallel_size": "node"}),
    Entry("pardist_tp_zero3", _TENSOR,
          "layers inside each node; samples, optimizer state, gradients, parameters across nodes",
          "the same, and parameters do not fit a node",
          {"tensor_parallel_size": "node", "data_parallel": "zero3"}),
    Entry("pardist_mp", _PIPELINE, "layers", "the model fits no device and batches cannot be cut",
          {"schedule": "mp"}),
    Entry("pardist_pp_gpipe", _PIPELINE, "layers", "layers are split, by the simplest schedule (GPipe)",
          {"schedule": "gpipe"}),
    Entry("pardist_pp", _PIPELINE, "layers", "the model fits no device: micro-batches through stages (1F1B)"),
    Entry("pardist_pp_interleaved", _PIPELINE, "layers", "the same with two stages a rank: less idle time",
          {"schedule": "interleaved", "chunks_per_rank": 2}),
    Entry("pardist_pp_zb", _PIPELINE, "layers", "the same with the backward in halves: least idle time",
          {"schedule": "interleaved_zb"}),
    Entry("pardist_3d", _HYBRID, "layers inside each node, layers across nodes, samples",
          "the model is far too large for one kind of parallelism",
          {"pipeline_parallel_size": "machine", "tensor_parallel_size": "machine"}),
)  # fmt: skip


def register() -> None:
    """Put every name of the table into Lightning's registry. Harmless when called again."""
    for entry in TABLE:
        StrategyRegistry.register(
            entry.name,
            entry.make,
            description=f"splits {entry.shards}; for when {entry.when}",
            override=True,
            **entry.preset,
        )
    refuse_names(entry.name for entry in TABLE)
    names = {entry.name for entry in TABLE}
    choose_for(lambda flag: _is_strategy(flag) or flag in names)


def _is_strategy(flag: Any) -> bool:
    base = sys.modules.get("lightning_pardist.strategies.base")
    return base is not None and isinstance(flag, base.PardistStrategy)
