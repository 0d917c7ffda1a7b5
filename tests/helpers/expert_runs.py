"""Runs of mixtures of experts on ranks, and what they are compared with."""

from __future__ import annotations

import functools

import torch

from tests.helpers.experts import Data, Mixture
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import quiet_trainer


def fit(strategy="auto", devices=1, ckpt_path=None, save=None, module=Mixture, **kwargs):
    """Train a module on this rank, or on one process, and say what has come of it."""
    module = module()
    strategy = strategy() if callable(strategy) else strategy
    trainer = quiet_trainer(strategy=strategy, devices=devices, use_distributed_sampler=False, **kwargs)
    trainer.fit(module, datamodule=Data(), ckpt_path=ckpt_path)
    if save is not None:
        trainer.save_checkpoint(save)
    metrics = {key: value.clone() for key, value in trainer.callback_metrics.items() if key != "loss_step"}
    plain = all(type(p) is torch.nn.Parameter and not p.is_meta for p in module.parameters())
    return {"metrics": metrics, "weights": snapshot(module), "plain": plain, "held": module.held}


@functools.cache
def one_process(layer, **kwargs):
    """What one process gives for a mixture of this kind of layers."""
    return fit(module=functools.partial(Mixture, layer), **kwargs)


def compare(found, wanted, share):
    """Each rank's run is that of one process, with this share of the experts' parameters."""
    for each in found:
        assert_close(each["weights"], wanted["weights"])
        assert_close(each["metrics"], wanted["metrics"])
        assert each["plain"]
        assert each["held"]["parameters"] == wanted["held"]["parameters"] * share


def assert_trains_like_one_process(strategy, share, module=Mixture, ranks=4, **of_trainer):
    """A strategy's ranks, each with a share of the experts' parameters, train as one process does."""
    found = run_ranks(ranks, functools.partial(fit, strategy, ranks, module=module, **of_trainer))
    compare(found, fit(module=module, **of_trainer), share)


#: Of settings that make more of a step than a forward and a backward.
BUSY = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}


def busy_module(layer):
    """A mixture, where it can be one with an expert that nothing goes to."""
    return functools.partial(Mixture, layer, rare=layer in ("listed", "stacked"))


def assert_checkpoints_go_round(strategies, module, folder):
    """From one process through each strategy on four ranks, an epoch each, and back to one process."""
    path, epochs = folder / "1.ckpt", len(strategies) + 1
    fit(module=module, save=path, max_epochs=1)
    for epoch, strategy in enumerate(strategies, 2):
        after = folder / f"{epoch}.ckpt"
        found = run_ranks(4, functools.partial(fit, strategy, 4, path, after, module, max_epochs=epoch))
        path = after
    weights = fit(module=module, max_epochs=epochs)["weights"]
    for each in found:
        assert_close(each["weights"], weights)
    back = fit(ckpt_path=path, module=module, max_epochs=epochs + 1)["weights"]
    assert_close(back, fit(module=module, max_epochs=epochs + 1)["weights"])


def evaluate(layer, strategy="auto", devices=1):
    """Metrics of validation, and predictions."""
    trainer = quiet_trainer(strategy=strategy() if callable(strategy) else strategy, devices=devices)
    module = Mixture(layer)
    metrics = trainer.validate(module, datamodule=Data(), verbose=False)[0]
    return {k: torch.tensor(v) for k, v in metrics.items()}, trainer.predict(module, datamodule=Data())


def assert_evaluates_like_one_process(layer, strategy, ranks=4):
    """Data ranks have different numbers of batches, and take part in each other's."""
    wanted, results = evaluate(layer)
    found = run_ranks(ranks, evaluate, layer, strategy, ranks)
    for metrics, _ in found:
        assert_close(metrics, wanted)
    # Whichever rank has a sample, its prediction is one process's, and no sample lacks one.
    rows = torch.cat([batch for _, batches in found for batch in batches]).flatten(1)
    distance = torch.cdist(rows.double(), torch.cat(results).flatten(1).double())
    assert distance.min(1).values.max() < 1e-5
    assert distance.min(0).values.max() < 1e-5
