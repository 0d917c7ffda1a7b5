"""Module calls without a schedule: outside of steps, and in steps that cannot be cut into stages.

No rank holds all parameters. Every rank runs the user's code, and each unit is run by the rank that holds it, which
broadcasts the result (owner computes). Control flow is unrestricted, and every rank gets the result; the cost is one
broadcast per unit call, and every rank has to make the same calls. For gradients, see :mod:`.owner_regions`.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_pardist.compat.fake_tensors import FakeTensor
from lightning_pardist.compat.modules import own_parameters
from lightning_pardist.compat.tensors import version_of
from lightning_pardist.engines.common.devices import RandomState, is_same_state, random_state, set_random_state
from lightning_pardist.engines.pipeline.errors import CannotPipelineError, PipelineTimeoutError
from lightning_pardist.engines.pipeline.nested import Spec, flatten, follow, rebuild, replace_leaves
from lightning_pardist.engines.pipeline.owner_regions import OwnerRegion, RegionChannel, RegionFailure
from lightning_pardist.engines.pipeline.placement import Placement
from lightning_pardist.engines.pipeline.replay import StageReplay, attribute_of, set_attribute
from lightning_pardist.local_tensors import gather_over_data

_TIMEOUT = re.compile("timeout|timed out|connection|closed", re.IGNORECASE)


class OutOfScheduleForward:
    """Replacement ``forward``s for a module whose parameters are distributed over ranks.

    Active from :meth:`install` until :meth:`remove`.

    Args:
        placement: Placement of the parameters and units.
        device: Device of this rank's tensors.
        group: A process group of the pipeline's ranks, used only for calls outside of steps: a call that other ranks
            do not make ends with the group's timeout, and cannot match another collective.
        step_group: Process group for calls in steps, which all ranks run; ``group`` by default.
        whole: Converts a unit's result to tensors that another rank can use unchanged.
    """

    def __init__(
        self,
        placement: Placement,
        device: torch.device,
        group: dist.ProcessGroup,
        *,
        step_group: dist.ProcessGroup | None = None,
        whole: Callable[[Any], Any] = lambda value: value,
    ) -> None:
        self.placement = placement
        self.device = device
        self.group = group
        self.whole = whole
        self._outside = RegionChannel(group, device)
        self._in_steps = RegionChannel(step_group or group, device)
        self._channel = self._outside
        self._inside = False
        self._patched: list[nn.Module] = []
        self._borrowed: dict[nn.Parameter, nn.Parameter] = {}
        self._has_borrowed = False
        self._own: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._side: dict[str, list[tuple[str, str]]] = {}
        for call in placement.plan.trace.calls:
            found = self._side.setdefault(call.unit, [])
            found += [place for a in call.output.side if (place := (a.module, a.name)) not in found]

    def install(self) -> None:
        """Replace the ``forward`` of the root and of all units. Not collective."""
        root = self.placement.module
        for name in self.placement.plan.trace.unit_names:
            self._patch(root.get_submodule(name), name)
        self._patch(root, None)

    def remove(self) -> None:
        """Restore the module's own parameters and ``forward``s. Not collective."""
        self._release_borrowed()
        for module in self._patched:
            answer = module.__dict__.pop("forward")
            if answer.had:
                module.__dict__["forward"] = answer.forward
        self._patched.clear()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Pass calls inside straight to the module, while a step runs as stages."""
        before, self._inside = self._inside, True
        self._release_borrowed()
        try:
            yield
        finally:
            self._inside = before

    @contextmanager
    def for_a_step(self, replay: StageReplay) -> Iterator[None]:
        """Run a whole step inside, with stubs on this rank's device for parameters of other ranks.

        Collective over the pipeline.

        Args:
            replay: Replay of the pipeline's stages, which provides the stubs.
        """
        before, self._channel = self._channel, self._in_steps
        try:
            if not self._inside:
                # Drop borrowed values: optimizers may have stepped since the last step.
                self._release_borrowed()
            own = self._tables()
            if not self._inside:
                self._borrow()
            with replay.stub_parameters():
                self._own = own
                yield
        finally:
            self._channel, self._own = before, []

    @contextmanager
    def own_parameters(self) -> Iterator[None]:
        """Show the module's parameters as outside of steps, inside :meth:`for_a_step`. Not collective."""
        shown = [(table, dict(table)) for table, _ in self._own]
        for table, own in self._own:
            table.update(own)
        try:
            yield
        finally:
            for table, others in shown:
                table.update(others)

    def renew(self) -> None:
        """Fetch borrowed parameters again after an optimizer step inside of a step. Collective in that case."""
        if self._has_borrowed and self._channel is self._in_steps:
            self._fetch()

    def call(self, name: str | None, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one unit, or the root (None), for all ranks. Collective over the pipeline unless suspended."""
        if self._inside:
            return forward(*args, **kwargs)
        with self._explained_timeouts(name):
            self._borrow()
        if name is None:
            return forward(*args, **kwargs)
        self._inside = True
        try:
            with self._explained_timeouts(name):
                return self._run_for_all_ranks(name, forward, (args, kwargs))
        finally:
            self._inside = False

    @contextmanager
    def _explained_timeouts(self, name: str | None) -> Iterator[None]:
        """Context that names the cause of a timeout outside of steps.

        Args:
            name: Name of the unit that is called; None for the root.

        Raises:
            PipelineTimeoutError: If a collective times out.
        """
        try:
            yield
        except (RuntimeError, TimeoutError) as error:
            if self._channel is not self._outside or not _TIMEOUT.search(str(error)):
                raise
            raise PipelineTimeoutError(
                f"{'The module' if name is None else repr(name)} was called outside of a step, and not by every rank of"
                " the pipeline. Its parameters lie on several ranks: call the module on all of them, not on the first"
                " one alone."
            ) from error

    def _run_for_all_ranks(
        self, name: str, forward: Callable[..., Any], arguments: tuple[tuple[Any, ...], dict[str, Any]]
    ) -> Any:
        region = OwnerRegion(self._channel, self.placement.unit_owner(name))
        outer = flatten(arguments)[0]
        if any(isinstance(leaf, FakeTensor) for leaf in outer):
            raise CannotPipelineError(
                f"{name!r} was called with a value computed from a parameter that another rank holds. No recorded step"
                " read this parameter outside of its layer."
            )
        differentiable = torch.is_grad_enabled()
        wanted = [i for i, leaf in enumerate(outer) if differentiable and _requires_grad(leaf)]
        token, inside = region.enter([outer[i] for i in wanted])
        done = _Done()
        if region.is_owner:
            given, inner = arguments, list(outer)
            for index, tensor in zip(wanted, inside, strict=True):
                inner[index] = tensor
            if name in self.placement.plan.trace.writers:
                # Autograd may save what the unit writes to; :meth:`_apply_message` writes to the caller's tensors.
                inner = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in inner]
            if any(a is not b for a, b in zip(inner, outer, strict=True)):
                given = replace_leaves(arguments, inner)
            try:
                done = self._run(name, forward, given, inner)
            except Exception as error:
                said = f"{name!r} failed on rank {region.owner} of the pipeline: {type(error).__name__}: {error}"
                region.leave(token, [], RegionFailure(said))
                raise
        message, outputs = region.leave(token, done.outputs, done.message)
        return self._apply_message(name, message, outputs, arguments, outer)

    def _run(self, name: str, forward: Callable[..., Any], given: Any, inner: list[Any]) -> _Done:
        """Run the unit's own forward on its owner, and pack its result and side effects."""
        versions = [_version(leaf) for leaf in inner]
        random_before = random_state(self.device)
        result = self.whole(forward(*given[0], **given[1]))
        random_now = random_state(self.device)
        done = _Done()
        index_of = {id(leaf): index for index, leaf in enumerate(inner)}
        written = [index for index, leaf in enumerate(inner) if _version(leaf) != versions[index]]
        after = flatten(given)[0]
        is_changed = len(after) != len(inner) or any(a is not b for a, b in zip(inner, after, strict=True))
        unit = self.placement.module.get_submodule(name)
        side = [(place, attribute_of(unit, *place)) for place in self._side.get(name, ())]
        done.message = _Message(
            result=done.packed(result, index_of),
            # Containers changed in place, for instance a key-value cache, are updated on the other ranks as well.
            arguments=done.packed(given, index_of) if is_changed else None,
            side=[(place, done.packed(value, index_of)) for place, value in side],
            written=[(index, done.add(inner[index])) for index in written],
            random=None if is_same_state(random_before, random_now) else random_now,
        )
        return done

    def _apply_message(
        self, name: str, message: _Message, outputs: Sequence[Tensor], arguments: Any, outer: list[Any]
    ) -> Any:
        """Apply the unit's side effects on this rank, and return its result."""
        for index, position in message.written:
            outer[index].copy_(outputs[position])
        if message.arguments is not None:
            follow(arguments, message.arguments.unpacked(outer, outputs))
        unit = self.placement.module.get_submodule(name)
        for place, value in message.side:
            set_attribute(unit.get_submodule(place[0]), place[1], value.unpacked(outer, outputs))
        if message.random is not None:
            set_random_state(message.random, self.device)
        return message.result.unpacked(outer, outputs)

    # --- parameters that free code reads ------------------------------------------------------------------------

    def _borrow(self) -> None:
        """Fetch the parameters that free code reads; they are small, and released when the next step begins."""
        if self._has_borrowed:
            return
        self._has_borrowed = True
        placement = self.placement
        own = dict(placement.module.named_parameters())
        for name in self._read_by_free_code():
            parameter = own[name]
            if parameter.is_meta:
                data = torch.empty(parameter.shape, dtype=parameter.dtype, device=self.device)
                whole = nn.Parameter(data, parameter.requires_grad)
                self._borrowed[whole] = parameter
                parameter.__dict__["borrowed"] = whole
        self._swap({stand_in: whole for whole, stand_in in self._borrowed.items()})
        self._fetch()

    def _read_by_free_code(self) -> list[str]:
        recorded = self.placement.plan.trace
        wanted = [n for n, info in recorded.parameters.items() if info.unit is None or n in recorded.free_parameters]
        return [name for name in wanted if len(self.placement.holders[name]) < self.group.size()]

    def _fetch(self) -> None:
        own = dict(self.placement.module.named_parameters())
        for name in self._read_by_free_code():
            # Its holders may have shards of it: they gather it, and keep their shards.
            held: Tensor = own[name]
            whole = gather_over_data(held) if isinstance(held, DTensor) else held
            self.placement.broadcast(whole, self.placement.holders[name][0], self._channel.group)
            own[name].grad = own[name].grad if own[name] not in self._borrowed else None

    def _release_borrowed(self) -> None:
        borrowed, self._borrowed, self._has_borrowed = self._borrowed, {}, False
        for whole, stand_in in borrowed.items():
            stand_in.__dict__.pop("borrowed", None)
            stand_in.requires_grad_(whole.requires_grad)
        self._swap(borrowed)

    def _tables(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Return every module's dict of parameters, with a copy of it."""
        return [(own_parameters(module), dict(own_parameters(module))) for module in self.placement.module.modules()]

    def _swap(self, others: dict[nn.Parameter, nn.Parameter]) -> None:
        if not others:
            return
        for module in self.placement.module.modules():
            for name, parameter in own_parameters(module).items():
                if parameter in others:
                    own_parameters(module)[name] = others[parameter]

    def _patch(self, module: nn.Module, name: str | None) -> None:
        answer = _ReplacedForward(self, name, module)
        # Set on the instance, bypassing nn.Module.__setattr__: the class and the state dict do not change.
        module.__dict__["forward"] = answer
        self._patched.append(module)


@dataclass(frozen=True)
class _Given:
    """Placeholder in a packed value for one of the call's own argument leaves."""

    index: int


@dataclass(frozen=True)
class _Made:
    """Placeholder in a packed value for a tensor among the call's broadcast outputs."""

    position: int


@dataclass(frozen=True)
class _Packed:
    """A nested value with placeholders for its tensors and for the call's arguments."""

    spec: Spec
    leaves: list[Any]

    def unpacked(self, arguments: Sequence[Any], outputs: Sequence[Tensor]) -> Any:
        """Rebuild the value from this rank's arguments and the received tensors."""
        places: dict[type, Callable[[Any], Any]] = {
            _Given: lambda leaf: arguments[leaf.index],
            _Made: lambda leaf: outputs[leaf.position],
        }
        return rebuild(self.spec, [places.get(type(leaf), _same)(leaf) for leaf in self.leaves])


@dataclass(frozen=True)
class _Message:
    """Result and side effects of a unit's call, broadcast by its owner.

    Attributes:
        result: The return value.
        arguments: The arguments after the call; None if their containers are unchanged.
        side: Values that the call left in attributes of the unit, by (module, attribute).
        written: Arguments that the call wrote to in place: (index of the argument, position of its new value).
        random: States of the random number generators after the call; None if it drew no random numbers.
    """

    result: _Packed
    arguments: _Packed | None
    side: list[tuple[tuple[str, str], _Packed]]
    written: list[tuple[int, int]]
    random: RandomState | None


class _Done:
    """A call's message and the tensors that are broadcast with it."""

    def __init__(self) -> None:
        self.message: Any = None
        self.outputs: list[Tensor] = []

    def add(self, tensor: Tensor) -> int:
        """Add a tensor to the outputs and return its position."""
        self.outputs.append(tensor)
        return len(self.outputs) - 1

    def packed(self, value: Any, index_of: dict[int, int]) -> _Packed:
        """Pack a value: tensors are added to the outputs, the call's arguments are referred to by index."""
        leaves, spec = flatten(value)
        return _Packed(spec, [self._packed_leaf(leaf, index_of) for leaf in leaves])

    def _packed_leaf(self, leaf: Any, index_of: dict[int, int]) -> Any:
        if id(leaf) in index_of:
            return _Given(index_of[id(leaf)])
        return _Made(self.add(leaf)) if isinstance(leaf, Tensor) else leaf


def _same(leaf: Any) -> Any:
    return leaf


def _requires_grad(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _version(leaf: Any) -> int:
    return version_of(leaf) if isinstance(leaf, Tensor) and not leaf.is_inference() else 0


class _ReplacedForward:
    """Replacement for a module's ``forward``; a copied or unpickled module gets its class's ``forward`` back."""

    def __init__(self, calls: OutOfScheduleForward, name: str | None, module: nn.Module) -> None:
        self.calls = calls
        self.name = name
        self.module = module
        self.had = "forward" in module.__dict__
        self.forward = module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.calls.call(self.name, self.forward, args, kwargs)

    def __reduce__(self) -> Any:
        return _plain_forward, (self.module,)


def _plain_forward(module: nn.Module) -> Callable[..., Any]:
    return types.MethodType(type(module).forward, module)
