"""Cross entropy of vocabulary-parallel logits, and gradients that must not be shared between parameters."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_pardist.engines.tensor import Layout, SplitTensor, TensorRuntime, apply_layout, plan_layout
from tests.helpers.ranks import cpu_mesh, run_ranks

CLASSES = 12
CASES = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smoothed": {"label_smoothing": 0.1},
    "ignored": {"ignore_index": 3},
    "ignored and smoothed": {"ignore_index": -100, "label_smoothing": 0.3},
}


def _logits(kind):
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(6, CLASSES, 2, generator=generator)
    target = torch.randint(0, CLASSES // 2, (6, 2), generator=generator)
    if kind == "masked":
        # One rank has no unmasked class.
        logits[:, CLASSES // 2 :] = float("-inf")
    if kind == "large":
        logits = logits + 1e4
    target[2, 1] = 3
    return logits, target


def _losses(mesh_size):
    runtime = TensorRuntime(cpu_mesh((mesh_size,), ("tensor_parallel",))["tensor_parallel"])
    found = {}
    for name, options in CASES.items():
        for kind in ("plain", "masked", "large"):
            if kind == "masked" and "label_smoothing" in options:
                continue
            logits, target = _logits(kind)
            if "ignored" in name:
                target[0] = options["ignore_index"]
            whole = logits.clone().requires_grad_()
            expected = F.cross_entropy(whole, target, **options)
            expected.sum().backward()
            part = Layout(1).take(logits, runtime.group.rank, mesh_size).clone().requires_grad_()
            with runtime.step():
                loss = F.cross_entropy(SplitTensor(part, Layout(1), runtime), target, **options)
                loss.sum().backward()
            mine = Layout(1).take(whole.grad, runtime.group.rank, mesh_size)
            same_loss = loss.shape == expected.shape and torch.allclose(loss, expected, rtol=1e-5, atol=1e-6)
            found[name, kind] = same_loss, torch.allclose(part.grad, mine, rtol=1e-4, atol=1e-6)
    assert not runtime.fallbacks
    return found


def test_losses_and_gradients_of_split_logits():
    for found in run_ranks(2, _losses, 2):
        assert all(all(item) for item in found.values()), found


def _out_of_range():
    runtime = TensorRuntime(cpu_mesh((2,), ("tensor_parallel",))["tensor_parallel"])
    split = SplitTensor(torch.randn(3, 4), Layout(1), runtime)
    with runtime.step(), pytest.raises(IndexError, match="8 where 0 to 7"):
        F.cross_entropy(split, torch.tensor([0, 8, 1]))
    weight = SplitTensor(torch.randn(4, 2), Layout(0), runtime)
    with runtime.step(), pytest.raises(IndexError, match="-1 to 2 where 0 to 7"):
        F.embedding(torch.tensor([-1, 2]), weight)


def test_indices_that_no_rank_holds_are_errors():
    run_ranks(2, _out_of_range)


class Sum(nn.Module):
    """Parameters to which autograd passes the same gradient tensor, directly and through views."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.d = (nn.Parameter(torch.randn(4, 4)) for _ in range(4))

    def forward(self):
        return (self.a + self.b).pow(2).sum() + (self.c.view(2, 8) + self.d.view(2, 8)).pow(2).sum()


def _own_gradients():
    module, reference = Sum(), Sum()
    mesh = cpu_mesh((2,), ("tensor_parallel",))["tensor_parallel"]
    runtime = apply_layout(module, plan_layout(module, module, tp_size=2), mesh)
    with runtime.step():
        module().backward()
    reference().backward()
    for p in module.parameters():
        p.grad.mul_(0.5)
    return [
        torch.allclose(p.grad.full_tensor(), q.grad / 2)
        for p, q in zip(module.parameters(), reference.parameters(), strict=True)
    ]


def test_every_parameter_has_a_gradient_of_its_own():
    for same in run_ranks(2, _own_gradients):
        assert all(same), same
