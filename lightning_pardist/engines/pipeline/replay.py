"""Run the user's own step as one stage: earlier stages' units are stubs, and the run ends after the stage's last unit.

A stub returns the outputs of the unit's real run: those that this stage needs are the received tensors, all others are
``FakeTensor`` instances of the same shape, dtype and device. Free code may compute with fake tensors (masks, residual
sums that are not used) at no memory cost; reading their values, or sending what is computed from them to another stage,
raises an error.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

from lightning_pardist.compat import patches
from lightning_pardist.compat.fake_tensors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from lightning_pardist.compat.modules import own_buffers, own_parameters
from lightning_pardist.engines.common.devices import seed_generators
from lightning_pardist.engines.common.own_generators import seed_all
from lightning_pardist.engines.pipeline.errors import ALTERNATIVES, CannotPipelineError
from lightning_pardist.engines.pipeline.interception import intercepted
from lightning_pardist.engines.pipeline.nested import flatten, rebuild
from lightning_pardist.engines.pipeline.records import AliasLeaf, ConstLeaf, Leaf, Output, TensorLeaf, Value
from lightning_pardist.engines.pipeline.stage_plan import PipelinePlan
from lightning_pardist.engines.pipeline.step_record import argument_versions, describe_output
from lightning_pardist.engines.pipeline.stubs import StubMode


class _CutOffError(BaseException):
    """Ends a stage's run; derived from ``BaseException``, so that no ``except Exception`` in user code catches it."""


@dataclass
class StageRun:
    """Result of one run of a stage.

    Attributes:
        values: Outputs of this stage's calls that later stages need, attached to the autograd graph.
        outputs: Descriptions of all calls up to the end of the stage, for the next stage's stubs.
        result: The step's result, on the last stage.
        left_out: Whether the step returned before it called the model.
    """

    values: dict[Value, torch.Tensor] = field(default_factory=dict)
    outputs: list[Output] = field(default_factory=list)
    result: Any = None
    left_out: bool = False


@dataclass(frozen=True)
class TensorParts:
    """Conversion between tensors that are split over the ranks of a stage and their local parts (TP and CP).

    Attributes:
        take: Returns this rank's part of a tensor, and a picklable description of the split; None for a whole tensor.
        join: Returns the split tensor, given its part from the same rank of another stage, and the description.
    """

    take: Callable[[torch.Tensor], tuple[torch.Tensor, Any]] = lambda tensor: (tensor, None)
    join: Callable[[torch.Tensor, Any], torch.Tensor] = lambda part, split: part


#: For stages whose ranks hold whole tensors only.
WHOLE = TensorParts()


class StageReplay:
    """Runs stages of one plan on one module. Not collective.

    Args:
        root: The root module; only the parameters of the stages that are run have to be present.
        plan: The plan.
        device: Device of stubs that were recorded on a device of the same type or on the CPU.
        parts: Conversion of split tensors to and from this rank's part.

    Attributes:
        units: The plan's units by name.
        microbatch_index: Index of the current micro-batch; set by the caller.
        generators: Random number generators that the module holds, seeded like torch's own; set by the caller.
    """

    def __init__(
        self,
        root: nn.Module,
        plan: PipelinePlan,
        device: torch.device | None = None,
        *,
        parts: TensorParts = WHOLE,
    ) -> None:
        self.root = root
        self.parts = parts
        self.plan = plan
        self.units = {name: root.get_submodule(name) for name in plan.trace.unit_names}
        self.device = device
        self.stubs = StubMode()
        self._kept_stubs: dict[tuple[TensorLeaf, bool], torch.Tensor] = {}
        self.microbatch_index = 0
        self._parameter_stubs: dict[nn.Parameter, nn.Parameter] = {}
        self.generators: list[Any] = []
        self.needed = {value for sent in plan.sent for value in sent}

    def run(
        self,
        stage_index: int,
        step: Callable[[Any], Any],
        microbatch: Any,
        received: Mapping[Value, torch.Tensor],
        outputs: list[Output],
        *,
        seed: int | None = None,
    ) -> StageRun:
        """Run one stage on one micro-batch.

        Args:
            stage_index: Index of the stage.
            step: The user's step.
            microbatch: Argument of the step.
            received: Values from earlier stages.
            outputs: Descriptions of the earlier stages' calls for this micro-batch.
            seed: Random seed of this micro-batch, the same on every stage, so that free code draws the same dropout
                masks on all stages; None does not seed the generators.

        Raises:
            CannotPipelineError: If the step reads the value of a stub, calls its units in another order than the
                recorded run, or passes a stub to a unit whose output is sent.
        """
        return _Run(self, stage_index, received, list(outputs), seed).go(step, microbatch)

    @contextlib.contextmanager
    def stub_parameters(self) -> Iterator[None]:
        """Replace freed parameters (on meta) by stubs on this rank's device while steps run."""
        swapped: list[tuple[nn.Module, str, nn.Parameter]] = []
        for module in self.root.modules():
            for name, parameter in own_parameters(module).items():
                if parameter is not None and parameter.is_meta:
                    swapped.append((module, name, parameter))
        known, self._parameter_stubs = self._parameter_stubs, {}
        for module, name, parameter in swapped:
            stub = self._parameter_stubs.get(parameter, known.get(parameter))
            if stub is None or stub.requires_grad != parameter.requires_grad:
                shape, stride = tuple(parameter.shape), tuple(parameter.stride())
                stub = nn.Parameter(self._stub(shape, stride, parameter.dtype, "cpu"), parameter.requires_grad)
            own_parameters(module)[name] = self._parameter_stubs[parameter] = stub
        before = {parameter: parameter.requires_grad for parameter in self._parameter_stubs}
        try:
            yield
        finally:
            for module, name, parameter in swapped:
                own_parameters(module)[name] = parameter
            for parameter, stub in self._parameter_stubs.items():
                # The step may have frozen or unfrozen the stub.
                if stub.requires_grad != before[parameter]:
                    parameter.requires_grad_(stub.requires_grad)

    def stub_of(self, leaf: TensorLeaf, *, overwritten: bool = False) -> torch.Tensor:
        """Return a stub with a leaf's shape and dtype.

        Args:
            leaf: The recorded tensor.
            overwritten: Whether free code writes to it in place: a clone is returned, since autograd forbids in-place
                writes to leaves that require grad.
        """
        key = (leaf, torch.is_grad_enabled())
        stub = self._kept_stubs.get(key)
        if stub is None:
            stub = self._stub(leaf.shape, leaf.stride, leaf.dtype, leaf.device_type)
            self._kept_stubs[key] = stub.requires_grad_(leaf.requires_grad and torch.is_grad_enabled())
        return stub.clone() if overwritten else stub

    def _stub(
        self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device_type: str
    ) -> torch.Tensor:
        same = self.device is not None and device_type in (self.device.type, "cpu")
        device = self.device if same and self.device is not None else torch.device(device_type)
        return self.stubs.stub(shape, stride, dtype, device)


class _Run:
    """One run of one stage on one micro-batch."""

    def __init__(
        self,
        replay: StageReplay,
        stage_index: int,
        received: Mapping[Value, torch.Tensor],
        outputs: list[Output],
        seed: int | None,
    ) -> None:
        self.replay = replay
        self.plan = replay.plan
        self.calls = self.plan.calls_of(stage_index)
        self.stage_index = stage_index
        self.is_last = stage_index == self.plan.num_stages - 1
        self.received = received
        self.done = StageRun(outputs=outputs)
        self.seed = seed
        self.position = 0
        self.cut = False
        self.again = False
        self.set_attributes: list[tuple[nn.Module, str, Any]] = []

    def go(self, step: Callable[[Any], Any], microbatch: Any) -> StageRun:
        if not self.calls and not self.is_last:
            return self.done
        self._reseed(0)
        try:
            return self._go(step, microbatch)
        finally:
            for owner, name, value in reversed(self.set_attributes):
                set_attribute(owner, name, value)

    def _go(self, step: Callable[[Any], Any], microbatch: Any) -> StageRun:
        try:
            with intercepted(self.replay.units, self._call), self._rerunnable(), patches.keep_unchanged_parameters():
                self.done.result = step(microbatch)
        except _CutOffError:
            return self.done
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise self._value_read_error(error) from error
        except (RuntimeError, TypeError) as error:
            if _is_about_stubs(error):
                raise self._value_read_error(error) from error
            raise
        if self.cut:
            raise CannotPipelineError(
                "The step catches BaseException around the model's call, but a stage ends by an exception there. Catch"
                " Exception instead."
            )
        if not self.position and self.plan.trace.calls:
            self._handle_early_return()
        elif not self.is_last or self.position < len(self.plan.trace.calls):
            raise self._call_order_error("returned")
        return self.done

    def _handle_early_return(self) -> None:
        """Handle a step that returned before it called the model, on every stage: send empty tensors without grad."""
        self.done.left_out = True
        for index in self.calls:
            recorded = self.plan.trace.calls[index].output
            leaves = (
                replace(leaf, requires_grad=False) if isinstance(leaf, TensorLeaf) else leaf for leaf in recorded.leaves
            )
            self.done.outputs.append(replace(recorded, leaves=tuple(leaves)))
        device = self.replay.device or torch.device("cpu")
        for value in self.replay.needed:
            if value.call in self.calls:
                self.done.values[value] = torch.empty(0, device=device)

    @contextlib.contextmanager
    def _rerunnable(self) -> Iterator[None]:
        """Use the same stubs when activation checkpointing recomputes a part of the step in backward."""
        with patches.recomputed_functions(self._rerun):
            yield

    def _rerun(self, function: Callable[..., Any]) -> Callable[..., Any]:
        position = self.position

        def run_again(*args: Any, **kwargs: Any) -> Any:
            run = _Run(self.replay, self.stage_index, self.received, self.done.outputs, self.seed)
            run.position, run.again = position, True
            with intercepted(self.replay.units, run._call):
                return function(*args, **kwargs)

        return run_again

    def _call(self, name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        index, calls = self.position, self.plan.trace.calls
        if self.cut:
            raise _CutOffError
        if index >= len(calls) or calls[index].unit != name:
            raise self._call_order_error(f"called {name!r}")
        self.position += 1
        if index < self.calls.start:
            result = self._stub(index, args, kwargs)
            self._reseed(2 * index + 2)
            return result
        self._reseed(2 * index + 1)
        if self.again:
            result = forward(*args, **kwargs)
        else:
            result = self._run_unit(index, name, forward, args, kwargs)
        if index == self.calls.stop - 1 and not self.is_last:
            # End the run here, before free code can overwrite the values to be sent in place.
            self.cut = True
            raise patches.StopRecomputation if self.again else _CutOffError
        self._reseed(2 * index + 2)
        return result

    def _run_unit(
        self, index: int, name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        recorded = self.plan.trace.calls[index].output
        versions = argument_versions((args, kwargs))
        result = forward(*args, **kwargs)
        unit = self.replay.units[name]
        side = tuple((a.module, a.name, attribute_of(unit, a.module, a.name)) for a in recorded.side)
        output, leaves = describe_output(result, (args, kwargs), versions, side)
        output, leaves = self._in_parts(output, leaves)
        self.done.outputs.append(output)
        for position, leaf in enumerate(leaves):
            value = Value(index, position)
            if value not in self.replay.needed:
                continue
            if not isinstance(leaf, torch.Tensor):
                raise self._call_order_error(f"got {type(leaf).__name__} as output {position} of {name!r}")
            if isinstance(leaf, FakeTensor):
                raise CannotPipelineError(
                    f"{name!r} in stage {self.stage_index} uses a value that it did not use in the recorded run, and"
                    " that was therefore not sent. Record a run on a batch that takes the same path through the code."
                )
            self.done.values[value] = leaf.clone() if value in self.plan.trace.mutated else leaf
        return result

    def _in_parts(self, output: Output, leaves: list[Any]) -> tuple[Output, list[Any]]:
        """Replace split tensors by this rank's parts, which are sent to the same rank of the next stage."""
        splits: dict[int, TensorLeaf] = {}
        own = list(leaves)
        for position, (leaf, tensor) in enumerate(zip(output.leaves, leaves, strict=True)):
            if isinstance(leaf, TensorLeaf):
                own[position], split = self.replay.parts.take(tensor)
                if split is not None:
                    splits[position] = leaf.split_by(split)
        if splits:
            described = (splits.get(position, leaf) for position, leaf in enumerate(output.leaves))
            output = replace(output, leaves=tuple(described))
        return output, own

    def _stub(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = self.done.outputs[index]
        inputs: list[Any] | None = None
        leaves: list[Any] = []
        for position, leaf in enumerate(output.leaves):
            if isinstance(leaf, AliasLeaf):
                inputs = inputs if inputs is not None else flatten((args, kwargs), objects=False)[0]
                leaves.append(inputs[leaf.index])
            else:
                leaves.append(self._stub_leaf(Value(index, position), leaf))
        unit = self.replay.units[self.plan.trace.calls[index].unit]
        rest = leaves[output.num_returned :]
        for attribute in output.side:
            mine, rest = rest[: attribute.num_leaves], rest[attribute.num_leaves :]
            owner = unit.get_submodule(attribute.module)
            self.set_attributes.append((owner, attribute.name, attribute_of(unit, attribute.module, attribute.name)))
            set_attribute(owner, attribute.name, rebuild(attribute.spec, mine))
        return rebuild(output.spec, leaves[: output.num_returned])

    def _stub_leaf(self, value: Value, leaf: Leaf) -> Any:
        if isinstance(leaf, ConstLeaf):
            return leaf.value
        tensor = self.received.get(value)
        if tensor is None:
            overwritten = value in self.plan.trace.mutated
            return self.replay.stub_of(leaf, overwritten=overwritten) if isinstance(leaf, TensorLeaf) else None
        if value in self.plan.trace.mutated:
            # Autograd forbids in-place operators on a leaf that requires grad.
            tensor = tensor.clone()
        split = leaf.split if isinstance(leaf, TensorLeaf) else None
        return tensor if split is None else self.replay.parts.join(tensor, split)

    def _reseed(self, position: int) -> None:
        if self.seed is not None:
            seed = zlib.crc32(f"{self.seed}:{position}".encode())
            seed_generators(seed, torch.device("cpu") if self.replay.device is None else self.replay.device)
            seed_all(self.replay.generators, seed)

    def _call_order_error(self, what: str) -> CannotPipelineError:
        calls = self.plan.trace.calls
        expected = repr(calls[self.position].unit) if self.position < len(calls) else "no further unit"
        return CannotPipelineError(
            f"The step {what} after {self.position} calls of units, where the recorded run had {expected}: what it"
            " calls depends on the data or changes from step to step, so that no fixed stages exist.",
            ALTERNATIVES,
        )

    def _value_read_error(self, error: Exception) -> CannotPipelineError:
        after = repr(self.plan.trace.calls[self.position - 1].unit) if self.position else "the beginning of the step"
        return CannotPipelineError(
            f"After {after}, code between units reads the value of a tensor that is on another stage ({error}), found"
            f" in stage {self.stage_index}. Data-dependent control flow between units cannot be split.",
            ("pardist_mp", *ALTERNATIVES),
        )


def _is_about_stubs(error: Exception) -> bool:
    text = str(error)
    return any(part in text for part in _STUB_WORDS)


#: Words in torch's messages about operators that cannot take fake tensors.
_STUB_WORDS = ("StubTensor", "FakeTensor", "fake tensor", "tensor subclasses", "Meta tensors", "meta tensor")


def attribute_of(unit: nn.Module, module: str, name: str) -> Any:
    """Return a buffer or other attribute of a module inside a unit; None if it does not exist."""
    owner = unit.get_submodule(module)
    return own_buffers(owner)[name] if name in own_buffers(owner) else owner.__dict__.get(name)


def set_attribute(owner: nn.Module, name: str, value: Any) -> None:
    """Set a buffer or other attribute without ``nn.Module.__setattr__``."""
    if name in own_buffers(owner):
        own_buffers(owner)[name] = value
    else:
        owner.__dict__[name] = value


def contains_stub(value: Any) -> bool:
    """Return whether a nested value contains a stub."""
    return any(isinstance(leaf, FakeTensor) for leaf in flatten(value)[0])
