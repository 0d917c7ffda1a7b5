"""Optimizer steps on the host, one window of the state at a time."""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pardist.checkpoint.tensors import restore_shared, shared_state
from lightning_pardist.compat.optimizers import mark_step, post_hooks, pre_hooks
from lightning_pardist.engines.common import elementwise
from lightning_pardist.engines.offload.mapped_files import StateFile
from lightning_pardist.local_tensors import local_shard

#: Parts of a parameter start at multiples of this, so vector kernels treat every element as in the whole parameter.
_ALIGN = 1024


@dataclass(frozen=True)
class _Part:
    """Elements ``start`` to ``stop`` of a parameter, of the parameter group with this index."""

    group: int
    param: nn.Parameter
    start: int
    stop: int

    @property
    def is_whole(self) -> bool:
        return self.stop - self.start == self.param.numel()


class HostStep:
    """Runs an optimizer's step over parameters in host memory, with its state in memory or in a file.

    The step processes parameters in windows. With a :class:`StateFile`, the state of one window is resident at a time,
    and that of the next is read ahead. Adam and AdamW run torch's fused kernel in place of their loop, unless the user
    chose an implementation.

    Args:
        optimizer: Optimizer over plain parameters, flat or whole; must be elementwise, see
            :func:`~lightning_pardist.engines.common.elementwise.is_elementwise`.
        store: File in which state is kept; in memory if None.
        window_bytes: Bytes of state to be resident at a time; None steps on all parameters at once.
        on_stepped: Called with the parameters whose update a window completed.

    Raises:
        ValueError: If the optimizer cannot step in windows; the message names it.
        RuntimeError: If the disk has no room for the state.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        store: StateFile | None = None,
        window_bytes: int | None = None,
        on_stepped: Callable[[Sequence[nn.Parameter]], None] | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._store = store
        self._window_bytes = window_bytes
        self._on_stepped = on_stepped
        self._bytes_per_element = max(elementwise.state_bytes_per_element(optimizer), default=0.0)
        if window_bytes is not None:
            self._require_windows()
        if store is not None:
            params = [param for group in optimizer.param_groups for param in group["params"]]
            store.reserve(sum(int(self._bytes_per_element * _local(param).numel()) for param in params))

    # --- a step -------------------------------------------------------------------------------------------------

    def run(self, **kwargs: Any) -> None:
        """Run a step, with the hooks that torch calls around it. Takes no closure. Not collective."""
        optimizer = self._optimizer
        args: tuple[Any, ...] = (optimizer,)
        for before in pre_hooks(optimizer):
            changed = before(optimizer, args, kwargs)
            if changed is not None:
                args, kwargs = changed
        with _scale_on_host(optimizer):
            self._update()
        mark_step(optimizer)
        for after in post_hooks(optimizer):
            after(optimizer, args, kwargs)

    def settle(self, param: Tensor) -> None:
        """Move a parameter's state, just loaded from a checkpoint, to where it is kept. Not collective."""
        self._settle(param, self._optimizer.state.get(param, {}))

    def evict(self, param: Tensor) -> None:
        """Release pages of a parameter's state that was read elsewhere (by a checkpoint). Not collective."""
        self._evict(self._optimizer.state.get(param, {}).values())

    # --- windows ------------------------------------------------------------------------------------------------

    def _update(self) -> None:
        optimizer = self._optimizer
        groups, state = optimizer.param_groups, optimizer.state
        # Every window starts with the same settings and shared state, as an optimizer may count steps in them.
        settings = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        before = after = shared_state(optimizer)
        stepped: dict[int, dict[str, Any]] = {}
        windows = list(self._windows(groups))
        params = [part.param for window in windows for part in window if part.param in state]
        for param in params:
            self._settle(param, state[param])
        known = {param: dict(state[param]) for param in params}
        try:
            for window, following in itertools.zip_longest(windows, windows[1:], fillvalue=()):
                for part in following:
                    self._prefetch(_slices(known.get(part.param, {}), part).values())
                stepped.update(self._step_window(window, settings, known, state, copy.deepcopy(before)))
                after = shared_state(optimizer)
                if self._on_stepped is not None:
                    self._on_stepped([part.param for part in window if part.stop == part.param.numel()])
        finally:
            optimizer.param_groups, optimizer.state = groups, state
        restore_shared(optimizer, after)
        for index, group in stepped.items():
            own = ("params", "fused", "foreach")
            groups[index].update({key: value for key, value in group.items() if key not in own})

    def _step_window(
        self,
        window: Sequence[_Part],
        settings: Sequence[dict[str, Any]],
        known: dict[nn.Parameter, dict[str, Any]],
        state: dict[Any, Any],
        shared: dict[Any, Any],
    ) -> dict[int, dict[str, Any]]:
        """Step on some parts, with ``shared`` as state of all parameters; return the groups afterwards, by index."""
        optimizer = self._optimizer
        params = [_twin(part) for part in window]
        # Separate groups per device: the CPU kernel accepts no group with a scalar on another device.
        used: dict[tuple[int, torch.device], dict[str, Any]] = {}
        for part, param in zip(window, params, strict=True):
            used.setdefault((part.group, param.device), {**settings[part.group], "params": []})["params"].append(param)
        for group in used.values():
            if self._may_fuse(group):
                group.update(fused=True, foreach=False)
        optimizer.param_groups = list(used.values())
        optimizer.state = defaultdict(dict, shared)
        for part, param in zip(window, params, strict=True):
            if part.param in known:
                optimizer.state[param] = _slices(known[part.param], part)
        elementwise.own_step(optimizer)(optimizer)
        for part, param in zip(window, params, strict=True):
            if param in optimizer.state:
                self._keep(part, param, optimizer.state[param], state)
            self._evict([param])
        return {index: group for (index, _), group in used.items()}

    def _windows(self, groups: Sequence[dict[str, Any]]) -> Iterator[list[_Part]]:
        limit: float = float("inf")
        if self._window_bytes is not None:
            limit = max(_ALIGN, self._window_bytes / max(self._bytes_per_element, 4.0) // _ALIGN * _ALIGN)
        window: list[_Part] = []
        room = limit
        for index, group in enumerate(groups):
            for param in group["params"]:
                if param.grad is None:
                    continue
                start = 0
                while start < param.numel() or start == 0:
                    if window and param.numel() - start > room:
                        yield window
                        window, room = [], limit
                    fits = param.numel() - start <= room or not param.is_contiguous()
                    stop = param.numel() if fits else start + int(limit)
                    window.append(_Part(index, param, start, stop))
                    room -= stop - start
                    start = max(stop, 1)
        if window:
            yield window

    def _may_fuse(self, group: dict[str, Any]) -> bool:
        if type(self._optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
            return False
        chosen = group.get("fused") is not None or any(
            group.get(k) for k in ("foreach", "capturable", "differentiable")
        )
        return not chosen and all(p.device.type == "cpu" and p.is_floating_point() for p in group["params"])

    # --- state --------------------------------------------------------------------------------------------------

    def _keep(self, part: _Part, param: nn.Parameter, entry: dict[str, Any], state: dict[Any, Any]) -> None:
        """Store a part's state after its step."""
        if part.is_whole:
            self._settle(part.param, entry)
            state[part.param] = entry
            self._evict(entry.values())
            return
        kept = state[part.param]
        for key, value in entry.items():
            if _is_like(value, param):
                if key not in kept:
                    kept[key] = self._zeros(part.param, value.dtype)
                target = kept[key].view(-1)[part.start : part.stop]
                if target.data_ptr() != value.data_ptr():
                    target.copy_(value)
                self._evict([target])
            elif part.stop == part.param.numel():
                # Only with the last part, as every part starts from the previous step's value.
                kept[key] = value

    def _settle(self, param: Tensor, entry: dict[str, Any]) -> None:
        """Move one parameter's state to its device, or into the file."""
        own = _local(param)
        for key, value in entry.items():
            if not isinstance(value, Tensor):
                continue
            if _is_like(value, own) and (store := self._store_of(own)) is not None and not store.holds(value):
                entry[key] = self._zeros(own, value.dtype).copy_(value)
                self._evict([entry[key]])
            elif value.device != own.device and (key != "step" or own.device.type == "cpu"):
                # The step count of a parameter on a device stays on the host, as in torch.
                entry[key] = value.to(own.device)

    def _zeros(self, param: Tensor, dtype: torch.dtype) -> Tensor:
        store = self._store_of(param)
        if store is None:
            return torch.zeros_like(param, dtype=dtype, requires_grad=False)
        return store.zeros(param.numel(), dtype).view(param.shape)

    def _store_of(self, param: Tensor) -> StateFile | None:
        """Return the file for a parameter's state; None on a device (scalars, which every rank holds whole)."""
        return self._store if param.device.type == "cpu" else None

    def _prefetch(self, values: Iterable[Any]) -> None:
        if self._store is not None:
            for value in values:
                if isinstance(value, Tensor):
                    self._store.prefetch(value)

    def _evict(self, values: Iterable[Any]) -> None:
        if self._store is not None:
            for value in values:
                if isinstance(value, Tensor):
                    self._store.evict(value)

    def _require_windows(self) -> None:
        """Raise an error for an optimizer that counts its calls, or keeps values outside of groups and state."""
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(_ALIGN + 500, generator=generator) for _ in range(2)]
        grads = [[torch.randn(_ALIGN + 500, generator=generator) for _ in values] for _ in range(3)]
        for options in elementwise.trial_settings(self._optimizer):
            together = elementwise.stepped(self._optimizer, options, values, grads)
            apart = elementwise.stepped(self._optimizer, options, values, grads, step=_in_small_windows)
            if not all(torch.allclose(a, b, 1e-5, 1e-7) for a, b in zip(together, apart, strict=True)):
                raise ValueError(
                    f"{type(self._optimizer).__name__} cannot step on a few parameters at a time, which offload to a"
                    " folder requires: its update depends on how often step() was called. Use offload='cpu'."
                )


@contextmanager
def _scale_on_host(optimizer: Optimizer) -> Iterator[None]:
    """Context manager in which a gradient scaler's values for an optimizer that unscales in its kernel are on the host.

    Otherwise torch copies them while the kernel, on the host, reads them.
    """
    names = [name for name in ("grad_scale", "found_inf") if isinstance(getattr(optimizer, name, None), Tensor)]
    before = {name: getattr(optimizer, name) for name in names}
    for name, value in before.items():
        setattr(optimizer, name, value.cpu())
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(optimizer, name, value)


def _in_small_windows(optimizer: Optimizer) -> None:
    trial = object.__new__(HostStep)
    trial._optimizer, trial._store, trial._on_stepped = optimizer, None, None
    trial._window_bytes, trial._bytes_per_element = 0, 0.0
    trial._update()


def _twin(part: _Part) -> nn.Parameter:
    """Return a parameter that shares the memory of a part."""
    if part.is_whole:
        return part.param
    twin = elementwise.with_user_attributes(
        nn.Parameter(part.param.detach().view(-1)[part.start : part.stop]), elementwise.user_attributes(part.param)
    )
    if part.param.grad is not None:
        twin.grad = part.param.grad.reshape(-1)[part.start : part.stop]
    return twin


def _slices(entry: dict[str, Any], part: _Part) -> dict[str, Any]:
    """Return a part of a parameter's state; counters are copied, since every part steps."""
    if part.is_whole:
        return entry
    found: dict[str, Any] = {}
    for key, value in entry.items():
        if _is_like(value, part.param):
            found[key] = value.view(-1)[part.start : part.stop]
        else:
            found[key] = value.clone() if isinstance(value, Tensor) else value
    return found


def _local(param: Tensor) -> Tensor:
    """Return this rank's part of a DTensor."""
    return local_shard(param)


def _is_like(value: Any, param: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == param.shape
