"""Functions and classes of Lightning that only have a private name."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from lightning.fabric.strategies.fsdp import _move_torchmetrics_to_device as move_torchmetrics_to_device
from lightning.fabric.strategies.launchers.subprocess_script import _HYDRA_AVAILABLE as HYDRA_AVAILABLE
from lightning.fabric.strategies.launchers.subprocess_script import _basic_subprocess_cmd as basic_subprocess_cmd
from lightning.fabric.strategies.launchers.subprocess_script import _hydra_subprocess_cmd as hydra_subprocess_cmd
from lightning.fabric.utilities.cloud_io import _load as load_from_url
from lightning.fabric.utilities.data import _auto_add_worker_init_fn
from lightning.fabric.utilities.data import _set_sampler_epoch as set_sampler_epoch
from lightning.fabric.utilities.device_dtype_mixin import _update_properties as update_device
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed as set_num_threads_if_needed
from lightning.fabric.utilities.imports import _IS_INTERACTIVE as IS_INTERACTIVE
from lightning.fabric.utilities.init import _materialize_distributed_module as materialize_module
from lightning.fabric.utilities.optimizer import _optimizers_to_device as optimizers_to_device
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.fabric.utilities.types import _PATH as PATH
from lightning.fabric.utilities.types import _Stateful as Stateful
from lightning.pytorch.core.optimizer import _configure_optimizers as configure_optimizers
from lightning.pytorch.core.saving import _load_state as load_module_state
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO as WrappingCheckpointIO
from lightning.pytorch.plugins.precision.half import HalfPrecision
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher as MultiProcessingLauncher
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher as SubprocessScriptLauncher
from lightning.pytorch.utilities.data import _update_dataloader as update_dataloader
from lightning.pytorch.utilities.exceptions import _TunerExitException as TunerExitException

from lightning_pardist.compat.contract import Private

_LAUNCH = "starting ranks with Lightning's arguments"
_COPY = "a copy of the function"
_LOADERS = "loaders of any subclass with another sampler"
NAMES = (
    Private("lightning.fabric.strategies.fsdp._move_torchmetrics_to_device", "metrics of a sharded module", _COPY),
    Private("lightning.fabric.strategies.launchers.subprocess_script._HYDRA_AVAILABLE", _LAUNCH, _COPY),
    Private("lightning.fabric.strategies.launchers.subprocess_script._basic_subprocess_cmd", _LAUNCH, _COPY),
    Private("lightning.fabric.strategies.launchers.subprocess_script._hydra_subprocess_cmd", _LAUNCH, _COPY),
    Private("lightning.fabric.utilities.cloud_io._load", "checkpoints behind URLs", "fsspec and torch.load"),
    Private("lightning.fabric.utilities.data._auto_add_worker_init_fn", "random numbers in workers of loaders",
            "worker_init_fn=partial(pl_worker_init_function, rank=...)"),
    Private("lightning.fabric.utilities.data._set_sampler_epoch", "the order of samples of an epoch", _COPY),
    Private("lightning.fabric.utilities.device_dtype_mixin._update_properties", "self.device of a module on meta",
            _COPY),
    Private("lightning.fabric.utilities.distributed._set_num_threads_if_needed", _LAUNCH, _COPY),
    Private("lightning.fabric.utilities.imports._IS_INTERACTIVE", "notebooks", 'hasattr(sys, "ps1")'),
    Private("lightning.fabric.utilities.init._materialize_distributed_module", "modules that shard themselves", _COPY),
    Private("lightning.fabric.utilities.optimizer._optimizers_to_device", "optimizer state on the device", _COPY),
    Private("lightning.fabric.utilities.types._PATH", "signatures of Lightning's methods", "str | os.PATH"),
    Private("lightning.fabric.utilities.types._Stateful", "loaders with a state of their own",
            "state_dict and load_state_dict"),
    Private("lightning.pytorch.core.optimizer._configure_optimizers", "self.optimizers() in a trial run", _COPY),
    Private("lightning.pytorch.core.saving._load_state", "modules out of a checkpoint folder",
            "a single file, and load_from_checkpoint"),
    Private("lightning.pytorch.plugins.io.wrapper._WrappingCheckpointIO", "asynchronous saving", "AsyncCheckpointIO"),
    Private("lightning.pytorch.plugins.precision.half.HalfPrecision._desired_input_dtype", "half precision of shards",
            "the precision's name"),
    Private("lightning.pytorch.strategies.launchers._MultiProcessingLauncher", _LAUNCH, "a launcher of our own"),
    Private("lightning.pytorch.strategies.launchers._SubprocessScriptLauncher", _LAUNCH, "a launcher of our own"),
    Private("lightning.pytorch.strategies.launchers._MultiProcessingLauncher._start_method", _LAUNCH,
            "the argument of the strategy"),
    Private("lightning.pytorch.strategies.launchers._SubprocessScriptLauncher._check_can_spawn_children", _LAUNCH,
            _COPY),
    Private("lightning.pytorch.utilities.data._update_dataloader", _LOADERS, _COPY),
    Private("lightning.pytorch.utilities.exceptions._TunerExitException", "the tuner under spawn", _COPY),
)  # fmt: skip

__all__ = [
    "HYDRA_AVAILABLE",
    "IS_INTERACTIVE",
    "PATH",
    "MultiProcessingLauncher",
    "Stateful",
    "SubprocessScriptLauncher",
    "TunerExitException",
    "WrappingCheckpointIO",
    "basic_subprocess_cmd",
    "check_can_spawn_children",
    "configure_optimizers",
    "half_dtype",
    "hydra_subprocess_cmd",
    "load_from_url",
    "load_module_state",
    "materialize_module",
    "move_torchmetrics_to_device",
    "optimizers_to_device",
    "seed_workers",
    "set_num_threads_if_needed",
    "set_sampler_epoch",
    "start_method",
    "update_dataloader",
    "update_device",
]


def seed_workers(loader: Any, rank: int) -> None:
    """Seed a loader's workers as ``seed_everything(workers=True)`` does, with a rank other than the global one.

    Args:
        loader: Any loader; one without workers, or with a ``worker_init_fn`` of the user's, is left unchanged.
        rank: Workers of ranks with the same number draw the same random numbers.
    """
    if getattr(loader, "worker_init_fn", None) is pl_worker_init_function:
        # Set by the user; it uses the global rank by default.
        loader.worker_init_fn = partial(pl_worker_init_function, rank=rank)
    _auto_add_worker_init_fn(loader, rank)


def half_dtype(plugin: HalfPrecision) -> torch.dtype:
    """Return the dtype of ``precision="bf16-true"`` and ``"16-true"``."""
    return plugin._desired_input_dtype


def start_method(launcher: MultiProcessingLauncher) -> str:
    """Return ``"spawn"`` or ``"fork"``."""
    method: str = launcher._start_method
    return method


def check_can_spawn_children(launcher: SubprocessScriptLauncher) -> None:
    """Check that this process is not itself a launched rank.

    Raises:
        RuntimeError: If this process was started as a rank.
    """
    launcher._check_can_spawn_children()
