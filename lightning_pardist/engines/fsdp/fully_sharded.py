"""A sharded module at run time: gathering, steps and evaluation on torch's ``fully_shard``."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from lightning_pardist.compat.autograd import not_compiled
from lightning_pardist.compat.dtensor import flatten_mesh
from lightning_pardist.compat.fake_group import backend_on
from lightning_pardist.compat.patches import backward_inside
from lightning_pardist.compat.process_groups import timeout_of
from lightning_pardist.engines.common.devices import device_of_mesh
from lightning_pardist.engines.common.eager_runs import eagerly
from lightning_pardist.engines.common.parameter_traits import take_place
from lightning_pardist.engines.common.update_scope import Scope, ScopeSetting
from lightning_pardist.engines.fsdp.backward import BackwardRuntime, ShardedUnit
from lightning_pardist.engines.fsdp.collective_sequencer import CollectiveSequencer
from lightning_pardist.engines.fsdp.comm import UnitCodes
from lightning_pardist.engines.fsdp.direct_param_use import DirectUse, InBackward
from lightning_pardist.engines.fsdp.fsdp_units import Unit, format_units
from lightning_pardist.engines.fsdp.hidden_gradient import refuse_set
from lightning_pardist.engines.fsdp.pipeline_fsdp import FSDPMicrobatchContext, UnitForward
from lightning_pardist.engines.fsdp.shard_optimizer import step_on_shards
from lightning_pardist.engines.fsdp.skip_consensus import SkipStepConsensus
from lightning_pardist.engines.offload import HostedState, HostStep
from lightning_pardist.local_tensors import whole_over_data

#: Backward of these needs their inputs, not their weights.
_READ_IN_FORWARD_ONLY = (nn.Embedding.forward,)

Result = TypeVar("Result")
#: Where gradients of all but the last micro-batch stay.
Accumulate = Literal["sharded", "unsharded"]


class FullySharded:
    """A sharded module at run time. Made by :func:`~.apply.shard`.

    Attributes:
        module: The module, sharded in place.
        mesh: Its mesh.
        units: The plan, the root last.
        replicated: Names of parameters that are whole on every rank.
        losses: Who has a loss in this step.
        codes: How units travel.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        units: list[ShardedUnit],
        replicated: dict[str, nn.Parameter],
        *,
        allow_divergent_forward: bool,
        detect_direct_param_use: Literal["first", "always", "never"],
        check: bool,
        save_gathers: bool,
        tiled: dict[str, nn.Linear],
        tile_bytes: float,
        mp_policy: MixedPrecisionPolicy | None,
        interleaved: bool,
        codes: UnitCodes,
        ignored: Collection[nn.Parameter] = (),
    ) -> None:
        self.module = module
        self.mesh = mesh
        self.replicated = replicated
        self.codes = codes
        self._ignored = {id(parameter) for parameter in ignored}
        self._units = units
        self._root = units[-1]
        self._watch = detect_direct_param_use
        self._watched: set[str] = set()
        self._changed_together: set[ShardedUnit] = set()
        self._save_gathers = save_gathers
        self._first: ShardedUnit | None = None
        # Micro-batches mix the order of a step: nothing is to be learned from it.
        self._order: list[ShardedUnit] | None = None if interleaved else []
        self._kept: Accumulate | None = None
        self._backwards_before = 0
        data_group = mesh.get_group() if mesh.ndim == 1 else flatten_mesh(mesh, _flat_name(mesh)).get_group()
        #: Global rank that gets whole tensors, first of those that hold the same part of the module.
        self.writer = dist.get_global_rank(data_group, 0)
        self.sequencer = CollectiveSequencer(_host_group(data_group), data_group)
        self.sequencer.active = allow_divergent_forward
        self._data_group = data_group
        self.losses = self._new_board()
        self._runtime = BackwardRuntime(
            units, replicated, self.sequencer, data_size=mesh.size(), check=check, codes=codes
        )
        self._runtime.agreed = self._learn_order
        for name, layer in tiled.items():
            self._runtime.add_tiled(name, layer, mesh, tile_bytes=tile_bytes, policy=mp_policy)
        self._root.module.set_reshard_after_backward(False, recurse=False)
        self._handles: list[RemovableHandle | UnitForward] = [
            *(unit.unit.module.register_forward_hook(functools.partial(self._after_forward, unit)) for unit in units),
            *(UnitForward(unit, self._runtime) for unit in units if unit.by_forward),
            module.register_forward_pre_hook(self._enter_by_call, prepend=True),
            module.register_forward_hook(self._leave_by_call, always_call=True),
        ]
        self._call = _trampoline(self._root.module)
        with torch.no_grad():
            # fully_shard takes the first module that runs for the root: let it be the root.
            self._call(lambda: None)
        self._root.free()

    def _new_board(self) -> SkipStepConsensus:
        return SkipStepConsensus(self._data_group, timeout=timeout_of(self.sequencer.group))

    # -- the plan

    @property
    def units(self) -> list[Unit]:
        """The plan, the root last."""
        return [unit.unit for unit in self._units]

    def __str__(self) -> str:
        return "\n".join([format_units(self.units), *map(str, self._runtime.tiled)])

    def sent_bytes(self, microbatches: int, keep: Accumulate = "sharded") -> float:
        """Bytes that this rank sends for gathers and reductions in a step of so many micro-batches, at most.

        Args:
            microbatches: Each has a forward and a backward of its own.
            keep: As for :meth:`microbatches`.
        """
        ranks = self.mesh.size(self.mesh.ndim - 1)
        reductions = microbatches if keep == "sharded" else 1
        times = sum(
            unit.unit.nbytes * ((1 if unit.resident else 2 * microbatches) + reductions) for unit in self._units
        )
        return times * (ranks - 1) / ranks

    # -- a step

    def run(self, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """Run a step function (``training_step``, ``validation_step``, ...) with the root's parameters gathered.

        Anything that uses the module goes through here, or through the module's own call. Backward may run inside
        (manual optimization) or afterwards. The root's parameters stay gathered until the backward that follows has
        ended, or to the end of the call when gradients are off. Collective over the mesh.

        Args:
            function: The step function.
            *args: Passed on.
            **kwargs: Passed on.

        Returns:
            What the function returns.

        Raises:
            RuntimeError: If a parameter is used outside its module's call in a way that was not seen before.
        """
        with self._inside(), self._looking(_name(function)):
            result: Result = self._call(function, *args, **kwargs)
            return result

    @contextlib.contextmanager
    def in_backward(self) -> Iterator[None]:
        """Around a backward: what hooks and custom functions call or use in it is gathered as in a step.

        A reversible layer, whose inputs are computed again from its outputs, is called by other methods than its own
        ``forward`` there. Collective over the mesh where a unit has to be gathered.
        """
        with self._looking("backward") as uses, contextlib.ExitStack() as inside:
            if uses is not None:
                inside.enter_context(backward_inside(InBackward(uses)))
            yield

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        self._enter()
        depth = self._runtime.inside
        try:
            yield
        finally:
            # A stage's run may be cut off in a call of the module, of which hooks learn nothing.
            self._runtime.inside = depth
            self._leave()

    def _enter(self) -> None:
        if self._runtime.inside == 0:
            self._backwards_before = self._runtime.backwards
            for unit in self._units:
                if unit.gathered:
                    # What is still there from a step without backward may be old by now.
                    unit.keep_changes()
                    unit.free()
                if unit.resident:
                    unit.gather()
                self._runtime.watch_gradients(unit)
            # What has accumulated may be dropped before the step's own backward.
            self._runtime.hidden.hide(self._runtime.gathered())
            first = self._first
            if first is not None and not first.resident and not torch.is_inference_mode_enabled():
                # Under way while the step prepares its inputs.
                first.module.unshard(async_op=True)
        self._runtime.inside += 1

    def _leave(self) -> None:
        self._runtime.inside -= 1
        if self._runtime.inside == 0:
            self._runtime.hidden.end()
            self.keep_changes()
            if not torch.is_grad_enabled() or self._runtime.backwards > self._backwards_before:
                for unit in self._units:
                    unit.free()

    def rest(self) -> None:
        """No backward of what ran so far will follow: parameters are shards again. Not collective."""
        if self._runtime.inside == 0:
            self.keep_changes()
            for unit in self._units:
                unit.free()

    @not_compiled
    def _enter_by_call(self, module: nn.Module, args: Any) -> None:
        self._enter()

    @not_compiled
    def _leave_by_call(self, module: nn.Module, args: Any, output: Any) -> None:
        self._leave()

    @contextlib.contextmanager
    def _looking(self, name: str) -> Iterator[DirectUse | None]:
        """Watch for direct uses of parameters, where asked for."""
        seen = f"{name}, grad={torch.is_grad_enabled()}"
        if self._watch == "always" or (self._watch == "first" and seen not in self._watched):
            # A mode would be traced into compiled blocks: the run that looks is an eager one.
            with eagerly(), DirectUse(self._units, self._keep, self._runtime.tiled) as uses:
                yield uses
            for units in uses.together:
                self._changed_together |= units
                if any(unit.resident or unit is self._root for unit in units):
                    for unit in units:
                        self._keep(unit)
            self._watched.add(seen)
            return
        try:
            yield None
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" in str(error):
                raise RuntimeError(
                    f"{name} used a parameter outside its module's call, which it did not do in its first run."
                    " Set detect_direct_param_use='always' to look for such uses in every step."
                ) from error
            raise

    def _keep(self, unit: ShardedUnit) -> None:
        """A parameter of this unit is used directly: gather it, and keep it through every step."""
        if not unit.resident:
            unit.set_resident(True)
            unit.module.set_unshard_in_backward(True)
        if not unit.gathered:
            unit.gather()
        self._runtime.watch_gradients(unit)

    @not_compiled
    def _after_forward(self, unit: ShardedUnit, module: nn.Module, args: Any, output: Any) -> None:
        if self._order is not None and self._runtime.inside and torch.is_grad_enabled():
            self._order.append(unit)

    def _learn_order(self) -> None:
        """After the first backward whose order ranks agree on: gather the next unit while one computes."""
        order = self._order
        if order is None:
            return
        if not order or self.sequencer.active:
            # Ranks may differ here; what is learned must be the same on all.
            self._order = []
            return
        self._order = None
        order = [unit for unit in order if not unit.resident]
        if self._save_gathers and order:
            if order[-1] not in self._changed_together:
                order[-1].module.set_reshard_after_forward(False, recurse=False)
            for unit in order[:-1]:
                if type(unit.unit.module).forward in _READ_IN_FORWARD_ONLY:
                    unit.module.set_unshard_in_backward(False)
        if len(set(order)) != len(order):
            return
        self._first = order[0] if order else None
        for unit, following in itertools.pairwise(order):
            unit.module.set_modules_to_forward_prefetch([following.module])

    # -- optimizers

    def keep_changes(self) -> None:
        """Write in-place changes of gathered parameters to the shards; done before every attached step. Local."""
        for unit in self._units:
            unit.keep_changes()

    def settle_written(self) -> list[str]:
        """Take the first rank's values of gathered parameters that ranks have set to different ones. Collective.

        Done at the end of every backward as well.

        Returns:
            Their names.
        """
        self.meet()
        return self._runtime.settle_written()

    def when_differing(self, tell: Callable[[list[str]], None]) -> None:
        """Have the names told of parameters that a backward finds to be set to different values on ranks."""
        self._runtime.on_differing = tell

    def _before_step(self, optimizer: torch.optim.Optimizer, known: int) -> None:
        if sum(len(group["params"]) for group in optimizer.param_groups) != known:
            self._refuse_new_parameters(optimizer)
        if self._runtime.inside:
            self._runtime.hidden.follow()
            refuse_set(self._runtime.gathered())
        self.keep_changes()
        self._runtime.written.drop_copies()

    def _refuse_new_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        ours = {id(p.sharded) for unit in self._units for group in unit.groups for p in group.parameters}
        tiled = [layer.layer.weight for layer in self._runtime.tiled]
        ours |= self._ignored | {id(parameter) for parameter in (*self._runtime.replicated.values(), *tiled)}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in ours:
                    raise RuntimeError(
                        f"{type(optimizer).__name__} was given a parameter of shape {tuple(parameter.shape)} that the"
                        " module did not have when it was sharded: nobody averages its gradient over ranks. Make it"
                        " before fit, or use pardist_zero2."
                    )

    def shards(self) -> dict[int, Any]:
        """The shards, by the ``id`` of what the module has in their places while they are gathered. Local."""
        self.keep_changes()
        parameters = (parameter for unit in self._units for group in unit.groups for parameter in group.parameters)
        return {id(each.unsharded): each.sharded for each in parameters if each.unsharded is not None}

    def refresh(self) -> None:
        """Call after an optimizer step inside :meth:`run` (manual optimization): gathers the new values. Collective."""
        for unit in self._units:
            if unit.gathered or any(group.is_being_gathered for group in unit.groups):
                unit.free()
        if self._runtime.inside:
            for unit in self._units:
                if unit.resident:
                    unit.gather()

    @contextlib.contextmanager
    def accumulate(self, keep: Accumulate = "sharded") -> Iterator[None]:
        """For the micro-batches before the last one of an optimizer step.

        Args:
            keep: ``"sharded"`` reduces every micro-batch and adds up shards (HSDP: within the shard group only);
                ``"unsharded"`` sends nothing and holds whole gradients until the last one.
        """
        before = self._kept
        self._keep_gradients(keep)
        try:
            yield
        finally:
            self._keep_gradients(before)

    def _keep_gradients(self, keep: Accumulate | None) -> None:
        """What backward does with gradients from now on; None reduces them."""
        self._kept = keep
        one_axis = self.mesh.ndim == 1
        root = self._root.module
        root.set_requires_gradient_sync(keep != "unsharded")
        if keep == "sharded":
            # fully_shard keeps partial sums of HSDP apart from .grad; all-reducing them at the boundary is enough.
            root.set_requires_all_reduce(one_axis)
        self._runtime.sync = keep is None or (keep == "sharded" and one_axis)

    @contextlib.contextmanager
    def microbatches(self, keep: Accumulate = "sharded") -> Iterator[FSDPMicrobatchContext]:
        """Around a step whose forwards and backwards of several micro-batches take turns.

        Whatever :meth:`accumulate` says outside, gradients are reduced when the turns are finished, and added to
        ``.grad``. Collective over the mesh, and every rank has to take the same turns.

        Args:
            keep: Where gradients stay until then, as for :meth:`accumulate`.

        Yields:
            Who is told whose turn it is.
        """
        before = self._kept
        self._keep_gradients(keep)
        try:
            yield FSDPMicrobatchContext(self._runtime, self._finish_turns)
        finally:
            self._runtime.turn = None
            self._keep_gradients(before)

    def _finish_turns(self) -> None:
        self._keep_gradients(None)
        self._runtime.end_without_backward()

    def attach(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        host: HostStep | None = None,
        hosted: HostedState | None = None,
        group: Callable[[Scope], dist.ProcessGroup] | None = None,
        scope: ScopeSetting = "auto",
    ) -> None:
        """Let an optimizer step on shards, and the module see its new values at once (manual optimization).

        Args:
            optimizer: Made from the module's parameters after :func:`~.apply.shard`.
            host: Steps in place of an elementwise optimizer, where its state is offloaded.
            hosted: Keeps the state of another one, where it is offloaded.
            group: Gives the ranks that together hold the parameters whole, for optimizers that are not elementwise;
                those of the shard axis if None.
            scope: What an element's update depends on; found by a trial if ``"auto"``.

        Raises:
            ValueError: If the optimizer cannot be tried, or it updates all tensors together and state is kept in files.
        """
        known = sum(len(group["params"]) for group in optimizer.param_groups)
        step_on_shards(
            optimizer,
            before_step=functools.partial(self._before_step, optimizer, known),
            after_step=self.refresh,
            host=host,
            hosted=hosted,
            device=device_of_mesh(self.mesh),
            group=group or (lambda scope: self.mesh.get_group(self.mesh.ndim - 1)),
            scope=scope,
        )

    def held_bytes(self, optimizers: Iterable[torch.optim.Optimizer] = ()) -> dict[str, int]:
        """Bytes this rank holds between steps: parameters, gradients and optimizer state, padding included.

        Args:
            optimizers: Whose state to count.

        Returns:
            ``parameters``, ``gradients``, ``optimizer`` and ``gathered`` (whole units held right now), in bytes.
        """
        held = {"parameters": 0, "gradients": 0, "optimizer": 0, "gathered": 0}
        for unit in self._units:
            for group in unit.groups:
                for parameter in group.parameters:
                    held["parameters"] += _storage(parameter.flat_shard)
                    held["gradients"] += _storage(parameter.sharded.grad)
                    held["gathered"] += sum(map(_storage, parameter.gather_buffers))
        for other in (*self.replicated.values(), *(tiled.layer.weight for tiled in self._runtime.tiled)):
            held["parameters"] += _storage(other)
            held["gradients"] += _storage(other.grad)
        for optimizer in optimizers:
            for state in optimizer.state.values():
                held["optimizer"] += sum(_storage(value) for value in state.values())
        return held

    # -- ranks that do different things

    @contextlib.contextmanager
    def uneven(self) -> Iterator[None]:
        """For evaluation loops whose ranks have different numbers of batches: ends when all ranks are done.

        Inside, every rank says which unit it needs, and all answer; one that leaves keeps answering until the others
        leave as well. Collective over the mesh, in that sense.
        """
        before, self.sequencer.active = self.sequencer.active, True
        try:
            yield
            self.sequencer.wait_for_all()
            if names := self._runtime.settle_written():
                self._runtime.on_differing(names)
        finally:
            self.sequencer.active = before

    def join_beside(self, count: int, join: Callable[[int], None]) -> int:
        """Let another engine's collectives be told apart from this one's while ranks do different things. Local.

        Args:
            count: How many it has, the same on every rank.
            join: Takes part in one of them.

        Returns:
            What to add to their numbers when they are announced to :attr:`sequencer`.
        """
        return self._runtime.add_beside(count, join)

    def meet(self) -> None:
        """Answer other ranks until all have come here; call before a collective of one's own while uneven."""
        if self.sequencer.active:
            self.sequencer.wait_for_all()

    def join(self) -> None:
        """Take the place of a backward that this rank does not run. Collective over the mesh.

        Raises:
            RuntimeError: If other ranks have a loss, and ranks may not use different units.
        """
        if self.sequencer.active or self.sequencer.size == 1:
            self._runtime.finish()
            return
        if not self.losses.is_skipped_by_all():
            raise RuntimeError(
                "This rank has no loss and others have one: they would wait for its part of the parameters."
                " Set allow_divergent_forward=True, or return a loss on every rank (zero times the output, say)."
            )
        # What micro-batches before this one left to be reduced.
        self._runtime.end_without_backward()

    def follow_requires_grad(self) -> None:
        """Call after changing ``requires_grad`` of an optimizer's parameters inside :meth:`run`. Local."""
        for unit in self._units:
            if unit.gathered:
                for group in unit.groups:
                    for parameter in group.parameters:
                        if parameter.unsharded is not None:
                            parameter.unsharded.requires_grad_(parameter.sharded.requires_grad)

    def zero_grad(self) -> None:
        """Forget all gradients, sharded and whole. Local."""
        for unit in self._units:
            for group in unit.groups:
                for parameter in group.parameters:
                    parameter.forget_grads()
        for other in (*self.replicated.values(), *(tiled.layer.weight for tiled in self._runtime.tiled)):
            other.grad = None

    def unshard_module(self) -> None:
        """Make the module what it was before :func:`~.apply.shard`, with whole parameters on every rank. Collective.

        New parameters take the place of the shards, which optimizers keep. The handle cannot be used afterwards.
        """
        for handle in (*self._handles, *self._runtime.handles):
            handle.remove()
        for unit in self._units:
            unit.free()
            unit.state.undo(_whole_parameter)
        for tiled in self._runtime.tiled:
            tiled.undo()

    def abandon(self) -> None:
        """The run was broken off, here or on another rank: the module holds its shards again. Not collective."""
        self._runtime.inside = 0
        self._runtime.pending.clear()
        for unit in self._units:
            unit.abandon()

    def reset(self) -> None:
        """After an exception in forward or backward: drop what was in flight, and all gradients. On every rank."""
        self._runtime.inside = 0
        self._runtime.pending.clear()
        self.sequencer.sequence = 0
        self.codes.exact = False
        if self.codes.remainders is not None:
            self.codes.remainders.clear()
        # Ranks may have got to different steps.
        self.losses = self._new_board()
        if self._order is not None:
            self._order = []
        self._runtime.turn = None
        self._root.state.reset_iteration()
        for unit in self._units:
            unit.open_calls.clear()
            unit.free()
        self.zero_grad()
        self._runtime.forget()


def _trampoline(root: FSDPModule) -> Callable[..., Any]:
    """The root's pre- and post-forward around any function, by torch's own ``register_fsdp_forward_method``."""
    name = "_pardist_run"

    def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    object.__setattr__(root, name, run)
    register_fsdp_forward_method(root, name)  # type: ignore[arg-type]
    method: Callable[..., Any] = getattr(root, name)
    object.__delattr__(root, name)
    return method


def _host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group over the same ranks with gloo for host memory, for the few integers that ranks exchange."""
    # Torch's "fake" backend has nobody to exchange with.
    if dist.get_backend(group) == "fake" or backend_on(group, torch.device("cpu")) == dist.Backend.GLOO:
        return group
    ranks = dist.get_process_group_ranks(group)
    made: dist.ProcessGroup = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return made


def _flat_name(mesh: DeviceMesh) -> str:
    return "_".join(mesh.mesh_dim_names or ("data",)) + "_flat"


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def _storage(value: Any) -> int:
    """Bytes of one tensor's own elements; of a shard, its local part."""
    if isinstance(value, DTensor):
        value = value.to_local()
    if not isinstance(value, torch.Tensor) or value.untyped_storage().size() == 0:
        return 0
    return value.numel() * value.element_size()


def _whole_parameter(shard: Any) -> nn.Parameter:
    return take_place(nn.Parameter(whole_over_data(shard), requires_grad=shard.requires_grad), shard)
