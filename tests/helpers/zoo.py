"""Tiny models in users' style, each with ``batch(seed)`` and ``loss(batch)``. Plain torch."""

from __future__ import annotations

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.utils.checkpoint

from lightning_pardist.engines.tensor import to_full_tensor


class GPTAttention(nn.Module):
    def __init__(self, dim, heads, dropout):
        super().__init__()
        self.c_attn = nn.Linear(dim, 3 * dim)
        self.c_proj = nn.Linear(dim, dim)
        self.resid_dropout = nn.Dropout(dropout)
        self.heads, self.dim, self.dropout = heads, dim, dropout

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.dim, dim=2)
        k = k.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        q = q.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        v = v.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        p = self.dropout if self.training else 0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=p, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class GPTBlock(nn.Module):
    def __init__(self, dim, heads, dropout):
        super().__init__()
        self.ln_1 = nn.LayerNorm(dim)
        self.attn = GPTAttention(dim, heads, dropout)
        self.ln_2 = nn.LayerNorm(dim)
        self.mlp = nn.ModuleDict(
            {
                "c_fc": nn.Linear(dim, 4 * dim),
                "act": nn.GELU(),
                "c_proj": nn.Linear(4 * dim, dim),
                "dropout": nn.Dropout(dropout),
            }
        )

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        m = self.mlp
        return x + m.dropout(m.c_proj(m.act(m.c_fc(self.ln_2(x)))))


class NanoGPT(nn.Module):
    """GPT with fused qkv and tied head."""

    def __init__(self, vocab=128, block=8, dim=64, heads=4, layers=2, dropout=0.0):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocab, dim),
                "wpe": nn.Embedding(block, dim),
                "drop": nn.Dropout(dropout),
                "h": nn.ModuleList([GPTBlock(dim, heads, dropout) for _ in range(layers)]),
                "ln_f": nn.LayerNorm(dim),
            }
        )
        self.lm_head = nn.Linear(dim, vocab, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        self.vocab, self.block = vocab, block
        self.apply(lambda m: nn.init.normal_(m.weight, std=0.08) if isinstance(m, (nn.Linear, nn.Embedding)) else None)

    def forward(self, idx):
        _, T = idx.size()
        pos = torch.arange(0, T, dtype=torch.long, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x)
        return self.lm_head(self.transformer.ln_f(x))

    def batch(self, seed, n=2):
        return torch.randint(0, self.vocab, (n, self.block + 1), generator=torch.Generator().manual_seed(seed))

    def loss(self, batch):
        logits, targets = self(batch[:, :-1]), batch[:, 1:]
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1), ignore_index=-1)


class CheckpointedGPT(NanoGPT):
    """NanoGPT with activation checkpointing of its blocks."""

    reentrant = False

    def forward(self, idx):
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe.weight[: idx.size(1)])
        for block in self.transformer.h:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=self.reentrant)
        return self.lm_head(self.transformer.ln_f(x))


class RMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


def rotate_half(x):
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


class LlamaBlock(nn.Module):
    def __init__(self, dim, heads, kv_heads, hidden):
        super().__init__()
        self.hd, self.heads, self.kv_heads = dim // heads, heads, kv_heads
        self.q_proj = nn.Linear(dim, heads * self.hd, bias=False)
        self.k_proj = nn.Linear(dim, kv_heads * self.hd, bias=False)
        self.v_proj = nn.Linear(dim, kv_heads * self.hd, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)
        self.q_norm = RMSNorm(self.hd)
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)
        self.n1, self.n2 = RMSNorm(dim), RMSNorm(dim)

    def forward(self, x, cos, sin):
        h = self.n1(x)
        B, T, _ = h.shape
        q = self.q_norm(self.q_proj(h).view(B, T, -1, self.hd)).transpose(1, 2)
        k = self.k_proj(h).view(B, T, self.kv_heads, self.hd).transpose(1, 2)
        v = self.v_proj(h).view(B, T, self.kv_heads, self.hd).transpose(1, 2)
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        rep = self.heads // self.kv_heads
        k = k[:, :, None].expand(B, self.kv_heads, rep, T, self.hd).reshape(B, self.heads, T, self.hd)
        v = v[:, :, None].expand(B, self.kv_heads, rep, T, self.hd).reshape(B, self.heads, T, self.hd)
        w = (q @ k.transpose(2, 3)) / math.sqrt(self.hd)
        w = w + torch.full((T, T), float("-inf"), device=x.device).triu(1)
        y = torch.matmul(F.softmax(w, dim=-1, dtype=torch.float32).to(q.dtype), v)
        x = x + self.o_proj(y.transpose(1, 2).reshape(B, T, -1))
        h = self.n2(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


class Llama(nn.Module):
    """Llama: RMSNorm, rotary embedding, gated MLP, grouped-query attention, untied head."""

    def __init__(self, vocab=96, dim=32, heads=4, kv_heads=2, hidden=64, layers=2):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList([LlamaBlock(dim, heads, kv_heads, hidden) for _ in range(layers)])
        self.norm = RMSNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        inv = 1.0 / 10000 ** (torch.arange(0, dim // heads, 2).float() / (dim // heads))
        self.register_buffer("inv_freq", inv, persistent=False)
        self.vocab = vocab

    def forward(self, ids):
        t = torch.outer(torch.arange(ids.shape[1], device=ids.device).float(), self.inv_freq)
        emb = torch.cat((t, t), -1)
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, emb.cos(), emb.sin())
        return self.head(self.norm(x))

    def batch(self, seed, n=2):
        return torch.randint(0, self.vocab, (n, 9), generator=torch.Generator().manual_seed(seed))

    def loss(self, batch):
        logits = self(batch)[..., :-1, :].contiguous().float()
        return F.cross_entropy(logits.view(-1, self.vocab), batch[..., 1:].contiguous().view(-1), label_smoothing=0.1)


class BERTLayer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.query, self.key, self.value = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.dense, self.norm1 = nn.Linear(dim, dim), nn.LayerNorm(dim)
        self.inter, self.output, self.norm2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim), nn.LayerNorm(dim)
        self.heads = heads

    def split_heads(self, x):
        return x.view(x.shape[0], x.shape[1], self.heads, -1).permute(0, 2, 1, 3)

    def forward(self, x, mask):
        q, k, v = self.split_heads(self.query(x)), self.split_heads(self.key(x)), self.split_heads(self.value(x))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.size(-1)) + mask
        mixed = torch.matmul(nn.functional.softmax(scores, dim=-1), v).permute(0, 2, 1, 3).contiguous()
        x = self.norm1(x + self.dense(mixed.view(*mixed.size()[:-2], -1)))
        return self.norm2(x + self.output(F.gelu(self.inter(x))))


class BERT(nn.Module):
    """Post-norm encoder with a padding mask; masked tokens are selected by a boolean index."""

    def __init__(self, vocab=80, dim=32, heads=4, layers=2):
        super().__init__()
        self.words = nn.Embedding(vocab, dim, padding_idx=0)
        self.positions = nn.Embedding(16, dim)
        self.norm = nn.LayerNorm(dim)
        self.layers = nn.ModuleList([BERTLayer(dim, heads) for _ in range(layers)])
        self.decoder = nn.Linear(dim, vocab)
        self.vocab = vocab

    def batch(self, seed, n=2):
        g = torch.Generator().manual_seed(seed)
        ids = torch.randint(1, self.vocab, (n, 8), generator=g)
        ids[0, 6:] = 0
        picked = torch.rand(n, 8, generator=g) < 0.4
        picked[:, 1] = True
        return ids, ids != 0, picked & (ids != 0)

    def loss(self, batch):
        ids, attention, picked = batch
        mask = (1.0 - attention[:, None, None, :].float()) * torch.finfo(torch.float32).min
        x = self.norm(self.words(ids) + self.positions(torch.arange(ids.size(1), device=ids.device)))
        for layer in self.layers:
            x = layer(x, mask)
        return F.cross_entropy(self.decoder(x)[picked], ids[picked])


class ViT(nn.Module):
    """ViT: convolutional patches, class token, fused qkv split by ``reshape(B, N, 3, heads, -1)``, layer scale."""

    def __init__(self, dim=32, heads=4, layers=2, classes=10):
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 4, 4)
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos = nn.Parameter(torch.randn(1, 17, dim) * 0.02)
        self.blocks = nn.ModuleList()
        for _ in range(layers):
            self.blocks.append(
                nn.ModuleDict(
                    {
                        "norm1": nn.LayerNorm(dim), "qkv": nn.Linear(dim, 3 * dim), "proj": nn.Linear(dim, dim),
                        "norm2": nn.LayerNorm(dim),
                        "mlp": nn.Sequential(nn.Linear(dim, 96), nn.GELU(), nn.Linear(96, dim)),
                    }
                )
            )  # fmt: skip
        self.gamma = nn.ParameterList([nn.Parameter(torch.full((dim,), 0.1)) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)
        self.heads = heads

    def batch(self, seed, n=2):
        g = torch.Generator().manual_seed(seed)
        return torch.randn(n, 3, 16, 16, generator=g), torch.randint(0, 10, (n,), generator=g)

    def forward(self, images):
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], dim=1) + self.pos
        for block, gamma in zip(self.blocks, self.gamma, strict=True):
            B, N, C = x.shape
            qkv = block.qkv(block.norm1(x)).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
            q, k, v = qkv.unbind(0)
            attn = ((q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)).softmax(dim=-1)
            x = x + gamma * block.proj((attn @ v).transpose(1, 2).reshape(B, N, C))
            x = x + block.mlp(block.norm2(x))
        return self.head(self.norm(x)[:, 0])

    def loss(self, batch):
        return F.cross_entropy(self(batch[0]), batch[1])


class Seq2Seq(nn.Module):
    """torch's own ``nn.Transformer`` with causal and padding masks."""

    def __init__(self, vocab=64, dim=32, batch_first=True):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.model = nn.Transformer(dim, 4, 2, 2, 64, dropout=0.0, batch_first=batch_first)
        self.out = nn.Linear(dim, vocab)
        self.vocab = vocab

    def batch(self, seed, n=2):
        g = torch.Generator().manual_seed(seed)
        return torch.randint(1, self.vocab, (n, 7), generator=g), torch.randint(1, self.vocab, (n, 6), generator=g)

    def loss(self, batch):
        source, target = batch
        if not self.model.batch_first:
            return self.time_first_loss(source.t(), target.t())
        padding = torch.zeros(source.shape, dtype=torch.bool)
        padding[0, 5:] = True
        causal = nn.Transformer.generate_square_subsequent_mask(5)
        x = self.model(
            self.embed(source), self.embed(target[:, :-1]), tgt_mask=causal,
            src_key_padding_mask=padding, memory_key_padding_mask=padding, tgt_is_causal=True,
        )  # fmt: skip
        return F.cross_entropy(self.out(x).transpose(1, 2), target[:, 1:])

    def time_first_loss(self, source, target):
        x = self.model(self.embed(source), self.embed(target[:-1]))
        return F.cross_entropy(self.out(x).flatten(0, 1), target[1:].flatten())


class Tagger(nn.Module):
    """LSTM tagger: only the embedding can be split."""

    def __init__(self, vocab=64, dim=16, tags=6):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.lstm = nn.LSTM(dim, dim, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * dim, tags)

    def batch(self, seed, n=3):
        g = torch.Generator().manual_seed(seed)
        return torch.randint(0, 64, (n, 7), generator=g), torch.randint(0, 6, (n, 7), generator=g)

    def loss(self, batch):
        hidden, _ = self.lstm(self.embed(batch[0]))
        return F.nll_loss(F.log_softmax(self.out(hidden), dim=-1).flatten(0, 1), batch[1].flatten())


class Mixer(nn.Module):
    """MLP-Mixer: linears over tokens and over channels in turn."""

    def __init__(self, dim=32, tokens=16, layers=2):
        super().__init__()
        self.stem = nn.Conv2d(3, dim, 4, 4)
        self.layers = nn.ModuleList()
        for _ in range(layers):
            self.layers.append(
                nn.ModuleList(
                    [
                        nn.LayerNorm(dim), nn.Sequential(nn.Linear(tokens, 32), nn.GELU(), nn.Linear(32, tokens)),
                        nn.LayerNorm(dim), nn.Sequential(nn.Linear(dim, 64), nn.GELU(), nn.Linear(64, dim)),
                    ]
                )
            )  # fmt: skip
        self.head = nn.Linear(dim, 10)

    batch = ViT.batch

    def loss(self, batch):
        x = self.stem(batch[0]).flatten(2).transpose(1, 2)
        for norm1, tokens, norm2, channels in self.layers:
            x = x + tokens(norm1(x).transpose(1, 2)).transpose(1, 2)
            x = x + channels(norm2(x))
        return F.cross_entropy(self.head(x.mean(1)), batch[1])


class ResidualBlock(nn.Module):
    def __init__(self, before, after, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.down = None
        if stride != 1 or before != after:
            self.down = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = self.bn2(self.conv2(y))
        y += x if self.down is None else self.down(x)
        return F.relu(y)


class ResNet(nn.Module):
    """Convolutions, batch norm with running statistics, in-place operators."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(True), nn.MaxPool2d(2)
        )
        self.blocks = nn.Sequential(ResidualBlock(8, 8, 1), ResidualBlock(8, 16, 2))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(16, 10)

    def batch(self, seed, n=4):
        return ViT.batch(self, seed, n)

    def loss(self, batch):
        return F.cross_entropy(self.fc(torch.flatten(self.pool(self.blocks(self.stem(batch[0]))), 1)), batch[1])


class MoE(nn.Module):
    """Top-2 routing over experts, each a pair of linears."""

    def __init__(self, dim=16, experts=4, vocab=48):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.router = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 32), nn.SiLU(), nn.Linear(32, dim)) for _ in range(experts)
        )
        self.head = nn.Linear(dim, vocab)
        self.vocab = vocab

    def batch(self, seed, n=2):
        return torch.randint(0, self.vocab, (n, 9), generator=torch.Generator().manual_seed(seed))

    def loss(self, batch):
        x = self.embed(batch[:, :-1]).flatten(0, 1)
        weights, chosen = F.softmax(self.router(x), dim=-1).topk(2, dim=-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows, slot = torch.where(chosen == index)
            out.index_add_(0, rows, expert(x[rows]) * weights[rows, slot, None])
        return F.cross_entropy(self.head(x + out), batch[:, 1:].flatten())


class StackedMoE(MoE):
    """Experts in two stacked parameters, indexed per expert."""

    def __init__(self):
        super().__init__()
        del self.experts
        self.up = nn.Parameter(torch.randn(4, 64, 16) * 0.2)
        self.down = nn.Parameter(torch.randn(4, 16, 32) * 0.2)

    def loss(self, batch):
        x = self.embed(batch[:, :-1]).flatten(0, 1)
        weights, chosen = F.softmax(self.router(x), dim=-1).topk(2, dim=-1)
        out = torch.zeros_like(x)
        for index in range(4):
            rows, slot = torch.where(chosen == index)
            gate, up = F.linear(x[rows], self.up[index]).chunk(2, dim=-1)
            hidden = F.linear(F.silu(gate) * up, self.down[index]) * weights[rows, slot, None]
            out.index_add_(0, rows, hidden)
        return F.cross_entropy(self.head(x + out), batch[:, 1:].flatten())


class MLP(nn.Module):
    """Chain of linears with an odd output size, a hand-written penalty, a frozen and an unused parameter."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 9))
        self.frozen = nn.Linear(9, 9).requires_grad_(False)
        self.unused = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def batch(self, seed, n=4):
        g = torch.Generator().manual_seed(seed)
        return torch.randn(n, 12, generator=g), torch.randn(n, 9, generator=g)

    def loss(self, batch):
        penalty = sum(p.pow(2).sum() for p in self.body.parameters())
        return F.mse_loss(self.frozen(self.body(batch[0])) * self.scale, batch[1]) + 1e-3 * penalty


ZOO = {
    "gpt": NanoGPT,
    "gpt_checkpointed": CheckpointedGPT,
    "llama": Llama,
    "llama_one_kv_head": lambda: Llama(kv_heads=1),
    "bert": BERT,
    "vit": ViT,
    "transformer": Seq2Seq,
    "transformer_time_first": lambda: Seq2Seq(batch_first=False),
    "tagger": Tagger,
    "mixer": Mixer,
    "resnet": ResNet,
    "moe": MoE,
    "moe_stacked": StackedMoE,
    "mlp": MLP,
}


def build(name, seed=0):
    """Return a zoo model with reproducible weights, and reset the seed for equal RNG states across ranks afterwards."""
    torch.manual_seed(seed)
    model = ZOO[name]()
    torch.manual_seed(seed + 1)
    return model


def whole_state(module):
    """Return parameters and buffers of a tensor-parallel module as plain, unsharded tensors. Collective."""
    return {name: to_full_tensor(value) for name, value in module.state_dict().items()}
