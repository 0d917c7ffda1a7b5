"""Logs the module's graph (``log_graph``) before the module is sharded or split."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import Logger
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_pardist.trainer.patch_stack import Patch, PatchStack
from lightning_pardist.trainer.resumable_loaders import rng_state, set_rng_state


class LoggedGraphs:
    """Calls the loggers' ``log_graph``, as for ``TensorBoardLogger(log_graph=True)``, on the untransformed module.

    Lightning calls it during setup on the first rank only, where a split or sharded module cannot be called. That one
    call of Lightning's is skipped.

    Args:
        trainer: Trainer whose loggers are called.
        module: The user's module, not transformed yet.
    """

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        asked = trainer.loggers if trainer.enable_autolog_hparams else []
        self._loggers = [logger for logger in asked if type(logger).log_graph is not Logger.log_graph]
        self._module = module
        self._attached = PatchStack()

    def attach(self) -> None:
        """Log the graph, unless parameters are on the meta device. Not collective: loggers act on the first rank."""
        if not self._loggers or any(parameter.is_meta for parameter in self._module.parameters()):
            return
        before = rng_state()
        for logger in self._loggers:
            try:
                logger.log_graph(self._module)
            except Exception as error:
                # Not raised, since it fails on one rank only and the others would wait. Some modules need their device.
                why = (str(error).splitlines() or [""])[0]
                rank_zero_warn(
                    f"{type(logger).__name__} could not log the module's graph on the host, before the module is split"
                    f" over ranks ({type(error).__name__}: {why}). Train without the graph, or log it in a separate"
                    " process."
                )
            self._attached.attach(_leave_out_once(logger))
        # The other ranks have drawn no random numbers.
        set_rng_state(before)

    def detach(self) -> None:
        """Restore the loggers' methods. Not collective."""
        self._attached.detach()


def _leave_out_once(logger: Logger) -> Patch:
    def nothing(*args: Any, **kwargs: Any) -> None:
        patch.detach()

    patch = Patch(logger, "log_graph", nothing)
    return patch
