"""Dispatch of torch functions on sharded tensors: by a sharding rule, or on gathered tensors without one."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

import lightning_pardist.engines.tensor.rules_matmul
import lightning_pardist.engines.tensor.rules_nn
import lightning_pardist.engines.tensor.rules_shape  # noqa: F401  (rules register themselves)
from lightning_pardist.compat import patches, pytree
from lightning_pardist.compat.autograd import only_keeps_inputs
from lightning_pardist.compat.dtensor import local_tensor_of, spec_of
from lightning_pardist.compat.fake_tensors import FakeTensor
from lightning_pardist.compat.tensors import (
    below_subclasses,
    below_torch_functions,
    is_only_holder,
    is_unshared,
    storage_key,
)
from lightning_pardist.engines.common.settable_parameter import assign
from lightning_pardist.engines.tensor.calls import (
    GLOBAL_PROPERTIES,
    LOCAL_PROPERTIES,
    PARAMETER_METHODS,
    Call,
    Need,
    NoRule,
    Operand,
    Outcome,
    leaves_of,
    map_only,
    plain_name,
)
from lightning_pardist.engines.tensor.gradient_hooks import shard_results_of_hooks
from lightning_pardist.engines.tensor.layout import Layout, from_placement, to_placement
from lightning_pardist.engines.tensor.nested import NestedGroup
from lightning_pardist.engines.tensor.regions import PlainFunction, TensorGroup
from lightning_pardist.engines.tensor.rng import rank_specific_rng
from lightning_pardist.engines.tensor.rules_elementwise import lookup
from lightning_pardist.engines.tensor.rules_matmul import scattered
from lightning_pardist.engines.tensor.split_tensor import PartedTensor, SplitTensor, innermost

#: Functions whose result shares memory with their argument.
_VIEWS = frozenset([
    "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as", "ravel",
    "transpose", "permute", "t", "swapaxes", "swapdims", "movedim", "expand", "expand_as", "split", "chunk",
    "tensor_split",
    "unbind", "select", "narrow", "getitem", "diagonal", "unfold", "get:T", "get:mT", "get:data", "detach", "iter",
])  # fmt: skip


_KINDS = ("step", "call")
#: Maximum number of calls whose rule outcomes are cached: a model of many layers and lengths has a few hundred.
_KNOWN_CALLS = 4096
#: Seconds for which a process group's thread may hold a sent tensor on a busy machine.
_LET_GO_S = 1.0


@dataclass
class Fallback:
    """An operator that ran on full tensors for lack of a rule.

    Attributes:
        reason: Why it could not run on local shards.
        calls: Number of calls on this rank.
        bytes_gathered: Bytes of the full tensors that were gathered for it.
    """

    reason: str
    calls: int = 0
    bytes_gathered: int = 0


class TensorRuntime:
    """Runs the user's step on a module whose parameters are DTensors.

    Args:
        mesh: One-dimensional mesh of the tensor ranks.
        sequence_parallel: Whether results of row-wise layers stay sharded along the sequence, dim 1 of three.

    Attributes:
        group: The tensor ranks, with a count of the collectives.
        fallbacks: Operators that ran on full tensors since the start, by name.
    """

    #: Tensor subclass that the runtime unwraps, and all types that it intercepts.
    kind: ClassVar[type[PartedTensor]] = SplitTensor
    kinds: tuple[type, ...] = (SplitTensor, DTensor)
    #: Whether activations are sharded and parameters replicated.
    context = False
    #: Advice in errors about writes into a split tensor.
    remedy = 'Replicate the parameters that produce it: plan={"pattern": "replicate"}.'
    split_over = "tensor"

    def __init__(self, mesh: DeviceMesh, *, sequence_parallel: bool = False) -> None:
        self.group: TensorGroup = TensorGroup(mesh)
        self.sequence_parallel = sequence_parallel
        self.fallbacks: dict[str, Fallback] = {}
        # Views that became copies, until the step ends: storage key -> (tensor on it, keys of its copies).
        #: Unsplit parameters that were arguments of custom autograd functions, each with its plain tensor, by id.
        self._of_functions: dict[int, tuple[DTensor, Tensor]] = {}
        self._in_engine = False
        self._copied_views: dict[int, tuple[Tensor, set[int]]] = {}
        # Cache of rule outcomes by call: they depend only on shapes, layouts and plain values.
        self._known: dict[Any, Outcome] = {}
        #: Whether the autograd node of a parameter's local shard records the parameter, see :func:`opened_parameter`.
        self._notes_parameters = False
        self._depth = 0
        #: Whether no gradients were wanted where the outermost step began: it updates no parameters then.
        self._evaluates = False
        self._in_hook = False
        self._called: tuple[nn.Module, ExitStack] | None = None
        self._handles: list[RemovableHandle] = []
        #: Attributes of modules that are the ``apply`` of an autograd function.
        self._held: Any = []

    def nest(self) -> None:
        """Allow local shards to be sharded again, along the sequence over context ranks. Call before the first step."""
        self.group = NestedGroup(self.group.mesh)
        self._notes_parameters = True

    def __deepcopy__(self, memo: Any) -> TensorRuntime:
        """Return the runtime itself: copies of a module, which users may make at any time, use the same ranks."""
        return self

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context manager around all use of the module: forward, loss and backward, and every evaluation step.

        Tensors have global shapes inside. May be nested. Outputs that leave the block should go through :meth:`whole`.
        """
        if self._depth:
            yield
            return
        self._evaluates = not torch.is_grad_enabled()
        with ExitStack() as stack:
            if not self._in_hook:
                stack.enter_context(implicit_replication())
            stack.enter_context(_whole_arguments_for_custom_functions(self))
            stack.enter_context(_without_mha_fast_path())
            stack.enter_context(eager())
            stack.enter_context(_Mode(self))
            stack.callback(self._forget)
            stack.enter_context(self._counted())
            self._forget()
            yield

    @contextmanager
    def in_hook(self) -> Iterator[None]:
        """Context manager around user code outside of steps: parameters and plain tensors may be used together."""
        before, self._in_hook = self._in_hook, True
        try:
            with nullcontext() if before or self._depth else implicit_replication():
                yield
        finally:
            self._in_hook = before

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def _forget(self) -> None:
        self.group.forget()
        self._copied_views.clear()

    def whole(self, tree: Any) -> Any:
        """Return ``tree`` with every split tensor gathered. Collective over the tensor group if there are any."""
        return pytree.tree_map_only(self.kind, self.gather, tree)

    def plain(self, tree: Any) -> Any:
        """Return ``tree`` with every split tensor and parameter as a plain full tensor, for code that needs plain ones.

        Collective over the tensor group if there are any.
        """
        return pytree.tree_map_only((self.kind, DTensor), self._as_plain, tree)

    def opened_for_function(self, parameter: DTensor) -> Tensor:
        """Return a parameter as an argument of a custom autograd function, see :meth:`_open`.

        The function's backward may run layers again and ask for their gradients with respect to its arguments
        (``torchdiffeq.odeint_adjoint``): in backward, layers use the same plain tensor of an unsplit parameter.
        """
        opened = self._open(parameter)
        if opened.requires_grad and not isinstance(opened, self.kind):
            self._of_functions[id(parameter)] = parameter, opened
        return opened

    def _as_plain(self, tensor: PartedTensor | DTensor) -> Tensor:
        if isinstance(tensor, self.kind):
            return self.gather(tensor)
        opened = self._open(tensor)  # type: ignore[arg-type]
        return self.gather(opened) if isinstance(opened, self.kind) else opened

    def part_of(self, tensor: Tensor) -> tuple[Tensor, Layout | None] | None:
        """Return the local shard of a split tensor or parameter, with its autograd history, and its layout.

        Returns:
            A plain tensor and its layout (None if replicated); None if ``tensor`` is neither.
        """
        if isinstance(tensor, DTensor):
            tensor = self._open(tensor)
            return (tensor.local, tensor.split_layout) if isinstance(tensor, self.kind) else (tensor, None)
        return (tensor.local, tensor.split_layout) if isinstance(tensor, self.kind) else None

    def of_part(self, part: Tensor, layout: Layout) -> Tensor:
        """Return the split tensor whose local shard is ``part``: the inverse of :meth:`part_of`. Not collective."""
        return self.kind(part, layout, self)

    def check_same_call(self, kind: Literal["step", "call"], first: int = 0, second: int = 0) -> Tensor:
        """Check that all ranks make the same kind of call, and exchange two numbers. Collective; one small all-gather.

        Args:
            kind: ``"step"`` if a step begins, ``"call"`` if the module is called outside of one.
            first: Any number.
            second: Any number.

        Returns:
            Every rank's numbers, shape ``[ranks, 2]``.

        Raises:
            RuntimeError: If kinds differ between ranks, which would lead to a deadlock or to mismatched collectives.
        """
        told = self.group.exchange(_KINDS.index(kind), first, second)
        if (told[:, 0] != told[0, 0]).any():
            callers = [rank for rank, number in enumerate(told[:, 0].tolist()) if number == _KINDS.index("call")]
            raise RuntimeError(
                f"Only ranks {callers} of a tensor group of {self.group.size} called the module outside of a step. Its"
                " layers are split over all of them: call it on every rank, and print or save on one."
            )
        return told[:, 1:]

    def wrap_calls(self, module: nn.Module) -> None:
        """Run calls of the module and its submodules outside of :meth:`step` as in a step, with plain outputs.

        User hooks and callbacks call modules outside of steps. Undone by :meth:`unwrap_calls`.
        """
        self._held += patches.held_functions(module.modules())
        for child in module.modules():
            if next(child.parameters(), None) is None:
                continue
            self._handles.append(child.register_forward_pre_hook(self._enter_by_call, prepend=True))
            self._handles.append(child.register_forward_hook(self._leave_by_call, always_call=True))

    def unwrap_calls(self) -> None:
        """Undo :meth:`wrap_calls`."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._held = []

    def _enter_by_call(self, module: nn.Module, args: Any) -> None:
        if not self._depth:
            self.check_same_call("call")
            self._called = module, ExitStack()
            self._called[1].enter_context(self.step())

    def _leave_by_call(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self._called is None or self._called[0] is not module:
            return None
        (_, stack), self._called = self._called, None
        with stack:
            return self.plain(output)

    def custom_function(self, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a custom autograd function on full tensors, and keep its outputs attached to its autograd node.

        A function that calls layers may return split tensors. Autograd then attaches the function's node to the wrapper
        instead of the local shard that later operators use, and no gradient would reach the function's inputs.
        Collective over the group if there are any.
        """
        return pytree.tree_map_only(self.kind, self._of_custom_function, apply(*args, **kwargs))

    def _of_custom_function(self, tensor: PartedTensor) -> Tensor:
        with below_torch_functions():
            attached = tensor.grad_fn is not None
        return _Unwrap.run(tensor) if attached else tensor

    def gather(self, tensor: PartedTensor) -> Tensor:
        """Gather a split tensor into a full one, with autograd. Collective over the tensor group."""
        return self.group.gather(tensor.local, tensor.split_layout)

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a torch function that has split tensors or parameters among its arguments."""
        name, inplace = plain_name(func)
        if name in GLOBAL_PROPERTIES:
            with below_subclasses():
                return func(*args, **kwargs)
        first = args[0] if args else None
        if name in LOCAL_PROPERTIES and isinstance(first, self.kind):
            return func(first.local, *args[1:], **kwargs)
        if name == "register_hook" and isinstance(first, self.kind):
            return self._register_hook(first, *args[1:], **kwargs)
        if isinstance(first, DTensor) and (
            inplace or name in PARAMETER_METHODS or name.startswith(("set:", "delete:"))
        ):
            return self._on_parameters(func, args, kwargs)
        leaves = leaves_of((args, kwargs))
        computes = self._depth and self._evaluates and any(isinstance(leaf, nn.Parameter) for leaf in leaves)
        if not computes and _only_states(leaves):
            return func(*args, **kwargs)
        if name == "repr" and isinstance(first, self.kind):
            return PartedTensor.__repr__(first)
        args, kwargs = map_only(DTensor, self._open, (args, kwargs))
        if not any(isinstance(leaf, self.kind) for leaf in leaves_of((args, kwargs))):
            return func(*args, **kwargs)
        return self._run_on_shards(func, name, inplace, args, kwargs)

    def _register_hook(self, tensor: PartedTensor, hook: Callable[[Any], Any]) -> Any:
        """Register the user's hook so that it receives the gradient as a split tensor of the same layout."""

        def seen(grad: Tensor) -> Any:
            result = hook(self.kind(grad, tensor.split_layout, self))
            return result.local if isinstance(result, self.kind) else result

        return tensor.local.register_hook(seen)

    def _open(self, parameter: DTensor) -> Tensor:
        """Return a parameter as a plain tensor if replicated, as a split tensor if sharded; its gradient is a DTensor.

        Collective over the group for partial DTensors, which DTensor has computed of parameters but not yet reduced.
        """
        if self._in_engine and torch.is_grad_enabled() and id(parameter) in self._of_functions:
            return self._of_functions[id(parameter)][1]
        if any(placement.is_partial() for placement in parameter.placements):
            return parameter.full_tensor()
        shard_results_of_hooks(parameter, self._close)
        if parameter.device_mesh.ndim > 1:
            parameter = _gathered(parameter)
        layout = from_placement(parameter.placements[-1], parameter.ndim)
        local = _Open.run(parameter)
        node: Any = local.grad_fn
        if self._notes_parameters and node is not None:
            node.metadata[_PARAMETER] = parameter
        return local if layout is None else self.kind(local, layout, self)

    def _on_parameters(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Leave in-place changes and properties of parameters to DTensor.

        Collective over the group for an in-place change that DTensor lacks, and for a write of elements
        (``weight[2] = 0``), which DTensor of torch 2.15 makes to a copy: they run on the whole tensor.
        """
        args, kwargs = map_only(self.kind, self._close, (args, kwargs))
        name, inplace = plain_name(func)
        if name == "set:data":
            with below_torch_functions():
                return assign(*args)
        if name != "setitem" or not isinstance(args[0], DTensor):
            try:
                return func(*args, **kwargs)
            except NotImplementedError:
                if not inplace:
                    raise
        parameter, (args, kwargs) = args[0], map_only(DTensor, lambda tensor: tensor.full_tensor(), (args, kwargs))
        result = func(*args, **kwargs)
        mesh, placements = parameter.device_mesh, parameter.placements
        local_tensor_of(parameter).copy_(
            local_tensor_of(distribute_tensor(args[0], mesh, placements, src_data_rank=None))
        )
        return None if result is None else parameter

    def _close(self, tensor: PartedTensor) -> DTensor:
        """Return a split tensor as a DTensor."""
        placement = to_placement(tensor.split_layout)
        return DTensor.from_local(
            tensor.local, self.group.mesh, [placement], run_check=False, shape=tensor.shape, stride=_strides(tensor)
        )

    def _run_on_shards(
        self, func: Callable[..., Any], name: str, inplace: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        tensors: list[Tensor] = []
        try:
            kind = self.kind
            key = (func, describe(args, tensors, kind), describe(kwargs, tensors, kind) if kwargs else None)
            known = self._known.get(key)
        except TypeError:
            # An argument is unhashable or has no value to compare.
            tensors, known, key = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Tensor)], None, None
        if known is None:
            try:
                known = self._look_up(func, name, inplace, args, kwargs)
            except NoRule as problem:
                return self._run_on_full_tensors(func, name, inplace, args, kwargs, problem.reason)
            except (TypeError, ValueError, IndexError, AttributeError, KeyError) as problem:
                # The rule does not cover this form of the call; if the call itself is wrong, it fails below.
                return self._run_on_full_tensors(
                    func, name, inplace, args, kwargs, f"{type(problem).__name__}: {problem}"
                )
            if key is not None:
                if len(self._known) >= _KNOWN_CALLS:
                    self._known.clear()
                self._known[key] = known
        return self._execute(func, name, inplace, known, tensors)

    def _look_up(
        self, func: Callable[..., Any], name: str, inplace: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Outcome:
        """Return the outcome of a call's sharding rule; operands hold tensor indices, so that it can be cached."""
        numbers = itertools.count()
        rule = lookup(name)
        if rule is None:
            raise NoRule("no sharding rule")

        def operand(tensor: Tensor) -> Operand:
            return _operand(tensor, next(numbers), self.kind)

        call_args, call_kwargs = map_only(Tensor, operand, (args, kwargs))
        return rule(
            Call(
                func,
                name,
                call_args,
                call_kwargs,
                self.group.size,
                inplace,
                sequence=self.sequence_parallel,
                rank=self.group.rank,
                context=self.context,
            )
        )

    def _execute(
        self, func: Callable[..., Any], name: str, inplace: bool, outcome: Outcome, tensors: list[Tensor]
    ) -> Any:
        group = self.group

        def resolve(need: Need) -> Tensor:
            return self._resolve(need, tensors[need.operand.tensor])

        args = map_only(Need, resolve, outcome.args)
        kwargs = map_only(Need, resolve, outcome.kwargs) if outcome.kwargs else outcome.kwargs
        after = map_only(Need, resolve, outcome.after_needs) if outcome.after_needs else ()
        if outcome.random:
            like = next(leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Tensor))
            with rank_specific_rng(group, like, name):
                result = func(*args, **kwargs) if outcome.run is None else outcome.run(group, *args, **kwargs)
        else:
            result = func(*args, **kwargs) if outcome.run is None else outcome.run(group, *args, **kwargs)
        if inplace:
            return tensors[0]
        if isinstance(result, FakeTensor):
            return self._stub_of(result, outcome)
        if isinstance(outcome.out, Layout):
            for operand in tensors:
                if isinstance(operand, self.kind) and operand.local is result and operand.split_layout == outcome.out:
                    # In torch, functions with nothing to do return their argument (contiguous, cast to the same dtype).
                    return operand
        if outcome.reduce:
            layout = scattered(name, result.shape, group.size) if self.sequence_parallel else None
            result = group.reduce(result) if layout is None else group.reduce_into_split(result, layout)
            self._note_copies(name, tensors[0] if tensors else None, result)
            if outcome.reduce == "mean":
                result = result / group.size
            if layout is not None:
                wrapped = self.kind(result, layout, self)
                return wrapped if outcome.after is None else self._after(outcome, wrapped, after)
        if outcome.after is not None:
            result = outcome.after(result, *after)
        return self._wrap(result, outcome.out)

    def _stub_of(self, local: Tensor, outcome: Outcome) -> Tensor:
        """Return a tensor of the global shape without values: an input was another pipeline stage's fake tensor."""
        layout = outcome.out if isinstance(outcome.out, Layout) else None
        return local if layout is None else local.new_empty(layout.global_shape(local.shape, self.group.size))

    def _after(self, outcome: Outcome, result: PartedTensor, after: tuple[Tensor, ...]) -> Any:
        # The bias is added to shards along the sequence, so its gradient has to be summed over ranks.
        with _Mode(self):
            return outcome.after(result, *after) if outcome.after is not None else result

    def _resolve(self, need: Need, tensor: Any) -> Tensor:
        if need.how == "whole":
            return self._enter(tensor)
        if need.how == "part" and need.layout is not None:
            return self.group.scatter(tensor, need.layout)
        if need.how == "gather" and isinstance(tensor, self.kind):
            return self.group.gather_into_split(tensor.local, tensor.split_layout)
        if need.how == "move" and need.layout is not None:
            return self.group.move(tensor.local, tensor.split_layout, need.layout)
        return tensor.local if isinstance(tensor, self.kind) else tensor

    def _enter(self, tensor: Tensor) -> Tensor:
        """Enter a replicated tensor into a sharded computation."""
        return self.group.copy(tensor)

    def outside(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a torch function that has no sharded arguments."""
        return func(*args, **kwargs)

    def _wrap(self, result: Any, out: Any) -> Any:
        if isinstance(out, list):
            wrapped = [self._wrap(item, layout) for item, layout in zip(result, out, strict=True)]
            return type(result)(wrapped)
        if isinstance(out, Layout) and isinstance(result, (tuple, list)):
            raise RuntimeError("A sharding rule for one result was used on several. Please report the operator.")
        if out is None or not isinstance(result, Tensor):
            return result
        return self.kind(result, out, self)

    def _run_on_full_tensors(
        self,
        func: Callable[..., Any],
        name: str,
        inplace: bool,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        reason: str,
    ) -> Any:
        """Run the function on gathered tensors as on a single process, and record the fallback."""
        if isinstance(kwargs.get("out"), self.kind):
            raise RuntimeError(
                f"{name}(out=...) writes into a tensor that is split over the {self.split_over} ranks. {self.remedy}"
            )
        self._remember(name, reason, (args, kwargs))
        first = args[0] if args else None
        args, kwargs = self.whole((args, kwargs))
        result = func(*args, **kwargs)
        if inplace and isinstance(first, self.kind):
            # Write into the existing local shard so that its views change with it.
            first.local.copy_(self.group.scatter(args[0], first.split_layout))
            return first
        self._note_copies(name, first, result)
        return result

    def _note_copies(self, name: str, first: Any, result: Any) -> None:
        """Record tensors that share memory on a single process but not here, see :meth:`check_overwrite`."""
        if name in _VIEWS and isinstance(first, self.kind):
            leaves = (leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor))
            tensors = map(innermost, (first, *leaves))
            # Keep detached tensors, to check later whether anything else still holds the memory.
            sides = {storage_key(tensor): tensor.detach() for tensor in tensors}
            for key, side in sides.items():
                others = self._copied_views.setdefault(key, (side, set()))[1]
                others |= sides.keys() - {key}

    def check_overwrite(self, tensor: Any, name: str) -> None:
        """Reject an in-place write to a tensor that shares memory with another one in user code, but not here.

        Raises:
            RuntimeError: If a view of ``tensor``, or its base, was gathered in this step and is still in use.
        """
        local = innermost(tensor) if isinstance(tensor, self.kind) else tensor
        if isinstance(local, DTensor) or not isinstance(local, Tensor):
            return
        # Views of views share memory on a single process as well.
        waiting, others = [storage_key(local)], set[int]()
        while waiting:
            _, partners = self._copied_views.get(waiting.pop(), (None, ()))
            waiting += [key for key in partners if key not in others]
            others |= set(partners)
        others.discard(storage_key(local))
        if not _is_sole_owner([self._copied_views[key][0] for key in others]):
            raise RuntimeError(
                f"{name} overwrites a tensor that shares memory with another one (a view, or its base). One of them had"
                f" to be gathered, so that the other would not change with it. {self.remedy}"
            )

    def _remember(self, name: str, reason: str, tree: Any) -> None:
        fallback = self.fallbacks.setdefault(name, Fallback(reason))
        fallback.calls += 1
        for leaf in pytree.tree_leaves(tree):
            if isinstance(leaf, self.kind):
                fallback.bytes_gathered += leaf.local.numel() * leaf.local.element_size() * self.group.size


def _is_sole_owner(tensors: Sequence[Tensor]) -> bool:
    """Return whether nothing else holds the memory of ``tensors``.

    A process group's thread (gloo's) holds a sent tensor for a moment after the collective has returned, for a
    different time on each rank; the wait keeps the result equal on all ranks.
    """
    deadline = time.monotonic() + _LET_GO_S
    while not all(map(is_only_holder, tensors)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


class _Open(PlainFunction):
    """Return a parameter's local tensor: ``DTensor.to_local()`` at a tenth of the cost, with unshared gradients.

    The backward of ``to_local()`` wraps the incoming gradient without a copy. If autograd passes one buffer to two
    parameters, both would keep it, and gradient clipping would scale it twice.
    """

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        local = local_tensor_of(parameter)
        ctx.set_materialize_grads(False)
        ctx.spec, ctx.strides = spec_of(parameter), local.stride()
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        grad, spec = grads[0], ctx.spec
        if grad is None:
            return None
        if torch.is_grad_enabled():
            # Double backward: the gradient of the gradient needs an autograd history.
            return DTensor.from_local(grad, spec.mesh, spec.placements, shape=spec.shape, stride=spec.stride)
        if grad.stride() != ctx.strides or not is_unshared(grad):
            grad = torch.empty_strided(grad.shape, ctx.strides, dtype=grad.dtype, device=grad.device).copy_(grad)
        return DTensor(grad, spec, requires_grad=False)


#: Key in an autograd node's metadata for the parameter that the node opens.
_PARAMETER = "pardist_parameter"


def opened_parameter(tensor: Tensor) -> DTensor | None:
    """Return the parameter of which a tensor is the opened local shard; None for any other tensor."""
    node: Any = tensor.grad_fn
    return None if node is None else node.metadata.get(_PARAMETER)


class _Unwrap(PlainFunction):
    """Gather a split tensor whose autograd history is attached to the wrapper instead of the local shard."""

    @staticmethod
    def forward(ctx: Any, tensor: PartedTensor) -> Tensor:
        return tensor.runtime.group.assemble(tensor.local, tensor.split_layout)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0]


class _Mode(TorchFunctionMode):
    """Dispatches torch functions with parameters or split tensors among their arguments to the runtime."""

    def __init__(self, runtime: TensorRuntime) -> None:
        super().__init__()
        self.runtime = runtime

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ENGINE_CALLS:
            args, kwargs = _gathered_outputs(self.runtime, func, args, kwargs)
            with _inside_engine(self), self.runtime.group.summing(at_once=func is torch.autograd.grad):
                return func(*args, **kwargs)
        if self.runtime._copied_views and args:
            name, inplace = plain_name(func)
            if inplace:
                self.runtime.check_overwrite(args[0], name)
        kinds = self.runtime.kinds
        if _involves_split_tensors(args, kinds) or (kwargs and _involves_split_tensors(kwargs.values(), kinds)):
            return self.runtime.call(func, args, kwargs)
        return self.runtime.outside(func, args, kwargs)


#: Functions that run the autograd engine -> position of their ``inputs`` argument.
_ENGINE_CALLS: dict[Callable[..., Any], int] = {Tensor.backward: 4, torch.autograd.backward: 5, torch.autograd.grad: 1}


def _gathered_outputs(
    runtime: TensorRuntime, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return an engine call's arguments with split tensors gathered. Collective over the group if there are any.

    Raises:
        RuntimeError: If gradients of a split tensor are requested.
    """
    position = _ENGINE_CALLS[func]
    inputs = args[position] if len(args) > position else kwargs.get("inputs")
    if any(isinstance(leaf, runtime.kind) for leaf in pytree.tree_leaves(inputs)):
        raise RuntimeError(
            f"Gradients for a tensor that is split over the {runtime.split_over} ranks were requested (inputs=)."
            " Request those for the tensors that it is computed from."
        )
    return runtime.whole((args, kwargs))  # type: ignore[no-any-return]


@contextmanager
def _inside_engine(mode: _Mode) -> Iterator[None]:
    """Keep the mode active while the autograd engine runs: activation checkpointing calls user code from there."""
    # Modes are thread-local: the engine's own threads for accelerators would run user code without it.
    runtime = mode.runtime
    before, runtime._in_engine = runtime._in_engine, True
    try:
        with patches.backward_inside(mode), torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        runtime._in_engine = before


def _involves_split_tensors(values: Any, kinds: tuple[type, ...]) -> bool:
    for value in values:
        if isinstance(value, kinds):
            return True
        if isinstance(value, (tuple, list)) and value and _involves_split_tensors(value, kinds):
            return True
    return False


def _only_states(leaves: list[Any]) -> bool:
    """Return whether the leaves are only gradients, optimizer states and the like: DTensors that need no autograd."""
    grad = torch.is_grad_enabled()
    found = False
    for leaf in leaves:
        if isinstance(leaf, PartedTensor):
            return False
        if isinstance(leaf, DTensor):
            if grad and leaf.requires_grad:
                return False
            found = True
        elif isinstance(leaf, Tensor) and leaf.dim():
            return False
    return found


def _operand(tensor: Tensor, number: int, kind: type[PartedTensor]) -> Operand:
    if isinstance(tensor, kind):
        return Operand(tensor.global_shape, tensor.split_layout, tensor.local.dtype, number)
    if isinstance(tensor, PartedTensor):
        return Operand(tensor.global_shape, None, innermost(tensor).dtype, number)
    return Operand(tuple(tensor.shape), None, tensor.dtype, number)


#: Types of arguments that a rule may inspect and for which ``==`` identifies equal values.
_VALUES = frozenset([
    int, float, bool, complex, str, type(None), type(Ellipsis), torch.dtype, torch.device, torch.layout,
    torch.memory_format,
])  # fmt: skip


def describe(tree: Any, tensors: list[Tensor], kind_of_parts: type[PartedTensor] = SplitTensor) -> Any:
    """Return a hashable key of everything a sharding rule can see of an argument; tensors are appended to ``tensors``.

    Raises:
        TypeError: If the argument contains an object whose values cannot be compared.
    """
    kind = type(tree)
    if kind in _VALUES:
        # 1, 1.0 and True compare equal but differ for a rule.
        return tree if kind is int or kind is str else (kind, tree)
    if isinstance(tree, Tensor):
        tensors.append(tree)
        if isinstance(tree, kind_of_parts):
            return Tensor, tree.global_shape, tree.split_layout, tree.local.dtype
        if isinstance(tree, PartedTensor):
            return Tensor, tree.global_shape, None, innermost(tree).dtype
        return Tensor, tree.shape, None, tree.dtype
    if isinstance(tree, (tuple, list)):
        return (kind, *[describe(item, tensors, kind_of_parts) for item in tree])
    if kind is dict:
        return (dict, *[(key, describe(item, tensors, kind_of_parts)) for key, item in tree.items()])
    if kind is slice and {type(tree.start), type(tree.stop), type(tree.step)} <= {int, type(None)}:
        return slice, tree.start, tree.stop, tree.step
    raise TypeError(f"{kind.__name__} has no value to compare")


def _strides(tensor: Tensor) -> tuple[int, ...]:
    return tuple(torch.empty(tensor.shape, device="meta").stride())


def eager() -> AbstractContextManager[Any]:
    """Run compiled code eagerly inside: a compiler would trace through the code that unwraps split tensors."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


@contextmanager
def _without_mha_fast_path() -> Iterator[None]:
    """Disable torch's fused inference kernel for encoder layers, which takes plain parameters only."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _whole_arguments_for_custom_functions(runtime: TensorRuntime) -> AbstractContextManager[None]:
    """Intercept custom autograd functions, which bypass torch functions: their inputs would lose their history."""

    def call(cls: Any, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if cls.__module__.startswith("torch.distributed.fsdp") and _involves_split_tensors(args, runtime.kinds):
            return _on_locals(lambda *parts: apply(*parts, **kwargs), args, runtime)
        # DTensor's own autograd functions handle DTensors themselves.
        if cls.__module__.startswith("torch.distributed.") or only_keeps_inputs(cls):
            return apply(*args, **kwargs)
        if _involves_split_tensors(args, runtime.kinds):
            opened = map_only(DTensor, runtime.opened_for_function, args)
            if any(isinstance(leaf, runtime.kind) for leaf in pytree.tree_leaves(opened)):
                runtime._remember(cls.__name__, "custom autograd function", opened)
            args = runtime.whole(opened)
        return runtime.custom_function(apply, args, kwargs)

    return patches.custom_functions(call, runtime._held)


def _on_locals(apply: Callable[..., Any], args: tuple[Any, ...], runtime: TensorRuntime) -> Any:
    """Run a function that passes its tensors through to add autograd hooks, on the local shards of split tensors."""
    layouts = [arg.split_layout if isinstance(arg, runtime.kind) else None for arg in args]
    results = apply(*(arg.local if isinstance(arg, runtime.kind) else arg for arg in args))
    if not isinstance(results, tuple):
        return results
    layouts = layouts[len(layouts) - len(results) :]
    return tuple(
        result if layout is None else runtime.kind(result, layout, runtime)
        for result, layout in zip(results, layouts, strict=True)
    )


def _gathered(parameter: DTensor) -> DTensor:
    """Gather a parameter that is also sharded over data ranks and is used outside its module's call."""
    gather = getattr(parameter, "_pardist_gather", None)
    if gather is None:
        raise RuntimeError(
            "A parameter that is sharded over the data axis was used outside its module's call, which it was not in the"
            " first run of this step. Set data_settings={'detect_direct_param_use':"
            " 'always'} to look for such uses in every step."
        )
    gathered: DTensor = gather()
    return gathered
