"""Distributed steps of optimizers that update one tensor at a time: each tensor is updated by one rank, its owner."""

from __future__ import annotations

import copy
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pardist.checkpoint.tensors import Slots, restore_shared, shared_state
from lightning_pardist.collectives import table_device
from lightning_pardist.compat.optimizers import mark_step, post_hooks, pre_hooks
from lightning_pardist.engines.common.elementwise import own_step
from lightning_pardist.engines.common.full_tensor_updates import FullTensorUpdates, full_parameter_like
from lightning_pardist.engines.common.owner_plan import Kind, Owners, rounds_of
from lightning_pardist.engines.common.packed_exchange import PackedExchange
from lightning_pardist.engines.common.update_scope import group_settings, restore_settings

#: MiB of unsharded values that an owner assembles per round, with as much of gradients.
ROUND_MB = 64.0
#: Minimum number of rounds per step, unless a round would have fewer bytes than this.
_ROUNDS, _MIN_ROUND_BYTES = 4, 2**20


class OwnerUpdates(FullTensorUpdates):
    """Owner updates for an optimizer that updates one tensor at a time: one rank, the owner, updates each tensor.

    A step runs in rounds: the tensors of the next round are sent to their owners while those of the current round are
    updated. A rank sends ``Psi/N (N-1)/N`` elements of gradients, as many of values if owners do not hold them, and as
    many of new values. A tensor that its owner holds unsharded is updated in place.

    Args:
        round_mb: MiB of unsharded values that a rank assembles at a time.
        held_by_rank: Returns the number of elements of a parameter's gradient that each rank of the group holds, equal
            on all ranks. Used to choose owners if gradients are spread unevenly.
        **kwargs: Arguments of :class:`~lightning_pardist.engines.common.full_tensor_updates.FullTensorUpdates`.

    Raises:
        ValueError: If state is offloaded to files and the optimizer cannot step on some of its tensors at a time.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        round_mb: float = ROUND_MB,
        held_by_rank: Callable[[nn.Parameter], Mapping[int, int]] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(optimizer, **kwargs)
        if self._window_bytes is not None and not self.found.in_rounds:
            raise ValueError(
                f"{type(optimizer).__name__} cannot step on a few parameters at a time, which offload to a folder"
                f" requires: it {self.found.describe()}, and a step "
                + (
                    "in several calls is not tried if update_scope is set."
                    if self.found.is_set
                    else "in several calls gives a different result."
                )
                + " Use offload='cpu'."
            )
        self.round_bytes = round_mb * 2**20
        self._held_by_rank = held_by_rank
        self._owners = Owners(self.group.size())
        #: For each parameter, the ranks that hold any of it: not all for experts in a list, or for pipeline stages.
        self._known: list[list[int]] = []
        self._latest: list[nn.Parameter] = []
        self._assign()
        self._drop_unowned_state()
        self.settle()

    @property
    def _window_bytes(self) -> int | None:
        """Bytes of offloaded state fetched at a time; None to fetch all state of a round."""
        return None if self._hosted is None else self._hosted.window_bytes

    def _assign(self) -> None:
        """Assign owners to new tensors. Collective over the group if there are any."""
        params = self._numbered()
        if len(params) == len(self._known):
            return
        self._known = self._ranks_with_values(params)
        new = {number: param for number, param in enumerate(params) if self._owners.of(number) is None}
        by_rank = self._held_by_rank or (lambda param: {})
        self._owners.assign(
            self._shapes(),
            {number: by_rank(param) for number, param in new.items()},
            {number: self._known[number] for number in new},
        )

    def _numbered(self) -> list[nn.Parameter]:
        """Return all parameters; if changed groups give some of them new numbers, they keep their owners.

        A parameter that replaces another one under the same number keeps the owner. Not collective: the groups must
        change in the same way on all ranks.
        """
        before, self._latest = self._latest, self._params()
        number_of = {param: number for number, param in enumerate(self._latest)}
        new = {number: number_of[param] for number, param in enumerate(before) if param in number_of}
        if any(number != moved for number, moved in new.items()):
            self._owners.renumber(new)
            self._known = []
        return self._latest

    def _ranks_with_values(self, params: Sequence[nn.Parameter]) -> list[list[int]]:
        """Return, for each parameter, the ranks on which it is not on ``meta``. Collective over the group."""
        size = self.group.size()
        known = torch.zeros(len(params), size, dtype=torch.uint8)
        known[:, self.rank] = torch.tensor([not param.is_meta for param in params], dtype=torch.uint8)
        known = known.to(table_device(self.group, self._device))
        if size > 1:
            dist.all_reduce(known, op=dist.ReduceOp.MAX, group=self.group)
        return [[rank for rank, here in enumerate(row) if here] for row in known.tolist()]

    @override
    def slots(self) -> Slots:
        self._numbered()
        return super().slots()

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._numbered()
        super().load_state_dict(state)

    @override
    def _shapes(self) -> dict[int, tuple[int, ...]]:
        return {number: tuple(param.shape) for number, param in enumerate(self._params()) if self._known[number]}

    def owns(self, number: int) -> bool:
        """Return whether this rank updates the parameter with this number."""
        return self._owners.of(number) == self.rank

    def describe(self) -> str:
        """Return a description of the updates and their load balance, for the log."""
        loads, ranks = self._owners.loads, self.group.size()
        uneven = max(loads) * ranks / max(sum(loads), 1.0)
        return (
            f"{type(self.optimizer).__name__} {self.found.describe()}: each of {ranks} ranks updates some tensors"
            f" and holds their state; the highest estimated cost of a rank is {uneven:.2f} times the mean"
        )

    @torch.no_grad()
    def step(self, **kwargs: Any) -> None:
        """Run one step, with torch's pre- and post-step hooks. Takes no closure. Collective over the group."""
        optimizer = self.optimizer
        args: tuple[Any, ...] = (optimizer,)
        for before in pre_hooks(optimizer):
            changed = before(optimizer, args, kwargs)
            if changed is not None:
                args, kwargs = changed
        if self._before_step is not None:
            self._before_step()
        self._update(kwargs)
        if self._after_step is not None:
            self._after_step()
        mark_step(optimizer)
        for after in post_hooks(optimizer):
            after(optimizer, args, kwargs)

    def _update(self, kwargs: Mapping[str, Any]) -> None:
        self._assign()
        present = self._present()
        rounds = self._rounds(present)
        begin = _StepSnapshot(self.optimizer) if len(rounds) > 1 or self._window_bytes is not None else None
        stepped = False
        arriving = self._fetch(rounds[0]) if rounds else None
        leaving: PackedExchange | None = None
        for index, numbers in enumerate(rounds):
            if arriving is None:
                raise RuntimeError("a round was not fetched before its update")
            values, grads = arriving.finish()
            arriving = self._fetch(rounds[index + 1]) if index + 1 < len(rounds) else None
            for batch, entries in self._batches(values):
                if stepped and begin is not None:
                    begin.restore()
                self._step_on({number: values[number] for number in batch}, grads, entries, kwargs)
                stepped = True
            if leaving is not None:
                leaving.finish()
            moves = [move for number in numbers for move in self.plan.scatter(number, self._owner(number))]
            leaving = self._exchange(moves, {(number, "writes"): value.data for number, value in values.items()})
        if not stepped and self.found.steps_on_none:
            # The optimizer may count steps in its groups.
            self._step_on({}, {}, {}, kwargs)
        if leaving is not None:
            leaving.finish()
        if self._hosted is not None:
            self._hosted.wait()

    def _batches(self, numbers: Iterable[int]) -> Iterator[tuple[list[int], dict[int, dict[str, Any]]]]:
        """Yield batches of a round's tensors whose state fits into the window, while the next batch is prefetched."""
        batches: list[list[int]] = []
        room = 0.0
        for number in numbers:
            # State that does not exist yet may be of any size: it counts as a full window.
            size = self._state_bytes(number)
            if not batches or size > room:
                batches.append([])
                room = math.inf if self._window_bytes is None else self._window_bytes
            batches[-1].append(number)
            room -= size
        arriving = self._entries(batches[0]) if batches else {}
        for index, batch in enumerate(batches):
            entries = arriving
            arriving = self._entries(batches[index + 1]) if index + 1 < len(batches) else {}
            yield batch, entries

    def _state_bytes(self, number: int) -> float:
        if self._window_bytes is None or self._hosted is None:
            return 0.0
        entry = self.optimizer.state.get(self._current[number])
        return float(self._window_bytes) if entry is None else self._hosted.num_bytes(entry)

    def _entries(self, numbers: Sequence[int]) -> dict[int, dict[str, Any]]:
        """Return the existing state of parameters, by number, fetched to the update's device if it is offloaded."""
        state, hosted = self.optimizer.state, self._hosted
        found = {number: state[self._current[number]] for number in numbers if self._current[number] in state}
        return found if hosted is None else {number: hosted.fetch(entry) for number, entry in found.items()}

    def _owner(self, number: int) -> int:
        owner = self._owners.of(number)
        if owner is None:
            raise RuntimeError(
                f"Parameter {number} has a gradient on another rank, but no rank is assigned to update it. Give the"
                " optimizer the same parameters on all ranks."
            )
        return owner

    def _rounds(self, present: Sequence[int]) -> list[list[int]]:
        owner_of = {number: self._owner(number) for number in present}
        item = max((self.plan.dtype(number).itemsize for number in present), default=4)
        shapes = self._shapes()
        share = sum(math.prod(shapes[number]) for number in present) / self.group.size()
        # Use several rounds even if all tensors fit into one, to overlap communication with updates.
        limit = min(self.round_bytes / item, max(share / _ROUNDS, _MIN_ROUND_BYTES / item))
        return list(
            rounds_of(present, owner_of, shapes, round_elements=limit if self.found.in_rounds else float("inf"))
        )

    def _fetch(self, numbers: Sequence[int]) -> _PendingFetch:
        moves = [
            move
            for number in numbers
            for kind in ("grads", "reads")
            for move in self.plan.gather(number, kind, self._owner(number))
        ]
        mine = [number for number in numbers if self.owns(number)]
        kinds: tuple[Kind, ...] = ("grads", "reads")
        wholes: dict[tuple[int, Kind], Tensor] = {}
        for number, kind in itertools.product(mine, kinds):
            here = self._local_full_tensor(number, kind)
            wholes[number, kind] = self._empty(number) if here is None else here
        return _PendingFetch(self._exchange(moves, wholes), wholes)

    def _step_on(
        self,
        values: Mapping[int, Tensor],
        grads: Mapping[int, Tensor],
        entries: Mapping[int, dict[str, Any]],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Run the optimizer's own step on some unsharded tensors, with their state."""
        optimizer = self.optimizer
        originals = [group["params"] for group in optimizer.param_groups]
        outside = optimizer.state
        twins: dict[int, nn.Parameter] = {}
        number = 0
        inside: defaultdict[Any, Any] = defaultdict(dict, shared_state(optimizer))
        for group, params in zip(optimizer.param_groups, originals, strict=True):
            members = []
            for param in params:
                if number in values:
                    twins[number] = twin = full_parameter_like(param, values[number], grads[number])
                    members.append(twin)
                    if number in entries:
                        inside[twin] = entries[number]
                number += 1
            group["params"] = members
        optimizer.state = inside
        try:
            own_step(optimizer)(optimizer, **kwargs)
        finally:
            for group, params in zip(optimizer.param_groups, originals, strict=True):
                group["params"] = params
            shared = shared_state(optimizer)
            inside, optimizer.state = optimizer.state, outside
            restore_shared(optimizer, shared)
        for number, twin in twins.items():
            if twin in inside:
                param = self._current[number]
                outside[param] = inside[twin] if self._hosted is None else self._hosted.keep(param, inside[twin])
            if twin.data_ptr() != values[number].data_ptr():
                # The step replaced the parameter's memory instead of writing to it.
                values[number].copy_(twin.detach())


@dataclass(frozen=True)
class _PendingFetch:
    """Pending exchange of a round's tensors with their owners."""

    exchange: PackedExchange
    wholes: Mapping[tuple[int, Kind], Tensor]

    def finish(self) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Wait, and return values and gradients, by number, of the tensors that this rank updates."""
        self.exchange.finish()
        values = {number: tensor for (number, kind), tensor in self.wholes.items() if kind == "reads"}
        return values, {number: tensor for (number, kind), tensor in self.wholes.items() if kind == "grads"}


class _StepSnapshot:
    """Snapshot of group settings and shared state, restored before each partial ``step`` of one logical step.

    Args:
        optimizer: The optimizer, before the first partial step.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._settings = group_settings(optimizer)
        self._shared = copy.deepcopy(shared_state(optimizer))

    def restore(self) -> None:
        """Restore the snapshot before the next partial step."""
        restore_settings(self._optimizer, self._settings)
        restore_shared(self._optimizer, copy.deepcopy(self._shared))
