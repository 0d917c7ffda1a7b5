"""Context parallelism: every mask, loss and length gives one process's results, on 2 and 4 ranks."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from lightning_pardist.engines.tensor import ContextRuntime
from tests.helpers.ranks import cpu_mesh, run_ranks
from tests.helpers.zoo import build

TOKENS, WIDTH = 48, 32


def make_runtime(**settings):
    mesh = cpu_mesh((dist.get_world_size(),), ("context_parallel",))
    return ContextRuntime(mesh["context_parallel"], **settings)


def run_beside_one_process(reference, batch, runtime):
    """Return the largest relative errors of the loss and of gradients, averaged over ranks as the data axis does."""
    model = copy.deepcopy(reference)
    expected = reference.loss(batch)
    expected.backward()
    runtime.expect(batch)
    with runtime.step():
        loss = model.loss(batch)
        loss.backward()
    scale = max(p.grad.norm() for p in reference.parameters() if p.grad is not None)
    worst = 0.0
    for (name, one), (_, part) in zip(reference.named_parameters(), model.named_parameters(), strict=True):
        assert (one.grad is None) == (part.grad is None), name
        if one.grad is not None:
            mean = part.grad.clone()
            dist.all_reduce(mean)
            error = (mean / dist.get_world_size() - one.grad).norm() / one.grad.norm().clamp_min(1e-2 * scale)
            worst = max(worst, error.item())
    return abs(loss.item() - expected.item()) / abs(expected.item()), worst


# --- models that others wrote ------------------------------------------------------------------------------------

#: By model, the operators whose inputs are gathered because they have no rule.
SEQUENCES = {
    "gpt": set(),
    "gpt_checkpointed": set(),
    "llama": set(),
    "bert": {"getitem"},
    "vit": set(),
}


def _zoo(name):
    reference = build(name).double()
    batch = reference.batch(0)
    batch = torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, batch
    )
    runtime = make_runtime()
    return run_beside_one_process(reference, batch, runtime), set(runtime.fallbacks), len(runtime.entries)


@pytest.mark.parametrize("name", SEQUENCES)
def test_zoo_computes_what_one_process_does(name):
    for (loss, gradients), whole, entries in run_ranks(2, _zoo, name):
        # Some round their logits to fp32 for the loss.
        assert loss < 1e-6
        assert gradients < 1e-9
        assert whole <= SEQUENCES[name]
        assert entries


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["gpt", "llama", "bert", "vit", "transformer", "transformer_time_first", "tagger", "mixer", "moe", "moe_stacked"],
)
def test_zoo_on_four_ranks(name):
    for (loss, gradients), _, _ in run_ranks(4, _zoo, name):
        assert loss < 1e-6
        assert gradients < 1e-9


# --- masks -------------------------------------------------------------------------------------------------------


class Reader(nn.Module):
    """Attention in one of several implementations, under one of several masks, and a loss over valid tokens."""

    def __init__(self, way="fused", mask="causal", heads=4, key_heads=None, length=22):
        super().__init__()
        torch.manual_seed(1)
        self.way, self.mask, self.heads, self.length = way, mask, heads, length
        self.key_heads = key_heads or heads
        head = WIDTH // heads
        self.tokens, self.places = nn.Embedding(TOKENS, WIDTH), nn.Embedding(64, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key, self.value = (nn.Linear(WIDTH, self.key_heads * head) for _ in range(2))
        self.torchs = nn.MultiheadAttention(WIDTH, heads, batch_first=True)
        self.bias = nn.Parameter(torch.randn(heads, 1, 1))
        self.out, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, TOKENS)

    def batch(self, seed):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(1, TOKENS, (3, self.length), generator=generator)
        ids[0, self.length - 6 :] = 0
        ids[2, self.length - 1 :] = 0
        return ids

    def allowed(self, ids):
        """Return which keys a query may attend to, or a bias that is added to scores."""
        length = ids.shape[1]
        rows, columns = torch.arange(length)[:, None], torch.arange(length)[None]
        causal = columns <= rows
        if self.mask == "window":
            return (causal & (rows - columns < 5))[None, None]
        if self.mask == "chunks":
            return (causal & (rows // 4 == columns // 4))[None, None]
        if self.mask == "documents":
            documents = (ids % 7 == 0).cumsum(1)
            return (causal & (documents[:, :, None] == documents[:, None]))[:, None]
        if self.mask == "padding":
            return ((ids != 0)[:, None, None] | (rows == columns)).expand(-1, 1, length, -1)
        if self.mask == "alibi":
            distance = (columns - rows).to(self.bias.dtype)
            return (distance * self.bias.exp()).masked_fill(~causal, -1e9)[None]
        return causal[None, None] if self.mask == "causal" else None

    def attend(self, x, ids):
        if self.way == "torch":
            mask = self.allowed(ids)
            outside = ids == 0 if self.mask == "padding" else None
            mask = None if self.mask == "padding" or mask is None else ~mask[0, 0]
            return self.torchs(x, x, x, attn_mask=mask, key_padding_mask=outside, need_weights=self.mask == "window")[0]
        batch, length, _ = x.shape
        split = [
            layer(x).view(batch, length, count, -1).transpose(1, 2)
            for layer, count in ((self.query, self.heads), (self.key, self.key_heads), (self.value, self.key_heads))
        ]
        mask, grouped = self.allowed(ids), self.key_heads != self.heads
        if self.way == "fused":
            flag = {"is_causal": True} if self.mask == "causal" else {"attn_mask": mask}
            mixed = F.scaled_dot_product_attention(*split, enable_gqa=grouped, **flag)
        else:
            q, k, v = (part.repeat_interleave(self.heads // part.shape[1], 1) for part in split)
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            if mask is not None:
                scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype is torch.bool else scores + mask
            mixed = scores.softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))

    def forward(self, ids):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        return self.head(x + self.attend(self.norm(x), ids))

    def loss(self, ids):
        if self.mask in ("none", "padding"):
            return F.cross_entropy(self(ids).transpose(1, 2), ids, ignore_index=0)
        return F.cross_entropy(self(ids)[:, :-1].reshape(-1, TOKENS), ids[:, 1:].reshape(-1), ignore_index=0)


WAYS = {
    "heads": {},
    "rows": {"heads": 1},
    "few_key_heads": {"key_heads": 1},
    "eager": {"way": "eager"},
    "torch": {"way": "torch"},
    "torch_rows": {"way": "torch", "heads": 1},
}
MASKS = ["causal", "window", "chunks", "documents", "padding", "alibi", "none"]


def _masks(cells):
    found = {}
    for way, mask in cells:
        reference = Reader(mask=mask, **WAYS[way]).double()
        runtime = make_runtime()
        errors = run_beside_one_process(reference, reference.batch(0), runtime)
        found[way, mask] = errors, set(runtime.fallbacks)
    return found


CELLS = [
    (way, mask) for way in WAYS for mask in MASKS if not (way.startswith("torch") and mask in ("documents", "alibi"))
]


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_mask_means_what_it_does_on_one_process(world_size):
    for found in run_ranks(world_size, _masks, CELLS):
        wrong = {cell: errors for cell, (errors, _) in found.items() if not max(errors) < 1e-10}
        assert not wrong
        assert not {cell: whole for cell, (_, whole) in found.items() if whole}


def _planted(rows_of_a_part_as_if_whole):
    """Run with a planted bug: mask rows computed as if a rank's part were the whole sequence."""
    from lightning_pardist.engines.tensor import rules_context

    right = rules_context.causal_rows

    def wrong(start, stop, k, v):
        return right(0, stop - start, k, v)

    rules_context.causal_rows = wrong if rows_of_a_part_as_if_whole else right
    try:
        reference = Reader(heads=1).double()
        return run_beside_one_process(reference, reference.batch(0), make_runtime())
    finally:
        rules_context.causal_rows = right


def test_a_wrong_mask_is_seen():
    assert max(run_ranks(2, _planted, False)[0]) < 1e-10
    loss, gradients = run_ranks(2, _planted, True)[0]
    # Far beyond the tolerance of the parity tests.
    assert loss > 1e-5
    assert gradients > 1e-3


# --- losses ------------------------------------------------------------------------------------------------------


class Losses(nn.Module):
    """Losses as users write them, on tokens of uneven lengths."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(2)
        self.kind = kind
        counted = nn.Embedding(TOKENS, WIDTH, scale_grad_by_freq=kind == "frequencies")
        self.net = nn.Sequential(counted, nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.head = nn.Linear(WIDTH, TOKENS)
        self.register_buffer("class_weights", torch.linspace(0.5, 2.0, TOKENS))

    def batch(self, seed):
        ids = torch.randint(1, TOKENS, (2, 13), generator=torch.Generator().manual_seed(seed))
        ids[0, 9:] = 0
        return ids

    def loss(self, ids):
        hidden = self.net(ids)
        logits, target = self.head(hidden)[:, :-1], ids[:, 1:]
        counts = (target != 0).to(logits.dtype)
        if self.kind == "masked mean":
            per_token = F.cross_entropy(logits.transpose(1, 2), target, reduction="none")
            return (per_token * counts).sum() / counts.sum()
        if self.kind == "picked":
            picked = logits.log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)
            return -(picked * counts).sum(1).div(counts.sum(1)).mean()
        if self.kind == "weights":
            return F.cross_entropy(logits.flatten(0, 1), target.flatten(), self.class_weights, ignore_index=0)
        if self.kind == "smoothed":
            return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=0, label_smoothing=0.1)
        if self.kind == "soft":
            return F.cross_entropy(logits.flatten(0, 1), F.one_hot(target, TOKENS).flatten(0, 1).to(logits.dtype))
        if self.kind == "nll":
            return F.nll_loss(logits.log_softmax(-1).flatten(0, 1), target.flatten(), ignore_index=0)
        if self.kind == "sum":
            return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")
        if self.kind == "regression":
            return F.mse_loss(hidden.mean(1), torch.ones(2, WIDTH, dtype=hidden.dtype)) + F.l1_loss(
                hidden, hidden.detach() + 1
            )
        if self.kind == "first token":
            return self.head(hidden[:, 0]).logsumexp(-1).mean() + self.head(hidden[:, -1]).square().mean()
        if self.kind == "neighbours":
            return (hidden[:, 1:] - hidden[:, :-1]).square().mean() + hidden.std()
        if self.kind == "penalty":
            grads = torch.autograd.grad(logits.square().mean(), list(self.net.parameters()), create_graph=True)
            return sum(grad.square().sum() for grad in grads)
        if self.kind == "broadcast token":
            places = torch.linspace(0, 1, hidden.shape[1], dtype=hidden.dtype)[None, :, None]
            return (hidden[:, :1] + places).square().mean() + F.mse_loss(hidden[:, -1:], places.expand_as(hidden))
        if self.kind == "expanded token":
            first, rest = hidden.split([1, hidden.shape[1] - 1], 1)
            return (first.expand(-1, 7, -1).square().mean() + rest.sum(1).square().mean()) * hidden.chunk(4, 1)[3].std()
        if self.kind == "matched token":
            return (hidden.narrow(1, 2, 1) @ hidden.transpose(1, 2)).square().mean() + (
                hidden[:, 3:4].unsqueeze(-1) @ hidden.unsqueeze(-2)
            ).square().mean()
        if self.kind == "frequencies":
            return hidden.square().mean()
        return torch.cat([self.head.weight.new_ones(2, 3, WIDTH), hidden], 1).square().mean((1, 2)).sum()


KINDS = ["masked mean", "picked", "weights", "smoothed", "soft", "nll", "sum", "regression", "first token"]
KINDS += ["neighbours", "penalty", "prefix", "broadcast token", "expanded token", "matched token", "frequencies"]


def _losses():
    found = {}
    for kind in KINDS:
        reference = Losses(kind).double()
        found[kind] = run_beside_one_process(reference, reference.batch(0), make_runtime())
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_losses_are_those_of_one_process(ranks):
    for found in run_ranks(ranks, _losses):
        assert not {kind: errors for kind, errors in found.items() if not max(errors) < 1e-10}


# --- what is sent, and what is split -----------------------------------------------------------------------------


def _sent():
    reference = Reader(length=24)
    runtime = make_runtime()
    runtime.expect(reference.batch(0))
    with runtime.step():
        reference.loss(reference.batch(0)).backward()
    return dict(runtime.group.calls), dict(runtime.group.bytes)


def test_attention_by_heads_sends_a_rank_s_part_of_four_tensors_each_way():
    calls, sent = run_ranks(2, _sent)[0]
    assert calls == {"all_to_all": 8, "all_reduce": 1}
    assert sent["all_to_all"] == 8 * 3 * 24 // 2 * WIDTH * 4


def kept_for_backward(model, batch):
    """Return the bytes of activations that a forward saves for backward, counting each storage once."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model.loss(batch)
    found = sum(kept.values())
    loss.backward()
    return found


def _long(length, mask):
    model = Reader(length=length, mask=mask)
    model.places = nn.Embedding(length, WIDTH)
    return model, model.batch(0).clamp(min=1)


def _kept(mask, times=1):
    """Return a rank's saved activations for a sequence ``times`` as long, relative to one process."""
    one = kept_for_backward(*_long(256, mask))
    model, batch = _long(256 * times, mask)
    runtime = make_runtime()
    runtime.expect(batch)
    with runtime.step():
        return kept_for_backward(model, batch) / one


def test_a_rank_keeps_its_part_of_the_activations():
    for share in run_ranks(2, _kept, "causal"):
        assert share < 1.15 / 2


@pytest.mark.slow
def test_four_ranks_take_a_sequence_four_times_as_long():
    for share in run_ranks(4, _kept, "causal", 4):
        assert share < 1.15


def _sequence_dim(sequence_dim):
    runtime = make_runtime(sequence_dim=sequence_dim)
    net = Losses("masked mean").double()
    errors = run_beside_one_process(net, net.batch(0).repeat(8, 1), runtime)
    return errors, {entry.dim for entry in runtime.entries}


def _flexible():
    tokens = torch.randn(2, 24, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.manual_seed(0)
    first = nn.Linear(6, 48).double()

    def attend():
        q, k, v = (part.view(2, 24, 2, 8).transpose(1, 2) for part in first(tokens).split(16, 2))
        rows = create_block_mask(lambda b, h, i, j: i >= j, None, None, 24, 24, device="cpu")
        by_score = flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + h * 0.1 - (i - j).abs())
        return by_score + flex_attention(q, k, v, block_mask=rows)

    runtime = make_runtime()
    runtime.expect(tokens)
    # torch has no backward for it on CPU.
    with torch.no_grad():
        expected = attend()
        with runtime.step():
            found = runtime.plain(attend())
    return (found - expected).abs().max().item(), set(runtime.fallbacks)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_runs_on_whole_tensors():
    for error, whole in run_ranks(2, _flexible):
        assert error < 1e-12
        assert whole == {"flex_attention"}


class Windows(nn.Module):
    """Layers with windows along the sequence, each applied to the previous one's result."""

    def __init__(self, layers, length=23):
        super().__init__()
        torch.manual_seed(1)
        self.length = length
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.layers = nn.ModuleList(make() for make in layers)

    def batch(self, seed):
        return torch.randn(2, self.length, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def loss(self, batch):
        x = self.first(batch).transpose(1, 2)
        for layer in self.layers:
            moved = layer(x)
            x = moved + x if moved.shape == x.shape else moved
        return self.last(x.transpose(1, 2)).square().mean()


class Causal(nn.Conv1d):
    def forward(self, x):
        return super().forward(F.pad(x, (self.kernel_size[0] - 1, 0)))


class Mamba(nn.Conv1d):
    """Causal convolution by padding on both sides and cutting off the end."""

    def forward(self, x):
        return super().forward(x)[..., : x.shape[-1]]


CONVOLUTIONS = {
    "same": [lambda: nn.Conv1d(8, 8, 3, padding=1), lambda: nn.Conv1d(8, 8, 4, padding="same")],
    "strides": [lambda: nn.Conv1d(8, 8, 5, stride=2, padding=1), lambda: nn.Conv1d(8, 8, 2, stride=1)],
    "dilated": [lambda: nn.Conv1d(8, 8, 3, dilation=4, padding=4), lambda: nn.Conv1d(8, 8, 3, groups=8, padding=2)],
    "wide": [lambda: nn.Conv1d(8, 8, 17, padding=8)],
    "causal": [lambda: Causal(8, 8, 4), lambda: Mamba(8, 8, 4, groups=8, padding=3), lambda: nn.Conv1d(8, 8, 1)],
}


def _windows(name):
    reference = Windows(CONVOLUTIONS[name]).double()
    runtime = make_runtime()
    return run_beside_one_process(reference, reference.batch(0), runtime), dict(runtime.fallbacks)


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_windows_fetch_what_they_reach_of_other_ranks(name, ranks):
    for (loss, gradients), whole in run_ranks(ranks, _windows, name):
        assert loss < 1e-12
        assert gradients < 1e-9
        assert not whole


def _halo():
    reference = Windows(CONVOLUTIONS["same"][:1]).double()
    runtime = make_runtime()
    with runtime.step():
        reference.loss(reference.batch(0))
    return runtime.group.bytes["all_to_all"]


def test_a_rank_sends_the_rows_that_windows_of_others_reach():
    # One row of two samples and eight channels to the neighbouring rank.
    assert run_ranks(2, _halo) == [2 * 8 * 8] * 2


def test_any_dim_may_be_split():
    for setting, dim in ((0, 0), (1, 1), (None, 0)):
        for errors, dims in run_ranks(2, _sequence_dim, setting):
            assert max(errors) < 1e-10
            assert dims == {dim}


# --- custom autograd functions -----------------------------------------------------------------------------------


class _Linear(torch.autograd.Function):
    """Linear layer with a custom backward, like fused kernels."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return F.linear(grad, weight.t()), grad.flatten(0, 1).t() @ x.flatten(0, 1)


class _Reversible(torch.autograd.Function):
    """Reversible residual layers without stored activations: backward recomputes inputs and calls backward itself."""

    @staticmethod
    def forward(ctx, x, layers):
        left, right = x.chunk(2, dim=-1)
        for layer in layers:
            left, right = right, left + layer(right)
        ctx.save_for_backward(left.detach(), right.detach())
        ctx.layers = layers
        return torch.cat([left, right], dim=-1)

    @staticmethod
    def backward(ctx, grad):
        (left, right), (grad_left, grad_right) = ctx.saved_tensors, grad.chunk(2, dim=-1)
        for layer in reversed(ctx.layers):
            with torch.enable_grad():
                left.requires_grad = True
                added = layer(left)
                added.backward(grad_right)
            left, right = right - added.detach(), left.detach()
            grad_left, grad_right = grad_right, grad_left + (right.grad if right.grad is not None else 0)
        return torch.cat([grad_left, grad_right], dim=-1), None


class CustomFunctions(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.norm = nn.Embedding(TOKENS, WIDTH), nn.LayerNorm(WIDTH)
        half = WIDTH // 2
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(half), nn.Linear(half, half)) for _ in range(3))
        self.weight, self.head = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4), nn.Linear(WIDTH, TOKENS)

    def loss(self, tokens):
        hidden = _Reversible.apply(self.norm(self.embed(tokens)), self.layers)
        hidden = torch.tanh(_Linear.apply(hidden, self.weight))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())


def _custom_functions():
    model = CustomFunctions().double()
    tokens = torch.randint(TOKENS, (3, 8), generator=torch.Generator().manual_seed(5))
    return run_beside_one_process(model, tokens, make_runtime())


def test_custom_functions_that_call_layers_pass_gradients_on():
    for loss, gradients in run_ranks(2, _custom_functions):
        assert loss < 1e-9
        assert gradients < 1e-9
