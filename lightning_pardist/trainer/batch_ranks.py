"""Loaders as well as steps take the ranks with different samples for the world, where user code makes them."""

from __future__ import annotations

import lightning.pytorch as pl

from lightning_pardist.compat.default_group import DefaultGroup, in_step
from lightning_pardist.compat.lightning_loops import data_source
from lightning_pardist.trainer.patch_stack import Patch, PatchStack


def show_batch_ranks(trainer: pl.Trainer, default_group: DefaultGroup, patches: PatchStack) -> None:
    """Let user code of this run see the batch's ranks as torch's default group. Not collective.

    Args:
        trainer: About to run.
        default_group: Answers in steps from here on.
        patches: Of the run.
    """
    patches.attach(default_group)
    fit = trainer.fit_loop
    loops = (fit, fit.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
    for source in map(data_source, loops):
        # A hook may make a sampler of torch.distributed's rank and size.
        patches.attach(Patch(source, "dataloader", in_step()(source.dataloader)))
