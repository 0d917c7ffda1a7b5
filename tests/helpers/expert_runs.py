"""Multi-rank runs of mixtures of experts, and comparisons with one process."""

from __future__ import annotations

import functools

import torch

from tests.helpers.experts import Data, Mixture
from tests.helpers.parity import assert_close, snapshot
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import quiet_trainer


def fit(strategy="auto", devices=1, ckpt_path=None, save=None, module=Mixture, **kwargs):
    """Train a module on this rank, or on one process, and return the results to compare."""
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
    """Return the results of one process for a mixture with this kind of layer."""
    return fit(module=functools.partial(Mixture, layer), **kwargs)


def compare(found, wanted, share):
    """Check that each rank's results equal one process's, with this share of the expert parameters held."""
    for each in found:
        assert_close(each["weights"], wanted["weights"])
        assert_close(each["metrics"], wanted["metrics"])
        assert each["plain"]
        assert each["held"]["parameters"] == wanted["held"]["parameters"] * share


def assert_trains_like_one_process(strategy, share, module=Mixture, ranks=4, **of_trainer):
    """Check that a strategy, each rank with a share of the expert parameters, trains as one process does."""
    found = run_ranks(ranks, functools.partial(fit, strategy, ranks, module=module, **of_trainer))
    compare(found, fit(module=module, **of_trainer), share)


#: Trainer arguments for gradient clipping and accumulation.
BUSY = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}


def busy_module(layer):
    """Return a mixture factory; for layers that support it, with an expert that receives no tokens."""
    return functools.partial(Mixture, layer, rare=layer in ("listed", "stacked"))


def assert_checkpoints_go_round(strategies, module, folder):
    """Move a checkpoint from one process through each strategy on four ranks, an epoch each, and back."""
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
    """Return validation metrics, and predictions."""
    trainer = quiet_trainer(strategy=strategy() if callable(strategy) else strategy, devices=devices)
    module = Mixture(layer)
    metrics = trainer.validate(module, datamodule=Data(), verbose=False)[0]
    return {k: torch.tensor(v) for k, v in metrics.items()}, trainer.predict(module, datamodule=Data())


def assert_evaluates_like_one_process(layer, strategy, ranks=4):
    """Check evaluation with different numbers of batches per data-parallel rank."""
    wanted, results = evaluate(layer)
    found = run_ranks(ranks, evaluate, layer, strategy, ranks)
    for metrics, _ in found:
        assert_close(metrics, wanted)
    # Every sample has one process's prediction, whichever rank computes it, and none is missing.
    rows = torch.cat([batch for _, batches in found for batch in batches]).flatten(1)
    distance = torch.cdist(rows.double(), torch.cat(results).flatten(1).double())
    assert distance.min(1).values.max() < 1e-5
    assert distance.min(0).values.max() < 1e-5
