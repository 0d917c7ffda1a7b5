"""Settings ``gather`` and ``reduce``: compressed communication of sharded parameters and gradients."""

from __future__ import annotations

from typing import get_args

from lightning_pardist.axes.base import RunContext
from lightning_pardist.engines.common.block_quantization import Compression
from lightning_pardist.mesh import GRADIENT_AXES
from lightning_pardist.settings import one_of


class CompressionSetting:
    """Settings of low-bit communication between ranks that shard parameters or gradients.

    Args:
        gather: Compressed format in which parameters are gathered; None for no compression.
        reduce: Compressed format in which gradients are reduced; None for no compression.
        error_feedback: Whether the compression error of gradients is added to the next gradients. None enables it
            if ``reduce`` is set.

    Raises:
        ValueError: If the format is unknown, or ``error_feedback`` is set without ``reduce``.
    """

    def __init__(self, gather: Compression | None, reduce: Compression | None, error_feedback: bool | None) -> None:
        for name, kind in (("gather", gather), ("reduce", reduce)):
            if kind is not None:
                one_of(name, kind, get_args(Compression), or_else="None")
        self.gather: Compression | None = gather
        self.reduce: Compression | None = reduce
        if error_feedback is not None and reduce is None:
            raise ValueError(
                f"error_feedback={error_feedback} concerns the rounding errors of compressed gradients, but"
                " reduce is not set. Set reduce='int8', or leave error_feedback out."
            )
        self.error_feedback = reduce is not None and error_feedback is not False

    def check(self, context: RunContext) -> None:
        """Check that compression fits the precision and the other axes. Not collective.

        Raises:
            ValueError: If error feedback is combined with a gradient scaler, or a tensor axis with compression whose
                rounding differs between tensor ranks.
        """
        travels = context.dims.size(*GRADIENT_AXES) > 1
        if travels and (rounded := self._position_dependent_setting) and (size := context.dims.tensor_parallel) > 1:
            raise ValueError(
                f"{rounded} rounds each number depending on its neighbors in the tensor, which differ between the"
                f" {size} tensor ranks: parameters that all of them hold (norms, biases) would drift apart. Leave it"
                " out, or the tensor axis."
            )
        if self.reduce is not None and self.error_feedback and getattr(context.precision, "scaler", None) is not None:
            raise ValueError(
                f"reduce={self.reduce!r} with error feedback adds the rounding errors of scaled gradients to later"
                " gradients, whose scale may differ, since precision='16-mixed' changes it. Use"
                " precision='bf16-mixed', or error_feedback=False."
            )

    def check_copies(self, context: RunContext) -> None:
        """Refuse parameters held by several pipeline stages, if compression rounds differently on each stage.

        Called before the engine is created. Not collective.

        Raises:
            ValueError: On every rank, if there are such parameters.
        """
        travels = context.dims.size(*GRADIENT_AXES) > 1
        names = [name for axis in context.axes for name in axis.replicated_parameters()] if travels else []
        if names and (rounded := self._position_dependent_setting):
            raise ValueError(
                f"{rounded} rounds each number depending on its neighbors in the tensor, which differ between the"
                f" stages of a pipeline: copies of {', '.join(names)}, which several stages hold, would drift apart."
                " Leave it out, or untie these parameters."
            )

    @property
    def _position_dependent_setting(self) -> str:
        """The setting whose rounding of an element depends on its neighbours or its owner rank; empty if none.

        Half-precision formats round each element independently. For ``reduce`` of any format, the owner rank's own
        gradients are not rounded.
        """
        if self.reduce is not None:
            return f"reduce={self.reduce!r}"
        return "" if self.gather in (None, "bf16") else f"gather={self.gather!r}"

    def describe(self) -> str:
        """Return a line for the log about what is sent compressed; empty if nothing is."""
        sent = []
        if self.gather is not None:
            sent.append(f"parameters are sent as {self.gather}, and updated in full precision by their owners")
        if self.reduce is not None:
            feedback = ", with error feedback (a byte a parameter on each rank)" if self.error_feedback else ""
            sent.append(f"gradients are sent as {self.reduce}{feedback}")
        return "; ".join(sent).capitalize() + "." if sent else ""
