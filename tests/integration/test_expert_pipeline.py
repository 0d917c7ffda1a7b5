"""Experts over ranks of each pipeline stage: numbers, memory, checkpoints, evaluation and what is refused."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_pardist import HybridStrategy
from tests.helpers.experts import LAYERS, Data, Mixture
from tests.helpers.parity import assert_close
from tests.helpers.ranks import RankFailed, run_ranks
from tests.helpers.runs import quiet_trainer
from tests.integration.test_expert import _compare, _evaluate, _expected, _fit

_SLOW = pytest.mark.slow


def _strategy(data_parallel="ddp", schedule="1f1b", experts=2, stages=2, pieces=2, **settings):
    pipeline = {"schedule": schedule, "num_microbatches": pieces}
    if schedule == "interleaved":
        pipeline["chunks_per_rank"] = 2
    if data_parallel == "zero3":
        settings["data_settings"] = {"min_unit_size_mb": 0}
    return HybridStrategy(
        expert_parallel_size=experts,
        pipeline_parallel_size=stages,
        data_parallel=data_parallel,
        pipeline_settings=pipeline,
        **settings,
    )


@pytest.mark.parametrize(
    ("layer", "data_parallel", "schedule"),
    [
        ("listed", "ddp", "1f1b"),
        ("stacked", "zero2", "1f1b"),
        *(
            pytest.param(*cell, marks=_SLOW)
            for cell in (
                ("stacked", "ddp", "gpipe"),
                ("dense", "ddp", "1f1b"),
                ("chain", "zero1", "1f1b"),
                ("listed", "zero1", "gpipe"),
                ("listed", "zero2", "interleaved"),
                ("stacked", "ddp", "interleaved"),
                ("listed", "zero3", "1f1b"),
                ("stacked", "zero3", "1f1b"),
                ("dense", "zero3", "gpipe"),
            )
        ),
    ],
)
def test_stages_whose_experts_are_on_two_ranks_train_like_one_process(layer, data_parallel, schedule):
    module = functools.partial(Mixture, layer, rare=layer in ("listed", "stacked"))
    of_trainer = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
    strategy = functools.partial(_strategy, data_parallel, schedule)
    found = run_ranks(4, functools.partial(_fit, strategy, 4, module=module, **of_trainer))
    # Each rank has half of the experts of one of the two layers.
    _compare(found, _fit(module=module, **of_trainer), 1 / 4)


@pytest.mark.slow
@pytest.mark.parametrize("layer", ["listed", "stacked"])
def test_checkpointed_blocks_of_stages_train_like_one_process(layer):
    module = functools.partial(Mixture, layer)
    classes = [LAYERS[layer].__name__]
    strategy = functools.partial(_strategy, activation_checkpointing=classes)
    _compare(run_ranks(4, functools.partial(_fit, strategy, 4, module=module)), _expected(layer), 1 / 4)


@pytest.mark.slow
@pytest.mark.parametrize("layer", ["listed", "stacked"])
@pytest.mark.parametrize("form", ["full", "sharded"])
@pytest.mark.parametrize("data_parallel", ["ddp", "zero2", "zero3"])
def test_checkpoints_go_to_stages_and_back(layer, form, data_parallel, tmp_path):
    """From one process to experts in stages, to experts without stages, to stages without, and to one process."""
    module = functools.partial(Mixture, layer)
    expected = _fit(module=module, max_epochs=5)["weights"]
    path = tmp_path / "0.ckpt"
    _fit(module=module, save=path, max_epochs=1)
    # With all parameters sharded, ranks gather experts of a list that are not apart as their own tokens ask for them.
    third = (2, 2) if (data_parallel, layer) == ("zero3", "listed") else (1, 2)
    for epochs, (experts, stages) in enumerate(((2, 2), (4, 1), third), 2):
        strategy = functools.partial(_strategy, data_parallel, experts=experts, stages=stages, checkpoint=form)
        after = tmp_path / f"{epochs}.ckpt"
        run_ranks(4, functools.partial(_fit, strategy, 4, path, after, module, max_epochs=epochs))
        path = after
    back = functools.partial(_strategy, data_parallel, checkpoint="full")
    after = tmp_path / "last.ckpt"
    found = run_ranks(4, functools.partial(_fit, back, 4, path, after, module, max_epochs=5))
    for each in found:
        assert_close(each["weights"], expected)
    assert_close(
        _fit(ckpt_path=after, module=module, max_epochs=6)["weights"], _fit(module=module, max_epochs=6)["weights"]
    )


@pytest.mark.parametrize("layer", ["listed", pytest.param("stacked", marks=_SLOW), pytest.param("dense", marks=_SLOW)])
def test_stages_with_fewer_batches_take_part_in_the_others_evaluation(layer):
    expected, results = _evaluate(layer)
    found = run_ranks(4, _evaluate, layer, _strategy, 4)
    for metrics, _ in found:
        assert_close(metrics, expected)
    rows = torch.cat([batch for _, batches in found for batch in batches]).flatten(1)
    distance = torch.cdist(rows.double(), torch.cat(results).flatten(1).double())
    assert distance.min(1).values.max() < 1e-5
    assert distance.min(0).values.max() < 1e-5


class Ragged(Data):
    """The last batch of one data rank can be cut, that of the other cannot."""

    def train_dataloader(self):
        batches = [tuple(batch) for batch in super().train_dataloader()]
        if self.trainer.strategy.distributed_sampler_kwargs["rank"] == 1:
            batches[-1] = (batches[-1][0][:1],)
        return DataLoader(batches, batch_size=None)


def _ragged(strategy):
    module = Mixture()
    trainer = quiet_trainer(strategy=strategy(), devices=4, use_distributed_sampler=False)
    trainer.fit(module, datamodule=Ragged())
    return {name: param.detach().clone() for name, param in module.named_parameters()}


def test_data_ranks_make_as_many_micro_batches_as_each_other():
    expected = run_ranks(4, _ragged, functools.partial(_strategy, experts=1))[0]
    for each in run_ranks(4, _ragged, _strategy):
        assert_close(each, expected)


class Bare(Mixture):
    """Layers of experts that are no items of a list: their experts would be the smallest pieces to cut between."""

    def __init__(self, layer="listed"):
        super().__init__(layer)
        self.first, self.second = self.layers
        del self.layers
        self.layers = (self.first, self.second)

    def forward(self, ids):
        x = self.embed(ids)
        x = self.norm(self.first(x))
        return self.head(self.norm(self.second(x)))


def test_no_cut_goes_through_a_layer_of_experts():
    found = run_ranks(4, functools.partial(_fit, _strategy, 4, module=Bare))
    _compare(found, _fit(module=Bare), 1 / 4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "interleaved_zb"}, "schedule='interleaved_zb' with expert_parallel_size=2 would come to"),
        ({"expert_settings": {"log_expert_load": True}}, "log_expert_load=True is not available with pipeline"),
    ],
)
def test_what_cannot_be_right_with_stages_is_refused(settings, message):
    with pytest.raises(RankFailed, match=message):
        run_ranks(4, functools.partial(_fit, functools.partial(_strategy, **settings), 4))


class InItself(Mixture):
    """Calls experts in its own forward, which every stage runs."""

    def __init__(self, layer="listed"):
        super().__init__(layer)
        self.router, self.experts = self.layers[0].router, self.layers[0].experts
        del self.layers
        self.layers = ()

    def forward(self, ids):
        x = self.embed(ids).reshape(-1, self.head.in_features)
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        out = x
        for index, expert in enumerate(self.experts):
            row, place = (chosen == index).nonzero(as_tuple=True)
            if len(row):
                out = out.index_add(0, row, weights[row, place, None] * expert(x[row]))
        return self.head(self.norm(out)).view(*ids.shape, -1)


def test_experts_of_the_module_itself_are_refused_with_stages():
    with pytest.raises(RankFailed, match="called by the forward of InItself itself"):
        run_ranks(4, functools.partial(_fit, _strategy, 4, module=InItself))
