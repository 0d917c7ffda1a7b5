from __future__ import annotations

import copy

import pytest
import torch

from lightning_pardist.engines.tensor import apply_layout, plan_layout, to_full_tensor
from tests.helpers.ranks import cpu_mesh, run_ranks
from tests.helpers.zoo import ZOO, build, whole_state


def split(model, world_size, **options):
    """Plan and apply a layout on the tensor ranks; the plan is based on the first batch."""
    batch = model.batch(0)
    found = plan_layout(model, lambda: model.loss(batch), tp_size=world_size, **options)
    mesh = cpu_mesh((world_size,), ("tensor_parallel",))
    return found, apply_layout(model, found, mesh["tensor_parallel"])


def make_optimizer(kind, model):
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-3)


def relative(found, expected):
    return ((found - expected).norm() / expected.norm().clamp_min(1e-3)).item()


def train_beside_one_process(name, world_size, kind, options):
    """Return the worst relative errors of losses, gradients and weights over three steps, and fallbacks."""
    reference = build(name)
    model = copy.deepcopy(reference)
    found, runtime = split(model, world_size, **options)
    optimizers = make_optimizer(kind, reference), make_optimizer(kind, model)
    worst = {"loss": 0.0, "grad": 0.0, "weight": 0.0, "buffer": 0.0}
    for seed in range(3):
        batch = reference.batch(seed)
        expected = reference.loss(batch)
        expected.backward()
        with runtime.step():
            loss = model.loss(batch)
            loss.backward()
        worst["loss"] = max(worst["loss"], abs(loss.item() - expected.item()) / abs(expected.item()))
        # Relative to the largest gradient: the gradient of a bias before a norm is rounding noise.
        scale = max(p.grad.norm() for p in reference.parameters() if p.grad is not None)
        for (label, one), (_, many) in zip(reference.named_parameters(), model.named_parameters(), strict=True):
            assert (one.grad is None) == (many.grad is None), label
            if one.grad is not None:
                error = (to_full_tensor(many.grad) - one.grad).norm() / one.grad.norm().clamp_min(1e-2 * scale)
                worst["grad"] = max(worst["grad"], error.item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state = whole_state(model)
    assert list(state) == list(reference.state_dict())
    parameters = dict(reference.named_parameters(remove_duplicate=False))
    for label, value in reference.state_dict().items():
        key = "weight" if label in parameters else "buffer"
        if value.is_floating_point():
            worst[key] = max(worst[key], relative(state[label], value))
        else:
            assert torch.equal(state[label], value), label
    return worst, sorted(runtime.fallbacks), found.bytes_per_rank / found.total_bytes


@pytest.mark.parametrize("name", ZOO)
def test_zoo_trains_like_one_process(name):
    kind = "adam" if len(name) % 2 else "sgd"
    for worst, _, _ in run_ranks(2, train_beside_one_process, name, 2, kind, {}):
        assert max(worst.values()) < 1e-5, worst


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_four_ranks_train_like_one_process(name):
    for worst, _, share in run_ranks(4, train_beside_one_process, name, 4, "adam", {}):
        assert max(worst.values()) < 1e-5, worst
        if name == "gpt":
            assert share < 1 / 4 + 0.02
