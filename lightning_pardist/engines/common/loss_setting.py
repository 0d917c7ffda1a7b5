"""The ``loss_weight`` setting: how the losses of ranks and micro-batches are weighted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, get_args

from torch import Tensor

from lightning_pardist.engines.common.loss_term import Term
from lightning_pardist.engines.common.loss_terms import find_terms

#: ``"auto"`` weights each mean in a loss by its own count, adds up sums, and weights other terms by samples;
#: ``"tokens"`` weights the whole loss by the first count that depends on the data, ``"samples"`` by samples; ``"sum"``
#: adds up; ``"ranks"`` weights ranks and micro-batches equally, as torch's DDP does; a function returns the weight of a
#: batch.
LossWeight = Literal["auto", "samples", "tokens", "sum", "ranks"] | Callable[[Any], float]


def check_loss_weight(value: LossWeight) -> LossWeight:
    """Return the setting, if it is valid.

    Raises:
        ValueError: If it is not.
    """
    if callable(value) or value in (known := get_args(get_args(LossWeight)[0])):
        return value
    raise ValueError(
        f"loss_weight={value!r} is unknown. Use one of {', '.join(map(repr, known))}, or a function that takes a batch"
        " and returns its weight."
    )


def terms_of(
    loss: Tensor,
    batch: Any,
    samples: int | None,
    setting: LossWeight,
    *,
    gathers: bool = False,
    ranks: int = 1,
    by_sample: bool = True,
) -> list[Term]:
    """Return the terms of a loss, in the detail that a setting requires.

    Args:
        loss: The loss, with its autograd graph.
        batch: The batch that it was computed from.
        samples: Number of samples in the batch, if known.
        setting: How the loss is weighted.
        gathers: Whether a gather of samples in the step returns the samples of all parts of the batch.
        ranks: Number of ranks that the batch is divided among.
        by_sample: Whether the loss may be the mean or sum of one loss per sample, each with its own count.

    Raises:
        ValueError: If the setting is ``"tokens"`` and the loss contains no mean.
    """
    if loss.grad_fn is None:
        return []
    if setting == "auto":
        return find_terms(loss, samples=samples, gathers=gathers, ranks=ranks, by_sample=by_sample)
    whole = Term("mean", loss.grad_fn, float(samples or 1), (loss.grad_fn,), "the loss")
    if setting == "ranks":
        return [replace(whole, count=1.0)]
    if setting == "sum":
        return [replace(whole, kind="sum")]
    if callable(setting):
        return [replace(whole, count=float(setting(batch)), by_data=True)]
    if setting == "tokens":
        found = [term for term in find_terms(loss, samples=samples) if term.kind == "mean"]
        by_data = [term for term in found if term.by_data] or found
        if not by_data:
            raise ValueError(
                "loss_weight='tokens' needs a loss that contains a mean, but this loss has none. Use 'samples', or"
                " a function of the batch that returns its weight."
            )
        return [replace(whole, count=by_data[0].count, by_data=True)]
    return [whole]
