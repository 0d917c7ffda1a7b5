"""Experts stacked in parameters: tokens are dispatched to the ranks that hold the experts chosen by the router.

The module that owns the parameters is called with tokens, the expert indices of each token, and their weights. A token
is sent once to each rank that holds one of its experts. There the module's own forward runs on one row for each pair of
token and expert, with that rank's parameters and number of experts; the sum of a token's rows is sent back (Lepikhin et
al., GShard, arXiv 2006.16668, without capacities).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pardist.compat import pytree
from lightning_pardist.compat.autograd import current_backward
from lightning_pardist.engines.common.devices import numbers_on, preserve_random_state
from lightning_pardist.engines.experts.exchange import Form, Peers, all_to_all_with_grad, anchor, with_graph_inputs
from lightning_pardist.engines.experts.finding import ExpertLayer
from lightning_pardist.engines.experts.layer_weights import LayerWeights, with_parameters, without_reentrant
from lightning_pardist.engines.tensor.rows import Arguments


@dataclass(frozen=True)
class StackedRoute:
    """Roles of the arguments of a module with stacked experts, by their indices among all leaves.

    Attributes:
        index: Expert indices, integers of shape ``[..., k]``.
        weights: Tensors of the same shape.
        tokens: Tensors of shape ``[..., features]``.
        counts: Attributes of the module that hold the number of experts.
        choices: Attributes that hold ``k``.
    """

    index: int
    weights: tuple[int, ...]
    tokens: tuple[int, ...]
    counts: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()


#: Types of arguments that select how to compute, and are the same for all ranks' tokens; compared across ranks.
_MODES = (bool, str, type(None))
_OTHER = -1


def undispatched_arguments(route: StackedRoute, call: Arguments) -> list[tuple[int, Any]]:
    """Return the arguments that are not dispatched and may depend on a rank's samples, with their leaf indices."""
    travelling = {route.index, *route.weights, *route.tokens}
    leaves = enumerate(pytree.tree_leaves(call))
    return [(i, leaf) for i, leaf in leaves if i not in travelling and not isinstance(leaf, _MODES)]


def _digest(route: StackedRoute, call: Arguments) -> int:
    """Return a checksum that differs between calls whose tokens cannot be computed together; ``_OTHER`` if none can."""
    if undispatched_arguments(route, call):
        return _OTHER
    leaves = pytree.tree_leaves(call)
    modes = [(i, leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, _MODES)]
    return zlib.crc32(repr((len(call[0]), sorted(call[1]), modes)).encode())


def routes(layer: ExpertLayer, module: nn.Module) -> Iterator[StackedRoute]:
    """Yield possible roles of the arguments of a layer's first call, the likeliest first."""
    leaves = pytree.tree_leaves(layer.call)
    floats = [
        i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() >= 2
    ]
    attributes = {key: value for key, value in vars(module).items() if type(value) is int}
    for number, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor) or leaf.dtype not in (torch.int64, torch.int32) or leaf.dim() < 2:
            continue
        if leaf.numel() and not 0 <= int(leaf.min()) <= int(leaf.max()) < layer.count:
            continue
        places = leaf.shape[:-1]
        weights = tuple(i for i in floats if leaves[i].shape == leaf.shape)
        tokens = tuple(i for i in floats if leaves[i].shape[:-1] == places and i not in weights)
        if not tokens:
            continue
        counts = tuple(key for key, value in attributes.items() if value == layer.count)
        choices = tuple(key for key, value in attributes.items() if value == leaf.shape[-1])
        named = tuple(key for key in counts if "expert" in key)
        tried: dict[tuple[tuple[str, ...], tuple[str, ...]], None] = {}
        for some in (named, counts, (), *((key,) for key in counts)):
            for others in ((), tuple(key for key in choices if key not in some)):
                tried[some, others] = None
        for some, others in tried:
            yield StackedRoute(number, weights, tokens, some, others)


def run_pairs(
    module: nn.Module,
    forward: Callable[..., Any],
    route: StackedRoute,
    call: Arguments,
    parameters: dict[str, Tensor],
    pairs: tuple[Tensor, Sequence[Tensor], Sequence[Tensor]],
) -> Tensor:
    """Run the module's forward on one row for each pair of token and expert.

    Args:
        module: The module whose forward runs.
        forward: Its original forward.
        route: Roles of its arguments.
        call: Arguments, for the ones that are not dispatched.
        parameters: Parameters of the local experts, which replace the module's.
        pairs: Expert indices ``[pairs]``, tokens ``[pairs, ...]`` and weights ``[pairs]``.

    Returns:
        Shape ``[pairs, ...]``.
    """
    leaves = pytree.tree_leaves(call)
    dims = leaves[route.index].dim() - 1
    index, tokens, weights = pairs
    shape = (len(index), *([1] * (dims - 1)))
    changed: dict[int, Tensor] = {route.index: index.to(leaves[route.index].dtype).view(*shape, 1)}
    changed.update({i: t.view(*shape, *t.shape[1:]) for i, t in zip(route.tokens, tokens, strict=True)})
    changed.update({i: w.view(*shape, 1) for i, w in zip(route.weights, weights, strict=True)})
    args, kwargs = replaced(call, changed)
    here = next(iter(parameters.values())).shape[0]
    attributes = {**dict.fromkeys(route.choices, 1), **dict.fromkeys(route.counts, here)}
    with with_parameters(module, parameters, attributes):
        result = forward(*args, **kwargs)
    if not isinstance(result, Tensor) or result.shape[:dims] != shape:
        raise TypeError("the result is not one row for each token")
    return result.reshape(len(index), *result.shape[dims:])


def replaced(call: Arguments, changed: dict[int, Any]) -> Arguments:
    """Return arguments with some leaves replaced."""
    numbers = iter(range(10**9))
    result: Arguments = pytree.tree_map(
        lambda leaf: changed[number] if (number := next(numbers)) in changed else leaf, call
    )
    return result


class StackedExperts:
    """Runs a module with stacked experts on the tokens of all ranks that are routed to this rank.

    Args:
        number: Index of the layer, the same on all ranks.
        layer: The layer.
        route: Roles of the arguments of its module.
        module: The module.
        forward: Its original forward.
        weights: Parameters of this rank's experts, in the order of the layer's names.
        peers: The expert group.
        even: Whether tokens are dispatched evenly, whatever the router chooses, for tensors without values.
    """

    def __init__(
        self,
        number: int,
        layer: ExpertLayer,
        route: StackedRoute,
        module: nn.Module,
        forward: Callable[..., Any],
        weights: LayerWeights,
        peers: Peers,
        *,
        even: bool = False,
    ) -> None:
        self._dispatch = _Dispatch.even if even else _Dispatch.by_values
        self.number, self.layer, self.route = number, layer, route
        self.module, self.forward, self.weights, self.peers = module, forward, weights, peers
        leaves = pytree.tree_leaves(layer.call)
        travelling = {i: leaves[i] for i in (route.index, *route.tokens, *route.weights)}
        # Allocate new tensors: slices would keep the first batch in memory.
        self._empty = replaced(layer.call, {i: t.new_empty((0, *t.shape[1:])) for i, t in travelling.items()})
        self._dims = leaves[route.index].dim() - 1
        self._tail = layer.output.shape[self._dims :]
        #: Dtype that the module returns for rows of a form.
        self._dtypes: dict[Form, torch.dtype] = {}
        #: Number of token-expert pairs that this rank has computed since the start, by local expert.
        self.load = torch.zeros(layer.count // peers.size, dtype=torch.int64)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Replacement for the module's ``forward``. Collective over the expert group, in forward and in backward."""
        leaves = pytree.tree_leaves((args, kwargs))
        form = Form.here(*(leaves[i] for i in (*self.route.tokens, *self.route.weights)))
        with self.peers.sequenced(self.number):
            return self._run((args, kwargs), form)

    def _run(self, call: Arguments, form: Form | None) -> Tensor:
        leaves = pytree.tree_leaves(call)
        index = leaves[self.route.index]
        places = index.shape[:-1]
        sent = self._dispatch(index.reshape(math.prod(places), index.shape[-1]), self.layer.count, self.peers.size)
        digests = torch.full((self.peers.size, 1), _digest(self.route, call))
        told, form = self.peers.exchange_counts(self.number, torch.cat([sent.numbers, digests], dim=1), form)
        self._check(told[:, 2])
        rows, pairs = told[:, 0].tolist(), told[:, 1].tolist()
        form = form or Form.here(*(leaves[i] for i in (*self.route.tokens, *self.route.weights)))
        for i, dtype in zip((*self.route.tokens, *self.route.weights), form.dtypes, strict=True):
            leaves[i] = leaves[i].to(dtype)
        start = anchor(leaves[self.route.tokens[0]])
        tokens = [self._arrived(leaves[i], sent, rows, start) for i in self.route.tokens]
        weights = [
            all_to_all_with_grad(
                with_graph_inputs(leaves[i].reshape(-1)[sent.pairs], start), sent.pairs_to, pairs, self.peers
            )
            for i in self.route.weights
        ]
        about = self.peers.all_to_all(sent.about, sent.pairs_to, pairs)
        first = numbers_on(about.device, [sum(rows[:rank]) for rank in range(len(rows))], torch.int64)
        of_rank = numbers_on(about.device, pairs, torch.int64)
        row = about[:, 0] + first.repeat_interleave(of_rank, output_size=len(about))
        with form.entered(index.device.type):
            result = self._computed(call, form, row, about[:, 1], tokens, weights)
        back = all_to_all_with_grad(result, rows, sent.rows_to, self.peers)
        whole = back.new_zeros((sent.tokens, *back.shape[1:])).index_add(0, sent.rows, back)
        return with_graph_inputs(whole.reshape(*places, *self._tail))

    def run_empty(self) -> None:
        """Take part in a layer that other ranks run, with no tokens and in the form of theirs. Collective."""
        self._run(self._empty, None)

    def _check(self, digests: Tensor) -> None:
        """Check that calls match. All ranks compare the same digests, and raise together."""
        if (digests != digests[0]).any() or (digests == _OTHER).any():
            raise RuntimeError(
                f"The arguments of the experts {self.layer.name!r} differ from those in the trial, or between ranks."
                " Only tokens, expert indices and routing weights are sent between ranks: all other arguments have to"
                ' be the same. Set expert_dispatch="weights".'
            )

    def _arrived(self, tokens: Tensor, sent: _Dispatch, rows: list[int], start: Tensor) -> Tensor:
        flat = tokens.reshape(sent.tokens, math.prod(tokens.shape[self._dims :]))
        return all_to_all_with_grad(with_graph_inputs(flat[sent.rows], start), sent.rows_to, rows, self.peers)

    def _computed(
        self, call: Arguments, form: Form, row: Tensor, index: Tensor, tokens: list[Tensor], weights: list[Tensor]
    ) -> Tensor:
        """Return the sum over experts for each received token, shape ``[received, ...]``."""
        values = self.weights.full_values()
        parameters = dict(zip(self.layer.stacked, values, strict=True))
        shapes = [pytree.tree_leaves(call)[i].shape[self._dims :] for i in self.route.tokens]
        dtype = self._dtype(call, form, parameters, shapes, index.device)
        out = tokens[0].new_zeros((len(tokens[0]), math.prod(self._tail)), dtype=dtype)
        if not len(row):
            # The experts get zero gradients, like experts that no token chooses on a single process.
            return self.weights.release_after(with_graph_inputs(out, *tokens, *weights, *values), values)
        if current_backward() is None:
            # Do not count the recomputation of a checkpointed forward in backward.
            self.load = self.load.to(index.device).index_add_(0, index, torch.ones_like(index))
        of_pairs = [t[row].reshape(len(row), *shape) for t, shape in zip(tokens, shapes, strict=True)]
        with without_reentrant():
            result = run_pairs(self.module, self.forward, self.route, call, parameters, (index, of_pairs, weights))
        out = with_graph_inputs(out.index_add(0, row, result.flatten(1).to(dtype)), *tokens, *weights)
        return self.weights.release_after(out, values)

    @torch.no_grad()
    def _dtype(
        self,
        call: Arguments,
        form: Form,
        parameters: dict[str, Tensor],
        shapes: Sequence[torch.Size],
        device: torch.device,
    ) -> torch.dtype:
        """Return the dtype of the module's result, also on ranks without rows; found by running one row once."""
        if form not in self._dtypes:
            dtypes = iter(form.dtypes)
            tokens = [torch.zeros(1, *shape, dtype=next(dtypes), device=device) for shape in shapes]
            weights = [torch.zeros(1, dtype=dtype, device=device) for dtype in dtypes]
            index = torch.zeros(1, dtype=torch.int64, device=device)
            with preserve_random_state(device):
                row = run_pairs(self.module, self.forward, self.route, call, parameters, (index, tokens, weights))
            self._dtypes[form] = row.dtype
        return self._dtypes[form]


@dataclass(frozen=True)
class _Dispatch:
    """The tokens to send to each rank, and their experts there.

    Attributes:
        tokens: Number of tokens.
        rows: Token indices of the rows to send, ordered by rank.
        pairs: Positions of pairs in the flattened expert indices, ordered by rank.
        about: For each pair, the row among those that the rank receives from this one, and the local index of the
            expert there, shape ``[pairs, 2]``.
        numbers: Numbers of rows and of pairs sent to each rank, shape ``[ranks, 2]``, on the host.
    """

    tokens: int
    rows: Tensor
    pairs: Tensor
    about: Tensor
    numbers: Tensor

    @property
    def rows_to(self) -> list[int]:
        """Number of rows for each rank."""
        found: list[int] = self.numbers[:, 0].tolist()
        return found

    @property
    def pairs_to(self) -> list[int]:
        """Number of pairs for each rank."""
        found: list[int] = self.numbers[:, 1].tolist()
        return found

    @classmethod
    def by_values(cls, index: Tensor, count: int, size: int) -> _Dispatch:
        """Dispatch as a router has chosen.

        Args:
            index: Expert indices, shape ``[tokens, k]``; an index out of range stands for no expert.
            count: Number of experts; the ranks hold equal runs of them.
            size: Number of ranks.
        """
        tokens, choices = index.shape
        flat = index.reshape(-1).long()
        each = count // size
        valid = ((flat >= 0) & (flat < count)).nonzero().squeeze(1)
        owner = flat[valid] // each
        order = owner.argsort(stable=True)
        pairs, owner = valid[order], owner[order]
        token = pairs // choices
        goes = torch.zeros(size, tokens, dtype=torch.bool, device=index.device)
        goes[owner, token] = True
        about = torch.stack([(goes.cumsum(1) - 1)[owner, token], flat[pairs] % each], dim=1)
        numbers = torch.stack([goes.sum(1), torch.bincount(owner, minlength=size)], dim=1).cpu()
        return cls(tokens, goes.nonzero()[:, 1], pairs, about, numbers)

    @classmethod
    def even(cls, index: Tensor, count: int, size: int) -> _Dispatch:
        """Dispatch the average numbers of rows and pairs of ``k`` random experts per token, with uninitialised indices.

        The arguments are those of :meth:`by_values`.
        """
        tokens, choices = index.shape
        elsewhere = math.comb(count - count // size, choices) / max(1, math.comb(count, choices))
        rows, pairs = math.ceil(tokens * (1 - elsewhere)), math.ceil(tokens * choices / size)
        numbers = torch.tensor([[rows, pairs]] * size)
        empty = partial(index.new_empty, dtype=torch.int64)
        return cls(tokens, empty(size * rows), empty(size * pairs), empty(size * pairs, 2), numbers)
