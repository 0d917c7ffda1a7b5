"""Placement of parameters on stages, without any process group."""

from __future__ import annotations

import torch

from lightning_pardist.engines.pipeline import Placement, plan_stages, record_step
from tests.helpers.pipeline_zoo import make


def placement(rank: int) -> Placement:
    model, batch = make("gpt", 4)
    made = plan_stages(record_step(model, model.training_step, batch), 2)
    return Placement(model, made, (0, 1), rank)


def test_freeing_keeps_ties_shapes_and_names() -> None:
    mine = placement(1)
    model = mine.module
    names = [name for name, _ in model.named_parameters()]
    size = sum(p.numel() * 4 for name, p in model.named_parameters() if not mine.is_local(name))
    assert mine.free() == size > 0
    assert [name for name, _ in model.named_parameters()] == names
    assert not model.wte.weight.is_meta
    assert model.positions.is_meta
    assert model.positions.shape == (6, 16)
    assert mine.free() == 0


def test_every_parameter_has_one_owner() -> None:
    both = [placement(0), placement(1)]
    for one in both:
        for parameter in one.module.parameters():
            parameter.grad = torch.ones_like(parameter)
        one.free()
    whole = sum(p.numel() for p in placement(0).module.parameters())
    assert sum(p.grad.numel() for one in both for p in one.owned()) == whole
    assert both[0].owner_of("head.weight") == both[0].owner_of("wte.weight") == 0
    assert both[0].owner_of("norm.weight") == 1


def test_gradients_survive_zeroing() -> None:
    one = placement(0)
    parameter = one.module.norm.weight
    parameter.grad = torch.ones_like(parameter)
    taken = one.take_gradients()
    one.module.zero_grad()
    assert parameter.grad is None
    one.add_gradients(taken)
    one.add_gradients(taken)
    assert torch.equal(parameter.grad, torch.full_like(parameter, 2.0))
