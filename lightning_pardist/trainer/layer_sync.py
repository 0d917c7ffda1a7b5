"""Applies ``Trainer(sync_batchnorm=True)`` and other layer-sync plugins."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from lightning.pytorch.plugins import LayerSync, TorchSyncBatchNorm
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from lightning_pardist.compat.modules import BatchNorm
from lightning_pardist.engines.common import sync_batchnorm


def converts(layer_sync: LayerSync | None, model: nn.Module) -> bool:
    """Whether a Trainer's plugin would change layers of a model: sync_batchnorm=True has nothing to do without any."""
    if syncs_batch_norms(layer_sync):
        return any(isinstance(layer, BatchNorm) for layer in model.modules())
    return layer_sync is not None


def syncs_batch_norms(layer_sync: LayerSync | None) -> bool:
    """Whether the plugin is that of ``sync_batchnorm=True``."""
    return isinstance(layer_sync, TorchSyncBatchNorm)


def batch_norms(model: nn.Module) -> list[str]:
    """Names of the batch norms in training, which normalize a batch."""
    return [name for name, layer in model.named_modules() if isinstance(layer, BatchNorm) and layer.training]


class WatchedBatchNorms:
    """Warns once of batch norms that normalize some of a batch's samples, at the first step in which there are any.

    Which layers are in training is for hooks to say (frozen backbones, which are thawed in a later epoch), so every
    step is looked at until then.

    Args:
        model: Whose layers.
        who: Has some of the samples of a batch.
        remedy: What gives the numbers of one process, as a sentence.
        apart: Whether layers that combine what ranks have are left out.
    """

    def __init__(self, model: nn.Module, who: str, remedy: str, *, apart: bool) -> None:
        self._who = who
        self._remedy = remedy
        self._layers = {
            name: layer
            for name, layer in model.named_modules()
            if isinstance(layer, BatchNorm)
            and not (apart and (isinstance(layer, nn.SyncBatchNorm) or sync_batchnorm.is_converted(layer)))
        }

    def look(self) -> None:
        """Behind a training step, in which layers have the modes that hooks have set. Not collective."""
        names = [name for name, layer in self._layers.items() if layer.training]
        if not names:
            return
        self._layers = {}
        listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        rank_zero_warn(
            f"Batch norms ({listed}) normalize each {self._who}'s samples by themselves: training is not that of one"
            f" process, which normalizes all samples of a batch together. {self._remedy} check_samples=False leaves"
            " this out."
        )


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
    if syncs_batch_norms(layer_sync):
        # torch's own layer refuses CPU tensors and knows only the whole world.
        sync_batchnorm.convert(model, group=group)

        def revert(model: nn.Module) -> nn.Module:
            sync_batchnorm.revert(model)
            return model

        return model, revert
    return layer_sync.apply(model), layer_sync.revert
