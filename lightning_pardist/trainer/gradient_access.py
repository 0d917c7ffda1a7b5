"""Redirects gradient clipping, unscaling and ``zero_grad`` to the engine that holds the gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import nn
from torch.optim import Optimizer

from lightning_pardist.axes.base import RunContext
from lightning_pardist.collectives import world_group
from lightning_pardist.engines.common.gradient_norm import clip_grad_norm, clip_grad_value
from lightning_pardist.engines.data_engine import DataEngine
from lightning_pardist.trainer.grad_scaling import JobWideScaling
from lightning_pardist.trainer.gradient_functions import JobWideGradients
from lightning_pardist.trainer.patch_stack import OwnMethod, Patch, PatchStack


class GradientAccess:
    """Redirects gradient clipping, unscaling and ``zero_grad`` to the data engine while attached.

    They are replaced where Lightning and users call them: on the precision plugin and its scaler, on the module and its
    optimizers, and, for functions of torch and Lightning, by :class:`JobWideGradients`.

    Args:
        context: Context that is set up for ``fit``, including optimizers.
        module: Module whose gradients are handled.
        engine: Engine of the data axis that holds the gradients.
        wrapped: Lightning's wrappers of the optimizers.
    """

    def __init__(
        self, context: RunContext, module: nn.Module, engine: DataEngine, wrapped: Sequence[LightningOptimizer]
    ) -> None:
        self.context = context
        self.wrapped = wrapped
        self.module = module
        self.engine = engine
        self._attached = PatchStack()

    def attach(self) -> None:
        """Replace the methods. Not collective."""
        context = self.context
        # The plugin's methods see only the gradients in this rank's optimizer.
        plugin = context.precision
        # Functions, which copies of the plugin share, not bound methods, with which they would copy the engine.
        self._attached.attach(Patch(plugin, "clip_grad_by_norm", lambda *args: self._clip_by_norm(*args)))
        self._attached.attach(Patch(plugin, "clip_grad_by_value", lambda *args: self._clip_by_value(*args)))
        zero_grad = self._zero_grad_after(self.module.zero_grad)
        self._attached.attach(Patch(self.module, "zero_grad", OwnMethod(self.module, "zero_grad", zero_grad)))
        stages = context.dims.pipeline_parallel > 1
        self._attached.attach(JobWideGradients(self.module, self.engine, context.model_axes, stages=stages))
        scaler = getattr(plugin, "scaler", None)
        if scaler is not None:
            self._attached.attach(
                JobWideScaling(
                    scaler,
                    self.engine,
                    group=world_group(),
                    device=context.device,
                    before=context.before_collective,
                )
            )
        for wrapped in self.wrapped:
            # The wrapper copied the optimizer's zero_grad before the engine replaced it.
            if "zero_grad" in wrapped.optimizer.__dict__:
                wrapped.__dict__["zero_grad"] = wrapped.optimizer.zero_grad

    def detach(self) -> None:
        """Restore the methods. Not collective."""
        self._attached.detach()

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        clip_grad_norm(self.engine, _params(optimizer), float(clip_val), axes=self.context.model_axes)

    def _clip_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        clip_grad_value(self.engine, _params(optimizer), float(clip_val))

    def _zero_grad_after(self, own: Callable[..., None]) -> Callable[..., None]:
        def zero_grad(*args: Any, **kwargs: Any) -> None:
            own(*args, **kwargs)
            self.engine.zero_grad()

        return zero_grad


def _params(optimizer: Optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]
