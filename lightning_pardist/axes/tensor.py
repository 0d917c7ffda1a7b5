"""Tensor-parallel axis: layer weights sharded over ranks that work on the same samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import lightning.pytorch as pl
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pardist.axes.module_copies import copies_of
from lightning_pardist.axes.pipeline.meta_stages import meta_placeholders
from lightning_pardist.axes.refusals import refuse_averages_in_shards, refuse_pruning
from lightning_pardist.axes.shared_batch import SharedBatchAxis
from lightning_pardist.checkpoint.tensors import shared_entries
from lightning_pardist.collectives import world_group
from lightning_pardist.compat import pytree
from lightning_pardist.engines.common.full_tensor_updates import updates_of
from lightning_pardist.engines.common.meta_init import (
    InitFunction,
    on_meta,
    restore_random_state,
    share_random_state,
)
from lightning_pardist.engines.ddp.buffers import broadcast_module
from lightning_pardist.engines.tensor import (
    TensorParallelPlan,
    apply_layout,
    attach,
    local_like,
    plan_layout,
    to_full_tensor,
    unsplit_module,
)
from lightning_pardist.local_tensors import is_over, local_shard
from lightning_pardist.mesh import TENSOR_AXIS, Degree, degrees_of_machine
from lightning_pardist.settings import one_of
from lightning_pardist.trainer import trial_run
from lightning_pardist.trainer.sample_batches import NoSampleError, on_device

TensorParallelSize = int | Literal["auto", "node", "machine"]


class TensorAxis(SharedBatchAxis):
    """Shards layers over tensor ranks by a plan derived from one traced run of the user's step.

    The arguments are those of :class:`~lightning_pardist.TensorParallelStrategy`.

    Raises:
        ValueError: If a setting is out of range; during a run, if the user's plan does not fit the module.
    """

    name = "tensor"
    mesh_axes = ("tensor_parallel",)
    order = 10
    splits_module = True
    creates_values = True
    wraps_hooks = True
    kind = "tensor"

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
        super().__init__()
        self.tensor_parallel_size = tensor_parallel_size
        self.overrides = dict(plan or {})
        self.on_indivisible: Literal["error", "replicate"] = on_indivisible
        self.sequence_parallel = sequence_parallel
        self.sample = sample
        self.init = init
        self.plan: TensorParallelPlan | None = None
        #: Whether the current run has derived the plan.
        self._plan_is_new = False
        self._planned_for = ""
        self._split: nn.Module | None = None
        self._copies: list[nn.Module] = []

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
        if self.sequence_parallel and (context_size := self.context.dims.context_parallel) > 1:
            raise ValueError(
                f"sequence_parallel=True and context_parallel_size={context_size} both split the sequence. Leave"
                " sequence_parallel out: context ranks have parts of sequences everywhere."
            )
        if module is not None and on_meta(module) and self.context.dims.pipeline_parallel > 1:
            raise ValueError(
                f"{type(module).__name__} was built on the meta device, and {name} initializes a module either stage"
                " by stage or layer by layer, not both. Build it with values, or set pipeline_parallel_size=1."
            )
        if self.runtime is not None and not self.context.data_axis.broadcasts:
            # The module is still split after a run that failed on every rank: this run starts from full parameters.
            self._restore_full_module()

    # --- the module ---------------------------------------------------------------------------------------------

    @override
    def materialize(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Broadcast tensors that have values; those on ``meta`` are initialized when layers are split."""
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
            found = self._shared_plan(trainer, module, name)
            # Control flow may depend on data: all ranks use the first rank's plan.
            self.plan, self._planned_for, self._plan_is_new = self.context.broadcast(found), name, True
        # The same initial values on all data ranks.
        own = share_random_state([world_group()] if self._built_on_meta else [])
        plain = self.context.divided_parameters
        self.runtime, self._split = apply_layout(module, self.plan, mesh, init=self.init, plain=plain), module
        restore_random_state(own)
        self.runtime.wrap_calls(module)
        self._wrap_reports(module)
        for copied in copies_of(module, trainer.callbacks):  # type: ignore[attr-defined]
            apply_layout(copied.to(self.context.device), self.plan, mesh)
            self.runtime.wrap_calls(copied)
            self._copies.append(copied)

    def _shared_plan(self, trainer: pl.Trainer, module: pl.LightningModule, name: str) -> TensorParallelPlan:
        """Find the plan, once for all ranks and candidates of a planner that need the same one."""
        shared = self.context.found_once
        if shared is None or self.overrides or self.sample is not None:
            # Overrides may hold objects that cannot be compared.
            shared = {}
        context, dims = self.context, self.context.dims
        sizes = dims.tensor_parallel, dims.context_parallel, context.expert_ranks
        key = "tensor plan", name, sizes, self.sequence_parallel, tuple(context.divided_parameters)
        if key not in shared:
            with meta_placeholders(module, context.device):
                shared[key] = self._find_plan(trainer, module)
        found: TensorParallelPlan = shared[key]
        return found

    def _find_plan(self, trainer: pl.Trainer, module: pl.LightningModule) -> TensorParallelPlan:
        name = trial_run.step_name(trainer)
        # Outside of the trial: changes that a loader hook makes to the module stay, since it is not called again.
        batch, is_example = self._batch(trainer, name)
        with trial_run.without_side_effects(module, trainer), self.context.samples.in_trial_run():
            if is_example or self.sample is not None:
                batch = on_device(trainer, batch)

            def step() -> Any:
                return _call(module, batch) if is_example else trial_run.run(module, name, batch, trainer)

            plain = self.context.divided_parameters
            return self.find_plan(module, step, tp_size=self.context.dims.tensor_parallel, plain=plain)

    def _batch(self, trainer: pl.Trainer, name: str) -> tuple[Any, bool]:
        """Return the input of the traced step, and whether it is the module's example input instead of a batch."""
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

    def find_plan(
        self, module: nn.Module, step: Callable[[], Any], *, tp_size: int, plain: Sequence[str] = ()
    ) -> TensorParallelPlan:
        """Derive the plan from one run of ``step``. Not collective.

        Args:
            module: The full module.
            step: Runs the module's step.
            tp_size: Number of tensor ranks.
            plain: Names of parameters that another axis divides.

        Raises:
            ValueError: If a pattern of the user's plan matches nothing, or a size is not divisible.
        """
        return plan_layout(
            module,
            step,
            tp_size=tp_size,
            overrides=self.overrides,
            on_indivisible=self.on_indivisible,
            sequence_parallel=self.sequence_parallel,
            plain=plain,
        )

    @override
    def after_optimizers(self, trainer: pl.Trainer, optimizers: Sequence[Optimizer]) -> None:
        if not self.context.data_axis.steps_on_shards:
            for optimizer in optimizers:
                attach(optimizer, scope=self.context.update_scope, group=self.context.update_group)

    @override
    def around_hook(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.runtime is None else self.runtime.in_hook()

    @override
    def around_gradient_hook(self) -> AbstractContextManager[Any]:
        return self.around_hook()

    # --- the gradient norm --------------------------------------------------------------------------------------

    @override
    def counts(self, param: nn.Parameter) -> bool:
        if self.runtime is None or self.runtime.group.rank == 0:
            return True
        if any(axis.gradient_group(param) is not None for axis in self.context.axes):
            # The gradient's group includes tensor ranks, which may hold parts of it: each counts its own part.
            return True
        return is_over(param, TENSOR_AXIS) and not param.placements[-1].is_replicate()  # type: ignore[attr-defined]

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
            name: local_like(value, mine[name]) if name in mine and is_over(mine[name], TENSOR_AXIS) else value
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
        return {**state, "state": {**local, **shared_entries(state)}}

    @override
    def whole_values(self, tree: Any) -> Any:
        if self.runtime is None or not any(isinstance(leaf, DTensor) for leaf in pytree.tree_leaves(tree)):
            return tree
        return pytree.tree_map_only(DTensor, to_full_tensor, tree)

    # --- description and teardown -------------------------------------------------------------------------------

    @override
    def describe(self) -> str:
        if self.plan is None:
            return ""
        return str(self.plan) if self._plan_is_new else self.plan.headline()

    @override
    def teardown(self) -> None:
        self._plan_is_new = False
        if self.runtime is None or self._split is None or not self.ended_normally():
            return
        if any(is_over(p, TENSOR_AXIS) and p.device_mesh.ndim > 1 for p in self._split.parameters()):  # type: ignore[attr-defined]
            # The data axis keeps the module sharded, since it is too large to be unsharded.
            return
        self._restore_full_module()

    def _restore_full_module(self) -> None:
        self._unwrap()
        if self.runtime is not None and self._split is not None:
            self.runtime.unwrap_calls()
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
    """Return an optimizer's parameters in the order of their indices in its state dict."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def _local_value(value: Any, param: nn.Parameter) -> Any:
    if not isinstance(value, Tensor) or not isinstance(param, DTensor) or not value.dim():
        return value
    return local_shard(local_like(value, param)) if value.shape == param.shape else value
