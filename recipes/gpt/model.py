"""Decoder-only transformer for next-byte prediction."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn, optim
from torchmetrics.text import Perplexity


class Attention(nn.Module):
    """Causal self-attention with queries, keys and values from one projection."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, dim // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(dim, dim=2)
        )
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, dim))


class Block(nn.Module):
    """Pre-norm transformer block: attention and a two-layer perceptron, each with a residual connection."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads, dropout)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(LightningModule):
    """Language model that predicts each next byte of a text and prints a generated sample when training ends.

    Args:
        dim: Width of the residual stream.
        layers: Number of blocks.
        heads: Attention heads a block; must divide ``dim``.
        context: Maximum number of tokens attended to.
        vocab_size: Number of tokens; 256 for bytes.
        dropout: Share of activations dropped; 0 makes runs on any number of devices comparable.
        lr: Highest learning rate, reached after the warmup.
        warmup_steps: Steps from a learning rate of nearly 0 to ``lr``; a cosine then leads to a tenth of it.
        weight_decay: Decay of matrices; biases and norms are not decayed.
        eps: AdamW's epsilon.
        sample_tokens: Tokens written when training ends; 0 for none.
    """

    def __init__(
        self,
        dim: int = 128,
        layers: int = 4,
        heads: int = 4,
        context: int = 64,
        vocab_size: int = 256,
        dropout: float = 0.1,
        lr: float = 3e-3,
        warmup_steps: int = 100,
        weight_decay: float = 0.1,
        eps: float = 1e-8,
        sample_tokens: int = 300,
    ) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"heads={heads} does not divide dim={dim}. Use a divisor of dim.")
        self.save_hyperparameters()
        self.embed = nn.Embedding(vocab_size, dim)
        self.positions = nn.Embedding(context, dim)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(dim, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        self.apply(init_weights)
        self.head.weight = self.embed.weight
        self.val_perplexity = Perplexity()

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``[batch, length, vocab_size]`` of the token after each of ``tokens``, ``[batch, length]``."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.embed(tokens) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens, targets = batch
        loss = F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())
        self.log("train_loss", loss, prog_bar=True, batch_size=len(tokens))
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        tokens, targets = batch
        logits = self(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        self.val_perplexity(logits, targets)
        self.log("val_loss", loss, prog_bar=True, sync_dist=True, batch_size=len(tokens))
        self.log("val_perplexity", self.val_perplexity, batch_size=len(tokens))

    def configure_optimizers(self) -> dict:
        matrices = [p for p in self.parameters() if p.dim() >= 2]
        vectors = [p for p in self.parameters() if p.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": self.hparams.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        optimizer = optim.AdamW(groups, lr=self.hparams.lr, betas=(0.9, 0.99), eps=self.hparams.eps)
        steps, warmup = self.trainer.estimated_stepping_batches, self.hparams.warmup_steps
        schedule = optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_cosine(step, warmup, steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_end(self) -> None:
        """Generate a sample on every process, as the parameters may be sharded over them; rank zero prints it."""
        if self.hparams.sample_tokens:
            self.eval()
            text = self.write("\n", self.hparams.sample_tokens)
            self.train()
            rank_zero_only(print)(f"\n--- a sample ---{text}\n---")

    @torch.no_grad()
    def write(self, prompt: str, tokens: int) -> str:
        """Continue ``prompt`` by ``tokens`` bytes sampled from the model's predictions; the same on every process."""
        generator = torch.Generator().manual_seed(0)
        text = torch.tensor([list(prompt.encode())])
        for _ in range(tokens):
            logits = self(text[:, -self.hparams.context :].to(self.device))[:, -1]
            odds = logits.float().cpu().div(0.8).softmax(dim=-1)
            text = torch.cat([text, torch.multinomial(odds, 1, generator=generator)], dim=1)
        return bytes(text[0].tolist()).decode(errors="replace")


def init_weights(module: nn.Module) -> None:
    """Initialize weights from a narrow normal distribution and biases with zeros, as in GPT-2."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def warmup_cosine(step: int, warmup: int, steps: int) -> float:
    """Return the learning rate factor: linear over ``warmup`` steps, then a half cosine down to 0.1 at ``steps``."""
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))
