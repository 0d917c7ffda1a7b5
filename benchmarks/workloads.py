"""Models and data that every candidate trains on, identical in all weights and samples."""

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
    """The GPT recipe's transformer with its loss inside, for training loops of the form ``loss = net(*batch)``."""

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


class MixtralLoss(nn.Module):
    """Mixtral of transformers with its loss inside: two experts per token in each layer."""

    def __init__(self, dim: int, hidden: int, layers: int, heads: int, experts: int, context: int, vocab_size: int):
        super().__init__()
        # Imported here because only this workload needs transformers.
        from transformers import MixtralConfig, MixtralForCausalLM

        config = MixtralConfig(
            vocab_size=vocab_size,
            hidden_size=dim,
            intermediate_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            num_local_experts=experts,
            num_experts_per_tok=2,
            max_position_embeddings=context,
            use_cache=False,
        )
        self.model = MixtralForCausalLM(config)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.model(tokens).logits.flatten(0, 1), targets.flatten())


class MLPLoss(nn.Module):
    """MLP with its loss inside: communication and update dominate."""

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
        sizes: Arguments of ``build``, and of ``samples``.
        tiny_sizes: The same for tests.
        batch_size: Samples per rank and step.
        build: Creates the module.
        samples: Creates this many samples, a tuple of tensors stacked along dim 0.
        whole_batches: Whether batches are created once, in pinned memory for a device, to avoid collating samples in
            steps.
        lr: Learning rate.
        flops: Model FLOPs of forward and backward of one sample.
    """

    sizes: dict[str, int]
    tiny_sizes: dict[str, int]
    batch_size: int
    build: Callable[..., nn.Module]
    samples: Callable[[int, dict[str, int], torch.Generator], tuple[Tensor, ...]]
    whole_batches: bool = False
    lr: float = 1e-3
    flops: Callable[[dict[str, int]], float] | None = None


def _text(count: int, sizes: dict[str, int], generator: torch.Generator) -> tuple[Tensor, ...]:
    tokens = torch.randint(sizes["vocab_size"], (count, sizes["context"] + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _skewed_text(count: int, sizes: dict[str, int], generator: torch.Generator) -> tuple[Tensor, ...]:
    """Return tokens of very unequal frequency: a falling loss then shows that training works."""
    drawn = torch.rand(count, sizes["context"] + 1, generator=generator)
    tokens = (drawn.pow(8) * sizes["vocab_size"]).long()
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _gpt_flops(sizes: dict[str, int]) -> float:
    """Return ``6 N + 12 L d T`` a token (PaLM, arXiv 2204.02311, appendix B), N without positions, norms and biases."""
    dim, layers, context = sizes["dim"], sizes["layers"], sizes["context"]
    numel = 12 * layers * dim**2 + sizes["vocab_size"] * dim
    return float(context * (6 * numel + 12 * layers * dim * context))


def _vectors(count: int, sizes: dict[str, int], generator: torch.Generator) -> tuple[Tensor, ...]:
    x = torch.randn(count, sizes["features"], generator=generator)
    return x, torch.randint(sizes["classes"], (count,), generator=generator)


WORKLOADS = {
    # 11.5 million parameters: compute-bound.
    "gpt": Workload(
        sizes={"dim": 384, "layers": 6, "heads": 6, "context": 128, "vocab_size": 2048},
        tiny_sizes={"dim": 32, "layers": 2, "heads": 2, "context": 16, "vocab_size": 64},
        batch_size=4,
        build=GPTLoss,
        samples=_text,
    ),
    # GPT-2 with 124 and 354 million parameters, the vocabulary padded to a multiple of 64.
    **{
        name: Workload(
            sizes={"dim": dim, "layers": layers, "heads": dim // 64, "context": 1024, "vocab_size": 50304},
            tiny_sizes={"dim": 32, "layers": 2, "heads": 2, "context": 16, "vocab_size": 64},
            batch_size=batch_size,
            build=GPTLoss,
            samples=_skewed_text,
            whole_batches=True,
            lr=3e-4,
            flops=_gpt_flops,
        )
        for name, dim, layers, batch_size in (("gpt2-124m", 768, 12, 16), ("gpt2-350m", 1024, 24, 8))
    },
    # 14.7 million parameters, 12.6 million of them in experts.
    "mixtral": Workload(
        sizes={
            **{"dim": 256, "hidden": 512, "layers": 4, "heads": 8, "experts": 8},
            **{"context": 128, "vocab_size": 2048},
        },
        tiny_sizes={
            **{"dim": 32, "hidden": 48, "layers": 2, "heads": 2, "experts": 4},
            **{"context": 16, "vocab_size": 64},
        },
        batch_size=4,
        build=MixtralLoss,
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
    """Return the model's sizes in this run.

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
    """Return the samples per rank and step in this run."""
    return settings.batch_size or (2 if settings.tiny else WORKLOADS[settings.model].batch_size)


def flops_of(settings: Settings) -> float | None:
    """Return the model FLOPs of forward and backward of one sample, None if the workload does not define them."""
    count = WORKLOADS[settings.model].flops
    return None if count is None else count(sizes_of(settings))


def make_net(settings: Settings) -> nn.Module:
    """Return the module, with the same weights on every rank and for every candidate."""
    torch.manual_seed(settings.seed)
    return WORKLOADS[settings.model].build(**sizes_of(settings))


def make_optimizer(net: nn.Module, settings: Settings) -> Optimizer:
    """Return the optimizer of every candidate: torch's AdamW, fused on a device."""
    fused = True if settings.accelerator != "cpu" else None
    return AdamW(net.parameters(), lr=WORKLOADS[settings.model].lr, fused=fused)


class Task(LightningModule):
    """LightningModule around the module."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings
        self.net = make_net(settings)

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        return self.net(*batch)

    def configure_optimizers(self) -> Optimizer:
        return make_optimizer(self.net, self.settings)


class _Samples(Dataset[tuple[Tensor, ...]]):
    """Samples for the whole run as one epoch, from a pool that is created once."""

    def __init__(self, settings: Settings, world_size: int) -> None:
        generator = torch.Generator().manual_seed(settings.seed)
        self.pool = WORKLOADS[settings.model].samples(_POOL, sizes_of(settings), generator)
        self.length = settings.total_steps * batch_size_of(settings) * world_size

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(part[index % _POOL] for part in self.pool)


class _Batches(Dataset[tuple[Tensor, ...]]):
    """Batches of one rank for the whole run, from a pool of whole batches that is created once."""

    def __init__(self, settings: Settings, rank: int, world_size: int) -> None:
        generator = torch.Generator().manual_seed(settings.seed)
        size = batch_size_of(settings)
        count = world_size * max(1, _POOL // (size * world_size))
        samples = WORKLOADS[settings.model].samples(count * size, sizes_of(settings), generator)
        parts = [part.pin_memory() if settings.accelerator != "cpu" else part for part in samples]
        batches = list(zip(*(part.split(size) for part in parts), strict=True))
        self.batches = batches[rank::world_size]
        self.length = settings.total_steps

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return self.batches[index % len(self.batches)]


def make_loader(settings: Settings, *, rank: int, world_size: int) -> DataLoader:
    """Return a loader of this rank's batches, :attr:`Settings.total_steps` of them."""
    if WORKLOADS[settings.model].whole_batches:
        return DataLoader(_Batches(settings, rank, world_size), batch_size=None)
    samples = _Samples(settings, world_size)
    sampler = DistributedSampler(samples, num_replicas=world_size, rank=rank, shuffle=False)
    return DataLoader(samples, batch_size=batch_size_of(settings), sampler=sampler)
