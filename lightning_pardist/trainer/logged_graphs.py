"""Graphs that loggers draw of the module, drawn before ranks take it apart."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import Logger
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_pardist.trainer.patch_stack import Patch, PatchStack
from lightning_pardist.trainer.resumable_loaders import rng_state, set_rng_state


class LoggedGraphs:
    """Has loggers trace the module, as ``TensorBoardLogger(log_graph=True)`` does, while it is whole.

    Lightning asks for it on the first rank alone when the module is set up, where one that is split or sharded cannot
    be called. Its own call is left out, once.

    Args:
        trainer: Whose loggers.
        module: Plain, as the user wrote it.
    """

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        asked = trainer.loggers if trainer.enable_autolog_hparams else []
        self._loggers = [logger for logger in asked if type(logger).log_graph is not Logger.log_graph]
        self._module = module
        self._attached = PatchStack()

    def attach(self) -> None:
        """Have it drawn, if the module has values to be called with. Not collective: loggers draw on the first rank."""
        if not self._loggers or any(parameter.is_meta for parameter in self._module.parameters()):
            return
        before = rng_state()
        for logger in self._loggers:
            try:
                logger.log_graph(self._module)
            except Exception as error:
                # On one rank alone, which the others would wait for; a module may run on its device only.
                why = (str(error).splitlines() or [""])[0]
                rank_zero_warn(
                    f"{type(logger).__name__} could not draw the module's graph on the host, before ranks take it apart"
                    f" ({type(error).__name__}: {why}). Train without it, or draw it in a process by itself."
                )
            self._attached.attach(_leave_out_once(logger))
        # Other ranks have drawn no random numbers.
        set_rng_state(before)

    def detach(self) -> None:
        """Give loggers their methods back. Not collective."""
        self._attached.detach()


def _leave_out_once(logger: Logger) -> Patch:
    def nothing(*args: Any, **kwargs: Any) -> None:
        patch.detach()

    patch = Patch(logger, "log_graph", nothing)
    return patch
