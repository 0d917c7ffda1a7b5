"""Trial runs that find what optimizers need to see of their parameters."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

from lightning_pardist.engines.common.update_scope import find_scope, known_scope
from tests.helpers.optimizers import ELEMENTWISE, JOINT, PER_TENSOR, ScheduleFree

SCOPES = {"elementwise": ELEMENTWISE, "per_tensor": PER_TENSOR, "joint": JOINT}
CELLS = [(scope, name) for scope, makers in SCOPES.items() for name in makers]


def _parameters():
    return [nn.Parameter(torch.ones(shape)) for shape in ((3, 4), (5,), (2, 3, 3))]


@pytest.mark.parametrize(("scope", "name"), CELLS)
def test_scopes(scope, name):
    if "transformers" in name:
        pytest.importorskip("transformers")
    params = _parameters()
    optimizer = SCOPES[scope][name](params)
    groups = [dict(group) for group in optimizer.param_groups]
    random = torch.get_rng_state()
    found = find_scope(optimizer, form="dims")
    assert found.scope == scope
    assert known_scope(optimizer) == found
    assert found.in_rounds
    assert found.steps_on_none
    # The trial has no side effects.
    assert all(torch.equal(param, torch.ones_like(param)) for param in params)
    assert torch.equal(random, torch.get_rng_state())
    assert all(group.keys() == before.keys() for group, before in zip(optimizer.param_groups, groups, strict=True))
    assert all(
        group["params"] is before["params"] for group, before in zip(optimizer.param_groups, groups, strict=True)
    )


class LargeOnes(torch.optim.Optimizer):
    """Treats large tensors by blocks, like optimizers with 8-bit states."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                scale = p.grad.abs().max() if p.numel() >= 4096 else 1.0
                p.sub_(group["lr"] * p.grad / scale)


class EvenBlocks(torch.optim.Optimizer):
    """Scales blocks of 256 elements of large tensors that divide evenly, and stores its learning rate in a tensor."""

    def __init__(self, params):
        super().__init__(params, {"lr": torch.tensor(0.1)})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if not isinstance(group["lr"], torch.Tensor):
                raise RuntimeError("lr was changed to a non-Tensor object")
            for p in group["params"]:
                grad = p.grad
                if p.numel() >= 4096 and p.numel() % 256 == 0:
                    blocks = grad.reshape(-1, 256)
                    grad = (blocks / blocks.abs().amax(1, keepdim=True)).view_as(grad)
                p.sub_(group["lr"] * grad)


class CountsCalls(torch.optim.Optimizer):
    """Counts its calls."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] / self.calls * p.grad / p.grad.norm())


class EstimatesAtFirst(torch.optim.Optimizer):
    """Accumulates a norm over all parameters, and uses it from the tenth step on, like D-adaptation."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "steps": 0, "norm": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                group["norm"] += p.grad.norm().item()
                p.sub_(group["lr"] * p.grad / (group["norm"] if group["steps"] > 9 else 1.0))


class CountsElements(torch.optim.Optimizer):
    """Counts tensors and elements, for example for a log."""

    def __init__(self, params, by_norm=False):
        super().__init__(params, {"lr": 0.1})
        self.by_norm, self.seen = by_norm, 0

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.seen += p.numel()
                self.state["tensors"] = self.state.get("tensors", 0) + 1
                p.sub_(group["lr"] * p.grad / (p.grad.norm() if self.by_norm else 1.0))


class Draws(torch.optim.Optimizer):
    """Adds noise."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * (p.grad + torch.randn_like(p)))


def test_what_depends_on_size_or_on_calls_is_seen():
    assert find_scope(LargeOnes(_parameters()), form="flat").scope == "per_tensor"
    assert find_scope(EvenBlocks(_parameters()), form="flat").scope == "per_tensor"
    assert find_scope(EvenBlocks(_parameters()), form="dims").scope == "per_tensor"
    found = find_scope(CountsCalls(_parameters()), form="dims")
    assert found.scope == "per_tensor"
    assert not found.in_rounds


@pytest.mark.parametrize("form", ["flat", "dims"])
def test_counts_of_elements_are_no_estimates(form):
    assert find_scope(CountsElements(_parameters()), form=form).scope == "elementwise"
    assert find_scope(CountsElements(_parameters(), by_norm=True), form=form).scope == "per_tensor"


def test_an_optimizer_is_tried_in_its_training_mode():
    optimizer = ScheduleFree([nn.Parameter(torch.ones(4, 4))])
    assert find_scope(optimizer, form="dims").scope == "elementwise"
    assert not optimizer.param_groups[0]["trains"]


def test_random_numbers_are_refused():
    with pytest.raises(ValueError, match=r"Cannot determine whether Draws .* draws random numbers"):
        find_scope(Draws(_parameters()), form="dims")


def test_the_user_has_the_last_word():
    found = find_scope(Draws(_parameters()), form="dims", setting="joint")
    assert (found.scope, found.is_set) == ("joint", True)


class Distributed(torch.optim.Optimizer):
    """Rank r updates every r-th tensor, like Muon's multi-device reference implementation."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad / p.grad.norm())
                dist.all_gather([p], p)


class Averages(torch.optim.Optimizer):
    """Elementwise optimizer that averages gradients itself."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * functional.all_reduce(p.grad, "sum", dist.group.WORLD))


@pytest.mark.parametrize("kind", [Distributed, Averages])
def test_a_step_that_talks_to_other_ranks_is_refused(kind, tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match=rf"{kind.__name__} calls collectives .* single-device version"):
            find_scope(kind(_parameters()), form="dims")
        # The trial has no side effects.
        dist.all_reduce(torch.ones(1))
    finally:
        dist.destroy_process_group()


class Centralizes(torch.optim.Optimizer):
    """Centers gradients of convolutions (arXiv 2004.01461), and of marked parameters."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.dim() > 3 or getattr(p, "centered", False):
                    p.grad.sub_(p.grad.mean())
                p.sub_(group["lr"] * p.grad)


@pytest.mark.parametrize("form", ["flat", "dims"])
def test_numbers_of_dims_and_attributes_are_those_of_the_parameters(form):
    params = _parameters()
    assert find_scope(Centralizes(params), form=form).scope == "elementwise"
    convolution = nn.Parameter(torch.ones(4, 2, 3, 3))
    assert find_scope(Centralizes([*params, convolution]), form=form).scope == "per_tensor"
    params[0].centered = False
    assert find_scope(Centralizes(params), form=form).scope == "elementwise"
    params[1].centered = True
    assert find_scope(Centralizes(params), form=form).scope == "per_tensor"


@pytest.mark.parametrize("form", ["dims", "flat"])
def test_an_estimate_over_all_parameters_is_found_before_it_matters(form):
    assert find_scope(EstimatesAtFirst(_parameters()), form=form).scope == "joint"
