"""Modules and callbacks that several axes refuse, each with one wording."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelPruning, WeightAveraging
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_pardist.axes.base import RunContext
from lightning_pardist.compat.modules import left_out_by_torch_ddp


def refuse_renormalized(module: nn.Module, where: str, *, fix: str = "") -> None:
    """Refuse embeddings with ``max_norm`` where ranks see different samples, or parts of a layer. Not collective.

    Args:
        module: As the user built it.
        where: Name of the strategy.
        fix: What the error says in place of rescaling before each step, which some strategies refuse as well.

    Raises:
        ValueError: With the name of the first.
    """
    for name, layer in module.named_modules():
        if not isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) or layer.max_norm is None:
            continue
        if layer.weight.requires_grad:
            raise ValueError(
                f"{name!r} has max_norm={layer.max_norm}, so that its forward changes the rows that one rank's samples"
                f" use: under {where} ranks would come to differ. Set max_norm=None, and"
                f" {fix or 'rescale the rows in on_train_batch_start (torch.renorm)'}."
            )


def refuse_left_out(module: nn.Module, where: str) -> None:
    """Refuse a module some of whose tensors torch's DDP was told to leave alone. Not collective.

    Args:
        module: As the user built it.
        where: Name of the strategy.

    Raises:
        ValueError: With the name of the first.
    """
    apart = {name for name, param in module.named_parameters() if param.requires_grad}
    apart |= {name for name, buffer in module.named_buffers() if buffer.is_floating_point()}
    # What is frozen, and masks and counters, which the attribute is used for where broadcasts fail, are alike.
    if names := [name for name in left_out_by_torch_ddp(module) if name in apart]:
        raise ValueError(
            f"_ddp_params_and_buffers_to_ignore keeps {names[0]!r} ({len(names)} in all) apart on each rank, and"
            f" {where} keeps all parameters and buffers alike. Remove the attribute if they may be, hold such tensors"
            " outside of the module's parameters and buffers, or use Lightning's 'ddp'."
        )


def refuse_lazy(module: nn.Module, where: str) -> None:
    """Refuse parameters and buffers that a first call of the module is to make. Not collective.

    Args:
        module: As the user built it.
        where: Name of the strategy.

    Raises:
        ValueError: With the name of the first.
    """
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(value):
            raise ValueError(
                f"{name!r} has no shape before the module's first call, and {where} gives ranks their parts of"
                " parameters, and the same values, before training. Call the module once in configure_model, under"
                " torch.no_grad() with a tensor of the inputs' shape."
            )


def refuse_callbacks(trainer: pl.Trainer, kinds: type[pl.Callback] | tuple[type[pl.Callback], ...], why: str) -> None:
    """Refuse callbacks of some classes. Not collective.

    Args:
        trainer: Whose callbacks.
        kinds: Their classes.
        why: What the error says behind the callback's name: the reason, and the fix.

    Raises:
        ValueError: If the Trainer has such a callback.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, kinds):
            raise ValueError(f"{type(callback).__name__} {why}")


def refuse_pruning(trainer: pl.Trainer) -> None:
    """Refuse ``ModelPruning`` where ranks hold parts of the model. Not collective.

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
    """Refuse callbacks that average weights where checkpoints are sharded and ranks hold parts. Not collective.

    Raises:
        ValueError: If the Trainer has such a callback.
    """
    if context.sharded_checkpoints:
        why = 'puts two models into a checkpoint, of which checkpoint="sharded" knows one. Use checkpoint="full".'
        refuse_callbacks(trainer, WeightAveraging, why)
