"""Training of one family once: on one process or as one rank of a strategy, with commonly used Trainer options."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks.differential.families import Family, families, without_dropout
from lightning_pardist import HybridStrategy
from tests.helpers.gpu import SharedGPU

STEPS = 3
ACCUMULATE = 2
BATCH = 8


class Foreign(pl.LightningModule):
    """Lightning module around a family's unmodified model and its own loss."""

    def __init__(self, family: Family) -> None:
        super().__init__()
        self.family = family
        self.model = without_dropout(family.build())

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        loss = self.family.loss(self.model, batch)
        self.loss_dtype = loss.dtype
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Momentum, and an epsilon far above zero: gradients that are pure rounding noise are not amplified.
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-4)


class Samples(pl.LightningDataModule):
    """Global batches in order; every rank takes its part by the strategy's own sampler arguments."""

    def __init__(self, family: Family) -> None:
        super().__init__()
        self.dataset = TensorDataset(*family.batch(BATCH * STEPS * ACCUMULATE, torch.Generator().manual_seed(6)))

    def train_dataloader(self) -> DataLoader[Any]:
        kwargs = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}
        sampler = DistributedSampler(self.dataset, shuffle=False, **kwargs)
        return DataLoader(self.dataset, batch_size=BATCH // kwargs["num_replicas"], sampler=sampler)


#: Short forms of degrees: ``cp2_tp2`` is a HybridStrategy with two context-parallel and two tensor-parallel ranks.
_AXES = {"pp": "pipeline", "tp": "tensor", "cp": "context", "ep": "expert"}


def degrees_of(strategy: str) -> dict[str, int]:
    """Return the arguments of a HybridStrategy named by its degrees; none for a registered name."""
    parts = [re.fullmatch(r"([a-z]+)(\d+)", part) for part in strategy.split("_")]
    if not all(part and part[1] in _AXES for part in parts):
        return {}
    return {f"{_AXES[part[1]]}_parallel_size": int(part[2]) for part in parts if part}


def train(
    name: str, strategy: str, devices: int, folder: str, double: bool, accelerator: str = "cpu"
) -> dict[str, Any]:
    """Run three optimizer steps with accumulation, clipping and a checkpoint after the second.

    Args:
        name: Name of the family.
        strategy: Registered name, or degrees; ``"auto"`` for one process.
        devices: Number of ranks.
        folder: Folder of the checkpoint.
        double: Whether to train in fp64.
        accelerator: ``"cpu"``, or ``"gpu"`` for one GPU that all ranks share.

    Returns:
        Final weights and logged values, both as on one process, whether there are batch norms, and whether the model
        computed its loss in fp64.
    """
    warnings.filterwarnings("ignore")
    family = next(family for family in families() if family.name == name)
    torch.manual_seed(4)
    module = Foreign(family)
    save = pl.callbacks.ModelCheckpoint(dirpath=folder, every_n_train_steps=2, filename="half")
    trainer = pl.Trainer(
        accelerator=SharedGPU() if accelerator == "gpu" else accelerator,
        strategy=HybridStrategy(**degrees) if (degrees := degrees_of(strategy)) else strategy,  # type: ignore[arg-type]
        devices=devices,
        precision="64-true" if double else "32-true",
        max_epochs=1,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=0.5,
        callbacks=[save],
        use_distributed_sampler=False,
        sync_batchnorm=devices > 1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=Samples(family))
    weights = {key: value.detach().to("cpu", copy=True) for key, value in module.state_dict().items()}
    batch_norms = any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules())
    logged = {"loss": trainer.callback_metrics["loss_epoch"].detach().to("cpu", copy=True)}
    # Read by the caller on one process only: pipeline stages before the last have no loss.
    wide_loss = getattr(module, "loss_dtype", None) == torch.float64
    return {"weights": weights, "logged": logged, "batch norms": batch_norms, "fp64 loss": wide_loss}


def saved_weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights of the checkpoint saved after the second step."""
    state: dict[str, Tensor] = torch.load(folder / "half.ckpt", weights_only=False, map_location="cpu")["state_dict"]
    return state


def difference(got: dict[str, Tensor], want: dict[str, Tensor]) -> tuple[float, str]:
    """Return the largest difference, relative to each tensor's largest value (or 1e-3), and the name of its tensor.

    Returns:
        Infinity if names or shapes differ.
    """
    if got.keys() != want.keys():
        return float("inf"), ", ".join(sorted(got.keys() ^ want.keys()))
    worst = (0.0, "")
    for key, wanted in want.items():
        if got[key].shape != wanted.shape:
            return float("inf"), key
        if wanted.numel():
            scale = max(wanted.abs().max().item(), 1e-3)
            error = (got[key].double() - wanted.double()).abs().max().item() / scale
            if not error <= worst[0]:
                worst = (error, key)
    return worst
