"""Batched norms and clipping of many gradients, as on devices, against one by one."""

import math

import pytest
import torch

from lightning_pardist.engines.common import gradient_math


def _grads():
    generator = torch.Generator().manual_seed(0)
    shapes = [(7, 5), (11,), (), (3, 4, 5), (2, 0), (64, 64)]
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float16]
    made = [torch.randn(shape, generator=generator) for shape in shapes for _ in dtypes]
    return [grad.to(dtype) for grad, dtype in zip(made, dtypes * len(shapes), strict=True)]


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.5, math.inf])
def test_together_is_one_by_one(norm_type, monkeypatch):
    device = torch.device("cpu")
    found = []
    for together in (False, True):
        monkeypatch.setattr(gradient_math, "use_foreach", lambda members, value=together: value)
        grads = _grads()
        total = gradient_math.sum_of_powers(grads, norm_type, device=device)
        gradient_math.scale_(grads, torch.tensor(0.37))
        gradient_math.clamp_(grads, 0.2)
        found.append((total, grads))
    (one, first), (other, second) = found
    assert one.dtype == torch.float64
    torch.testing.assert_close(other, one, rtol=1e-6, atol=0)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
        assert not a.numel() or a.abs().max() <= 0.2001


def test_no_gradients_have_no_norm():
    assert gradient_math.sum_of_powers([torch.zeros(0)], 2.0, device=torch.device("cpu")) == 0
