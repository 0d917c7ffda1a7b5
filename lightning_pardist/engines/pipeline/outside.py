"""The module called outside of steps, where no schedule runs: to print a sample when training ends, say.

No rank has all parameters then. Every rank runs the user's code, and each unit is run by the rank that holds it, which
tells the others what came out. So control flow is free, and every rank has the answer; it costs a broadcast a unit, and
every rank has to make the same calls.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_pardist.engines.pipeline.errors import PipelineTimeoutError
from lightning_pardist.engines.pipeline.placement import Placement
from lightning_pardist.engines.pipeline.replay import StageReplay
from lightning_pardist.engines.pipeline.structure import flatten, follow, map_leaves, rebuild


class OutsideCalls:
    """Answers calls of a module whose parameters lie on several ranks. From :meth:`install` until :meth:`remove`.

    Gradients do not flow through the answers.

    Args:
        placement: Who holds what.
        device: Device of this rank's tensors.
        group: A process group of the pipeline's ranks used for nothing else, so that a rank that calls alone waits for
            the others no longer than the group's timeout, and cannot meet them in something else.
    """

    def __init__(self, placement: Placement, device: torch.device, group: dist.ProcessGroup) -> None:
        self.placement = placement
        self.device = device
        self.group = group
        self._inside = False
        self._patched: list[nn.Module] = []
        self._borrowed: dict[nn.Parameter, nn.Parameter] = {}
        self._has_borrowed = False

    def install(self) -> None:
        """Answer calls from now on. Not collective."""
        root = self.placement.module
        for name in self.placement.plan.trace.unit_names:
            self._patch(root.get_submodule(name), name)
        self._patch(root, None)

    def remove(self) -> None:
        """Leave the module as it was. Not collective."""
        self._give_back()
        for module in self._patched:
            answer = module.__dict__.pop("forward")
            if answer.had:
                module.__dict__["forward"] = answer.forward
        self._patched.clear()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside, calls go straight to the module: a step runs."""
        before, self._inside = self._inside, True
        self._give_back()
        try:
            yield
        finally:
            self._inside = before

    @contextmanager
    def for_a_step(self, replay: StageReplay) -> Iterator[None]:
        """Inside, a whole step runs: parameters of other ranks pretend to live on this rank's device.

        Collective over the pipeline.

        Args:
            replay: Of the pipeline's stages.
        """
        if not self._inside:
            self._borrow()
        with replay.stub_parameters():
            yield

    def call(self, name: str | None, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one unit, or the root (None), for all ranks. Collective over the pipeline, outside of steps."""
        if self._inside:
            return forward(*args, **kwargs)
        self._borrow()
        if name is None:
            return forward(*args, **kwargs)
        self._inside = True
        try:
            return self._answer(name, forward, args, kwargs)
        finally:
            self._inside = False

    def _answer(self, name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        owner = self.placement.unit_owner(name)
        before = flatten((args, kwargs))[0]
        if self.placement.rank != owner:
            result, changed = self._told(None, owner, name)
            if changed is not None:
                spec, leaves = changed
                follow((args, kwargs), rebuild(spec, [before[x.index] if type(x) is _Kept else x for x in leaves]))
            return result
        failure: BaseException | None = None
        result = changed = None
        try:
            result = map_leaves(_detached, forward(*args, **kwargs))
            after, spec = flatten((args, kwargs))
            if len(before) != len(after) or any(a is not b for a, b in zip(before, after, strict=True)):
                # A cache of keys and values, say: the others' are given what is new in it.
                index_of = {id(leaf): index for index, leaf in enumerate(before)}
                changed = spec, [_Kept(index_of[id(x)]) if id(x) in index_of else _detached(x) for x in after]
        except Exception as error:
            failure = error
        said = None if failure is None else f"{type(failure).__name__}: {failure}"
        self._told(((result, changed), said), owner, name)
        if failure is not None:
            raise failure
        return result

    def _told(self, answer: Any, owner: int, name: str) -> Any:
        box = [map_leaves(_in_host_memory, answer)]
        try:
            dist.broadcast_object_list(box, src=dist.get_global_rank(self.group, owner), group=self.group)
        except RuntimeError as error:
            raise PipelineTimeoutError(
                f"{name!r} was called outside of a step, and not by every rank of the pipeline. Its parameters lie on"
                " several ranks: call the module on all of them, not on the first one alone."
            ) from error
        result, failure = map_leaves(self._on_device, box[0])
        if failure is not None and self.placement.rank != owner:
            raise RuntimeError(f"{name!r} failed on rank {owner} of the pipeline: {failure}")
        return result

    def _on_device(self, value: Any) -> Any:
        return value.to(self.device) if isinstance(value, torch.Tensor) else value

    def _borrow(self) -> None:
        """Fetch parameters that free code reads; they are small, and given back when the next step begins."""
        if self._has_borrowed:
            return
        self._has_borrowed = True
        placement = self.placement
        recorded = placement.plan.trace
        wanted = [n for n, info in recorded.parameters.items() if info.unit is None or n in recorded.free_parameters]
        own = dict(placement.module.named_parameters())
        for name in wanted:
            if len(placement.holders[name]) == self.group.size():
                continue
            parameter = own[name]
            whole = parameter
            if parameter.is_meta:
                data = torch.empty(parameter.shape, dtype=parameter.dtype, device=self.device)
                whole = nn.Parameter(data, parameter.requires_grad)
                self._borrowed[whole] = parameter
            placement.broadcast(whole, placement.holders[name][0])
        self._swap({stand_in: whole for whole, stand_in in self._borrowed.items()})

    def _give_back(self) -> None:
        borrowed, self._borrowed, self._has_borrowed = self._borrowed, {}, False
        self._swap(borrowed)

    def _swap(self, others: dict[nn.Parameter, nn.Parameter]) -> None:
        if not others:
            return
        for module in self.placement.module.modules():
            for name, parameter in module._parameters.items():
                if parameter in others:
                    module._parameters[name] = others[parameter]

    def _patch(self, module: nn.Module, name: str | None) -> None:
        answer = _Answer(self, name, module)
        # On the instance, past nn.Module.__setattr__: the class and the state dict stay as they are.
        module.__dict__["forward"] = answer
        self._patched.append(module)


@dataclass(frozen=True)
class _Kept:
    """In place of a value among the arguments of a call that the call has left alone."""

    index: int


class _Answer:
    """Stands in for a module's ``forward``. A copy of the module, or a pickled one, gets the plain one back."""

    def __init__(self, calls: OutsideCalls, name: str | None, module: nn.Module) -> None:
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


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _in_host_memory(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value
