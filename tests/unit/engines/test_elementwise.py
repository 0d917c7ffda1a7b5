"""Trial runs that distinguish optimizers that may step on parts of parameters from others."""

import pytest
import torch
from torch import nn

from lightning_pardist.engines.common.elementwise import is_elementwise, state_bytes_per_element


class Lamb(torch.optim.Optimizer):
    """Some groups step by a ratio of norms, the others as SGD does."""

    def __init__(self, params, lr=0.1, ratio=False):
        super().__init__(params, {"lr": lr, "ratio": ratio})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    scale = p.norm() / p.grad.norm() if group["ratio"] else 1.0
                    p.sub_(p.grad * scale * group["lr"])


class OneEstimate(torch.optim.Optimizer):
    """Divides by a norm over all of its parameters, like optimizers that estimate their learning rate."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = sum(p.grad.pow(2).sum() for p in params).sqrt()
        for p in params:
            p.sub_(p.grad / norm)


class Wraps(torch.optim.Optimizer):
    """Optimizer that steps another optimizer."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        self.inner = torch.optim.SGD(self.param_groups, lr=0.1)

    def step(self, closure=None):
        self.inner.step(closure)


ELEMENTWISE = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, 4),
    (torch.optim.AdamW, {"lr": 0.1, "amsgrad": True}, 12),
    (torch.optim.Adam, {"lr": 0.1, "fused": True}, 8),
    (torch.optim.Rprop, {"lr": 0.1}, 8),
    # A warmup's first learning rate.
    (torch.optim.Adam, {"lr": 0.0}, 8),
    (Lamb, {}, 0),
]
OTHERS = [
    (torch.optim.LBFGS, {"lr": 0.1}),
    (torch.optim.Adafactor, {"lr": 0.1}),
    (torch.optim.Adafactor, {"lr": 0.0}),
    (Lamb, {"ratio": True}),
    (OneEstimate, {}),
    (Wraps, {}),
]


@pytest.mark.parametrize("form", ["flat", "dims"])
@pytest.mark.parametrize(("kind", "options", "state"), ELEMENTWISE)
def test_elementwise_optimizers_pass_untouched(kind, options, state, form):
    parameter = nn.Parameter(torch.ones(3, 3))
    optimizer = kind([parameter], **options)
    assert is_elementwise(optimizer, form=form)
    assert torch.equal(parameter, torch.ones(3, 3))
    assert not optimizer.state
    assert state_bytes_per_element(optimizer) == [state]


@pytest.mark.parametrize("form", ["flat", "dims"])
@pytest.mark.parametrize(("kind", "options"), OTHERS)
def test_others_are_found(kind, options, form):
    parameter = nn.Parameter(torch.ones(3, 3))
    assert not is_elementwise(kind([parameter], **options), form=form)
    assert torch.equal(parameter, torch.ones(3, 3))


def test_every_group_is_tried():
    groups = [{"params": [nn.Parameter(torch.ones(3))]}, {"params": [nn.Parameter(torch.ones(3, 3))], "ratio": True}]
    assert not is_elementwise(Lamb(groups), form="dims")
