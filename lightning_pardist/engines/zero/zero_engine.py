"""ZeRO-1 and ZeRO-2: the optimizer updates one slice on each rank; parameters stay plain, whole tensors."""

from __future__ import annotations

import functools
import math
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pardist.checkpoint.tensors import Slots, TensorSlot, full_slots, shared_state
from lightning_pardist.engines.common.block_quantization import Compression
from lightning_pardist.engines.common.full_tensor_updates import HeldTensor, updates_of
from lightning_pardist.engines.common.gradient_math import Counts, sum_of_powers
from lightning_pardist.engines.common.joint_updates import step_on_full_tensors
from lightning_pardist.engines.common.owner_updates import OwnerUpdates
from lightning_pardist.engines.common.quantized_exchange import ErrorFeedback
from lightning_pardist.engines.common.train_switches import SWITCHES, wrap_switches
from lightning_pardist.engines.common.update_scope import (
    Scope,
    ScopeSetting,
    find_scope,
    has_parameters,
)
from lightning_pardist.engines.data_engine import Assigned
from lightning_pardist.engines.ddp.reducer import GradientReducer
from lightning_pardist.engines.ddp.transport import Narrower
from lightning_pardist.engines.offload import HostCopies, HostedState, HostStep, Offload, StateFile
from lightning_pardist.engines.zero.host_slice import HostSlice
from lightning_pardist.engines.zero.optimizer_slices import gather_optimizer_state, slice_entry, slice_optimizer_state
from lightning_pardist.engines.zero.reduce_scatter import ReduceScatter
from lightning_pardist.engines.zero.sharded_bucket import Piece, ShardedBucket
from lightning_pardist.local_tensors import local_shard


class ZeroEngine:
    """Reduces gradients to the rank that owns a slice, updates the slice there, and gathers parameters after the step.

    Sends ``2 Psi (N-1)/N`` per rank and step, as data parallelism does: half of it gradients, half parameters. Holds
    ``2 Psi + 2 Psi/N`` (stage 1) or ``Psi + 3 Psi/N`` (stage 2) in fp32 with Adam. Stage 1 reduces gradients once per
    optimizer step; stage 2 reduces them with every backward, because it keeps only slices of them.

    Between steps ``param.grad`` represents the whole gradient, which is gathered when its values are read, see
    :class:`~lightning_pardist.engines.zero.lazy_gradient.LazyGradient`; changes to it are applied to the slices.

    Within a step, the optimizer's groups and state hold the flat parts of parameters in this rank's slice; at any
    other time they hold the module's own parameters, for code that freezes, adds or looks up parameters. With one rank
    nothing is changed, unless the optimizer steps on the host.

    For an optimizer that updates one tensor at a time, each tensor is updated whole by one rank
    (:class:`~lightning_pardist.engines.common.owner_updates.OwnerUpdates`), which sends up to ``2 Psi/N`` more. An
    optimizer that updates all tensors together steps on whole parameters and gradients on every rank, as in DDP,
    including those that a tensor axis splits or other pipeline stages hold. With ``offload`` the state of both is kept
    on the host, and is copied to the parameters' device for the update.

    With ``gather`` and ``reduce`` communication is compressed (ZeRO++, arXiv 2306.10209), but sums and updates are not:
    updated slices stay exact, separate from the parameters that ranks compute with (``Psi/N`` more), and compression
    errors of gradients are kept for the next ones (one byte per parameter).

    Args:
        module: Module whose parameters become views of flat buffers; values must be equal over the group.
        optimizers: Optimizers over parameters of ``module``, before their first step.
        group: The data axis' process group.
        zero_stage: 1 or 2.
        bucket_size_mb: Size of a bucket.
        overlap: Whether gradients are reduced while backward runs.
        offload: Where optimizer state is kept and steps run; on the parameters' device if None. With offload, a single
            rank uses slices too.
        update_group: Creates the group of ranks that update whole tensors together, given the update's scope: those
            that hold parameters, tensor ranks that split them included, or all stages. Collective over the world.
        update_scope: What an element's update depends on; found by a trial if ``"auto"``.
        gather: Codes for parameters in gathers; uncompressed if None.
        reduce: Codes for gradients in reductions; uncompressed if None.
        error_feedback: Whether compression errors of gradients are added to the next ones.
        narrower: Parameters that fewer ranks hold, see :class:`~lightning_pardist.engines.ddp.transport.Transport`.

    Raises:
        ValueError: If the stage is neither 1 nor 2, or an optimizer cannot be tried, or it updates all tensors together
            and parameters are compressed or state is kept in files.
        RuntimeError: If there is not enough room for offloaded state.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        group: dist.ProcessGroup,
        zero_stage: int,
        bucket_size_mb: float = 25.0,
        overlap: bool = True,
        offload: Offload | None = None,
        update_group: Callable[[Scope], dist.ProcessGroup] | None = None,
        update_scope: ScopeSetting = "auto",
        gather: Compression | None = None,
        reduce: Compression | None = None,
        error_feedback: bool = True,
        narrower: Narrower | None = None,
    ) -> None:
        if zero_stage not in (1, 2):
            raise ValueError(f"zero_stage={zero_stage} is not served by ZeroEngine. Use 1 or 2.")
        self.group = group
        self.zero_stage = zero_stage
        self._showing: set[Optimizer] = set()
        self._undo: list[Callable[[], None]] = []
        self._pieces: dict[nn.Parameter, list[Piece]] = {}
        self._buckets: list[ShardedBucket] = []
        self._home: dict[nn.Parameter, ShardedBucket] = {}
        self._bucket_of: dict[nn.Parameter, ShardedBucket] = {}
        self._offload = offload
        self._gather, self._reduce = gather, reduce
        self._error_feedback = ErrorFeedback() if reduce is not None and error_feedback else None
        self._store = None if offload is None or offload.folder is None else StateFile(offload.folder)
        self._copies: HostCopies | None = None
        self._host_steps: dict[Optimizer, HostStep] = {}
        bucket_groups = {param: index for index, optimizer in enumerate(optimizers) for param in _params(optimizer)}
        self._is_sliced = group.size() > 1 or offload is not None
        self._sliced = [each for each in optimizers if self._is_sliced and self._on_slices(each, update_scope)]
        self.reducer = GradientReducer(
            module,
            transport=ReduceScatter(
                group,
                keep_full=zero_stage == 1,
                make_host=None if offload is None else self._make_host,
                gather=gather if group.size() > 1 else None,
                reduce=reduce if group.size() > 1 else None,
                error_feedback=self._error_feedback,
                narrower=narrower,
            ),
            bucket_groups=bucket_groups,
            bucket_size_mb=bucket_size_mb,
            first_bucket_size_mb=min(1.0, bucket_size_mb),
            overlap=overlap,
            reorder=False,
            alone=self._is_sliced,
        )
        self._bind()
        for optimizer in optimizers if self._is_sliced else ():
            before = {name: optimizer.__dict__.get(name) for name in ("step", "zero_grad", *SWITCHES)}
            if optimizer not in self._sliced:
                self._step_on_full_tensors(optimizer, update_scope, update_group or (lambda scope: self.group))
            self._undo.append(self._wrap(optimizer, before))

    # --- DataEngine ---------------------------------------------------------------------------------------------

    @property
    def is_reduced(self) -> bool:
        """Whether gradients were reduced since the last step."""
        return self.reducer.is_reduced

    @property
    def has_gradients(self) -> bool:
        """Whether any parameter has a gradient on any rank."""
        return self.reducer.has_gradients or any(bucket.has_gradients for bucket in self._buckets)

    @property
    def scales_reduced_gradients(self) -> bool:
        """Whether a factor on all gradients may be applied after the reduction: not if that compresses them."""
        return self._reduce is None

    @property
    def has_gradient_hooks(self) -> bool:
        """Whether any parameter has a hook on its gradient."""
        return self.reducer.has_gradient_hooks

    def no_sync(self) -> AbstractContextManager[None]:
        """Context manager to accumulate gradients: whole and not reduced in stage 1, reduced to slices in stage 2."""
        return self.reducer.no_sync() if self.zero_stage == 1 else _null_context()

    @contextmanager
    def backward(self, loss: Tensor, *, overlap: bool = True) -> Iterator[None]:
        """Context manager around the backward from ``loss``. Collective over the group, unless in :meth:`no_sync`."""
        self._bind()
        with self._gradients_hidden(), self.reducer.backward(loss, overlap=overlap):
            self._bind()
            yield

    def reduce(self) -> None:
        """Reduce gradients that are not reduced yet. Collective over the group."""
        self.reducer.reduce()
        self._bind()

    @contextmanager
    def defer_reduction(self) -> Iterator[None]:
        """Context manager in which backward passes leave their gradients in ``.grad``, for a later :meth:`reduce`."""
        with self._gradients_hidden(), self.reducer.defer_reduction():
            yield

    def average_assigned(self, params: Iterable[nn.Parameter], weight: float) -> Assigned:
        """Average gradients that user code has assigned. Collective over the group if there are some."""
        return self.reducer.average_assigned(params, weight)

    def step_done(self) -> None:
        """Record that the optimizer has stepped."""
        self.reducer.step_done()

    def held_bytes(self) -> int:
        """Return the bytes of gradients on this rank, compression errors included."""
        return self.reducer.held_bytes() + (0 if self._error_feedback is None else self._error_feedback.held_bytes())

    # --- compressed parameters ----------------------------------------------------------------------------------

    def show_dequantized(self) -> None:
        """Set parameters to the decoded values that ranks receive, before a training step. Not collective."""
        for bucket in self._buckets:
            bucket.show_dequantized()

    def show_exact(self, *, for_a_look: bool = False) -> None:
        """Set parameters to their exact values until the next step. Collective over the group.

        Args:
            for_a_look: Whether to leave them alone if user code has assigned other values since the last step (averaged
                weights that are to be validated), which are otherwise taken as the parameters' own.
        """
        buckets = [bucket for bucket in self._buckets if bucket.shows_dequantized]
        if not buckets:
            return
        if for_a_look:
            changed = torch.tensor(float(any(bucket.is_changed() for bucket in buckets)), device=self._device)
            dist.all_reduce(changed, op=dist.ReduceOp.MAX, group=self.group)
            if changed.item():
                return
        for bucket in buckets:
            bucket.take_changes()
        for work in [bucket.gather_exact() for bucket in buckets]:
            work.wait()

    def drop_error_feedback(self) -> None:
        """Drop compression errors when a checkpoint is saved, which does not contain them. Not collective."""
        if self._error_feedback is not None:
            self._error_feedback.clear()

    def detach(self) -> None:
        """Remove every hook and give parameters memory of their own. Not collective.

        The optimizers keep their slices, so :meth:`optimizer_state` still works (for a checkpoint after training).
        """
        for undo in self._undo:
            undo()
        self._undo.clear()
        for bucket in self._buckets:
            bucket.release_memory()
        self.reducer.detach()

    # --- gradients ----------------------------------------------------------------------------------------------

    def grad_power(
        self, params: Iterable[nn.Parameter], norm_type: float = 2.0, counts: Counts | None = None
    ) -> Tensor:
        """Return the sum of powers of some parameters' gradients over all slices. Collective over the group."""
        params = list(params)
        for bucket in self._buckets_with(params):
            bucket.settle()
        grads = [grad for param in params if counts is None or counts(param) for grad in self._grads_of(param)]
        # This rank's slices may not contain the widest dtype.
        widest = functools.reduce(torch.promote_types, (param.dtype.to_real() for param in params), torch.float32)
        # A single rank has no buckets, and a total on the CPU would make it wait for its device.
        here = (param.device for param in params if not param.is_meta)
        device = self._device if self._buckets else next(here, self._device)
        total = sum_of_powers(grads, norm_type, device=device).to(widest)
        if self.group.size() > 1:
            op = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
            dist.all_reduce(total, op=op, group=self.group)
        return total

    def local_grads(self, params: Iterable[nn.Parameter]) -> list[Tensor]:
        """Return this rank's parts of some parameters' gradients. Not collective."""
        params = list(params)
        for bucket in self._buckets_with(params):
            bucket.settle()
            bucket.forget_gathered()
        return [grad for param in params for grad in self._grads_of(param)]

    def zero_grad(self) -> None:
        """Drop reduced gradients after the module's own ``zero_grad``, which was called just before."""
        for bucket in self._buckets:
            bucket.drop_zeroed()

    def _grads_of(self, param: nn.Parameter) -> list[Tensor]:
        return [local_shard(shard.grad) for shard in self._shards_of(param) if shard.grad is not None]

    # --- optimizer state ----------------------------------------------------------------------------------------

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state dict that this optimizer would have in a single process. Collective over the group.

        Returns:
            On the group's first rank, with whole tensors in host memory; without state on the others.
        """
        if (updates := updates_of(optimizer)) is not None:
            return updates.state_dict()
        if optimizer not in self._sliced:
            return optimizer.state_dict()
        originals = [list(group["params"]) for group in optimizer.param_groups]
        with self.slices(optimizer):
            state = gather_optimizer_state(optimizer, originals, self._pieces, self._buckets, group=self.group)
            if host_step := self._host_steps.get(optimizer):
                for shard in [key for key in optimizer.state if isinstance(key, Tensor)]:
                    host_step.evict(shard)
        return state

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load this rank's part of a single-process state dict. Not collective.

        Raises:
            ValueError: If the state's parameter groups do not fit the optimizer's.
        """
        if (updates := updates_of(optimizer)) is not None:
            updates.load_state_dict(state)
            return
        if optimizer not in self._sliced:
            optimizer.load_state_dict(state)
            return
        originals = [list(group["params"]) for group in optimizer.param_groups]
        with self.slices(optimizer):
            optimizer.load_state_dict(slice_optimizer_state(optimizer, originals, self._pieces, state))
            if host_step := self._host_steps.get(optimizer):
                for shard in [key for key in optimizer.state if isinstance(key, Tensor)]:
                    host_step.settle(shard)

    # --- offload ------------------------------------------------------------------------------------------------

    def _make_host(self, own: Tensor) -> HostSlice:
        if self._copies is None:
            self._copies = HostCopies(own.device)
        return HostSlice(own, copies=self._copies, store=self._store, window_bytes=self._window_bytes)

    @property
    def _window_bytes(self) -> int:
        return 0 if self._offload is None else int(self._offload.window_mb * 2**20)

    def _make_host_step(self, optimizer: Optimizer) -> HostStep:
        # Windows bound the resident state; on a device they also let copies back start before the last update.
        in_windows = self._store is not None or self._device.type != "cpu"
        with self.slices(optimizer):
            return HostStep(
                optimizer,
                store=self._store,
                window_bytes=self._window_bytes if in_windows else None,
                on_stepped=self._note_stepped,
            )

    def _note_stepped(self, shards: Sequence[nn.Parameter]) -> None:
        for bucket in {id(b): b for b in (self._bucket_of.get(shard) for shard in shards) if b is not None}.values():
            bucket.note_stepped(shards)

    def slots(self, optimizer: Optimizer) -> Slots:
        """Return slots of slices, marked as absent on other ranks, and whole slots of parameters without a bucket."""
        if (updates := updates_of(optimizer)) is not None:
            return updates.slots()
        if optimizer not in self._sliced:
            return full_slots(optimizer)
        return [[self._slot(param) for param in group["params"]] for group in optimizer.param_groups]

    def settle(self, optimizer: Optimizer) -> None:
        """Move state to the host if steps run there. Not collective."""
        if host_step := self._host_steps.get(optimizer):
            with self.slices(optimizer):
                for shard in [key for key in optimizer.state if isinstance(key, Tensor)]:
                    host_step.settle(shard)

    def _slot(self, param: nn.Parameter) -> TensorSlot:
        pieces = self._pieces.get(param)
        if pieces is None:
            return TensorSlot(param)
        if not pieces:
            return TensorSlot(param, here=False)
        return TensorSlot(param, (pieces[0].start, pieces[0].stop, pieces[0].shard))

    # --- slices -------------------------------------------------------------------------------------------------

    @contextmanager
    def slices(self, optimizer: Optimizer) -> Iterator[None]:
        """Context manager in which an optimizer's groups and state hold this rank's slices. Not collective."""
        if optimizer in self._showing:
            yield
            return
        originals = [group["params"] for group in optimizer.param_groups]
        outside = optimizer.state
        shard_of = {param: shards[0] for param in _params(optimizer) if (shards := self._shards_of(param))}
        for group, params in zip(optimizer.param_groups, originals, strict=True):
            group["params"] = [shard_of[param] for param in params if param in shard_of]
        state: defaultdict[Any, Any] = defaultdict(dict, shared_state(optimizer))
        state.update({shard: self._entry_of(p, outside[p]) for p, shard in shard_of.items() if p in outside})
        optimizer.state = state
        self._showing.add(optimizer)
        try:
            yield
        finally:
            self._showing.discard(optimizer)
            for group, params in zip(optimizer.param_groups, originals, strict=True):
                group["params"] = params
            outside.clear()
            outside.update(shared_state(optimizer))
            outside.update({p: optimizer.state[shard] for p, shard in shard_of.items() if shard in optimizer.state})
            optimizer.state = outside

    def _entry_of(self, param: nn.Parameter, entry: dict[str, Any]) -> dict[str, Any]:
        pieces = self._pieces.get(param)
        return slice_entry(entry, param, pieces[0]) if pieces else entry

    def _on_slices(self, optimizer: Optimizer, setting: ScopeSetting) -> bool:
        if not has_parameters(optimizer):
            return True
        return find_scope(optimizer, form="flat", setting=setting).scope == "elementwise"

    def _held(self, param: nn.Parameter) -> HeldTensor:
        """Return how a parameter is held: gradients and new values in slices, values whole unless masters differ."""
        slot = self._slot(param)
        bucket = self._home.get(param)
        has_masters = bucket is not None and bucket.has_masters
        return HeldTensor(slot, slot if has_masters else TensorSlot(param), slot)

    def _held_by_rank(self, param: nn.Parameter) -> Mapping[int, int]:
        """Return the number of a gradient's elements per rank; empty without a bucket, or with one of fewer ranks."""
        bucket = self._home.get(param)
        return {} if bucket is None or bucket.group is not self.group else bucket.elements_by_rank(param)

    def _step_on_full_tensors(
        self, optimizer: Optimizer, setting: ScopeSetting, group: Callable[[Scope], dist.ProcessGroup]
    ) -> None:
        """Make an optimizer that is not elementwise step on whole tensors. Collective over the world."""
        found = find_scope(optimizer, form="flat", setting=setting)
        device = next((local_shard(param).device for param in _params(optimizer) if not param.is_meta), self._device)
        hosted = HostedState.of(self._offload, device, self._store)
        if found.scope == "per_tensor":
            updaters = group(found.scope)
            OwnerUpdates(
                optimizer,
                group=updaters,
                held=self._held,
                held_by_rank=self._held_by_rank if _same_ranks(updaters, self.group) else None,
                found=found,
                device=None if self._offload is None else device,
                hosted=hosted,
            )
            return
        if self._gather is not None:
            raise ValueError(
                f"{type(optimizer).__name__} {found.describe()}, but with gather={self._gather!r} each rank has exact"
                " values of its own slice only. Leave gather out, or use an optimizer that steps on parts."
            )
        in_parts = any(local_shard(param) is not param or param.is_meta for param in _params(optimizer))
        if in_parts or hosted is not None:
            step_on_full_tensors(
                optimizer,
                found,
                group=group(found.scope),
                held=lambda param: HeldTensor(self._slot(param), TensorSlot(param), TensorSlot(param)),
                device=None if self._offload is None else device,
                hosted=hosted,
                before_step=lambda: self._settle(optimizer),
            )

    def _settle(self, optimizer: Optimizer) -> None:
        for bucket in self._buckets_with(_params(optimizer)):
            bucket.settle()

    def _wrap(self, optimizer: Optimizer, before: Mapping[str, Any]) -> Callable[[], None]:
        """Make ``step`` update slices and gather parameters, ``zero_grad`` clear slices; return an undo function."""
        inner_step, inner_zero_grad = optimizer.step, optimizer.zero_grad
        update: Callable[..., Any] = inner_step
        updates = updates_of(optimizer)
        if self._offload is not None and optimizer in self._sliced:
            self._host_steps[optimizer] = self._make_host_step(optimizer)
            update = self._host_steps[optimizer].run

        @functools.wraps(inner_step)
        def step(self_: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
            result = None
            if closure is not None:
                with torch.enable_grad():
                    result = closure()
            buckets = self._buckets_with(_params(optimizer))
            for bucket in buckets:
                bucket.settle()
                bucket.take_changes()
            if isinstance(updates, OwnerUpdates):
                updates.step(**kwargs)
            else:
                with self.slices(optimizer):
                    update(**kwargs)
            publish()
            return result

        @contextmanager
        def on_slices() -> Iterator[None]:
            for bucket in self._buckets_with(_params(optimizer)):
                bucket.take_changes()
            with self.slices(optimizer):
                yield

        def publish() -> None:
            for work in [bucket.gather() for bucket in self._buckets_with(_params(optimizer))]:
                work.wait()

        @functools.wraps(inner_zero_grad)
        def zero_grad(set_to_none: bool = True) -> None:
            inner_zero_grad(set_to_none=set_to_none)
            members = set(_params(optimizer))
            for bucket in self._buckets_with(members):
                bucket.drop_zeroed(members)

        if optimizer in self._sliced or isinstance(updates, OwnerUpdates):
            # A bound method, as schedulers read its function.
            optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
        optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
        if optimizer in self._sliced:
            wrap_switches(optimizer, on_slices, after=publish)

        def undo() -> None:
            for name, own in before.items():
                if own is not None:
                    setattr(optimizer, name, own)
                else:
                    optimizer.__dict__.pop(name, None)

        return undo

    def _buckets_with(self, params: Iterable[nn.Parameter]) -> list[ShardedBucket]:
        wanted = set(params)
        return [bucket for bucket in self._buckets if not wanted.isdisjoint(bucket.params)]

    @contextmanager
    def _gradients_hidden(self) -> Iterator[None]:
        """Context manager around backward passes: ``.grad`` is autograd's inside, and shows reduced gradients after."""
        for bucket in self._buckets:
            bucket.hide()
        try:
            yield
        finally:
            for bucket in self._buckets:
                bucket.show()

    @property
    def _device(self) -> torch.device:
        return self._buckets[0].device if self._buckets else torch.device("cpu")

    def _bind(self) -> None:
        """Register buckets that were created later (for unfrozen layers)."""
        if len(self._buckets) == len(self.reducer.buckets):
            return
        self._buckets = [bucket for bucket in self.reducer.buckets if isinstance(bucket, ShardedBucket)]
        self._pieces = {param: [] for bucket in self._buckets for param in bucket.params}
        self._home = {param: bucket for bucket in self._buckets for param in bucket.params}
        self._bucket_of = {piece.shard: bucket for bucket in self._buckets for piece in bucket.pieces}
        for bucket in self._buckets:
            for piece in bucket.pieces:
                self._pieces[piece.param].append(piece)

    def _shards_of(self, param: nn.Parameter) -> list[nn.Parameter]:
        """Return this rank's part of a parameter, if there is one."""
        pieces = self._pieces.get(param)
        # Frozen parameters are in no bucket yet, and are returned themselves.
        return [param] if pieces is None else [piece.shard for piece in pieces]


def _params(optimizer: Optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _same_ranks(group: dist.ProcessGroup, other: dist.ProcessGroup) -> bool:
    """Return whether two groups have the same ranks in the same order."""
    return group is other or dist.get_process_group_ranks(group) == dist.get_process_group_ranks(other)


@contextmanager
def _null_context() -> Iterator[None]:
    yield
