"""How parameters and gradients travel between ranks that shard them: settings ``gather``, ``reduce``."""

from __future__ import annotations

from typing import get_args

from lightning_pardist.axes.base import RunContext
from lightning_pardist.engines.common.block_codes import Compression
from lightning_pardist.mesh import GRADIENT_AXES
from lightning_pardist.settings import one_of


class CodesSetting:
    """Traffic in few bits, as set.

    Args:
        gather: Codes that parameters travel as; numbers as they are if None.
        reduce: Codes that gradients travel as.
        error_feedback: Whether what codes leave behind of gradients is added to the next ones; it is if None.

    Raises:
        ValueError: If there are no such codes, or errors of none are to be fed back.
    """

    def __init__(self, gather: Compression | None, reduce: Compression | None, error_feedback: bool | None) -> None:
        for name, kind in (("gather", gather), ("reduce", reduce)):
            if kind is not None:
                one_of(name, kind, get_args(Compression), or_else="None")
        self.gather: Compression | None = gather
        self.reduce: Compression | None = reduce
        if error_feedback is not None and reduce is None:
            raise ValueError(
                f"error_feedback={error_feedback} is about what codes of gradients leave behind, and reduce is not set."
                " Set reduce='int8', or leave error_feedback out."
            )
        self.error_feedback = reduce is not None and error_feedback is not False

    def check(self, context: RunContext) -> None:
        """Refuse what gradients in codes cannot be combined with. Not collective.

        Raises:
            ValueError: If a gradient scaler is in use, or a tensor axis.
        """
        travels = context.dims.size(*GRADIENT_AXES) > 1
        if travels and (rounded := self._rounded_by_place) and (size := context.dims.tensor_parallel) > 1:
            raise ValueError(
                f"{rounded} rounds numbers by what lies beside them, which on each of the {size} tensor ranks is"
                " something else: parameters that all of them hold (norms, biases) would drift apart. Leave it out, or"
                " the tensor axis."
            )
        if self.reduce is not None and self.error_feedback and getattr(context.precision, "scaler", None) is not None:
            raise ValueError(
                f"reduce={self.reduce!r} adds what is left of scaled gradients to later ones, whose scale is another"
                " one when precision='16-mixed' has changed it. Use precision='bf16-mixed', or error_feedback=False."
            )

    def check_copies(self, context: RunContext) -> None:
        """Refuse parameters that several stages of a pipeline hold. Before the engine is made; not collective.

        Raises:
            ValueError: On every rank, if there are any.
        """
        travels = context.dims.size(*GRADIENT_AXES) > 1
        names = [name for axis in context.axes for name in axis.copied_parameters()] if travels else []
        if names and (rounded := self._rounded_by_place):
            raise ValueError(
                f"{rounded} rounds numbers by what lies beside them, which on each stage of the pipeline is something"
                f" else: copies of {', '.join(names)}, which several stages hold, would drift apart. Leave it out, or"
                " untie these parameters."
            )

    @property
    def _rounded_by_place(self) -> str:
        """The setting by which what is left of a number depends on others, or on which rank owns it; empty if none.

        Halves round each number by itself. Of gradients the owner's own are not rounded, whatever the codes.
        """
        if self.reduce is not None:
            return f"reduce={self.reduce!r}"
        return "" if self.gather in (None, "bf16") else f"gather={self.gather!r}"

    def describe(self) -> str:
        """What travels how, in a line for the log; empty if nothing is sent in codes."""
        sent = []
        if self.gather is not None:
            sent.append(f"parameters are sent as {self.gather}, and updated in full precision by their owners")
        if self.reduce is not None:
            feedback = ", with error feedback (a byte a parameter on each rank)" if self.error_feedback else ""
            sent.append(f"gradients are sent as {self.reduce}{feedback}")
        return "; ".join(sent).capitalize() + "." if sent else ""
