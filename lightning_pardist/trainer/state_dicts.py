"""Converts state dicts of module and optimizers between local shards and the full form of a single process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pardist.axes.base import RunContext
from lightning_pardist.checkpoint.chunks import Shards
from lightning_pardist.checkpoint.coordination import world_coordinator
from lightning_pardist.checkpoint.folder import FolderReader
from lightning_pardist.checkpoint.gather import assemble_module, assemble_optimizer
from lightning_pardist.checkpoint.nested import map_tensors
from lightning_pardist.checkpoint.tensors import (
    ABOUT,
    DIVERGED,
    FolderState,
    Slots,
    TensorSlot,
    can_fill,
    fill_module,
    fill_optimizer,
    full_slots,
    optimizer_keys,
    optimizer_shards,
)
from lightning_pardist.compat.lightning_functions import optimizers_to_device
from lightning_pardist.engines.common.full_tensor_updates import updates_of


class ShardedOptimizerState(dict[str, Any]):
    """Optimizer state in a sharded checkpoint: everything but the tensors, with a reference to these.

    Attributes:
        tensors: Tensor shards that this rank holds and saves.
        reader: Reader of the checkpoint folder to load tensors from.
    """

    def __init__(self, rest: Mapping[str, Any], *, tensors: Any = None, reader: FolderReader | None = None) -> None:
        super().__init__(rest)
        self.tensors: dict[str, Any] = tensors or {}
        self.reader = reader


class StateDicts:
    """Module and optimizer state dicts of a strategy, for full and sharded checkpoints.

    Full checkpoints hold the state dicts of a single process, sharded ones what each rank holds. Each axis maps between
    its local tensors and the full ones.

    Args:
        context: Context of the strategy.
    """

    def __init__(self, context: RunContext) -> None:
        self.context = context
        self._names: dict[Tensor, str] = {}
        self._full_module_state: dict[str, Any] | None = None
        self._saved: Mapping[str, Any] = {}
        self._at_end: tuple[dict[str, Shards], list[dict[str, Any]]] | None = None

    def check(self, optimizers: Sequence[Optimizer]) -> None:
        """Check that the optimizers' state can be saved. Not collective.

        Raises:
            ValueError: If an optimizer shards its state itself, and checkpoints or axes need it per parameter.
        """
        sharded = self.context.sharded_checkpoints
        for optimizer in optimizers:
            if hasattr(optimizer, "consolidate_state_dict") and (sharded or self.context.model_axes):
                setting = 'checkpoint="sharded"' if sharded else self.context.dims.describe()
                raise ValueError(
                    f"{type(optimizer).__name__} shards its state in a way of its own, which {setting} cannot save."
                    ' Use the optimizer inside it under pardist_zero1, or DDPStrategy with checkpoint="full".'
                )

    def record_names(self, module: nn.Module) -> None:
        """Record the names of the module's parameters: optimizers may keep parameters that the module replaces."""
        self._names = {param: name for name, param in module.named_parameters()}
        self._at_end = None

    def remember_names(self) -> None:
        """Record the names of parameters in a previous run's optimizers before the module is sharded. Not collective.

        An evaluation replaces the module's parameters, and a checkpoint saved after it includes the optimizers.
        """
        names, optimizers = self.current_names(), self.context.optimizers
        held = (param for optimizer in optimizers for group in optimizer.param_groups for param in group["params"])
        self._names.update({param: names[param] for param in held if param in names})

    # --- saving -------------------------------------------------------------------------------------------------

    def of_module(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the module's state dict to save. Collective over the world.

        Args:
            state: This rank's state dict, with all names in the module's order.

        Returns:
            The full state dict, complete at least on the first rank; this rank's shards for a sharded checkpoint.
        """
        context = self.context
        own = state
        for axis in context.model_axes:
            own = axis.own_module_state(own)
        if context.sharded_checkpoints:
            return own
        if context.model_axes:
            self._full_module_state = assemble_module(own, world_coordinator(), like=state)
        else:
            self._full_module_state = context.data_axis.full_module_state(state)
        return self._full_module_state

    def of_optimizer(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state to save, full or sharded. Collective over the world, unless sharded."""
        if not self.context.sharded_checkpoints:
            return self.full_optimizer_state(optimizer)
        index = self.context.optimizers.index(optimizer)
        tensors, rest = optimizer_shards(index, optimizer, self._own_slots(optimizer), self.current_names())
        return ShardedOptimizerState(rest, tensors={} if self.context.island else tensors)

    def full_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's full state dict, at least on the first rank. Collective over the world."""
        context, engine = self.context, self.context.data_engine
        if not context.model_axes and updates_of(optimizer) is None:
            return optimizer.state_dict() if engine is None else engine.optimizer_state(optimizer)
        index = context.optimizers.index(optimizer)
        slots = self._own_slots(optimizer)
        if context.island:
            slots = [[replace(slot, here=False) for slot in members] for members in slots]
        return assemble_optimizer(index, optimizer, slots, self.current_names(), world_coordinator())

    def pop_full_module_state(self) -> dict[str, Any] | None:
        """Return the latest full module state dict and drop the reference; None if there is none."""
        whole, self._full_module_state = self._full_module_state, None
        return whole

    def _slots(self, optimizer: Optimizer) -> Slots:
        engine, updates = self.context.data_engine, updates_of(optimizer)
        if updates is not None:
            return updates.slots()
        return full_slots(optimizer) if engine is None else engine.slots(optimizer)

    def _own_slots(self, optimizer: Optimizer) -> Slots:
        """Return :meth:`_slots` without replicas of another model-axis rank, whose slices may be cut differently."""

        def counts(slot: TensorSlot) -> bool:
            return slot.whole or all(axis.counts(slot.param) for axis in self.context.model_axes)  # type: ignore[arg-type]

        return [
            [slot if counts(slot) else replace(slot, here=False) for slot in members]
            for members in self._slots(optimizer)
        ]

    def current_names(self) -> dict[Tensor, str]:
        """Return names by parameter, for the module's current parameters and those recorded earlier."""
        module = self.context.module
        names = dict(self._names)
        if module is not None:
            names.update({param: name for name, param in module.named_parameters()})
        return names

    # --- models that are trained separately ---------------------------------------------------------------------

    def diverged(self) -> tuple[dict[str, Shards], list[dict[str, Any]]] | None:
        """Return the extra checkpoint state of axes whose ranks train separate models. Not collective.

        The first model's optimizers are saved in the place of a single process' optimizers.

        Returns:
            This rank's tensor shards by key, and on ranks of further models the rest of each optimizer's state, as
            returned by :func:`~lightning_pardist.checkpoint.tensors.optimizer_shards`. None if there is no such axis.
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
        """Keep the state of :meth:`diverged` after training, before optimizers are unsharded. Not collective."""
        self._at_end = self.diverged()

    def take(self, checkpoint: Mapping[str, Any]) -> None:
        """Take the state of separately trained models out of a checkpoint. Not collective."""
        about = checkpoint.get(ABOUT, {})
        self._saved = {key: about.pop(key) for key in ("tensors", "islands") if key in about}

    def load_diverged(self) -> None:
        """Load the state of :meth:`diverged`, after module and optimizers. Not collective.

        If as many models are trained separately as in the checkpoint, each resumes with its own optimizers; otherwise
        all resume with those of the first.
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
                f"The checkpoint holds the optimizer states of {len(rests) + 1} separately trained model(s), this run"
                f" trains {here}: all of them continue with the first model's."
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
        """Load the module's state from a checkpoint of either form. Not collective.

        Raises:
            RuntimeError: If there is no module yet, or the state does not match it.
        """
        context, module = self.context, self.context.module
        if module is None:
            raise RuntimeError("A checkpoint is loaded into a module: call a Trainer's fit, validate, test or predict.")
        # A module with custom loading receives full tensors from a folder.
        if isinstance(state, FolderState) and can_fill(module):
            fill_module(module, state, strict=strict)
            return
        for axis in (*reversed(context.model_axes), context.data_axis):
            state = axis.local_module_state(state)
        context.data_axis.load_module_state(module, state, strict=strict)

    def load_optimizers(self, states: Sequence[dict[str, Any]]) -> None:
        """Load the states of all optimizers from a checkpoint of either form. Not collective.

        If the checkpoint holds none, the optimizers start anew, as in Lightning, and a warning says so.

        Raises:
            ValueError: If the numbers of optimizers and states differ.
        """
        optimizers = self.context.optimizers
        if not states and optimizers:
            rank_zero_warn(
                "The checkpoint holds no optimizer state (optimizer_states is empty). Optimizers start anew."
            )
            return
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
        """Read optimizer state from a checkpoint folder directly into this rank's shards."""
        engine, slots = self.context.data_engine, self._slots(optimizer)
        fill_optimizer(index, optimizer, slots, state, reader)
        if (updates := updates_of(optimizer)) is not None:
            updates.settle()
        elif engine is not None:
            engine.settle(optimizer)

    def load_optimizer(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load this rank's part of a full optimizer state dict. Not collective."""
        engine = self.context.data_engine
        for axis in reversed(self.context.model_axes):
            state = axis.local_optimizer_state(optimizer, state)
        # Cloned, since torch may keep the loaded tensors: they would hold the mapped file, and share its memory.
        state = map_tensors(torch.clone, state)
        if (updates := updates_of(optimizer)) is not None:
            updates.load_state_dict(state)
        elif engine is None:
            optimizer.load_state_dict(state)
            optimizers_to_device([optimizer], self.context.device)
        else:
            engine.load_optimizer_state(optimizer, state)
