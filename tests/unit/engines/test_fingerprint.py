"""Fingerprints that detect changed values without storing them."""

import pytest
import torch

from lightning_pardist.engines.common.fingerprint import bit_sums


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3000,), (64, 33)])
def test_bits_of_changed_values(dtype, shape):
    values = torch.randn(shape).to(dtype)
    before = bit_sums(values)
    assert before.shape == (1021,)
    assert torch.equal(bit_sums(values.clone()), before)
    for index in range(0, values.numel(), 500):
        changed = values.clone().view(-1)
        changed[index] = torch.nextafter(changed[index].double(), torch.tensor(9.0).double()) + 0.1
        assert not torch.equal(bit_sums(changed), before)
    if values.dim() == 2:
        assert not torch.equal(bit_sums(values.roll(1, 0)), before)
