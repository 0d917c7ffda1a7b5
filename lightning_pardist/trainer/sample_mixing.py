"""Detects layers that mix the samples of a batch: the result for a sample depends on the others in the batch.

Examples are an expert's capacity over all tokens of a batch, and a choice of the largest mean over its samples. No
gradient passes through the choice, so the loss' graph does not show it. If each rank or micro-batch has a part of the
samples, training then differs from that of a single process.

[Note: how it is found]
Only a step with choices is checked: one that sorts, ranks or counts something. The modules that it called are called
again, with the same inputs and with some samples replaced by copies of another, which changes nothing for the remaining
samples if samples are independent. Shapes are the same, and therefore kernels and random numbers, so results for these
samples must be the same to rounding. The step itself, with its user code, is not repeated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from lightning_utilities.core.rank_zero import rank_zero_debug
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from lightning_pardist.compat.collective_waits import no_collectives
from lightning_pardist.compat.compilation import compiles_itself
from lightning_pardist.compat.modules import BatchNorm
from lightning_pardist.compat.tensors import storage_key, version_of
from lightning_pardist.engines.common.activation_checkpointing import ReplacedForward
from lightning_pardist.engines.common.eager_runs import eagerly
from lightning_pardist.engines.common.fingerprint import fingerprint
from lightning_pardist.engines.common.parameter_write_guard import ParameterWriteGuard
from lightning_pardist.engines.fsdp.fsdp_units import original_class
from lightning_pardist.engines.pipeline.microbatch import fresh_copy
from lightning_pardist.engines.pipeline.nested import flatten, hidden_tensor, map_leaves, replace_leaves, tensors_in
from lightning_pardist.trainer.module_snapshot import ModuleSnapshot
from lightning_pardist.trainer.resumable_loaders import rng_state, set_rng_state

#: Maximum number of calls in a step that are checked: enough for whole models, not for a hundred separate layers.
_MOST = 16
#: Functions by which a layer makes choices, among the batch's samples or anything else.
_CHOICES = frozenset({
    "__bool__", "argmax", "argmin", "argsort", "argwhere", "bincount", "bucketize", "cummax", "cummin", "cumsum",
    "item", "kthvalue", "max", "median", "min", "mode", "msort", "multinomial", "nonzero", "one_hot", "quantile",
    "searchsorted", "sort", "topk", "unique", "unique_consecutive",
})  # fmt: skip
#: Relative tolerances: in general, and for half-precision results.
_CLOSE, _ROUGH = 1e-4, 2e-2


@dataclass(frozen=True)
class _Call:
    """Record of the inputs of a module's call in a step."""

    module: nn.Module
    given: tuple[tuple[Any, ...], dict[str, Any]]
    versions: tuple[int, ...]

    @property
    def is_fresh(self) -> bool:
        """Whether the inputs have not been modified in place since the call."""
        return tuple(map(_version, tensors_in(self.given))) == self.versions


class _Hook:
    """Forward hook for the duration of a step; copies of the module made meanwhile (a teacher) get a no-op hook."""

    def __init__(self, call: Callable[..., None] | None) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        if self._call is not None:
            self._call(*args)

    def __deepcopy__(self, memo: Any) -> _Hook:
        return _Hook(None)

    def __reduce__(self) -> Any:
        return _Hook, (None,)


class _Choices(TorchFunctionMode):
    """Torch function mode that records whether one of :data:`_CHOICES` was called."""

    def __init__(self) -> None:
        super().__init__()
        self.any = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.any = self.any or getattr(func, "__name__", "") in _CHOICES
        return func(*args, **(kwargs or {}))


class SampleMixing:
    """Records the inputs of modules in a step, and checks later whether the modules mix samples.

    Args:
        root: Module whose step is recorded.
        local: Whether module calls do not communicate with other ranks by themselves. If user code then communicates,
            the call is not checked, since ranks may try different calls.
        times: Factor by which the number of samples is enlarged in the check, if modules accept it: the batch of all
            ranks may exceed a capacity that a rank's batch does not.
    """

    def __init__(self, root: nn.Module, times: int = 1, *, local: bool = True) -> None:
        self.root = root
        self._times = times
        self._local = local
        self._chooses = False
        self._calls: dict[nn.Module, _Call] = {}
        self._samples = 0
        self._own: dict[int, Tensor] = {}
        self._depth = 0
        self._keepsake: ModuleSnapshot

    @contextmanager
    def noting(self, batch: Any, samples: int | None) -> Iterator[None]:
        """Context for a step that records the first outermost call of each module. Not collective.

        Args:
            batch: Batch of the step.
            samples: Number of samples in the batch; None if unknown.
        """
        modules = list(self.root.modules())
        # Hooks would be traced into compiled code, and without gradients it would be compiled once more.
        if samples is None or samples < 2 or any(map(is_closed, modules)):
            rank_zero_debug(
                "It is not checked whether layers mix samples: the batch has one sample, or modules are compiled."
            )
            yield
            return
        self._samples = samples
        self._own = {storage_key(each): each for each in tensors_in(batch) if _is_plain(each)}
        handles: list[RemovableHandle] = []
        enter, leave, choices = _Hook(self._enter), _Hook(self._leave), _Choices()
        for module in modules:
            handles.append(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(leave, always_call=True))
        try:
            # A torch function mode would be traced into compiled functions, so this step runs eagerly.
            with eagerly(), choices:
                yield
        finally:
            self._chooses = choices.any
            self._depth = 0
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._depth == 0 and module not in self._calls and len(self._calls) < _MOST:
            versions = tuple(map(_version, tensors_in((args, kwargs))))
            # Detached: the autograd graph would otherwise live until the next step.
            given = map_leaves(_detached, fresh_copy((args, kwargs), clone=False))
            self._calls[module] = _Call(module, given, versions)
        self._depth += 1

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depth = max(0, self._depth - 1)

    def find(self) -> str | None:
        """Return the name of the innermost module found to mix samples; None if there is none.

        Modules are called without gradients. Collective if their calls are; ranks may call different modules.
        """
        calls, self._calls = list(self._calls.values()), {}
        if not calls or not self._chooses:
            return None
        names: dict[nn.Module, str] = {module: name for name, module in self.root.named_modules()}
        talks = no_collectives() if self._local else nullcontext()
        with torch.no_grad(), talks, _OwnStatistics(self.root):
            self._keepsake = ModuleSnapshot(self.root, parameters=False)
            for call in calls:
                for times in dict.fromkeys((self._times, 1)):
                    try:
                        found = self._mixes(call, times)
                    except Exception as error:
                        rank_zero_debug(f"Could not check whether {names[call.module]!r} mixes samples ({error}).")
                        continue
                    if found is not None:
                        return names[found]
                    break
        return None

    # --- one call -----------------------------------------------------------------------------------------------

    def _mixes(self, call: _Call, times: int) -> nn.Module | None:
        leaves, _ = flatten(call.given)
        dims = {place: dim for place, leaf in enumerate(leaves) if (dim := self._dim_of(leaf)) is not None}
        if not dims or not call.is_fresh or hidden_tensor(call.given) is not None:
            return None
        count, total = self._samples, self._samples * times
        every = [place % count for place in range(total)]
        run = functools.partial(self._run, call, leaves, dims)
        whole = run(every)
        # The others are replaced by copies of a kept sample, or of one that is not kept, since the order may matter.
        for keep, fill in ((range(count // 2), 0), (range(total - count // 2, total), total - count)):
            other = every[fill] if total > 2 else every[keep.start]
            some = [every[place] if place in keep else other for place in range(total)]
            if _differ(whole, run(some), keep, total) and not _differ(whole, run(every), keep, total):
                return _innermost(call.module, functools.partial(run, every), functools.partial(run, some), keep, total)
        return None

    def _run(self, call: _Call, leaves: Sequence[Any], dims: dict[int, int], order: Sequence[int]) -> Any:
        """Call the module with the samples in ``order``; all other state is restored afterwards."""
        states = rng_state()
        given = [leaf.clone() if isinstance(leaf, Tensor) and _is_plain(leaf) else leaf for leaf in leaves]
        for place, dim in dims.items():
            leaf = leaves[place]
            given[place] = leaf.detach().index_select(dim, torch.tensor(list(order), device=leaf.device))
        args, kwargs = replace_leaves(call.given, given)
        try:
            with ParameterWriteGuard(self.root):
                return call.module(*args, **kwargs)
        finally:
            set_rng_state(states)
            self._keepsake.restore()

    def _dim_of(self, leaf: Any) -> int | None:
        """Return the dim of an argument that holds samples; None if there is none or it is ambiguous."""
        if not isinstance(leaf, Tensor) or isinstance(leaf, nn.Parameter) or not _is_plain(leaf):
            return None
        own = self._own.get(storage_key(leaf))
        is_own = own is not None and own.shape == leaf.shape and own.stride() == leaf.stride()
        if is_own and leaf.shape[:1] == (self._samples,):
            return 0
        found = [dim for dim, size in enumerate(leaf.shape) if size == self._samples]
        return found[0] if len(found) == 1 else None


def _differ(whole: Any, other: Any, keep: range, total: int) -> bool:
    """Return whether results differ for the kept samples, along every dim that may hold samples."""
    pairs = zip(tensors_in(whole), tensors_in(other), strict=True)
    return any(_differ_in(one, another, keep, total) for one, another in pairs)


def _differ_in(one: Tensor, other: Tensor, keep: range, total: int) -> bool:
    dims = [dim for dim, size in enumerate(one.shape) if size == total]
    if not dims or one.shape != other.shape or not (_is_plain(one) and one.numel()):
        return False
    begin, length = keep.start, len(keep)
    return all(_is_other(one.narrow(dim, begin, length), other.narrow(dim, begin, length)) for dim in dims)


def _innermost(
    root: nn.Module, expect: Callable[[], Any], run: Callable[[], Any], keep: range, total: int
) -> nn.Module:
    """Return the first module to finish whose results differ although its inputs do not."""
    with _fingerprints(root, keep, total) as expected:
        expect()
    with _fingerprints(root, keep, total) as found:
        run()
    for (module, given, result), (_, other_given, other_result) in zip(expected, found, strict=False):
        if _are_alike(given, other_given) and not _are_alike(result, other_result):
            return module
    return root


@contextmanager
def _fingerprints(root: nn.Module, keep: range, total: int) -> Iterator[list[tuple[nn.Module, Any, Any]]]:
    """Context that lists each finished module call, with fingerprints of the kept samples in its input and output."""
    found: list[tuple[nn.Module, Any, Any]] = []
    given: list[Any] = []

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        given.append(_fingerprints_of((args, kwargs), keep, total))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        found.append((module, given.pop(), _fingerprints_of(output, keep, total)))

    with ExitStack() as stack:
        for module in root.modules():
            stack.callback(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(leave).remove)
        yield found


def _fingerprints_of(tree: Any, keep: range, total: int) -> list[Tensor]:
    found = []
    for each in tensors_in(tree):
        if not _is_plain(each) or each.is_complex() or not each.dim():
            continue
        # The first dim may also hold the concatenated tokens of all samples.
        a_sample, rest = divmod(each.shape[0], total)
        if a_sample and not rest:
            found.append(fingerprint(each.narrow(0, keep.start * a_sample, len(keep) * a_sample)))
    return found


class _OwnStatistics(TorchFunctionMode):
    """Context in which batch norms use running statistics: their use of batch statistics is reported elsewhere."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self._layers = [layer for layer in root.modules() if isinstance(layer, BatchNorm) and layer.training]

    def __enter__(self) -> Any:
        for layer in self._layers:
            layer.training = False
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for layer in self._layers:
            layer.training = True

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.batch_norm:
            return _normalized(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _normalized(
    input: Tensor, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None, *rest: Any, **others: Any
) -> Tensor:
    channels = input.shape[1]
    mean = input.new_zeros(channels) if running_mean is None else running_mean
    var = input.new_ones(channels) if running_var is None else running_var
    return F.batch_norm(input, mean, var, weight, bias, False)


def mixed_samples(root: nn.Module, name: str, who: str) -> str:
    """Return the warning for a layer that mixes samples.

    Args:
        root: The user's module.
        name: Name of the layer in it.
        who: What holds a part of the batch.
    """
    kind = original_class(root.get_submodule(name)).__name__
    layer = f"{name} ({kind})" if name else f"{kind}.forward"
    return (
        f"{layer} gives another result for a sample if there are other samples in the batch (it selects among all of"
        f" them, for example), but each {who} has only some of them: if the batch's first dim holds samples, training"
        " differs from that of a single process. Strategies whose ranks see whole batches give the results of a single"
        " process (pardist_tp, pardist_mp). check_samples=False disables this check."
    )


def is_closed(module: nn.Module) -> bool:
    """Return whether a module runs compiled code, into which hooks and torch function modes would be traced."""
    # A forward that is set on the instance may be compiled code.
    own = module.__dict__.get("forward")
    replaced = own is not None and not isinstance(own, ReplacedForward)
    return replaced or compiles_itself(module) or isinstance(module, torch.jit.ScriptModule)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else version_of(tensor)


def _detached(leaf: Any) -> Any:
    """Detach a plain tensor; a parameter is kept as it is, since it holds no samples."""
    return leaf.detach() if type(leaf) is Tensor and leaf.requires_grad else leaf


def _is_plain(tensor: Tensor) -> bool:
    """Return whether samples can be selected from a tensor by index."""
    kind = type(tensor) in (Tensor, nn.Parameter)
    return kind and tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_nested


def _is_other(one: Tensor, other: Tensor) -> bool:
    if not (one.is_floating_point() or one.is_complex()):
        return not torch.equal(one, other)
    wide = torch.complex128 if one.is_complex() else torch.float64
    first, second = one.to(wide).nan_to_num(), other.to(wide).nan_to_num()
    scale = max(float(first.abs().max()), float(second.abs().max()))
    close = _ROUGH if one.dtype in (torch.float16, torch.bfloat16) else _CLOSE
    return float((first - second).abs().max()) > close * scale


def _are_alike(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(some) == len(others) and all(
        torch.allclose(one, other, rtol=1e-6, atol=1e-9, equal_nan=True)
        for one, other in zip(some, others, strict=True)
    )
