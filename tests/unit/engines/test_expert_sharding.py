"""Sharding of experts over the ranks that share them, as far as one rank can test it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_pardist.engines.experts import ExpertSharding
from lightning_pardist.engines.experts.sharding import ShardedWeights, shard_dim


@pytest.mark.parametrize(
    ("shape", "size", "first_dim", "dim"),
    [
        ((4, 6), 2, 0, 0),
        ((3, 6), 2, 0, 1),
        ((3, 7), 2, 0, 1),
        ((4, 3, 6), 2, 1, 2),
        ((), 2, 0, None),
        ((0, 4), 2, 0, None),
    ],
)
def test_the_first_dim_that_divides_is_sharded(shape, size, first_dim, dim):
    assert shard_dim(torch.empty(shape), size, first_dim) == dim


def _alone(layer, **settings):
    # Without other ranks that share its experts, a rank holds them whole and uses no mesh.
    sharding = ExpertSharding(None, None, average_over=4, **settings)
    places = [(layer, name) for name, _ in layer.named_parameters()]
    return ShardedWeights(places, sharding, [p.shape for p in layer.parameters()])


def test_gradients_are_divided_by_all_ranks():
    layer, x = nn.Linear(3, 2), torch.randn(5, 3)
    expected = torch.autograd.grad(layer(x).square().sum(), list(layer.parameters()))
    weights = _alone(layer)
    values = weights.full_values()
    with weights.in_modules(values):
        out = layer(x)
    assert type(layer.weight) is nn.Parameter
    weights.release_after(out, values).square().sum().backward()
    torch.testing.assert_close([p.grad for p in layer.parameters()], [grad / 4 for grad in expected])


def test_experts_compute_in_the_dtype_of_a_policy_and_a_parameter_without_gradient_has_none():
    layer = nn.Linear(3, 2)
    weights = _alone(layer, compute_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    values = weights.full_values()
    with weights.in_modules(values):
        out = nn.functional.linear(torch.randn(5, 3).bfloat16(), layer.weight)
    with weights.without_values():
        assert layer(torch.zeros(1, 3).bfloat16()).dtype == torch.bfloat16
    weights.release_after(out, values).sum().backward()
    assert layer.weight.grad.dtype == torch.float32
    assert layer.bias.grad is None
