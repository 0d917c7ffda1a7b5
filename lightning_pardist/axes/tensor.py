"""Tensor-parallel axis: each layer's weights sharded over ranks that work on the same samples."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torchmetrics import Metric
from typing_extensions import override

from lightning_pardist.axes.base import ParallelAxis
from lightning_pardist.axes.module_copies import copies_of
from lightning_pardist.axes.pipeline.meta_stages import stand_ins
from lightning_pardist.axes.refusals import refuse_averages_in_shards, refuse_pruning
from lightning_pardist.collectives import world_group
from lightning_pardist.compat import pytree
from lightning_pardist.compat.lightning_functions import collect_rng_states, set_rng_states
from lightning_pardist.engines.common.meta_init import (
    InitFunction,
    on_meta,
    restore_random_state,
    share_random_state,
)
from lightning_pardist.engines.common.whole_updates import updates_of
from lightning_pardist.engines.ddp.buffers import broadcast_module
from lightning_pardist.engines.tensor import (
    TensorParallelPlan,
    TensorRuntime,
    apply_layout,
    attach,
    local_like,
    plan_layout,
    unsplit_module,
    whole_tensor,
)
from lightning_pardist.local_tensors import own_part
from lightning_pardist.mesh import Degree, degrees_of_machine
from lightning_pardist.settings import one_of
from lightning_pardist.trainer import trial_run
from lightning_pardist.trainer.sample_batches import NoSampleError, on_device

TensorParallelSize = int | Literal["auto", "node", "machine"]

#: Methods of a LightningModule that hand tensors to the Trainer, which knows plain ones only.
_ABSENT = object()
_REPORTS = ("log", "log_dict", "all_gather", "print")


class TensorAxis(ParallelAxis):
    """Shards layers over tensor ranks by a plan derived from one traced run of the user's step.

    The arguments are those of :class:`~lightning_pardist.TensorParallelStrategy`.

    Raises:
        ValueError: If a setting is out of range; during a run, if the plan by hand does not fit the module.
    """

    name = "tensor"
    mesh_axes = ("tensor_parallel",)
    order = 10
    splits_module = True
    creates_values = True

    def __init__(
        self,
        *,
        tensor_parallel_size: TensorParallelSize = "auto",
        plan: Mapping[str, Any] | None = None,
        on_indivisible: Literal["error", "replicate"] = "error",
        sequence_parallel: bool = False,
        sample: Any = None,
        init: InitFunction | None = None,
    ) -> None:
        if isinstance(tensor_parallel_size, str):
            one_of(
                "tensor_parallel_size", tensor_parallel_size, ("auto", "node", "machine"), or_else="a number of ranks"
            )
        elif tensor_parallel_size < 1:
            raise ValueError(f"tensor_parallel_size={tensor_parallel_size} is not positive. Use 1 or more, or 'auto'.")
        one_of("on_indivisible", on_indivisible, ("error", "replicate"))
        self.tensor_parallel_size = tensor_parallel_size
        self.overrides = dict(plan or {})
        self.on_indivisible: Literal["error", "replicate"] = on_indivisible
        self.sequence_parallel = sequence_parallel
        self.sample = sample
        self.init = init
        self.plan: TensorParallelPlan | None = None
        #: Until the run ends that has derived it.
        self._plan_is_new = False
        self._planned_for = ""
        self.runtime: TensorRuntime | None = None
        self._split: nn.Module | None = None
        self._copies: list[nn.Module] = []
        self._wrapped: list[tuple[nn.Module, str, Any]] = []

    @override
    def degrees(self, num_nodes: int, ranks_per_node: int) -> dict[str, Degree]:
        size = self.tensor_parallel_size
        if size == "machine":
            size = degrees_of_machine(num_nodes, ranks_per_node)["tensor_parallel"]
        return {"tensor_parallel": ranks_per_node if size == "node" else size}

    @override
    def check(self, trainer: pl.Trainer) -> None:
        name = self.context.name
        refuse_pruning(trainer)
        refuse_averages_in_shards(trainer, self.context)
        module = self.context.module
        if module is not None and on_meta(module) and self.context.dims.pipeline_parallel > 1:
            raise ValueError(
                f"{type(module).__name__} was built on the meta device, and {name} creates its values either stage by"
                " stage or layer by layer. Build it with values, or set pipeline_parallel_size=1."
            )
        if self.runtime is not None and not self.context.data_axis.broadcasts:
            # Left split by a run that failed on every rank: this one starts from whole parameters.
            self._become_whole()

    # --- the module ---------------------------------------------------------------------------------------------

    @override
    def materialize(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Values come when layers are split; what has some already is made equal, as for any module."""
        self._built_on_meta = self.runtime is None and on_meta(module)
        if self._built_on_meta:
            broadcast_module(module, group=world_group())

    @override
    def transform(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self.runtime is not None and self._split is module:
            return
        if not self._built_on_meta:
            module.to(self.context.device)
        mesh = self.context.mesh["tensor_parallel"]
        self._share_random_state(mesh.get_group())
        name = trial_run.step_name(trainer)
        if self.plan is None or not _fits(self.plan, module) or self._planned_for not in ("training_step", name):
            with stand_ins(module, self.context.device):
                found = self._find_plan(trainer, module)
            # Control flow may depend on data: all ranks follow the first one's.
            self.plan, self._planned_for, self._plan_is_new = self.context.broadcast(found), name, True
        # Ranks that see other samples start from the same values.
        own = share_random_state([world_group()] if self._built_on_meta else [])
        self.runtime, self._split = apply_layout(module, self.plan, mesh, init=self.init), module
        restore_random_state(own)
        self.runtime.wrap_calls(module)
        self._wrap_reports(module)
        for copied in copies_of(module, trainer.callbacks):  # type: ignore[attr-defined]
            apply_layout(copied.to(self.context.device), self.plan, mesh)
            self.runtime.wrap_calls(copied)
            self._copies.append(copied)

    def _find_plan(self, trainer: pl.Trainer, module: pl.LightningModule) -> TensorParallelPlan:
        name = trial_run.step_name(trainer)
        # What a loader's hook does to the module lasts: the Trainer does not call it again.
        batch, is_example = self._batch(trainer, name)
        with trial_run.without_trace(module, trainer), self.context.samples.rehearsed():
            if is_example or self.sample is not None:
                batch = on_device(trainer, batch)

            def step() -> Any:
                return _call(module, batch) if is_example else trial_run.run(module, name, batch, trainer)

            return self.find_plan(module, step, tp_size=self.context.dims.tensor_parallel)

    def _batch(self, trainer: pl.Trainer, name: str) -> tuple[Any, bool]:
        """What to run a step on, and whether it is the module's example input instead of a batch."""
        if self.sample is not None:
            return self.sample() if callable(self.sample) else self.sample, False
        try:
            return self.context.samples.first(), False
        except NoSampleError as problem:
            example = trainer.lightning_module.example_input_array
            if example is None:
                raise ValueError(
                    f"{self.context.name} runs {name} once before it starts, and has no batch for it: {problem}. Set"
                    f" {self.context.name}(sample=batch), or example_input_array in the module."
                ) from problem
            return example, True

    def find_plan(self, module: nn.Module, step: Callable[[], Any], *, tp_size: int) -> TensorParallelPlan:
        """Derive the plan from one run of ``step``. Not collective.

        Raises:
            ValueError: If a pattern of the plan by hand matches nothing or a size does not divide.
        """
        return plan_layout(
            module,
            step,
            tp_size=tp_size,
            overrides=self.overrides,
            on_indivisible=self.on_indivisible,
            sequence_parallel=self.sequence_parallel,
        )

    @override
    def after_optimizers(self, trainer: pl.Trainer, optimizers: Sequence[Optimizer]) -> None:
        if not self.context.data_axis.steps_on_parts:
            for optimizer in optimizers:
                attach(optimizer, scope=self.context.update_scope)

    # --- steps --------------------------------------------------------------------------------------------------

    @override
    def running(self) -> AbstractContextManager[None]:
        return nullcontext() if self.runtime is None else self.runtime.step()

    @override
    def run_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.runtime is None:
            return step(*args, **kwargs)
        self._agree(self.runtime, (args, kwargs))
        return self.plain(step(*args, **kwargs))

    @override
    def backward(self, run: Callable[[], None]) -> None:
        if self.runtime is None:
            run()
            return
        with self.runtime.step():
            run()

    @override
    def plain(self, tree: Any) -> Any:
        """The same without split tensors and parameters, for code outside of steps. Collective if there are any."""
        return tree if self.runtime is None else self.runtime.plain(tree)

    # --- one stream of samples and random numbers ---------------------------------------------------------------

    def _share_random_state(self, group: dist.ProcessGroup) -> None:
        """All tensor ranks draw the same numbers: samples, dropout of whole tensors. Collective over the group."""
        states = [collect_rng_states(include_cuda=torch.cuda.is_available())]
        dist.broadcast_object_list(states, group_src=0, group=group)
        set_rng_states(states[0])

    def _agree(self, runtime: TensorRuntime, batch: Any) -> None:
        """Refuse different samples on the ranks of one tensor group, and bring random streams together again.

        One small gather a step. Random streams drift where one rank does something that others do not (a picture drawn
        on the first rank, say), and with them dropout, which would be wrong in silence.
        """
        samples, random = runtime.meet("step", _fingerprint(batch), _random_fingerprint()).unbind(1)
        if (samples != samples[0]).any():
            raise RuntimeError(
                f"The ranks of one tensor group were given different batches, and {self.context.name} splits"
                " the work on one batch. Shuffle alike on all ranks (seed_everything), and shard samples by"
                " trainer.strategy.distributed_sampler_kwargs."
            )
        if (random != random[0]).any():
            self._share_random_state(runtime.group.process_group)

    # --- what leaves a step ------------------------------------------------------------------------------------

    def _wrap_reports(self, module: pl.LightningModule) -> None:
        """Values that steps log, and what metrics take, are plain tensors; metrics combine over the data axis."""
        for child in module.modules():
            if isinstance(child, pl.LightningModule):
                for name in _REPORTS:
                    self._wrap(child, name)
            elif isinstance(child, Metric):
                self._wrap(child, "update")
                if child.process_group is None:
                    self._replace(child, "process_group", self.context.batch_group)

    def _wrap(self, owner: nn.Module, name: str) -> None:
        original = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = self.plain((args, kwargs))
            return original(*args, **kwargs)

        self._replace(owner, name, wrapped)

    def _replace(self, owner: nn.Module, name: str, value: Any) -> None:
        self._wrapped.append((owner, name, owner.__dict__.get(name, _ABSENT)))
        owner.__dict__[name] = value

    def _unwrap(self) -> None:
        for owner, name, before in reversed(self._wrapped):
            if before is _ABSENT:
                owner.__dict__.pop(name, None)
            else:
                owner.__dict__[name] = before
        self._wrapped.clear()

    # --- the gradient norm --------------------------------------------------------------------------------------

    @override
    def counts(self, param: nn.Parameter) -> bool:
        if self.runtime is None or self.runtime.group.rank == 0:
            return True
        return isinstance(param, DTensor) and not param.placements[-1].is_replicate()

    @override
    def reduce_over_axis(self, value: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        if self.runtime is not None:
            dist.all_reduce(value, op=op, group=self.runtime.group.process_group)

    # --- checkpoints --------------------------------------------------------------------------------------------

    @override
    def local_module_state(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        if self.runtime is None or self._split is None:
            return state
        mine = self._split.state_dict()
        return {
            name: local_like(value, mine[name]) if isinstance(mine.get(name), DTensor) else value
            for name, value in state.items()
        }

    @override
    def local_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        params = _parameters(optimizer)
        if not params or updates_of(optimizer) is not None:
            return state
        saved = [number for group in state["param_groups"] for number in group["params"]]
        local = {
            number: {key: _local_value(value, params[position]) for key, value in state["state"][number].items()}
            for position, number in enumerate(saved)
            if number in state["state"] and position < len(params)
        }
        return {**state, "state": local}

    @override
    def whole_values(self, tree: Any) -> Any:
        if self.runtime is None or not any(isinstance(leaf, DTensor) for leaf in pytree.tree_leaves(tree)):
            return tree
        return pytree.tree_map_only(DTensor, whole_tensor, tree)

    # --- for people, and the end --------------------------------------------------------------------------------

    @override
    def describe(self) -> str:
        if self.plan is None:
            return ""
        return str(self.plan) if self._plan_is_new else self.plan.headline()

    @override
    def teardown(self) -> None:
        self._plan_is_new = False
        if self.runtime is None or self._split is None or not self.ended_well():
            return
        if any(isinstance(param, DTensor) and param.device_mesh.ndim > 1 for param in self._split.parameters()):
            # The data axis keeps its shards, being too large to be whole.
            return
        self._become_whole()

    def _become_whole(self) -> None:
        self._unwrap()
        if self.runtime is not None and self._split is not None:
            self.runtime.uncover()
            for module in (self._split, *self._copies):
                unsplit_module(module)
            self._copies.clear()
        self.runtime = self._split = None


def _fits(plan: TensorParallelPlan, module: nn.Module) -> bool:
    found = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    return found == {item.name: item.shape for item in plan.parameters}


def _call(module: nn.Module, example: Any) -> Any:
    if isinstance(example, dict):
        return module(**example)
    return module(*example) if isinstance(example, tuple) else module(example)


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    """The module's parameters in the order in which the optimizer numbers them."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def _local_value(value: Any, param: nn.Parameter) -> Any:
    if not isinstance(value, Tensor) or not isinstance(param, DTensor) or not value.dim():
        return value
    return own_part(local_like(value, param)) if value.shape == param.shape else value


def _fingerprint(tree: Any) -> int:
    """A number that differs between different batches, of a sample of their elements; shapes alone on an accelerator,
    where looking at elements would wait for it.
    """
    result = 0
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor):
            result = zlib.crc32(str(tuple(leaf.shape)).encode(), result)
            if leaf.device.type == "cpu" and leaf.layout == torch.strided and leaf.numel():
                flat = leaf.detach().reshape(-1)
                sample = flat[:: max(1, flat.numel() // 256)].contiguous()
                result = zlib.crc32(sample.view(torch.uint8).numpy().tobytes(), result)
        elif isinstance(leaf, (int, float, str)):
            result = zlib.crc32(repr(leaf).encode(), result)
    return result


def _random_fingerprint() -> int:
    result = zlib.crc32(torch.get_rng_state().numpy().tobytes())
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        result = zlib.crc32(torch.cuda.get_rng_state().numpy().tobytes(), result)
    return result
