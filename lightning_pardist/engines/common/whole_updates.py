"""Updates of whole tensors, whatever way ranks hold parts of them: storage keeps its layout, the update has another.

An optimizer that is not elementwise gets each of its tensors whole. One that updates a tensor at a time has one rank,
the owner, do it (:class:`~lightning_pardist.engines.common.owner_updates.OwnerUpdates`); one that updates all tensors
together has every rank do all of it (:class:`~lightning_pardist.engines.common.joint_updates.JointUpdates`).
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
from lightning_pardist.engines.common.elementwise import marked, marks_of
from lightning_pardist.engines.common.owner_plan import Box, Kind, Move, OwnerPlan, TensorLayout
from lightning_pardist.engines.common.packed_exchange import PackedExchange, Parcel
from lightning_pardist.engines.common.update_scope import FoundScope
from lightning_pardist.engines.offload import HostedState
from lightning_pardist.local_tensors import own_part

_MARK = "_pardist_whole_updates"


@dataclass(frozen=True)
class HeldTensor:
    """Where a parameter lies on this rank.

    Attributes:
        grad: What has its gradient, in ``.grad`` of :attr:`~lightning_pardist.checkpoint.tensors.TensorSlot.like`.
        read: Its values, as an update begins with them.
        write: What new values are written to.
    """

    grad: TensorSlot
    read: TensorSlot
    write: TensorSlot

    @classmethod
    def as_it_is(cls, param: Tensor) -> HeldTensor:
        """A parameter that is updated where it lies, plain or a ``DTensor``."""
        slot = TensorSlot(param)
        return cls(slot, slot, slot)

    def slot(self, kind: Kind) -> TensorSlot:
        """Where a kind of values lies."""
        return {"grads": self.grad, "reads": self.read, "writes": self.write}[kind]

    def values(self, kind: Kind) -> Tensor:
        """What this rank has, in one tensor; zeros in place of a gradient that is None, which others may have."""
        like = self.slot(kind).like
        if kind != "grads":
            return own_part(like).detach()
        return torch.zeros_like(own_part(like).detach()) if like.grad is None else own_part(like.grad).detach()

    def boxes(self, kind: Kind) -> Shards:
        """This rank's boxes of a kind of values, sharing memory."""
        slot = self.slot(kind)
        if not slot.here:
            # What stands for a gradient of others must not be looked at: its values would be gathered.
            return Shards(tuple(slot.param.shape), slot.param.dtype, ())
        return slot.locate(self.values(kind))

    @property
    def layout(self) -> TensorLayout:
        """Places of all boxes."""
        grads, reads, writes = (
            tuple((part.offsets, part.sizes) for part in self.boxes(kind).parts)
            for kind in ("grads", "reads", "writes")
        )
        return TensorLayout(grads, reads, writes, self.read.like.dtype)

    @property
    def key(self) -> Any:
        """Changes when the parameter comes to lie in another way."""
        slots = (self.grad, self.read, self.write)
        return tuple((id(slot.param), id(slot.like), slot.here, slot.held and slot.held[:2]) for slot in slots)


class WholeUpdates:
    """Puts an optimizer's tensors together and takes them apart; the base of what steps on them.

    Args:
        optimizer: Its groups hold the user's parameters, outside of a step.
        group: Ranks that hold all of the parameters that this rank has a part of.
        held: Where a parameter lies on this rank; asked in every step.
        found: What its updates depend on.
        device: Where updates are computed; that of the parameters' values if None.
        hosted: Keeps state between steps, if it is offloaded.
        before_step: Called right before the update.
        after_step: Called after it.
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
            raise ValueError(f"{type(optimizer).__name__} {found.describe()}: that exchange is not planned for yet.")
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
        self._places: dict[tuple[int, Kind], _Places] = {}
        self._keys: dict[int, Any] = {}
        self._plan: OwnerPlan | None = None
        setattr(optimizer, _MARK, self)

    # --- who and what ---------------------------------------------------------------------------------------------

    def owns(self, number: int) -> bool:
        """Whether this rank has the state of the parameter with this number."""
        raise NotImplementedError

    def _params(self) -> list[nn.Parameter]:
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def _present(self) -> list[int]:
        """Numbers of the parameters that have gradients on any rank; renews the plan. Collective over the group."""
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
            self._renew()
        return [number for number, flag in enumerate(present) if flag]

    def _renew(self) -> None:
        own = {number: held.layout for number, held in self._held.items()}
        layouts: list[dict[int, TensorLayout]] = [own]
        if self.group.size() > 1:
            layouts = [{} for _ in range(self.group.size())]
            dist.all_gather_object(layouts, own, group=self.group)
        self._plan = OwnerPlan(layouts, self._shapes())
        self._places = {}

    def _shapes(self) -> dict[int, tuple[int, ...]]:
        """Of the parameters that ranks of the group have, by number."""
        return {number: tuple(param.shape) for number, param in enumerate(self._params())}

    @property
    def plan(self) -> OwnerPlan:
        """Which boxes travel, as of the latest step."""
        if self._plan is None:
            raise RuntimeError("The plan is made when a step begins.")
        return self._plan

    # --- exchanges ------------------------------------------------------------------------------------------------

    def _exchange(self, moves: Iterable[Move], wholes: Mapping[tuple[int, Kind], Tensor]) -> PackedExchange:
        """Begin to move boxes between what ranks hold and whole tensors. Collective over the group."""
        outgoing, incoming = [], []
        for move in moves:
            to_whole = move.kind != "writes"
            ends = (move.source == self.rank, move.target == self.rank)
            held = self._own_box(move) if ends[not to_whole] else None
            whole = _box_of(wholes[move.number, move.kind], move) if ends[to_whole] else None
            values, place = (held, whole) if to_whole else (whole, held)
            if values is not None and place is not None and values.data_ptr() == place.data_ptr():
                # Updated where it lies.
                continue
            if values is not None:
                outgoing.append(Parcel(move.target, values))
            if place is not None:
                incoming.append(Parcel(move.source, place))
        exchange = PackedExchange(outgoing, incoming, group=self.group, device=self._device)
        self.sent_bytes += exchange.sent_bytes
        return exchange

    def _own_box(self, move: Move) -> Tensor:
        """This rank's view of a box; where it lies is worked out once."""
        held, at = self._held[move.number], (move.number, move.kind)
        values = held.values(move.kind)
        places = self._places.get(at)
        if places is None or not places.fit(values):
            places = self._places[at] = _Places.of(held.boxes(move.kind), values)
        return places.view(values, move.box)

    @property
    def _device(self) -> torch.device:
        if self._own_device is not None:
            return self._own_device
        if self._held:
            return next(iter(self._held.values())).read.like.device
        # A rank that knows none sends and receives nothing, where the others send from.
        kinds = device_types(self.group)
        return kinds[0] if kinds and torch.device("cpu") not in kinds else torch.device("cpu")

    def _where_it_lies(self, number: int, kind: Kind) -> Tensor | None:
        """A kind of values that this rank has whole, in memory of its own; None if others have parts."""
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
        """Whole state on the ranks that have it, group by group."""
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
        """The state dict of one process on the group's first rank; without state elsewhere. Collective over it."""
        alone = self.group.size() == 1
        exchange: Coordinator = SingleCoordinator() if alone else GroupCoordinator(self.group)
        state = assemble_optimizer(0, self.optimizer, self.slots(), {}, exchange)
        if self._hosted is not None:
            for entry in self.optimizer.state.values():
                self._hosted.evict(entry)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the state of the parameters that this rank owns from a state dict of one process. Not collective.

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
        """Bring state, just loaded from a checkpoint, to where it is kept. Not collective."""
        if self._hosted is None:
            return
        for param in [key for key in self.optimizer.state if isinstance(key, Tensor)]:
            self.optimizer.state[param] = self._hosted.keep(param, self.optimizer.state[param])
        self._hosted.wait()

    def _forget_others(self) -> None:
        """Drop state that an optimizer made in its constructor for parameters of other owners."""
        for number, param in enumerate(self._params()):
            if not self.owns(number):
                self.optimizer.state.pop(param, None)
            elif any(isinstance(value, DTensor) for value in self.optimizer.state.get(param, {}).values()):
                raise ValueError(
                    f"{type(self.optimizer).__name__} makes state of whole tensors in its constructor, where parameters"
                    " are sharded already. Let it make state in its first step, as torch's optimizers do."
                )

    def describe(self) -> str:
        """What the updates take, for the log."""
        raise NotImplementedError


@dataclass(frozen=True)
class _Places:
    """Where boxes lie in a tensor of one shape and strides.

    Attributes:
        shape: Of the tensor.
        strides: Its strides.
        boxes: By box its sizes and strides, and how far behind the tensor's first element it begins.
    """

    shape: torch.Size
    strides: tuple[int, ...]
    boxes: Mapping[Box, tuple[torch.Size, tuple[int, ...], int]]

    @classmethod
    def of(cls, shards: Shards, values: Tensor) -> _Places:
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


def updates_of(optimizer: Optimizer) -> WholeUpdates | None:
    """What puts an optimizer's tensors together, if it is not elementwise and they lie in parts."""
    found: WholeUpdates | None = getattr(optimizer, _MARK, None)
    return found


def forget_updates(optimizer: Optimizer) -> None:
    """The optimizer holds whole parameters, and whole state, from now on: it steps as it was made."""
    if optimizer.__dict__.pop(_MARK, None) is not None:
        optimizer.__dict__.pop("step", None)


def twin_of(param: nn.Parameter, values: Tensor, grad: Tensor | None = None) -> nn.Parameter:
    """A whole parameter that an optimizer takes for the user's own."""
    twin = nn.Parameter(values, requires_grad=param.requires_grad)
    # Optimizers are told by attributes which parameters are special.
    marked(twin, marks_of(param)).grad = grad
    return twin


def _box_of(whole: Tensor, move: Move) -> Tensor:
    return whole[tuple(slice(start, start + size) for start, size in zip(*move.box, strict=True))]
