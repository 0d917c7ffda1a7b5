"""Trial run of the user's step before training, without side effects."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_pardist.compat.lightning_functions import configure_optimizers
from lightning_pardist.compat.lightning_loops import lightning_optimizers, set_strategy
from lightning_pardist.trainer.module_snapshot import ModuleSnapshot

#: Module hooks that run before the first step of each kind, and may prepare state that the step uses.
HOOKS = {
    "training_step": ("on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start"),
    "validation_step": ("on_validation_start", "on_validation_epoch_start", "on_validation_batch_start"),
    "test_step": ("on_test_start", "on_test_epoch_start", "on_test_batch_start"),
    "predict_step": ("on_predict_start", "on_predict_epoch_start", "on_predict_batch_start"),
}

#: Methods of a LightningModule that are no-ops in a trial run.
_SILENT = ("log", "log_dict", "print", "clip_gradients", "toggle_optimizer", "untoggle_optimizer")


def step_name(trainer: pl.Trainer) -> str:
    """Return the name of the step function that the Trainer is about to run."""
    return {
        TrainerFn.FITTING: "training_step",
        TrainerFn.VALIDATING: "validation_step",
        TrainerFn.TESTING: "test_step",
        TrainerFn.PREDICTING: "predict_step",
    }[trainer.state.fn or TrainerFn.FITTING]


def arguments(module: pl.LightningModule, name: str, batch: Any) -> tuple[Any, ...]:
    """Return the positional arguments of a step function for the first batch."""
    step = getattr(module, name)
    if name == "training_step" and is_param_in_hook_signature(step, "dataloader_iter", explicit=True):
        return (iter([(batch, 0, 0)]),)
    parameter = inspect.signature(step).parameters.get("dataloader_idx")
    if parameter is not None and parameter.default is parameter.empty:
        return batch, 0, 0
    # Two parameters are the batch and its index, whatever their names.
    return (batch, 0) if is_param_in_hook_signature(step, "batch_idx", min_args=2) else (batch,)


@contextmanager
def without_side_effects(
    module: pl.LightningModule, trainer: pl.Trainer | None = None, *, parameters: bool = True
) -> Iterator[None]:
    """Context without lasting effects of user code on the module: nothing is logged, and no optimizer steps.

    Args:
        module: The user's module.
        trainer: Trainer whose loggers are silenced, if there is one.
        parameters: As for :class:`~lightning_pardist.trainer.module_snapshot.ModuleSnapshot`.
    """
    keepsake = ModuleSnapshot(module, parameters=parameters)
    with ExitStack() as stack:
        stack.callback(keepsake.restore)
        # Relevant warnings recur in training; schedulers warn about optimizers that do not step.
        stack.enter_context(_without_warnings())
        if trainer is not None:
            stack.enter_context(_quiet(trainer))
            stack.enter_context(_optimizers_of(trainer, _Optimizers(module)))
        for child in module.modules():
            if isinstance(child, pl.LightningModule):
                _stub_methods(child)
        yield


def run(module: pl.LightningModule, name: str, batch: Any, trainer: pl.Trainer | None = None) -> Any:
    """Run a step function on a batch, inside :func:`without_side_effects`; if it fails, again after the hooks.

    Args:
        module: Module whose step is run.
        name: ``"training_step"`` or the name of another step function.
        batch: Batch on the module's device.
        trainer: Trainer that provides the precision context of the step, if there is one.
    """
    try:
        return _step(module, name, batch, trainer)
    except Exception:
        hooks = [hook for hook in HOOKS[name] if is_overridden(hook, module, pl.LightningModule)]
        if not hooks:
            raise
    # The step may use state that these hooks create.
    for hook in hooks:
        getattr(module, hook)(*((batch, 0) if hook.endswith("batch_start") else ()))
    return _step(module, name, batch, trainer)


def _step(module: pl.LightningModule, name: str, batch: Any, trainer: pl.Trainer | None) -> Any:
    training = [child.training for child in module.modules()]
    if name != "training_step":
        module.eval()
    try:
        with ExitStack() as stack:
            if trainer is not None:
                stack.enter_context(trainer.precision_plugin.forward_context())
            stack.enter_context(torch.set_grad_enabled(name == "training_step"))
            return getattr(module, name)(*arguments(module, name, batch))
    finally:
        for child, flag in zip(module.modules(), training, strict=False):
            child.training = flag


@contextmanager
def placeholder_optimizers(module: pl.LightningModule, trainer: pl.Trainer) -> Iterator[None]:
    """Context with stand-ins for optimizers and schedulers until the real ones exist.

    ``self.optimizers()``, ``self.lr_schedulers()`` and ``trainer.optimizers`` return them.

    Args:
        module: Module whose steps may use them, for example to read a learning rate.
        trainer: Trainer of the module.
    """
    if trainer.state.fn != TrainerFn.FITTING or lightning_optimizers(trainer.strategy):
        yield
        return
    made = _Optimizers(module, trainer)
    stand_ins = {"optimizers": made.optimizers, "lr_schedulers": made.schedulers}
    before = {name: module.__dict__[name] for name in stand_ins if name in module.__dict__}
    module.__dict__.update(stand_ins)
    try:
        with _optimizers_of(trainer, made):
            yield
    finally:
        for name in stand_ins:
            module.__dict__.pop(name, None)
        module.__dict__.update(before)


@contextmanager
def _optimizers_of(trainer: pl.Trainer, made: _Optimizers) -> Iterator[None]:
    """Context in which ``trainer.optimizers`` returns stand-ins until the real ones exist."""
    context = getattr(trainer.strategy, "context", None)
    if context is None:
        yield
        return
    before, context.trial_optimizers = context.trial_optimizers, made.plain
    try:
        yield
    finally:
        context.trial_optimizers = before


@contextmanager
def _quiet(trainer: pl.Trainer) -> Iterator[None]:
    loggers, should_stop = trainer.loggers, trainer.should_stop
    loops = [(loop, dict(loop.__dict__)) for loop in (trainer.fit_loop, trainer.validate_loop, trainer.test_loop)]
    trainer.loggers = [DummyLogger() for _ in loggers]
    try:
        yield
    finally:
        trainer.loggers, trainer.should_stop = loggers, should_stop
        for loop, attributes in loops:
            # configure_optimizers may have read the number of steps, which sets up the loaders.
            loop.__dict__.clear()
            loop.__dict__.update(attributes)


@contextmanager
def _without_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _stub_methods(module: pl.LightningModule) -> None:
    """Replace methods that reach the Trainer by harmless ones; restoring a ModuleSnapshot removes them."""

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    def manual_backward(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(*args, **kwargs)

    made = _Optimizers(module)
    module.__dict__.update(
        dict.fromkeys(_SILENT, nothing),
        manual_backward=manual_backward,
        optimizers=made.optimizers,
        lr_schedulers=made.schedulers,
    )


class _Optimizers:
    """Stand-in optimizers and schedulers for a trial run, which are created on demand and update nothing."""

    def __init__(self, module: pl.LightningModule, trainer: pl.Trainer | None = None) -> None:
        self.lightning_module = module
        self._trainer = trainer
        self._made: tuple[list[torch.optim.Optimizer], list[Any]] | None = None
        self._wrapped: list[LightningOptimizer] = []

    def _make(self) -> tuple[list[torch.optim.Optimizer], list[Any]]:
        if self._made is None:
            with _without_warnings(), nullcontext() if self._trainer is None else _quiet(self._trainer):
                conf: Any = self.lightning_module.configure_optimizers()
            optimizers, schedulers, _ = configure_optimizers(conf) if conf is not None else ([], [], None)
            for optimizer in optimizers:
                optimizer.step = self._evaluate
            self._wrapped = [LightningOptimizer(optimizer) for optimizer in optimizers]
            for wrapped in self._wrapped:
                set_strategy(wrapped, self)
            self._made = optimizers, [s["scheduler"] if isinstance(s, dict) else s for s in schedulers]
        return self._made

    @staticmethod
    def _evaluate(closure: Callable[[], Any] | None = None, **unused: Any) -> Any:
        with torch.enable_grad():
            return None if closure is None else closure()

    def optimizer_step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], **unused: Any) -> Any:
        """Evaluate the closure without a step; called by wrapped optimizers in place of the strategy's method."""
        return self._evaluate(closure)

    def plain(self) -> list[torch.optim.Optimizer]:
        """Replacement for the Trainer's ``optimizers``."""
        return self._make()[0]

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Replacement for the module's ``optimizers``."""
        plain, _ = self._make()
        return _one_or_all(self._wrapped if use_pl_optimizer else plain)

    def schedulers(self) -> Any:
        """Replacement for the module's ``lr_schedulers``."""
        _, schedulers = self._make()
        return _one_or_all(schedulers) if schedulers else None


def _one_or_all(items: Sequence[Any]) -> Any:
    return items[0] if len(items) == 1 else list(items)
