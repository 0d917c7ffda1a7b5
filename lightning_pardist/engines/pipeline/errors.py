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


class PipelineTimeoutError(RuntimeError):
    """A message from another stage did not come within the time allowed."""
