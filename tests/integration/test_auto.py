"""``pardist_auto`` trains identically to the strategy that it selects, the same on every rank."""

import pytest
import torch

from lightning_pardist import AutoStrategy, PipelineStrategy, TensorParallelStrategy
from lightning_pardist.strategies.zero import ZeroStrategy
from tests.helpers.models import MODULES
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import BATCH, Data, quiet_trainer

CHOICES = {
    "pardist_zero2": lambda: ZeroStrategy(zero_stage=2),
    "pardist_tp": lambda: TensorParallelStrategy(tensor_parallel_size=2),
    "pardist_pp": lambda: PipelineStrategy(pipeline_parallel_size=2),
}


def _fit(make, devices):
    torch.manual_seed(11)
    module = MODULES["classifier"](optimizer="adam")
    strategy = make()
    trainer = quiet_trainer(strategy=strategy, devices=devices, use_distributed_sampler=False)
    trainer.fit(module, datamodule=Data(module.dataset(BATCH * 3)))
    chosen = str(strategy.chosen) if isinstance(strategy, AutoStrategy) else ""
    return snapshot(module), chosen, strategy.dims.layout, torch.random.get_rng_state()


def _both(name):
    auto = _fit(lambda: AutoStrategy(strategies=[name]), 2)
    return auto, _fit(CHOICES[name], 2)


@pytest.mark.push("pardist_tp")
@pytest.mark.parametrize("name", CHOICES)
def test_it_trains_as_what_it_has_chosen(name):
    results = run_ranks(2, _both, name)
    for (weights, chosen, layout, rng), (wanted, _, degrees, other_rng) in results:
        assert chosen.startswith(name)
        assert layout == degrees
        assert_close(weights, wanted)
        assert torch.equal(rng, other_rng)


def _default():
    return _fit(AutoStrategy, 2)[1]


def test_ranks_agree():
    first, second = run_ranks(2, _default)
    assert first == second


class Looking(MODULES["classifier"]):
    """Module whose step fails on the placeholder values used for planning."""

    def training_step(self, batch, batch_idx):
        if next(self.parameters()).abs().max().item() == 1.0:
            raise ArithmeticError("weights of one")
        return super().training_step(batch, batch_idx)


def _without_a_plan(memory_gb):
    module = Looking(optimizer="adam")
    strategy = AutoStrategy(memory_gb=memory_gb)
    trainer = quiet_trainer(strategy=strategy, devices=2, use_distributed_sampler=False)
    trainer.fit(module, datamodule=Data(module.dataset(BATCH * 2)))
    return str(strategy.chosen), trainer.global_step, strategy.dims.layout


@pytest.mark.push("1.0-*")
@pytest.mark.parametrize(("memory_gb", "name"), [(1.0, "pardist_ddp"), (1e-6, "pardist_zero3")])
def test_without_a_plan_it_trains_by_what_states_take(memory_gb, name):
    (chosen, steps, _), other = run_ranks(2, _without_a_plan, memory_gb)
    assert (chosen, steps) == (name, other[1])
    assert steps > 0


def _with_little_memory():
    strategy = AutoStrategy(
        strategies=["pardist_ddp", "pardist_zero2"], memory_gb=1e-6, activation_checkpointing=["Linear"]
    )
    trainer = quiet_trainer(strategy=strategy, devices=2)
    module = MODULES["classifier"](optimizer="adam")
    trainer.fit(module, datamodule=Data(module.dataset(BATCH)))
    return strategy.chosen.strategy, strategy.activation_checkpointing


def test_where_nothing_fits_it_takes_what_needs_the_least():
    assert run_ranks(2, _with_little_memory) == [("pardist_zero2", ["Linear"])] * 2


def test_an_unknown_name_is_refused_at_once():
    with pytest.raises(ValueError, match="no strategy 'pardist_zero9'"):
        AutoStrategy(strategies=["pardist_zero9"])
