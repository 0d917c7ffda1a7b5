"""Batch normalisation over all ranks, for ``Trainer(sync_batchnorm=True)`` and plugins of that kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.pytorch.plugins import LayerSync, TorchSyncBatchNorm
from torch import nn

from lightning_pardist.engines import sync_batchnorm

if TYPE_CHECKING:
    from lightning_pardist.strategies.base import PardistStrategy


def apply(layer_sync: LayerSync, strategy: PardistStrategy, model: nn.Module) -> Callable[[], object]:
    """Convert the layers of a strategy's model. Not collective.

    Args:
        layer_sync: The Trainer's plugin.
        strategy: The process group exists; its ``model`` becomes what the plugin returns.
        model: Whose layers.

    Returns:
        What undoes it.
    """
    if isinstance(layer_sync, TorchSyncBatchNorm):
        # torch's own layer refuses CPU tensors and knows only the whole world.
        sync_batchnorm.convert(model, group=strategy.data_group)
        return lambda: sync_batchnorm.revert(model)
    strategy.model = layer_sync.apply(model)

    def undo() -> None:
        if strategy.model is not None:
            strategy.model = layer_sync.revert(strategy.model)

    return undo
