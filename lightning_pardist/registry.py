"""Table of registered strategy names."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lightning_pardist.compat.cluster_environment import check_names, choose_for
from lightning_pardist.compat.command_line import explain_errors
from lightning_pardist.compat.on_import import after_import
from lightning_pardist.compat.other_lightning import refuse_names
from lightning_pardist.foreign_settings import advise, refuse_name

if TYPE_CHECKING:
    from lightning_pardist.strategies.strategy import PardistStrategy


@dataclass(frozen=True)
class Entry:
    """A registered strategy name.

    Attributes:
        name: Name for ``Trainer(strategy=...)``.
        path: Module in :mod:`lightning_pardist.strategies`, or in another subpackage, and class of the strategy,
            imported on first use.
        shards: What is split over ranks, in a few words.
        when: When to choose it, in one line.
        preset: Arguments of the class that the name sets.
    """

    name: str
    path: str
    shards: str
    when: str
    preset: dict[str, Any] = field(default_factory=dict)

    @property
    def strategy(self) -> type[PardistStrategy]:
        """Strategy class of the name."""
        module, _, name = self.path.rpartition(".")
        package = "lightning_pardist" if "." in module else "lightning_pardist.strategies"
        found: type[PardistStrategy] = getattr(importlib.import_module(f"{package}.{module}"), name)
        return found

    def make(self, **settings: Any) -> PardistStrategy:
        """Create the strategy; Lightning calls this with the preset as settings."""
        return self.strategy(**settings)


_DDP, _ZERO, _FSDP = "ddp.DDPStrategy", "zero.ZeroStrategy", "fsdp.FSDPStrategy"
_DP, _LOCAL_SGD = "data_parallel.DataParallelStrategy", "local_sgd.LocalSGDStrategy"
_CONTEXT, _EXPERT = "context.ContextParallelStrategy", "expert.ExpertParallelStrategy"
_SERVERS = "parameter_server.ParameterServerStrategy"
_TENSOR, _PIPELINE, _HYBRID = "tensor.TensorParallelStrategy", "pipeline.PipelineStrategy", "hybrid.HybridStrategy"

TABLE: tuple[Entry, ...] = (
    Entry("pardist_ddp", _DDP, "batch", "the model and its optimizer fit one device"),
    Entry("pardist_ddp_bf16", _DDP, "batch", "the network is the bottleneck: gradients are sent as bf16",
          {"gradient_compression": "bf16"}),
    Entry("pardist_ddp_fp16", _DDP, "batch", "the network is the bottleneck: gradients are sent as fp16",
          {"gradient_compression": "fp16"}),
    Entry("pardist_ddp_powersgd", _DDP, "batch", "the network is slow: gradients are sent as low-rank factors",
          {"gradient_compression": "powersgd"}),
    Entry("pardist_ddp_spawn", _DDP, "batch", "ranks are to be started by spawn", {"start_method": "spawn"}),
    Entry("pardist_ddp_fork", _DDP, "batch", "ranks are to be started by fork", {"start_method": "fork"}),
    Entry("pardist_ddp_notebook", _DDP, "batch", "in a notebook (ranks by fork)", {"start_method": "fork"}),
    Entry("pardist_dp", _DP, "batch over devices of one process",
          "one process is to run all devices, in threads (pardist_ddp is faster)"),
    Entry("pardist_zero1", _ZERO, "batch, optimizer state", "optimizer state does not fit",
          {"zero_stage": 1}),
    Entry("pardist_zero2", _ZERO, "batch, optimizer state, gradients", "gradients do not fit either",
          {"zero_stage": 2}),
    Entry("pardist_zero3", _FSDP, "batch, optimizer state, gradients, parameters",
          "parameters do not fit either"),
    Entry("pardist_zero2_offload", _ZERO, "batch, optimizer state, gradients",
          "the device has room for parameters only: the optimizer steps on the host",
          {"zero_stage": 2, "offload": "cpu"}),
    Entry("pardist_zero3_offload", _FSDP, "batch, optimizer state, gradients, parameters",
          "devices have room for a few layers: the rest is on the host", {"offload": "cpu"}),
    Entry("pardist_zero3_nvme", _FSDP, "batch, optimizer state, gradients, parameters",
          "the host has no room for optimizer state either: it is in files on a local disk", {"offload": "disk"}),
    Entry("pardist_fsdp", _FSDP, "batch, optimizer state, gradients, parameters",
          "the same, with units and policies of your own"),
    Entry("pardist_hsdp", _FSDP, "batch; optimizer state, gradients, parameters inside each node",
          "nodes are connected slowly: shards inside a node, replicas across", {"data_shard_size": "node"}),
    Entry("pardist_tp", _TENSOR, "weights (TP) x batch (DP)", "single layers are large, or a batch is small"),
    Entry("pardist_tp_ddp", _TENSOR, "weights inside each node (TP) x batch across nodes (DP)",
          "a node's devices are connected well: tensor groups inside it, replicas across",
          {"tensor_parallel_size": "node"}),
    Entry("pardist_tp_zero3", _TENSOR,
          "weights inside each node (TP) x batch, optimizer state, gradients, parameters across nodes",
          "the same, and parameters do not fit a node",
          {"tensor_parallel_size": "node", "data_parallel": "zero3"}),
    Entry("pardist_cp", _CONTEXT, "the sequence of each batch (CP)",
          "sequences are long: a rank has the activations of a part of each"),
    Entry("pardist_cp_zero3", _CONTEXT, "the sequence of each batch (CP), optimizer state, gradients, parameters",
          "the same, and parameters do not fit either", {"data_parallel": "zero3"}),
    Entry("pardist_ep", _EXPERT, "experts (EP) x batch (DP)",
          "a mixture of experts is large: a rank has some of each layer's experts"),
    Entry("pardist_ep_zero2", _EXPERT, "experts (EP) x batch, optimizer state, gradients",
          "the same, and states of the other parameters do not fit either", {"data_parallel": "zero2"}),
    Entry("pardist_ep_zero3", _EXPERT, "experts (EP) x batch, optimizer state, gradients, parameters",
          "the same, and the other parameters do not fit either", {"data_parallel": "zero3"}),
    Entry("pardist_mp", _PIPELINE, "layers (PP) x batch (DP)", "the model fits no device and batches cannot be divided",
          {"schedule": "mp"}),
    Entry("pardist_pp_gpipe", _PIPELINE, "layers (PP) x batch (DP)", "the simplest schedule (GPipe)",
          {"schedule": "gpipe"}),
    Entry("pardist_pp", _PIPELINE, "layers (PP) x batch (DP)",
          "the model fits no device: micro-batches through stages (1F1B)"),
    Entry("pardist_pp_interleaved", _PIPELINE, "layers (PP) x batch (DP)",
          "the same with two stages a rank: less idle time",
          {"schedule": "interleaved", "chunks_per_rank": 2}),
    Entry("pardist_pp_zb", _PIPELINE, "layers (PP) x batch (DP)",
          "the same with the backward in halves: least idle time",
          {"schedule": "interleaved_zb"}),
    Entry("pardist_3d", _HYBRID, "layers (PP) x weights (TP) x batch (DP)",
          "the model is far too large for one kind of parallelism",
          {"pipeline_parallel_size": "machine", "tensor_parallel_size": "machine"}),
    Entry("pardist_local_sgd", _LOCAL_SGD, "batch over islands of ranks",
          "ranks or nodes are connected slowly: parameters are averaged every 32 steps, gradients are not"),
    Entry("pardist_post_local_sgd", _LOCAL_SGD, "batch over islands of ranks",
          "the same after 1,000 steps as pardist_ddp",
          {"start_local_step": 1000}),
    Entry("pardist_diloco", _LOCAL_SGD, "batch over islands of ranks",
          "sites are connected very slowly: islands synchronize every 100 steps, by an outer Nesterov step",
          {"sync_every": 100, "outer_lr": 0.7, "outer_momentum": 0.9}),
    Entry("pardist_auto", "planner.auto.AutoStrategy", "whatever is fastest and fits",
          "the requirements are not known yet: it plans at the start of fit and prints which name to set"),
    Entry("pardist_ps", _SERVERS, "batch; parameters and their updates over servers: all ranks, or the last few",
          "a parameter server is required: the results of pardist_ddp"),
    Entry("pardist_ps_async", _SERVERS, "batch; parameters and their updates over servers: all ranks, or the last few",
          "ranks are of unequal speed, and results that differ from one process are acceptable: no rank waits long",
          {"max_staleness": 4}),
)  # fmt: skip


def register() -> None:
    """Register every name of the table in Lightning's registry. Idempotent; imports nothing.

    If Lightning is not imported yet, registration runs on its import: every import path to a Trainer loads the module
    that the import hook watches.
    """
    after_import("lightning.pytorch.trainer.connectors.accelerator_connector", _register)
    after_import("lightning.pytorch.cli", _explain_errors)
    refuse_names(entry.name for entry in TABLE)


def _register(connectors: ModuleType) -> None:
    for entry in TABLE:
        connectors.StrategyRegistry.register(
            entry.name,
            entry.make,
            description=f"shards {entry.shards}; for when {entry.when}",
            override=True,
            **entry.preset,
        )
    names = {entry.name for entry in TABLE}
    choose_for(connectors, lambda flag: _is_strategy(flag) or flag in names, _find_environment)
    check_names(connectors, partial(refuse_name, known=[entry.name for entry in TABLE]))


def _explain_errors(cli: ModuleType) -> None:
    classes = {entry.name: f"lightning_pardist.{entry.path.rpartition('.')[2]}" for entry in TABLE}
    explain_errors(cli, partial(advise, classes=classes))


def _find_environment() -> Any:
    # Imported only when a Trainer is created: names are registered while lightning.pytorch is being imported.
    return importlib.import_module("lightning_pardist.runtime.environments.find").find()


def _is_strategy(flag: Any) -> bool:
    base = sys.modules.get("lightning_pardist.strategies.strategy")
    return base is not None and isinstance(flag, base.PardistStrategy)
