"""Runs of a module's step functions on sample batches, as the Trainer would run them, without lasting effects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import count, repeat
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from lightning_pardist.axes.base import Samples
from lightning_pardist.axes.pipeline.microbatch_outputs import StepOutputs
from lightning_pardist.compat.lightning_loops import current_hook, set_current_hook
from lightning_pardist.compat.tensors import version_of
from lightning_pardist.engines.pipeline import CannotPipelineError, find_loss
from lightning_pardist.engines.pipeline.interception import undisturbed
from lightning_pardist.engines.pipeline.microbatch import fresh_copy
from lightning_pardist.trainer.sample_batches import NoSampleError
from lightning_pardist.trainer.trial_run import HOOKS, placeholder_optimizers

STEPS = {
    RunningStage.TRAINING: "training_step",
    RunningStage.SANITY_CHECKING: "validation_step",
    RunningStage.VALIDATING: "validation_step",
    RunningStage.TESTING: "test_step",
    RunningStage.PREDICTING: "predict_step",
}
_CONTEXTS = {
    "training_step": "train_step_context",
    "validation_step": "val_step_context",
    "test_step": "test_step_context",
    "predict_step": "predict_step_context",
}
#: Name of a step function, and index of the loader whose batches it gets.
StepKey = tuple[str, int]


@dataclass(frozen=True)
class SampleStep:
    """Step function and its sample batch; for training, also one micro-batch and its number of samples."""

    stage: RunningStage
    dataloader_idx: int
    num_dataloaders: int
    batch: Any
    microbatch: Any
    size: int | None = None

    @property
    def key(self) -> StepKey:
        """Name of the step function, and index of its loader."""
        return STEPS[self.stage], self.dataloader_idx


class MicrobatchError(CannotPipelineError):
    """Raised if a step runs on a batch but fails on a micro-batch.

    Attributes:
        failure: Message of the step's exception.
    """

    failure: str = ""


def microbatch_error(sample: SampleStep, error: Exception) -> MicrobatchError:
    """Return the error for a step that runs on its sample batch, and raises ``error`` on a micro-batch of it."""
    failure = f"{type(error).__name__}: {error}"
    failed = MicrobatchError(
        f"{STEPS[sample.stage]} runs on a batch and fails on a micro-batch ({failure}). If samples belong together, use"
        " pardist_mp, which makes no micro-batches; if micro-batches are too small, larger batches or a smaller"
        " num_microbatches.",
        (),
    )
    failed.failure = failure
    return failed


class SampleRuns:
    """Runs a module's step functions on sample batches. Not collective.

    Args:
        trainer: The Trainer, after its strategy has set up the module and before its loops start.
        samples: Sample batches for the runs.

    Attributes:
        effects: Records what a run changes, and undoes it.
        with_hooks: Stages whose steps run only after the module's hooks that precede them.
    """

    def __init__(self, trainer: pl.Trainer, samples: Samples) -> None:
        self.trainer = trainer
        self.module: pl.LightningModule = trainer.lightning_module
        # Units are not known yet: watch all modules, since a recorded run executes all of them.
        self.effects = StepOutputs(self.module)
        self.with_hooks: set[RunningStage] = set()
        self._samples = samples

    def steps(self) -> Iterator[SampleStep]:
        """Return the step functions that the Trainer will run, each with its sample batch."""
        trainer = self.trainer
        stages = [] if trainer.state.stage is None else [trainer.state.stage]
        if trainer.state.fn == TrainerFn.FITTING:
            stages = [RunningStage.TRAINING]
            if trainer.limit_val_batches and is_overridden("validation_step", self.module) and _validates(trainer):
                stages.append(RunningStage.VALIDATING)
        for stage in stages:
            with self._trainer_state_of(stage):
                batches = self._batches(stage)
            for index, batch in enumerate(batches):
                if batch is not None:
                    yield SampleStep(stage, index, len(batches), batch, batch)

    @contextmanager
    def running(
        self, sample: SampleStep, *, plain: bool = False, in_order: bool = False
    ) -> Iterator[Callable[[Any], Any]]:
        """Context with a function that runs the step on a batch, and returns its record.

        Args:
            sample: The step function.
            plain: Whether to run it without the Trainer's precision.
            in_order: Whether each run follows those before it, with the next ``batch_idx``; otherwise each is a first.
        """
        name = STEPS[sample.stage]
        function = getattr(self.module, name)
        takes_index = is_param_in_hook_signature(function, "batch_idx", min_args=2)
        rest = [sample.dataloader_idx] if sample.num_dataloaders > 1 else []
        indices = count() if in_order else repeat(0)
        run = self.effects.run_in_order if in_order else self.effects.run
        precision: Any = self.trainer.precision_plugin
        context = nullcontext if plain else getattr(precision, _CONTEXTS[name])

        def step(microbatch: Any) -> Any:
            with context():
                return function(microbatch, *([next(indices)] if takes_index else []), *rest)

        before = current_hook(self.module)
        set_current_hook(self.module, name)
        try:
            optimizers = placeholder_optimizers(self.module, self.trainer)
            with (
                optimizers,
                self._trainer_state_of(sample.stage),
                self.effects.watching(),
                self._with_step_hooks(sample),
            ):
                yield lambda microbatch: run(step, microbatch)
        finally:
            set_current_hook(self.module, before)

    def runs_on_full_batch(self, sample: SampleStep) -> bool:
        """Return whether a step runs on its full sample batch without an exception."""
        # With gradients in training, since steps may compute some themselves (forces, penalties).
        training = sample.stage == RunningStage.TRAINING
        with (
            suppress(Exception),
            undisturbed(self.module),
            self.running(sample) as run,
            torch.set_grad_enabled(training),
        ):
            run(fresh_copy(sample.batch))
            return True
        return False

    def _batches(self, stage: RunningStage) -> list[Any]:
        try:
            return self._samples.of(stage)
        except NoSampleError as problem:
            raise NoSampleError(
                f"{type(self.trainer.strategy).__name__} records a run of {STEPS[stage]} before it starts, and has no"
                f" batch for it: {problem}. Let the loader give a batch whenever it is asked, or turn that loop off"
                " (limit_val_batches=0)."
            ) from problem

    @contextmanager
    def _with_step_hooks(self, sample: SampleStep) -> Iterator[None]:
        """Run the module's hooks that precede the step, if the step needs them; undo their effects on exit.

        Raises:
            CannotPipelineError: If a hook changes parameters, which cannot be undone.
        """
        if sample.stage not in self.with_hooks:
            yield
            return
        module = self.module
        versions = [version_of(parameter) for parameter in module.parameters()]
        with undisturbed(module):
            module.__dict__["log"] = lambda *args, **kwargs: None
            for name in HOOKS[STEPS[sample.stage]]:
                set_current_hook(module, name)
                rest = [0, sample.dataloader_idx] if sample.num_dataloaders > 1 else [0]
                getattr(module, name)(*([sample.batch, *rest] if name.endswith("batch_start") else []))
                if versions != [version_of(parameter) for parameter in module.parameters()]:
                    raise CannotPipelineError(
                        f"{type(module).__name__}.{STEPS[sample.stage]} needs its hooks to run first, and {name}"
                        " changes parameters, which is not possible in a trial run. Change them in setup() or"
                        " configure_model().",
                        (),
                    )
            module.__dict__.pop("log")
            set_current_hook(module, STEPS[sample.stage])
            yield

    @contextmanager
    def _trainer_state_of(self, stage: RunningStage | None) -> Iterator[None]:
        """Set the Trainer's state and the module's mode to those of a running stage, and restore them on exit."""
        state = self.trainer.state
        before, modes = state.stage, [(each, each.training) for each in self.module.modules()]
        state.stage = stage
        try:
            if stage != RunningStage.TRAINING:
                self.module.eval()
            yield
        finally:
            state.stage = before
            for each, mode in modes:
                each.training = mode


def _validates(trainer: pl.Trainer) -> bool:
    """Return whether training will run validation; its loader is not requested otherwise."""
    every, epochs = trainer.check_val_every_n_epoch, trainer.max_epochs
    return bool(trainer.num_sanity_val_steps) or every is None or epochs in (None, -1) or epochs >= every


def loss_of(record: dict[str, Any]) -> Tensor | None:
    """Return the loss in a result of :meth:`StepOutputs.run`."""
    return find_loss(record["result"])
