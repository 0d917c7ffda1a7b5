"""Every strategy's name, in one table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch.strategies import StrategyRegistry

from lightning_pardist._other_lightning import refuse_names
from lightning_pardist.environments.find import choose_for
from lightning_pardist.strategies.base import PardistStrategy
from lightning_pardist.strategies.ddp import DDPStrategy
from lightning_pardist.strategies.fsdp import FSDPStrategy
from lightning_pardist.strategies.hybrid import HybridStrategy
from lightning_pardist.strategies.pipeline import PipelineStrategy
from lightning_pardist.strategies.tensor import TensorParallelStrategy
from lightning_pardist.strategies.zero import ZeroStrategy


@dataclass(frozen=True)
class Entry:
    """One registered name.

    Attributes:
        name: What ``Trainer(strategy=...)`` takes.
        strategy: The class behind it.
        shards: What is split, in a few words.
        when: When to choose it, in one line.
        preset: Arguments of the class that the name stands for.
    """

    name: str
    strategy: Callable[..., PardistStrategy]
    shards: str
    when: str
    preset: dict[str, Any] = field(default_factory=dict)


TABLE: tuple[Entry, ...] = (
    Entry("pardist_ddp", DDPStrategy, "samples", "the model and its optimizer fit one device"),
    Entry("pardist_ddp_bf16", DDPStrategy, "samples", "the network is the limit: gradients travel as bf16",
          {"gradient_compression": "bf16"}),
    Entry("pardist_ddp_fp16", DDPStrategy, "samples", "the network is the limit: gradients travel as fp16",
          {"gradient_compression": "fp16"}),
    Entry("pardist_ddp_powersgd", DDPStrategy, "samples", "the network is slow: gradients travel as low-rank factors",
          {"gradient_compression": "powersgd"}),
    Entry("pardist_ddp_spawn", DDPStrategy, "samples", "ranks are to be started by spawn", {"start_method": "spawn"}),
    Entry("pardist_ddp_fork", DDPStrategy, "samples", "ranks are to be started by fork", {"start_method": "fork"}),
    Entry("pardist_ddp_notebook", DDPStrategy, "samples", "in a notebook (ranks by fork)", {"start_method": "fork"}),
    Entry("pardist_zero1", ZeroStrategy, "samples, optimizer state", "optimizer state is what does not fit",
          {"zero_stage": 1}),
    Entry("pardist_zero2", ZeroStrategy, "samples, optimizer state, gradients", "parameters fit, the rest does not",
          {"zero_stage": 2}),
    Entry("pardist_zero3", FSDPStrategy, "samples, optimizer state, gradients, parameters",
          "parameters do not fit either"),
    Entry("pardist_zero2_offload", ZeroStrategy, "samples, optimizer state, gradients",
          "the device has room for parameters only: the optimizer works on the host",
          {"zero_stage": 2, "offload": "cpu"}),
    Entry("pardist_zero3_offload", FSDPStrategy, "samples, optimizer state, gradients, parameters",
          "devices have room for a few layers: all else is on the host", {"offload": "cpu"}),
    Entry("pardist_zero3_nvme", FSDPStrategy, "samples, optimizer state, gradients, parameters",
          "the host has no room for optimizer state either: it is in files on a local disk", {"offload": "disk"}),
    Entry("pardist_fsdp", FSDPStrategy, "samples, optimizer state, gradients, parameters",
          "the same, with units and policies of your own"),
    Entry("pardist_hsdp", FSDPStrategy, "samples; the rest inside each node",
          "nodes are connected slowly: shards inside a node, replicas across", {"data_shard_size": "node"}),
    Entry("pardist_tp", TensorParallelStrategy, "layers inside", "single layers are large, or a batch is small"),
    Entry("pardist_tp_ddp", TensorParallelStrategy, "layers inside each node, samples across nodes",
          "a node's devices are connected well: layers split inside it, replicas across",
          {"tensor_parallel_size": "node"}),
    Entry("pardist_tp_zero3", TensorParallelStrategy,
          "layers inside each node; samples, optimizer state, gradients, parameters across nodes",
          "the same, and parameters do not fit a node",
          {"tensor_parallel_size": "node", "data_parallel": "zero3"}),
    Entry("pardist_mp", PipelineStrategy, "layers", "the model fits no device and batches cannot be cut",
          {"schedule": "mp"}),
    Entry("pardist_pp_gpipe", PipelineStrategy, "layers", "layers are split, by the simplest schedule (GPipe)",
          {"schedule": "gpipe"}),
    Entry("pardist_pp", PipelineStrategy, "layers", "the model fits no device: micro-batches through stages (1F1B)"),
    Entry("pardist_pp_interleaved", PipelineStrategy, "layers", "the same with two stages a rank: less idle time",
          {"schedule": "interleaved", "chunks_per_rank": 2}),
    Entry("pardist_pp_zb", PipelineStrategy, "layers", "the same with the backward in halves: least idle time",
          {"schedule": "interleaved_zb"}),
    Entry("pardist_3d", HybridStrategy, "layers inside each node, layers across nodes, samples",
          "the model is far too large for one kind of parallelism",
          {"pipeline_parallel_size": "machine", "tensor_parallel_size": "machine"}),
)  # fmt: skip


def register() -> None:
    """Put every name of the table into Lightning's registry. Harmless when called again."""
    for entry in TABLE:
        StrategyRegistry.register(
            entry.name,
            entry.strategy,
            description=f"splits {entry.shards}; for when {entry.when}",
            override=True,
            **entry.preset,
        )
    refuse_names(entry.name for entry in TABLE)
    names = {entry.name for entry in TABLE}
    choose_for(lambda flag: isinstance(flag, PardistStrategy) or flag in names)
