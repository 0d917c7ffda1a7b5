"""The counts that ranks exchange: numbers on the host and tensors on a device give the same factors."""

from dataclasses import fields

import pytest
import torch
import torch.nn.functional as F

from lightning_pardist.engines.common import loss_balance
from lightning_pardist.engines.common.loss_balance import Value, exchange
from lightning_pardist.engines.common.loss_terms import find_terms
from lightning_pardist.engines.common.mean_counts import MeanPart

LOSSES = {
    "mean": lambda out, labels: F.cross_entropy(out, labels, ignore_index=0),
    "several": lambda out, labels: F.cross_entropy(out, labels, ignore_index=0) + out.square().mean() + 0.1 * out.sum(),
    "clamped": lambda out, labels: (out[:, 0] * (labels > 1)).sum() / (labels > 1).sum().clamp(min=1),
}


def _sent(name, labels, monkeypatch):
    """Return the arguments of the arithmetic on what one rank has sent."""
    seen = []
    with monkeypatch.context() as patched:
        patched.setattr(loss_balance, "_balance", lambda *args: seen.extend(args))
        out = torch.randn(len(labels), 3, requires_grad=True)
        sums = MeanPart.of_sum(torch.tensor(2.0))
        values = [Value("mean", MeanPart(torch.tensor(0.25), float(len(labels)))), Value("sum", sums)]
        terms = find_terms(LOSSES[name](out, labels), samples=len(labels))
        exchange(terms, samples=float(len(labels)), values=values, group=None, device=torch.device("cpu"))
    return seen


@pytest.mark.parametrize("other", ["several", "mean", "clamped"])
@pytest.mark.parametrize("name", LOSSES)
def test_tensors_give_the_factors_of_numbers(name, other, monkeypatch):
    terms, slots, own, _, _, device = _sent(name, torch.tensor([0, 1, 2, 2, 0]), monkeypatch)
    _, _, others, _, _, _ = _sent(other, torch.tensor([1, 1, 0]), monkeypatch)
    sums = [one + another for one, another in zip(own, others, strict=True)]
    wanted = loss_balance._balance(terms, slots, own, sums, 2, device)
    tensors = torch.tensor(own, dtype=torch.float64), torch.tensor(sums, dtype=torch.float64)
    found = loss_balance._balance(terms, slots, *tensors, 2, device)
    for field in fields(wanted):
        if field.name != "values":
            assert torch.equal(getattr(found, field.name), getattr(wanted, field.name)), field.name
    for value, number in zip(found.values, wanted.values, strict=True):
        assert (float(value.value), float(value.ranks)) == (number.value, number.ranks)
