"""State dicts of the module and the optimizers, between what this rank holds and what one process has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_pardist.engines.checkpoint.assemble import assemble_module, assemble_optimizer
from lightning_pardist.engines.checkpoint.exchange import world_exchange
from lightning_pardist.engines.checkpoint.folder import FolderReader
from lightning_pardist.engines.checkpoint.states import (
    FolderState,
    Slots,
    can_fill,
    fill_module,
    fill_optimizer,
    optimizer_shards,
    whole_slots,
)
from lightning_pardist.engines.elementwise import is_elementwise

if TYPE_CHECKING:
    from lightning_pardist.strategies.base import PardistStrategy


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


class States:
    """A strategy's state dicts, as checkpoints of either form hold them.

    Full checkpoints hold those of one process, sharded ones what each rank has. Tensors come from where each part of
    the strategy says they are, and go there.

    Args:
        strategy: Whose module and optimizers.
    """

    def __init__(self, strategy: PardistStrategy) -> None:
        self.strategy = strategy
        self._names: dict[Tensor, str] = {}
        self._last_whole: dict[str, Any] | None = None

    def check(self, optimizers: Sequence[Optimizer]) -> None:
        """Refuse optimizers whose state is out of reach. Not collective.

        Raises:
            ValueError: For one that shards its state itself, where that has to be known by parameter.
        """
        strategy = self.strategy
        for optimizer in optimizers:
            if hasattr(optimizer, "consolidate_state_dict") and (strategy.checkpoints.sharded or strategy.model_axes):
                setting = 'checkpoint="sharded"' if strategy.checkpoints.sharded else strategy.dims.describe()
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
        strategy = self.strategy
        if not strategy.model_axes:
            return state if strategy.checkpoints.sharded else strategy.data.whole_module_state(state)
        own = state
        for part in strategy.model_axes:
            own = part.own_module_state(own)
        return own if strategy.checkpoints.sharded else self.whole_module_state(own, like=state)

    def of_optimizer(self, optimizer: Optimizer) -> dict[str, Any]:
        """What to save of an optimizer, in the same forms. Collective over the world, unless it is in shards."""
        strategy, engine = self.strategy, self.strategy.data_engine
        if not strategy.checkpoints.sharded and not strategy.model_axes:
            return optimizer.state_dict() if engine is None else engine.optimizer_state(optimizer)
        index = strategy.optimizers.index(optimizer)
        slots, names = self._slots(optimizer), self._current_names()
        if not strategy.checkpoints.sharded:
            return assemble_optimizer(index, optimizer, slots, names, world_exchange())
        tensors, rest = optimizer_shards(index, optimizer, slots, names)
        return ShardedOptimizerState(rest, tensors=tensors)

    def whole_module_state(self, own: Mapping[str, Any], *, like: Mapping[str, Any]) -> dict[str, Any]:
        """The state dict of one process, on the first rank. Collective over the world.

        Args:
            own: What this rank answers for, tensors of others on ``meta``.
            like: The state dict of this rank, with all names in their order.
        """
        self._last_whole = assemble_module(own, world_exchange(), like=like)
        return self._last_whole

    def pop_whole(self) -> dict[str, Any] | None:
        """The state dict that was made whole last, for the one save that it was made for."""
        whole, self._last_whole = self._last_whole, None
        return whole

    def _slots(self, optimizer: Optimizer) -> Slots:
        engine = self.strategy.data_engine
        return whole_slots(optimizer) if engine is None else engine.slots(optimizer)

    def _current_names(self) -> dict[Tensor, str]:
        module = self.strategy.lightning_module
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
        strategy, module = self.strategy, self.strategy.lightning_module
        if module is None:
            raise RuntimeError("A checkpoint is loaded into a module: call a Trainer's fit, validate, test or predict.")
        # A module with loading of its own gets whole tensors from a folder.
        if isinstance(state, FolderState) and can_fill(module):
            fill_module(module, state, strict=strict)
            return
        for part in (*reversed(strategy.model_axes), strategy.data):
            state = part.local_module_state(state)
        strategy.data.load_module_state(module, state, strict=strict)

    def load_optimizers(self, states: Sequence[dict[str, Any]]) -> None:
        """Load the states of all optimizers, of either form. Not collective.

        Raises:
            ValueError: If there are not as many optimizers as states.
        """
        optimizers = self.strategy.optimizers
        if len(states) != len(optimizers):
            raise ValueError(
                f"The checkpoint holds {len(states)} optimizer(s), configure_optimizers made {len(optimizers)}."
                " Configure as many as when it was saved."
            )
        for index, (optimizer, state) in enumerate(zip(optimizers, states, strict=True)):
            if isinstance(state, ShardedOptimizerState) and state.reader is not None:
                self._fill_optimizer(index, optimizer, state, state.reader)
            else:
                self._load_optimizer(optimizer, state)

    def _fill_optimizer(
        self, index: int, optimizer: Optimizer, state: ShardedOptimizerState, reader: FolderReader
    ) -> None:
        """Load a folder straight into what this rank holds."""
        engine, slots = self.strategy.data_engine, self._slots(optimizer)
        split = any(isinstance(slot.param, DTensor) for members in slots for slot in members)
        parts = not split or is_elementwise(optimizer, form="dims")
        fill_optimizer(index, optimizer, slots, state, reader, parts=parts)
        if engine is not None:
            engine.settle(optimizer)

    def _load_optimizer(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load this rank's part of the state dict of one process."""
        engine = self.strategy.data_engine
        for part in reversed(self.strategy.model_axes):
            state = part.local_optimizer_state(optimizer, state)
        # What torch takes as it is would keep a mapped file, and change with whoever writes to it.
        state = apply_to_collection(state, Tensor, torch.clone)
        if engine is None:
            optimizer.load_state_dict(state)
            _optimizers_to_device([optimizer], self.strategy.root_device)
        else:
            engine.load_optimizer_state(optimizer, state)
