"""The pipeline axis of a strategy: the module's steps recorded, planned, taken apart and run stage by stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric
from typing_extensions import override

from lightning_pardist.engines.api import Turns
from lightning_pardist.engines.data_parallel.buffers import broadcast_module
from lightning_pardist.engines.fully_sharded.materialize import on_meta, restore_random_state
from lightning_pardist.engines.fully_sharded.materialize import share_random_state as take_random_state
from lightning_pardist.engines.pipeline import (
    CannotPipelineError,
    PipelineEngine,
    PipelineOptions,
    PipelinePlan,
    StepResult,
    batch_size_of,
    stage_ranks,
)
from lightning_pardist.engines.pipeline.outside import OutsideCalls
from lightning_pardist.engines.pipeline.placement import Placement, replace_in
from lightning_pardist.engines.pipeline.structure import map_leaves
from lightning_pardist.engines.process_group import world_group
from lightning_pardist.mesh import Degree
from lightning_pardist.strategies.parts.part import Part
from lightning_pardist.strategies.parts.pipeline.agreement import (
    SameBatches,
    agree_on,
    raise_together,
    share_random_state,
)
from lightning_pardist.strategies.parts.pipeline.averaging import gather_values, placements_of_copies
from lightning_pardist.strategies.parts.pipeline.combining import Rules, Shares
from lightning_pardist.strategies.parts.pipeline.effects import StepEffects
from lightning_pardist.strategies.parts.pipeline.meta import create_local, stand_ins
from lightning_pardist.strategies.parts.pipeline.recording import STEPS, Recorded, StepKey, StepRecorder, loss_of
from lightning_pardist.strategies.parts.pipeline.refusals import check_optimizers, check_trainer
from lightning_pardist.strategies.parts.pipeline.settings import PipelineSettings

#: How long a rank that calls the module outside of steps waits for the others to do so.
_OUTSIDE_TIMEOUT = timedelta(seconds=60)


class PipelinePart(Part):
    """Runs a module's steps as a pipeline over one axis of the mesh.

    Until optimizers are made every rank has the whole module. Then each step function is recorded on a sample batch,
    the stages are planned and tried, and parameters of other ranks' stages are freed (they stay in the module and in
    the optimizers, empty, on ``meta``). After a run that ended well the module is whole again on every rank.

    Args:
        settings: How to split and run.

    Attributes:
        engine: The running pipeline; None outside of runs.
        last_result: What the last step came to.
        record_times: Whether the next steps keep the times of their computations; set it on all ranks alike.
    """

    creates_values = True

    def __init__(self, settings: PipelineSettings) -> None:
        self.settings = settings
        self.engine: PipelineEngine | None = None
        self.last_result: StepResult | None = None
        self.record_times = False
        self._outside: OutsideCalls | None = None
        self._effects: StepEffects | None = None
        self._same_batch: SameBatches | None = None
        self._plans: dict[StepKey, PipelinePlan] = {}
        self._unstaged: dict[StepKey, str] = {}
        self._observed: Recorded | None = None
        self._rules: dict[StepKey, Rules] = {}
        self._key: StepKey = ("", 0)
        self._taken: list[tuple[nn.Parameter, Tensor]] = []
        self._local: dict[Optimizer, list[bool]] = {}
        self._metrics: list[Metric] = []
        self._counted: set[nn.Parameter] | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks of this rank's pipeline."""
        return self.strategy.device_mesh["pipeline_parallel"].get_group()

    @override
    def degrees(self, ranks_per_node: int) -> dict[str, Degree]:
        return {"pipeline_parallel": self.settings.pipeline_parallel_size}

    @override
    def check(self, trainer: pl.Trainer) -> None:
        check_trainer(trainer)

    # --- the module ---------------------------------------------------------------------------------------------

    @override
    def materialize(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Record and plan on stand-ins for what is on ``meta``, then create this rank's stages alone."""
        self._built_on_meta = on_meta(module)
        if not self._built_on_meta:
            return
        world = world_group()
        broadcast_module(module, group=world)
        share_random_state(self.group)
        with stand_ins(module, self.strategy.root_device):
            self._observed = self._record(trainer)
        settings, size = self.settings, self.group.size()
        made = next(iter(self._observed.plans.values()))
        ranks = stage_ranks(settings.schedule, size, settings.chunks_per_rank)
        own = take_random_state([world])
        create_local(module, Placement(module, made, ranks, self.group.rank(), self.group), init=settings.init)
        restore_random_state(own)

    @override
    def observe(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self.strategy.dims.tensor_parallel > 1:
            # Split layers hand on parts of tensors, which say nothing of where they came from.
            share_random_state(self.group)
            self._observed = self._record(trainer)

    def _record(self, trainer: pl.Trainer) -> Recorded:
        recorded = Recorded({}, {})
        failure = None
        try:
            recorded = StepRecorder(trainer, self.settings, self.group.size()).record()
        except Exception as error:
            failure = error
        raise_together(failure)
        return agree_on(recorded)

    @override
    def transform(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        share_random_state(self.group)
        for metric in module.modules():
            if isinstance(metric, Metric) and metric.process_group is None:
                # Ranks of one pipeline have the same states, which must not be added up.
                metric.process_group = self.strategy.data_group
                self._metrics.append(metric)
        if trainer.state.fn != TrainerFn.FITTING:
            # Those of a run before: what was trained can be saved after an evaluation, too.
            self._split(trainer, module, self.strategy.optimizers)

    @override
    def after_optimizers(self, trainer: pl.Trainer, optimizers: Sequence[Optimizer]) -> None:
        check_optimizers(optimizers)
        self._split(trainer, trainer.lightning_module, optimizers)

    def _split(self, trainer: pl.Trainer, module: pl.LightningModule, optimizers: Sequence[Optimizer]) -> None:
        """Record, plan, try, and free what other ranks hold. Collective over the world.

        Raises:
            CannotPipelineError: On every rank, if the module cannot be cut as asked.
        """
        group, device = self.group, self.strategy.root_device
        recorded = self._observed or self._record(trainer)
        self._observed = None
        self._plans, self._rules, self._unstaged = recorded.plans, recorded.rules, recorded.unstaged
        self._warn_of_losses()
        first = next(iter(self._plans.values()))
        self._effects = StepEffects(module, first.trace.unit_names, written=recorded.written)
        self._same_batch = SameBatches(group, device)
        self.engine = PipelineEngine(module, first, group=group, device=device, options=self._options())
        replaced: dict[nn.Parameter, nn.Parameter] = {}
        self.engine.free(replaced)
        replace_in(optimizers, replaced)
        self._local = {
            optimizer: [not param.is_meta for settings in optimizer.param_groups for param in settings["params"]]
            for optimizer in optimizers
        }
        for placement in placements_of_copies(trainer, self.engine.placement):
            placement.free()

    @property
    @override
    def boundaries(self) -> list[list[nn.Module]] | None:
        """The units of this rank's stages, but those whose parameters are read outside of their ``forward``."""
        if self.engine is None:
            return None
        module, placement = self.engine.module, self.engine.placement
        recorded, unit_stages = placement.plan.trace, placement.plan.unit_stages
        read_outside = {recorded.parameters[name].unit for name in recorded.free_parameters}
        return [
            [
                module.get_submodule(name)
                for name, stages in unit_stages.items()
                if stage in stages and name not in read_outside
            ]
            for stage, rank in enumerate(placement.stage_ranks)
            if rank == placement.rank
        ]

    @property
    @override
    def runs_a_step(self) -> int:
        return 1 if self.engine is None else self.engine.options.num_microbatches

    @override
    def ready(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Answer calls outside of steps. Collective over the world."""
        if self.engine is None:
            return
        placement = self.engine.placement
        placement.remember()
        self._counted = set(placement.owned())
        if self.group.size() > 1:
            self._outside = OutsideCalls(
                placement, self.strategy.root_device, _group_for_outside(self.strategy.device_mesh)
            )
            self._outside.install()

    def _warn_of_losses(self) -> None:
        for (name, _), reason in self._unstaged.items():
            rank_zero_warn(
                f"{name} does not run in the stages of the training step: {reason} Instead every rank runs it on whole"
                " batches, and gets each layer's output from the rank that holds the layer, which takes longer."
            )
        for (name, _), rules in self._rules.items():
            if not rules.is_explained:
                rank_zero_warn(
                    f"The loss of {name} for a batch is neither the mean nor the sum of its losses for micro-batches:"
                    " it compares samples of a batch, or weighs them. Training goes by the mean over micro-batches,"
                    " weighted by samples. If it should be weighted otherwise, set loss_weight."
                )
            if rules.unexplained:
                rank_zero_warn(
                    f"{name} writes to {', '.join(rules.unexplained)}, and what it writes for micro-batches does not go"
                    " together to what it would write for the batch: their mean is taken. pardist_mp, which makes no"
                    " micro-batches, does as one process does."
                )

    def _weight_of(self, microbatch: Any) -> float:
        rules = self._rules.get(self._key, Rules())
        given = self.settings.loss_weight if self._key[0] == "training_step" else None
        weigh = given if callable(given) else rules.weight
        return float(batch_size_of(microbatch) or 1 if weigh is None else weigh(microbatch))

    def _options(self) -> PipelineOptions:
        settings = self.settings
        rules = self._rules.get(("training_step", 0), Rules())
        return PipelineOptions(
            schedule=settings.schedule,
            num_microbatches=settings.microbatches(self.group.size()),
            chunks_per_rank=settings.chunks_per_rank,
            loss_of=loss_of,
            weight_of=self._weight_of,
            loss_is_sum=settings.loss_weight == "sum" or (settings.loss_weight is None and rules.loss_is_sum),
            share="all",
            whole=self.strategy.plain,
            timeout_s=settings.message_timeout_s,
        )

    def _scaler(self) -> Any:
        return getattr(self.strategy.precision_plugin, "scaler", None)

    # --- steps --------------------------------------------------------------------------------------------------

    @override
    def run_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        engine, effects = self.engine, self._effects
        if engine is None or effects is None or self._same_batch is None:
            return step(*args, **kwargs)
        batch, *rest = (*args, *kwargs.values())
        batch = self._same_batch(batch)

        def run(microbatch: Any) -> Any:
            return effects.run(lambda part: step(part, *rest), microbatch, engine.microbatch_index)

        stage = self._trainer.state.stage
        self._key = self._key_of(stage, rest)
        if self._key in self._unstaged:
            # Numbers that it draws, to sample a text say, decide which layers are called next.
            share_random_state(self.group)
            with nullcontext() if self._outside is None else self._outside.for_a_step(engine.replay):
                return step(batch, *rest)
        engine.record_times = self.record_times
        with effects.watching(), nullcontext() if self._outside is None else self._outside.suspended():
            if stage == RunningStage.TRAINING:
                done = self._train(engine, run, batch)
            else:
                done = engine.eval_step(run, batch, plan=self._plans[self._key])
        self.last_result = done
        results = [map_leaves(self._to_device, result) for result in done.results]
        rules = self._rules.get(self._key, Rules())
        return effects.apply(effects.combine(results, Shares.of(done.weights, done.sizes), rules))

    def _train(self, engine: PipelineEngine, run: Callable[[Any], Any], batch: Any) -> StepResult:
        scaler = self._scaler()
        scale = (1.0 if scaler is None else float(scaler.get_scale())) / self._trainer.accumulate_grad_batches
        # Lightning zeroes gradients between training_step and backward: those made here wait for backward.
        with self._data_engine_waits() as turns:
            earlier = engine.placement.take_gradients()
            try:
                done = engine.train_step(run, batch, scale=scale, turns=turns)
                self._taken = engine.placement.take_gradients()
            finally:
                engine.placement.add_gradients(earlier)
        return done

    def _data_engine_waits(self) -> AbstractContextManager[Turns | None]:
        data_engine = self.strategy.data_engine
        return nullcontext() if data_engine is None else data_engine.hands_off()

    @override
    def backward(self, run: Callable[[], None]) -> None:
        """Hand over the gradients that the schedule has made; ``run`` would make none."""
        taken, self._taken = self._taken, []
        if self.engine is None:
            run()
        else:
            self.engine.placement.add_gradients(taken)

    def _key_of(self, stage: RunningStage | None, rest: Sequence[Any]) -> StepKey:
        name = "" if stage is None else STEPS[stage]
        known = {*self._plans, *self._unstaged}
        several = sum(step == name for step, _ in known) > 1
        key = (name, int(rest[-1]) if several else 0)
        if key not in known:
            raise CannotPipelineError(
                f"No run of {name} was recorded for loader {key[1]}: there was none when the module was split. Give the"
                " Trainer all loaders from the start.",
                (),
            )
        return key

    def _to_device(self, value: Any) -> Any:
        return value.to(self.strategy.root_device) if isinstance(value, Tensor) else value

    @property
    @override
    def random_position(self) -> int | None:
        return None if self.engine is None else self.engine.position

    @random_position.setter
    def random_position(self, position: int) -> None:
        if self.engine is not None:
            self.engine.position = position

    # --- gradients ----------------------------------------------------------------------------------------------

    @override
    def counts(self, param: nn.Parameter) -> bool:
        return self._counted is None or param in self._counted

    @override
    def reduce_over_axis(self, value: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        dist.all_reduce(value, op=op, group=self.group)

    # --- checkpoints --------------------------------------------------------------------------------------------

    @override
    def own_module_state(self, state: dict[str, Any]) -> dict[str, Any]:
        if self.engine is None or self.group.size() == 1:
            return state
        placement = self.engine.placement
        own: dict[str, Any] = {}
        for name, value in state.items():
            if placement.owner_of(name) == placement.rank:
                own[name] = value
            elif isinstance(value, Tensor):
                own[name] = value.to("meta")
        return own

    @override
    def local_module_state(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        if self.engine is None:
            return state
        own = self.engine.module.state_dict(keep_vars=True)
        freed = {name for name, value in own.items() if isinstance(value, Tensor) and value.is_meta}
        # Loading a stand-in into itself does nothing, and its name is not missed.
        return {name: own[name] if name in freed else value for name, value in state.items()}

    @override
    def local_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        local = self._local.get(optimizer)
        if local is None:
            return state
        return {**state, "state": {number: value for number, value in state["state"].items() if local[int(number)]}}

    @override
    def whole_values(self, tree: Any) -> Any:
        if self.engine is None or self.group.size() == 1:
            return tree
        return gather_values(tree, self.group, self.strategy.root_device)

    # --- for people, and the end --------------------------------------------------------------------------------

    @override
    def describe(self) -> str:
        if self.engine is None:
            return ""
        options = self.engine.options
        chunks = f", {options.chunks_per_rank} stages a rank" if options.chunks_per_rank > 1 else ""
        head = f"Pipeline: schedule {options.schedule}, {options.num_microbatches} micro-batches{chunks}"
        return f"{head}\n{self.engine.plan.describe()}"

    @override
    def release(self) -> None:
        if self._outside is not None:
            self._outside.remove()
            self._outside = None

    @override
    def teardown(self) -> None:
        for metric in self._metrics:
            metric.process_group = None
        self._metrics.clear()
        engine, self.engine = self.engine, None
        self._effects, self._same_batch, self._counted = None, None, None
        self._plans, self._rules, self._unstaged, self._taken = {}, {}, {}, []
        self._built_on_meta, self._observed = False, None
        module = self.strategy.lightning_module
        if engine is None or module is None:
            return
        if self.ended_well():
            replace_in(self.strategy.optimizers, engine.placement.restore())
            # Those that were made in the meantime, too.
            for placement in placements_of_copies(module.trainer, engine.placement):
                placement.restore()
        else:
            module.__dict__["cpu"] = partial(_held_to_host, module)

    @property
    def _trainer(self) -> pl.Trainer:
        if self.strategy.lightning_module is None:
            raise RuntimeError("Steps are run by a Trainer's fit, validate, test or predict.")
        return self.strategy.lightning_module.trainer


#: Groups for calls outside of steps, by the ranks in them; as long-lived as those of the mesh.
_outside_groups: dict[tuple[dist.ProcessGroup, tuple[int, ...]], dist.ProcessGroup] = {}


def _group_for_outside(mesh: Any) -> dist.ProcessGroup:
    """A second group of this rank's pipeline, whose waits are short. Collective over the world when it is new."""
    world = world_group()
    axis = mesh.mesh_dim_names.index("pipeline_parallel")
    rows = mesh.mesh.movedim(axis, -1).reshape(-1, mesh.mesh.shape[axis]).tolist()
    for ranks in rows:
        if (world, tuple(ranks)) not in _outside_groups:
            _outside_groups[world, tuple(ranks)] = dist.new_group(ranks, timeout=_OUTSIDE_TIMEOUT, backend="gloo")
    return next(_outside_groups[world, tuple(ranks)] for ranks in rows if dist.get_rank() in ranks)


def _held_to_host(module: nn.Module) -> nn.Module:
    """In place of ``module.cpu()`` where a run was broken off: what other ranks hold has no values to move."""
    module.__dict__.pop("cpu", None)
    for each in module.modules():
        for tensor in (*each._parameters.values(), *each._buffers.values()):
            if tensor is not None and not tensor.is_meta:
                tensor.data = tensor.data.cpu()
    return module
