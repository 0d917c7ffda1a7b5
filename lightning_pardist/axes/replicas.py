"""Replica axis: module replicas in threads of one process, each running the step on its part of the batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import MethodType, NoneType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torchmetrics import Metric
from typing_extensions import override

from lightning_pardist.axes.base import ParallelAxis
from lightning_pardist.axes.pipeline.merged_values import WEIGHT
from lightning_pardist.axes.pipeline.microbatch_outputs import Part, StepOutputs
from lightning_pardist.axes.pipeline.microbatching import Microbatching
from lightning_pardist.axes.pipeline.pipeline_settings import PipelineSettings
from lightning_pardist.axes.pipeline.recording import StepRecorder
from lightning_pardist.axes.pipeline.reduction_rules import Rules, Shares, zeros_message
from lightning_pardist.axes.pipeline.spanning_functions import SpanningFunctions
from lightning_pardist.axes.refusals import refuse_renormalized
from lightning_pardist.compat.lightning_functions import update_device
from lightning_pardist.compat.lightning_loops import is_compiled, layer_sync
from lightning_pardist.engines.common.logged_weights import NotedMeans, weight_of_logged
from lightning_pardist.engines.common.loss_setting import LossWeight, terms_of
from lightning_pardist.engines.pipeline import BatchDim, CannotPipelineError, MicroBatch, SplitFunction, find_loss
from lightning_pardist.engines.pipeline.loss_seeds import LossMakeup, LossSeeds
from lightning_pardist.engines.pipeline.nested import map_leaves
from lightning_pardist.engines.replicas import ReplicaThreads, WeightedLoss, replicate
from lightning_pardist.mesh import ParallelDims
from lightning_pardist.trainer.layer_sync import WatchedBatchNorms, converts
from lightning_pardist.trainer.loss_weights import coupled_samples
from lightning_pardist.trainer.patch_stack import Patch
from lightning_pardist.trainer.sample_batches import undisturbed_random
from lightning_pardist.trainer.sample_mixing import mixed_samples


class ReplicaAxis(ParallelAxis):
    """Runs training steps on replicas of the module, each in its own thread, device and part of the batch.

    The first replica is the module itself, so that its buffer updates persist. The others are created in each step.
    Values that the step logs, returns or stores are combined as for the micro-batches of a pipeline, by rules found in
    a trial before training; metrics of the module are called once more, with the samples of the batch. Evaluation
    runs unsplit batches on the first device.

    Args:
        batch_dim: Dim of the samples in a batch, see :class:`~lightning_pardist.PipelineStrategy`.
        split_batch: Function that splits a batch, instead of splitting along ``batch_dim``.

    Attributes:
        devices: Device of each replica; set by the strategy.
    """

    name = "replicas"
    # Innermost, so that the other axes run a step once, not per replica.
    order = 5
    splits_batch = True

    def __init__(self, *, batch_dim: BatchDim = 0, split_batch: SplitFunction | None = None) -> None:
        self._settings = partial(PipelineSettings, schedule="gpipe", batch_dim=batch_dim, split_batch=split_batch)
        self._settings()
        self.devices: list[torch.device] = []
        self._threads: ReplicaThreads | None = None
        self._rules, self._loss = Rules(), LossMakeup()
        self._batch_norms: WatchedBatchNorms | None = None
        self._cut: Microbatching | None = None

    @override
    def is_used(self, dims: ParallelDims) -> bool:
        return len(self.devices) > 1

    @override
    def check(self, trainer: pl.Trainer) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            return
        module = trainer.lightning_module
        why = _replication_refusal(trainer, module)
        if why is not None:
            raise ValueError(
                f"{type(module).__name__} {why}. {self.context.name} runs training_step on a replica of the module for"
                " each device, in threads of one process. Use pardist_ddp, with a process for each."
            )
        refuse_renormalized(module, self.context.name)

    @override
    def compile_refusal(self, whole_step: bool) -> str:
        return (
            "runs replicas of a module in threads of one process, and compiled code is bound to one of them."
            " Use pardist_ddp"
        )

    # --- the module ---------------------------------------------------------------------------------------------

    @override
    def observe(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Find the rules that combine replicas' step outputs, and check that the module can be replicated.

        Raises:
            ValueError: If the module cannot be replicated, or a layer called by a custom autograd function sets
                attributes in forward, which backward may read.
            CannotPipelineError: If batches cannot be split, or outputs of the parts cannot be combined.
        """
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self._try_to_replicate(module)
        number = len(self.devices)
        settings = self._settings(num_microbatches=number)
        with undisturbed_random(), SpanningFunctions(module) as functions:
            ways: dict[str, Any] = {"check_samples": self.context.check_samples}
            samples, weight = self.context.samples, self.context.loss_weight
            recorder = StepRecorder(trainer, settings, range(number), samples, weight, **ways)
            self._rules, self._loss, self._cut = recorder.training_rules()
        if functions.kept is not None:
            function, attribute = functions.kept
            raise ValueError(
                f"{function}, a custom autograd function, calls a layer of {type(module).__name__} that sets"
                f" {attribute} in forward. Its backward may read it, and would find what another replica left there."
                " Use pardist_ddp, with a process for each device."
            )
        name, rules = f"{type(module).__name__}.training_step", self._rules
        if not rules.is_explained or rules.unexplained:
            what = ", ".join(rules.unexplained) or "its loss"
            raise CannotPipelineError(
                f"The values that {name} computes for parts of a batch do not combine to those for the batch:"
                f" {what}. Log means or sums over samples, or keep metrics in attributes of the module.",
                ("pardist_ddp",),
            )
        if rules.zeros:
            rank_zero_info(zeros_message(name, rules.zeros))
        if rules.untried:
            rank_zero_warn(
                f"{name} could not be tried on a whole batch in evaluation mode ({rules.untried}), so it is not"
                " known how the values of replicas combine: their means are taken, weighted as the loss is."
            )
        if rules.mixing is not None:
            rank_zero_warn(mixed_samples(module, rules.mixing, "replica"))
        if self.context.check_samples:
            remedy = "pardist_ddp with Trainer(sync_batchnorm=True) does so over ranks."
            self._batch_norms = WatchedBatchNorms(module, "replica", remedy, apart=False)
        if coupled := self._loss.coupled or rules.orders:
            rank_zero_warn(coupled_samples(module, coupled))
        self._threads = ReplicaThreads(self.devices)

    def _try_to_replicate(self, module: pl.LightningModule) -> None:
        """Replicate the module once, as a check.

        Raises:
            ValueError: If the module cannot be replicated.
        """
        try:
            replicate(module, self.devices[-1], checks_functions=True)
        except Exception as error:
            raise ValueError(
                f"{type(module).__name__} cannot be replicated: {error}. Or use pardist_ddp, with a process for each"
                " device."
            ) from error

    # --- steps --------------------------------------------------------------------------------------------------

    @override
    def run_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        module = self.context.module
        if self._threads is None or module is None or module.trainer.state.stage != RunningStage.TRAINING:
            return step(*args, **kwargs)
        patch = Patch(module, "training_step", None)

        def in_parts(batch: Any, *rest: Any) -> Any:
            patch.detach()
            return self._run_replicas(batch, rest)

        patch = Patch(module, "training_step", in_parts)
        patch.attach()
        try:
            return step(*args, **kwargs)
        finally:
            patch.detach()

    def _run_replicas(self, batch: Any, rest: Sequence[Any]) -> Any:
        module, threads, cut = self.context.module, self._threads, self._cut
        if module is None or threads is None or cut is None:
            raise RuntimeError("Steps are run by a Trainer's fit.")
        parts = cut.split(batch, len(self.devices))
        if len(parts) == 1:
            return module.training_step(batch, *rest)
        devices = self.devices[: len(parts)]
        parts = [
            MicroBatch(move_data_to_device(part.value, to), part.size) for part, to in zip(parts, devices, strict=True)
        ]
        if self._batch_norms is not None:
            self._batch_norms.look()
        replicas = [
            module,
            *(replicate(module, device, made=partial(_rebind_replica, device)) for device in devices[1:]),
        ]
        effects = [StepOutputs(replica, repeats_metrics=True) for replica in replicas]
        begins = [sum(part.size for part in parts[:index]) for index in range(len(parts))]
        total = sum(part.size for part in parts)

        def run(index: int) -> dict[str, Any]:
            part = parts[index]
            with effects[index].watching():
                return effects[index].run(
                    lambda value: replicas[index].training_step(value, *rest),
                    part.value,
                    Part(begins[index], part.size, total),
                    weigh=partial(self._weigh_logged, part),
                )

        effects[0].adopt_rules(self._rules)
        results = threads.run([partial(run, index) for index in range(len(parts))])
        loss, weights = self._combine_losses(parts, [find_loss(result["result"]) for result in results])
        results = [map_leaves(partial(_detached, devices[0]), result) for result in results]
        outputs = effects[0].combine(results, Shares.of(weights, [part.size for part in parts]), self._rules)
        return _with_loss(effects[0].apply(outputs), loss)

    @property
    def _loss_weight(self) -> LossWeight:
        return self._rules.loss_weight or self.context.loss_weight

    def _combine_losses(
        self, parts: Sequence[MicroBatch], losses: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, list[float]]:
        """Return the loss of the batch, and the weight of each part's loss."""
        known = [(part, loss) for part, loss in zip(parts, losses, strict=True) if loss is not None]
        if not known:
            return None, [float(part.size) for part in parts]
        by_sample = self._loss.by_sample
        seeds = LossSeeds(self._loss_weight, lambda: None, self.context.device, by_sample=by_sample)
        seeds.begin([part for part, _ in known])
        for index, (_, loss) in enumerate(known):
            seeds.add(index, loss)
        seeds.before_backward(0)
        factors = tuple(seeds.seed(index, loss)[0] for index, (_, loss) in enumerate(known))
        weighing = seeds.finish()
        value = weighing.value([loss.detach().to(self.context.device) for _, loss in known])
        first = known[0][1]
        whole = WeightedLoss.apply(value.to(first.dtype).reshape(first.shape), factors, *(loss for _, loss in known))
        weights = iter(weighing.weights)
        return whole, [0.0 if loss is None else next(weights) for loss in losses]

    def _weigh_logged(self, part: MicroBatch, result: Any, logged: list[dict[str, Any]]) -> None:
        """Store the weights of logged values relative to other replicas, if their autograd graphs determine them."""
        loss = find_loss(result)
        setting, by_sample = self._loss_weight, self._loss.by_sample
        terms = []
        if loss is not None and logged:
            terms = terms_of(loss, part.value, part.size, setting, by_sample=by_sample)
        values, noted = [arguments["value"] for arguments in logged], NotedMeans(enabled=False)
        for arguments in logged:
            with suppress(LookupError):
                arguments[WEIGHT] = weight_of_logged(
                    arguments["value"], values, loss, terms, part.size, noted, by_sample=by_sample
                )

    # --- description and teardown -------------------------------------------------------------------------------

    @override
    def describe(self) -> str:
        names = ", ".join(map(str, self.devices))
        loss = "; ".join(self._loss.terms) or "a mean over samples"
        return (
            f"Data parallel in one process: {len(self.devices)} replicas in threads ({names}), batches cut into as many"
            f" parts; evaluation on the first device.\nLoss of a batch: {loss} (loss_weight sets it)\n"
            "pardist_ddp is faster: here threads share one interpreter, the module is replicated for every step, and"
            " backward sends all gradients to the first device, where the optimizer runs alone."
        )

    @override
    def teardown(self) -> None:
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.close()


def _replication_refusal(trainer: pl.Trainer, module: pl.LightningModule) -> str | None:
    """Return why a module cannot run on replicas, as the end of a sentence; None if it may be tried."""
    if not module.automatic_optimization:
        return "optimizes by hand (automatic_optimization=False), which replicas would each do"
    if is_compiled(module):
        return "is compiled as a whole, and compiled code is bound to the module that it was made from"
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        return "takes dataloader_iter in training_step, and each batch has to be cut"
    if converts(layer_sync(trainer.strategy), module):  # type: ignore[arg-type]
        return "is to run with sync_batchnorm=True, but threads exchange no statistics"
    for name, each in module.named_modules():
        if isinstance(each, torch.jit.ScriptModule):
            return f"has {name!r}, a {type(each).__name__} of TorchScript, which cannot be replicated"
        for method in ("forward", "training_step"):
            if not isinstance(each.__dict__.get(method), (MethodType, NoneType)):
                return (
                    f"has {name or 'itself'!r}, whose {method} has been replaced by a function (torch.compile does"
                    " so), and it is not known which module this function is bound to"
                )
        if any(map(is_lazy, each.parameters(recurse=False))):
            return f"has {name!r}, whose parameters do not exist before its first call. Call it once in configure_model"
    return None


def _rebind_replica(device: torch.device, module: nn.Module) -> None:
    """Set the device of a replica's submodule; give a metric copies of its states."""
    if isinstance(module, Metric):
        for name, value in module.metric_state.items():
            setattr(module, name, list(value) if isinstance(value, list) else value.clone())
        module.to(device)
    elif isinstance(module, pl.LightningModule):
        update_device(module, device=device)


def _detached(device: torch.device, leaf: Any) -> Any:
    return leaf.detach().to(device) if isinstance(leaf, Tensor) else leaf


def _with_loss(result: Any, loss: Tensor | None) -> Any:
    """Return a step's result with its loss replaced by the one that backward starts from."""
    if loss is None:
        return result
    return {**result, "loss": loss} if isinstance(result, Mapping) else loss
