"""Modules that are awkward to shard; each defines its loss as a training step would."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, CLASSES, BATCH = 16, 10, 4


class Step(nn.Module):
    """Stand-in for a LightningModule: ``training_step`` is called, ``forward`` possibly never."""

    def training_step(self, batch):
        x, y = batch
        return F.cross_entropy(self(x), y)


class Mlp(Step):
    def __init__(self):
        super().__init__()
        layers = [nn.Linear(WIDTH, 3 * WIDTH), nn.ReLU(), nn.Linear(3 * WIDTH, 3 * WIDTH), nn.Tanh()]
        self.net = nn.Sequential(*layers, nn.Linear(3 * WIDTH, CLASSES))

    def forward(self, x):
        return self.net(x)


class Block(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Blocks(Step):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Gpt(Step):
    """Tied head, a separate position table, token ids as input."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(CLASSES, WIDTH)
        self.positions = nn.Parameter(torch.randn(8, WIDTH) * 0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x):
        ids = (x[:, :8].abs() * 10).long() % CLASSES
        h = self.tokens(ids) + self.positions
        for block in self.blocks:
            h = block(h)
        return self.head(h).mean(1)


class DirectWeight(Gpt):
    """``F.linear(h, self.tokens.weight)`` uses a unit's parameter outside its module; a penalty uses another's."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        ids = (x[:, :8].abs() * 10).long() % CLASSES
        early = F.linear(x, self.tokens.weight)
        h = self.tokens(ids) + self.positions
        for block in self.blocks:
            h = block(h)
        return F.linear(self.head(h), self.tokens.weight).mean(1) + early

    def training_step(self, batch):
        return super().training_step(batch) + 1e-2 * sum(p.pow(2).sum() for p in self.blocks[0].parameters())


class ForwardNeverCalled(Step):
    """Only a method of an inner module runs, and its submodules individually."""

    def __init__(self):
        super().__init__()
        self.model = Gpt()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def training_step(self, batch):
        x, y = batch
        h = self.model.blocks[1](x * self.scale)
        h = self.model.blocks[0](h)
        return F.cross_entropy(self.model.head(h), y)


class Repeated(Step):
    """One block called several times per step, first on data, and one block called on both inputs."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.partial = nn.ModuleList(Partial() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        a = self.blocks[0](x)
        b = self.blocks[0](self.blocks[1](a)) + self.blocks[1](x * 2)
        b = self.partial[0](self.partial[0](b, False), True)
        return self.head(self.partial[1](b, False)) + self.head(a)


class Partial(nn.Module):
    """Module with a parameter that is only used in some calls."""

    def __init__(self):
        super().__init__()
        self.always = nn.Linear(WIDTH, WIDTH)
        self.sometimes = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, both):
        x = self.always(x)
        return self.sometimes(x) if both else x


@dataclass
class Answer:
    hidden: torch.Tensor
    extra: dict


class Plain:
    """Container of an unknown type."""

    def __init__(self, inside):
        self.inside = inside


class Returner(Block):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        h = super().forward(x)
        if self.kind == "dataclass":
            return Answer(h, {"nested": [{"twice": 2 * h}]})
        if self.kind == "object":
            return Plain({"hidden": h})
        return {"nested": [{"hidden": (h,)}]}


class Outputs(Step):
    def __init__(self):
        super().__init__()
        self.a = nn.ModuleList(Returner("dataclass") for _ in range(2))
        self.b = nn.ModuleList(Returner("object") for _ in range(2))
        self.c = nn.ModuleList(Returner("dict") for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        for a, b, c in zip(self.a, self.b, self.c, strict=True):
            answer = a(x)
            x = answer.hidden + answer.extra["nested"][0]["twice"]
            x = b(x).inside["hidden"]
            x = c(x)["nested"][0]["hidden"][0]
        return self.head(x)


class Frozen(Blocks):
    """Frozen parts, unused ones in units of their own and next to used ones, a part without any trainable parameter."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.head.unused = nn.Parameter(torch.ones(WIDTH))
        self.blocks[0].requires_grad_(False)
        self.blocks[1].up.weight.requires_grad_(False)


class OddShapes(Step):
    """Scalars, empty parameters, a single row, rows that do not divide evenly, a wide single row."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 5))
        self.row = nn.Parameter(torch.randn(1, WIDTH))
        self.odd = nn.Linear(WIDTH, 3)
        self.wide = nn.Parameter(torch.randn(1, 4096) * 0.01)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(3, CLASSES)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(self.odd(x * self.scale + self.row)) * (1 + self.wide.mean()) + self.empty.sum()


class MixedTypes(Step):
    """fp64 parameters among fp32 ones, in separate modules and next to others in one module."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        for block in self.blocks:
            block.norm.double()
        self.factor = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        for block in self.blocks:
            h = block.norm((x * self.factor).double())
            x = x + block.down(F.gelu(block.up(h.float())))
        return self.head(x)


class ConvNet(Step):
    """Batch norm with per-rank buffers; the reference process keeps those of the first rank's share."""

    def __init__(self):
        super().__init__()
        stages = [
            nn.Sequential(nn.Conv2d(1 if i == 0 else 4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
            for i in range(2)
        ]
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(4 * WIDTH, CLASSES)

    def forward(self, x):
        return self.head(self.stages(x.view(-1, 1, 4, 4)).flatten(1))


class Penalty(Mlp):
    """The loss contains the gradient of the output by the input."""

    def training_step(self, batch):
        x, y = batch
        x = x.clone().requires_grad_(True)
        out = self(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.cross_entropy(out, y) + slope.pow(2).sum(1).mean()


class RankBranch(Blocks):
    """A part inside a unit that only some ranks use in a step, and one that no rank uses in the first."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Partial() for _ in range(2))

    def training_step(self, batch):
        x, y = batch
        for block in self.blocks:
            x = block(x, bool(y[0] % 2))
        return F.cross_entropy(self.head(x), y)


class RankUnits(Blocks):
    """Whole units whose use depends on the data."""

    def training_step(self, batch):
        x, y = batch
        for i, block in enumerate(self.blocks):
            if (int(y[0]) + i) % 3:
                x = block(x)
        return F.cross_entropy(self.head(x), y)


class SharedBlock(Step):
    """One module registered under two names, and torch's own transformer layers."""

    def __init__(self):
        super().__init__()
        first = Block()
        self.blocks = nn.ModuleList([first, Block(), first])
        self.layers = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True), 2
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(self.layers(x[:, None]).mean(1))


class InPlace(Step):
    """Outputs of units are modified in place; one unit returns its own parameter, another a view of it."""

    def __init__(self):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.tables = nn.ModuleList(Table() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = x[:, None].expand(-1, 3, -1)
        for linear in self.linears:
            h = linear(x)
            h += x
            h.tanh_()
            x = h
        return self.head(x.mean(1) + self.tables[0](False)[:BATCH] + self.tables[1](True))


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.randn(2 * BATCH, WIDTH))

    def forward(self, half):
        return self.rows[:BATCH] if half else self.rows


class TiedBlocks(Blocks):
    """Weight tied between two blocks."""

    def __init__(self):
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight


def batches(steps, ranks, seed=1):
    """Return ``[step][rank] -> (x, y)``, different on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [
            (
                torch.randn(BATCH, WIDTH, generator=generator),
                torch.randint(0, CLASSES, (BATCH,), generator=generator),
            )
            for _ in range(ranks)
        ]
        for _ in range(steps)
    ]
