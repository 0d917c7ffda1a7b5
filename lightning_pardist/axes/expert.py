"""Expert-parallel axis: the experts of each layer distributed over ranks that see different samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pardist.axes.base import ParallelAxis
from lightning_pardist.axes.broken_off import skip_meta_in_cpu
from lightning_pardist.axes.fsdp import FSDPAxis
from lightning_pardist.axes.refusals import refuse_callbacks, refuse_pruning
from lightning_pardist.axes.together import raise_on_all_ranks
from lightning_pardist.axes.zero import ZeroAxis
from lightning_pardist.checkpoint.tensors import shared_entries
from lightning_pardist.compat.fsdp2 import is_sharded
from lightning_pardist.engines.common.full_tensor_updates import updates_of
from lightning_pardist.engines.common.meta_init import on_meta
from lightning_pardist.engines.common.update_scope import has_parameters
from lightning_pardist.engines.experts import (
    ExpertLayer,
    ExpertRuntime,
    ExpertSharding,
    HeldExperts,
    assume_routes,
    choose_routes,
    find_layers,
)
from lightning_pardist.engines.experts.trial import DISPATCHES, Choice, Dispatch
from lightning_pardist.engines.fsdp.shard_optimizer import step_on_shards
from lightning_pardist.engines.pipeline.placement import replace_in
from lightning_pardist.engines.tensor.tensor_optimizer import detach
from lightning_pardist.local_tensors import local_shard
from lightning_pardist.mesh import (
    EXPERT_AXES,
    EXPERT_GRADIENT_AXES,
    GRADIENT_AXES,
    PIPELINE_AXIS,
    REST_AXES,
    TENSOR_AXIS,
    Degree,
    ParallelDims,
)
from lightning_pardist.settings import one_of
from lightning_pardist.trainer import trial_run
from lightning_pardist.trainer.sample_batches import NoSampleError

#: Key in ``RunContext.found_once`` under which candidates of a plan cache that there are no expert layers.
_NO_LAYERS = "no layers of experts"
ExpertParallelSize = int | Literal["auto"]


class ExpertAxis(ParallelAxis):
    """Distributes experts over ranks and exchanges tokens between them.

    The arguments are those of :class:`~lightning_pardist.ExpertParallelStrategy`.

    Raises:
        ValueError: If a setting is out of range; during a run, if no experts are found, or their number is not
            divisible by the number of ranks.
    """

    name = "expert"
    mesh_axes = ("expert_parallel",)
    order = 12
    splits_module = True
    divides_experts = True
    calls_may_differ = False

    def __init__(
        self,
        *,
        expert_parallel_size: ExpertParallelSize = "auto",
        experts: Sequence[str] | None = None,
        expert_dispatch: Dispatch = "auto",
        log_expert_load: bool = False,
    ) -> None:
        if isinstance(expert_parallel_size, str):
            one_of("expert_parallel_size", expert_parallel_size, ("auto",), or_else="a number of ranks")
        elif expert_parallel_size < 1:
            raise ValueError(f"expert_parallel_size={expert_parallel_size} is not positive. Use 1 or more, or 'auto'.")
        one_of("expert_dispatch", expert_dispatch, DISPATCHES)
        if experts is not None and not experts:
            raise ValueError("experts=[] names no experts. Leave it out to have them found, or name some.")
        self.expert_parallel_size = expert_parallel_size
        self.experts = None if experts is None else (experts,) if isinstance(experts, str) else tuple(experts)
        self.expert_dispatch: Dispatch = expert_dispatch
        self.log_expert_load = log_expert_load
        self.runtime: ExpertRuntime | None = None
        self.held: HeldExperts | None = None
        self._gradient_group: dist.ProcessGroup | None = None
        #: Gradient and pipeline ranks, which together run every layer of any stage on all samples.
        self._load_group: dist.ProcessGroup | None = None
        #: Expert layers of the module before it is transformed, and what each of them exchanges.
        self._planned: tuple[list[ExpertLayer], list[Choice]] = [], []
        #: Expert layers that stay replicated on every rank.
        self._left: list[ExpertLayer] = []

    @override
    def degrees(self, num_nodes: int, ranks_per_node: int) -> dict[str, Degree]:
        return {"expert_parallel": self.expert_parallel_size}

    @override
    def is_used(self, dims: ParallelDims) -> bool:
        # Experts may be distributed over context ranks alone.
        return self.expert_parallel_size != 1 and dims.size(*EXPERT_AXES) > 1

    @override
    def compile_refusal(self, whole_step: bool) -> str:
        return (
            "replaces the forward of experts by exchanges between ranks, which has not been tried under a compiler."
            " Leave compile out, or use pardist_zero3"
        )

    @override
    def check(self, trainer: pl.Trainer) -> None:
        context, dims, size = self.context, self.context.dims, self.context.expert_ranks
        if dims.outer_parallel > 1:
            raise ValueError(
                f"expert_parallel_size={size} and outer_parallel_size={dims.outer_parallel} are not"
                " available together yet. Set one of them to 1."
            )
        if isinstance(context.data_axis, FSDPAxis):
            _check_sharding(context.data_axis, size)
        if getattr(context.data_axis, "gradient_compression", None) is not None:
            raise ValueError(
                f"gradient_compression is not available with expert_parallel_size={size}, where"
                " gradients of experts are summed over other ranks than the rest. Leave it out."
            )
        compression = context.data_axis.compression if isinstance(context.data_axis, ZeroAxis | FSDPAxis) else None
        if compression is not None and (compression.gather is not None or compression.reduce is not None):
            raise ValueError(
                f"gather={compression.gather!r} and reduce={compression.reduce!r} are not available with"
                f" expert_parallel_size={size} yet. Leave them out."
            )
        module = context.module
        if module is not None and is_sharded(module):
            raise ValueError(
                f"{type(module).__name__} is still sharded from an earlier run, but {context.name} distributes the"
                " experts of a whole module. Build it anew, and load the last checkpoint."
            )
        if module is not None and on_meta(module):
            raise ValueError(
                f"{type(module).__name__} was built on the meta device, but {context.name} distributes experts that"
                " have values. Build it with values."
            )
        if module is not None and self.experts is not None:
            _check_names(module, self.experts)
        refuse_pruning(trainer)
        refuse_callbacks(
            trainer,
            (StochasticWeightAveraging, WeightAveraging),
            f"copies the module, and each rank of {context.name} has some of the experts only. Use pardist_ddp or"
            " pardist_zero2, or leave the callback out.",
        )
        if self.held is not None:
            # Experts are still distributed after a run that failed on every rank: this run starts from full parameters.
            self._restore_full_module()

    # --- the module ---------------------------------------------------------------------------------------------

    @override
    def observe(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._planned = self.find_plan(trainer, module, size=self.context.expert_ranks)

    @property
    @override
    def unsplittable_modules(self) -> Sequence[str]:
        layers = self._planned[0] if self.runtime is None else self.runtime.layers
        return [layer.runner for layer in layers]

    @property
    @override
    def divided_parameters(self) -> Sequence[str]:
        module, layers = self.context.module, self._planned[0]
        if module is None:
            return ()
        return [name for layer in layers for name in layer.parameter_names(module)]

    @override
    def agree_on_microbatches(self, count: int) -> int:
        least = torch.tensor([count])
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self.context.group_over(*EXPERT_AXES))
        return int(least)

    @override
    def transform(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        mesh = self.context.distributed.meshes.experts
        self._gradient_group = self.context.group_over(*EXPERT_GRADIENT_AXES)
        if self.log_expert_load:
            self._load_group = self.context.group_over(*GRADIENT_AXES, PIPELINE_AXIS)
        (layers, choices), self._planned = self._planned, ([], [])
        self.held = HeldExperts(module, layers, mesh, self._sharding())
        self.runtime = ExpertRuntime(
            module,
            layers,
            choices,
            self.held,
            mesh.get_group(),
            on_plain=self.context.on_plain,
            in_parts=self.context.dims.context_parallel > 1,
            even=self.context.is_plan,
        )

    def _sharding(self) -> ExpertSharding | None:
        """Return how experts are sharded over the ranks that hold the same ones; None without FSDP."""
        data, mesh = self.context.data_axis, self.context.mesh
        if not isinstance(data, FSDPAxis):
            return None
        dims = self.context.dims
        shared = tuple(axis for axis in REST_AXES if dims.size(axis) > 1)
        policy = data.mp_policy
        return ExpertSharding(
            mesh=mesh[shared] if shared else None,
            with_experts=self.context.distributed.meshes.sharded_experts(shared),
            average_over=self.context.gradient_group.size() * dims.tensor_parallel,
            compute_dtype=None if policy is None else policy.param_dtype,
            reduce_dtype=None if policy is None else policy.reduce_dtype,
            keep=data.reshard_after_forward is False,
            copies=self.context.group_over(TENSOR_AXIS) if dims.tensor_parallel > 1 else None,
        )

    @property
    @override
    def closed(self) -> Sequence[nn.Module]:
        module, runtime = self.context.module, self.runtime
        if module is None or runtime is None:
            return ()
        return [module.get_submodule(layer.runner) for layer in runtime.layers if layer.stacked]

    @override
    def ready(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        data, runtime = self.context.data_axis, self.runtime
        if self.held is not None:
            self.held.forget_missing()
        if isinstance(data, FSDPAxis) and runtime is not None:
            first = data.sharded.reserve_external_indices(len(runtime.layers), runtime.join_collective)
            runtime.share(data.sharded.sequencer, first)

    def find_plan(
        self, trainer: pl.Trainer, module: pl.LightningModule, *, size: int
    ) -> tuple[list[ExpertLayer], list[Choice]]:
        """Find expert layers and choose what each exchanges, by a trial of the user's step. Collective over the world.

        Raises:
            Exception: On every rank, if a rank finds no experts or a number that is not divisible, or its trial fails.
        """
        layers: list[ExpertLayer] = []
        choices: list[Choice] = []
        failure = None
        try:
            layers, choices = self._find_plan_locally(trainer, module, size=size)
        except Exception as error:
            failure = error
        raise_on_all_ranks(failure)
        # Layers and choices may depend on a rank's batch: all ranks use the first rank's.
        names = self.context.broadcast([(layer.name, choice) for layer, choice in zip(layers, choices, strict=True)])
        here, first = [layer.name for layer in layers], [each for each, _ in names]
        if here != first:
            failure = ValueError(
                f"The first batches of the ranks use different layers of experts: {here} on this rank, {first} on"
                " the first rank. Set experts to the layers that every batch uses."
            )
        raise_on_all_ranks(failure)
        return layers, [choice for _, choice in names]

    def _find_plan_locally(
        self, trainer: pl.Trainer, module: pl.LightningModule, *, size: int
    ) -> tuple[list[ExpertLayer], list[Choice]]:
        name = trial_run.step_name(trainer)
        try:
            batch = self.context.samples.first()
        except NoSampleError as problem:
            raise ValueError(
                f"{self.context.name} runs {name} once before it starts, and has no batch for it: {problem}."
            ) from problem
        with trial_run.without_side_effects(module, trainer), self.context.samples.in_trial_run():

            def step() -> Any:
                return trial_run.run(module, name, batch, trainer)

            self._left = []
            # A plan tries several degrees of parallelism.
            shared = {} if self.context.found_once is None else self.context.found_once
            if (layers := shared.get(_NO_LAYERS)) is None:
                layers = find_layers(module, step, chosen=self.experts, left=self._left)
                if not layers and self.experts is None:
                    shared[_NO_LAYERS] = layers
            _check_chosen(layers, self._left, self.experts)
            _check_layers(layers, module, name, size=size, in_stages=self.context.dims.size("pipeline_parallel") > 1)
            with trainer.precision_plugin.forward_context():
                if self.context.is_plan:
                    choices = assume_routes(module, layers, dispatch=self.expert_dispatch)
                else:
                    in_parts = self.context.dims.context_parallel > 1
                    dispatch = self.expert_dispatch
                    choices = choose_routes(module, layers, size=size, dispatch=dispatch, in_parts=in_parts)
            for layer in self._left:
                layer.forget_batch()
        return layers, choices

    @override
    def after_optimizers(self, trainer: pl.Trainer, optimizers: Sequence[Optimizer]) -> None:
        if self.context.data_axis.steps_on_shards:
            return
        for optimizer in optimizers:
            if self._has_experts(optimizer):
                step_on_shards(optimizer, group=self.context.update_group, scope=self.context.update_scope)

    def _has_experts(self, optimizer: Optimizer) -> bool:
        held = self.held
        if held is None or not has_parameters(optimizer):
            return False
        # Including experts of other ranks, so that the result is equal on all ranks: what follows is collective.
        return any(held.is_expert_parameter(param) for group in optimizer.param_groups for param in group["params"])

    # --- steps --------------------------------------------------------------------------------------------------

    @override
    @contextmanager
    def running(self) -> Iterator[None]:
        module, runtime, group = self.context.module, self.runtime, self._load_group
        # Steps without gradients are trial runs.
        counted = module is not None and module.trainer.training and torch.is_grad_enabled()
        if runtime is None or module is None or group is None or not counted:
            yield
            return
        runtime.forget_loads()
        yield
        self._log_loads(runtime, module, group)

    @override
    def run_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        module = self.context.module
        training = module is not None and module.trainer.training
        output = step(*args, **kwargs)
        if output is None and module is not None and training and module.automatic_optimization:
            raise RuntimeError(
                f"training_step returned None on a rank of {self.context.name}, whose experts take part in the other"
                " ranks' backward. Return a loss of zero weight, as (output.sum() * 0)."
            )
        return output

    def _log_loads(self, runtime: ExpertRuntime, module: pl.LightningModule, group: dist.ProcessGroup) -> None:
        """Log the ratio of the maximum to the mean expert load of each layer. Collective."""
        for name, load in runtime.loads(group, self.context.device).items():
            # A layer without tokens is balanced.
            ratio = float(load.max() * len(load)) / max(float(load.sum()), 1.0) if load.any() else 1.0
            module.log(f"expert_load/{name}", ratio, on_step=True, on_epoch=False, batch_size=1)

    @override
    def gradient_group(self, param: nn.Parameter) -> dist.ProcessGroup | None:
        return self._gradient_group if self.held is not None and param in self.held.parameters else None

    @override
    def start_evaluation(self) -> None:
        # Ranks may have different numbers of evaluation batches.
        if self.runtime is not None:
            self.runtime.start_uneven()

    @override
    def end_evaluation(self) -> None:
        if self.runtime is not None:
            self.runtime.end_uneven()

    @override
    def before_collective(self) -> None:
        if self.runtime is not None:
            self.runtime.join_until_all()

    # --- checkpoints --------------------------------------------------------------------------------------------

    @override
    def local_module_state(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        return state if self.held is None else self.held.part_of(state)

    @override
    def local_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        if self.held is None or updates_of(optimizer) is not None:
            return state
        params = [param for group in optimizer.param_groups for param in group["params"]]
        saved = [number for group in state["param_groups"] for number in group["params"]]
        local = {
            number: {key: self._local_value(value, params[position]) for key, value in state["state"][number].items()}
            for position, number in enumerate(saved)
            if number in state["state"] and position < len(params) and not params[position].is_meta
        }
        return {**state, "state": {**local, **shared_entries(state)}}

    def _local_value(self, value: Any, param: nn.Parameter) -> Any:
        if self.held is None or not isinstance(param, DTensor) or not self.held.is_split(param):
            return value
        if not isinstance(value, Tensor) or value.shape != param.shape:
            return value
        return local_shard(self.held.part(value, param))

    # --- description and teardown -------------------------------------------------------------------------------

    @override
    def describe(self) -> str:
        lines = [] if self.runtime is None else [self.runtime.describe()]
        lines += [f"Experts {layer.name} stay whole on every rank: {layer.unsplit_reason}." for layer in self._left]
        return "\n".join(lines)

    @override
    def teardown(self) -> None:
        if self.runtime is not None:
            self.runtime.remove()
            self.runtime = None
        if self.ended_normally():
            self._restore_full_module()
        elif self.held is not None and self.context.module is not None:
            skip_meta_in_cpu(self.context.module)

    def _restore_full_module(self) -> None:
        if self.runtime is not None:
            self.runtime.remove()
            self.runtime = None
        held, self.held = self.held, None
        if held is not None:
            replaced = held.restore()
            stand_ins = {old: new for old, new in replaced.items() if old.is_meta}
            if not self.context.data_axis.steps_on_shards:
                for optimizer in self.context.optimizers:
                    detach(optimizer)
            replace_in(self.context.optimizers, stand_ins)


def _check_sharding(data: FSDPAxis, size: int) -> None:
    """Refuse FSDP settings that experts do not support.

    Raises:
        ValueError: If one is set; names it.
    """
    settings = {
        "offload": (data.offload.settings is not None, "the device holds experts and steps on them"),
        "tile_linear_above_mb": (data.tile_linear_above_mb is not None, "experts are gathered whole"),
        "allow_divergent_forward": (data.allow_divergent_forward, "every rank has to call the same layers of experts"),
    }
    for name, (is_set, why) in settings.items():
        if is_set:
            raise ValueError(f"{name} is not available with expert_parallel_size={size}, since {why}. Leave it out.")


def _check_names(module: nn.Module, patterns: Sequence[str]) -> None:
    """Refuse a pattern that matches no module's name. Not collective.

    Raises:
        ValueError: If there is such a pattern; lists the module lists by name.
    """
    names = [name for name, _ in module.named_modules()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            lists = [name for name, child in module.named_modules() if isinstance(child, nn.ModuleList)]
            some = f" Its lists of modules are {', '.join(lists[:8])}." if lists else ""
            raise ValueError(
                f"experts: {pattern!r} fits no module of {type(module).__name__}. Set names of named_modules(),"
                f" with * for any part.{some}"
            )


def _check_chosen(layers: Sequence[ExpertLayer], left: Sequence[ExpertLayer], patterns: Sequence[str] | None) -> None:
    """Refuse a pattern that matches no experts that can be distributed.

    Raises:
        ValueError: If there is such a pattern; gives the reason.
    """
    for pattern in patterns or ():
        if any(fnmatchcase(name, pattern) for layer in layers for name in (layer.name, *layer.lists)):
            continue
        why = [
            f"{each.name!r} has to stay whole, since {each.unsplit_reason}"
            for each in left
            if fnmatchcase(each.name, pattern)
        ]
        raise ValueError(
            f"experts: for {pattern!r}, "
            + (
                "; ".join(why)
                if why
                else "the first batch calls no list of equal modules, and none with stacked parameters"
            )
            + ". Name others, or leave experts out to have them found."
        )


def _check_layers(layers: Sequence[ExpertLayer], module: nn.Module, step: str, *, size: int, in_stages: bool) -> None:
    """Refuse a module without experts, with experts called outside of a module, or with a number not divisible.

    Raises:
        ValueError: If a check fails; describes what was found.
    """
    if not layers:
        raise ValueError(
            f"No experts were found in {type(module).__name__}.{step}: no list of equal modules, and no parameters"
            " stacked along an expert dim, that a router weights or chooses by one score each. Set experts to their"
            " names, or use pardist_zero2 or pardist_zero3."
        )
    for layer in layers:
        if layer.outside:
            raise ValueError(
                f"The experts {layer.name!r} are called by {step} itself, outside of any module's forward. Call them in"
                " the forward of a module of their own, or use pardist_zero3."
            )
        if in_stages and not layer.runner:
            raise ValueError(
                f"The experts {layer.name!r} are called by the forward of {type(module).__name__} itself, which every"
                " stage of a pipeline runs. Call them in the forward of a module of their own, or leave"
                " pipeline_parallel_size out."
            )
        if layer.count % size:
            raise ValueError(
                f"{layer.name!r} has {layer.count} experts, which do not divide over expert_parallel_size={size} ranks."
                f" Use one of {[n for n in range(1, layer.count + 1) if layer.count % n == 0]}."
            )
