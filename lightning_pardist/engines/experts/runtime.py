"""Runtime of a module whose experts are distributed over several ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_pardist.compat.modules import own_parameters
from lightning_pardist.engines.common.activation_checkpointing import ReplacedForward
from lightning_pardist.engines.experts.calls import ListedExperts
from lightning_pardist.engines.experts.exchange import Peers
from lightning_pardist.engines.experts.finding import ExpertLayer
from lightning_pardist.engines.experts.holding import HeldExperts
from lightning_pardist.engines.experts.layer_weights import places_of, with_expert_parameters
from lightning_pardist.engines.experts.stacked import StackedExperts
from lightning_pardist.engines.experts.trial import Choice
from lightning_pardist.engines.experts.weights import GatheredExperts
from lightning_pardist.engines.fsdp.collective_sequencer import CollectiveSequencer

Runner = StackedExperts | ListedExperts | GatheredExperts
_ABSENT = object()


class ExpertRuntime:
    """Replaces the forwards of modules with experts by runners that dispatch tokens or gather weights.

    Args:
        module: The root module, whose experts are distributed over several ranks.
        layers: Its layers of experts.
        choices: What each layer communicates: tokens or weights.
        held: The experts of this rank.
        group: The expert group.
        on_plain: Wraps a function that runs on plain tensors so that it accepts tensors sharded by other axes, see
            :meth:`~lightning_pardist.axes.base.RunContext.on_plain`.
        in_parts: Whether sequences are sharded over ranks.
        even: Whether tokens are dispatched evenly to stacked experts, whatever the router chooses, for tensors
            without values.

    Attributes:
        peers: The expert group, with the bytes sent.
        runners: The runner of each layer.
    """

    def __init__(
        self,
        module: nn.Module,
        layers: Sequence[ExpertLayer],
        choices: Sequence[Choice],
        held: HeldExperts,
        group: dist.ProcessGroup,
        *,
        on_plain: Callable[..., Callable[..., Any]] = lambda run, *others: run,
        in_parts: bool = False,
        even: bool = False,
    ) -> None:
        self._even = even
        # For lists, ranks exchange the number of rows for each expert.
        self.peers = Peers(group, max([3, *(layer.count // group.size() for layer in layers if not layer.stacked)]))
        self.layers, self.choices = tuple(layers), tuple(choices)
        self.runners: list[Runner] = []
        self._sequencer = self.peers.sequencer = CollectiveSequencer(group, group)
        self._sequencer.join = lambda kind, index: self.join_collective(index)
        self._is_shared = False
        self._in_parts = in_parts
        self._before: list[tuple[nn.Module, Any]] = []
        for number, (layer, choice) in enumerate(zip(layers, choices, strict=True)):
            runner = module.get_submodule(layer.runner)
            made = self._runner(number, layer, choice, module, runner, held)
            self.runners.append(made)
            if isinstance(made, ListedExperts):
                for index, expert in enumerate(layer.experts(module)):
                    called = made.called(index)
                    called.call = on_plain(called.call)
                    self._put(expert[0], called)
            self._put(runner, ReplacedForward(on_plain(made, choice.rows, _enter_others(layer, module))))
            layer.forget_batch()

    def _runner(
        self,
        number: int,
        layer: ExpertLayer,
        choice: Choice,
        module: nn.Module,
        runner: nn.Module,
        held: HeldExperts,
    ) -> Runner:
        experts, weights = layer.experts(module), held.weights(layer)
        if choice.dispatch == "weights":
            return GatheredExperts(number, layer, runner, runner.forward, weights, experts, self.peers)
        if choice.route is None:
            listed = [parts[0] for parts in experts]
            return ListedExperts(number, layer, runner.forward, listed, weights, self.peers)
        of_layer = number, layer, choice.route, runner, runner.forward, weights, self.peers
        return StackedExperts(*of_layer, even=self._even)

    def _put(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._before.append((module, vars(module).get("forward", _ABSENT)))
        vars(module)["forward"] = forward

    @torch.no_grad()
    def join_collective(self, index: int) -> None:
        """Take part, in evaluation, in a layer for which this rank has no batch. Collective over the group."""
        self.runners[index].run_empty()

    def share(self, sequencer: CollectiveSequencer, first_index: int) -> None:
        """Use another engine's sequencer for the order of layers; that engine starts and ends it.

        Two sequencers would deadlock: a rank that has nothing left to do serves one of them at a time.

        Args:
            sequencer: Sequencer over ranks that include this rank's group; it calls :meth:`join_collective`.
            first_index: Index of the first layer in its numbering.
        """
        self.peers.sequencer, self.peers.first_index, self._is_shared = sequencer, first_index, True

    def start_uneven(self) -> None:
        """Allow ranks to run different layers from here on, synchronised before each layer. Not collective."""
        self._sequencer.active = not self._is_shared

    def end_uneven(self) -> None:
        """Take part in layers that other ranks still run, until none does. Collective over the group."""
        if self._sequencer.active:
            self._sequencer.wait_for_all()
            self._sequencer.active = False

    def join_until_all(self) -> None:
        """Take part in layers that other ranks run until all have called this. Call right before another collective."""
        if self._sequencer.active:
            self._sequencer.wait_for_all()

    def forget_loads(self) -> None:
        """Reset the token counts of experts. Not collective."""
        for runner in self.runners:
            if runner.load is not None:
                runner.load.zero_()

    def loads(self, group: dist.ProcessGroup, device: torch.device) -> dict[str, torch.Tensor]:
        """Return the tokens of each expert since the last reset. Collective over ``group``.

        Args:
            group: All ranks whose tokens count: those that hold the experts together, others that share them, and those
                that run other layers.
            device: Device on which the group communicates.

        Returns:
            For each layer whose tokens are dispatched, its name -> int64 of shape ``[experts]``; the same on all ranks.
        """
        counted = [(layer, runner.load) for layer, runner in zip(self.layers, self.runners, strict=True)]
        wholes = []
        for layer, load in counted:
            if load is not None:
                whole = torch.zeros(self.peers.size, len(load), dtype=load.dtype, device=device)
                whole[self.peers.rank] = load
                wholes.append((layer.name, whole.flatten()))
        if not wholes:
            return {}
        flat = torch.cat([whole for _, whole in wholes])
        dist.all_reduce(flat, group=group)
        parts = flat.cpu().split([len(whole) for _, whole in wholes])
        return {name: part for (name, _), part in zip(wholes, parts, strict=True)}

    def remove(self) -> None:
        """Restore the modules' original forwards. Not collective."""
        for module, before in reversed(self._before):
            if before is _ABSENT:
                vars(module).pop("forward", None)
            else:
                vars(module)["forward"] = before
        self._before.clear()

    def describe(self) -> str:
        """Return lines on the placement of experts and on what each layer communicates."""
        size = self.peers.size
        lines = []
        for layer, choice in zip(self.layers, self.choices, strict=True):
            what = "tokens are sent" if choice.dispatch == "tokens" else f"weights are sent ({choice.reason})"
            kind = f"stacked in {', '.join(layer.stacked)}" if layer.stacked else "in a list"
            where = f"{layer.count // size} on each of {size} ranks"
            if self._in_parts:
                where += ", which call them with their own parts of sequences" if choice.rows else ""
                what += (
                    ""
                    if choice.rows
                    else "; whole sequences are gathered first, since the layer's result for a part differs"
                )
            lines.append(f"Experts {layer.name}: {layer.count} {kind}, {where}; {what}.")
        return "\n".join(lines)


def _enter_others(layer: ExpertLayer, module: nn.Module) -> Callable[..., AbstractContextManager[None]]:
    """Return a context factory that replaces a layer's non-expert parameters by a function of them."""
    runner = module.get_submodule(layer.runner)
    experts = {*places_of([part for parts in layer.experts(module) for part in parts])}
    experts |= {(runner, name) for name in layer.stacked}
    others = [place for place in places_of([runner]) if place not in experts]

    def enter(function: Callable[[Tensor], Tensor]) -> AbstractContextManager[None]:
        found = [(place, own_parameters(place[0])[place[1]]) for place in others]
        # DTensors are another engine's shards, which it gathers itself.
        plain = [(place, value) for place, value in found if value is not None and not isinstance(value, DTensor)]
        return with_expert_parameters([place for place, _ in plain], [function(value) for _, value in plain])

    return enter
