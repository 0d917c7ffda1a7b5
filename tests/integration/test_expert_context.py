"""Expert parallelism over context-parallel ranks: each dispatches the tokens of its own part of a sequence."""

from __future__ import annotations

import functools

import pytest
import torch

from lightning_pardist import HybridStrategy
from tests.helpers.expert_runs import (
    BUSY,
    assert_checkpoints_go_round,
    assert_evaluates_like_one_process,
    assert_trains_like_one_process,
    busy_module,
    fit,
)
from tests.helpers.experts import LENGTH, Mixture
from tests.helpers.ranks import run_ranks

_SLOW = pytest.mark.slow
_BLOCKS = ("listed block", "dense block")


def _strategy(experts=2, context=2, data_parallel="ddp", **settings):
    if data_parallel == "zero3":
        settings["data_settings"] = {"min_unit_size_mb": 0}
    return HybridStrategy(
        expert_parallel_size=experts, context_parallel_size=context, data_parallel=data_parallel, **settings
    )


@pytest.mark.push("stacked-2-2-ddp")
@pytest.mark.parametrize(
    ("layer", "experts", "ranks", "data_parallel"),
    [
        ("stacked", 2, 2, "ddp"),
        ("listed block", 4, 4, "zero2"),
        *(
            pytest.param(layer, *cell, marks=_SLOW)
            for layer in ("stacked", "listed", "dense", "chain", *_BLOCKS)
            for cell in ((2, 2, "zero1"), (4, 4, "ddp"), (2, 4, "zero3"), (4, 4, "zero3"), ("auto", 4, "zero2"))
        ),
    ],
)
def test_ranks_train_like_one_process(layer, experts, ranks, data_parallel):
    strategy = functools.partial(_strategy, experts, data_parallel=data_parallel)
    held = ranks if data_parallel == "zero3" or experts == "auto" else experts
    assert_trains_like_one_process(strategy, 1 / held, busy_module(layer), ranks, **BUSY)


class Watched(Mixture):
    """Records the number of tokens dispatched to this rank's experts, and how layers are run."""

    def on_train_end(self):
        super().on_train_end()
        (runtime,) = (axis.runtime for axis in self.trainer.strategy.axes if axis.name == "expert")
        self.held["in parts"] = [choice.rows is not None for choice in runtime.choices]
        self.held["load"] = [int(runner.load.sum()) for runner in runtime.runners if runner.load is not None]
        self.held["sent"] = runtime.peers.sent_bytes


@pytest.mark.parametrize(("layer", "times"), [("listed block", 1), pytest.param("listed", 2, marks=_SLOW)])
def test_each_token_travels_once_where_layers_compute_rows_by_themselves(layer, times):
    run = functools.partial(fit, _strategy, 2, module=functools.partial(Watched, layer))
    found = [each["held"] for each in run_ranks(2, run)]
    assert all(each["in parts"] == [times == 1] * 2 for each in found)
    # Two experts per token, in 24 sequences for training, 10 for evaluation, and 4 for the sanity check; a layer that
    # stores a mean gets the whole sequences on each rank.
    tokens = (24 + 10 + 4) * LENGTH
    assert [sum(loads) for loads in zip(*(each["load"] for each in found), strict=True)] == [times * tokens * 2] * 2


class Asking(Mixture):
    """Computes gradients of a router and of experts in a step, and has a hook on a router."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        block = self.layers[0].block
        (router,) = torch.autograd.grad(loss, [block.router.weight], retain_graph=True)
        self.log("router", router.square().sum(), on_step=False, on_epoch=True)
        return loss

    def on_train_start(self):
        self.layers[1].block.router.weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))


@pytest.mark.parametrize("layer", ["listed block"])
def test_gradients_that_are_asked_for_and_hooks_of_routers_are_one_process_s(layer):
    assert_trains_like_one_process(_strategy, 1 / 2, functools.partial(Asking, layer), ranks=2)


@_SLOW
@pytest.mark.parametrize("layer", ["stacked", *_BLOCKS])
@pytest.mark.parametrize("context", [2, 4])
def test_stages_and_checkpointed_layers_train_like_one_process(layer, context):
    beside = {"activation_checkpointing": ["Stacked" if layer == "stacked" else "Scored"]}
    if context == 2:
        beside = {"pipeline_parallel_size": 2, "pipeline_settings": {"num_microbatches": 2}}
    strategy = functools.partial(_strategy, context, context, **beside)
    assert_trains_like_one_process(strategy, 1 / 4, busy_module(layer), 4)


@_SLOW
@pytest.mark.parametrize("layer", ["stacked", "listed block"])
@pytest.mark.parametrize("form", ["full", "sharded"])
@pytest.mark.parametrize("data_parallel", ["ddp", "zero2", "zero3"])
def test_checkpoints_go_to_any_degree_and_back(layer, form, data_parallel, tmp_path):
    ways = [(4, 2, form), (2, 2, form), (4, 1, form), (4, 4, "full")]
    strategies = [
        functools.partial(_strategy, experts, context, data_parallel, checkpoint=saved)
        for experts, context, saved in ways
    ]
    assert_checkpoints_go_round(strategies, functools.partial(Mixture, layer), tmp_path)


@pytest.mark.parametrize("layer", ["listed block", pytest.param("stacked", marks=_SLOW)])
def test_ranks_with_fewer_batches_take_part_in_the_others_evaluation(layer):
    assert_evaluates_like_one_process(layer, functools.partial(_strategy, 4))


def test_context_ranks_that_do_not_divide_those_of_experts_are_refused():
    with pytest.raises(ValueError, match=r"expert_parallel_size=3 with context_parallel_size=2.* to 2, 4 or 'auto'"):
        _strategy(3).resolve_dims(6)
    with pytest.raises(ValueError, match="Set context_parallel_size to a divisor of 4"):
        _strategy(4, "auto").resolve_dims(8)
