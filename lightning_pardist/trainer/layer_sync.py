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
    """Return whether a layer-sync plugin changes a model; ``sync_batchnorm=True`` changes only batch norms."""
    if syncs_batch_norms(layer_sync):
        return any(isinstance(layer, BatchNorm) for layer in model.modules())
    return layer_sync is not None


def syncs_batch_norms(layer_sync: LayerSync | None) -> bool:
    """Return whether the plugin is that of ``sync_batchnorm=True``."""
    return isinstance(layer_sync, TorchSyncBatchNorm)


def batch_norms(model: nn.Module) -> list[str]:
    """Return the names of batch norms in training mode, which normalize with batch statistics."""
    return [name for name, layer in model.named_modules() if isinstance(layer, BatchNorm) and layer.training]


class WatchedBatchNorms:
    """Warns once about batch norms whose statistics cover only a part of the batch, at the first step with any.

    Hooks may change which layers are in training mode (a frozen backbone that is unfrozen in a later epoch), so every
    step is checked until the warning.

    Args:
        model: Model whose layers are checked.
        who: What holds a part of the batch (``"rank"``, for example), for the message.
        remedy: Sentence for the message on how to normalize over the whole batch.
        apart: Whether to leave out layers that already synchronise their statistics across ranks.
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
        """Check the layers after a training step, with the modes that hooks have set. Not collective."""
        names = [name for name, layer in self._layers.items() if layer.training]
        if not names:
            return
        self._layers = {}
        listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        rank_zero_warn(
            f"Batch norms ({listed}) normalize each {self._who}'s samples separately: training differs from that of a"
            f" single process, which normalizes all samples of a batch together. {self._remedy} check_samples=False"
            " disables this check."
        )


def convert_layers(
    layer_sync: LayerSync, model: nn.Module, group: dist.ProcessGroup, batch: sync_batchnorm.CurrentBatch
) -> tuple[nn.Module, Callable[[nn.Module], nn.Module]]:
    """Convert the layers of a model. Not collective.

    Args:
        layer_sync: The Trainer's plugin.
        model: Model whose layers are converted.
        group: Ranks whose samples are normalised together.
        batch: Whether this rank's samples count, kept up to date by the caller.

    Returns:
        The converted model, and a function that reverts the conversion.
    """
    if syncs_batch_norms(layer_sync):
        # torch's SyncBatchNorm rejects CPU tensors, and the plugin's conversion to it uses the whole world.
        sync_batchnorm.convert(model, group=group, batch=batch)

        def revert(model: nn.Module) -> nn.Module:
            sync_batchnorm.revert(model)
            return model

        return model, revert
    return layer_sync.apply(model), layer_sync.revert
