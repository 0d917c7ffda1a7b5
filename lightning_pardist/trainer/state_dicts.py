"""State dicts of module and optimizers, between local shards and the form of one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pardist.axes.base import RunContext
from lightning_pardist.checkpoint.chunks import Shards
from lightning_pardist.checkpoint.coordination import world_coordinator
from lightning_pardist.checkpoint.folder import FolderReader
from lightning_pardist.checkpoint.gather import assemble_module, assemble_optimizer
from lightning_pardist.checkpoint.tensors import (
    ABOUT,
    DIVERGED,
    FolderState,
    Slots,
    TensorSlot,
    can_fill,
    fill_module,
    fill_optimizer,
    optimizer_keys,
    optimizer_shards,
    whole_slots,
)
from lightning_pardist.compat.lightning_functions import optimizers_to_device
from lightning_pardist.engines.common.whole_updates import updates_of


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
        self._saved: Mapping[str, Any] = {}
        self._at_end: tuple[dict[str, Shards], list[dict[str, Any]]] | None = None

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
        self._at_end = None

    def remember_names(self) -> None:
        """Before the module is taken apart anew, note the names that optimizers of a run before have. Not collective.

        An evaluation makes other parameters of it, and a checkpoint behind that holds the optimizers as well.
        """
        names, optimizers = self.current_names(), self.context.optimizers
        held = (param for optimizer in optimizers for group in optimizer.param_groups for param in group["params"])
        self._names.update({param: names[param] for param in held if param in names})

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
        return ShardedOptimizerState(rest, tensors={} if self.context.island else tensors)

    def whole_optimizer(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state dict of one process, at least on the first rank. Collective over the world."""
        context, engine = self.context, self.context.data_engine
        if not context.model_axes and updates_of(optimizer) is None:
            return optimizer.state_dict() if engine is None else engine.optimizer_state(optimizer)
        index = context.optimizers.index(optimizer)
        slots = self._own_slots(optimizer)
        if context.island:
            slots = [[replace(slot, here=False) for slot in members] for members in slots]
        return assemble_optimizer(index, optimizer, slots, self.current_names(), world_coordinator())

    def pop_whole(self) -> dict[str, Any] | None:
        """The state dict that was made whole last, for the one save that it was made for."""
        whole, self._last_whole = self._last_whole, None
        return whole

    def _slots(self, optimizer: Optimizer) -> Slots:
        engine, updates = self.context.data_engine, updates_of(optimizer)
        if updates is not None:
            return updates.slots()
        return whole_slots(optimizer) if engine is None else engine.slots(optimizer)

    def _own_slots(self, optimizer: Optimizer) -> Slots:
        """As :meth:`_slots`, without what another rank of a model axis holds alike: its slices may be cut elsewhere."""

        def counts(slot: TensorSlot) -> bool:
            return slot.whole or all(axis.counts(slot.param) for axis in self.context.model_axes)  # type: ignore[arg-type]

        return [
            [slot if counts(slot) else replace(slot, here=False) for slot in members]
            for members in self._slots(optimizer)
        ]

    def current_names(self) -> dict[Tensor, str]:
        """Names of the module's parameters, and of those that it had when optimizers were made."""
        module = self.context.module
        names = dict(self._names)
        if module is not None:
            names.update({param: name for name, param in module.named_parameters()})
        return names

    # --- models that are trained apart --------------------------------------------------------------------------

    def diverged(self) -> tuple[dict[str, Shards], list[dict[str, Any]]] | None:
        """What a checkpoint keeps of axes whose ranks train models of their own. Not collective.

        The first model's optimizers stand where those of one process do.

        Returns:
            This rank's boxes of tensors by key, and on ranks of further models the rest of each optimizer's state, as
            :func:`~lightning_pardist.checkpoint.tensors.optimizer_shards` gives it. None if there is no such axis.
        """
        context = self.context
        axes = [axis for axis in context.axes if axis.diverges]
        if self._at_end is not None or not axes:
            return self._at_end
        tensors = {f"{DIVERGED}{axis.name}.{key}": held for axis in axes for key, held in axis.shards().items()}
        rests: list[dict[str, Any]] = []
        if island := context.island:
            names = self.current_names()
            for index, optimizer in enumerate(context.optimizers):
                found, rest = optimizer_shards(index, optimizer, self._own_slots(optimizer), names)
                tensors.update({f"{DIVERGED}{island}.{key}": held for key, held in found.items()})
                rests.append(rest)
        return tensors, rests

    def end_run(self) -> None:
        """Training is over, and optimizers are about to become those of one process. Not collective."""
        self._at_end = self.diverged()

    def take(self, checkpoint: Mapping[str, Any]) -> None:
        """Note what a checkpoint holds of models that were trained apart. Not collective."""
        about = checkpoint.get(ABOUT, {})
        self._saved = {key: about.pop(key) for key in ("tensors", "islands") if key in about}

    def load_diverged(self) -> None:
        """Load what :meth:`diverged` gave, after module and optimizers. Not collective.

        Where as many models are trained apart as in the checkpoint, each goes on with its own optimizers; otherwise
        all with the first's.
        """
        saved, self._saved = self._saved, {}
        context, tensors = self.context, saved.get("tensors", {})
        axes = [axis for axis in context.axes if axis.diverges]
        for axis in axes:
            axis.load_shards(lambda key, axis=axis: tensors.get(f"{DIVERGED}{axis.name}.{key}"))  # type: ignore[misc]
        rests = saved.get("islands", {})
        here = context.dims.size(*(name for axis in axes for name in axis.mesh_axes))
        if len(rests) + 1 != here:
            rank_zero_info(
                f"The checkpoint holds the optimizers of {len(rests) + 1} model(s) that were trained apart, this run"
                f" trains {here}: all go on with the first one's."
            )
            return
        if not (island := context.island):
            return
        for index, (optimizer, rest) in enumerate(zip(context.optimizers, rests[island], strict=True)):
            prefix = f"{DIVERGED}{island}."
            keys = optimizer_keys(index, rest, (key.removeprefix(prefix) for key in tensors if key.startswith(prefix)))
            state = {
                number: {
                    **rest["small"].get(number, {}),
                    **{key: tensors[prefix + full] for key, full in found.items()},
                }
                for number, found in keys.items()
            }
            self.load_optimizer(
                optimizer,
                {
                    "state": {**{n: values for n, values in state.items() if values}, **rest.get("shared", {})},
                    "param_groups": rest["param_groups"],
                },
            )

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
        fill_optimizer(index, optimizer, slots, state, reader)
        if (updates := updates_of(optimizer)) is not None:
            updates.settle()
        elif engine is not None:
            engine.settle(optimizer)

    def load_optimizer(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load this rank's part of the state dict of one process. Not collective."""
        engine = self.context.data_engine
        for axis in reversed(self.context.model_axes):
            state = axis.local_optimizer_state(optimizer, state)
        # What torch takes as it is would keep a mapped file, and change with whoever writes to it.
        state = apply_to_collection(state, Tensor, torch.clone)
        if (updates := updates_of(optimizer)) is not None:
            updates.load_state_dict(state)
        elif engine is None:
            optimizer.load_state_dict(state)
            optimizers_to_device([optimizer], self.context.device)
        else:
            engine.load_optimizer_state(optimizer, state)
