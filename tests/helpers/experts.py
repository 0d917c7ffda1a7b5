"""Mixtures of experts written for one process, as in user code."""

from __future__ import annotations

import functools
import importlib

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

TOKENS, WIDTH, LENGTH, EXPERTS, CHOSEN = 24, 8, 5, 4, 2
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-3)


class Expert(nn.Module):
    """Two-layer perceptron."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Listed(nn.Module):
    """Experts in a list, each called with its routed tokens, and skipped if there are none."""

    skips = True

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.balance = None

    def forward(self, x):
        flat = x.reshape(-1, WIDTH)
        scores = self.router(flat).softmax(-1)
        weights, chosen = scores.topk(CHOSEN, -1)
        self.balance = scores.square().mean()
        out = self.shared(flat)
        for index, expert in enumerate(self.experts):
            row, place = (chosen == index).nonzero(as_tuple=True)
            if self.skips and not len(row):
                continue
            out = out.index_add(0, row, (weights[row, place, None] * expert(flat[row])).to(out.dtype))
        return out.view(x.shape)


class Chain(Listed):
    """Experts that refine each other's results: an expert's tokens depend on the previous expert's output."""

    def forward(self, x):
        chosen = self.router(x).softmax(-1)
        for index, expert in enumerate(self.experts):
            x = x + chosen[..., index, None] * expert(x)
        return x


class StackedExperts(nn.Module):
    """Experts with stacked parameters, and a loop over those that receive tokens."""

    def __init__(self):
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) * 0.3)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) * 0.3)
        self.bias = nn.Parameter(torch.randn(EXPERTS, WIDTH) * 0.1)

    def forward(self, x, index, weights):
        out = torch.zeros_like(x)
        for expert in index.unique():
            row, place = torch.where(index == expert)
            hidden = F.gelu(F.linear(x[row], self.up[expert]))
            result = F.linear(hidden, self.down[expert]) + self.bias[expert]
            out = out.index_add(0, row, (result * weights[row, place, None]).to(out.dtype))
        return out


class Stacked(nn.Module):
    """Router and stacked experts."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), StackedExperts()
        self.balance = None

    def forward(self, x):
        flat = x.reshape(-1, WIDTH)
        scores = self.router(flat).softmax(-1)
        weights, index = scores.topk(CHOSEN, -1)
        self.balance = scores.square().mean()
        return x + self.experts(flat, index, weights).view(x.shape)


class Dense(nn.Module):
    """Dense mixture: every token is sent to every expert, by einsum, in the module that also contains the router."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) * 0.3)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) * 0.3)
        self.balance = None

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        self.balance = scores.square().mean()
        hidden = F.gelu(torch.einsum("btd,edf->btef", x, self.up))
        return x + torch.einsum("btef,efd,bte->btd", hidden, self.down, scores)


class Scored(nn.Module):
    """Wrapper around a block that returns its router's scores; the balance loss is computed outside the block."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        out, scores = self.block(x)
        self.balance = scores.square().mean()
        return out


class ListedBlock(Listed):
    """List of experts that also returns the scores of all tokens, flattened to one token dim."""

    def forward(self, x):
        out = super().forward(x)
        del self.balance
        return out, self.router(x).softmax(-1).flatten(0, 1)


class DenseBlock(Dense):
    """Dense mixture that also returns the scores."""

    def forward(self, x):
        out = super().forward(x)
        del self.balance
        return out, self.router(x).softmax(-1)


LAYERS = {
    "listed": Listed,
    "stacked": Stacked,
    "dense": Dense,
    "chain": Chain,
    "listed block": lambda: Scored(ListedBlock()),
    "dense block": lambda: Scored(DenseBlock()),
}


def is_expert(name):
    """Return whether a parameter of :class:`Mixture` belongs to an expert."""
    return ".experts." in name or name.endswith((".up", ".down"))


class Mixture(pl.LightningModule):
    """Language model with two expert layers between an embedding and a head."""

    def __init__(self, layer="listed", dtype=torch.float32, rare=False, optimizer=ADAMW):
        super().__init__()
        self.optimizer = optimizer
        torch.manual_seed(5)
        self.embed, self.norm = nn.Embedding(TOKENS, WIDTH), nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(LAYERS[layer]() for _ in range(2))
        self.head = nn.Linear(WIDTH, TOKENS)
        if rare:
            # One expert receives no tokens, on any rank.
            for each in self.layers:
                nn.init.constant_(each.router.bias[EXPERTS - 1 :], -100.0)
        self.to(dtype)
        self.losses = []
        self.held = {}

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = self.norm(layer(x))
        return self.head(x)

    def training_step(self, batch, batch_idx):
        (ids,) = batch
        loss = F.cross_entropy(self(ids)[:, :-1].reshape(-1, TOKENS), ids[:, 1:].reshape(-1))
        balance = [layer.balance for layer in self.layers if getattr(layer, "balance", None) is not None]
        self.losses.append(loss.item())
        self.log("loss", loss, on_epoch=True)
        return loss + 0.1 * sum(balance)

    def validation_step(self, batch, batch_idx):
        (ids,) = batch
        self.log("val_loss", F.cross_entropy(self(ids)[:, :-1].reshape(-1, TOKENS), ids[:, 1:].reshape(-1)))

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def on_train_end(self):
        def held(tensor):
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            return 0 if local.is_meta else local.numel()

        own = [(n, p) for n, p in self.named_parameters() if is_expert(n)]
        self.held = {
            "parameters": sum(held(p) for _, p in own),
            "gradients": sum(held(p.grad) for _, p in own if p.grad is not None),
        }

    def configure_optimizers(self):
        return self.optimizer(list(self.parameters()))


def data(rows=24):
    """Return a data set of token ids."""
    return TensorDataset(torch.randint(0, TOKENS, (rows, LENGTH), generator=torch.Generator().manual_seed(7)))


class Data(pl.LightningDataModule):
    """Global batches of four, of which each rank loads its part."""

    def __init__(self, rows=24, val_rows=10):
        super().__init__()
        self.rows, self.val_rows = rows, val_rows

    def train_dataloader(self):
        shares = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}
        sampler = DistributedSampler(data(self.rows), shuffle=False, **shares)
        return DataLoader(data(self.rows), batch_size=4 // shares["num_replicas"], sampler=sampler)

    def val_dataloader(self):
        return DataLoader(data(self.val_rows), batch_size=2)

    predict_dataloader = val_dataloader


#: Sizes common to the models of transformers.
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "vocab_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
#: Family of transformers -> its configuration in addition to SIZES.
FAMILIES = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "Qwen3Moe": {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 24, "head_dim": 8},
    "Olmoe": {"num_experts": 8, "num_experts_per_tok": 8},
    "DeepseekV2": {**_LATENT, **_ROUTED, "q_lora_rank": None, "n_group": 1, "topk_group": 1},
    "DeepseekV3": {**_LATENT, **_ROUTED, "q_lora_rank": 16, "n_group": 2, "topk_group": 1},
    "Phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "GraniteMoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "Glm4Moe": {**_ROUTED, "head_dim": 8, "n_group": 1, "topk_group": 1},
}


def family_model(family, **settings):
    """Return a small, untrained causal language model of transformers."""
    transformers = importlib.import_module("transformers")
    config = getattr(transformers, f"{family}Config")(**SIZES | FAMILIES[family] | settings)
    return getattr(transformers, f"{family}ForCausalLM")(config)
