"""Run the same training under a strategy on several ranks, and on one process."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from tests.helpers.gpu import accelerator
from tests.helpers.models import MODULES
from tests.helpers.parity import snapshot

STEPS = 4
BATCH = 12  # global: divides by 1, 2, 3 and 4 ranks


def quiet_trainer(**kwargs: Any) -> pl.Trainer:
    """Return a Trainer without files, progress bars and tables, on :func:`~tests.helpers.gpu.accelerator`."""
    defaults: dict[str, Any] = {
        "accelerator": accelerator(),
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 1,
    }
    warnings.filterwarnings("ignore")
    return pl.Trainer(**(defaults | kwargs))


class Losses(pl.Callback):
    """Callback that records this rank's loss of every batch, and the final optimizer state as checkpoints store it."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.optimizer_state: dict[str, Tensor] = {}

    def on_train_end(self, trainer, pl_module) -> None:
        self.optimizer_state = _flat_state([trainer.strategy.optimizer_state(opt) for opt in trainer.optimizers])

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        self.losses.append(loss.detach().clone())


class Data(pl.LightningDataModule):
    """Sequential global batches; ranks take their part by the strategy's own sampler arguments."""

    def __init__(self, dataset: Dataset, global_batch: int = BATCH) -> None:
        super().__init__()
        self.dataset = dataset
        self.global_batch = global_batch

    def train_dataloader(self) -> DataLoader:
        kwargs = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}
        sampler = DistributedSampler(self.dataset, shuffle=False, **kwargs)
        return DataLoader(self.dataset, batch_size=self.global_batch // kwargs["num_replicas"], sampler=sampler)


def train(
    strategy: Any,
    devices: int,
    module_name: str,
    module_kwargs: dict,
    trainer_kwargs: dict,
) -> dict[str, Any]:
    """Train and return comparable results on the CPU: global losses, weights, optimizer state, logged metrics.

    Dedicated server ranks have no losses.
    """
    torch.manual_seed(11)
    module = MODULES[module_name](**module_kwargs)
    steps = STEPS * trainer_kwargs.get("accumulate_grad_batches", 1)
    losses_of = Losses()
    trainer = quiet_trainer(
        strategy=strategy() if callable(strategy) else strategy,
        devices=devices,
        use_distributed_sampler=False,
        callbacks=[losses_of],
        **trainer_kwargs,
    )
    trainer.fit(module, datamodule=Data(module.dataset(BATCH * steps)))
    found = {
        "losses": {"loss": global_losses(losses_of.losses, devices)} if losses_of.losses else {},
        "weights": snapshot(module),
        "metrics": {k: v.clone() for k, v in trainer.callback_metrics.items() if k.endswith("_epoch")},
        "optimizer": losses_of.optimizer_state,
    }
    return {part: {name: value.cpu() for name, value in values.items()} for part, values in found.items()}


def global_losses(losses: list[Tensor], devices: int) -> Tensor:
    """Return the losses of global batches as means over ranks. Collective over the world if there are several ranks."""
    of_steps = torch.stack(losses)
    if devices > 1:
        dist.all_reduce(of_steps)
        of_steps /= dist.get_world_size()
    return of_steps


def _flat_state(states: list[dict[str, Any]]) -> dict[str, Tensor]:
    flat = {}
    for index, optimizer_state in enumerate(states):
        for number, state in optimizer_state["state"].items():
            if not isinstance(state, dict):
                # A value that belongs to no parameter.
                flat[f"{index}.{number}"] = torch.as_tensor(state).double()
                continue
            tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
            flat |= {f"{index}.{number}.{key}": value.detach().double().clone() for key, value in tensors.items()}
    return flat
