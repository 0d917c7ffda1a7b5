"""Backward of sharded units: resharding, gradient reduction, and its order over ranks."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from lightning_pardist.compat.autograd import not_compiled
from lightning_pardist.compat.fsdp2 import ModuleState, ParameterGroup, ShardedParameter
from lightning_pardist.engines.common.settable_parameter import changes_of, make_gradient_settable
from lightning_pardist.engines.fsdp.collective_sequencer import GATHER, REDUCE, CollectiveSequencer
from lightning_pardist.engines.fsdp.comm import PendingReduction, UnitAllGather, UnitCompression, UnitReduceScatter
from lightning_pardist.engines.fsdp.fsdp_units import Unit
from lightning_pardist.engines.fsdp.hidden_gradient import HiddenGradients
from lightning_pardist.engines.fsdp.outputs import before_backward, shares_memory
from lightning_pardist.engines.fsdp.tiling import TiledLinear
from lightning_pardist.engines.fsdp.written_values import GatheredParameter, Member, WrittenValues
from lightning_pardist.local_tensors import gather_over_data, local_shard, shard_like, sharded_axes, wrap_like

T = TypeVar("T")


class ShardedUnit:
    """Runtime state of one FSDP unit.

    Attributes:
        unit: The unit's description in the plan.
        index: Position in the plan, the same on every rank.
        resident: Whether the unit stays gathered from the start of a step to the end of its backward: the root, and
            units whose parameters are used outside their module's call.
        by_forward: Whether the module's ``forward`` gathers the unit, rather than hooks around the module's call.
    """

    def __init__(self, unit: Unit, index: int, resident: bool, *, by_forward: bool = False) -> None:
        self.unit = unit
        self.index = index
        self.resident = resident
        self.by_forward = by_forward
        self.module: FSDPModule = unit.module  # type: ignore[assignment]
        self.state = ModuleState(self.module)
        self.groups = self.state.groups
        #: Number of forward calls whose backward has not run yet, per micro-batch.
        self.open_calls: Counter[Hashable] = Counter()
        self.watched = False
        #: Unsharded parameters by the ``id`` of their sharded parameter, filled from the first gather on.
        self.whole: dict[int, GatheredParameter] = {}
        self.on_written: Callable[[ShardedParameter, GatheredParameter], None] = _no_op
        self.name_of: Callable[[ShardedParameter], str] = str
        self._noted = self._has_reassigned_memory = False
        self._seen: tuple[int, ...] = ()

    @property
    def gathered(self) -> bool:
        """Whether the module holds unsharded parameters now."""
        return bool(self.groups) and all(group.is_unsharded for group in self.groups)

    def waiting_gradients(self) -> bool:
        """Return whether unsharded gradients are waiting to be reduced."""
        return any(parameter.has_unsharded_grad for group in self.groups for parameter in group.parameters)

    def note_gather(self) -> None:
        """Record the shards' change counters when a gather starts, for :meth:`drop_stale_gather`."""
        self._seen = changes_of(p.sharded for group in self.groups for p in group.parameters)

    def drop_stale_gather(self) -> None:
        """Drop a gather that began before the shards were changed (weights clipped, averaged or loaded in a step)."""
        pending = [group for group in self.groups if group.is_being_gathered]
        if pending and self._seen != changes_of(p.sharded for group in self.groups for p in group.parameters):
            for group in pending:
                group.drop_pending_gather()

    def set_resident(self, keep_after_forward: bool) -> None:
        """Keep the unit gathered through forward and backward."""
        self.resident = True
        self.module.set_reshard_after_forward(not keep_after_forward, recurse=False)
        self.module.set_reshard_after_backward(False, recurse=False)

    def gather(self) -> None:
        """All-gather the unit's parameters now. Collective over the shard group."""
        # Tensors created in inference mode cannot be used in training, so create them outside of it.
        with torch.inference_mode(False), torch.no_grad():
            self.module.unshard()

    def check_places(self, group: ParameterGroup) -> None:
        """Check that the module holds a group's parameters, before sharded and unsharded ones are swapped.

        Raises:
            RuntimeError: If user code replaced a parameter; the swap would undo that.
        """
        for parameter in group.parameters:
            if not parameter.is_in_place(whole=group.is_unsharded):
                raise RuntimeError(
                    f"{self.name_of(parameter)} was replaced, moved or removed after the module was sharded. Ranks hold"
                    " shards of the original parameter, which would be put back in its place. Write new values into it"
                    " (p.data = values, p.copy_(values)), replace it before fit, or use pardist_zero2."
                )

    def note_values(self, group: ParameterGroup, *, rounded: bool) -> None:
        """Record a group's gathered values before user code can change them.

        Args:
            group: One of the unit's parameter groups.
            rounded: Whether gathered values are rounded, and so differ from the shards.
        """
        keep = self.resident or rounded
        with torch.inference_mode(False) if keep else contextlib.nullcontext(), torch.no_grad():
            noted = []
            for parameter in group.parameters:
                whole = parameter.unsharded
                if whole is None or whole.is_inference():
                    continue
                gathered = self.whole.get(id(parameter))
                if gathered is None or gathered.whole is not whole:
                    gathered = self.whole[id(parameter)] = GatheredParameter(parameter, self.name_of(parameter))
                noted.append(gathered)
            GatheredParameter.note_all(noted, keep=keep)
        self._noted = True

    def keep_traced(self, group: ParameterGroup) -> None:
        """Write the user's changes to the shards before a group's unsharded parameters are freed."""
        if self._noted and group.is_unsharded:
            self.check_places(group)
            for parameter in group.parameters:
                gathered = self.whole.get(id(parameter))
                if gathered is not None and gathered.may_be_changed:
                    self._keep(parameter, gathered)

    def keep_changes(self) -> None:
        """Write changes made by the user while the unit was gathered (such as clamping) to the shards.

        In a unit that stays gathered through a step, parameters whose ``.data`` was accessed are compared with their
        earlier values even if no write was detected.
        """
        if self._noted and self.gathered:
            for group in self.groups:
                self.check_places(group)
                for parameter in group.parameters:
                    gathered = self.whole.get(id(parameter))
                    if gathered is not None and (gathered.may_be_changed or (self.resident and gathered.escaped)):
                        self._keep(parameter, gathered)

    def _keep(self, parameter: ShardedParameter, gathered: GatheredParameter) -> None:
        with torch.inference_mode(False):
            if gathered.keep_changes():
                self.on_written(parameter, gathered)
        self._has_reassigned_memory = self._has_reassigned_memory or gathered.reassigned_memory is not None

    def follow(self) -> None:
        """Before a call's backward, copy current values into parameter memory that the autograd graph has saved."""
        if self._has_reassigned_memory and self.gathered:
            for gathered in self.whole.values():
                gathered.follow()
            self._has_reassigned_memory = any(
                gathered.reassigned_memory is not None for gathered in self.whole.values()
            )

    def free(self) -> None:
        """Free the unsharded parameters and discard what was written to them; the shards remain."""
        self._noted = False
        for group in self.groups:
            group.free()

    def abandon(self) -> None:
        """Free the unsharded parameters after a failure, without waiting for other ranks. Not collective."""
        self._noted = False
        for group in self.groups:
            group.abandon()


class BackwardRuntime:
    """Wraps ``fully_shard``'s backward so that every gradient is reduced once, in the same order on every rank.

    Args:
        units: All units, the root last.
        replicated: Name -> parameter kept whole on every rank (scalars, empty ones, ignored dtypes).
        sequencer: Orders collectives over the ranks that train together.
        data_size: Number of ranks over which gradients are averaged.
        check: Whether to compare the order of collectives and the use of parameters after every backward.
        compression: Compression of the units' collectives.

    Attributes:
        turn: Micro-batch whose forward or backward runs, if those of several micro-batches interleave; else None.
    """

    def __init__(
        self,
        units: list[ShardedUnit],
        replicated: dict[str, nn.Parameter],
        sequencer: CollectiveSequencer,
        *,
        data_size: int,
        check: bool = True,
        compression: UnitCompression | None = None,
    ) -> None:
        self.units = units
        self.replicated = replicated
        self.sequencer = sequencer
        self.data_size = data_size
        self.check = check
        self.compression = UnitCompression() if compression is None else compression
        self.tiled: list[TiledLinear] = []
        #: Collectives of other engines: (index of the first, function that joins one), latest registered first.
        self.external_collectives: list[tuple[int, Callable[[int], None]]] = []
        self._next_external_index = 0
        self.pending: list[PendingReduction] = []
        self.finalizing = False
        self.inside = 0
        self.hidden = HiddenGradients()
        self.backwards = 0
        self.agreed: Callable[[], None] = _no_op
        #: Called with the names of parameters that ranks have set to different values.
        self.on_differing: Callable[[list[str]], None] = _no_op
        self.sync = True
        self.turn: Hashable = None
        self.differentiated = False
        self.filled: dict[int, ShardedParameter] = {}
        self.used: set[int] = set()
        self.positions: dict[int, int] = {}
        self._members_by_position: list[tuple[ShardedUnit, ParameterGroup, ShardedParameter]] = []
        for unit in units:
            for group in unit.groups:
                for parameter in group.parameters:
                    self.positions[id(parameter)] = len(self.positions)
                    self._members_by_position.append((unit, group, parameter))
        names = {id(parameter): name for name, parameter in units[-1].unit.module.named_parameters()}
        self._names = {at: names.get(id(p.sharded), "") for at, (_, _, p) in enumerate(self._members_by_position)}
        self.written = WrittenValues(sequencer, self._names)
        self.replicated_used: set[str] = set()
        self.handles: list[RemovableHandle] = []
        sequencer.join, sequencer.name_of = self.join_collective, self._name_of
        for unit in units:
            self._install(unit)
        for name, whole in replicated.items():
            self._when_replicated(whole, name)

    # -- installation

    def add_tiled(
        self, name: str, layer: nn.Linear, mesh: DeviceMesh, *, tile_bytes: float, policy: MixedPrecisionPolicy | None
    ) -> None:
        """Run a layer in tiles, whose collectives are numbered after those of all units and earlier tiles."""
        last = self.tiled[-1].first_index + self.tiled[-1].tiles if self.tiled else len(self.units)
        tiled = TiledLinear(
            name,
            layer,
            mesh,
            tile_bytes=tile_bytes,
            policy=policy,
            sequencer=self.sequencer,
            first_index=last,
            queue_final=self.queue_final,
        )
        self.tiled.append(tiled)

    def reserve_external_indices(self, count: int, join: Callable[[int], None]) -> int:
        """Reserve indices for another engine's collectives, after those of all units and tiles.

        Args:
            count: Number of collectives, the same on every rank.
            join: Takes part in a collective that another rank needs, given its index among these.

        Returns:
            Index of the first one.
        """
        after_tiles = self.tiled[-1].first_index + self.tiled[-1].tiles if self.tiled else len(self.units)
        first = self._next_external_index or after_tiles
        self._next_external_index = first + count
        self.external_collectives.insert(0, (first, join))
        return first

    def _when_replicated(self, parameter: nn.Parameter, name: str) -> None:
        handle = _when_gradient_arrives(parameter, self._replicated_arrived, name)
        if handle is not None:
            self.handles.append(handle)

    def _install(self, unit: ShardedUnit) -> None:
        unit.name_of = lambda parameter: self._names[self.positions[id(parameter)]]
        unit.on_written = lambda parameter, whole: self.written.note(self.positions[id(parameter)], whole)
        unit.state.wrap(final=self._final, register_pre_backward=functools.partial(self._on_output, unit))
        if not unit.by_forward:
            before = functools.partial(self.before_forward, unit)
            self.handles.append(unit.unit.module.register_forward_pre_hook(before, prepend=True))
        for group in unit.groups:
            group.wrap(
                post_forward=functools.partial(self._post_forward, unit, group),
                post_backward=functools.partial(self._post_backward, unit, group),
                register_post_backward=functools.partial(self._count_call, unit),
            )
            group.wrap_transitions(
                before_gathered=functools.partial(unit.check_places, group),
                gathered=functools.partial(self._note_values, unit, group),
                before_free=functools.partial(unit.keep_traced, group),
            )
            group.wrap_state_hooks(functools.partial(self._before_state, unit, group), self._fitting)
            unit.module.set_custom_all_gather(
                # The base class of torch's is not public.
                UnitAllGather(  # type: ignore[arg-type]
                    functools.partial(self._announce_gather, unit), self.sequencer.after, self.compression
                )
            )
            unit.module.set_custom_reduce_scatter(
                UnitReduceScatter(  # type: ignore[arg-type]
                    functools.partial(self.sequencer.before, REDUCE, unit.index),
                    group.output_becomes_grads,
                    self.pending,
                    self.compression,
                    functools.partial(self._members, group),
                )
            )

    def _members(self, group: ParameterGroup) -> tuple[int, ...]:
        """Return the positions of a group's trainable parameters, which identify its reduction.

        The gradients have been removed from the parameters by the time of the reduction.
        """
        return tuple(self.positions[id(p)] for p in group.parameters if p.sharded.requires_grad)

    def _note_values(self, unit: ShardedUnit, group: ParameterGroup) -> None:
        unit.note_values(group, rounded=self.compression.gather is not None and not self.compression.exact)

    def _announce_gather(self, unit: ShardedUnit) -> None:
        unit.note_gather()
        self.sequencer.before(GATHER, unit.index)

    def _before_state(self, unit: ShardedUnit, group: ParameterGroup) -> None:
        """Before a state dict is saved or loaded: show shards between steps, current parameters inside a step."""
        if not self.inside:
            unit.keep_changes()
            group.show_shards()

    def _fitting(self, parameter: torch.Tensor, value: torch.Tensor, whole: bool) -> torch.Tensor:
        """Return a state dict's value in the form of the parameter that it is loaded into, whole or sharded.

        Collective over the mesh if the value is sharded and the parameter whole.
        """
        if value.shape != parameter.shape:
            return value
        if whole:
            if isinstance(value, DTensor) and sharded_axes(value):
                if self.sequencer.active:
                    self.sequencer.wait_for_all()
                return gather_over_data(value)
            return value
        if isinstance(parameter, DTensor) and not (isinstance(value, DTensor) and sharded_axes(value)):
            return wrap_like(shard_like(value.detach(), parameter), parameter)
        return value

    def _replicated_arrived(self, name: str) -> None:
        self.replicated_used.add(name)
        self.queue_final()

    def _gathered_arrived(self, position: int) -> None:
        self.used.add(position)
        self.queue_final()

    def watch_gradients(self, unit: ShardedUnit) -> None:
        """Register hooks by which any gradient of the unit triggers the end-of-backward work, once it was gathered."""
        if unit.watched or not all(group.was_unsharded for group in unit.groups):
            return
        unit.watched = True
        for group in unit.groups:
            for parameter in group.parameters:
                gathered = parameter.unsharded
                if gathered is not None:
                    position = self.positions[id(parameter)]
                    _run_hooks_of(parameter.sharded, gathered, before=self.hidden.end)
                    _when_gradient_arrives(gathered, self._gathered_arrived, position)

    def queue_final(self) -> None:
        """Queue the end-of-backward work; called from inside a backward."""
        if not self.finalizing:
            self.units[-1].state.queue_final()

    # -- forward

    @not_compiled
    def before_forward(self, unit: ShardedUnit, *unused: Any) -> None:
        """Prepare a unit right before its forward gathers it. Collective over the shard group if it gathers here."""
        unit.drop_stale_gather()
        if not unit.watched:
            # Create the unsharded parameters outside inference mode; fully_shard's own hook then finds them.
            if unit.groups and not unit.gathered and torch.is_inference_mode_enabled():
                unit.gather()
            self.watch_gradients(unit)

    def _count_call(self, unit: ShardedUnit, register: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.watch_gradients(unit)
        new_args, new_kwargs = register(args, kwargs)
        if new_args is not args or new_kwargs is not kwargs:
            unit.open_calls[self.turn] += 1
        return new_args, new_kwargs

    def _post_forward(
        self, unit: ShardedUnit, group: ParameterGroup, finish: Callable[..., Any], module: Any, given: Any, output: Any
    ) -> Any:
        if unit.resident:
            # A backward inside this call (manual optimization) has reset the state; the unit is still in use after its
            # forward.
            group.set_forward()
        elif group.reshards_after_forward:
            storages = {whole.untyped_storage().data_ptr() for p in group.parameters for whole in p.gather_buffers}
            if shares_memory(output, storages - {0}):
                # The output is a parameter or a view of one, so the storage must not be freed.
                unit.set_resident(True)
        return finish(module, given, output)

    def _on_output(self, unit: ShardedUnit, output: Any) -> Any:
        """Register pre-backward hooks; ``fully_shard``'s miss tensors in objects and views changed in place."""
        if torch.is_grad_enabled():
            before_backward(output, functools.partial(self._before_backward, unit))
        return output

    # -- backward

    def _before_backward(self, unit: ShardedUnit, gradient: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            # Backward with create_graph (a gradient penalty): the next backward reads the unsharded parameters again,
            # at a time that no hook reports.
            self.differentiated = True
            if not unit.resident:
                unit.set_resident(True)
        gradient = unit.state.pre_backward(gradient)
        unit.follow()
        return gradient

    def _post_backward(
        self, unit: ShardedUnit, group: ParameterGroup, reduce: Callable[[], None], *unused: Any
    ) -> None:
        if not self.finalizing:
            unit.open_calls[self.turn] -= 1
            if unit.resident:
                return
            if unit.open_calls[self.turn] > 0:
                # Backward of a later call of the same module: the first call's, which runs last, reduces gradients.
                group.set_post_backward()
                group.reshard()
                return
        self.hidden.end()
        if group.has_work:
            self._note_filled(group.fill_missing_grads())
        reduce()
        # Not right after the reduce-scatter: HSDP's all-reduce is part of the same reduction.
        self.sequencer.after()

    def _note_filled(self, parameters: Iterable[ShardedParameter]) -> None:
        self.filled.update((self.positions[id(parameter)], parameter) for parameter in parameters)

    def _final(self, finish: Callable[[], None]) -> None:
        # Not done yet if this backward reached none of the parameters that have a hidden gradient.
        self.hidden.end()
        differentiated, self.differentiated = self.differentiated, False
        if differentiated and not any(unit.waiting_gradients() for unit in self.units):
            # Only gradients of inputs, which go into the loss: the step's own backward is still to come.
            self.units[-1].state.end_inner_backward()
            for unit in self.units:
                unit.open_calls.pop(self.turn, None)
            self._hide()
            return
        self.finalizing = True
        try:
            for unit in self.units:
                unit.open_calls.pop(self.turn, None)
                for group in unit.groups:
                    if group.has_work:
                        group.set_idle()
            finish()
            self.finish()
        finally:
            self.finalizing = False

    def finish(self) -> None:
        """Finish a backward: pending reductions, synchronisation across ranks, freeing. Collective over the mesh.

        With interleaved micro-batches, synchronisation across ranks waits for the end of the last one.
        """
        self.backwards += 1
        while self.pending:
            self.pending.pop(0).finish()
        if self.turn is None and self.sequencer.active:
            self.sequencer.wait_for_all()
            while self.pending:
                self.pending.pop(0).finish()
        for unit in self.units:
            # Parameters changed between forward and backward, such as a moving average in on_before_zero_grad.
            unit.keep_changes()
        if self.turn is None and self.sync:
            self._agree()
            self._reduce_replicated()
            self.agreed()
        for unit in self.units:
            for group in unit.groups:
                group.drop_pending_gather()
                for parameter in group.parameters:
                    make_gradient_settable(parameter.sharded.grad)
            if unit.resident and not self.inside:
                unit.free()
        self._hide()

    def _hide(self) -> None:
        if self.inside:
            self.hidden.hide(self.gathered())

    def gathered(self) -> Iterator[tuple[ShardedParameter, str]]:
        """Yield the parameters that are gathered now, with their names."""
        for unit in self.units:
            if unit.gathered:
                yield from ((each, unit.name_of(each)) for group in unit.groups for each in group.parameters)

    def end_without_backward(self) -> None:
        """Reduce pending gradients at the end of a step in which no rank has a loss. Collective over the mesh."""
        self.hidden.end()
        self.units[-1].state.run_final()

    def _agree(self) -> None:
        """Compare ranks' collectives and writes; a parameter that no rank used keeps no gradient, as in one process."""
        names = list(self.replicated)
        used_anywhere = self.used
        if self.check and self.data_size > 1:
            flags = torch.zeros(len(self.positions) + len(names), dtype=torch.int64)
            flags[list(self.used)] = 1
            for name in self.replicated_used:
                flags[len(self.positions) + names.index(name)] = 1
            flags = self.sequencer.compare(torch.cat([flags, self.written.flags(len(self.positions))]))
            flags, written = flags.split([len(flags) - len(self.positions), len(self.positions)])
            if differing := self.written.agree(written, self._member):
                self.on_differing(differing)
            self.replicated_used = {
                name for name, flag in zip(names, flags[len(self.positions) :].tolist(), strict=True) if flag
            }
            used_anywhere = set(flags[: len(self.positions)].nonzero().flatten().tolist())
        if self.check or self.data_size == 1:
            for position, parameter in self.filled.items():
                if position not in used_anywhere:
                    parameter.sharded.grad = None
        self.filled.clear()
        self.used.clear()

    def _member(self, position: int) -> Member:
        unit, group, parameter = self._members_by_position[position]
        return Member(parameter, unit.whole.get(id(parameter)), group.is_unsharded)

    def settle_written(self) -> list[str]:
        """Compare writes to gathered parameters across ranks, and take the first rank's. Collective over the mesh.

        Returns:
            Names of parameters that ranks have set to different values.
        """
        if self.data_size == 1:
            return []
        for unit in self.units:
            unit.keep_changes()
        flags = self.written.flags(len(self.positions))
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.sequencer.group)
        return self.written.agree(flags, self._member)

    def forget(self) -> None:
        """Discard the records of a backward that did not finish."""
        self.written.forget()
        self.filled.clear()
        self.used.clear()
        self.replicated_used.clear()

    def _reduce_replicated(self) -> None:
        names = sorted(self.replicated_used)
        self.replicated_used = set()
        if not names:
            return
        parameters = [self.replicated[name] for name in names]
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for dtype in sorted({parameter.dtype for parameter in parameters}, key=str):
            gradients = [local_shard(p.grad).reshape(-1) for p in parameters if p.dtype == dtype and p.grad is not None]
            flat = torch.cat(gradients)
            if flat.numel():
                self.sequencer.mean_(flat)
            offset = 0
            for parameter in parameters:
                if parameter.dtype == dtype and parameter.grad is not None:
                    gradient = local_shard(parameter.grad)
                    gradient.copy_(flat[offset : offset + gradient.numel()].view_as(gradient))
                    offset += gradient.numel()

    # -- joining other ranks' collectives

    def _name_of(self, index: int) -> str:
        """Return the name of the unit or tiled layer whose collectives have this index."""
        if index < len(self.units):
            return self.units[index].unit.name or "the parameters outside of other units"
        layers = (tiled.name for tiled in reversed(self.tiled) if tiled.first_index <= index)
        return next(layers, "a layer of experts")

    def join_collective(self, kind: int, index: int) -> None:
        """Take part in a collective that another rank needs and this one does not. Collective over the shard group."""
        for first, join in self.external_collectives:
            if index >= first:
                join(index - first)
                return
        if index >= len(self.units):
            tiled = next(t for t in reversed(self.tiled) if t.first_index <= index)
            tiled.join_collective(kind, index - tiled.first_index)
            return
        unit = self.units[index]
        if kind == GATHER:
            if unit.gathered or any(group.is_being_gathered for group in unit.groups):
                # This rank already holds the unit or is gathering it: it only sends its shards again.
                for group in unit.groups:
                    group.send_shard()
            else:
                unit.gather()
                self.watch_gradients(unit)
                unit.free()
            return
        for group in unit.groups:
            if not group.was_unsharded:
                # The other rank gathered the unit before and this rank took part, so the parameters should exist.
                raise RuntimeError(f"Unit {unit.unit.name!r} is reduced on another rank, but was never gathered here.")
            group.reduce_zeros(self._note_filled)


def _no_op(*unused: Any) -> None:
    """Do nothing: default of callbacks that an engine sets later."""


def _run_hooks_of(shard: Any, whole: nn.Parameter, *, before: Callable[[], None]) -> None:
    """Run hooks that ``register_hook`` adds to a sharded parameter, now or later, on the unsharded one's gradient.

    Args:
        shard: The sharded parameter.
        whole: The unsharded parameter.
        before: Called first, before the gradient is accumulated.
    """
    if not (whole.is_floating_point() or whole.is_complex()):
        return

    def run(gradient: torch.Tensor) -> torch.Tensor:
        before()
        for hook in tuple((getattr(shard, "gradient_hooks", None) or {}).values()):
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        return gradient

    frozen = not whole.requires_grad
    whole.requires_grad_(True)
    whole.register_hook(run)
    whole.requires_grad_(not frozen)


def _when_gradient_arrives(parameter: nn.Parameter, act: Callable[[T], None], argument: T) -> RemovableHandle | None:
    """Call a method in every backward that reaches the parameter, even if it is frozen now and trainable later.

    A sparse gradient (of embeddings with ``sparse=True``) is made dense first, as it has no slices to reduce-scatter.
    The method's object is held weakly: torch hides what such a hook refers to from the garbage collector, so that an
    object that refers to the parameter, and its process groups, would never be freed.
    """
    if not (parameter.is_floating_point() or parameter.is_complex()):
        return None
    method = weakref.WeakMethod(act)

    def arrived(whole: torch.Tensor) -> None:
        if whole.grad is not None and whole.grad.is_sparse:
            whole.grad = whole.grad.to_dense()
        if (bound := method()) is not None:
            bound(argument)

    frozen = not parameter.requires_grad
    parameter.requires_grad_(True)
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(arrived)
    parameter.requires_grad_(not frozen)
    return handle
