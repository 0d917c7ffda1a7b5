"""Activation checkpointing of selected blocks (arXiv 1604.06174)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import Self

from lightning_pardist.compat.modules import own_parameters
from lightning_pardist.engines.common.eager_runs import eagerly, is_eager
from lightning_pardist.engines.fsdp.fsdp_units import chosen_by_name, find_fsdp_units

#: ``"auto"``: repeated blocks that consist of several layers. Otherwise class names.
Checkpointing = Literal["auto"] | Collection[str]


class ReplacedForward:
    """Replacement for a module's ``forward``, set by an engine on the instance.

    Attributes:
        call: The function that runs in place of ``forward``.
        again: The replacement that backward recomputes if the module is checkpointed: this one, a part of it, or None
            to recompute nothing.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call
        self.again: ReplacedForward | None = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the replacement."""
        return self.call(*args, **kwargs)


def check_checkpointing(setting: Any) -> None:
    """Check that a setting is a :data:`Checkpointing`.

    Raises:
        ValueError: If it is not; the message lists the valid settings.
    """
    if not isinstance(setting, Collection) or not all(isinstance(name, str) for name in setting):
        raise ValueError(
            f"activation_checkpointing={setting!r} is not valid. Use 'auto' for repeated blocks, class names of"
            " modules such as ['Block'], or None."
        )


def checkpoint_blocks(module: nn.Module, setting: Checkpointing) -> Callable[[], None]:
    """Enable activation checkpointing for blocks of a module, in place. Not collective.

    Between forward and backward a block keeps only its inputs; backward recomputes its forward with the same RNG state,
    autocast state and batch statistics. Names, parameters and state dict are unchanged, and a copy of the module is
    checkpointed too: the block's class is replaced by a subclass of the same name.

    Args:
        module: The module, before its parameters are sharded.
        setting: Which blocks to checkpoint.

    Returns:
        A function that undoes it, except for blocks whose class has been changed again since.

    Raises:
        ValueError: If a class does not occur, a named block cannot be called, or there are no repeated blocks.
    """
    # Some may be checkpointed already, if an earlier run left the module sharded.
    blocks = [block for block in find_blocks(module, setting) if not isinstance(block, _Checkpointed)]
    changed = []
    for block in blocks:
        replaced = block.__dict__.get("forward")
        if replaced is None:
            block.__class__ = _checkpointed(type(block))
        elif replaced.again is not None:
            changed.append((replaced.again, replaced.again.call))
            replaced.again.call = functools.partial(_recomputed, block, replaced.again.call)

    def undo() -> None:
        for forward, call in changed:
            forward.call = call
        for block in blocks:
            if type(block).__mro__[1] is _Checkpointed:
                block.__class__ = type(block).__mro__[2]

    return undo


def find_blocks(module: nn.Module, setting: Checkpointing) -> list[nn.Module]:
    """Return the blocks that :func:`checkpoint_blocks` selects; none is a submodule of another.

    Raises:
        ValueError: See :func:`checkpoint_blocks`.
    """
    if setting == "auto":
        found = repeated_blocks(module)
        if not found:
            raise ValueError(
                f"activation_checkpointing='auto' found no repeated blocks in {type(module).__name__}. Set the class"
                " names of modules to recompute, for example activation_checkpointing=['Encoder']."
            )
    else:
        found = list(chosen_by_name(module, setting, argument="activation_checkpointing"))
    inner = {child for block in found for child in block.modules() if child is not block}
    outermost = [block for block in found if block not in inner]
    names = {child: name for name, child in module.named_modules()}
    own = [block for block in outermost if "forward" in block.__dict__]
    if patched := [names[block] for block in own if not isinstance(block.__dict__["forward"], ReplacedForward)]:
        raise ValueError(
            f"activation_checkpointing={setting!r} selects {', '.join(patched)}, whose forward was replaced on the"
            " instance. Override forward in a class, or select other classes."
        )
    return outermost


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """Return consecutive blocks of the same class that have submodules, whatever the class is called."""
    units = find_fsdp_units(module, min_unit_bytes=1)
    return [unit.module for unit in units if unit.reason == "block" and any(True for _ in unit.module.children())]


class _Checkpointed:
    """Mixin placed before a block's class in the MRO; its ``forward`` is checkpointed."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _recomputed(self, super().forward, *args, **kwargs)  # type: ignore[misc]


def _recomputed(block: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a block's forward under non-reentrant checkpointing; backward recomputes it."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=functools.partial(_contexts, block), **kwargs)


#: Class -> its checkpointed subclass, so that blocks of one class still share a class.
_subclasses: dict[type, type] = {}


def _checkpointed(cls: type) -> type:
    if cls not in _subclasses:
        names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
        _subclasses[cls] = type(cls.__name__, (_Checkpointed, cls), names)
    return _subclasses[cls]


def _contexts(block: Any) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    return contextlib.nullcontext(), _RecomputeContext(block, eager=is_eager(), values=_values_as_parameters(block))


class _RecomputeContext(contextlib.ExitStack):
    """Context of a recomputed forward; entered twice by a backward that is split into two halves.

    The recomputation is eager if the first forward was: compiled and eager code save different tensors for backward.
    """

    def __init__(self, block: nn.Module, *, eager: bool, values: list[tuple[nn.Module, str, Tensor]]) -> None:
        super().__init__()
        self._block, self._eager, self._values = block, eager, values

    def __enter__(self) -> Self:
        self.enter_context(eagerly(self._eager))
        self.enter_context(_preserve_statistics(self._block))
        self.enter_context(_in_place(self._values))
        return self


def _values_as_parameters(block: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Return the non-parameter values registered as parameters during an enclosing module's forward.

    They are no longer registered when backward recomputes the block.
    """
    tables: list[tuple[nn.Module, dict[str, Any]]] = [(child, own_parameters(child)) for child in block.modules()]
    return [
        (owner, name, value)
        for owner, table in tables
        for name, value in table.items()
        if value is not None and not isinstance(value, nn.Parameter)
    ]


@contextlib.contextmanager
def _in_place(values: list[tuple[nn.Module, str, Tensor]]) -> Iterator[None]:
    tables: list[dict[str, Any]] = [own_parameters(owner) for owner, _, _ in values]
    before = [table[name] for table, (_, name, _) in zip(tables, values, strict=True)]
    try:
        for table, (_, name, value) in zip(tables, values, strict=True):
            table[name] = value
        yield
    finally:
        for table, (_, name, _), value in zip(tables, values, before, strict=True):
            table[name] = value


@contextlib.contextmanager
def _preserve_statistics(block: nn.Module) -> Iterator[None]:
    """Keep running statistics unchanged inside: the recomputed batch has been counted by the first forward."""
    counting: list[Any] = [c for c in block.modules() if c.training and getattr(c, "track_running_stats", False)]
    before = [(child, child.momentum, _clone(child.num_batches_tracked)) for child in counting]
    for child in counting:
        # Zero weight for the recomputed batch. Disabling the statistics would make the layer save other tensors.
        child.momentum = 0.0
    try:
        yield
    finally:
        for child, momentum, batches in before:
            child.momentum = momentum
            if batches is not None:
                child.num_batches_tracked.copy_(batches)


def _clone(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.clone()
