"""Modules with unexpected patterns: whatever is planned, the results equal one process's."""

from __future__ import annotations

import pytest
import torch

from lightning_pardist.engines.tensor import apply_layout, attach, plan_layout
from tests.helpers.oddities import ODDITIES
from tests.helpers.ranks import cpu_mesh, run_ranks
from tests.helpers.zoo import whole_state


def _build(name):
    torch.manual_seed(0)
    return ODDITIES[name]().double()


def _batch(module, seed):
    return tuple(tensor.double() if tensor.is_floating_point() else tensor for tensor in module.batch(seed))


def _error(name, size):
    """Return the worst relative error of losses and weights over three steps, and a rank's share of the parameters."""
    one, many = _build(name), _build(name)
    batch = _batch(one, 0)
    found = plan_layout(many, lambda: many.loss(batch), tp_size=size)
    runtime = apply_layout(many, found, cpu_mesh((size,), ("tensor_parallel",))["tensor_parallel"])
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9) for module in (one, many)]
    attach(optimizers[1])
    worst = 0.0
    for seed in range(3):
        batch = _batch(one, seed)
        expected = one.loss(batch)
        expected.backward()
        with runtime.step():
            loss = many.loss(batch)
            loss.backward()
        worst = max(worst, abs(loss.item() / expected.item() - 1))
        for (label, p), q in zip(one.named_parameters(), many.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), label
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state = whole_state(many)
    for label, value in one.state_dict().items():
        if value.is_floating_point():
            worst = max(worst, ((state[label] - value).abs().max() / value.abs().max().clamp_min(1e-3)).item())
    return worst, found.bytes_per_rank / found.total_bytes


def _errors(size):
    dtype = torch.get_default_dtype()
    # In fp64 any remaining difference is an error.
    torch.set_default_dtype(torch.float64)
    try:
        return {name: _error(name, size) for name in ODDITIES}
    finally:
        torch.set_default_dtype(dtype)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_odd_modules_train_like_one_process(size):
    for found in run_ranks(size, _errors, size):
        assert {name: error for name, (error, _) in found.items() if error > 1e-9} == {}
        # Most of them are actually split.
        assert sum(share < 0.7 for _, share in found.values()) > len(found) / 2
