"""Expert parallelism within each pipeline stage: parity, memory, checkpoints, evaluation and refusals."""

from __future__ import annotations

import functools

import pytest
from torch.utils.data import DataLoader

from lightning_pardist import ExpertParallelStrategy, HybridStrategy
from tests.helpers.expert_runs import (
    BUSY,
    assert_checkpoints_go_round,
    assert_evaluates_like_one_process,
    assert_trains_like_one_process,
    busy_module,
    fit,
)
from tests.helpers.experts import LAYERS, Data, Mixture
from tests.helpers.parity import assert_close
from tests.helpers.ranks import RankFailed, run_ranks
from tests.helpers.runs import quiet_trainer

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


@pytest.mark.push("stacked-zero2-1f1b")
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
    # Each rank has half of the experts of one of the two layers.
    strategy = functools.partial(_strategy, data_parallel, schedule)
    assert_trains_like_one_process(strategy, 1 / 4, busy_module(layer), **BUSY)


@pytest.mark.slow
@pytest.mark.parametrize("layer", ["listed", "stacked"])
def test_checkpointed_blocks_of_stages_train_like_one_process(layer):
    strategy = functools.partial(_strategy, activation_checkpointing=[LAYERS[layer].__name__])
    assert_trains_like_one_process(strategy, 1 / 4, functools.partial(Mixture, layer))


@pytest.mark.slow
@pytest.mark.parametrize("layer", ["listed", "stacked"])
@pytest.mark.parametrize("form", ["full", "sharded"])
@pytest.mark.parametrize("data_parallel", ["ddp", "zero2", "zero3"])
def test_checkpoints_go_to_stages_and_back(layer, form, data_parallel, tmp_path):
    """From one process to experts in stages, to experts without stages, to stages without, and back to one process."""
    ways = [(2, 2, form), (4, 1, form), (1, 2, form), (2, 2, "full")]
    strategies = [
        functools.partial(_strategy, data_parallel, experts=experts, stages=stages, checkpoint=saved)
        for experts, stages, saved in ways
    ]
    assert_checkpoints_go_round(strategies, functools.partial(Mixture, layer), tmp_path)


@pytest.mark.parametrize("layer", ["listed", pytest.param("stacked", marks=_SLOW), pytest.param("dense", marks=_SLOW)])
def test_stages_with_fewer_batches_take_part_in_the_others_evaluation(layer):
    assert_evaluates_like_one_process(layer, _strategy)


class Ragged(Data):
    """Data in which one data-parallel rank's last batch can be split, and the other's cannot."""

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


@pytest.mark.slow
def test_data_ranks_make_as_many_micro_batches_as_each_other():
    expected = run_ranks(4, _ragged, functools.partial(_strategy, experts=1))[0]
    for each in run_ranks(4, _ragged, _strategy):
        assert_close(each, expected)


class Bare(Mixture):
    """Expert layers that are not items of a list: their experts would be the smallest units to cut between."""

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
    assert_trains_like_one_process(_strategy, 1 / 4, Bare)


class Loads(Mixture):
    """Records the logged expert load."""

    def __init__(self):
        super().__init__("stacked")
        self.logged = []

    def on_train_batch_end(self, outputs, batch, batch_idx):
        metrics = self.trainer.callback_metrics
        self.logged += [float(metrics[f"expert_load/layers.{index}.experts"]) for index in range(2)]


def _loads(strategy, devices):
    module = Loads()
    trainer = quiet_trainer(strategy=strategy(), devices=devices, use_distributed_sampler=False, max_steps=3)
    trainer.fit(module, datamodule=Data())
    return module.logged


def test_the_load_of_experts_of_all_stages_is_logged_on_every_rank():
    expected = run_ranks(2, _loads, functools.partial(ExpertParallelStrategy, log_expert_load=True), 2)[0]
    assert len(expected) == 6
    settings = {"expert_settings": {"log_expert_load": True}}
    for logged in run_ranks(4, _loads, functools.partial(_strategy, **settings), 4):
        assert logged == pytest.approx(expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "interleaved_zb"}, "schedule='interleaved_zb' with expert_parallel_size=2 would repeat"),
    ],
)
def test_what_cannot_be_right_with_stages_is_refused(settings, message):
    with pytest.raises(RankFailed, match=message):
        run_ranks(4, functools.partial(fit, functools.partial(_strategy, **settings), 4))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "pieces"),
    [
        (Mixture, 2),
        pytest.param(Bare, 2, marks=_SLOW),
        pytest.param(functools.partial(Mixture, "chain"), 1, marks=_SLOW),
    ],
)
def test_sharded_stages_whose_experts_are_not_apart_train_like_one_process(module, pieces):
    """A rank's called experts depend on its samples: ranks gather all experts of a layer together."""
    strategy = functools.partial(_strategy, "zero3", experts=1, pieces=pieces)
    for each in run_ranks(4, functools.partial(fit, strategy, 4, module=module, gradient_clip_val=0.5)):
        assert_close(each["weights"], fit(module=module, gradient_clip_val=0.5)["weights"])


class InItself(Mixture):
    """Calls experts in the module's own forward, which every stage runs."""

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
        run_ranks(4, functools.partial(fit, _strategy, 4, module=InItself))
    with pytest.raises(RankFailed, match="called by InItself itself, depending on the routing of tokens"):
        run_ranks(4, functools.partial(fit, functools.partial(_strategy, "zero3", experts=1), 4, module=InItself))
