"""What the pipeline refuses, and how it says so."""

from __future__ import annotations

#: Strategies that keep every module whole on every rank, or split inside modules: they serve where a cut cannot.
ALTERNATIVES = ("pardist_ddp", "pardist_zero3", "pardist_tp")


class CannotPipelineError(RuntimeError):
    """The module cannot be run as a pipeline the way it was asked for.

    Attributes:
        reason: What stands in the way, with the names of the modules concerned.
        alternatives: Names of strategies that would run the module.
    """

    def __init__(self, reason: str, alternatives: tuple[str, ...] = ALTERNATIVES) -> None:
        self.reason = reason
        self.alternatives = alternatives
        serve = f" Strategies that would serve: {', '.join(alternatives)}." if alternatives else ""
        super().__init__(f"{reason}{serve}")

    def __reduce__(self) -> tuple[type[CannotPipelineError], tuple[str, tuple[str, ...]]]:
        return type(self), (self.reason, self.alternatives)


def asks_for_gradients(step: str, parameter: str) -> CannotPipelineError:
    """What is raised of a step that differentiates by parameters of other ranks, as meta-learning does.

    Args:
        step: Name of the step function.
        parameter: One that it differentiates by.
    """
    return CannotPipelineError(
        f"{step} asks torch.autograd.grad for gradients of {parameter!r}, and each rank has the graph of its own layers"
        " alone. With pardist_tp every rank differentiates whole batches; with pardist_ddp and pardist_zero3 each by"
        " its own samples.",
        (),
    )


def calls_in_transforms(step: str, unit: str) -> CannotPipelineError:
    """What is raised of a step that runs layers inside of a transform of ``torch.func`` and fails in stages.

    Args:
        step: Name of the step function.
        unit: One of the layers.
    """
    return CannotPipelineError(
        f"{step} calls {unit!r} inside of a transform of torch.func (grad, vjp, vmap, jacrev), which knows nothing of"
        " layers on other ranks.",
        ("pardist_ddp", "pardist_zero3"),
    )


class PipelineTimeoutError(RuntimeError):
    """A message from another stage did not come within the time allowed."""
