"""Evaluation of ``nn.TransformerEncoder`` without its fast path, with the same results as the fused kernel."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class PlainEncoders:
    """Disables the fast path of transformer encoders while attached, and reproduces its zeros at padded positions.

    In evaluation, ``nn.TransformerEncoderLayer`` passes the weights of all of its layers to a fused kernel, for which
    ``nn.TransformerEncoder`` packs the tokens left by a padding mask into a nested tensor. Neither can be split, or
    sent between pipeline stages. The results equal those of the layers, except that padded positions of an encoder's
    output are zero. This matters wherever padding is read (a mean over all positions, a decoder without a memory mask).

    Args:
        module: The module that contains the encoders.
    """

    def __init__(self, module: nn.Module) -> None:
        self._encoders = [each for each in module.modules() if isinstance(each, nn.TransformerEncoder)]
        self._has_layers = any(isinstance(each, nn.TransformerEncoderLayer) for each in module.modules())
        self._handles: list[RemovableHandle] = []
        self._was_enabled = False

    def attach(self) -> None:
        """Disable the fast path in this process, if the module has encoder layers. Not collective."""
        self._was_enabled = self._has_layers and torch.backends.mha.get_fastpath_enabled()
        if not self._was_enabled:
            return
        torch.backends.mha.set_fastpath_enabled(False)
        for encoder in self._encoders:
            hook = partial(_without_padding, encoder)
            self._handles.append(encoder.layers[-1].register_forward_hook(hook, with_kwargs=True))

    def detach(self) -> None:
        """Enable the fast path again. Not collective."""
        if self._was_enabled:
            torch.backends.mha.set_fastpath_enabled(True)
        self._was_enabled = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _without_padding(
    encoder: nn.TransformerEncoder, layer: nn.Module, args: Any, kwargs: dict[str, Any], output: Tensor
) -> Tensor | None:
    """Zero the last layer's output at padded positions, if the encoder would have taken the fast path."""
    padding: Tensor | None = kwargs.get("src_key_padding_mask")
    asked = getattr(encoder, "use_nested_tensor", False) and kwargs.get("src_mask") is None
    first = encoder.layers[0]
    trained = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in first.parameters())
    if padding is None or not asked or first.training or trained or torch.is_autocast_enabled() or output.dim() != 3:
        return None
    # The encoder's mask is -inf at padded positions; the fast path requires padding at the end of sequences.
    is_padded = padding.ne(0)
    if getattr(encoder, "mask_check", True) and bool((is_padded[:, :-1] & ~is_padded[:, 1:]).any()):
        return None
    return output.masked_fill(is_padded[:, :, None], 0.0)
