"""Detection of experts in a step, and the trial that decides whether their tokens can be dispatched."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_pardist.engines.experts import choose_routes, find_layers
from tests.helpers.experts import EXPERTS, FAMILIES, LAYERS, WIDTH, Chain, Listed, ListedBlock, Stacked, family_model


def _layers(module, **kwargs):
    x = torch.randn(2, 5, WIDTH)
    return find_layers(module, lambda: module(x), **kwargs)


@pytest.mark.parametrize(
    ("layer", "dispatch"), [("listed", "tokens"), ("stacked", "tokens"), ("dense", "weights"), ("chain", "weights")]
)
def test_what_travels(layer, dispatch):
    torch.manual_seed(0)
    module = nn.Sequential(LAYERS[layer](), LAYERS[layer]())
    layers = _layers(module)
    assert [each.count for each in layers] == [EXPERTS, EXPERTS]
    before = {name: value.clone() for name, value in module.state_dict().items()}
    random = torch.get_rng_state()
    found = choose_routes(module, layers, size=2)
    assert [each.dispatch for each in found] == [dispatch, dispatch]
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert all(p.grad is None for p in module.parameters())


def test_names_of_stacked_parameters():
    (layer,) = _layers(Stacked())
    assert (layer.name, layer.runner, layer.stacked) == ("experts", "experts", ("up", "down", "bias"))
    (choice,) = choose_routes(Stacked(), [layer], size=2)
    assert choice.route.counts in (("num_experts",), ())


class Ticking(Listed):
    """Counts its calls, which dispatching tokens would double."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return super().forward(x) + self.calls


class Standardized(Listed):
    """Experts whose results depend on all of their rows."""

    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x)


class Rows(nn.Linear):
    def forward(self, x):
        return super().forward(x - x.mean(0))


def _with_rows():
    module = Listed()
    module.experts = nn.ModuleList(Rows(WIDTH, WIDTH) for _ in range(EXPERTS))
    return module


class Mixed(Stacked):
    """Experts whose results are squared sums over a token's experts."""

    def __init__(self):
        super().__init__()
        forward = self.experts.forward
        self.experts.forward = lambda x, index, weights: forward(x, index, weights).square()


class Appending(Listed):
    """Appends losses to a list with a leading underscore, for the step to sum."""

    def __init__(self):
        super().__init__()
        self._losses = []

    def forward(self, x):
        self._losses.append(self.router(x).square().mean())
        return super().forward(x)


class Book:
    entries = 0.0


class Booking(Appending):
    """Accumulates in an object of its own."""

    def __init__(self):
        super().__init__()
        self._losses = {"book": [Book()]}

    def forward(self, x):
        self._losses["book"][0].entries += float(x.mean())
        return Listed.forward(self, x)


REGISTER = []


class Registering(Listed):
    """Appends to a module-level list."""

    def forward(self, x):
        REGISTER.append(x.mean())
        return super().forward(x)


def _hooked(place):
    module = Listed()
    module.get_submodule(place).register_forward_hook(lambda *_: None)
    return module


def _normalized():
    module = Listed()
    module.experts = nn.ModuleList(torch.nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(EXPERTS))
    return module


class Argued(Stacked):
    """Experts with an additional argument derived from a rank's tokens."""

    def __init__(self, make, use):
        super().__init__()
        self.make, inner = make, self.experts.forward
        self.experts.forward = lambda x, index, weights, more: use(inner, x, index, weights, more)

    def forward(self, x):
        flat = x.reshape(-1, WIDTH)
        weights, index = self.router(flat).softmax(-1).topk(2, -1)
        return x + self.experts(flat, index, weights, self.make(flat)).view(x.shape)


def _scaled():
    return Argued(lambda x: x.square().mean(), lambda run, x, index, weights, more: run(x, index, weights) * more)


def _bounded():
    return Argued(len, lambda run, x, index, weights, more: run(x, index, weights))


class StackedRows(Stacked):
    """Stacked experts that use all of an expert's rows, or only its first ones."""

    def __init__(self, capacity=None):
        super().__init__()
        own = self.experts

        def forward(x, index, weights):
            out = torch.zeros_like(x)
            for expert in index.unique():
                row, place = torch.where(index == expert)
                row, place = row[:capacity], place[:capacity]
                hidden = F.linear(x[row], own.up[expert])
                hidden = hidden if capacity else hidden - hidden.mean(0)
                result = F.linear(hidden.relu(), own.down[expert]) + own.bias[expert]
                out = out.index_add(0, row, result * weights[row, place, None])
            return out

        own.forward = forward


class Remembering(Stacked):
    """Stacked experts that store their routing indices."""

    def __init__(self):
        super().__init__()
        inner = self.experts.forward

        def forward(x, index, weights):
            self.experts.last = index
            return inner(x, index, weights)

        self.experts.forward = forward


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Appending, "another result"),
        (Booking, "another result"),
        (Registering, "another result"),
        (functools.partial(_hooked, "router"), "have hooks"),
        (functools.partial(_hooked, "experts.1"), "have hooks"),
        (_normalized, "have hooks"),
        (_scaled, "which may differ between ranks and are not sent"),
        (_bounded, "which may differ between ranks and are not sent"),
        (StackedRows, "result for a row depends on other rows"),
        (functools.partial(StackedRows, 9), "result for a row depends on other rows"),
        (Remembering, "changes buffers, attributes or globals"),
        (Ticking, "another result"),
        (Standardized, "another result"),
        (_with_rows, "depends on other rows"),
        (Chain, "depend on the results of others"),
        (Mixed, "do not add up to what their forward returns"),
    ],
)
def test_why_tokens_cannot_travel(make, reason):
    module = make()
    layers = _layers(module)
    (choice,) = choose_routes(module, layers, size=2)
    assert choice.dispatch == "weights"
    assert reason in choice.reason
    with pytest.raises(ValueError, match="expert_dispatch='tokens' does not work for the experts 'experts'"):
        choose_routes(module, layers, size=2, dispatch="tokens")


@pytest.mark.parametrize(
    ("layer", "dims", "flat"),
    [
        ("listed block", (0, 1), (False, True)),
        ("dense block", (0, 1), (False, False)),
        # Tokens are flattened to one dim there.
        ("stacked", (0,), (False,)),
    ],
)
def test_rows_that_a_layer_computes_by_themselves(layer, dims, flat):
    module = LAYERS[layer]()
    (choice,) = choose_routes(module, _layers(module), size=2, in_parts=True)
    assert (choice.rows.dims, choice.rows.flat) == (dims, flat)


class Balancing(torch.autograd.Function):
    """Identity on the first argument; the second gets the gradient of an added loss."""

    @staticmethod
    def forward(ctx, x, balance):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.ones(())


class Injecting(ListedBlock):
    """Balance loss over all rows that only appears in gradients."""

    def forward(self, x):
        out, scores = super().forward(x)
        return Balancing.apply(out, scores.square().mean()), scores


class Centered(ListedBlock):
    """Rows are centered along the sequence."""

    def forward(self, x):
        return super().forward(x - x.mean(1, keepdim=True))


@pytest.mark.parametrize(
    ("make", "dims"), [(Listed, None), (LAYERS["dense"], None), (Injecting, None), (Centered, (0,))]
)
def test_rows_that_depend_on_others_are_not_taken_apart(make, dims):
    module = make()
    (choice,) = choose_routes(module, _layers(module), size=2, in_parts=True)
    assert (None if choice.rows is None else choice.rows.dims) == dims


class Blocks(nn.Module):
    """As many consecutive layers as each has experts."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Stacked() for _ in range(EXPERTS))
        self.convolution = nn.Conv1d(EXPERTS, EXPERTS, 3, padding=1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x + self.convolution(F.softmax(x.new_ones(2, EXPERTS, WIDTH), 1)).mean()


def test_layers_are_no_experts():
    assert [each.name for each in _layers(Blocks())] == [f"blocks.{index}.experts" for index in range(EXPERTS)]


class Classes(nn.Module):
    """As many blocks and heads as there are classes and positions."""

    def __init__(self):
        super().__init__()
        self.look = nn.Linear(WIDTH, EXPERTS)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, EXPERTS) for _ in range(EXPERTS))

    def forward(self, x):
        pooled = x + self.look(x).softmax(-1).mean(-1, keepdim=True)
        first = pooled
        for block in self.blocks:
            pooled = first + block(pooled).relu()
        logits = torch.stack([head(pooled) for head in self.heads]).sum(0)
        return logits.log_softmax(-1)[..., 0] + logits.argmax(-1)


class Densities(nn.Module):
    """Likelihood of a mixture density, with as many heads as mixture weights."""

    def __init__(self):
        super().__init__()
        self.shares = nn.Linear(WIDTH, EXPERTS)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(EXPERTS))

    def forward(self, x):
        centers = torch.cat([head(x) for head in self.heads], -1)
        return torch.logsumexp(self.shares(x).log_softmax(-1) - centers.square(), -1)


@pytest.mark.parametrize("make", [Classes, Densities])
def test_scores_of_something_else_make_no_experts(make):
    assert _layers(make()) == []


class Late(nn.Module):
    """Experts that are all evaluated before they are weighted."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x):
        results = torch.stack([expert(x) for expert in self.experts], -1)
        return torch.einsum("bte,btde->btd", self.gate(x).softmax(-1), results)


class Switch(Late):
    """One expert per token, whose result is not weighted."""

    def forward(self, x):
        chosen = self.gate(x).argmax(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            out[chosen == index] = expert(x[chosen == index])
        return out


@pytest.mark.parametrize("make", [Late, Switch])
def test_experts_that_are_weighed_late_or_only_chosen(make):
    assert [each.name for each in _layers(make())] == ["experts"]


class Counting(nn.Linear):
    """Linear layer with a buffer."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))


class Groups(Listed):
    """Several groups of experts, one of which has buffers."""

    def __init__(self):
        super().__init__()
        self.others = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.counting = nn.ModuleList(Counting() for _ in range(5))
        self.gates = nn.ModuleDict({"others": nn.Linear(WIDTH, 3), "counting": nn.Linear(WIDTH, 5)})

    def forward(self, x):
        out = super().forward(x)
        for name, gate in self.gates.items():
            scores = gate(x).softmax(-1)
            for index, expert in enumerate(self.get_submodule(name)):
                out = out + scores[..., index, None] * expert(x)
        return out


def test_what_stays_whole_says_why():
    left = []
    assert [each.name for each in _layers(Groups(), left=left)] == ["experts"]
    assert {each.name: each.unsplit_reason for each in left} == {
        "others": "'' also computes with 'experts', which are distributed",
        "counting": "they have buffers",
    }


def test_names_can_be_set():
    module = Blocks()
    assert [each.name for each in _layers(module, chosen=["blocks.[12].experts"])] == [
        "blocks.1.experts",
        "blocks.2.experts",
    ]
    plain = nn.ModuleDict({"parts": nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))})

    def run(x):
        return sum(part(x) for part in plain["parts"])

    plain.forward = run
    assert _layers(plain) == []
    assert [each.name for each in _layers(plain, chosen=["parts"])] == ["parts"]


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=() if each == "Mixtral" else pytest.mark.slow) for each in FAMILIES]
)
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_tokens_of_families_of_transformers_travel(family, implementation):
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = family_model(family)
    model.config._experts_implementation = implementation
    ids = torch.randint(3, 50, (4, 12))
    layers = find_layers(model, lambda: model(input_ids=ids, labels=ids).loss)
    assert {each.count for each in layers} == {FAMILIES[family][key] for key in _COUNTS if key in FAMILIES[family]}
    assert [each.dispatch for each in choose_routes(model, layers, size=2, dispatch="tokens")] == ["tokens"] * len(
        layers
    )


#: Names of the number of experts in configurations.
_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")


class Tied(Stacked):
    """Module that refers to the experts' parameters a second time."""

    def __init__(self):
        super().__init__()
        self.also = self.experts.up


def test_parameters_in_several_places_are_no_experts_to_take_apart():
    (layer,) = _layers(Tied())
    assert layer.stacked == ("down", "bias")
    module = Tied()
    choices = choose_routes(module, _layers(module), size=2)
    assert choices[0].dispatch == "weights"
