"""Replaced methods of a module, in copies and pickled modules."""

import copy
import io

import torch
from torch import nn

from lightning_pardist.trainer.patch_stack import OwnMethod, Patch


def test_copies_have_their_own_method():
    module, calls = nn.Linear(2, 2), []
    patch = Patch(module, "zero_grad", OwnMethod(module, "zero_grad", lambda *args: calls.append(args)))
    patch.attach()
    saved = io.BytesIO()
    torch.save(module, saved)
    saved.seek(0)
    for other in (copy.deepcopy(module), torch.load(saved, weights_only=False)):
        for each in (*module.parameters(), *other.parameters()):
            each.grad = torch.ones_like(each)
        other.zero_grad()
        assert all(each.grad is None for each in other.parameters())
        assert all(each.grad is not None for each in module.parameters())
    assert not calls
    module.zero_grad(1)
    assert calls == [(1,)]
    patch.detach()
    module.zero_grad()
    assert module.weight.grad is None
    assert "zero_grad" not in vars(module)
