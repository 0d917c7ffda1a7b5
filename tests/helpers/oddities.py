"""Small modules, each with one user pattern that a parallelism planner may not expect."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm


class Base(nn.Module):
    """Base module with batches of inputs, targets of the same shape, and classes."""

    shape = (4, 6, 16)

    def batch(self, seed):
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(*self.shape, generator=g)
        return (x, torch.randn(*self.shape, generator=g), torch.randint(0, 8, self.shape[:1], generator=g))

    def loss(self, b):
        return F.mse_loss(self(b[0]), b[1])


class GradPenalty(Base):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))

    def loss(self, b):
        x = b[0].clone().requires_grad_()
        y = self.net(x)
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.mean() + ((g.norm(dim=-1) - 1) ** 2).mean()


class TensorSizes(Base):
    """Shapes computed with tensors, such as `torch.div(length, 2, rounding_mode="trunc")` of two ints."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(16, 32)
        self.b = nn.Linear(32, 16)

    def forward(self, x):
        h = torch.tanh(self.a(x))
        half = torch.div(h.size(1), 2, rounding_mode="trunc")
        return self.b(h.view(h.size(0), half, 2, h.size(2)).flip(2).reshape(h.shape))


class WeightNorm(Base):
    def __init__(self):
        super().__init__()
        self.a = weight_norm(nn.Linear(16, 32))
        self.b = weight_norm(nn.Linear(32, 16))

    def forward(self, x):
        return self.b(F.gelu(self.a(x)))


class OldWeightNorm(Base):
    def __init__(self):
        super().__init__()
        self.a = nn.utils.weight_norm(nn.Linear(16, 32))
        self.b = nn.utils.weight_norm(nn.Linear(32, 16))

    def forward(self, x):
        return self.b(F.gelu(self.a(x)))


class Spectral(Base):
    def __init__(self):
        super().__init__()
        self.a = spectral_norm(nn.Linear(16, 32))
        self.b = spectral_norm(nn.Linear(32, 16))

    def forward(self, x):
        return self.b(F.gelu(self.a(x)))


class LoRALinear(nn.Module):
    def __init__(self, base, r=4):
        super().__init__()
        self.base = base
        self.base.requires_grad_(False)
        self.A = nn.Parameter(torch.randn(r, base.in_features) * 0.1)
        self.B = nn.Parameter(torch.randn(base.out_features, r) * 0.1)

    def forward(self, x):
        return self.base(x) + x @ self.A.T @ self.B.T * 0.5


class LoRA(Base):
    def __init__(self):
        super().__init__()
        self.up = LoRALinear(nn.Linear(16, 64))
        self.down = LoRALinear(nn.Linear(64, 16))
        self.norm = nn.LayerNorm(16)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


class CLIP(Base):
    def __init__(self):
        super().__init__()
        self.i = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 24))
        self.t = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 24))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def loss(self, b):
        i = F.normalize(self.i(b[0].mean(1)), dim=-1)
        t = F.normalize(self.t(b[1].mean(1)), dim=-1)
        logits = self.scale.exp() * i @ t.t()
        y = torch.arange(len(logits))
        return (F.cross_entropy(logits, y) + F.cross_entropy(logits.t(), y)) / 2


class UNet(Base):
    shape = (2, 4, 16, 16)

    def __init__(self):
        super().__init__()

        def c(i, o):
            return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(4, o), nn.SiLU())

        self.d1 = c(4, 8)
        self.d2 = c(8, 16)
        self.mid = c(16, 16)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.u1 = c(16, 8)
        self.out = nn.Conv2d(8, 4, 1)
        self.time = nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 16))

    def forward(self, x):
        t = self.time(torch.ones(len(x), 8))
        a = self.d1(x)
        b = self.d2(F.max_pool2d(a, 2))
        b = b + t[:, :, None, None]
        m = self.mid(b)
        return self.out(self.u1(torch.cat([self.up(m), a], 1)))


class VAE(Base):
    def __init__(self):
        super().__init__()
        self.e = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        self.d = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))

    def loss(self, b):
        mu, lv = self.e(b[0]).chunk(2, -1)
        torch.manual_seed(5)
        z = mu + torch.randn(mu.shape) * (lv * 0.5).exp()
        kl = -0.5 * (1 + lv - mu.pow(2) - lv.exp()).sum(-1).mean()
        return F.mse_loss(self.d(z), b[1]) + 0.1 * kl


class Conformer(Base):
    def __init__(self):
        super().__init__()
        self.p = nn.Conv1d(16, 64, 1)
        self.dw = nn.Conv1d(32, 32, 3, padding=1, groups=32)
        self.bn = nn.BatchNorm1d(32)
        self.o = nn.Conv1d(32, 16, 1)

    def forward(self, x):
        h = F.glu(self.p(x.transpose(1, 2)), dim=1)
        return x + self.o(F.silu(self.bn(self.dw(h)))).transpose(1, 2)


class ALiBi(Base):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.o = nn.Linear(16, 16)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, 4, 4).permute(2, 0, 3, 1, 4)
        slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
        pos = torch.arange(T)
        bias = -(pos[:, None] - pos[None]).abs() * slopes[:, None, None]
        a = (q @ k.transpose(-1, -2) / 2 + bias).masked_fill(~torch.ones(T, T).tril().bool(), -1000000000.0).softmax(-1)
        return self.o((a @ v).transpose(1, 2).reshape(B, T, C))


class Interleaved(Base):
    """Attention with q, k, v interleaved per head, as in GPT-NeoX."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.o = nn.Linear(16, 16)

    def forward(self, x):
        B, T, _ = x.shape
        q, k, v = self.qkv(x).view(B, T, 4, 12).transpose(1, 2).chunk(3, -1)
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Einsum(Base):
    def __init__(self):
        super().__init__()
        self.wq = nn.Parameter(torch.randn(16, 4, 4) * 0.2)
        self.wk = nn.Parameter(torch.randn(16, 4, 4) * 0.2)
        self.wv = nn.Parameter(torch.randn(16, 4, 4) * 0.2)
        self.wo = nn.Parameter(torch.randn(4, 4, 16) * 0.2)

    def forward(self, x):
        q = torch.einsum("btc,chd->bhtd", x, self.wq)
        k = torch.einsum("btc,chd->bhtd", x, self.wk)
        v = torch.einsum("btc,chd->bhtd", x, self.wv)
        a = torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1)
        return torch.einsum("bhqd,hdc->bqc", torch.einsum("bhqk,bhkd->bhqd", a, v), self.wo)


class GNN(Base):
    def __init__(self):
        super().__init__()
        self.m = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
        self.u = nn.Linear(48, 16)

    def forward(self, x):
        x = x[0]
        src = torch.tensor([0, 1, 2, 3, 4, 5, 0])
        dst = torch.tensor([1, 2, 3, 4, 5, 0, 3])
        m = self.m(torch.cat([x[src], x[dst]], -1))
        agg = torch.zeros(len(x), 32).index_add(0, dst, m)
        sc = torch.zeros(len(x), 32).scatter_add(0, dst[:, None].expand_as(m), m)
        return self.u(torch.cat([x, agg + sc], -1)).expand(4, -1, -1)


class Bag(Base):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(32, 16, mode="sum")
        self.e = nn.Embedding(32, 16)
        self.top = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))

    def loss(self, b):
        ids = (b[0].abs() * 7).long() % 32
        f = ids.flatten(1)[:, :10]
        return F.cross_entropy(self.top(torch.cat([self.bag(f), self.e(f).mean(1)], -1)), b[2])


class FiLM(Base):
    def __init__(self):
        super().__init__()
        self.c = nn.Linear(16, 64)
        self.a = nn.Linear(16, 32)
        self.b = nn.Linear(32, 16)

    def forward(self, x):
        g, h = self.c(x.mean(1)).chunk(2, -1)
        return self.b(F.relu(self.a(x) * (1 + g[:, None]) + h[:, None]))


class STE(Base):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(16, 32)
        self.b = nn.Linear(32, 16)

    def forward(self, x):
        h = self.a(x)
        q = h + (h.round() - h).detach()
        return self.b(q)


class Quant(Base):
    """Vector quantisation: argmin of distances, then codebook lookup."""

    def __init__(self):
        super().__init__()
        self.e = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
        self.code = nn.Embedding(12, 8)
        self.d = nn.Linear(8, 16)

    def loss(self, b):
        z = self.e(b[0])
        i = torch.cdist(z.reshape(-1, 8), self.code.weight).argmin(-1)
        q = self.code(i).view_as(z)
        commitment = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(q.detach(), z)
        return F.mse_loss(self.d(z + (q - z).detach()), b[1]) + commitment


class Flow(Base):
    def __init__(self):
        super().__init__()
        self.n = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(2))
        self.w = nn.Parameter(torch.eye(16) + 0.1 * torch.randn(16, 16))

    def loss(self, b):
        x = b[0] @ self.w
        ld = torch.linalg.slogdet(self.w)[1]
        for n in self.n:
            a, c = x.chunk(2, -1)
            sc, t = n(a).chunk(2, -1)
            c = c * sc.tanh().exp() + t
            ld = ld + sc.tanh().sum(-1).mean()
            x = torch.cat([c, a], -1)
        return 0.5 * x.pow(2).sum(-1).mean() - ld


class Bilinear(Base):
    def __init__(self):
        super().__init__()
        self.b = nn.Bilinear(16, 16, 32)
        self.o = nn.Linear(32, 16)

    def forward(self, x):
        return self.o(torch.tanh(self.b(x, x)))


class GRU(Base):
    def __init__(self):
        super().__init__()
        self.i = nn.Linear(16, 32)
        self.r = nn.GRU(32, 24, num_layers=2, batch_first=True, bidirectional=True)
        self.o = nn.Linear(48, 16)

    def forward(self, x):
        return self.o(self.r(F.relu(self.i(x)))[0])


class Cell(Base):
    def __init__(self):
        super().__init__()
        self.c = nn.LSTMCell(16, 32)
        self.o = nn.Linear(32, 16)

    def forward(self, x):
        h = c = torch.zeros(len(x), 32)
        out = []
        for t in range(x.shape[1]):
            h, c = self.c(x[:, t], (h, c))
            out.append(self.o(h))
        return torch.stack(out, 1)


class FunctionalCall(Base):
    def __init__(self):
        super().__init__()
        self.n = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, x):
        return torch.func.functional_call(self.n, {k: v * 1.0 for k, v in self.n.named_parameters()}, (x,))


class Hooks(Base):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(16, 32)
        self.b = nn.Linear(32, 16)
        self.seen = []
        self.a.register_full_backward_hook(lambda m, gi, go: self.seen.append(go[0].shape) or None)
        self.b.register_forward_hook(lambda m, i, o: o * 2)

    def forward(self, x):
        return self.b(F.relu(self.a(x)))


class Reentrant(Base):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(16, 32)
        self.b = nn.Linear(32, 16)

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(
            lambda y: self.b(F.relu(self.a(y))), x.clone().requires_grad_(), use_reentrant=True
        )


class Highway(Base):
    def __init__(self):
        super().__init__()
        self.g = nn.Linear(16, 16)
        self.h = nn.Linear(16, 16)
        self.p = nn.PReLU(16)

    def forward(self, x):
        g = torch.sigmoid(self.g(x))
        return g * self.p(self.h(x).transpose(1, 2)).transpose(1, 2) + (1 - g) * x


class Scaled(Base):
    """Learned per-channel scale, RMS over the split dim, max pooling over features."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(16, 32, bias=False)
        self.g = nn.Parameter(torch.ones(32))
        self.b = nn.Linear(32, 16)

    def forward(self, x):
        h = self.a(x)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-06) * self.g
        m = h.max(-1, keepdim=True).values
        return self.b(h - m + h.std(-1, keepdim=True) + h.logsumexp(-1, keepdim=True))


class BCE(Base):
    def __init__(self):
        super().__init__()
        self.n = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))

    def loss(self, b):
        y = self.n(b[0].mean(1))
        t = F.one_hot(b[2], 8).float()
        return (
            F.binary_cross_entropy_with_logits(y, t)
            + F.kl_div(y.log_softmax(-1), t.softmax(-1), reduction="batchmean")
            + F.nll_loss(y.log_softmax(-1), b[2])
            + F.smooth_l1_loss(y, t)
            + F.cross_entropy(y, b[2], weight=torch.arange(1.0, 9.0))
        )


class CTC(Base):
    def __init__(self):
        super().__init__()
        self.n = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))

    def loss(self, b):
        lp = self.n(b[0]).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(
            lp,
            torch.randint(1, 8, (4, 3), generator=torch.Generator().manual_seed(0)),
            torch.full((4,), 6),
            torch.full((4,), 3),
        )


class InPlace(Base):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(16, 32)
        self.b = nn.Linear(32, 16)
        self.r = nn.ReLU(inplace=True)

    def forward(self, x):
        h = self.a(x)
        h += 1
        h *= 0.5
        h[:, 0] = 0
        h = self.r(h)
        y = self.b(h)
        y[:, 1:] += x[:, 1:]
        return y


class List(Base):
    """Parameters in ParameterList and ParameterDict, with Python control flow on values."""

    def __init__(self):
        super().__init__()
        self.w = nn.ParameterList([nn.Parameter(torch.randn(16, 16) * 0.2) for _ in range(2)])
        self.d = nn.ParameterDict({"b": nn.Parameter(torch.zeros(16))})

    def forward(self, x):
        for w in self.w:
            x = torch.relu(x @ w + self.d["b"]) if x.mean() > -10 else x @ w
        return x


class TopK(Base):
    """Token routing with top-k, and gather and scatter by index."""

    def __init__(self):
        super().__init__()
        self.r = nn.Linear(16, 4)
        self.e = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(4))

    def forward(self, x):
        f = x.reshape(-1, 16)
        p = self.r(f).softmax(-1)
        v, i = p.topk(2)
        out = torch.zeros_like(f)
        for k, e in enumerate(self.e):
            t, j = torch.where(i == k)
            out.index_add_(0, t, e(f[t]) * v[t, j, None])
        return out.view_as(x)


class SE(Base):
    shape = (2, 4, 8, 8)

    def __init__(self):
        super().__init__()
        self.c = nn.Conv2d(4, 16, 3, padding=1)
        self.f1 = nn.Linear(16, 4)
        self.f2 = nn.Linear(4, 16)
        self.o = nn.Conv2d(16, 16, 1)
        self.ps = nn.PixelShuffle(2)
        self.dn = nn.Conv2d(4, 4, 2, stride=2)
        self.bn = nn.BatchNorm2d(16)

    def forward(self, x):
        h = F.relu(self.bn(self.c(x)))
        g = torch.sigmoid(self.f2(F.relu(self.f1(F.adaptive_avg_pool2d(h, 1).flatten(1)))))
        return self.dn(self.ps(self.o(h * g[:, :, None, None])))


class Tied(Base):
    """Auto-encoder with a transposed tied weight."""

    def __init__(self):
        super().__init__()
        self.w = nn.Linear(16, 32)
        self.b = nn.Parameter(torch.zeros(16))

    def forward(self, x):
        return F.linear(torch.tanh(self.w(x)), self.w.weight.t(), self.b)


class Packed(Base):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(16, 24)
        self.l = nn.LSTM(24, 16, batch_first=True)

    def forward(self, x):
        p = nn.utils.rnn.pack_padded_sequence(
            self.a(x), torch.tensor([6, 5, 4, 6]), batch_first=True, enforce_sorted=False
        )
        return nn.utils.rnn.pad_packed_sequence(self.l(p)[0], batch_first=True)[0]


class Perceiver(Base):
    def __init__(self):
        super().__init__()
        self.lat = nn.Parameter(torch.randn(3, 16))
        self.x = nn.MultiheadAttention(16, 4, batch_first=True)
        self.s = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True, norm_first=True)
        self.o = nn.Linear(16, 96)

    def forward(self, x):
        latents, _ = self.x(self.lat.expand(len(x), -1, -1), x, x)
        return self.o(self.s(latents).mean(1)).view_as(x)


class Sloped(Base):
    shape = (2, 4, 8, 8)

    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(4, 8, 3, padding=1)
        self.p = nn.PReLU(8)
        self.b = nn.Conv2d(8, 8, 1)
        self.q = nn.PReLU()
        self.c = nn.Conv2d(8, 4, 1)

    def forward(self, x):
        return self.c(self.q(self.b(self.p(self.a(x)))))


class Albert(Base):
    def __init__(self):
        super().__init__()
        self.l = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True)
        self.e = nn.Linear(16, 16)

    def forward(self, x):
        for _ in range(3):
            x = self.l(x)
        return self.e(x)


class Dynamic(Base):
    def batch(self, seed):
        g = torch.Generator().manual_seed(seed)
        n = 5 + seed
        x = torch.randn(3 + seed % 2, n, 16, generator=g)
        return (x, torch.randn(*x.shape, generator=g), torch.zeros(3, dtype=torch.long))

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.o = nn.Linear(16, 16)
        self.u = nn.Linear(16, 64)
        self.d = nn.Linear(64, 16)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(x).split(C, 2)
        q, k, v = (t.view(B, T, 4, 4).transpose(1, 2) for t in (q, k, v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, T, C))
        return x + self.d(F.gelu(self.u(x)))


class Teacher(Base):
    def __init__(self):
        super().__init__()
        self.s, self.t = (nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(2))
        self.t.requires_grad_(False)
        self.register_buffer("c", torch.zeros(16))

    def loss(self, b):
        with torch.no_grad():
            t = self.t(b[0])
            for p, q in zip(self.t.parameters(), self.s.parameters(), strict=True):
                p.mul_(0.9).add_(q, alpha=0.1)
            self.c.mul_(0.9).add_(t.mean((0, 1)), alpha=0.1)
        return F.kl_div(self.s(b[0]).log_softmax(-1), ((t - self.c) / 0.5).softmax(-1), reduction="batchmean")


class Assigned(Base):
    """EMA teacher, and weight clipping, by ``p.data = ...`` inside the step."""

    def __init__(self):
        super().__init__()
        self.s, self.t = (nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(2))
        self.t.requires_grad_(False)

    def loss(self, b):
        for p, q in zip(self.t.parameters(), self.s.parameters(), strict=True):
            p.data = p.data * 0.9 + q.data * 0.1
            q.data = q.data.clamp(-0.2, 0.2)
        return F.mse_loss(self.s(b[0]), self.t(b[0]))


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -g


class DANN(Base):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        self.y = nn.Linear(16, 8)
        self.d = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))

    def loss(self, b):
        f = self.f(b[0]).mean(1)
        return F.cross_entropy(self.y(f), b[2]) + F.cross_entropy(self.d(Reverse.apply(f)), b[2] % 2)


class MAML(Base):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(16, 32)
        self.b = nn.Linear(32, 16)

    @staticmethod
    def run(p, x):
        return F.linear(torch.tanh(F.linear(x, p["a.weight"], p["a.bias"])), p["b.weight"], p["b.bias"])

    def loss(self, b):
        p = dict(self.named_parameters())
        g = torch.autograd.grad(F.mse_loss(self.run(p, b[0]), b[1]), list(p.values()), create_graph=True)
        q = {k: v - 0.1 * d for (k, v), d in zip(p.items(), g, strict=True)}
        return F.mse_loss(self.run(q, b[1]), b[0])


class ComplexRotary(Base):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(16, 16, bias=False)
        self.k = nn.Linear(16, 8, bias=False)
        self.v = nn.Linear(16, 8, bias=False)
        self.o = nn.Linear(16, 16, bias=False)

    def forward(self, x):
        B, T, _ = x.shape
        f = torch.polar(torch.ones(T, 2), torch.outer(torch.arange(T).to(x.dtype), torch.tensor([1.0, 0.1])))

        def r(t):
            return torch.view_as_real(torch.view_as_complex(t.view(B, T, -1, 2, 2)) * f[None, :, None]).flatten(3)

        q, k, v = (r(self.q(x)), r(self.k(x)), self.v(x).view(B, T, 2, 4))
        k, v = (t[:, :, :, None].expand(B, T, 2, 2, 4).reshape(B, T, 4, 4) for t in (k, v))
        return self.o(
            F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
            .transpose(1, 2)
            .reshape(B, T, 16)
        )


class QKNorm(Base):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48, bias=False)
        self.o = nn.Linear(16, 16)
        self.qn = nn.LayerNorm(4)
        self.kn = nn.RMSNorm(4)
        self.s = nn.Parameter(torch.ones(4))
        self.ls = nn.Parameter(torch.full((16,), 0.1))

    def forward(self, x):
        B, T, _ = x.shape
        q, k, v = self.qkv(x).reshape(B, T, 3, 4, 4).permute(2, 0, 3, 1, 4).unbind(0)
        a = self.qn(q) @ self.kn(k).transpose(-2, -1) * self.s.view(1, 4, 1, 1)
        a = 30 * torch.tanh(a / 30)
        a = a.masked_fill(torch.ones(T, T).triu(1).bool(), float("-inf")).softmax(-1)
        return x + self.ls * self.o((a @ v).transpose(1, 2).flatten(2))


class CLS(Base):
    def __init__(self):
        super().__init__()
        self.c = nn.Parameter(torch.randn(1, 1, 16))
        self.p = nn.Parameter(torch.randn(1, 7, 16))
        self.b = nn.TransformerEncoderLayer(16, 4, 32, 0.0, activation="gelu", batch_first=True, norm_first=True)
        self.h = nn.Linear(16, 8)

    def loss(self, b):
        x = torch.cat([self.c.expand(4, -1, -1), b[0]], 1) + self.p
        x = self.b(x)
        s = x.norm(dim=-1)[:, 1:].topk(3, 1).indices
        k = x[:, 1:].gather(1, s[..., None].expand(-1, -1, 16))
        return F.cross_entropy(self.h(x[:, 0] + k.mean(1)), b[2], label_smoothing=0.1)


class MoCo(Base):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
        self.register_buffer("queue", F.normalize(torch.randn(8, 12), dim=0))
        self.register_buffer("ptr", torch.zeros(1, dtype=torch.long))

    def loss(self, b):
        q = F.normalize(self.f(b[0].mean(1)), dim=1)
        with torch.no_grad():
            k = F.normalize(self.f(b[1].mean(1)), dim=1)
        near, far = torch.einsum("nc,nc->n", q, k)[:, None], torch.einsum("nc,ck->nk", q, self.queue.clone())
        p = int(self.ptr)
        self.queue[:, p : p + 4] = k.T
        self.ptr[0] = (p + 4) % 12
        return F.cross_entropy(torch.cat([near, far], 1) / 0.2, torch.zeros(4, dtype=torch.long))


class SlicedWeight(Base):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(48, 16) * 0.1)
        self.o = nn.Linear(16, 16)

    def forward(self, x):
        B, T, _ = x.shape
        q, k, v = (F.linear(x, self.w[i * 16 : (i + 1) * 16]).view(B, T, 4, 4).transpose(1, 2) for i in range(3))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Unfold(Base):
    shape = (2, 4, 8, 8)

    def __init__(self):
        super().__init__()
        self.p = nn.Linear(36, 32)
        self.q = nn.Linear(32, 36)

    def forward(self, x):
        u = F.unfold(x, 3, padding=1).transpose(1, 2)
        return F.fold(self.q(F.relu(self.p(u))).transpose(1, 2), (8, 8), 3, padding=1)


class SSM(Base):
    def __init__(self):
        super().__init__()
        self.i = nn.Linear(16, 64)
        self.A = nn.Parameter(torch.rand(32))
        self.c = nn.Conv1d(32, 32, 3, padding=2, groups=32)
        self.o = nn.Linear(32, 16)

    def forward(self, x):
        u, g = self.i(x).chunk(2, -1)
        u = F.silu(self.c(u.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        h = torch.zeros_like(u[:, 0])
        ys = []
        for t in range(x.shape[1]):
            h = torch.exp(-self.A) * h + u[:, t]
            ys.append(h)
        return self.o(torch.stack(ys, 1) * F.silu(g))


class Cross(Base):
    def __init__(self):
        super().__init__()
        self.m = nn.MultiheadAttention(16, 4, kdim=8, vdim=12, batch_first=True, bias=False)
        self.k = nn.Linear(16, 8)
        self.v = nn.Linear(16, 12)

    def forward(self, x):
        y, w = self.m(x, self.k(x), self.v(x), key_padding_mask=torch.tensor([[False] * 5 + [True]] * 4))
        return y * (1 + w.mean())


class Seq2SeqTied(Base):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(32, 16, padding_idx=0)
        self.t = nn.Transformer(16, 4, 1, 1, 32, 0.0, batch_first=True)
        self.b = nn.Parameter(torch.zeros(32))

    def loss(self, b):
        ids = (b[0][..., 0].abs() * 11).long() % 32
        y = self.t(self.e(ids) * 4, self.e(ids[:, :-1]), tgt_mask=nn.Transformer.generate_square_subsequent_mask(5))
        return F.cross_entropy((y @ self.e.weight.T + self.b).transpose(1, 2), ids[:, 1:], ignore_index=0)


ODDITIES = {cls.__name__: cls for cls in Base.__subclasses__()}
