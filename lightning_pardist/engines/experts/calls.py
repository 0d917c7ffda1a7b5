"""Experts in a ``ModuleList``: each expert's inputs are dispatched to the rank that holds it.

The module's forward runs twice. In a dry run, each expert records its input and returns zeros. Then all inputs are
exchanged at once, each rank runs its experts on the received rows, the results are exchanged back, and the forward runs
again with each expert returning its results. Gradients flow to the inputs recorded in the dry run, whose outputs are
discarded. A trial detects modules for which this is not equivalent, see
:mod:`~lightning_pardist.engines.experts.trial`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pardist.compat import pytree
from lightning_pardist.compat.autograd import current_backward
from lightning_pardist.engines.common.activation_checkpointing import ReplacedForward
from lightning_pardist.engines.common.devices import preserve_random_state, random_state, set_random_state
from lightning_pardist.engines.experts.exchange import Form, Peers, all_to_all_with_grad, anchor, with_graph_inputs
from lightning_pardist.engines.experts.finding import ExpertLayer
from lightning_pardist.engines.experts.layer_weights import LayerWeights


class ListedExperts:
    """Runs a module whose experts are held by several ranks.

    Args:
        number: Index of the layer, the same on all ranks.
        layer: The layer.
        forward: The original forward of the module that calls experts.
        experts: All experts; those of other ranks are never run.
        weights: Parameters of this rank's experts.
        peers: The expert group.
    """

    def __init__(
        self,
        number: int,
        layer: ExpertLayer,
        forward: Callable[..., Any],
        experts: Sequence[nn.Module],
        weights: LayerWeights,
        peers: Peers,
    ) -> None:
        self.number, self.layer, self.forward, self.peers = number, layer, forward, peers
        self.weights = weights
        self.each = layer.count // peers.size
        own = range(peers.rank * self.each, (peers.rank + 1) * self.each)
        self.own = [experts[index] for index in own]
        # Kept here because the experts' forward attributes are replaced later.
        self._own_forwards = [ReplacedForward(expert.forward) for expert in self.own]
        (given,) = pytree.tree_leaves(layer.inputs)
        # Allocate a new tensor: a slice would keep the first batch in memory.
        self._like = given.new_empty((0, given.shape[-1]))
        self._width = layer.output.shape[-1]
        #: Dtype that an expert returns for rows of a form.
        self._dtypes: dict[Form, torch.dtype] = {}
        self._inputs: list[list[Tensor]] | None = None
        self._answers: list[list[Tensor]] | None = None
        #: Number of rows that this rank's experts have computed since the start.
        self.load = torch.zeros(self.each, dtype=torch.int64)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replacement for the module's ``forward``. Collective over the expert group, in forward and in backward."""
        before = random_state(self._like.device)
        inputs = self._inputs = [[] for _ in range(self.layer.count)]
        try:
            self.forward(*args, **kwargs)
        finally:
            self._inputs = None
        with self.peers.sequenced(self.number):
            back = self._exchanged(inputs)
        after = random_state(self._like.device)
        set_random_state(before, self._like.device)
        self._answers = _split(back, inputs, self._width)
        try:
            output = self.forward(*args, **kwargs)
            if any(self._answers):
                raise _mismatch_error(self.layer.name)
        finally:
            self._answers = None
            set_random_state(after, self._like.device)
        return join_exchange(output, back)

    def called(self, index: int) -> ReplacedForward:
        """Return the replacement of an expert's forward; checkpointing recomputes the expert's own, if local."""
        replaced, own = ReplacedForward(self._called(index)), index - self.peers.rank * self.each
        replaced.again = self._own_forwards[own] if 0 <= own < self.each else None
        return replaced

    def _called(self, index: int) -> Callable[..., Tensor]:

        def call(given: Tensor) -> Tensor:
            if self._inputs is not None:
                self._inputs[index].append(given)
                return given.new_zeros((*given.shape[:-1], self._width), dtype=self._dtype(Form.here(given)))
            if self._answers is not None:
                if not self._answers[index] or self._answers[index][0].shape[:-1] != given.shape[:-1]:
                    raise _mismatch_error(self.layer.name)
                return self._answers[index].pop(0)
            raise RuntimeError(
                f"Expert {index} of {self.layer.name!r} was called outside of {self.layer.runner!r}'s forward, but only"
                " one rank holds it. Call it inside of that forward."
            )

        return call

    def run_empty(self) -> None:
        """Take part in a layer that other ranks run, with no tokens and in the form of theirs. Collective."""
        self._exchanged([[] for _ in range(self.layer.count)])

    def _exchanged(self, inputs: list[list[Tensor]]) -> Tensor:
        """Return the results of all experts for this rank's inputs, concatenated."""
        forms = {Form.here(each) for calls in inputs for each in calls}
        if len(forms) > 1:
            raise RuntimeError(
                f"The experts {self.layer.name!r} were called with rows of different dtypes, or under different"
                " autocast settings, in one forward. Set expert_dispatch='weights'."
            )
        form = next(iter(forms), None)
        own_dtype = self._like.dtype if form is None else form.dtypes[0]
        like = self._like.to(own_dtype)
        flat = [torch.cat([each.flatten(0, -2) for each in calls]) if calls else like for calls in inputs]
        # -1 if this rank did not call an expert, as opposed to 0 rows: an expert that no rank calls has no gradients.
        counts = torch.tensor([len(rows) if calls else -1 for rows, calls in zip(flat, inputs, strict=True)])
        told, form = self.peers.exchange_counts(self.number, counts.view(self.peers.size, self.each), form)
        form = form or Form.here(like)
        like = like.to(form.dtypes[0])
        flat = [rows.to(like.dtype) for rows in flat]
        send = counts.clamp(min=0).view(self.peers.size, self.each).sum(1).tolist()
        sizes = told.clamp(min=0)
        receive = sizes.sum(1).tolist()
        start = anchor(like)
        rows = all_to_all_with_grad(with_graph_inputs(torch.cat(flat), start), send, receive, self.peers)
        blocks = [block.split(row.tolist()) for block, row in zip(rows.split(receive), sizes, strict=True)]
        values = self.weights.full_values()
        with form.entered(like.device.type), self.weights.in_modules(values):
            dtype = self._dtype(form)
            results = [
                self._run(index, [block[index] for block in blocks], bool((told[:, index] >= 0).any()), dtype)
                for index in range(self.each)
            ]
        packed = torch.cat([results[index][rank] for rank in range(self.peers.size) for index in range(self.each)])
        packed = self.weights.release_after(with_graph_inputs(packed, rows), values)
        return all_to_all_with_grad(packed, receive, send, self.peers)

    def _run(self, index: int, blocks: list[Tensor], called: bool, dtype: torch.dtype) -> Sequence[Tensor]:
        sizes = [len(block) for block in blocks]
        if not called:
            return [block.new_zeros((0, self._width), dtype=dtype) for block in blocks]
        if current_backward() is None:
            # Do not count the recomputation of a checkpointed forward in backward.
            self.load[index] += sum(sizes)
        result: Tensor = self._own_forwards[index](torch.cat(blocks))
        return [*torch.split(result.to(dtype), sizes)]

    @torch.no_grad()
    def _dtype(self, form: Form) -> torch.dtype:
        """Return the dtype of experts' results, also on ranks that run none; determined by one row, the first time."""
        if form not in self._dtypes:
            row = self._like.new_zeros((1, self._like.shape[-1]), dtype=form.dtypes[0])
            with preserve_random_state(row.device), self.weights.without_values():
                self._dtypes[form] = self._own_forwards[0](row).dtype
        return self._dtypes[form]


def _split(back: Tensor, inputs: list[list[Tensor]], width: int) -> list[list[Tensor]]:
    """Return the results split and shaped for each call."""
    shapes = [given.shape[:-1] for calls in inputs for given in calls]
    parts = iter(back.split([shape.numel() for shape in shapes]) if shapes else ())
    return [[next(parts).view(*given.shape[:-1], width) for given in calls] for calls in inputs]


def join_exchange(output: Any, back: Tensor) -> Any:
    """Join the exchange to the module's output, so that its backward runs even if this rank has called no expert."""
    first = [True]

    def join_first_tensor(leaf: Any) -> Any:
        if first[0] and isinstance(leaf, Tensor) and leaf.is_floating_point():
            first[0] = False
            return with_graph_inputs(leaf, back)
        return leaf

    return pytree.tree_map(join_first_tensor, output)


def _mismatch_error(name: str) -> RuntimeError:
    return RuntimeError(
        f"{name!r}: the forward that chooses among these experts runs twice when tokens are dispatched, and its second"
        " run called other experts than the first, or with inputs of other shapes. Set"
        ' expert_dispatch="weights".'
    )
