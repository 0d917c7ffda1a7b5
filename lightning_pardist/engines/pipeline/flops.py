"""FLOP counts of operators: torch's registry, and formulas for operators that it lacks."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry


def count_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Return the FLOPs of one operator call (a multiply-add counts as two); 0 for operators without a formula.

    Args:
        func: The operator overload.
        args: Its arguments.
        kwargs: Its keyword arguments.
        result: Its result.
    """
    packet = func.overloadpacket
    formula = flop_registry.get(packet)
    if formula is not None:
        try:
            return int(formula(*args, **kwargs, out_val=result))
        except (TypeError, ValueError, AssertionError):
            return 0
    extra = _EXTRA.get(str(packet))
    return extra(args) if extra is not None else 0


def _attention(args: tuple[Any, ...]) -> int:
    query, key, value = args[:3]
    batch, heads, length, width = query.shape
    return int(2 * batch * heads * length * key.shape[-2] * (width + value.shape[-1]))


def _attention_backward(args: tuple[Any, ...]) -> int:
    """Return 5/2 of the forward's FLOPs: backward has five matrix products, since it recomputes the scores."""
    return 5 * _attention(args[1:]) // 2


def _rnn_layer(args: tuple[Any, ...]) -> int:
    inputs, weight_input, weight_hidden = args[:3]
    return int(2 * inputs.shape[:-1].numel() * (weight_input.numel() + weight_hidden.numel()))


def _rnn_layer_backward(args: tuple[Any, ...]) -> int:
    inputs, weights = args[0], args[1:5]
    # Biases take part in no matrix product.
    return int(4 * inputs.shape[:-1].numel() * sum(each.numel() for each in weights if each.dim() > 1))


def _grouped(args: tuple[Any, ...]) -> int:
    left, right = args[:2]
    return int(2 * left.numel() * right.shape[-1])


def _fused_rnn(args: tuple[Any, ...]) -> int:
    inputs, weights = args[0], args[1]
    return int(2 * inputs.shape[:-1].numel() * sum(w.numel() for w in weights if isinstance(w, torch.Tensor)))


_EXTRA = {
    "aten._scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten._scaled_dot_product_attention_math": _attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "aten.mkldnn_rnn_layer_backward": _rnn_layer_backward,
    "aten.mkldnn_rnn_layer": _rnn_layer,
    "aten._cudnn_rnn": _fused_rnn,
    "aten._grouped_mm": _grouped,
}
