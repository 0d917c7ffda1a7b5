"""Applies ``Trainer(sync_batchnorm=True)`` and other layer-sync plugins."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from lightning.pytorch.plugins import LayerSync, TorchSyncBatchNorm
from torch import nn

from lightning_pardist.compat.modules import BatchNorm
from lightning_pardist.engines.common import sync_batchnorm


def converts(layer_sync: LayerSync | None, model: nn.Module) -> bool:
    """Whether a Trainer's plugin would change layers of a model: sync_batchnorm=True has nothing to do without any."""
    if isinstance(layer_sync, TorchSyncBatchNorm):
        return any(isinstance(layer, BatchNorm) for layer in model.modules())
    return layer_sync is not None


def convert_layers(
    layer_sync: LayerSync, model: nn.Module, group: dist.ProcessGroup
) -> tuple[nn.Module, Callable[[nn.Module], nn.Module]]:
    """Convert the layers of a model. Not collective.

    Args:
        layer_sync: The Trainer's plugin.
        model: Whose layers.
        group: Ranks whose samples are normalised together.

    Returns:
        The model to go on with, and what makes of it the one that it was.
    """
    if isinstance(layer_sync, TorchSyncBatchNorm):
        # torch's own layer refuses CPU tensors and knows only the whole world.
        sync_batchnorm.convert(model, group=group)

        def revert(model: nn.Module) -> nn.Module:
            sync_batchnorm.revert(model)
            return model

        return model, revert
    return layer_sync.apply(model), layer_sync.revert
