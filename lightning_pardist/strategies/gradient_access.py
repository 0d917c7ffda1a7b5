"""Every way to gradients beside ``param.grad``, led to the engine that keeps them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from lightning_pardist.engines.api import DataEngine
from lightning_pardist.engines.gradient_norm import clip_grad_norm, clip_grad_value
from lightning_pardist.engines.process_group import world_group
from lightning_pardist.strategies.attachments import Attachments, Replaced
from lightning_pardist.strategies.gradients import JobWideGradients
from lightning_pardist.strategies.scaling import JobWideScaling

if TYPE_CHECKING:
    from lightning_pardist.strategies.base import PardistStrategy


class GradientAccess:
    """While attached, clipping, unscaling and ``zero_grad`` reach what the engine keeps, on all ranks.

    They are replaced where Lightning and users call them: on the precision plugin and its scaler, on the module and its
    optimizers, and, in torch and Lightning, by :class:`JobWideGradients`.

    Args:
        strategy: Set up for ``fit``, its optimizers made.
        module: Whose gradients.
        engine: That keeps them, of the data axis.
    """

    def __init__(self, strategy: PardistStrategy, module: nn.Module, engine: DataEngine) -> None:
        self.strategy = strategy
        self.module = module
        self.engine = engine
        self._attached = Attachments()

    def attach(self) -> None:
        """Replace them. Not collective."""
        strategy = self.strategy
        # The plugin's own see only what this rank's optimizer holds.
        plugin = strategy.precision_plugin
        self._attached.attach(Replaced(plugin, "clip_grad_by_norm", self._clip_by_norm))
        self._attached.attach(Replaced(plugin, "clip_grad_by_value", self._clip_by_value))
        self._attached.attach(Replaced(self.module, "zero_grad", self._zero_grad_after(self.module.zero_grad)))
        self._attached.attach(JobWideGradients(self.module, self.engine, strategy.model_axes))
        scaler = getattr(strategy.precision_plugin, "scaler", None)
        if scaler is not None:
            self._attached.attach(
                JobWideScaling(
                    scaler,
                    self.engine,
                    group=world_group(),
                    device=strategy.root_device,
                    before=strategy.before_collective,
                )
            )
        for wrapped in strategy._lightning_optimizers:
            # It took over what the optimizer had before the engine came.
            if "zero_grad" in wrapped._optimizer.__dict__:
                wrapped.__dict__["zero_grad"] = wrapped._optimizer.zero_grad

    def detach(self) -> None:
        """Give everything back. Not collective."""
        self._attached.detach()

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        clip_grad_norm(self.engine, _params(optimizer), float(clip_val), axes=self.strategy.model_axes)

    def _clip_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        clip_grad_value(self.engine, _params(optimizer), float(clip_val))

    def _zero_grad_after(self, own: Callable[..., None]) -> Callable[..., None]:
        # No bound method: a deep copy of the module, as averages of weights need, would take the strategy along.
        @wraps(own)
        def zero_grad(*args: Any, **kwargs: Any) -> None:
            own(*args, **kwargs)
            self.engine.zero_grad()

        return zero_grad


def _params(optimizer: Optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]
