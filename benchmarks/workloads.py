"""The models and the data that every candidate trains on, alike to the last weight and sample."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from benchmarks.settings import Settings
from recipes.gpt.model import Block, init_weights

_POOL = 256


class GPTLoss(nn.Module):
    """The GPT recipe's transformer with its loss inside, for loops that know only ``loss = net(*batch)``."""

    def __init__(self, dim: int, layers: int, heads: int, context: int, vocab_size: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, dim)
        self.positions = nn.Embedding(context, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, 0.0) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        self.apply(init_weights)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class MLPLoss(nn.Module):
    """A perceptron with its loss inside: much to send and to update for little to compute."""

    def __init__(self, features: int, hidden: int, layers: int, classes: int) -> None:
        super().__init__()
        widths = [features, *[hidden] * layers, features]
        stack: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            stack += [nn.Linear(before, after), nn.GELU()]
        self.stack = nn.Sequential(*stack, nn.Linear(features, classes))

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.stack(x), targets)


@dataclass(frozen=True)
class Workload:
    """One model with its data.

    Attributes:
        sizes: Arguments of ``build``, and of ``sample``.
        tiny_sizes: The same for tests.
        batch_size: Samples a rank and step.
        build: Makes the module.
        samples: Makes this many samples, a tuple of tensors stacked along dim 0.
    """

    sizes: dict[str, int]
    tiny_sizes: dict[str, int]
    batch_size: int
    build: Callable[..., nn.Module]
    samples: Callable[[int, dict[str, int], torch.Generator], tuple[Tensor, ...]]


def _text(count: int, sizes: dict[str, int], generator: torch.Generator) -> tuple[Tensor, ...]:
    tokens = torch.randint(sizes["vocab_size"], (count, sizes["context"] + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _vectors(count: int, sizes: dict[str, int], generator: torch.Generator) -> tuple[Tensor, ...]:
    x = torch.randn(count, sizes["features"], generator=generator)
    return x, torch.randint(sizes["classes"], (count,), generator=generator)


WORKLOADS = {
    # 11.5 million parameters: much to compute for what there is to send.
    "gpt": Workload(
        sizes={"dim": 384, "layers": 6, "heads": 6, "context": 128, "vocab_size": 2048},
        tiny_sizes={"dim": 32, "layers": 2, "heads": 2, "context": 16, "vocab_size": 64},
        batch_size=4,
        build=GPTLoss,
        samples=_text,
    ),
    # 13.6 million parameters.
    "mlp": Workload(
        sizes={"features": 1024, "hidden": 2048, "layers": 3, "classes": 1000},
        tiny_sizes={"features": 64, "hidden": 128, "layers": 2, "classes": 10},
        batch_size=16,
        build=MLPLoss,
        samples=_vectors,
    ),
}


def sizes_of(settings: Settings) -> dict[str, int]:
    """The model's sizes in this run.

    Raises:
        ValueError: If the workload or one of the overridden sizes is unknown.
    """
    if settings.model not in WORKLOADS:
        raise ValueError(f"model={settings.model!r} is unknown. Use one of {', '.join(WORKLOADS)}.")
    workload = WORKLOADS[settings.model]
    sizes = workload.tiny_sizes if settings.tiny else workload.sizes
    unknown = sorted(set(settings.model_options or {}) - set(sizes))
    if unknown:
        raise ValueError(f"{unknown[0]!r} is no size of {settings.model}. Use {', '.join(sizes)}.")
    return sizes | (settings.model_options or {})


def batch_size_of(settings: Settings) -> int:
    """Samples a rank and step in this run."""
    return settings.batch_size or (2 if settings.tiny else WORKLOADS[settings.model].batch_size)


def make_net(settings: Settings) -> nn.Module:
    """The module, with the same weights on every rank and for every candidate."""
    torch.manual_seed(settings.seed)
    return WORKLOADS[settings.model].build(**sizes_of(settings))


def make_optimizer(net: nn.Module) -> Optimizer:
    """The optimizer that every candidate steps."""
    return AdamW(net.parameters(), lr=1e-3)


class Task(LightningModule):
    """The module as a Lightning user has it."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.net = make_net(settings)

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        return self.net(*batch)

    def configure_optimizers(self) -> Optimizer:
        return make_optimizer(self.net)


class _Samples(Dataset[tuple[Tensor, ...]]):
    """As many samples as the run needs, from a pool that is made once: an epoch that never ends."""

    def __init__(self, settings: Settings, world_size: int) -> None:
        generator = torch.Generator().manual_seed(settings.seed)
        self.pool = WORKLOADS[settings.model].samples(_POOL, sizes_of(settings), generator)
        self.length = settings.total_steps * batch_size_of(settings) * world_size

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(part[index % _POOL] for part in self.pool)


def make_loader(settings: Settings, *, rank: int, world_size: int) -> DataLoader:
    """This rank's batches, :attr:`Settings.total_steps` of them."""
    samples = _Samples(settings, world_size)
    sampler = DistributedSampler(samples, num_replicas=world_size, rank=rank, shuffle=False)
    return DataLoader(samples, batch_size=batch_size_of(settings), sampler=sampler)
