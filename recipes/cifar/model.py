"""Classifier of 32x32 images: torchvision's ResNet-18 with a stem for small images."""

from __future__ import annotations

import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn, optim
from torchmetrics.classification import MulticlassAccuracy

from recipes.common import require

require("torchvision", "skimage", "sklearn", "tensorboard", recipe="cifar")

from torchvision.models import resnet18  # noqa: E402


class PhotoClassifier(LightningModule):
    """ResNet-18 on 32x32 photographs. The stem keeps the input's resolution (stride 1, no max-pooling).

    Args:
        lr: Highest learning rate of SGD, reached early and then lowered to 0 (one-cycle schedule).
        momentum: Momentum of SGD.
        weight_decay: Decay of all parameters.
        num_classes: Number of classes.
    """

    def __init__(
        self, lr: float = 0.05, momentum: float = 0.9, weight_decay: float = 5e-4, num_classes: int = 10
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = resnet18(num_classes=num_classes)
        self.net.conv1 = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)
        self.net.maxpool = nn.Identity()
        self.train_acc = MulticlassAccuracy(num_classes=num_classes, average="micro")
        self.val_acc = MulticlassAccuracy(num_classes=num_classes, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``[batch, num_classes]`` for images ``[batch, 3, 32, 32]``."""
        return self.net(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        logits = self(images)
        loss = F.cross_entropy(logits, labels)
        self.train_acc(logits, labels)
        self.log("train_loss", loss, prog_bar=True, batch_size=len(labels))
        self.log("train_acc", self.train_acc, on_step=False, on_epoch=True, batch_size=len(labels))
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        self.val_acc(logits, labels)
        self.log("val_loss", F.cross_entropy(logits, labels), prog_bar=True, sync_dist=True, batch_size=len(labels))
        self.log("val_acc", self.val_acc, prog_bar=True, batch_size=len(labels))

    def configure_optimizers(self) -> dict:
        hp = self.hparams
        optimizer = optim.SGD(
            self.parameters(), lr=hp.lr, momentum=hp.momentum, weight_decay=hp.weight_decay, nesterov=hp.momentum > 0
        )
        steps = self.trainer.estimated_stepping_batches
        schedule = optim.lr_scheduler.OneCycleLR(optimizer, max_lr=hp.lr, total_steps=steps, cycle_momentum=False)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
