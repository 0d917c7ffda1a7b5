"""Application of a plan: replaces parameters by DTensors in place, and undoes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_pardist.collectives import as_bytes
from lightning_pardist.compat.dtensor_operators import complete_operators, restore_operators
from lightning_pardist.compat.modules import own_buffers, own_parameters
from lightning_pardist.engines.common.meta_init import InitFunction, materialize, on_meta
from lightning_pardist.engines.common.parameter_traits import copy_traits
from lightning_pardist.engines.common.settable_parameter import make_settable
from lightning_pardist.engines.ddp.sparse import sparse_parameters
from lightning_pardist.engines.tensor.dispatch import TensorRuntime
from lightning_pardist.engines.tensor.layout import Layout, from_placement, to_placement
from lightning_pardist.engines.tensor.tensor_plan import TensorParallelPlan
from lightning_pardist.local_tensors import is_over, wrap_tensor_shard
from lightning_pardist.mesh import EXPERT_AXIS


def apply_layout(
    module: nn.Module,
    plan: TensorParallelPlan,
    mesh: DeviceMesh,
    *,
    init: InitFunction | None = None,
    plain: Iterable[str] = (),
) -> TensorRuntime:
    """Shard a module in place. Collective over the mesh; make optimizers afterwards.

    Every parameter becomes a DTensor on ``mesh`` (sharded or replicated, so that optimizers and gradient norms handle
    one type), tied ones stay tied, and values are those of the first tensor rank. Buffers that belong to sharded
    channels are sharded, others are broadcast. A module that was built on ``meta`` is initialised submodule by
    submodule, in the order of its construction, so that no rank ever holds more than one full submodule.

    Args:
        module: The module that the plan was made for, not sharded, on the device it trains on or on ``meta``.
        plan: From :func:`~lightning_pardist.engines.tensor.plan_layout`.
        mesh: One-dimensional mesh of the tensor ranks.
        init: Initialises the own parameters of one submodule that was built on ``meta``, instead of its
            ``reset_parameters``; the random state must be equal on all ranks.
        plain: Names of parameters that stay plain tensors because they are sharded elsewhere (experts).

    Returns:
        The runtime: ``with runtime.step(): loss = module.training_step(batch, 0); loss.backward()``.

    Raises:
        ValueError: If the mesh size differs from the plan's, or the module's parameters or shapes do, or if parameters
            on ``meta`` belong to a module that does not define their initial values.
    """
    if mesh.size() != plan.tp_size:
        raise ValueError(
            f"The plan is for {plan.tp_size} tensor ranks and the mesh has {mesh.size()}. Make the plan with"
            f" tp_size={mesh.size()}."
        )
    _check(module, plan)
    complete_operators()
    splitting = _Splitting(module, plan, TensorRuntime(mesh, sequence_parallel=plan.sequence_parallel), plain)
    if on_meta(module):
        materialize(module, splitting.split, is_unit=lambda child: True, init=init)
    else:
        for owner in list(module.modules()):
            splitting.split(owner)
    splitting.finish()
    return splitting.runtime


class _Splitting:
    """State of one :func:`apply_layout`, which shards parameters and buffers submodule by submodule."""

    def __init__(
        self, module: nn.Module, plan: TensorParallelPlan, runtime: TensorRuntime, plain: Iterable[str]
    ) -> None:
        self.module, self.runtime, self.layouts = module, runtime, plan.layouts()
        self.prefixes = {owner: prefix for prefix, owner in module.named_modules()}
        # Sparse gradients hold row indices, which a DTensor cannot represent.
        sparse = set(sparse_parameters(module))
        self.plain = set(plain) | {
            full for owner, name, full in _slots(module, buffers=False) if own_parameters(owner)[name] in sparse
        }
        uses = Counter(id(own_parameters(owner)[name]) for owner, name, _ in _slots(module, buffers=False))
        self.tied = {
            full for owner, name, full in _slots(module, buffers=False) if uses[id(own_parameters(owner)[name])] > 1
        }
        self.on_meta = on_meta(module)
        self.made: dict[int, nn.Parameter] = {}
        self.wholes: dict[int, nn.Parameter] = {}

    @torch.no_grad()
    def split(self, owner: nn.Module) -> None:
        """Shard the submodule's own parameters and buffers, not its children's. Collective over the tensor ranks."""
        prefix = self.prefixes[owner]
        for name in list(own_parameters(owner)):
            self._split_parameter(owner, name, f"{prefix}.{name}" if prefix else name)
        for name, buffer in list(own_buffers(owner).items()):
            if buffer is None or isinstance(buffer, DTensor):
                continue
            buffer = self._on_device(buffer)
            if (full := f"{prefix}.{name}" if prefix else name) in self.layouts:
                own_buffers(owner)[name] = _distribute(buffer, self.layouts[full], self.runtime)
            else:
                own_buffers(owner)[name] = _broadcast(buffer, self.runtime) if buffer.numel() else buffer

    def _split_parameter(self, owner: nn.Module, name: str, full: str) -> None:
        parameter = own_parameters(owner)[name]
        if parameter is None or isinstance(parameter, DTensor):
            return
        if full in self.plain:
            parameter.data = _broadcast(self._on_device(parameter.data), self.runtime)
            return
        if id(parameter) not in self.made:
            split = _distribute(self._on_device(parameter.detach()), self.layouts.get(full), self.runtime)
            self.made[id(parameter)] = copy_traits(
                nn.Parameter(split, requires_grad=parameter.requires_grad), parameter
            )
            make_settable(self.made[id(parameter)])
            # Keep the parameter alive so that its id is not reused by another tensor.
            self.wholes[id(parameter)] = parameter
        # Assign by attribute, because RNNs keep a list of their weights that follows assignments.
        setattr(owner, name, self.made[id(parameter)])
        if self.on_meta and full not in self.tied:
            parameter.data = parameter.data.new_empty(0)

    def _on_device(self, tensor: Tensor) -> Tensor:
        # Values of a module built on meta were initialised on the host.
        return tensor.to(self.runtime.group.mesh.device_type) if self.on_meta else tensor

    def finish(self) -> None:
        """Update remaining references after all submodules have been sharded."""
        _replace_references(self.module, self.made)


def unsplit_module(module: nn.Module) -> None:
    """Undo :func:`apply_layout`: plain full parameters and buffers on every rank. Collective.

    Tied parameters stay tied. Gradients are dropped.

    Args:
        module: A module after :func:`apply_layout`; a module that was not sharded is left unchanged.
    """
    made: dict[int, nn.Parameter] = {}
    for owner, name, _ in _slots(module, buffers=False):
        parameter: Tensor | None = own_parameters(owner)[name]
        if not isinstance(parameter, DTensor) or is_over(parameter, EXPERT_AXIS):
            continue
        if id(parameter) not in made:
            whole_one = nn.Parameter(to_full_tensor(parameter).clone(), requires_grad=parameter.requires_grad)
            made[id(parameter)] = copy_traits(whole_one, parameter)
            made[id(parameter)]._pardist_split = parameter  # type: ignore[attr-defined]
        setattr(owner, name, made[id(parameter)])
    _replace_references(module, {id(new._pardist_split): new for new in made.values()})  # type: ignore[attr-defined]
    for whole in made.values():
        del whole._pardist_split  # type: ignore[attr-defined]
    for owner, name, _ in _slots(module, buffers=True):
        buffer = own_buffers(owner)[name]
        if isinstance(buffer, DTensor):
            own_buffers(owner)[name] = to_full_tensor(buffer).clone()
    if made:
        restore_operators()


def _check(module: nn.Module, plan: TensorParallelPlan) -> None:
    shapes = {item.name: item.shape for item in plan.parameters}
    found = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    for name in shapes.keys() ^ found.keys():
        raise ValueError(f"Plan and module have different parameters: {name} is in only one of them. Plan it again.")
    for name, shape in found.items():
        if shapes[name] != shape:
            raise ValueError(f"{name} has shape {shape}, but {shapes[name]} in the plan. Plan it again.")


def _slots(module: nn.Module, *, buffers: bool) -> Iterator[tuple[nn.Module, str, str]]:
    """Yield owner, attribute and full name of every parameter or buffer; tied ones each time."""
    for prefix, owner in module.named_modules():
        for name in list(own_buffers(owner) if buffers else own_parameters(owner)):
            yield owner, name, f"{prefix}.{name}" if prefix else name


def _replace_references(module: nn.Module, new: Mapping[int, nn.Parameter]) -> None:
    """Replace parameters that modules keep in plain attributes, lists and dicts, which assignments do not reach."""

    def replaced(value: Any) -> Any:
        if isinstance(value, nn.Parameter):
            return new.get(id(value), value)
        if type(value) not in (list, tuple):
            return value
        items = [replaced(item) for item in value]
        return value if all(a is b for a, b in zip(items, value, strict=True)) else type(value)(items)

    for owner in module.modules():
        for name, value in owner.__dict__.items():
            if type(value) is dict and name not in ("_parameters", "_buffers", "_modules"):
                value.update({key: replaced(item) for key, item in value.items() if replaced(item) is not item})
            elif (fresh := replaced(value)) is not value:
                if isinstance(value, list):
                    value[:] = fresh
                else:
                    owner.__dict__[name] = fresh


def _broadcast(tensor: Tensor, runtime: TensorRuntime) -> Tensor:
    source = dist.get_global_rank(runtime.group.process_group, 0)
    if not tensor.is_contiguous():
        whole = tensor.contiguous()
        dist.broadcast(as_bytes(whole), source, group=runtime.group.process_group)
        return tensor.copy_(whole)
    dist.broadcast(as_bytes(tensor), source, group=runtime.group.process_group)
    return tensor


def _distribute(whole: Tensor, layout: Layout | None, runtime: TensorRuntime) -> DTensor:
    whole = _broadcast(whole.detach(), runtime) if whole.numel() else whole.detach()
    group = runtime.group
    local = whole if layout is None else layout.take(whole, group.rank, group.size).clone()
    return DTensor.from_local(
        local.contiguous(),
        group.mesh,
        [to_placement(layout)],
        run_check=False,
        shape=whole.shape,
        stride=torch.empty(whole.shape, device="meta").stride(),
    )


def to_full_tensor(tensor: Tensor) -> Tensor:
    """Return a parameter, gradient or optimizer state as a plain full tensor. Collective over its mesh if sharded.

    Args:
        tensor: A DTensor on a one-dimensional mesh, or a plain tensor, which is returned detached.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    layout = from_placement(tensor.placements[-1], tensor.ndim)
    local = tensor.to_local().detach()
    if layout is None:
        return local
    local = local.contiguous()
    group = tensor.device_mesh.get_group(tensor.device_mesh.ndim - 1)
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather([as_bytes(part) for part in parts], as_bytes(local), group=group)
    return layout.join(parts)


def local_like(whole: Tensor, like: Tensor) -> Tensor:
    """Shard a plain full tensor over the tensor ranks like ``like``; the inverse of :func:`to_full_tensor`.

    Not collective.

    Raises:
        ValueError: If the shapes differ.
    """
    if not isinstance(like, DTensor):
        return whole
    if tuple(whole.shape) != tuple(like.shape):
        raise ValueError(f"A tensor of shape {tuple(whole.shape)} was loaded where {tuple(like.shape)} is needed.")
    axis = like.device_mesh.ndim - 1
    layout = from_placement(like.placements[axis], like.ndim)
    whole = whole.to(like.device)
    if layout is not None:
        whole = layout.take(whole, like.device_mesh.get_local_rank(axis), like.device_mesh.size(axis))
    return wrap_tensor_shard(whole.clone().contiguous(), like)
