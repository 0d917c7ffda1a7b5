"""ZeRO-1 and ZeRO-2: the optimizer updates one slice on each rank; parameters stay ordinary, whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_pardist.engines.data_parallel.reducer import GradientReducer
from lightning_pardist.engines.gradients import clamp_, scale_, sum_of_squares
from lightning_pardist.engines.zero.bucket import Piece, ShardedBucket
from lightning_pardist.engines.zero.elementwise import require_elementwise
from lightning_pardist.engines.zero.state import gather_optimizer_state, slice_optimizer_state
from lightning_pardist.engines.zero.transport import ReduceScatter


@dataclass
class _Binding:
    """An optimizer and the parameters that the user gave it, group by group."""

    optimizer: Optimizer
    originals: list[list[nn.Parameter]]


class ZeroEngine:
    """Gradients reduced to the rank that owns a slice, the slice updated there, parameters gathered after the step.

    Sends ``2 Psi (N-1)/N`` per rank and step, as data parallelism does: half of it gradients, half parameters. Holds
    ``2 Psi + 2 Psi/N`` (stage 1) or ``Psi + 3 Psi/N`` (stage 2) in fp32 with Adam. Stage 1 sends gradients once an
    optimizer step; stage 2 sends them with every backward, because it keeps only slices of them.

    The optimizers' parameter groups are rewritten: in place of each parameter stand the parts of it in this rank's
    slice, flat. On one rank nothing is changed.

    Args:
        module: Its parameters become views of flat buffers; values must agree over the group.
        optimizers: Elementwise torch optimizers over parameters of ``module``, before their first step.
        group: The data axis' process group.
        zero_stage: 1 or 2.
        bucket_size_mb: Size of a bucket.
        overlap: Whether gradients are sent while backward runs.

    Raises:
        ValueError: If an optimizer needs whole parameters, or the stage is neither 1 nor 2.
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
    ) -> None:
        if zero_stage not in (1, 2):
            raise ValueError(f"zero_stage={zero_stage} is not served by ZeroEngine. Use 1 or 2.")
        self.group = group
        self.zero_stage = zero_stage
        self._bindings = [_Binding(opt, [list(g["params"]) for g in opt.param_groups]) for opt in optimizers]
        self._pieces: dict[nn.Parameter, list[Piece]] = {}
        self._handles: list[RemovableHandle] = []
        self._buckets: list[ShardedBucket] = []
        lanes = {
            param: index
            for index, binding in enumerate(self._bindings)
            for params in binding.originals
            for param in params
        }
        if group.size() > 1:
            for optimizer in optimizers:
                require_elementwise(optimizer)
        self.reducer = GradientReducer(
            module,
            transport=ReduceScatter(group, keep_full=zero_stage == 1),
            lanes=lanes,
            bucket_size_mb=bucket_size_mb,
            first_bucket_size_mb=min(1.0, bucket_size_mb),
            overlap=overlap,
            reorder=False,
        )
        self._bind()
        for index, optimizer in enumerate(optimizers):
            hook = partial(self._after_step, index)
            self._handles.append(optimizer.register_step_post_hook(hook))

    # --- DataEngine ---------------------------------------------------------------------------------------------

    @property
    def is_reduced(self) -> bool:
        """Whether gradients were reduced since the last step."""
        return self.reducer.is_reduced

    def no_sync(self) -> AbstractContextManager[None]:
        """Gradients accumulate inside: whole and unsent in stage 1, sliced and sent in stage 2."""
        return self.reducer.no_sync() if self.zero_stage == 1 else _nothing()

    @contextmanager
    def backward(self, loss: Tensor, *, overlap: bool = True) -> Iterator[None]:
        """Around the call that runs backward from ``loss``. Collective over the group, unless under :meth:`no_sync`."""
        self._bind()
        with self.reducer.backward(loss, overlap=overlap):
            self._bind()
            yield

    def reduce(self) -> None:
        """Reduce what is not reduced yet. Collective over the group."""
        self.reducer.reduce()

    def hands_off(self) -> AbstractContextManager[None]:
        """Backward passes inside leave their gradients in ``.grad``; :meth:`reduce` takes them up."""
        return self.reducer.hands_off()

    def step_done(self) -> None:
        """The optimizer has stepped."""
        self.reducer.step_done()

    def held_bytes(self) -> int:
        """Bytes of gradients on this rank."""
        return self.reducer.held_bytes()

    def detach(self) -> None:
        """Remove every hook and give parameters memory of their own. Not collective.

        The optimizers keep their slices, so that :meth:`optimizer_state` still answers (a checkpoint after training).
        """
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for bucket in self._buckets:
            bucket.release_memory()
        self.reducer.detach()

    # --- gradients ----------------------------------------------------------------------------------------------

    def squared_grad_norm(self, optimizer: Optimizer, counts: Callable[[nn.Parameter], bool] | None = None) -> Tensor:
        """Sum of squares of all gradients of an optimizer's parameters. Collective over the group."""
        whole = {piece.shard: param for param, pieces in self._pieces.items() for piece in pieces}
        params = [param for group in optimizer.param_groups for param in group["params"]]
        total = sum_of_squares(
            [
                param.grad
                for param in params
                if param.grad is not None and (counts is None or counts(whole.get(param, param)))
            ],
            device=self._device,
        )
        if self.group.size() > 1:
            dist.all_reduce(total, group=self.group)
        return total

    def scale_grads(self, optimizer: Optimizer, factor: Tensor) -> None:
        """Multiply this rank's slices of an optimizer's gradients by a scalar. Not collective."""
        scale_(optimizer, factor)

    def clip_grad_value(self, optimizer: Optimizer, limit: float) -> None:
        """Clamp every element of this rank's slices to ``[-limit, limit]``. Not collective."""
        clamp_(optimizer, limit)

    def zero_grad(self) -> None:
        """Forget all gradients of the slices, as the module's own ``zero_grad`` does for whole ones."""
        for bucket in self._buckets:
            bucket.drop_gradients()

    # --- optimizer state ----------------------------------------------------------------------------------------

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state dict that this optimizer would have on one process. Collective over the group.

        Returns:
            On the group's first rank, with whole tensors in host memory; without state on the others.
        """
        if self.group.size() == 1:
            return optimizer.state_dict()
        return gather_optimizer_state(
            optimizer, self._binding(optimizer).originals, self._pieces, self._buckets, group=self.group
        )

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Take this rank's part of a state dict of one process. Not collective.

        Raises:
            ValueError: If the state's parameter groups do not fit the optimizer's.
        """
        if self.group.size() > 1:
            state = slice_optimizer_state(optimizer, self._binding(optimizer).originals, self._pieces, state)
        optimizer.load_state_dict(state)

    # --- binding ------------------------------------------------------------------------------------------------

    @property
    def _device(self) -> torch.device:
        return self._buckets[0].device if self._buckets else torch.device("cpu")

    def _binding(self, optimizer: Optimizer) -> _Binding:
        for binding in self._bindings:
            if binding.optimizer is optimizer:
                return binding
        raise ValueError(f"This {type(optimizer).__name__} is not one of the engine's optimizers.")

    def _bind(self) -> None:
        """Let parameter groups hold slices, also those of parameters and groups that came later (unfrozen layers)."""
        groups = sum(len(binding.optimizer.param_groups) for binding in self._bindings)
        known = sum(len(binding.originals) for binding in self._bindings)
        if len(self._buckets) == len(self.reducer.buckets) and groups == known:
            return
        self._buckets = [bucket for bucket in self.reducer.buckets if isinstance(bucket, ShardedBucket)]
        self._pieces = {param: [] for bucket in self._buckets for param in bucket.params}
        for bucket in self._buckets:
            for piece in bucket.pieces:
                self._pieces[piece.param].append(piece)
        for binding in self._bindings:
            for group in binding.optimizer.param_groups[len(binding.originals) :]:
                binding.originals.append(list(group["params"]))
            for group, originals in zip(binding.optimizer.param_groups, binding.originals, strict=True):
                group["params"] = [shard for param in originals for shard in self._shards_of(param)]

    def _shards_of(self, param: nn.Parameter) -> list[nn.Parameter]:
        pieces = self._pieces.get(param)
        # Frozen parameters are in no bucket yet, and stand for themselves.
        return [param] if pieces is None else [piece.shard for piece in pieces]

    def _after_step(self, lane: int, *unused: Any) -> None:
        members = {param for params in self._bindings[lane].originals for param in params}
        works = [bucket.gather(self.group) for bucket in self._buckets if bucket.params[0] in members]
        for work in works:
            if work is not None:
                work.wait()


@contextmanager
def _nothing() -> Iterator[None]:
    yield
