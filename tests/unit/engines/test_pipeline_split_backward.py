"""Two halves of a split backward give the result of a full one, without duplicate work."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lightning_pardist.engines.pipeline.split_backward import SplitBackward


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))
        self.norm = nn.LayerNorm(6)
        self.query = nn.Parameter(torch.randn(6))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused = nn.Linear(6, 6)


def chain(m: Layers, x: Tensor, y: Tensor) -> list[Tensor]:
    return [m.c(torch.tanh(m.frozen(m.b(torch.relu(m.norm(m.a(x)))))))]


def shared(m: Layers, x: Tensor, y: Tensor) -> list[Tensor]:
    return [m.a(torch.tanh(m.b(m.a(x)))) + m.a(y), m.a(x)]


def aside(m: Layers, x: Tensor, y: Tensor) -> list[Tensor]:
    return [m.a(x) + 0.1 * m.c.weight.square().sum(), m.b(m.query), torch.cat([x, m.query.expand(2, 6)])]


def some_inputs(m: Layers, x: Tensor, y: Tensor) -> list[Tensor]:
    return [m.b(m.a(x.detach())) * y]


def checkpointed(m: Layers, x: Tensor, y: Tensor) -> list[Tensor]:
    return [checkpoint(lambda z: m.b(torch.tanh(m.a(z))), x, use_reentrant=False) + y]


def casts(m: Layers, x: Tensor, y: Tensor) -> list[Tensor]:
    """Two products share a cast of one weight, as under autocast."""
    weight = m.a.weight.double()
    return [(x.double() @ weight + (m.b(y).double() @ weight)).float()]


@pytest.mark.parametrize("function", [chain, shared, aside, some_inputs, checkpointed, casts])
def test_same_gradients(function: Callable[[Layers, Tensor, Tensor], list[Tensor]]) -> None:
    torch.manual_seed(0)
    model = Layers()
    inputs = [torch.randn(3, 6, requires_grad=True) for _ in range(2)]
    roots = function(model, *inputs)
    seeds = [torch.randn_like(root) for root in roots]
    torch.autograd.backward(roots, seeds)
    whole = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    expected = [None if tensor.grad is None else tensor.grad.clone() for tensor in inputs]
    model.zero_grad()
    split = SplitBackward(function(model, *inputs), seeds, list(model.parameters()))
    found = split.inputs(inputs)
    assert all(parameter.grad is None for parameter in model.parameters())
    split.weights()
    for mine, other in zip([*found, *(p.grad for p in model.parameters())], [*expected, *whole], strict=True):
        assert (mine is None) == (other is None)
        if mine is not None and other is not None:
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_without_inputs_all_is_left_to_the_second_half() -> None:
    model = Layers()
    split = SplitBackward([model.a(torch.ones(2, 6)).sum()], [torch.ones(())], list(model.parameters()))
    assert split.inputs([]) == []
    split.weights()
    assert model.a.weight.grad is not None


def test_no_work_is_done_twice() -> None:
    model = Layers()
    x = torch.randn(3, 6, requires_grad=True)

    def flops(run: Callable[[], object]) -> int:
        with FlopCounterMode(display=False) as counter:
            run()
        return counter.get_total_flops()

    root = chain(model, x, x)[0]
    whole = flops(lambda: root.backward(torch.ones_like(root)))
    root = chain(model, x, x)[0]
    split = SplitBackward([root], [torch.ones_like(root)], list(model.parameters()))
    first = flops(lambda: split.inputs([x]))
    second = flops(split.weights)
    # Four products for inputs, three for weights: one layer is frozen.
    assert (first, second) == (whole * 4 // 7, whole * 3 // 7)
