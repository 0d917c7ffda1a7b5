"""Optimizer updates of unsharded tensors, for parameters that are sharded in any way between steps.

An optimizer that is not elementwise needs each of its tensors unsharded. If it updates one tensor at a time, one rank,
the owner, updates each tensor (:class:`~lightning_pardist.engines.common.owner_updates.OwnerUpdates`). If it updates
all tensors jointly, every rank does (:class:`~lightning_pardist.engines.common.joint_updates.JointUpdates`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_pardist.checkpoint.chunks import Shards
from lightning_pardist.checkpoint.coordination import Coordinator, GroupCoordinator, SingleCoordinator
from lightning_pardist.checkpoint.gather import assemble_optimizer
from lightning_pardist.checkpoint.tensors import (
    Slots,
    TensorSlot,
    device_of_state,
    in_place,
    require_same_groups,
    settled,
    shared_entries,
)
from lightning_pardist.collectives import table_device
from lightning_pardist.compat.process_groups import device_types
from lightning_pardist.engines.common.elementwise import user_attributes, with_user_attributes
from lightning_pardist.engines.common.owner_plan import Box, Kind, Move, OwnerPlan, TensorLayout
from lightning_pardist.engines.common.packed_exchange import BoxTransfer, PackedExchange
from lightning_pardist.engines.common.update_scope import FoundScope
from lightning_pardist.engines.offload import HostedState
from lightning_pardist.local_tensors import local_shard

_MARK = "_pardist_full_tensor_updates"


@dataclass(frozen=True)
class HeldTensor:
    """Local storage of a parameter on this rank.

    Attributes:
        grad: Slot of the gradient, in ``.grad`` of :attr:`~lightning_pardist.checkpoint.tensors.TensorSlot.like`.
        read: Slot of the values before the update.
        write: Slot that new values are written to.
    """

    grad: TensorSlot
    read: TensorSlot
    write: TensorSlot

    @classmethod
    def updated_in_place(cls, param: Tensor) -> HeldTensor:
        """Return the storage of a parameter, plain or a ``DTensor``, that is updated in place."""
        slot = TensorSlot(param)
        return cls(slot, slot, slot)

    def slot(self, kind: Kind) -> TensorSlot:
        """Return the slot of one kind of values."""
        return {"grads": self.grad, "reads": self.read, "writes": self.write}[kind]

    def values(self, kind: Kind) -> Tensor:
        """Return this rank's local tensor of one kind; zeros for a missing gradient, which other ranks may hold."""
        like = self.slot(kind).like
        if kind != "grads":
            return local_shard(like).detach()
        return torch.zeros_like(local_shard(like).detach()) if like.grad is None else local_shard(like.grad).detach()

    def boxes(self, kind: Kind) -> Shards:
        """Return this rank's boxes of one kind of values, sharing memory."""
        slot = self.slot(kind)
        if not slot.here:
            # Accessing the stand-in for a gradient held by other ranks would gather its values.
            return Shards(tuple(slot.param.shape), slot.param.dtype, ())
        return slot.locate(self.values(kind))

    @property
    def layout(self) -> TensorLayout:
        """Positions of all boxes."""
        grads, reads, writes = (
            tuple((part.offsets, part.sizes) for part in self.boxes(kind).parts)
            for kind in ("grads", "reads", "writes")
        )
        return TensorLayout(grads, reads, writes, self.read.like.dtype)

    @property
    def key(self) -> Any:
        """Key that changes when the local storage of the parameter changes."""
        slots = (self.grad, self.read, self.write)
        return tuple((id(slot.param), id(slot.like), slot.here, slot.held and slot.held[:2]) for slot in slots)


class FullTensorUpdates:
    """Base class of updates on unsharded tensors: gathers an optimizer's tensors and scatters the new values.

    Args:
        optimizer: The optimizer; outside of a step, its groups hold the user's parameters.
        group: Ranks that together hold all elements of the parameters of which this rank holds a shard.
        held: Returns the local storage of a parameter; called in every step.
        found: Update scope of the optimizer.
        device: Device of the update; that of the parameters' values if None.
        hosted: Holds the state between steps if it is offloaded; otherwise None.
        before_step: Called right before the update.
        after_step: Called after the update.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        group: dist.ProcessGroup,
        held: Callable[[nn.Parameter], HeldTensor],
        found: FoundScope,
        device: torch.device | None = None,
        hosted: HostedState | None = None,
        before_step: Callable[[], None] | None = None,
        after_step: Callable[[], None] | None = None,
    ) -> None:
        if group.size() > 1 and dist.get_backend(group) == "fake":
            raise ValueError(
                f"{type(optimizer).__name__} {found.describe()}: plans do not support its exchange of tensors yet."
            )
        self.optimizer = optimizer
        self.group = group
        self.rank = group.rank()
        self.found = found
        self.sent_bytes = 0
        self._held_by = held
        self._own_device = device
        self._hosted = hosted
        self._before_step = before_step
        self._after_step = after_step
        self._held: dict[int, HeldTensor] = {}
        self._current: list[nn.Parameter] = []
        self._places: dict[tuple[int, Kind], _BoxViews] = {}
        self._keys: dict[int, Any] = {}
        self._plan: OwnerPlan | None = None
        setattr(optimizer, _MARK, self)

    # --- ownership and plan ---------------------------------------------------------------------------------------

    def owns(self, number: int) -> bool:
        """Return whether this rank holds the state of the parameter with this number."""
        raise NotImplementedError

    def _params(self) -> list[nn.Parameter]:
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def _present(self) -> list[int]:
        """Return the numbers of parameters with a gradient on any rank. Collective over the group.

        Rebuilds the plan if the local storage has changed on any rank.
        """
        self._current = params = self._params()
        self._held = {number: self._held_by(param) for number, param in enumerate(params) if not param.is_meta}
        keys = {number: held.key for number, held in self._held.items()}
        flags = torch.zeros(len(params) + 1, dtype=torch.uint8)
        for number, held in self._held.items():
            flags[number] = held.grad.here and held.grad.like.grad is not None
        flags[-1] = keys != self._keys
        flags = flags.to(table_device(self.group, self._device))
        if self.group.size() > 1:
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.group)
        *present, changed = flags.tolist()
        if changed:
            self._keys = keys
            self._refresh_layouts()
        return [number for number, flag in enumerate(present) if flag]

    def _refresh_layouts(self) -> None:
        own = {number: held.layout for number, held in self._held.items()}
        layouts: list[dict[int, TensorLayout]] = [own]
        if self.group.size() > 1:
            layouts = [{} for _ in range(self.group.size())]
            dist.all_gather_object(layouts, own, group=self.group)
        self._plan = OwnerPlan(layouts, self._shapes())
        self._places = {}

    def _shapes(self) -> dict[int, tuple[int, ...]]:
        """Return the global shapes of the parameters that ranks of the group hold, by number."""
        return {number: tuple(param.shape) for number, param in enumerate(self._params())}

    @property
    def plan(self) -> OwnerPlan:
        """The plan of the boxes to send, as of the latest step."""
        if self._plan is None:
            raise RuntimeError("There is no plan before the first step.")
        return self._plan

    # --- exchanges ------------------------------------------------------------------------------------------------

    def _exchange(self, moves: Iterable[Move], wholes: Mapping[tuple[int, Kind], Tensor]) -> PackedExchange:
        """Launch the moves of boxes between local storage and unsharded tensors. Collective over the group."""
        outgoing, incoming = [], []
        for move in moves:
            to_whole = move.kind != "writes"
            ends = (move.source == self.rank, move.target == self.rank)
            held = self._own_box(move) if ends[not to_whole] else None
            whole = _box_of(wholes[move.number, move.kind], move) if ends[to_whole] else None
            values, place = (held, whole) if to_whole else (whole, held)
            if values is not None and place is not None and values.data_ptr() == place.data_ptr():
                # Updated in place.
                continue
            if values is not None:
                outgoing.append(BoxTransfer(move.target, values))
            if place is not None:
                incoming.append(BoxTransfer(move.source, place))
        exchange = PackedExchange(outgoing, incoming, group=self.group, device=self._device)
        self.sent_bytes += exchange.sent_bytes
        return exchange

    def _own_box(self, move: Move) -> Tensor:
        """Return this rank's view of a box; positions are cached."""
        held, at = self._held[move.number], (move.number, move.kind)
        values = held.values(move.kind)
        places = self._places.get(at)
        if places is None or not places.fit(values):
            places = self._places[at] = _BoxViews.of(held.boxes(move.kind), values)
        return places.view(values, move.box)

    @property
    def _device(self) -> torch.device:
        if self._own_device is not None:
            return self._own_device
        if self._held:
            return next(iter(self._held.values())).read.like.device
        # A rank without parameters takes part in collectives with empty messages, on the group's device.
        kinds = device_types(self.group)
        return kinds[0] if kinds and torch.device("cpu") not in kinds else torch.device("cpu")

    def _local_full_tensor(self, number: int, kind: Kind) -> Tensor | None:
        """Return this rank's view of values that it holds unsharded; None if it does not, or dtype or device differ."""
        moves = self.plan.gather(number, kind, self.rank)
        if len(moves) != 1 or moves[0].source != self.rank:
            return None
        values = self._own_box(moves[0])
        fits = values.dtype == self.plan.dtype(number) and values.device == self._device
        return values if fits else None

    def _empty(self, number: int) -> Tensor:
        return torch.empty(tuple(self._current[number].shape), dtype=self.plan.dtype(number), device=self._device)

    # --- state ----------------------------------------------------------------------------------------------------

    def slots(self) -> Slots:
        """Return the slots of unsharded state, group by group; a slot is ``here`` on ranks that hold its state."""
        numbers = iter(range(len(self._params())))
        steps_on = None if self._hosted is None else self._hosted.device
        keep = None if self._hosted is None else self._hosted.keep
        return [
            [
                TensorSlot(param, here=self.owns(next(numbers)), whole=True, steps_on=steps_on, keep=keep)
                for param in group["params"]
            ]
            for group in self.optimizer.param_groups
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return the single-process state dict on the group's first rank, without state elsewhere. Collective."""
        alone = self.group.size() == 1
        exchange: Coordinator = SingleCoordinator() if alone else GroupCoordinator(self.group)
        state = assemble_optimizer(0, self.optimizer, self.slots(), {}, exchange)
        if self._hosted is not None:
            for entry in self.optimizer.state.values():
                self._hosted.evict(entry)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of the parameters that this rank owns from a single-process state dict. Not collective.

        Raises:
            ValueError: If the parameter groups differ in number or size.
        """
        groups = self.optimizer.param_groups
        require_same_groups(self.optimizer, state["param_groups"], [len(group["params"]) for group in groups])
        self.optimizer.state.clear()
        self.optimizer.state.update(shared_entries(state))
        number = 0
        for group, settings in zip(groups, state["param_groups"], strict=True):
            group.update({key: value for key, value in settings.items() if key != "params"})
            for param, saved in zip(group["params"], settings["params"], strict=True):
                if (values := state["state"].get(saved)) and self.owns(number):
                    if self._hosted is None:
                        device = device_of_state(param, self.optimizer)
                        own = {key: settled(value, device) for key, value in values.items()}
                        self.optimizer.state[param] = in_place(own, device, group)
                    else:
                        own = {key: settled(value, torch.device("cpu")) for key, value in values.items()}
                        self.optimizer.state[param] = self._hosted.keep(
                            param, in_place(own, self._hosted.device, group)
                        )
                number += 1
        if self._hosted is not None:
            self._hosted.wait()

    def settle(self) -> None:
        """Move state that was just loaded from a checkpoint to its offload location. Not collective."""
        if self._hosted is None:
            return
        for param in [key for key in self.optimizer.state if isinstance(key, Tensor)]:
            self.optimizer.state[param] = self._hosted.keep(param, self.optimizer.state[param])
        self._hosted.wait()

    def _drop_unowned_state(self) -> None:
        """Drop state that the optimizer's constructor created for parameters with other owners."""
        for number, param in enumerate(self._params()):
            if not self.owns(number):
                self.optimizer.state.pop(param, None)
            elif any(isinstance(value, DTensor) for value in self.optimizer.state.get(param, {}).values()):
                raise ValueError(
                    f"{type(self.optimizer).__name__} creates state of full tensors in its constructor, but"
                    " parameters are already sharded. Create state in the first step, as torch's optimizers do."
                )

    def describe(self) -> str:
        """Return a description of the updates and their cost, for the log."""
        raise NotImplementedError


@dataclass(frozen=True)
class _BoxViews:
    """Positions of boxes in a tensor of a given shape and strides.

    Attributes:
        shape: Shape of the tensor.
        strides: Strides of the tensor.
        boxes: Maps a box to its sizes, its strides, and its storage offset relative to the tensor's first element.
    """

    shape: torch.Size
    strides: tuple[int, ...]
    boxes: Mapping[Box, tuple[torch.Size, tuple[int, ...], int]]

    @classmethod
    def of(cls, shards: Shards, values: Tensor) -> _BoxViews:
        begin = int(values.storage_offset())
        boxes = {
            (part.offsets, part.sizes): (
                part.values.shape,
                part.values.stride(),
                int(part.values.storage_offset()) - begin,
            )
            for part in shards.parts
        }
        return cls(values.shape, values.stride(), boxes)

    def fit(self, values: Tensor) -> bool:
        return values.shape == self.shape and values.stride() == self.strides

    def view(self, values: Tensor, box: Box) -> Tensor:
        sizes, strides, behind = self.boxes[box]
        return values.as_strided(sizes, strides, values.storage_offset() + behind)


def updates_of(optimizer: Optimizer) -> FullTensorUpdates | None:
    """Return the updates object of an optimizer that steps on unsharded tensors; None for other optimizers."""
    found: FullTensorUpdates | None = getattr(optimizer, _MARK, None)
    return found


def restore_own_step(optimizer: Optimizer) -> None:
    """Restore the optimizer's own ``step``, once it holds unsharded parameters and state."""
    if optimizer.__dict__.pop(_MARK, None) is not None:
        optimizer.__dict__.pop("step", None)


def full_parameter_like(param: nn.Parameter, values: Tensor, grad: Tensor | None = None) -> nn.Parameter:
    """Return an unsharded parameter that replaces the user's parameter in an optimizer."""
    twin = nn.Parameter(values, requires_grad=param.requires_grad)
    # Copy the user's attributes, which an optimizer may read.
    with_user_attributes(twin, user_attributes(param)).grad = grad
    return twin


def _box_of(whole: Tensor, move: Move) -> Tensor:
    return whole[tuple(slice(start, start + size) for start, size in zip(*move.box, strict=True))]
