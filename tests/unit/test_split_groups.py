"""Parameter groups from a traced step, for dissimilar modules, independent of parameter names."""

import copy
import pickle

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_pardist import optim
from recipes.gpt.model import GPT


def _roles(module, batch, **kwargs):
    return optim.split_groups(module, batch, **kwargs).roles


class Tied(nn.Module):
    """Decoder with a tied head; names give no hint of a parameter's role."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.randn(11, 8))
        self.b = nn.Parameter(torch.randn(1, 5, 8))
        self.c = nn.Linear(8, 24)
        self.d = nn.Linear(8, 8)
        self.e = nn.LayerNorm(8)
        self.f = nn.Linear(8, 11, bias=False)
        self.f.weight = self.a

    def forward(self, ids):
        x = F.embedding(ids, self.a) + self.b
        q, k, v = self.c(self.e(x)).chunk(3, -1)
        x = x + self.d(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return F.cross_entropy(self.f(x).flatten(0, 1), ids.flatten())


_TIED = {
    **dict.fromkeys(("a",), "embedding"),
    **dict.fromkeys(("c.weight", "d.weight"), "matrix"),
    **dict.fromkeys(("b", "c.bias", "d.bias", "e.weight", "e.bias"), "vector"),
}


class Vision(nn.Module):
    """Patches, a class token, torch's attention, a depthwise convolution and a head."""

    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4, stride=4)
        self.token = nn.Parameter(torch.zeros(1, 1, 8))
        self.where = nn.Parameter(torch.zeros(1, 5, 8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.mixer = nn.Conv1d(8, 8, 3, padding=1, groups=8)
        self.wide = nn.Conv1d(8, 12, 1)
        self.narrow = nn.utils.parametrizations.weight_norm(nn.Conv1d(12, 8, 1))
        self.scale = nn.Parameter(torch.ones(()))
        self.last = nn.Linear(8, 10)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.where
        x = x + self.attention(x, x, x, need_weights=False)[0]
        y = self.mixer(x.transpose(1, 2))
        return self.last((x + self.narrow(self.wide(y).relu()).transpose(1, 2) * self.scale).mean(1))


_VISION = {
    "patch.weight": "embedding",
    **dict.fromkeys(("attention.in_proj_weight", "attention.out_proj.weight", "wide.weight"), "matrix"),
    "narrow.parametrizations.weight.original1": "matrix",
    "narrow.parametrizations.weight.original0": "vector",
    "last.weight": "head",
}


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(9, 6)
        self.inner = nn.LSTM(6, 7, num_layers=2, bidirectional=True, batch_first=True)
        self.raw = nn.GRU(4, 5, batch_first=True)
        self.out = nn.Linear(14 + 5, 2)

    def forward(self, ids, signal):
        return self.out(torch.cat([self.inner(self.words(ids))[0], self.raw(signal)[0]], -1))


_RECURRENT = {
    "words.weight": "embedding",
    **{
        f"inner.weight_{kind}_l{layer}{way}": "matrix"
        for kind in ["ih", "hh"]
        for layer in "01"
        for way in ("", "_reverse")
    },
    "raw.weight_ih_l0": "embedding",
    "raw.weight_hh_l0": "matrix",
    "out.weight": "head",
}


class Experts(nn.Module):
    """Stacked experts, used in one product and by index, low-rank updates, a raw parameter and a frozen one."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Parameter(torch.randn(6, 8))
        self.gate = nn.Parameter(torch.randn(8, 4))
        self.up = nn.Parameter(torch.randn(4, 8, 12))
        self.down = nn.Parameter(torch.randn(4, 12, 8))
        self.base = nn.Parameter(torch.randn(8, 8), requires_grad=False)
        self.low = nn.Parameter(torch.randn(2, 8))
        self.high = nn.Parameter(torch.zeros(8, 2))
        self.gain = nn.Parameter(torch.ones(8))
        self.bias_table = nn.Parameter(torch.zeros(5, 8))
        self.register_buffer("places", torch.tensor([0, 2, 4]))
        self.leave = nn.Parameter(torch.randn(8, 1))
        self.idle = nn.Parameter(torch.randn(3, 3))

    def forward(self, x):
        x = x @ self.enter
        choice = (x @ self.gate).softmax(-1)
        best = choice.argmax(-1)
        hidden = torch.einsum("bd,edh->beh", x, self.up).relu()
        x = x + torch.einsum("be,beh,ehd->bd", choice, hidden, self.down)
        x = x + torch.bmm(torch.bmm(x.unsqueeze(1), self.up[best]), self.down[best]).squeeze(1)
        x = F.linear(x, self.base + 0.5 * self.high @ self.low)
        x = torch.einsum("bd,d->bd", x, self.gain) + self.bias_table[self.places].sum(0)
        return (x @ self.leave).square().mean()


_EXPERTS = {
    "enter": "embedding",
    **dict.fromkeys(("gate", "up", "down", "base", "low", "high"), "matrix"),
    "gain": "vector",
    "bias_table": "embedding",
    "leave": "head",
    "idle": "unused",
}


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return 2 * x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return 2 * grad @ weight.mT, 2 * x.mT @ grad


class Learned(nn.Module):
    """Learned queries, a cell in a loop, a codebook and a custom function."""

    def __init__(self):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(3, 8))
        self.ask, self.tell = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.cell = nn.GRUCell(8, 8)
        self.codes = nn.Parameter(torch.randn(5, 8))
        self.kernel = nn.Parameter(torch.randn(8, 8))
        self.head = nn.Linear(8, 1, bias=False)

    def forward(self, x):
        q = self.ask(self.queries.expand(len(x), -1, -1))
        x = F.scaled_dot_product_attention(q, x, self.tell(x))
        state = torch.zeros(len(x), 8, device=x.device)
        for at in range(3):
            state = self.cell(x[:, at], state)
        state = Doubled.apply(state, self.kernel)
        return self.head(state) + torch.cdist(state, self.codes).min(-1).values.mean()


_LEARNED = {
    "queries": "embedding",
    "ask.weight": "matrix",
    "tell.weight": "embedding",
    "cell.weight_ih": "matrix",
    "cell.weight_hh": "matrix",
    "codes": "embedding",
    "kernel": "matrix",
    "head.weight": "head",
}
CASES = {
    "tied": (Tied, (torch.arange(10).reshape(2, 5),), _TIED),
    "vision": (Vision, (torch.randn(2, 3, 8, 8),), _VISION),
    "recurrent": (Recurrent, (torch.arange(8).reshape(2, 4), torch.randn(2, 4, 4)), _RECURRENT),
    "experts": (Experts, (torch.randn(5, 6),), _EXPERTS),
    "learned": (Learned, (torch.randn(2, 4, 8),), _LEARNED),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", CASES)
def test_what_a_parameter_is_for_is_found_from_its_use(name, device):
    make, batch, wanted = CASES[name]
    with torch.device(device):
        module = make()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    found = _roles(module, batch)
    assert found == {key: wanted.get(key, "vector") for key, _ in module.named_parameters()}
    if device == "cpu":
        assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
        assert all(param.grad is None for param in module.parameters())


def test_an_unmodified_lightning_module():
    torch.manual_seed(0)
    module = GPT(dim=16, layers=2, heads=2, context=8, dropout=0.1)
    tokens = torch.randint(256, (2, 9))
    groups = optim.split_groups(module, (tokens[:, :-1], tokens[:, 1:]))
    names = {id(param): name for name, param in module.named_parameters()}
    matrices = {names[id(param)] for param in groups.matrices}
    wanted = {name for name, param in module.named_parameters() if "blocks" in name and param.dim() == 2}
    assert matrices == wanted
    assert matrices
    assert sorted(names) == sorted(map(id, groups.matrices + groups.rest))
    assert "matrix: 8" in str(groups)


def test_groups_follow_their_module():
    module = Experts()
    groups = optim.split_groups(module, torch.randn(5, 6))
    assert not any(param is module.base for param in groups.matrices)
    module.base.requires_grad_(True)
    module.up = nn.Parameter(torch.zeros(4, 8, 12))
    assert any(param is module.base for param in groups.matrices)
    assert any(param is module.up for param in groups.matrices)
    module.groups = groups
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert any(param is other.up for param in other.groups.matrices)
    del module.up
    with pytest.raises(RuntimeError, match=r"'up'.*Call split_groups again"):
        _ = groups.matrices


class AsksForOptimizers(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 1))
        self.groups = None

    def loss(self, batch):
        return self.layers(batch).square().mean()

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        self.manual_backward(self.loss(batch))
        first.step(), second.step()

    def configure_optimizers(self):
        sgd = torch.optim.SGD
        return [sgd(self.groups.matrices, lr=0.1), sgd(self.groups.rest, lr=0.1)]


def test_a_step_that_asks_for_optimizers_can_be_replaced():
    module, batch = AsksForOptimizers(), torch.randn(3, 4)
    with pytest.raises(ValueError, match="Pass a batch that the step accepts, or step="):
        optim.split_groups(module, batch)
    module.groups = optim.split_groups(module, batch, step=lambda module, batch: module.loss(batch))
    matrices, rest = (optimizer.param_groups[0]["params"] for optimizer in module.configure_optimizers())
    assert [tuple(param.shape) for param in matrices] == [(5, 6)]
    assert len(rest) == 5


class LooksAtValues(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x) if x.sum().item() > 0 else x


def test_what_cannot_be_traced_is_refused():
    with pytest.raises(ValueError, match="without values, because it is on the meta device"):
        optim.split_groups(LooksAtValues().to("meta"), torch.ones(2, 4))
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    with pytest.raises(ValueError, match=r"is already sharded. Call it earlier, for example in setup\(\)"):
        optim.split_groups(module, torch.ones(2, 4))
