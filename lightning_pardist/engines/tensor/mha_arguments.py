"""Projections and masks computed from the arguments of ``F.multi_head_attention_forward``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

#: Names of the weight arguments.
MHA_PROJECTIONS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj_weight")


def project(query: Tensor, key: Tensor, value: Tensor, given: dict[str, Any]) -> tuple[Tensor, ...]:
    """Return queries, keys and values of ``F.multi_head_attention_forward``, given its arguments."""
    bias = given["in_proj_bias"]
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    if given["use_separate_proj_weight"]:
        parts = [given[name] for name in MHA_PROJECTIONS[1:4]]
    elif query is key and key is value:
        return F.linear(query, given["in_proj_weight"], bias).chunk(3, -1)
    else:
        parts = given["in_proj_weight"].chunk(3)
    return tuple(F.linear(x, w, b) for x, w, b in zip((query, key, value), parts, biases, strict=True))


def added_mask(given: dict[str, Any], q: Tensor) -> Tensor | None:
    """Return the sum of attention and padding masks, broadcast over ``[batch, heads, queries, keys]``."""
    total: Tensor | None = None
    mask, padding = given["attn_mask"], given["key_padding_mask"]
    if mask is not None:
        mask = mask.view(q.shape[0], -1, *mask.shape[1:]) if mask.dim() == 3 else mask[None, None]
        total = _additive(mask, q.dtype)
    if padding is not None:
        padding = padding if padding.dim() == 2 else padding.unsqueeze(0)
        added = _additive(padding, q.dtype)[:, None, None, :]
        total = added if total is None else total + added
    return total


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype is not torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))
