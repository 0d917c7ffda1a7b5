"""Optimizers that a module creates before a run, for example in ``__init__``, and keeps after it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_pardist.axes.base import RunContext
from lightning_pardist.checkpoint.nested import map_tensors
from lightning_pardist.engines.pipeline.placement import replace_in
from lightning_pardist.engines.tensor import tensor_optimizer
from lightning_pardist.trainer.state_dicts import StateDicts

#: Parameter attribute that holds the number of the run and the parameter's name in it.
_NAME = "_pardist_noted"
_RUNS = itertools.count(1)


class KeptOptimizers:
    """Rebinds optimizers to the module's current parameters if they were created with earlier ones.

    A strategy replaces parameters by shards, or by empty parameters if another rank holds them. An optimizer that was
    created earlier would keep stepping the replaced parameters, and nothing would be trained. After the run the
    optimizer holds the module's full parameters again, with full optimizer state.

    Args:
        context: Context of the strategy that uses the optimizers.
        states: Gathers and shards the optimizer state.
    """

    def __init__(self, context: RunContext, states: StateDicts) -> None:
        self.context = context
        self.states = states
        #: Number of the run whose names are valid.
        self._run = 0
        self._kept: list[Optimizer] = []
        self._states: dict[Optimizer, dict[str, Any]] = {}

    def note(self, module: nn.Module) -> None:
        """Record the parameter names and the optimizers of a module before it is transformed. Not collective."""
        self._name({param: name for name, param in module.named_parameters(remove_duplicate=False)})
        attributes = (value for child in module.modules() for value in vars(child).values())
        self._kept = list(dict.fromkeys(value for value in attributes if isinstance(value, Optimizer)))
        self._states = {}

    def adopt(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Replace recorded parameters in the optimizers by the module's current ones. Not collective.

        Args:
            module: The transformed module.
            optimizers: Optimizers from ``configure_optimizers``.

        Raises:
            ValueError: If, on several ranks, an optimizer holds a parameter that the module does not have.
        """
        present = set(module.parameters())
        for optimizer in optimizers:
            replaced = self._replaced(optimizer, module)
            if replaced:
                if optimizer not in self._kept:
                    self._kept.append(optimizer)
                if optimizer.state:
                    self._states[optimizer] = optimizer.state_dict()
                replace_in([optimizer], replaced)
            if self.context.dims.world_size > 1:
                _refuse_foreign_parameters(optimizer, present)
        _remove_names(present)

    def load(self) -> None:
        """Load this rank's part of the state that adopted optimizers had before the run. Not collective."""
        for optimizer, state in self._states.items():
            self.states.load_optimizer(optimizer, state)
        self._states = {}

    def gather(self) -> None:
        """Gather the full state of optimizers that outlive the fit, before it ends. Collective over the world."""
        self._name(self.states.current_names())
        for optimizer in self.context.optimizers:
            if optimizer in self._kept:
                whole = map_tensors(_on_host, self.states.full_optimizer_state(optimizer))
                self._states[optimizer] = self.context.broadcast(whole)

    def rebind(self) -> None:
        """Rebind kept optimizers to the module after the run, with full state if it is unsharded. Not collective."""
        states, kept, module = self._states, self._kept, self.context.module
        self._states, self._kept = {}, []
        if module is None:
            return
        for optimizer in kept:
            replaced = self._replaced(optimizer, module)
            if optimizer not in states and not replaced:
                continue
            state = states.get(optimizer) or optimizer.state_dict()
            replace_in([optimizer], replaced)
            if any(isinstance(param, DTensor) for group in optimizer.param_groups for param in group["params"]):
                # Too large to be unsharded: parameters and state stay as they are.
                continue
            tensor_optimizer.detach(optimizer)
            optimizer.state.clear()
            optimizer.load_state_dict(map_tensors(torch.clone, state))
        _remove_names(module.parameters())

    def _name(self, names: Mapping[Tensor, str]) -> None:
        """Store names as parameter attributes: a dict would keep replaced parameters alive, which must be freed."""
        self._run = next(_RUNS)
        for param, name in names.items():
            setattr(param, _NAME, (self._run, name))

    def _replaced(self, optimizer: Optimizer, module: nn.Module) -> dict[Any, nn.Parameter]:
        """Map an optimizer's recorded parameters to the module's current parameters of the same names."""
        now = dict(module.named_parameters(remove_duplicate=False))
        present = set(now.values())
        held = (param for group in optimizer.param_groups for param in group["params"] if param not in present)
        noted = {param: getattr(param, _NAME, (None, "")) for param in held}
        return {param: now[name] for param, (run, name) in noted.items() if run == self._run and name in now}


def _remove_names(parameters: Iterable[Tensor]) -> None:
    for param in parameters:
        param.__dict__.pop(_NAME, None)


def _on_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to the host before a broadcast, since device indices differ between ranks; DTensors stay."""
    return tensor if isinstance(tensor, DTensor) else tensor.cpu()


def _refuse_foreign_parameters(optimizer: Optimizer, present: set[nn.Parameter]) -> None:
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if param not in present and param.requires_grad and param.numel():
                raise ValueError(
                    f"Group {index} of {type(optimizer).__name__} holds a parameter of shape {tuple(param.shape)} that"
                    " the module does not have: its gradients would stay on one rank. Make the optimizer in"
                    " configure_optimizers, from self.parameters(), and register what it trains as a Parameter,"
                    " ParameterList or Module of the LightningModule."
                )
