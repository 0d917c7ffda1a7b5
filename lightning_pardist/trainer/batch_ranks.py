"""Makes the ranks with different samples the default process group of user code, in steps and dataloader hooks."""

from __future__ import annotations

import lightning.pytorch as pl

from lightning_pardist.compat.default_group import DefaultGroup, in_step
from lightning_pardist.compat.lightning_loops import data_source
from lightning_pardist.trainer.patch_stack import Patch, PatchStack


def show_batch_ranks(trainer: pl.Trainer, default_group: DefaultGroup, patches: PatchStack) -> None:
    """Make the batch's ranks torch's default group for user code of this run. Not collective.

    Args:
        trainer: The Trainer, before the run.
        default_group: Patch of the default group; effective in steps once attached.
        patches: Patches of the run.
    """
    patches.attach(default_group)
    fit = trainer.fit_loop
    loops = (fit, fit.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
    for source in map(data_source, loops):
        # A dataloader hook may create a sampler from torch.distributed's rank and world size.
        patches.attach(Patch(source, "dataloader", in_step()(source.dataloader)))
