"""Small third-party-style models for the pipeline, each with patterns typical of its kind, none written to be split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 16


class Block(nn.Module):
    """Pre-norm transformer block that takes a mask and returns a tuple."""

    def __init__(self, width: int = WIDTH, heads: int = 2, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal and mask is None)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x)), mask


class GPT(nn.Module):
    """Tied embedding and head, a position table owned by the root, loss computed outside the model."""

    def __init__(self, layers: int = 4, vocab: int = 23, length: int = 6) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocab, WIDTH)
        self.positions = nn.Parameter(torch.randn(length, WIDTH) * 0.1)
        self.blocks = nn.ModuleList([Block() for _ in range(layers)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocab, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x, _ = block(x)
        return self.head(self.norm(x))

    def training_step(self, batch: Any) -> Tensor:
        tokens, targets = batch
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())

    @staticmethod
    def batch(size: int) -> Any:
        return torch.randint(0, 23, (size, 6)), torch.randint(0, 23, (size, 6))


class CheckpointedGPT(GPT):
    """Activation checkpointing over pairs of blocks, which puts a stage boundary inside a checkpointed region."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.positions[: tokens.shape[1]]
        x = checkpoint(lambda y: self.blocks[0](y)[0] * 2, x, use_reentrant=False)
        x = checkpoint(lambda y: y + self.blocks[2](torch.tanh(self.blocks[1](y)[0]))[0].sin(), x, use_reentrant=False)
        return self.head(self.norm(self.blocks[3](x)[0]))


class ResidualBlock(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.down = None
        if stride > 1:
            self.down = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += x if self.down is None else self.down(x)
        return self.relu(y)


class ResNet(nn.Module):
    """Batch norm, in-place activations between units, a returned dict with more than the loss.

    No biases before the norms: their exact gradients are zero, and rounding noise has no meaningful relative error.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, 1, 1, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(ResidualBlock(8, 8, 1), ResidualBlock(8, 8, 1))
        self.layer2 = nn.Sequential(ResidualBlock(8, 12, 2), ResidualBlock(12, 12, 1))
        self.fc = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn(self.conv(x)))
        return self.fc(self.layer2(self.layer1(x)).mean((2, 3)))

    def training_step(self, batch: Any) -> dict[str, Tensor]:
        logits = self(batch["image"])
        loss = F.cross_entropy(logits, batch["label"])
        return {"loss": loss, "hits": (logits.argmax(1) == batch["label"]).float().mean()}

    @staticmethod
    def batch(size: int) -> Any:
        return {"image": torch.randn(size, 3, 8, 8), "label": torch.randint(0, 5, (size,)), "name": ["x"] * size}


class EncoderDecoder(nn.Module):
    """Encoder-decoder: every decoder block reads the encoder's output and a padding mask, and returns a dict."""

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
            self.cross = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
            self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor, *, memory: Tensor, padding: Tensor) -> dict[str, Tensor]:
            x = x + self.attend(self.norm1(x), x, x, need_weights=False)[0]
            y, weights = self.cross(self.norm2(x), memory, memory, key_padding_mask=padding)
            return {"hidden": x + y, "weights": weights}

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(19, WIDTH), nn.Embedding(17, WIDTH)
        self.encoder = nn.ModuleList([Block(causal=False) for _ in range(2)])
        self.decoder = nn.ModuleList([self.Decoder() for _ in range(3)])
        self.head = nn.Linear(WIDTH, 17)

    def training_step(self, batch: Any) -> Tensor:
        source, target = batch["source"], batch["target"]
        padding = source == 0
        memory = self.source(source)
        mask = ~padding[:, None, None, :].expand(-1, 1, source.shape[1], -1)
        for block in self.encoder:
            memory, mask = block(memory, mask)
        x = self.target(target)
        weights = []
        for block in self.decoder:
            out = block(x, memory=memory, padding=padding)
            x = out["hidden"]
            weights.append(out["weights"])
        sharpness = torch.stack(weights).square().mean()
        return F.cross_entropy(self.head(x).flatten(0, 1), target.flatten(), ignore_index=0) + 0.1 * sharpness

    @staticmethod
    def batch(size: int) -> Any:
        source = torch.randint(1, 19, (size, 7))
        source[:, 5:] *= torch.randint(0, 2, (size, 2))
        return {"source": source, "target": torch.randint(1, 17, (size, 5))}


class UNet(nn.Module):
    """U-Net with skip connections over several stages, single layers as units, upsampling between them."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(c, d, 3, 1, 1) for c, d in ((1, 4), (4, 8), (8, 8))])
        self.up = nn.ModuleList([nn.Conv2d(c, d, 3, 1, 1) for c, d in ((16, 4), (8, 4))])
        self.time = nn.Linear(1, 8)
        self.head = nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        first = F.silu(self.down[0](x))
        second = F.silu(self.down[1](F.max_pool2d(first, 2)))
        third = self.down[2](F.max_pool2d(second, 2)).relu_()
        third = third + self.time(time)[:, :, None, None]
        y = F.silu(self.up[0](torch.cat([F.interpolate(third, scale_factor=2), second], 1)))
        y = self.up[1](torch.cat([F.interpolate(y, scale_factor=2), first], 1)).relu_()
        return self.head(y)

    def training_step(self, batch: Any) -> Tensor:
        image, time = batch
        noise = image.flip(0)
        return F.mse_loss(self(image + time[:, :, None, None] * noise, time), noise)

    @staticmethod
    def batch(size: int) -> Any:
        return [torch.randn(size, 1, 8, 8), torch.rand(size, 1)]


class Experts(nn.Module):
    """Routed experts with data-dependent shapes inside; the balance loss is stored in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.balance: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        chances = self.router(x).softmax(-1)
        self.balance = chances.mean((0, 1)).square().sum()
        weight, choice = chances.max(-1)
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (choice == index).nonzero(as_tuple=True)
            y = y.index_put(rows, expert(x[rows]) * weight[rows].unsqueeze(-1))
        return x + y


class MixtureOfExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, WIDTH)
        self.layers = nn.ModuleList([m for _ in range(2) for m in (Block(), Experts())])
        self.head = nn.Linear(WIDTH, 13)

    def training_step(self, batch: Any) -> dict[str, Any]:
        x = self.embed(batch[0])
        for layer in self.layers:
            x = layer(x)
            x = x[0] if isinstance(x, tuple) else x
        balance = sum(layer.balance for layer in self.layers if isinstance(layer, Experts))
        loss = F.cross_entropy(self.head(x).flatten(0, 1), batch[1].flatten()) + 0.5 * balance
        return {"loss": loss, "balance": balance.detach(), "note": "as it is", "nothing": None}

    @staticmethod
    def batch(size: int) -> Any:
        return torch.randint(0, 13, (size, 5)), torch.randint(0, 13, (size, 5))


@dataclass
class Sentences:
    """User-defined batch class."""

    tokens: Tensor
    lengths: Tensor
    tags: Tensor
    source: str = "corpus"


class Tagger(nn.Module):
    """Tagger with packed sequences between units; the loss is a mean over tokens, not samples."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8, padding_idx=0)
        self.first = nn.LSTM(8, 6, batch_first=True, bidirectional=True)
        self.second = nn.LSTM(12, 6, batch_first=True)
        self.head = nn.Linear(6, 4)

    def training_step(self, batch: Any) -> Tensor:
        x = nn.utils.rnn.pack_padded_sequence(
            self.embed(batch.tokens), batch.lengths, batch_first=True, enforce_sorted=False
        )
        x, _ = self.first(x)
        x, _ = self.second(x)
        x, _ = nn.utils.rnn.pad_packed_sequence(x, batch_first=True)
        tags = batch.tags[:, : x.shape[1]]
        return F.cross_entropy(self.head(x).flatten(0, 1), tags.flatten(), ignore_index=-100)

    @staticmethod
    def batch(size: int) -> Any:
        lengths = torch.randint(2, 6, (size,))
        steps = torch.arange(6)[None, :]
        tokens = torch.randint(1, 11, (size, 6)).where(steps < lengths[:, None], 0)
        tags = torch.randint(0, 4, (size, 6)).where(steps < lengths[:, None], -100)
        return Sentences(tokens, lengths, tags)


@dataclass
class ModelOutput:
    loss: Tensor | None
    logits: Tensor
    hidden_states: tuple[Tensor, ...]
    cache: None = None


class Classifier(nn.Module):
    """The loss inside the model, a dataclass as output, a class token, a block used three times, a frozen layer."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv2d(1, WIDTH, 4, 4)
            self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
            self.shared = Block(causal=False)
            self.layers = nn.ModuleList([Block(causal=False) for _ in range(2)])
            self.layers[0].mlp.requires_grad_(False)
            self.pooler = nn.Linear(WIDTH, 3)
            self.unused = nn.Linear(2, 2)

        def forward(self, pixels: Tensor, labels: Tensor | None = None) -> ModelOutput:
            x = self.patches(pixels).flatten(2).transpose(1, 2)
            x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
            states = [x]
            for layer in (self.shared, self.layers[0], self.shared, self.layers[1], self.shared):
                x = layer(x)[0]
                states.append(x)
            logits = self.pooler(torch.stack(states[1:]).mean(0)[:, 0])
            loss = None if labels is None else F.cross_entropy(logits, labels)
            return ModelOutput(loss, logits, tuple(states))

    def __init__(self) -> None:
        super().__init__()
        self.model = self.Model()

    def training_step(self, batch: Any) -> Tensor:
        output = self.model(batch["pixels"], labels=batch.pop("labels"))
        return output.loss + 0.01 * output.hidden_states[2].square().mean()

    @staticmethod
    def batch(size: int) -> Any:
        return {"pixels": torch.randn(size, 1, 8, 8), "labels": torch.randint(0, 3, (size,))}


ZOO: dict[str, Callable[[], Any]] = {
    "gpt": GPT,
    "checkpointed": CheckpointedGPT,
    "resnet": ResNet,
    "encoder_decoder": EncoderDecoder,
    "unet": UNet,
    "experts": MixtureOfExperts,
    "tagger": Tagger,
    "classifier": Classifier,
}


def count_tokens(batch: Any) -> float:
    """Return the weight of a micro-batch in the mean loss of its batch."""
    if isinstance(batch, Sentences):
        return float((batch.tags != -100).sum())
    if isinstance(batch, dict) and "target" in batch:
        return float((batch["target"] != 0).sum())
    tensors = batch.values() if isinstance(batch, dict) else batch
    return float(len(next(iter(tensors))))


def make(name: str, size: int, seed: int = 0) -> tuple[Any, Any]:
    """Return a model in training mode and a batch, both deterministic in the seed."""
    torch.manual_seed(seed)
    model = ZOO[name]()
    model.train()
    return model, model.batch(size)
