"""Small convolutional classifier of MNIST digits."""

from __future__ import annotations

import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn, optim
from torchmetrics.classification import MulticlassAccuracy


class DigitClassifier(LightningModule):
    """Two convolutions and two linear layers: 28x28 grey images in, ten classes out.

    Args:
        lr: Learning rate of Adam.
        dropout: Share of units dropped before each linear layer; 0 makes runs on any number of devices comparable.
    """

    def __init__(self, lr: float = 1e-3, dropout: float = 0.25) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, 32, kernel_size=3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, kernel_size=3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(64 * 5 * 5, 128),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(128, 10),
        )
        self.train_acc = MulticlassAccuracy(num_classes=10, average="micro")
        self.val_acc = MulticlassAccuracy(num_classes=10, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        """Return logits ``[batch, 10]`` for images ``[batch, 1, 28, 28]``."""
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

    def configure_optimizers(self) -> optim.Optimizer:
        return optim.Adam(self.parameters(), lr=self.hparams.lr)
