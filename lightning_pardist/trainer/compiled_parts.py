"""Applies the settings ``compile`` and ``compile_backend``: what of a module is compiled during training."""

from __future__ import annotations

from typing import get_args

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_pardist.axes.base import RunContext
from lightning_pardist.compat.lightning_loops import is_compiled
from lightning_pardist.engines.common.compilation import Backend, Compilation, Compile
from lightning_pardist.settings import one_of
from lightning_pardist.trainer.patch_stack import Patch


class CompiledParts:
    """Compiles a module's blocks or its training step for a run of ``fit``.

    Args:
        setting: What to compile.
        backend: The compiler backend.
        context: Context of the run.

    Raises:
        ValueError: If the setting is unknown.
    """

    def __init__(self, setting: Compile | None, backend: Backend, context: RunContext) -> None:
        if setting is not None:
            one_of("compile", setting, get_args(Compile), or_else="None")
        self.setting: Compile = setting or "auto"
        self.backend = backend
        self._context = context
        self._compilation: Compilation | None = None
        self._step: Patch | None = None

    def check(self, trainer: pl.Trainer) -> None:
        """Check that the setting can be applied, before the module is changed. Not collective.

        Raises:
            ValueError: If it cannot; the message gives the reason and the fix.
        """
        if self.setting == "auto":
            return
        module, whole_step = trainer.lightning_module, self.setting == "step"
        for axis in self._context.axes:
            if why := axis.compile_refusal(whole_step):
                raise ValueError(f"compile={self.setting!r} is not available under {self._context.name}, which {why}.")
        if is_compiled(module):
            raise ValueError(
                f"compile={self.setting!r} is set, and {type(module).__name__} was compiled as a whole before it was"
                " given to the Trainer. Leave one of them out."
            )
        if not whole_step:
            return
        if not module.automatic_optimization:
            raise ValueError(
                f"compile='step': {type(module).__name__} optimizes by hand (automatic_optimization=False), so backward"
                " passes and optimizer steps run inside the step. Use compile='blocks'."
            )
        weight = self._context.loss_weight
        if weight in ("auto", "tokens") and self._context.dims.batch_size > 1:
            raise ValueError(
                f"compile='step' hides the loss' graph, from which loss_weight={weight!r} reads the counts that weight"
                " the ranks' losses. Use compile='blocks', or set loss_weight: 'samples' if all samples count equally,"
                " 'sum', or a function of the batch."
            )

    def compile_blocks(self, module: pl.LightningModule) -> None:
        """Compile the blocks if the setting is ``"blocks"``; this changes their classes. Not collective.

        Raises:
            ValueError: If there are no blocks, or the backend is unknown.
        """
        if self.setting == "blocks":
            self._compilation = Compilation("blocks", self.backend, report=rank_zero_warn)
            self._compilation.compile_blocks(module)

    def compile_step(self, module: pl.LightningModule) -> None:
        """Compile the training step if the setting is ``"step"``. Called after all trial runs. Not collective.

        Raises:
            ValueError: If the backend is unknown.
        """
        if self.setting == "step":
            self._compilation = Compilation("step", self.backend, report=rank_zero_warn)
            compiled = self._compilation.compiled_step(module, module.training_step)
            self._step = Patch(module, "training_step", compiled)
            self._step.attach()

    def describe(self) -> str:
        """Return one line for the log on what is compiled; empty if nothing is."""
        return "" if self._compilation is None else str(self._compilation)

    def undo(self) -> None:
        """Log what was compiled and restore the module. Not collective."""
        compilation, self._compilation = self._compilation, None
        if compilation is None:
            return
        if compilation.graphs:
            rank_zero_info(str(compilation))
        if self._step is not None:
            self._step.detach()
            self._step = None
        compilation.undo()
