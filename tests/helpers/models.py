"""Plain Lightning modules for the test matrix, written without any regard to parallelism."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from recipes.cifar.model import PhotoClassifier
from recipes.gpt.model import GPT
from recipes.mnist.model import DigitClassifier
from tests.helpers import experts


def points(length: int) -> TensorDataset:
    """Return samples of six numbers, with the sine of their sum as target."""
    x = torch.randn(length, 6, generator=torch.Generator().manual_seed(3))
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


class Base(pl.LightningModule):
    """Base module with an optimizer chosen by name, which records and logs the loss of every step."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__()
        self.optimizer_name = optimizer
        self.losses: list[Tensor] = []

    def note(self, loss: Tensor) -> Tensor:
        self.losses.append(loss.detach().clone())
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def make_optimizer(self, params, lr: float = 0.1):
        if self.optimizer_name == "sgd":
            return torch.optim.SGD(params, lr=lr, momentum=0.9)
        # A large eps: a tiny one turns rounding noise of near-zero gradients into full steps.
        return torch.optim.AdamW(params, lr=lr / 10, eps=1e-3, fused=self.optimizer_name == "fused" or None)

    def configure_optimizers(self):
        return self.make_optimizer(self.parameters())


class Classifier(Base):
    """Small convolutional network on MNIST-like images."""

    def __init__(self, **kwargs) -> None:
        super().__init__(**kwargs)
        self.net = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 16), nn.ReLU()
        )
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        return self.head(self.net(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return self.note(F.cross_entropy(self(x), y))

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y))

    @staticmethod
    def dataset(length: int) -> TensorDataset:
        return _images(length, 1, 8)


class ParamGroups(Classifier):
    """Classifier with two parameter groups and a scheduler."""

    def configure_optimizers(self):
        decay = [p for p in self.parameters() if p.dim() > 1]
        rest = [p for p in self.parameters() if p.dim() <= 1]
        optimizer = torch.optim.AdamW(
            [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 0.02}],
            lr=0.01,
            eps=1e-3,
        )
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class DeepParamGroups(ParamGroups):
    """ParamGroups with enough layers for eight stages or more."""

    def __init__(self, **kwargs) -> None:
        super().__init__(**kwargs)
        self.head = nn.Sequential(
            *(layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.Tanh())), nn.Linear(16, 10)
        )


class BatchNormNet(Classifier):
    """Network with batch normalisation, equal to one process with ``sync_batchnorm``.

    No biases before the norms: their exact gradients are zero, and rounding noise has no meaningful relative error.
    """

    def __init__(self, **kwargs) -> None:
        super().__init__(**kwargs)
        self.net = nn.Sequential(
            nn.Conv2d(1, 4, 3, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(144, 16, bias=False),
            nn.BatchNorm1d(16),
        )


class Gan(Base):
    """GAN with manual optimization and two optimizers, one of them toggled."""

    def __init__(self, **kwargs) -> None:
        super().__init__(**kwargs)
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))
        self.discriminator = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        noise, real = batch
        opt_g, opt_d = self.optimizers()
        self.toggle_optimizer(opt_g)
        loss_g = F.softplus(-self.discriminator(self.generator(noise))).mean()
        self.manual_backward(loss_g)
        self.clip_gradients(opt_g, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        opt_g.step()
        opt_g.zero_grad()
        self.untoggle_optimizer(opt_g)
        fake = self.generator(noise).detach()
        loss_d = F.softplus(self.discriminator(fake)).mean() + F.softplus(-self.discriminator(real)).mean()
        opt_d.zero_grad()
        self.manual_backward(loss_d)
        opt_d.step()
        return self.note((loss_g + loss_d).detach())

    def configure_optimizers(self):
        return [self.make_optimizer(self.generator.parameters()), self.make_optimizer(self.discriminator.parameters())]

    @staticmethod
    def dataset(length: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(7)
        return TensorDataset(
            torch.randn(length, 4, generator=generator), torch.randn(length, 6, generator=generator) + 1
        )


class Awkward(Base):
    """Unused, step-dependent, shared, frozen, scalar and zero-sized parameters in one module."""

    def __init__(self, **kwargs) -> None:
        super().__init__(**kwargs)
        self.embed = nn.Embedding(5, 6)
        self.left, self.right, self.never = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.head = nn.Linear(6, 5, bias=False)
        self.head.weight = self.embed.weight

    def training_step(self, batch, batch_idx):
        (tokens,) = batch
        x = self.frozen(self.embed(tokens)) * self.scale + self.empty.sum()
        way = self.left if batch_idx % 2 else self.right
        return self.note(F.cross_entropy(self.head(way(way(x)).tanh()), (tokens + 1) % 5))

    @staticmethod
    def dataset(length: int) -> TensorDataset:
        return TensorDataset(torch.randint(0, 5, (length,), generator=torch.Generator().manual_seed(7)))


class LargeEmbedding(Base):
    """Model with nearly all parameters in one embedding, with an odd number of rows."""

    def __init__(self, **kwargs) -> None:
        super().__init__(**kwargs)
        self.embed = nn.Embedding(1001, 12)
        self.head = nn.Linear(12, 3)

    def training_step(self, batch, batch_idx):
        tokens, target = batch
        return self.note(F.cross_entropy(self.head(self.embed(tokens).mean(1)), target))

    @staticmethod
    def dataset(length: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(7)
        return TensorDataset(
            torch.randint(0, 1001, (length, 5), generator=generator),
            torch.randint(0, 3, (length,), generator=generator),
        )


class Digits(DigitClassifier):
    """MNIST recipe."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(dropout=0.0)
        self.optimizer_name = optimizer

    configure_optimizers = Base.configure_optimizers
    make_optimizer = Base.make_optimizer

    @staticmethod
    def dataset(length: int) -> TensorDataset:
        return _images(length, 1, 28)


class Text(GPT):
    """GPT recipe: tied head, weight-decay groups, warmup and cosine."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(
            dim=16, layers=2, heads=2, context=8, vocab_size=17, dropout=0.0, eps=1e-3, warmup_steps=2, sample_tokens=0
        )

    @staticmethod
    def dataset(length: int) -> TensorDataset:
        tokens = torch.randint(0, 17, (length, 9), generator=torch.Generator().manual_seed(7))
        return TensorDataset(tokens[:, :-1], tokens[:, 1:])


class Photos(PhotoClassifier):
    """CIFAR recipe: torchvision's ResNet-18."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(lr=0.01)

    @staticmethod
    def dataset(length: int) -> TensorDataset:
        return _images(length, 3, 16)


def _images(length: int, channels: int, size: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    return TensorDataset(
        torch.randn(length, channels, size, size, generator=generator),
        torch.randint(0, 10, (length,), generator=generator),
    )


class Experts(Base):
    """Mixture of listed and stacked experts."""

    def __init__(self, **kwargs) -> None:
        super().__init__(**kwargs)
        self.embed = nn.Embedding(20, experts.WIDTH)
        self.listed, self.stacked = experts.Listed(), experts.Stacked()
        self.head = nn.Linear(experts.WIDTH, 3)

    def training_step(self, batch, batch_idx):
        tokens, target = batch
        return self.note(F.cross_entropy(self.head(self.stacked(self.listed(self.embed(tokens))).mean(1)), target))

    @staticmethod
    def dataset(length: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(7)
        return TensorDataset(
            torch.randint(0, 20, (length, 5), generator=generator),
            torch.randint(0, 3, (length,), generator=generator),
        )


MODULES: dict[str, type[pl.LightningModule]] = {
    "mnist": Digits,
    "gpt": Text,
    "cifar": Photos,
    "classifier": Classifier,
    "param_groups": ParamGroups,
    "deep_param_groups": DeepParamGroups,
    "batch_norm": BatchNormNet,
    "gan": Gan,
    "awkward": Awkward,
    "large_embedding": LargeEmbedding,
    "experts": Experts,
}
