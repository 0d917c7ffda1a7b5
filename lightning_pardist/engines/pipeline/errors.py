"""Exceptions of the pipeline engine."""

from __future__ import annotations

#: Strategies that need no cut between modules: each module runs on every rank, or is split inside.
ALTERNATIVES = ("pardist_ddp", "pardist_zero3", "pardist_tp")


class CannotPipelineError(RuntimeError):
    """Raised if a module or step cannot be run as a pipeline with the requested settings.

    Attributes:
        reason: The obstacle, with the names of the modules concerned.
        alternatives: Names of strategies that can run the module.
    """

    def __init__(self, reason: str, alternatives: tuple[str, ...] = ALTERNATIVES) -> None:
        self.reason = reason
        self.alternatives = alternatives
        serve = f" Strategies that would serve: {', '.join(alternatives)}." if alternatives else ""
        super().__init__(f"{reason}{serve}")

    def __reduce__(self) -> tuple[type[CannotPipelineError], tuple[str, tuple[str, ...]]]:
        return type(self), (self.reason, self.alternatives)


def inner_gradient_error(step: str, parameter: str) -> CannotPipelineError:
    """Return the error for a step that differentiates with respect to other ranks' parameters, as in meta-learning.

    Args:
        step: Name of the step function.
        parameter: Name of one such parameter.
    """
    return CannotPipelineError(
        f"{step} asks torch.autograd.grad for gradients of {parameter!r}, but each rank has the autograd graph of its"
        " own layers only. With pardist_tp every rank differentiates whole batches; with pardist_ddp and pardist_zero3"
        " each rank differentiates its own samples.",
        (),
    )


def transform_call_error(step: str, unit: str) -> CannotPipelineError:
    """Return the error for a step that calls units inside a ``torch.func`` transform and fails as stages.

    Args:
        step: Name of the step function.
        unit: Name of one of the units.
    """
    return CannotPipelineError(
        f"{step} calls {unit!r} inside of a transform of torch.func (grad, vjp, vmap, jacrev), which cannot transform"
        " layers on other ranks.",
        ("pardist_ddp", "pardist_zero3"),
    )


class PipelineTimeoutError(RuntimeError):
    """Raised if a message between ranks of the pipeline times out."""
