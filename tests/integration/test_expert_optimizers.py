"""Optimizers that need whole tensors, with the experts distributed over ranks."""

from __future__ import annotations

import functools

import pytest
import torch

from lightning_pardist import HybridStrategy
from tests.helpers.expert_runs import BUSY, assert_checkpoints_go_round, assert_trains_like_one_process
from tests.helpers.experts import Mixture
from tests.helpers.optimizers import Lamb, MuonAndAdam, NormOfAll

#: A large eps: a tiny one turns rounding noise into full steps.
ADAFACTOR = functools.partial(torch.optim.Adafactor, lr=0.05, eps=(1e-3, 1e-3))
LBFGS = functools.partial(torch.optim.LBFGS, lr=0.1, max_iter=2)
_LAYERS = ("listed", "stacked")


def _strategy(data_parallel="ddp", **settings):
    if data_parallel == "zero3":
        settings["data_settings"] = {"min_unit_size_mb": 0}
    return HybridStrategy(data_parallel=data_parallel, **{"expert_parallel_size": 2, **settings})


def _check(layer, optimizer, share, ranks, of_trainer=BUSY, **settings):
    # One expert receives no tokens, and has no gradient in a list.
    module = functools.partial(Mixture, layer, optimizer=optimizer, rare=True)
    assert_trains_like_one_process(functools.partial(_strategy, **settings), share, module, ranks, **of_trainer)


@pytest.mark.push("listed-ddp-*")
@pytest.mark.parametrize(
    ("layer", "data_parallel", "optimizer"),
    [
        ("listed", "ddp", MuonAndAdam),
        ("stacked", "zero2", ADAFACTOR),
        ("listed", "zero3", Lamb),
        *(
            pytest.param(layer, data_parallel, optimizer, marks=pytest.mark.slow)
            for layer in _LAYERS
            for data_parallel in ("ddp", "zero1", "zero2", "zero3")
            for optimizer in (MuonAndAdam, ADAFACTOR, Lamb, NormOfAll)
        ),
    ],
)
def test_two_ranks_update_whole_tensors(layer, data_parallel, optimizer):
    _check(layer, optimizer, 1 / 2, 2, data_parallel=data_parallel)


class Divided(Mixture):
    """The experts of one rank have an optimizer of their own."""

    def __init__(self, layer="listed"):
        super().__init__(layer)
        self.automatic_optimization = False

    def configure_optimizers(self):
        first = [p for layer in self.layers for expert in layer.experts[:2] for p in expert.parameters()]
        others = [p for p in self.parameters() if all(p is not each for each in first)]
        return ADAFACTOR(first), torch.optim.SGD(others, lr=0.1)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("data_parallel", ["ddp", pytest.param("zero2", marks=pytest.mark.slow)])
def test_an_optimizer_of_one_ranks_experts(data_parallel):
    assert_trains_like_one_process(functools.partial(_strategy, data_parallel), 1 / 2, Divided, 2)


@pytest.mark.slow
@pytest.mark.parametrize("layer", _LAYERS)
@pytest.mark.parametrize("data_parallel", ["ddp", "zero2", "zero3"])
def test_a_closure_is_called_again(layer, data_parallel):
    _check(layer, LBFGS, 1 / 2, 2, {}, data_parallel=data_parallel)


@pytest.mark.parametrize(
    ("layer", "data_parallel", "beside"),
    [
        ("stacked", "zero2", None),
        *(
            pytest.param(layer, data_parallel, beside, marks=pytest.mark.slow)
            for layer in _LAYERS
            for data_parallel in ("ddp", "zero2", "zero3")
            for beside in (None, "tensor", "context", "pipeline")
        ),
    ],
)
def test_four_ranks_update_whole_tensors(layer, data_parallel, beside):
    # Unless stages or ZeRO-3 ranks that share experts divide them further, each rank has half of the experts.
    is_sharded = data_parallel == "zero3" and beside in (None, "context")
    share = 1 / 4 if beside == "pipeline" or is_sharded else 1 / 2
    settings = {} if beside is None else {f"{beside}_parallel_size": 2}
    for optimizer in (MuonAndAdam, NormOfAll):
        _check(layer, optimizer, share, 4, data_parallel=data_parallel, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("layer", _LAYERS)
@pytest.mark.parametrize("form", ["full", "sharded"])
@pytest.mark.parametrize("data_parallel", ["ddp", "zero2", "zero3"])
def test_checkpoints_go_from_any_degree_to_any(layer, form, data_parallel, tmp_path):
    strategies = [
        functools.partial(_strategy, data_parallel, expert_parallel_size=degree, checkpoint=saved)
        for degree, saved in ((2, form), (4, form), (1, form), (2, "full"))
    ]
    if (data_parallel, layer) == ("zero3", "listed"):
        # With ZeRO-3, undistributed experts of a list are gathered as a rank's own tokens require.
        del strategies[2]
    assert_checkpoints_go_round(strategies, functools.partial(Mixture, layer, optimizer=MuonAndAdam), tmp_path)
