"""``pardist_ep`` under a Trainer: parity, memory, checkpoints, evaluation and refusals."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lightning_pardist import ExpertParallelStrategy, HybridStrategy
from tests.helpers.expert_runs import assert_evaluates_like_one_process, compare, evaluate, fit, one_process
from tests.helpers.experts import Data, Expert, Mixture, StackedExperts
from tests.helpers.parity import assert_close
from tests.helpers.ranks import RankFailed, run_ranks
from tests.helpers.runs import quiet_trainer


@pytest.mark.parametrize("layer", ["listed", "stacked", "dense", "chain"])
def test_two_ranks_train_like_one_process(layer):
    module = functools.partial(Mixture, layer)
    found = run_ranks(2, functools.partial(fit, ExpertParallelStrategy, 2, module=module))
    compare(found, one_process(layer), 1 / 2)


def _saved_around_an_evaluation(strategy, devices, folder):
    trainer = quiet_trainer(strategy=strategy(), devices=devices, use_distributed_sampler=False)
    module = Mixture("listed")
    trainer.fit(module, datamodule=Data())
    for name in ("fitted", "evaluated"):
        trainer.save_checkpoint(f"{folder}/{name}.ckpt")
        trainer.validate(module, datamodule=Data(), verbose=False)


@pytest.mark.parametrize("data_parallel", [pytest.param("ddp", marks=pytest.mark.slow), "zero3"])
def test_a_checkpoint_behind_an_evaluation_has_the_optimizer_as_one_before_it(tmp_path, data_parallel):
    strategy = functools.partial(ExpertParallelStrategy, data_parallel=data_parallel)
    run_ranks(2, _saved_around_an_evaluation, strategy, 2, tmp_path)
    first, second = (
        torch.load(tmp_path / f"{name}.ckpt", weights_only=True)["optimizer_states"][0]["state"]
        for name in ("fitted", "evaluated")
    )
    assert first.keys() == second.keys()
    for number, state in first.items():
        assert_close(second[number], state)


def test_weights_of_experts_may_travel_where_tokens_could():
    strategy = functools.partial(ExpertParallelStrategy, expert_dispatch="weights")
    for layer in ("listed", "stacked"):
        found = run_ranks(2, functools.partial(fit, strategy, 2, module=functools.partial(Mixture, layer)))
        compare(found, one_process(layer), 1 / 2)


@pytest.mark.push("zero2-listed", "ddp-stacked")
@pytest.mark.parametrize("layer", ["listed", "stacked"])
@pytest.mark.parametrize("data_parallel", ["ddp", "zero1", "zero2"])
def test_accumulated_and_clipped_gradients_and_experts_that_get_nothing(layer, data_parallel):
    module = functools.partial(Mixture, layer, rare=True)
    settings = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    strategy = functools.partial(ExpertParallelStrategy, data_parallel=data_parallel)
    found = run_ranks(2, functools.partial(fit, strategy, 2, module=module, **settings))
    compare(found, fit(module=module, **settings), 1 / 2)


@pytest.mark.parametrize(
    ("layer", "data_parallel"),
    [
        ("listed", "ddp"),
        *(
            pytest.param(*cell, marks=pytest.mark.slow)
            for cell in (("stacked", "zero2"), ("stacked", "ddp"), ("listed", "zero1"), ("dense", "zero2"))
        ),
    ],
)
def test_experts_of_two_ranks_shared_by_two(layer, data_parallel):
    module = functools.partial(Mixture, layer)
    strategy = functools.partial(HybridStrategy, expert_parallel_size=2, data_parallel=data_parallel)
    found = run_ranks(4, functools.partial(fit, strategy, 4, module=module, gradient_clip_val=0.5))
    compare(found, fit(module=module, gradient_clip_val=0.5), 1 / 2)


@pytest.mark.parametrize(
    ("form", "layer"),
    [
        ("sharded", "stacked"),
        pytest.param("full", "listed", marks=pytest.mark.slow),
        pytest.param("full", "stacked", marks=pytest.mark.slow),
        pytest.param("sharded", "listed", marks=pytest.mark.slow),
    ],
)
def test_checkpoints_open_at_any_degree(layer, form, tmp_path):
    module = functools.partial(Mixture, layer)
    expert = functools.partial(ExpertParallelStrategy, checkpoint=form)
    run_ranks(2, functools.partial(fit, expert, 2, module=module, save=tmp_path / "two.ckpt", max_epochs=1))
    expected = fit(module=module, max_epochs=2)["weights"]
    resumed = functools.partial(fit, module=module, ckpt_path=tmp_path / "two.ckpt", max_epochs=2)
    found = run_ranks(2, functools.partial(resumed, ExpertParallelStrategy, 2))
    found += run_ranks(2, functools.partial(resumed, "pardist_zero2", 2))
    found += [resumed() if form == "full" else resumed("pardist_ep", 1)]
    for each in found:
        assert_close(each["weights"], expected)


@pytest.mark.slow
def test_a_checkpoint_of_one_process_opens(tmp_path):
    for layer in ("listed", "stacked"):
        module = functools.partial(Mixture, layer)
        fit(module=module, save=tmp_path / f"{layer}.ckpt", max_epochs=1)
        strategy = functools.partial(ExpertParallelStrategy, data_parallel="zero2")
        resumed = functools.partial(fit, module=module, ckpt_path=tmp_path / f"{layer}.ckpt", max_epochs=2)
        for each in run_ranks(2, functools.partial(resumed, strategy, 2)):
            assert_close(each["weights"], fit(module=module, max_epochs=2)["weights"])


@pytest.mark.parametrize("layer", ["listed", "stacked", "dense"])
def test_ranks_with_fewer_batches_take_part_in_the_others_evaluation(layer):
    assert_evaluates_like_one_process(layer, "pardist_ep", 2)


def _evaluate_in_halves(strategy="auto", devices=1):
    found = []
    for layer in ("listed", "stacked"):
        trainer = quiet_trainer(strategy=strategy, devices=devices, precision="bf16-mixed")
        found += trainer.validate(Mixture(layer), datamodule=Data(), verbose=False)
    return {str(number): torch.tensor(metrics["val_loss"]) for number, metrics in enumerate(found)}


def test_ranks_with_fewer_batches_compute_in_the_others_precision():
    expected = _evaluate_in_halves()
    for found in run_ranks(2, _evaluate_in_halves, "pardist_ep", 2):
        # Half precision: sums in another order are rounded differently.
        assert_close(found, expected, 2**-8)


@pytest.mark.parametrize(
    ("layer", "dispatch", "classes"),
    [
        ("listed", "weights", ["Expert"]),
        *(
            pytest.param(*cell, marks=pytest.mark.slow)
            for cell in (
                ("listed", "tokens", ["Listed"]),
                ("listed", "tokens", ["Expert"]),
                ("listed", "weights", ["Listed"]),
                ("stacked", "tokens", ["StackedExperts"]),
                ("stacked", "tokens", "auto"),
            )
        ),
    ],
)
def test_checkpointed_experts_train_like_one_process(layer, dispatch, classes):
    strategy = functools.partial(
        ExpertParallelStrategy, expert_dispatch=dispatch, activation_checkpointing=classes, data_parallel="zero2"
    )
    found = run_ranks(2, functools.partial(fit, strategy, 2, module=functools.partial(Mixture, layer)))
    compare(found, one_process(layer), 1 / 2)


@pytest.mark.slow
@pytest.mark.parametrize("layer", ["listed", "stacked"])
@pytest.mark.parametrize(("data_parallel", "degrees"), [("ddp", (4, 2, 1)), ("zero2", (2, 4, 1))])
def test_checkpoints_go_from_any_degree_to_any(layer, data_parallel, degrees, tmp_path):
    """On four ranks, from and to one process, with every change of the degree."""
    module, path = functools.partial(Mixture, layer), tmp_path / "one.ckpt"
    expected = fit(module=module, max_epochs=4)
    fit(module=module, save=path, max_epochs=1)
    for epochs, degree in enumerate(degrees, 2):
        strategy = functools.partial(
            HybridStrategy, expert_parallel_size=degree, data_parallel=data_parallel, checkpoint="full"
        )
        after = tmp_path / f"{epochs}.ckpt"
        found = run_ranks(4, functools.partial(fit, strategy, 4, path, after, module, max_epochs=epochs))
        assert {each["held"]["parameters"] for each in found} == {expected["held"]["parameters"] // degree}
        path = after
    for each in found:
        assert_close(each["weights"], expected["weights"])
    assert_close(fit(ckpt_path=path, module=module, max_epochs=4)["weights"], expected["weights"])


_ALL_SHARDED = functools.partial(
    HybridStrategy, expert_parallel_size=2, data_parallel="zero3", data_settings={"min_unit_size_mb": 0}
)
_SLOW = pytest.mark.slow


@pytest.mark.push("listed-*")
@pytest.mark.parametrize(
    ("layer", "settings", "share"),
    [
        ("stacked", {}, 1 / 4),
        ("listed", {}, 1 / 4),
        *(
            pytest.param(*cell, marks=_SLOW)
            for cell in (
                ("dense", {}, 1 / 4),
                ("chain", {}, 1 / 4),
                ("stacked", {"data_shard_size": 1}, 1 / 2),
                ("listed", {"data_shard_size": 1}, 1 / 2),
                ("stacked", {"data_settings": {"reshard_after_forward": False}}, 1 / 4),
                ("listed", {"data_settings": {"reshard_after_forward": False}}, 1 / 4),
                ("listed", {"data_settings": {"accumulate": "unsharded"}}, 1 / 4),
                ("stacked", {"activation_checkpointing": ["StackedExperts"]}, 1 / 4),
                ("stacked", {"activation_checkpointing": ["Stacked"]}, 1 / 4),
                ("listed", {"activation_checkpointing": ["Listed"]}, 1 / 4),
                ("listed", {"activation_checkpointing": ["Expert"]}, 1 / 4),
            )
        ),
    ],
)
def test_experts_of_two_ranks_sharded_over_two_and_all_else_over_four(layer, settings, share):
    module = functools.partial(Mixture, layer, rare=True)
    of_trainer = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
    strategy = functools.partial(_ALL_SHARDED, **settings)
    found = run_ranks(4, functools.partial(fit, strategy, 4, module=module, **of_trainer))
    compare(found, fit(module=module, **of_trainer), share)


@pytest.mark.parametrize("layer", ["listed", "stacked"])
@pytest.mark.parametrize("form", ["full", "sharded"])
@pytest.mark.slow
def test_checkpoints_of_sharded_experts_open_at_any_degree(layer, form, tmp_path):
    module = functools.partial(Mixture, layer)
    strategy = functools.partial(_ALL_SHARDED, checkpoint=form)
    run_ranks(4, functools.partial(fit, strategy, 4, module=module, save=tmp_path / "four.ckpt", max_epochs=1))
    expected = fit(module=module, max_epochs=2)["weights"]
    resumed = functools.partial(fit, module=module, ckpt_path=tmp_path / "four.ckpt", max_epochs=2)
    found = run_ranks(2, functools.partial(resumed, "pardist_ep_zero3", 2))
    found += run_ranks(2, functools.partial(resumed, "pardist_zero3", 2))
    found += [resumed() if form == "full" else resumed("pardist_ep", 1)]
    fit(module=module, save=tmp_path / "one.ckpt", max_epochs=1)
    resumed = functools.partial(fit, module=module, ckpt_path=tmp_path / "one.ckpt", max_epochs=2)
    found += run_ranks(4, functools.partial(resumed, strategy, 4))
    for each in found:
        assert_close(each["weights"], expected)


@pytest.mark.parametrize("layer", ["listed", pytest.param("stacked", marks=_SLOW)])
def test_ranks_with_fewer_batches_take_part_where_all_is_sharded(layer):
    expected, _ = evaluate(layer)
    for metrics, _ in run_ranks(4, evaluate, layer, _ALL_SHARDED, 4):
        assert_close(metrics, expected)


@pytest.mark.slow
def test_mixed_precision_is_that_of_whole_parameters():

    for layer in ("listed", "stacked"):
        module = functools.partial(Mixture, layer)
        whole = functools.partial(HybridStrategy, expert_parallel_size=2, data_parallel="zero2")
        run = functools.partial(fit, module=module, precision="bf16-mixed", max_steps=1)
        expected = run_ranks(4, functools.partial(run, whole, 4))[0]
        for each in run_ranks(4, functools.partial(run, _ALL_SHARDED, 4)):
            assert_close(each["weights"], expected["weights"])


class ThriftyExpert(Expert):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class ThriftyStacked(StackedExperts):
    def forward(self, x, index, weights):
        return checkpoint(super().forward, x, index, weights, use_reentrant=self.reentrant)


class Thrifty(Mixture):
    """Experts with activation checkpointing."""

    def __init__(self, layer="listed", reentrant=False):
        super().__init__(layer)
        for each in self.layers:
            experts = [each.experts] if layer == "stacked" else each.experts
            for expert in experts:
                expert.__class__ = ThriftyStacked if layer == "stacked" else ThriftyExpert
                expert.reentrant = reentrant


@pytest.mark.parametrize(
    ("layer", "strategy"),
    [
        ("stacked", functools.partial(ExpertParallelStrategy, expert_parallel_size=2)),
        *(
            pytest.param(*cell, marks=_SLOW)
            for cell in (
                ("listed", _ALL_SHARDED),
                ("stacked", _ALL_SHARDED),
                ("chain", _ALL_SHARDED),
                ("listed", functools.partial(ExpertParallelStrategy, expert_parallel_size=2)),
                ("chain", functools.partial(ExpertParallelStrategy, expert_parallel_size=2)),
            )
        ),
    ],
)
def test_experts_that_checkpoint_themselves(layer, strategy):
    ranks, share = (4, 1 / 4) if strategy is _ALL_SHARDED else (2, 1 / 2)
    found = run_ranks(ranks, functools.partial(fit, strategy, ranks, module=functools.partial(Thrifty, layer)))
    compare(found, one_process(layer), share)


class Counting(Mixture):
    """Records the logged expert load, and the load computed from the routers' outputs."""

    def __init__(self):
        super().__init__("stacked")
        self.logged, self.counted = [], []
        for layer in self.layers:
            layer.router.register_forward_hook(self._count)

    def _count(self, router, args, scores):
        if self.training:
            chosen = scores.topk(2, -1).indices
            self.counted.append(torch.bincount(chosen.flatten(), minlength=4))

    def on_train_batch_start(self, batch, batch_idx):
        self.counted.clear()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        names = [f"expert_load/layers.{index}.experts" for index in range(2)]
        logged = [float(self.trainer.callback_metrics[name]) for name in names]
        self.logged.append((logged, torch.stack(self.counted[-2:])))


def _loads():
    module = Counting()
    strategy = ExpertParallelStrategy(log_expert_load=True)
    trainer = quiet_trainer(strategy=strategy, devices=2, use_distributed_sampler=False, max_steps=3)
    trainer.fit(module, datamodule=Data())
    return module.logged


def test_the_load_of_experts_is_logged():
    first, second = run_ranks(2, _loads)
    assert len(first) == 3
    for (logged, here), (same, there) in zip(first, second, strict=True):
        load = (here + there).double()
        assert logged == same
        assert logged == pytest.approx((load.max(1).values / load.mean(1)).tolist())


class Silent(Mixture):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if self.global_rank else loss


class Lucky(Mixture):
    """Module that calls no experts on the first rank."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) if self.global_rank else self.head.weight.sum()


def _caught(module):
    with pytest.raises((ValueError, RuntimeError)) as caught:
        fit(ExpertParallelStrategy, 2, module=module)
    return str(caught.value)


def test_what_one_rank_refuses_all_do():
    for text in run_ranks(2, _caught, Lucky):
        assert "No experts were found in Lucky.training_step" in text


class Own(Mixture):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList()


def _refused(strategy, devices=2, module=Mixture, **kwargs):
    return functools.partial(fit, strategy, devices, module=module, **kwargs)


@pytest.mark.parametrize(
    ("strategy", "module", "message"),
    [
        (ExpertParallelStrategy, Own, "No experts were found in Own.training_step"),
        (functools.partial(ExpertParallelStrategy, experts=["*.none"]), Mixture, "fits no module of Mixture.*layers"),
        (
            functools.partial(ExpertParallelStrategy, experts=["*.experts", "head"]),
            Mixture,
            "for 'head', the first batch calls no list",
        ),
        (
            functools.partial(ExpertParallelStrategy, data_parallel="zero3", data_settings={"offload": "cpu"}),
            Mixture,
            "offload is not available with expert_parallel_size=2",
        ),
        (
            functools.partial(ExpertParallelStrategy, expert_dispatch="tokens"),
            functools.partial(Mixture, "chain"),
            "expert_dispatch='tokens' does not work for the experts",
        ),
        (ExpertParallelStrategy, Silent, "training_step returned None"),
        (ExpertParallelStrategy, functools.partial(Thrifty, "stacked", reentrant=True), "Pass use_reentrant=False"),
    ],
)
def test_what_cannot_be_right_is_refused(strategy, module, message):
    with pytest.raises(RankFailed, match=message):
        run_ranks(2, _refused(strategy, module=module))
