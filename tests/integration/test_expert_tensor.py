"""Expert parallelism over data and context ranks, combined with tensor-parallel layers."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from lightning_pardist import HybridStrategy
from tests.helpers.expert_runs import (
    BUSY,
    assert_checkpoints_go_round,
    assert_evaluates_like_one_process,
    assert_trains_like_one_process,
    busy_module,
    fit,
)
from tests.helpers.experts import LAYERS, Expert, Mixture
from tests.helpers.ranks import run_ranks

_SLOW = pytest.mark.slow


def _strategy(beside="tensor", data_parallel="ddp", experts=2, ranks=2, **settings):
    if data_parallel == "zero3":
        settings["data_settings"] = {"min_unit_size_mb": 0}
    return HybridStrategy(
        expert_parallel_size=experts,
        data_parallel=data_parallel,
        **{f"{beside}_parallel_size": ranks},
        **settings,
    )


@_SLOW
@pytest.mark.parametrize("layer", ["listed", "stacked"])
def test_experts_beside_tensor_and_context_ranks_train_like_one_process(layer):
    strategy = functools.partial(_strategy, experts=4, context_parallel_size=2)
    assert_trains_like_one_process(strategy, 1 / 4, busy_module(layer), ranks=8, **BUSY)


@pytest.mark.push("tensor-stacked-ddp", "context-stacked-ddp")
@pytest.mark.parametrize(
    ("beside", "layer", "data_parallel"),
    [
        ("tensor", "listed", "zero2"),
        ("tensor", "stacked", "ddp"),
        ("context", "stacked", "ddp"),
        *(
            pytest.param(*cell, marks=_SLOW)
            for cell in (
                ("tensor", "listed", "ddp"),
                ("tensor", "stacked", "zero1"),
                ("tensor", "dense", "ddp"),
                ("tensor", "chain", "zero2"),
                ("tensor", "listed", "zero3"),
                ("tensor", "stacked", "zero3"),
                ("tensor", "dense", "zero3"),
                ("context", "listed", "zero2"),
                ("context", "dense", "ddp"),
                ("context", "chain", "zero1"),
                ("context", "listed", "zero3"),
                ("context", "stacked", "zero3"),
                ("context", "dense", "zero3"),
            )
        ),
    ],
)
def test_ranks_that_share_samples_train_like_one_process(beside, layer, data_parallel):
    strategy = functools.partial(_strategy, beside, data_parallel)
    # Tensor ranks have the same experts. Context ranks have different ones, which here two data ranks share.
    shards = 2 if (beside, data_parallel) == ("context", "zero3") else 1
    assert_trains_like_one_process(strategy, 1 / 2 / shards, busy_module(layer), **BUSY)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "data_parallel"), [("listed", "ddp"), ("stacked", "zero2"), ("listed", "zero3"), ("stacked", "zero3")]
)
@pytest.mark.parametrize("ranks", [4, 8])
def test_split_sequences_and_stages_beside_experts_train_like_one_process(layer, data_parallel, ranks):
    """On 4 ranks, with sequence parallelism; on 8, with two pipeline stages."""
    settings = {"tensor_settings": {"sequence_parallel": True}}
    if ranks == 8:
        settings = {"pipeline_parallel_size": 2, "pipeline_settings": {"num_microbatches": 2}}
    strategy = functools.partial(_strategy, "tensor", data_parallel, **settings)
    assert_trains_like_one_process(strategy, 2 / ranks, busy_module(layer), ranks, **BUSY)


class _Times(torch.autograd.Function):
    """Identity in forward that multiplies the gradient in backward."""

    @staticmethod
    def forward(ctx, tensor, factor):
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


class LouderExpert(Expert):
    def forward(self, x):
        return F.linear(F.gelu(self.up(x)), _Times.apply(self.down.weight, self.factor), self.down.bias)


class Louder(Mixture):
    """Experts whose gradients differ between ranks with the same tokens: on odd ranks they are larger."""

    def __init__(self, layer="listed"):
        super().__init__(layer)
        # In a step, ranks that share samples report the same rank.
        self.factor = 1 + 0.5 * (dist.get_rank() % 2)
        for each in self.layers:
            for expert in each.experts if layer == "listed" else ():
                expert.__class__, expert.factor = LouderExpert, self.factor

    def on_train_start(self):
        for each in self.layers:
            if not isinstance(each.experts, torch.nn.ModuleList):
                each.experts.down.register_hook(lambda grad: grad * self.factor)


@pytest.mark.parametrize(
    ("beside", "layer", "data_parallel"),
    [
        ("tensor", "stacked", "zero2"),
        pytest.param("tensor", "listed", "ddp", marks=_SLOW),
        pytest.param("tensor", "listed", "zero3", marks=_SLOW),
        pytest.param("tensor", "stacked", "ddp", marks=_SLOW),
        pytest.param("tensor", "listed", "zero1", marks=_SLOW),
        pytest.param("context", "listed", "ddp", marks=_SLOW),
        pytest.param("context", "stacked", "zero2", marks=_SLOW),
        pytest.param("context", "listed", "zero3", marks=_SLOW),
    ],
)
def test_copies_of_experts_stay_equal_whatever_their_gradients_are(beside, layer, data_parallel):
    """Sums in nondeterministic order (``index_add`` on a GPU) give ranks with the same tokens different gradients."""
    strategy = functools.partial(_strategy, beside, data_parallel)
    run = functools.partial(fit, strategy, 4, module=functools.partial(Louder, layer), gradient_clip_val=0.5)
    found = [each["weights"] for each in run_ranks(4, run)]
    for weights in found[1:]:
        assert all(torch.equal(value, found[0][name]) for name, value in weights.items())


@pytest.mark.slow
@pytest.mark.parametrize("beside", ["tensor", "context"])
@pytest.mark.parametrize("layer", ["listed", "stacked"])
def test_checkpointed_blocks_train_like_one_process(beside, layer):
    strategy = functools.partial(_strategy, beside, activation_checkpointing=[LAYERS[layer].__name__])
    assert_trains_like_one_process(strategy, 1 / 2, functools.partial(Mixture, layer))


@pytest.mark.slow
@pytest.mark.parametrize("beside", ["tensor", "context"])
@pytest.mark.parametrize("layer", ["listed", "stacked"])
@pytest.mark.parametrize("form", ["full", "sharded"])
@pytest.mark.parametrize("data_parallel", ["ddp", "zero2", "zero3"])
def test_checkpoints_go_to_ranks_that_share_samples_and_back(beside, layer, form, data_parallel, tmp_path):
    """From one process to both axes, to experts only, to the other axis only, to both again, and to one process."""
    # With ZeRO-3, undistributed experts of a list are gathered as a rank's own tokens require.
    third = (2, 2) if (data_parallel, layer) == ("zero3", "listed") else (1, 2)
    ways = [(2, 2, form), (4, 1, form), (*third, form), (2, 2, "full")]
    strategies = [
        functools.partial(_strategy, beside, data_parallel, experts=experts, ranks=ranks, checkpoint=saved)
        for experts, ranks, saved in ways
    ]
    assert_checkpoints_go_round(strategies, functools.partial(Mixture, layer), tmp_path)


@pytest.mark.parametrize("beside", ["tensor", "context"])
@pytest.mark.parametrize("layer", ["listed", pytest.param("stacked", marks=_SLOW), pytest.param("dense", marks=_SLOW)])
def test_ranks_with_fewer_batches_take_part_in_the_others_evaluation(beside, layer):
    assert_evaluates_like_one_process(layer, functools.partial(_strategy, beside))
