"""Checks shared by several axes that refuse unsupported modules and callbacks."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelPruning, WeightAveraging
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_pardist.axes.base import RunContext
from lightning_pardist.compat.modules import ignored_by_torch_ddp


def refuse_renormalized(module: nn.Module, where: str, *, fix: str = "") -> None:
    """Refuse trainable embeddings with ``max_norm``, for ranks that see different samples or parts of a layer.

    Not collective.

    Args:
        module: The module as the user built it.
        where: Name of the strategy.
        fix: Fix named by the error instead of rescaling before each step, for strategies that do not support that.

    Raises:
        ValueError: If there is such an embedding; names the first one.
    """
    for name, layer in module.named_modules():
        if not isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) or layer.max_norm is None:
            continue
        if layer.weight.requires_grad:
            raise ValueError(
                f"{name!r} has max_norm={layer.max_norm}, so its forward rescales the rows that a rank's own samples"
                f" use: under {where} the ranks' weights would drift apart. Set max_norm=None, and"
                f" {fix or 'rescale the rows in on_train_batch_start (torch.renorm)'}."
            )


def refuse_sparse_buffers(module: nn.Module, where: str) -> None:
    """Refuse sparse buffers, for strategies that split the module or average its buffers. Not collective.

    Args:
        module: The module as the user built it.
        where: Name of the strategy.

    Raises:
        ValueError: If there is one; names the first.
    """
    for name, buffer in module.named_buffers():
        if buffer.layout is not torch.strided:
            raise ValueError(
                f"The buffer {name!r} is sparse ({buffer.layout}), and {where} needs dense ones. Register its indices"
                " and values as buffers, and make the sparse tensor from them in forward; or use pardist_ddp or a ZeRO"
                " strategy, to which a sparse buffer is a constant."
            )


def refuse_ddp_ignored(module: nn.Module, where: str) -> None:
    """Refuse a module with tensors that torch's DDP is set to ignore. Not collective.

    Args:
        module: The module as the user built it.
        where: Name of the strategy.

    Raises:
        ValueError: If a trainable parameter or floating-point buffer is ignored; names the first one.
    """
    apart = {name for name, param in module.named_parameters() if param.requires_grad}
    apart |= {name for name, buffer in module.named_buffers() if buffer.is_floating_point()}
    # Frozen parameters, masks and counters are equal on all ranks; users list them where DDP's broadcast fails.
    if names := [name for name in ignored_by_torch_ddp(module) if name in apart]:
        raise ValueError(
            f"_ddp_params_and_buffers_to_ignore leaves {names[0]!r} ({len(names)} in all) unsynchronized between"
            f" ranks, but {where} keeps all parameters and buffers equal on all ranks. Remove the attribute if they"
            " may be equal, keep such tensors outside of the module's parameters and buffers, or use Lightning's"
            " 'ddp'."
        )


def refuse_lazy(module: nn.Module, where: str) -> None:
    """Refuse lazy parameters and buffers, which the module's first call would create. Not collective.

    Args:
        module: The module as the user built it.
        where: Name of the strategy.

    Raises:
        ValueError: If there is one; names the first one.
    """
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(value):
            raise ValueError(
                f"{name!r} has no shape before the module's first call, but {where} gives ranks their shards and"
                " equal values of parameters before training. Call the module once in configure_model, under"
                " torch.no_grad() with a tensor of the inputs' shape."
            )


def refuse_callbacks(trainer: pl.Trainer, kinds: type[pl.Callback] | tuple[type[pl.Callback], ...], why: str) -> None:
    """Refuse callbacks of the given classes. Not collective.

    Args:
        trainer: The Trainer whose callbacks are checked.
        kinds: The classes to refuse.
        why: Reason and fix; follows the callback's name in the error message.

    Raises:
        ValueError: If the Trainer has such a callback.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, kinds):
            raise ValueError(f"{type(callback).__name__} {why}")


def refuse_pruning(trainer: pl.Trainer) -> None:
    """Refuse ``ModelPruning``, for strategies whose ranks hold parts of the model. Not collective.

    Raises:
        ValueError: If the Trainer has such a callback.
    """
    refuse_callbacks(
        trainer,
        ModelPruning,
        f"compares the elements of whole parameters, and each rank of {type(trainer.strategy).__name__} has some of"
        " them only. Use pardist_ddp, pardist_zero1 or pardist_zero2, or prune after training.",
    )


def refuse_averages_in_shards(trainer: pl.Trainer, context: RunContext) -> None:
    """Refuse weight-averaging callbacks if checkpoints are sharded and ranks hold parts of the model. Not collective.

    Raises:
        ValueError: If the Trainer has such a callback.
    """
    if context.sharded_checkpoints:
        why = 'puts two models into a checkpoint, but checkpoint="sharded" supports only one. Use checkpoint="full".'
        refuse_callbacks(trainer, WeightAveraging, why)
