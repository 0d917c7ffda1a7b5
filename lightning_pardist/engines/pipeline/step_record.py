"""``record_step``: finds the units of a module and records one run of its step on a sample micro-batch."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lightning_pardist.compat.modules import NormBase, own_buffers
from lightning_pardist.compat.tensors import in_transform, version_of
from lightning_pardist.engines.common.batch_dim import BatchDims
from lightning_pardist.engines.pipeline.errors import CannotPipelineError
from lightning_pardist.engines.pipeline.interception import intercepted, undisturbed
from lightning_pardist.engines.pipeline.microbatch import fresh_copy
from lightning_pardist.engines.pipeline.nested import ATOMS, flatten, tensors_in
from lightning_pardist.engines.pipeline.pipeline_units import Grain, can_open, find_pipeline_units
from lightning_pardist.engines.pipeline.records import (
    AliasLeaf,
    Attribute,
    ConstLeaf,
    Escape,
    Leaf,
    Output,
    ParameterInfo,
    Source,
    StepRecord,
    TensorLeaf,
    UnitCall,
    Value,
)
from lightning_pardist.engines.pipeline.source_tracking import ReadWatcher, SourceTracker

Step = Callable[[Any], Any]
_MAX_RUNS = 6
#: Part of torch's message if a subclass takes the result of an operator that a mode observes.
_NEW_SUBCLASS = "Creating a new Tensor subclass"


def record_step(
    module: nn.Module,
    step: Step,
    batch: Any,
    *,
    grad: bool = True,
    loss_of: Callable[[Any], torch.Tensor | None] | None = None,
    unsplittable_modules: Iterable[str] = (),
) -> StepRecord:
    """Run ``step(batch)`` once and record its units. Not collective; the module must hold all its parameters.

    Buffers, metric states and RNG states are restored afterwards, and no gradients are left. If the run shows that
    units are too coarse or too fine (weights used without calling the layer that owns them, values passed out of a
    block other than by its outputs), it is repeated with corrected units, up to ``_MAX_RUNS`` runs.

    Args:
        module: The root module, in the mode (train or eval) in which the step will run.
        step: The user's own step; calls the module or parts of it.
        batch: One sample micro-batch.
        grad: Whether the step will be differentiated.
        loss_of: Returns the loss in the step's result; :func:`find_loss` by default.
        unsplittable_modules: Names of modules that must not be cut.

    Returns:
        The record, plain data for :func:`~.stage_plan.plan_stages`.

    Raises:
        CannotPipelineError: If a unit runs inside reentrant activation checkpointing, where it has no autograd graph,
            or the step makes tensors of a subclass from results of operators.
    """
    grain = Grain.around(unsplittable_modules)
    for _ in range(_MAX_RUNS):
        recording = _Recording(module, find_pipeline_units(module, grain))
        with undisturbed(module), torch.set_grad_enabled(grad):
            recorded = recording.run(step, batch, grad, loss_of or find_loss)
        better = recording.refined_grain(grain, recorded)
        if better == grain:
            return recorded
        grain = better
    return recorded


def find_loss(result: Any) -> torch.Tensor | None:
    """Return the loss in a step's result: the tensor itself, the entry or attribute ``loss``, or None.

    Args:
        result: Return value of the step.
    """
    if isinstance(result, torch.Tensor):
        return result
    found = result.get("loss") if isinstance(result, dict) else getattr(result, "loss", None)
    return found if isinstance(found, torch.Tensor) else None


def with_scalar_loss(result: Any) -> Any:
    """Return a step's result with a loss without dims, since one of shape ``[1]`` looks like a value of one sample.

    Args:
        result: Return value of the step; not changed. An object that cannot be changed is returned as it is.
    """
    loss = find_loss(result)
    if loss is None or loss.dim() == 0 or loss.numel() != 1:
        return result
    if loss is result:
        return loss.reshape(())
    result = copy.copy(result)
    if isinstance(result, dict):
        result["loss"] = loss.reshape(())
    else:
        with contextlib.suppress(AttributeError):
            result.loss = loss.reshape(())
    return result


def describe_output(
    result: Any,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    versions: dict[int, int],
    side: tuple[tuple[str, str, Any], ...] = (),
) -> tuple[Output, list[Any]]:
    """Describe a call's outputs, so that a stub can return values of the same structure.

    Args:
        result: The unit's return value.
        arguments: ``(args, kwargs)`` of the call.
        versions: Version counters of the argument tensors by ``id``, read before the call.
        side: Attributes that the call has set, as (module, name, value).

    Returns:
        The description, and the leaves themselves.
    """
    inputs, _ = flatten(arguments, objects=False)
    index_of = {id(item): index for index, item in reversed(list(enumerate(inputs))) if not _is_atom(item)}
    leaves, spec = flatten(result, stop=frozenset(index_of))
    num_returned = len(leaves)
    attributes = []
    for module_name, name, value in side:
        items, side_spec = flatten(value)
        attributes.append(Attribute(module_name, name, side_spec, len(items)))
        leaves += items
    described = tuple(_describe_leaf(leaf, index_of, versions) for leaf in leaves)
    return Output(spec, num_returned, described, tuple(attributes)), leaves


def argument_versions(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> dict[int, int]:
    """Return the version counters of the tensors among a call's arguments, by ``id``."""
    return {id(t): version_of(t) for t in tensors_in(arguments) if not t.is_inference()}


def _describe_leaf(leaf: Any, index_of: dict[int, int], versions: dict[int, int]) -> Leaf:
    is_tensor = isinstance(leaf, torch.Tensor)
    if id(leaf) in index_of and not (is_tensor and versions.get(id(leaf), 0) != _version(leaf)):
        return AliasLeaf(index_of[id(leaf)])
    return TensorLeaf.of(leaf) if is_tensor else ConstLeaf(leaf)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else version_of(tensor)


def _is_atom(value: Any) -> bool:
    return isinstance(value, ATOMS)


class _Recording:
    """One recorded run."""

    def __init__(self, root: nn.Module, units: dict[str, nn.Module]) -> None:
        self.root = root
        self.units = units
        self.tracker = SourceTracker(root)
        self.calls: list[UnitCall] = []
        self.writers: set[str] = set()
        self.without_graph: list[tuple[str, torch.Tensor]] = []
        self.transformed: str | None = None
        self.lengths: set[int] = set()

    def run(self, step: Step, batch: Any, grad: bool, loss_of: Callable[[Any], torch.Tensor | None]) -> StepRecord:
        given, before = fresh_copy(batch), dict(self.root.named_buffers())
        self.tracker.note_batch(tensors_in(given))
        self.lengths = {each.shape[0] for each in tensors_in(given) if each.dim()}
        try:
            with intercepted(self.units, self._call), ReadWatcher(self.tracker), self.tracker:
                result = step(given)
        except RuntimeError as error:
            if _NEW_SUBCLASS not in str(error):
                raise
            raise CannotPipelineError(
                f"The step makes tensors of a class of its own, whose operators cannot be recorded ({error}).",
                ("pardist_ddp", "pardist_zero3", "pardist_tp"),
            ) from error
        if grad:
            self._refuse_reentrant_checkpoints()
        loss = loss_of(result)
        steady, of_samples = self._changed_buffers(before)
        return StepRecord(
            calls=tuple(self.calls),
            parameters=self._parameters(),
            result_needs=self._needs_of_result(result),
            tail_flops=self.tracker.flops,
            reads=tuple(self.tracker.reads),
            mutated=frozenset(self.tracker.mutated),
            unit_names=tuple(self.units),
            dynamic=self.tracker.dynamic,
            grad_enabled=grad,
            loss=None if loss is None or loss.numel() != 1 else float(loss.detach()),
            free_parameters=frozenset(self.tracker.free_parameters),
            steady_buffers=steady,
            sample_buffers=of_samples,
            writers=frozenset(self.writers),
            differentiated=frozenset(self.tracker.differentiated),
            transformed=self.transformed,
        )

    def _call(self, name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tracker, unit = self.tracker, self.units[name]
        self.transformed = self.transformed or (name if in_transform() else None)
        free_flops, versions = tracker.flops, argument_versions((args, kwargs))
        index = tracker.begin_call()
        result = forward(*args, **kwargs)
        needs, flops = tracker.end_call()
        if any(versions.get(key, version) != version for key, version in argument_versions((args, kwargs)).items()):
            self.writers.add(name)
        output, leaves = describe_output(result, (args, kwargs), versions, self._side_outputs(unit, index))
        for position, (described, leaf) in enumerate(zip(output.leaves, leaves, strict=True)):
            if isinstance(described, TensorLeaf):
                tracker.set_value(leaf, Value(index, position))
                if not (described.requires_grad or torch.is_grad_enabled()):
                    self.without_graph.append((name, leaf))
        pairs = zip(output.leaves, leaves, strict=True)
        output = replace(output, leaves=tuple(self._with_origin(each, leaf) for each, leaf in pairs))
        self.calls.append(UnitCall(name, output, needs, flops, free_flops))
        return result

    def _with_origin(self, described: Leaf, leaf: Any) -> Leaf:
        """Set ``of_batch`` of an output's description: whether it depends on samples or may hold a value per sample."""
        if not isinstance(described, TensorLeaf):
            return described
        of_batch = self.tracker.is_from_batch(leaf)
        if not of_batch and not self.lengths.isdisjoint(leaf.shape[: max(1, leaf.dim() - 1)]):
            # A dim of the batch's length: an initial state of zeros has a value per sample, but a tensor computed from
            # the module's own tensors, with as many entries by chance, does not.
            of_batch = leaf.grad_fn is None or not BatchDims(None).is_of_held(leaf.grad_fn)
        return replace(described, of_batch=of_batch)

    def _side_outputs(self, unit: nn.Module, index: int) -> tuple[tuple[str, str, Any], ...]:
        found = []
        for module_name, module in unit.named_modules():
            kept = {k: v for k, v in module.__dict__.items() if k not in ("_parameters", "_buffers", "_modules")}
            for name, value in (*kept.items(), *own_buffers(module).items()):
                if any(Escape(index) in self.tracker.sources(tensor) for tensor in tensors_in(value)):
                    found.append((module_name, name, value))
        return tuple(found)

    def _needs_of_result(self, result: Any) -> frozenset[Source]:
        plain = [leaf for leaf in flatten(result, objects=False)[0] if isinstance(leaf, torch.Tensor)]
        needs: set[Source] = set()
        for tensor in tensors_in(result):
            found = self.tracker.sources(tensor)
            # An object (for instance a key-value cache) may hold internal values of blocks, which need not be returned.
            is_plain = any(tensor is other for other in plain)
            needs |= {source for source in found if is_plain or not isinstance(source, Escape)}
        return frozenset(needs)

    def _changed_buffers(self, before: dict[str, torch.Tensor]) -> tuple[frozenset[str], frozenset[str]]:
        """Return the buffers of units that the run has changed, except those of normalization layers.

        Returns:
            Those in modules none of whose buffers has changed by the batch's values, and those changed by these values.
        """
        changed: dict[str, list[tuple[str, torch.Tensor]]] = {}
        for name, buffer in self.root.named_buffers():
            if name in before and (buffer is not before[name] or self.tracker.is_written(buffer)):
                changed.setdefault(name.rpartition(".")[0], []).append((name, buffer))
        steady: set[str] = set()
        of_samples: set[str] = set()
        for owner, buffers in changed.items():
            # Batch norm's kernels write to running statistics without a schema that shows it.
            if isinstance(self.root.get_submodule(owner), NormBase):
                continue
            if not any(owner == unit or owner.startswith(f"{unit}.") for unit in self.units):
                continue
            by_values = {name for name, buffer in buffers if self.tracker.is_from_batch(buffer)}
            of_samples |= by_values
            steady |= set() if by_values else {name for name, _ in buffers}
        return frozenset(steady), frozenset(of_samples)

    def _refuse_reentrant_checkpoints(self) -> None:
        for name, tensor in self.without_graph:
            # Skip leaves: user code sets requires_grad on inputs of frozen layers.
            if tensor.grad_fn is not None:
                raise CannotPipelineError(
                    f"Unit {name!r} runs inside torch.utils.checkpoint with use_reentrant=True, which hides its"
                    " autograd graph. Pass use_reentrant=False."
                )

    def _parameters(self) -> dict[str, ParameterInfo]:
        names: dict[int, list[str]] = {}
        tensors: dict[int, nn.Parameter] = {}
        for name, parameter in self.root.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
            tensors[id(parameter)] = parameter
        owner = {id(p): unit_name for unit_name, unit in reversed(self.units.items()) for p in unit.parameters()}
        return {
            own[0]: ParameterInfo(
                tuple(own),
                tuple(tensors[key].shape),
                tensors[key].numel() * tensors[key].element_size(),
                owner.get(key),
            )
            for key, own in names.items()
        }

    def refined_grain(self, grain: Grain, recorded: StepRecord) -> Grain:
        """Return the grain with the corrections that this run suggests."""
        better = self._merge_uncalled_units(grain, recorded)
        better = self._make_buffer_owners_units(better)
        return better if better != grain else self._split_leaking_blocks(grain, recorded)

    def _merge_uncalled_units(self, grain: Grain, recorded: StepRecord) -> Grain:
        """Handle a unit whose weights are used without calling it: make its parent the unit, or split the unit."""
        called = {call.unit for call in recorded.calls}
        for name, unit in self.units.items():
            read = any(
                info.unit == name and first in recorded.free_parameters for first, info in recorded.parameters.items()
            )
            if name in called or not read:
                continue
            above = name.rpartition(".")[0]
            owner = self.root.get_submodule(above)
            owns = next(owner.parameters(recurse=False), None) is not None
            if above and owns and above not in grain.whole and above not in grain.opened:
                return grain.take_whole(above)
            if name not in grain.shut and (can_open(unit) or name in grain.whole):
                return grain.open(name)
        return grain

    def _make_buffer_owners_units(self, grain: Grain) -> Grain:
        """Make every module outside of units that updates its own buffers a unit: only one stage may run it."""
        written = self.tracker.buffers_written
        for name, module in self.root.named_modules():
            inside = any(name == unit or name.startswith(f"{unit}.") for unit in self.units)
            above = any(unit.startswith(f"{name}.") for unit in self.units)
            keys = {self.tracker.storage_of(buffer) for buffer in module.buffers(recurse=False)}
            if name and keys & written and not inside and not above and name not in grain.whole | grain.opened:
                grain = grain.take_whole(name)
        return grain

    def _split_leaking_blocks(self, grain: Grain, recorded: StepRecord) -> Grain:
        """Split a block that passes values out other than by its outputs, so that they become outputs of a layer."""
        readers = [call.needs for call in recorded.calls] + [read.needs for read in recorded.reads]
        leaky = {s.call for needs in (*readers, recorded.result_needs) for s in needs if isinstance(s, Escape)}
        for index in sorted(leaky):
            name = recorded.calls[index].unit
            if can_open(self.units[name]) and name not in grain.opened | grain.shut:
                grain = grain.open(name)
        return grain
