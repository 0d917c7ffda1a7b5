"""Tiled linear layers: each tile is gathered separately, for weights too large to gather whole.

[Note: tiles]
Memory-centric tiling (ZeRO-Infinity, arXiv 2104.07857, section 5.1.3) replaces a large layer by a sequence of smaller
ones. Here the layer remains one, with one parameter under its own name, sharded by rows as in ``fully_shard``, so
checkpoints and optimizers are not affected. A tile is the same few rows of every rank's shard. Forward gathers a tile,
computes its columns of the output and frees it; backward does the same for the gradient of the input, and reduces the
tile's own gradient into the shard at once. The traffic is that of a unit: 3 Psi (N-1)/N.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard

from lightning_pardist.collectives import reduce_scatter_flat
from lightning_pardist.compat.autograd import not_compiled
from lightning_pardist.compat.dtensor import around, make_spec
from lightning_pardist.compat.modules import own_parameters
from lightning_pardist.engines.common.parameter_traits import copy_traits
from lightning_pardist.engines.common.slice_exchange import exchanges_directly, gather_slices, scatter_slices
from lightning_pardist.engines.fsdp.collective_sequencer import GATHER, REDUCE, CollectiveSequencer
from lightning_pardist.engines.fsdp.fsdp_units import is_torch_composite
from lightning_pardist.local_tensors import gather_over_data

_LOW_PRECISION = (torch.bfloat16, torch.float16)


def find_tiled(
    module: nn.Module, above_bytes: float, *, ignored: Collection[nn.Parameter] = ()
) -> dict[str, nn.Linear]:
    """Find linear layers with a weight above a size that are only used by being called. Not collective.

    Excluded are weights registered in several places (tied), weights that are computed (parametrizations) or already
    split, and layers inside PyTorch's own modules, which read their weights directly.

    Args:
        module: Any module, on any device, ``meta`` included.
        above_bytes: Weights must have more bytes than this.
        ignored: Parameters that are left out.

    Returns:
        Name -> layer.
    """
    places: dict[nn.Parameter, int] = {}
    inside: set[nn.Module] = set()
    for child in module.modules():
        if is_torch_composite(child):
            inside.update(inner for inner in child.modules() if inner is not child)
        for parameter in own_parameters(child).values():
            if parameter is not None:
                places[parameter] = places.get(parameter, 0) + 1
    found: dict[str, nn.Linear] = {}
    for name, child in module.named_modules():
        if not isinstance(child, nn.Linear) or type(child).forward is not nn.Linear.forward:
            continue
        weight = own_parameters(child).get("weight")
        if weight is None or isinstance(weight, DTensor) or "forward" in child.__dict__ or child in inside:
            continue
        large = weight.numel() * weight.element_size() > above_bytes
        if large and places[weight] == 1 and not any(weight is other for other in ignored):
            found[name] = child
    return found


def weights(layers: Iterable[nn.Linear]) -> list[nn.Parameter]:
    """Return the weights of tiled layers, which belong to no unit."""
    return [layer.get_parameter("weight") for layer in layers]


def shard_rows(layer: nn.Linear, mesh: DeviceMesh, device: torch.device) -> nn.Parameter:
    """Replace a layer's weight by this rank's rows, as a ``DTensor`` under the same name. Not collective.

    Args:
        layer: Layer whose weight is whole, with the same values on every rank.
        mesh: 1D, or (replicate, shard).
        device: Where the rows are kept.
    """
    whole = layer.weight
    size, rank = mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
    chunk = -(-whole.size(0) // size)
    start = min(rank * chunk, whole.size(0))
    rows = whole.detach()[start : start + chunk].to(device, copy=True).contiguous()
    weight = nn.Parameter(_as_dtensor(rows, mesh, whole), requires_grad=whole.requires_grad)
    layer.weight = weight
    return weight


class TiledLinear:
    """Runs a linear layer in tiles, in place of its ``forward``.

    Args:
        name: The layer's name from the root.
        layer: Layer whose weight was sharded by :func:`shard_rows`.
        mesh: Mesh that was passed there.
        tile_bytes: Maximum size of a gathered tile, which has at least one row of every rank.
        policy: dtypes of gathered tiles and of reductions.
        sequencer: Orders collectives over the ranks that train together.
        first_index: Index of the first tile in the common numbering of units and tiles.
        queue_final: Queues the end-of-backward work; called inside of backward.
    """

    def __init__(
        self,
        name: str,
        layer: nn.Linear,
        mesh: DeviceMesh,
        *,
        tile_bytes: float,
        policy: MixedPrecisionPolicy | None,
        sequencer: CollectiveSequencer,
        first_index: int,
        queue_final: Callable[[], None],
    ) -> None:
        self.name = name
        self.layer = layer
        self.mesh = mesh
        self.sequencer = sequencer
        self.first_index = first_index
        self._queue_final = queue_final
        self._group = mesh.get_group(mesh.ndim - 1)
        self._size, self._rank = self._group.size(), self._group.rank()
        self._out, self._in = layer.weight.shape
        self._chunk = -(-self._out // self._size)
        row_bytes = self._size * self._in * layer.weight.element_size()
        self.tiles = -(-self._chunk // max(1, int(tile_bytes // row_bytes)))
        self._rows = -(-self._chunk // self.tiles)
        self.tiles = -(-self._chunk // self._rows)
        own = layer.weight.dtype
        self._dtype = own if policy is None or policy.param_dtype is None else policy.param_dtype
        self._reduce_dtype = self._dtype if policy is None or policy.reduce_dtype is None else policy.reduce_dtype
        layer.forward = self.forward  # type: ignore[method-assign]

    @not_compiled
    def forward(self, input: Tensor) -> Tensor:
        """Compute the layer's output. Collective over the shard group.

        Args:
            input: Shape ``[..., in_features]``.

        Returns:
            Shape ``[..., out_features]``.
        """
        x, device = input, input.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        dtype = autocast or self._dtype
        if x.dtype != dtype and (autocast is not None or self._dtype != self.layer.weight.dtype):
            x = x.to(dtype)
        y: Tensor = _Product.apply(x, self.layer.weight, self, dtype)
        bias = self.layer.bias
        return y if bias is None else y + bias.to(y.dtype)

    def undo(self) -> None:
        """Restore the layer's own forward and a whole weight. Collective over the mesh."""
        self.layer.__dict__.pop("forward", None)
        weight = self.layer.weight
        if isinstance(weight, DTensor):
            whole = nn.Parameter(gather_over_data(weight), requires_grad=weight.requires_grad)
            self.layer.weight = copy_traits(whole, weight)

    def __str__(self) -> str:
        megabytes = self.layer.weight.numel() * self.layer.weight.element_size() / 2**20
        return f"{self.name:<32} in {self.tiles} tiles of {megabytes / self.tiles:.2f} MB, of {megabytes:.2f} MB"

    # --- tiles --------------------------------------------------------------------------------------------------

    def _span(self, tile: int) -> tuple[int, int]:
        return tile * self._rows, min((tile + 1) * self._rows, self._chunk)

    def _local(self) -> Tensor:
        weight = self.layer.weight
        return weight.to_local().detach() if isinstance(weight, DTensor) else weight.detach()

    def _gather(self, tile: int, device: torch.device) -> Tensor:
        """Gather a tile's rows of all ranks, padding included, shape ``[ranks * rows, in_features]``."""
        start, stop = self._span(tile)
        whole = torch.empty(self._size, stop - start, self._in, dtype=self._dtype, device=device)
        own, mine = whole[self._rank], self._local()[start:stop]
        own[: mine.size(0)].copy_(mine)
        own[mine.size(0) :].zero_()
        self.sequencer.before(GATHER, self.first_index + tile)
        work = gather_slices(whole.view(-1), group=self._group)
        self.sequencer.after()
        work.wait()
        return whole.view(-1, self._in)

    def _reduce(self, tile: int, gradient: Tensor, into: Tensor) -> None:
        """Average a tile's gradient over the data ranks and add this rank's rows to ``into``."""
        start, stop = self._span(tile)
        flat = gradient.to(self._reduce_dtype).reshape(-1)
        self.sequencer.before(REDUCE, self.first_index + tile)
        if exchanges_directly(flat, self._group):
            reduced = scatter_slices(flat, group=self._group).finish()
        else:
            reduced = flat.new_empty(flat.numel() // self._size)
            reduce_scatter_flat(reduced, flat, group=self._group)
        if self.mesh.ndim == 2:
            dist.all_reduce(reduced, group=self.mesh.get_group(0))
        self.sequencer.after()
        rows = into[start:stop]
        mean = reduced.view(stop - start, self._in)[: rows.size(0)].mul_(1.0 / self.mesh.size())
        rows.add_(mean.to(rows))

    def join_collective(self, kind: int, tile: int) -> None:
        """Take part in a tile's collective that only other ranks need. Collective over the shard group."""
        local = self._local()
        device = torch.device(self.mesh.device_type) if local.device.type == "cpu" else local.device
        if kind == GATHER:
            self._gather(tile, device)
            return
        start, stop = self._span(tile)
        weight = self.layer.weight
        if weight.grad is None:
            weight.grad = _as_dtensor(torch.zeros_like(local), self.mesh, weight)
        nothing = torch.zeros(self._size * (stop - start), self._in, dtype=self._reduce_dtype, device=device)
        self._reduce(tile, nothing, weight.grad.to_local())  # type: ignore[attr-defined]

    # --- the product --------------------------------------------------------------------------------------------

    def product(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Compute ``x @ weight.T``."""
        flat = x.reshape(-1, self._in)
        out = flat.new_empty(flat.size(0), self._size, self._chunk)
        for tile in range(self.tiles):
            start, stop = self._span(tile)
            columns = flat @ self._gather(tile, x.device).to(dtype).t()
            out[:, :, start:stop] = columns.view(-1, self._size, stop - start)
        whole = out.view(flat.size(0), self._size * self._chunk)[:, : self._out].contiguous()
        return whole.view(*x.shape[:-1], self._out)

    def gradients(
        self, x: Tensor, gradient: Tensor, dtype: torch.dtype, for_input: bool, for_weight: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradient of the input, and that of this rank's rows averaged over the data ranks."""
        self._queue_final()
        flat = x.reshape(-1, self._in)
        padding = self._size * self._chunk - self._out
        pieces = nn.functional.pad(gradient.reshape(-1, self._out), (0, padding)).view(-1, self._size, self._chunk)
        wide = torch.float32 if dtype in _LOW_PRECISION else dtype
        # Sum over tiles in fp32, as a single product would do internally.
        of_input = torch.zeros(flat.shape, dtype=wide, device=x.device) if for_input else None
        of_rows = torch.zeros_like(self._local()) if for_weight else None
        for tile in range(self.tiles):
            start, stop = self._span(tile)
            piece = pieces[:, :, start:stop].reshape(flat.size(0), self._size * (stop - start))
            if of_input is not None:
                rows = self._gather(tile, x.device).to(dtype)
                if of_input.dtype == dtype:
                    of_input.addmm_(piece, rows)
                else:
                    of_input += piece @ rows
                del rows
            if of_rows is not None:
                self._reduce(tile, piece.t() @ flat, of_rows)
        weight = self.layer.weight
        return (
            None if of_input is None else of_input.to(dtype).view(x.shape),
            None if of_rows is None else _as_dtensor(of_rows, self.mesh, weight),
        )


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: TiledLinear, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer, ctx.dtype = layer, dtype
        return layer.product(x, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (x,) = ctx.saved_tensors
        for_input, for_weight = ctx.needs_input_grad[:2]
        return *ctx.layer.gradients(x, gradient, ctx.dtype, for_input, for_weight), None, None


def _as_dtensor(rows: Tensor, mesh: DeviceMesh, like: Tensor) -> DTensor:
    placements = [*(Replicate() for _ in range(mesh.ndim - 1)), Shard(0)]
    # Not from_local(), which would move rows that are kept on the host to the device.
    return around(rows, make_spec(mesh, placements, like.shape, like.stride(), rows.dtype))
