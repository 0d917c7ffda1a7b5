"""State dicts of module and optimizers, between local shards and the form of one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_pardist.axes.base import RunContext
from lightning_pardist.checkpoint.coordination import world_coordinator
from lightning_pardist.checkpoint.folder import FolderReader
from lightning_pardist.checkpoint.gather import assemble_module, assemble_optimizer
from lightning_pardist.checkpoint.tensors import (
    FolderState,
    Slots,
    can_fill,
    fill_module,
    fill_optimizer,
    optimizer_shards,
    whole_slots,
)
from lightning_pardist.compat.lightning_functions import optimizers_to_device
from lightning_pardist.engines.common.elementwise import is_elementwise


class ShardedOptimizerState(dict[str, Any]):
    """An optimizer's state in a sharded checkpoint: everything but the tensors, and where those are.

    Attributes:
        tensors: What this rank holds, to be saved.
        reader: The folder to load from.
    """

    def __init__(self, rest: Mapping[str, Any], *, tensors: Any = None, reader: FolderReader | None = None) -> None:
        super().__init__(rest)
        self.tensors: dict[str, Any] = tensors or {}
        self.reader = reader


class StateDicts:
    """A strategy's state dicts, as checkpoints of either form hold them.

    Full checkpoints hold those of one process, sharded ones what each rank has. Tensors come from where each axis
    says they are, and go there.

    Args:
        context: The strategy's.
    """

    def __init__(self, context: RunContext) -> None:
        self.context = context
        self._names: dict[Tensor, str] = {}
        self._last_whole: dict[str, Any] | None = None

    def check(self, optimizers: Sequence[Optimizer]) -> None:
        """Refuse optimizers whose state is out of reach. Not collective.

        Raises:
            ValueError: For one that shards its state itself, where that has to be known by parameter.
        """
        sharded = self.context.sharded_checkpoints
        for optimizer in optimizers:
            if hasattr(optimizer, "consolidate_state_dict") and (sharded or self.context.model_axes):
                setting = 'checkpoint="sharded"' if sharded else self.context.dims.describe()
                raise ValueError(
                    f"{type(optimizer).__name__} shards its state in a way of its own, which {setting} cannot save."
                    ' Use the optimizer inside it under pardist_zero1, or DDPStrategy with checkpoint="full".'
                )

    def know_names(self, module: nn.Module) -> None:
        """Note the module's parameters: optimizers may keep them when the module no longer does."""
        self._names = {param: name for name, param in module.named_parameters()}

    # --- saving -------------------------------------------------------------------------------------------------

    def of_module(self, state: dict[str, Any]) -> dict[str, Any]:
        """What to save of the module. Collective over the world.

        Args:
            state: This rank's state dict, with all names in their order.

        Returns:
            The state dict of one process, whole at least on the first rank; in shards for a sharded checkpoint.
        """
        context = self.context
        own = state
        for axis in context.model_axes:
            own = axis.own_module_state(own)
        if context.sharded_checkpoints:
            return own
        if context.model_axes:
            self._last_whole = assemble_module(own, world_coordinator(), like=state)
        else:
            self._last_whole = context.data_axis.whole_module_state(state)
        return self._last_whole

    def of_optimizer(self, optimizer: Optimizer) -> dict[str, Any]:
        """What to save of an optimizer, in the same forms. Collective over the world, unless it is in shards."""
        if not self.context.sharded_checkpoints:
            return self.whole_optimizer(optimizer)
        index = self.context.optimizers.index(optimizer)
        tensors, rest = optimizer_shards(index, optimizer, self._own_slots(optimizer), self.current_names())
        return ShardedOptimizerState(rest, tensors=tensors)

    def whole_optimizer(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state dict of one process, at least on the first rank. Collective over the world."""
        context, engine = self.context, self.context.data_engine
        if not context.model_axes:
            return optimizer.state_dict() if engine is None else engine.optimizer_state(optimizer)
        index = context.optimizers.index(optimizer)
        return assemble_optimizer(
            index, optimizer, self._own_slots(optimizer), self.current_names(), world_coordinator()
        )

    def pop_whole(self) -> dict[str, Any] | None:
        """The state dict that was made whole last, for the one save that it was made for."""
        whole, self._last_whole = self._last_whole, None
        return whole

    def _slots(self, optimizer: Optimizer) -> Slots:
        engine = self.context.data_engine
        return whole_slots(optimizer) if engine is None else engine.slots(optimizer)

    def _own_slots(self, optimizer: Optimizer) -> Slots:
        """As :meth:`_slots`, without what another rank of a model axis holds alike: its slices may be cut elsewhere."""
        axes = self.context.model_axes
        return [
            [slot if all(axis.counts(slot.param) for axis in axes) else replace(slot, here=False) for slot in members]  # type: ignore[arg-type]
            for members in self._slots(optimizer)
        ]

    def current_names(self) -> dict[Tensor, str]:
        """Names of the module's parameters, and of those that it had when optimizers were made."""
        module = self.context.module
        names = dict(self._names)
        if module is not None:
            names.update({param: name for name, param in module.named_parameters()})
        return names

    # --- loading ------------------------------------------------------------------------------------------------

    def load_module(self, state: Mapping[str, Any], *, strict: bool) -> None:
        """Load the module's state of either form. Not collective.

        Raises:
            RuntimeError: If there is no module yet, or the state does not fit it.
        """
        context, module = self.context, self.context.module
        if module is None:
            raise RuntimeError("A checkpoint is loaded into a module: call a Trainer's fit, validate, test or predict.")
        # A module with loading of its own gets whole tensors from a folder.
        if isinstance(state, FolderState) and can_fill(module):
            fill_module(module, state, strict=strict)
            return
        for axis in (*reversed(context.model_axes), context.data_axis):
            state = axis.local_module_state(state)
        context.data_axis.load_module_state(module, state, strict=strict)

    def load_optimizers(self, states: Sequence[dict[str, Any]]) -> None:
        """Load the states of all optimizers, of either form. Not collective.

        Raises:
            ValueError: If there are not as many optimizers as states.
        """
        optimizers = self.context.optimizers
        if len(states) != len(optimizers):
            raise ValueError(
                f"The checkpoint holds {len(states)} optimizer(s), configure_optimizers made {len(optimizers)}."
                " Configure as many as when it was saved."
            )
        for index, (optimizer, state) in enumerate(zip(optimizers, states, strict=True)):
            if isinstance(state, ShardedOptimizerState) and state.reader is not None:
                self._fill_optimizer(index, optimizer, state, state.reader)
            else:
                self.load_optimizer(optimizer, state)

    def _fill_optimizer(
        self, index: int, optimizer: Optimizer, state: ShardedOptimizerState, reader: FolderReader
    ) -> None:
        """Load a folder straight into what this rank holds."""
        engine, slots = self.context.data_engine, self._slots(optimizer)
        split = any(isinstance(slot.param, DTensor) for members in slots for slot in members)
        parts = not split or is_elementwise(optimizer, form="dims")
        fill_optimizer(index, optimizer, slots, state, reader, parts=parts)
        if engine is not None:
            engine.settle(optimizer)

    def load_optimizer(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load this rank's part of the state dict of one process. Not collective."""
        engine = self.context.data_engine
        for axis in reversed(self.context.model_axes):
            state = axis.local_optimizer_state(optimizer, state)
        # What torch takes as it is would keep a mapped file, and change with whoever writes to it.
        state = apply_to_collection(state, Tensor, torch.clone)
        if engine is None:
            optimizer.load_state_dict(state)
            optimizers_to_device([optimizer], self.context.device)
        else:
            engine.load_optimizer_state(optimizer, state)
