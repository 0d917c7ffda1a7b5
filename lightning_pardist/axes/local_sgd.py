"""Outer axis of local SGD and DiLoCo: islands train independently and synchronize every few steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, get_args

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pardist.axes.base import ParallelAxis
from lightning_pardist.axes.refusals import refuse_callbacks
from lightning_pardist.checkpoint.chunks import Shards
from lightning_pardist.checkpoint.tensors import copy_from_full, shards_like
from lightning_pardist.engines.common.block_quantization import Compression
from lightning_pardist.engines.ddp.buffers import average_tensors, tensors_without_optimizer
from lightning_pardist.engines.outer_fragments import OuterFragment, fragments_of
from lightning_pardist.engines.outer_optimizer import OuterOptimizer
from lightning_pardist.mesh import Degree, ParallelDims
from lightning_pardist.settings import one_of, positive

OuterSize = int | Literal["auto", "node"]
SyncEvery = int | Literal["epoch"]


class LocalSGDAxis(ParallelAxis):
    """Averages parameters and floating-point buffers over islands (local SGD, arXiv 1805.09767).

    Between two synchronizations no gradients are communicated between islands. With ``outer_lr`` or
    ``outer_momentum`` the parameters are not set to the mean: their change since the last synchronization, averaged
    over islands, is the gradient of an outer optimizer (DiLoCo, arXiv 2311.08105). Before ``start_local_step``,
    gradients are averaged over islands in every step (post-local SGD, arXiv 1808.07217).

    Islands also synchronize before validation and checkpoints and at the end of training, so that all islands continue
    from the parameters that are evaluated and saved. A checkpoint keeps every island's optimizers and the momentum of
    the outer optimizer.

    The arguments are those of :class:`~lightning_pardist.LocalSGDStrategy`.

    Raises:
        ValueError: If a setting is out of range; during a run, if a callback averages weights itself.
    """

    name = "outer"
    mesh_axes = ("outer_parallel",)
    # After all axes that act within an island.
    order = 60
    diverges = True

    def __init__(
        self,
        *,
        outer_parallel_size: OuterSize = "auto",
        sync_every: SyncEvery = 32,
        start_local_step: int = 0,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        sync_before_validation: bool = True,
        outer_compression: Compression | None = None,
        fragments: int = 1,
        fragment_sync_delay: int = 0,
        fragment_mixing: float = 0.0,
    ) -> None:
        if isinstance(outer_parallel_size, str):
            one_of("outer_parallel_size", outer_parallel_size, ("auto", "node"), or_else="a number of islands")
        if isinstance(sync_every, str):
            one_of("sync_every", sync_every, ("epoch",), or_else="a number of optimizer steps")
        else:
            sync_every = int(positive("sync_every", sync_every, "Set the optimizer steps between two averages."))
        if start_local_step < 0:
            raise ValueError(f"start_local_step={start_local_step} is negative. Use 0 for local steps from the start.")
        if not 0 <= outer_momentum < 1:
            raise ValueError(f"outer_momentum={outer_momentum} is not in [0, 1). DiLoCo uses 0.9, plain averaging 0.")
        if outer_compression is not None:
            one_of("outer_compression", outer_compression, get_args(Compression), or_else="None")
        _check_fragments(sync_every, fragments, fragment_sync_delay, fragment_mixing)
        self.outer_parallel_size = outer_parallel_size
        self.sync_every: SyncEvery = sync_every
        self.start_local_step = start_local_step
        self.outer_lr = positive("outer_lr", outer_lr, "DiLoCo uses 0.7, plain averaging 1.")
        self.outer_momentum = outer_momentum
        self.sync_before_validation = sync_before_validation
        self.outer_compression: Compression | None = outer_compression
        self.fragments, self.fragment_sync_delay, self.fragment_mixing = fragments, fragment_sync_delay, fragment_mixing
        self._streams = outer_compression is not None or fragments > 1 or fragment_sync_delay > 0
        self._fragments: dict[Optimizer, list[OuterFragment]] = {}
        self._steps: dict[Optimizer, int] = {}
        self._outer: OuterOptimizer | None = None
        self._trainer: pl.Trainer | None = None
        self._was_synchronous = False
        self._names: dict[nn.Parameter, str] = {}

    @override
    def degrees(self, num_nodes: int, ranks_per_node: int) -> dict[str, Degree]:
        size = self.outer_parallel_size
        if size == "node" or (size == "auto" and num_nodes > 1):
            size = num_nodes
        return {"outer_parallel": size}

    @override
    def check(self, trainer: pl.Trainer) -> None:
        refuse_callbacks(
            trainer,
            (StochasticWeightAveraging, WeightAveraging),
            "averages the weights of each island separately, and these averages would never be combined. Remove the"
            f" callback, or use {self.context.name}(outer_parallel_size=1).",
        )

    @override
    def ready(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._trainer = trainer
        self._steps = {}
        self._outer = None
        if self.outer_momentum or self.outer_lr != 1 or self._streams:
            held = [param for param in module.parameters() if param.requires_grad and _is_averaged(param)]
            self._outer = OuterOptimizer(held, lr=self.outer_lr, momentum=self.outer_momentum)
            # A checkpoint may be saved after the run, when the module's parameters have been replaced.
            self._names = {param: name for name, param in module.named_parameters()}

    @override
    def start_training(self) -> None:
        self._steps = {}
        self._was_synchronous = self._is_synchronous
        if self._outer is not None:
            self._outer.start()
        self._fragments = {one: self._make_fragments(one) for one in self.context.optimizers if self._streams}

    def _make_fragments(self, optimizer: Optimizer) -> list[OuterFragment]:
        outer = self._outer
        if outer is None:
            return []
        params = [value for value in self._values_of(optimizer) if isinstance(value, nn.Parameter) and outer.has(value)]
        return [
            OuterFragment(run, outer, group=self.group, kind=self.outer_compression, mixing=self.fragment_mixing)
            for run in fragments_of(params, self.fragments)
        ]

    # --- steps --------------------------------------------------------------------------------------------------

    @property
    def group(self) -> dist.ProcessGroup:
        """Process group of this rank and its counterparts on the other islands."""
        return self.context.mesh["outer_parallel"].get_group()

    @property
    def _is_synchronous(self) -> bool:
        """Whether islands still average gradients in every step, before ``start_local_step``."""
        trainer = self._trainer
        if trainer is None or not self.start_local_step:
            return False
        # Lightning counts the steps of all optimizers, and keeps the count in checkpoints.
        return trainer.global_step // max(1, len(self.context.optimizers)) < self.start_local_step

    @property
    @override
    def loss_group(self) -> dist.ProcessGroup | None:
        return self.context.batch_group if self._is_synchronous else None

    @override
    def gradients_reduced(self) -> None:
        if self._is_synchronous:
            self._average_gradients()
        elif self._was_synchronous:
            self._was_synchronous = False
            if self._outer is not None:
                self._outer.start()

    @override
    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """Average an optimizer's parameters over islands if its synchronization is due.

        With the first optimizer's parameters, tensors that no optimizer updates are averaged too. Collective over the
        outer axis, every :attr:`sync_every` steps of the optimizer.
        """
        if self._is_synchronous:
            return
        self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        for fragment in self._fragments.get(optimizer, []):
            fragment.trained = True
        if self._streams and isinstance(self.sync_every, int):
            self._stream(optimizer, self.sync_every)
            return
        if self._trainer is not None and self.sync_every == "epoch":
            meets = self._trainer.is_last_batch
        else:
            meets = isinstance(self.sync_every, int) and self._steps[optimizer] >= self.sync_every
        if meets and self._streams:
            self._send_all(optimizer)
        elif meets:
            self._meet(optimizer)

    @override
    def synchronize(self, *, evaluation: bool = False) -> None:
        if evaluation and not self.sync_before_validation:
            return
        for optimizer in [one for one in self.context.optimizers if self._steps.get(one)]:
            self._meet(optimizer)

    def _stream(self, optimizer: Optimizer, every: int) -> None:
        """Start, advance and finish the fragments whose turn it is (Streaming DiLoCo, arXiv 2501.18512).

        Each fragment's synchronization starts every ``every`` steps, evenly spread over fragments, and is applied
        :attr:`fragment_sync_delay` steps later.
        """
        step, fragments, delay = self._steps[optimizer], self._fragments[optimizer], self.fragment_sync_delay
        first = True
        for index, fragment in enumerate(fragments):
            begins = (index + 1) * every // len(fragments)
            age = (step - begins) % every
            starts = age == 0 and step >= begins
            if not starts and not (fragment.in_flight and age in (delay // 2, delay)):
                continue
            if first:
                self.context.before_collective()
                first = False
            if starts:
                if index == 0:
                    self._average_remaining(optimizer)
                fragment.start()
            if age == delay // 2:
                fragment.turn()
            if age == delay:
                fragment.finish()

    @torch.no_grad()
    def _send_all(self, optimizer: Optimizer) -> None:
        """Synchronize every fragment and wait for it. Collective over the outer axis.

        The remaining compression error is synchronized later, in full precision, for example before a checkpoint.
        """
        self.context.before_collective()
        self._average_remaining(optimizer)
        for fragment in self._fragments[optimizer]:
            fragment.start()
            fragment.finish()

    @torch.no_grad()
    def _average_remaining(self, optimizer: Optimizer) -> None:
        """Average buffers, and parameters that the outer optimizer does not step. Collective over the outer axis."""
        outer = self._outer
        average_tensors(
            [value for value in self._values_of(optimizer) if outer is None or not outer.has(value)], group=self.group
        )

    @torch.no_grad()
    def _meet(self, optimizer: Optimizer) -> None:
        self._steps[optimizer] = 0
        self.context.before_collective()
        if self._streams:
            self._average_remaining(optimizer)
            for fragment in self._fragments[optimizer]:
                fragment.meet_exactly()
            return
        values = list(self._values_of(optimizer))
        average_tensors(values, group=self.group)
        if self._outer is not None:
            self._outer.step(value for value in values if isinstance(value, nn.Parameter))

    def _values_of(self, optimizer: Optimizer) -> Iterator[Tensor]:
        """Yield this rank's tensors of an optimizer; for the first optimizer, also those that no optimizer updates."""
        module, optimizers = self.context.module, self.context.optimizers
        if module is None:
            return
        others = {param for other in optimizers if other is not optimizer for param in _params(other)}
        mine = set(_params(optimizer))
        if optimizer is optimizers[0]:
            mine -= others
            yield from tensors_without_optimizer(module, optimizers)
        yield from (param for param in module.parameters() if param in mine and _is_averaged(param))

    @torch.no_grad()
    def _average_gradients(self) -> None:
        """Average gradients over islands. Collective over the outer axis.

        Raises:
            RuntimeError: If a parameter has a gradient on another island but not on this one, and no zero gradient can
                be set.
        """
        engine, module = self.context.data_engine, self.context.module
        if engine is None or module is None:
            return
        params = [(name, param) for name, param in module.named_parameters() if param.requires_grad]
        if not params:
            return
        self.context.before_collective()
        found = torch.tensor([float(bool(engine.local_grads([param]))) for _, param in params])
        anywhere = found.to(self.context.device)
        dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=self.group)
        grads: list[Tensor] = []
        for (name, param), here, needed in zip(params, found.tolist(), anywhere.tolist(), strict=True):
            if not needed:
                continue
            if not here and param.grad is None:
                param.grad = torch.zeros_like(param)
            parts = engine.local_grads([param])
            if not parts:
                raise RuntimeError(
                    f"{name} has a gradient on another island and none on this one, and islands average gradients up"
                    f" to step {self.start_local_step}. Use every parameter in each step, or start_local_step=0."
                )
            grads += parts
        average_tensors(grads, group=self.group)

    # --- checkpoints --------------------------------------------------------------------------------------------

    @override
    def shards(self) -> dict[str, Shards]:
        return {f"momentum.{name}": shards_like(param, momentum) for name, param, momentum in self._momenta()}

    @override
    def load_shards(self, saved: Callable[[str], Tensor | None]) -> None:
        for name, param, momentum in self._momenta():
            whole = saved(f"momentum.{name}")
            if whole is not None:
                copy_from_full(whole, shards_like(param, momentum))

    def _momenta(self) -> list[tuple[str, nn.Parameter, Tensor]]:
        """Return name, parameter and this rank's momentum of each parameter that has an outer momentum."""
        if self._outer is None or not self.outer_momentum:
            return []
        return [(self._names[param], param, momentum) for param, momentum in self._outer.momenta().items()]

    # --- description and teardown -------------------------------------------------------------------------------

    @override
    def describe(self) -> str:
        every = "epoch" if self.sync_every == "epoch" else f"{self.sync_every} optimizer steps"
        kind = "DiLoCo" if self.outer_momentum or self.outer_lr != 1 else "Local SGD"
        text = (
            f"{kind}: {self.context.dims.outer_parallel} islands of {_ranks(self.context.dims)}, parameters averaged"
            f" every {every}, and before {'validation and ' if self.sync_before_validation else ''}checkpoints"
        )
        if kind == "DiLoCo":
            text += f"; outer SGD with lr {self.outer_lr:g}, Nesterov momentum {self.outer_momentum:g}"
        if self.outer_compression is not None:
            text += f"; differences sent as {self.outer_compression}"
        if self.fragments > 1 or self.fragment_sync_delay:
            text += (
                f"; {self.fragments} fragments in turns, each averaged with a delay of {self.fragment_sync_delay}"
                f" steps, keeping {self.fragment_mixing:g} of an island's own weights"
            )
        if self.start_local_step:
            text += f"; gradients averaged in every step before step {self.start_local_step}"
        return text

    @override
    def teardown(self) -> None:
        self._steps, self._fragments = {}, {}
        self._trainer = None


def _check_fragments(sync_every: SyncEvery, fragments: int, delay: int, mixing: float) -> None:
    """Refuse incompatible settings of fragments.

    Raises:
        ValueError: If settings are out of range or incompatible; names them and the valid choices.
    """
    for name, value in (("fragments", fragments), ("fragment_sync_delay", delay)):
        if not isinstance(value, int):
            raise ValueError(f"{name}={value!r} is not a whole number. Use one.")
    if fragments < 1 or delay < 0 or not 0 <= mixing < 1:
        raise ValueError(
            f"fragments={fragments}, fragment_sync_delay={delay}, fragment_mixing={mixing}: use 1 fragment or more, a"
            " delay of 0 steps or more, and a share in [0, 1)."
        )
    if isinstance(sync_every, int) and (fragments > sync_every or delay >= sync_every):
        raise ValueError(
            f"sync_every={sync_every} steps are too few for fragments={fragments} with fragment_sync_delay={delay}."
            " Use at most sync_every fragments, and a delay below sync_every."
        )
    if sync_every == "epoch" and (fragments > 1 or delay):
        raise ValueError("Fragments are averaged in turns, every few steps. Set sync_every to a number of steps.")
    if mixing and not delay:
        raise ValueError(
            f"fragment_mixing={mixing} keeps a share of what an island learned while a fragment was being averaged,"
            " and fragment_sync_delay=0 leaves no such time. Set a delay, or leave fragment_mixing out."
        )


def _params(optimizer: Optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _is_averaged(tensor: Tensor) -> bool:
    return not tensor.is_meta and (tensor.is_floating_point() or tensor.is_complex())


def _ranks(dims: ParallelDims) -> str:
    size = dims.world_size // dims.outer_parallel
    return f"{size} ranks" if size > 1 else "1 rank"
