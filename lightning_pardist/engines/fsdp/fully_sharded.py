"""Runtime of a sharded module: gathering, steps and evaluation on torch's ``fully_shard``."""

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
from lightning_pardist.compat.dtensor_operators import complete_operators, restore_operators
from lightning_pardist.compat.fake_group import backend_on
from lightning_pardist.compat.patches import backward_inside
from lightning_pardist.compat.process_groups import timeout_of
from lightning_pardist.engines.common.devices import device_of_mesh
from lightning_pardist.engines.common.eager_runs import eagerly
from lightning_pardist.engines.common.parameter_traits import copy_traits
from lightning_pardist.engines.common.update_scope import Scope, ScopeSetting
from lightning_pardist.engines.fsdp.backward import BackwardRuntime, ShardedUnit
from lightning_pardist.engines.fsdp.collective_sequencer import CollectiveSequencer
from lightning_pardist.engines.fsdp.comm import UnitCompression
from lightning_pardist.engines.fsdp.direct_param_use import DirectUse, InBackward, UseInHooks
from lightning_pardist.engines.fsdp.fsdp_units import Unit, format_units
from lightning_pardist.engines.fsdp.hidden_gradient import refuse_set
from lightning_pardist.engines.fsdp.pipeline_fsdp import FSDPMicrobatchContext, UnitForward
from lightning_pardist.engines.fsdp.shard_optimizer import step_on_shards
from lightning_pardist.engines.fsdp.skip_consensus import SkipStepConsensus
from lightning_pardist.engines.offload import HostedState, HostStep
from lightning_pardist.local_tensors import gather_over_data

#: Forwards whose backward needs the inputs, but not the weights.
_READ_IN_FORWARD_ONLY = (nn.Embedding.forward,)

Result = TypeVar("Result")
#: How gradients of all but the last micro-batch are kept.
Accumulate = Literal["sharded", "unsharded"]


class FullySharded:
    """Handle of a sharded module at run time. Created by :func:`~.shard.shard`.

    Attributes:
        module: The module, sharded in place.
        mesh: Device mesh of the data axes.
        units: The plan, the root last.
        replicated: Name -> parameter that is whole on every rank.
        losses: Consensus on steps without a loss.
        compression: Compression of the units' collectives.
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
        compression: UnitCompression,
        ignored: Collection[nn.Parameter] = (),
    ) -> None:
        complete_operators()
        self.module = module
        self.mesh = mesh
        self.replicated = replicated
        self.compression = compression
        self._ignored = {id(parameter) for parameter in ignored}
        self._units = units
        self._root = units[-1]
        self._watch = detect_direct_param_use
        self._watched: set[str] = set()
        self._in_hooks: UseInHooks | None = None
        self._changed_together: set[ShardedUnit] = set()
        self._save_gathers = save_gathers
        self._first: ShardedUnit | None = None
        # Interleaved micro-batches mix the order of a step, so prefetching cannot follow it.
        self._order: list[ShardedUnit] | None = None if interleaved else []
        self._kept: Accumulate | None = None
        self._backwards_before = 0
        data_group = mesh.get_group() if mesh.ndim == 1 else flatten_mesh(mesh, _flat_name(mesh)).get_group()
        #: Global rank that receives whole tensors, the first of those that hold the same part of the module.
        self.writer = dist.get_global_rank(data_group, 0)
        self.sequencer = CollectiveSequencer(_host_group(data_group), data_group)
        self.sequencer.active = allow_divergent_forward
        self._data_group = data_group
        self.losses = self._new_skip_consensus()
        self._runtime = BackwardRuntime(
            units, replicated, self.sequencer, data_size=mesh.size(), check=check, compression=compression
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
            # fully_shard takes the first module that runs as the root, so run the root first.
            self._call(lambda: None)
        self._root.free()

    def _new_skip_consensus(self) -> SkipStepConsensus:
        return SkipStepConsensus(self._data_group, timeout=timeout_of(self.sequencer.group))

    # -- the plan

    @property
    def units(self) -> list[Unit]:
        """The plan, the root last."""
        return [unit.unit for unit in self._units]

    def __str__(self) -> str:
        return "\n".join([format_units(self.units), *map(str, self._runtime.tiled)])

    def sent_bytes(self, microbatches: int, keep: Accumulate = "sharded") -> float:
        """Return an upper bound of the bytes that this rank sends for gathers and reductions in a step.

        Args:
            microbatches: Number of micro-batches, each with its own forward and backward.
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

        Everything that uses the module must run in here, or through the module's own call. Backward may run inside
        (manual optimization) or afterwards. The root's parameters stay gathered until the following backward has ended,
        or until the end of the call if gradients are off. Collective over the mesh.

        Args:
            function: The step function.
            *args: Passed to the function.
            **kwargs: Passed to the function.

        Returns:
            The function's result.

        Raises:
            RuntimeError: If a parameter is used outside its module's call in a way that was not seen before.
        """
        with self._inside(), self._detecting_direct_use(_name(function)):
            result: Result = self._call(function, *args, **kwargs)
            return result

    @contextlib.contextmanager
    def in_backward(self) -> Iterator[None]:
        """Context manager around a backward: units used by hooks and custom functions are gathered as in a step.

        A reversible layer, whose inputs are recomputed from its outputs, is called there by other methods than its own
        ``forward``. Collective over the mesh if a unit has to be gathered.
        """
        with self._detecting_direct_use("backward") as uses, contextlib.ExitStack() as inside:
            if uses is not None:
                inside.enter_context(backward_inside(InBackward(uses)))
            yield

    @contextlib.contextmanager
    def in_hook(self) -> Iterator[None]:
        """Context manager around user code outside of steps: units whose parameters it computes with are gathered.

        They stay gathered until the context ends, which writes changes of them to the shards. Collective over the mesh
        if a unit has to be gathered.
        """
        if self._runtime.inside:
            yield
            return
        if self._in_hooks is None:
            self._in_hooks = UseInHooks(
                self._units,
                self._runtime.tiled,
                is_idle=lambda: self._runtime.inside == 0,
                may_be_alone=lambda: self.sequencer.active,
            )
        # The mode would be traced into compiled blocks.
        with eagerly(), self._in_hooks:
            yield
        # Also the last unit of a step, which its own call leaves gathered: other ranks may not have called it.
        self.reshard_all()

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        self._enter()
        depth = self._runtime.inside
        try:
            yield
        finally:
            # A stage's run may be aborted inside a call of the module, and then post-forward hooks do not run.
            self._runtime.inside = depth
            self._leave()

    def _enter(self) -> None:
        if self._runtime.inside == 0:
            self._backwards_before = self._runtime.backwards
            for unit in self._units:
                if unit.gathered:
                    # Parameters still gathered since a step without backward may be stale by now.
                    unit.keep_changes()
                    unit.free()
                if unit.resident:
                    unit.gather()
                self._runtime.watch_gradients(unit)
            # Accumulated gradients may be cleared by the user before the step's own backward.
            self._runtime.hidden.hide(self._runtime.gathered())
            first = self._first
            if first is not None and not first.resident and not torch.is_inference_mode_enabled():
                # Runs while the step prepares its inputs.
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

    def reshard_all(self) -> None:
        """Reshard all units, as no backward of earlier forwards will follow. Not collective."""
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
    def _detecting_direct_use(self, name: str) -> Iterator[DirectUse | None]:
        """Detect direct uses of parameters, in the runs that ``detect_direct_param_use`` selects."""
        seen = f"{name}, grad={torch.is_grad_enabled()}"
        if self._watch == "always" or (self._watch == "first" and seen not in self._watched):
            # The mode would be traced into compiled blocks, so this run is eager.
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
        """Gather a unit whose parameter is used directly, and keep it gathered through every step."""
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
        """Prefetch units and skip needless gathers, by the order of the first step that was the same on all ranks."""
        order = self._order
        if order is None:
            return
        if not order or self.sequencer.active:
            # The order may differ between ranks here, and prefetching must be the same on all.
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

        Also runs at the end of every backward.

        Returns:
            Names of these parameters.
        """
        self.join_until_all()
        return self._runtime.settle_written()

    def on_differing_writes(self, tell: Callable[[list[str]], None]) -> None:
        """Set a callback for the names of parameters that a backward finds to differ between ranks."""
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
                        " module did not have when it was sharded: its gradient would not be averaged over ranks."
                        " Create it before fit, or use pardist_zero2."
                    )

    def shards(self) -> dict[int, Any]:
        """Return the shards by the ``id`` of the parameters that replace them while gathered. Not collective."""
        self.keep_changes()
        parameters = (parameter for unit in self._units for group in unit.groups for parameter in group.parameters)
        return {id(each.unsharded): each.sharded for each in parameters if each.unsharded is not None}

    def refresh(self) -> None:
        """Gather the new values after an optimizer step inside :meth:`run` (manual optimization). Collective."""
        for unit in self._units:
            if unit.gathered or any(group.is_being_gathered for group in unit.groups):
                unit.free()
        if self._runtime.inside:
            for unit in self._units:
                if unit.resident:
                    unit.gather()

    @contextlib.contextmanager
    def accumulate(self, keep: Accumulate = "sharded") -> Iterator[None]:
        """Context manager for the micro-batches before the last one of an optimizer step.

        Args:
            keep: ``"sharded"`` reduces the gradients of every micro-batch and accumulates shards (HSDP: reduced within
                the shard group only); ``"unsharded"`` sends nothing and holds unsharded gradients until the last
                micro-batch.
        """
        before = self._kept
        self._keep_gradients(keep)
        try:
            yield
        finally:
            self._keep_gradients(before)

    def _keep_gradients(self, keep: Accumulate | None) -> None:
        """Set how backward keeps gradients from now on; None reduces them."""
        self._kept = keep
        one_axis = self.mesh.ndim == 1
        root = self._root.module
        root.set_requires_gradient_sync(keep != "unsharded")
        if keep == "sharded":
            # fully_shard keeps HSDP's partial sums apart from .grad; it is enough to all-reduce them at the boundary.
            root.set_requires_all_reduce(one_axis)
        self._runtime.sync = keep is None or (keep == "sharded" and one_axis)

    @contextlib.contextmanager
    def microbatches(self, keep: Accumulate = "sharded") -> Iterator[FSDPMicrobatchContext]:
        """Context manager around a step in which forwards and backwards of several micro-batches interleave.

        Regardless of :meth:`accumulate` outside, gradients are reduced when all micro-batches have finished, and added
        to ``.grad``. Collective over the mesh, and every rank must run the same order of forwards and backwards.

        Args:
            keep: How gradients are kept until then, as for :meth:`accumulate`.

        Yields:
            Context that receives the current micro-batch.
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
        """Make an optimizer step on shards, and gather its new values at once in manual optimization.

        Args:
            optimizer: Created from the module's parameters after :func:`~.shard.shard`.
            host: Runs the steps of an elementwise optimizer whose state is offloaded.
            hosted: Keeps the offloaded state of an optimizer that is not elementwise.
            group: Returns the ranks that together hold whole parameters, for optimizers that are not elementwise; those
                of the shard axis if None.
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
        """Return the bytes that this rank holds between steps: parameters, gradients and optimizer state, with padding.

        Args:
            optimizers: Optimizers whose state is counted.

        Returns:
            ``parameters``, ``gradients``, ``optimizer`` and ``gathered`` (unsharded units held right now), in bytes.
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

    # -- ranks that diverge

    @contextlib.contextmanager
    def uneven(self) -> Iterator[None]:
        """Context manager for evaluation with different numbers of batches per rank; ends when all ranks are done.

        Inside, ranks exchange the unit that each needs, and all take part in its gather; a rank that leaves joins the
        others' collectives until they leave as well. Collective over the mesh, in that sense.
        """
        before, self.sequencer.active = self.sequencer.active, True
        try:
            yield
            self.sequencer.wait_for_all()
            if names := self._runtime.settle_written():
                self._runtime.on_differing(names)
        finally:
            self.sequencer.active = before

    def reserve_external_indices(self, count: int, join: Callable[[int], None]) -> int:
        """Reserve indices for another engine's collectives while ranks diverge. Not collective.

        Args:
            count: Number of its collectives, the same on every rank.
            join: Takes part in one of them, given its index.

        Returns:
            Offset to add to the indices that are passed to :attr:`sequencer`.
        """
        return self._runtime.reserve_external_indices(count, join)

    def join_until_all(self) -> None:
        """Join other ranks' collectives until all ranks call this; precedes a separate collective while uneven."""
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
                "This rank has no loss but other ranks have one: they would wait for its shards of the parameters."
                " Set allow_divergent_forward=True, or return a loss on every rank (such as zero times the output)."
            )
        # Reduce what earlier micro-batches left.
        self._runtime.end_without_backward()

    def follow_requires_grad(self) -> None:
        """Copy the shards' ``requires_grad`` to gathered parameters; call after a change in :meth:`run`. Local."""
        for unit in self._units:
            if unit.gathered:
                for group in unit.groups:
                    for parameter in group.parameters:
                        if parameter.unsharded is not None:
                            parameter.unsharded.requires_grad_(parameter.sharded.requires_grad)

    def zero_grad(self) -> None:
        """Drop all gradients, sharded and unsharded. Not collective."""
        for unit in self._units:
            for group in unit.groups:
                for parameter in group.parameters:
                    parameter.forget_grads()
        for other in (*self.replicated.values(), *(tiled.layer.weight for tiled in self._runtime.tiled)):
            other.grad = None

    def unshard_module(self) -> None:
        """Restore the module as before :func:`~.shard.shard`, with whole parameters on every rank. Collective.

        New parameters replace the shards, which optimizers keep. The handle cannot be used afterwards.
        """
        for handle in (*self._handles, *self._runtime.handles):
            handle.remove()
        for unit in self._units:
            unit.free()
            unit.state.undo(_whole_parameter)
        for tiled in self._runtime.tiled:
            tiled.undo()
        restore_operators()

    def abandon(self) -> None:
        """Restore the module's shards after a run failed, here or on another rank. Not collective."""
        self._runtime.inside = 0
        self._runtime.pending.clear()
        for unit in self._units:
            unit.abandon()

    def reset(self) -> None:
        """Drop work in flight and all gradients after an exception in forward or backward. Call on every rank."""
        self._runtime.inside = 0
        self._runtime.pending.clear()
        self.sequencer.sequence = 0
        self.compression.exact = False
        if self.compression.error_feedback is not None:
            self.compression.error_feedback.clear()
        # Ranks may have reached different steps.
        self.losses = self._new_skip_consensus()
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
    """Return a function that calls any other between the root's pre- and post-forward.

    Uses torch's own ``register_fsdp_forward_method``.
    """
    name = "_pardist_run"

    def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    object.__setattr__(root, name, run)
    register_fsdp_forward_method(root, name)  # type: ignore[arg-type]
    method: Callable[..., Any] = getattr(root, name)
    object.__delattr__(root, name)
    return method


def _host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a gloo group over the same ranks for host memory, to exchange a few integers."""
    # Torch's "fake" backend has no other ranks to exchange with.
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
    """Return the bytes of a tensor's own elements; for a DTensor, of its local part."""
    if isinstance(value, DTensor):
        value = value.to_local()
    if not isinstance(value, torch.Tensor) or value.untyped_storage().size() == 0:
        return 0
    return value.numel() * value.element_size()


def _whole_parameter(shard: Any) -> nn.Parameter:
    return copy_traits(nn.Parameter(gather_over_data(shard), requires_grad=shard.requires_grad), shard)
