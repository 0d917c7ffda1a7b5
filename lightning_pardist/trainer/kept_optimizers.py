"""Optimizers that a module made before a run, in ``__init__`` say, and keeps after it."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_pardist.axes.base import RunContext
from lightning_pardist.engines.pipeline.placement import replace_in
from lightning_pardist.engines.tensor import tensor_optimizer
from lightning_pardist.trainer.state_dicts import StateDicts


class KeptOptimizers:
    """Lets optimizers hold the parameters that the module has, whatever it had when they were made.

    A strategy replaces parameters by shards, or by empty ones where another rank holds them. An optimizer made earlier
    would go on stepping on those that were replaced, and nothing would train. After the run it holds the module's whole
    parameters again, with the state that one process has.

    Args:
        context: Of the strategy whose optimizers they are.
        states: Puts their state together, and takes it apart.
    """

    def __init__(self, context: RunContext, states: StateDicts) -> None:
        self.context = context
        self.states = states
        self._names: dict[Tensor, str] = {}
        self._kept: list[Optimizer] = []
        self._states: dict[Optimizer, dict[str, Any]] = {}

    def note(self, module: nn.Module) -> None:
        """Note parameters and optimizers of a module that is about to be transformed. Not collective."""
        self._names = {param: name for name, param in module.named_parameters(remove_duplicate=False)}
        attributes = (value for child in module.modules() for value in vars(child).values())
        self._kept = list(dict.fromkeys(value for value in attributes if isinstance(value, Optimizer)))
        self._states = {}

    def adopt(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Give optimizers the module's parameters in place of those that were noted. Not collective.

        Args:
            module: The transformed module.
            optimizers: From ``configure_optimizers``.

        Raises:
            ValueError: If an optimizer of several ranks holds a parameter that the module does not have.
        """
        present, replaced = self._compared(module)
        for optimizer in optimizers:
            if _holds(optimizer, replaced):
                if optimizer not in self._kept:
                    self._kept.append(optimizer)
                if optimizer.state:
                    self._states[optimizer] = optimizer.state_dict()
                replace_in([optimizer], replaced)
            if self.context.dims.world_size > 1:
                _refuse_strangers(optimizer, present)

    def load(self) -> None:
        """Bring the state that adopted optimizers came with to what this rank holds. Not collective."""
        for optimizer, state in self._states.items():
            self.states.load_optimizer(optimizer, state)
        self._states = {}

    def gather(self) -> None:
        """Put the state of optimizers that outlive a fit together, before it ends. Collective over the world."""
        self._names = self.states.current_names()
        for optimizer in self.context.optimizers:
            if optimizer in self._kept:
                whole = apply_to_collection(self.states.whole_optimizer(optimizer), Tensor, _on_host)
                self._states[optimizer] = self.context.broadcast(whole)

    def give_back(self) -> None:
        """The run has ended: where the module is whole, the optimizers that it keeps are, too. Not collective."""
        states, kept, module = self._states, self._kept, self.context.module
        self._states, self._kept = {}, []
        if module is None:
            return
        _, replaced = self._compared(module)
        for optimizer in kept:
            if optimizer not in states and not _holds(optimizer, replaced):
                continue
            state = states.get(optimizer) or optimizer.state_dict()
            replace_in([optimizer], replaced)
            if any(isinstance(param, DTensor) for group in optimizer.param_groups for param in group["params"]):
                # Too large to be made whole: parameters and state go on as they are.
                continue
            tensor_optimizer.detach(optimizer)
            optimizer.state.clear()
            optimizer.load_state_dict(apply_to_collection(state, Tensor, torch.clone))

    def _compared(self, module: nn.Module) -> tuple[set[nn.Parameter], dict[Any, nn.Parameter]]:
        """The module's parameters, and which of them stand in the places of those that were noted."""
        now = dict(module.named_parameters(remove_duplicate=False))
        present = set(now.values())
        return present, {old: now[name] for old, name in self._names.items() if old not in present and name in now}


def _on_host(tensor: Tensor) -> Tensor:
    """On its way to ranks whose devices have other numbers."""
    return tensor if isinstance(tensor, DTensor) else tensor.cpu()


def _holds(optimizer: Optimizer, parameters: Container[Any]) -> bool:
    return any(param in parameters for group in optimizer.param_groups for param in group["params"])


def _refuse_strangers(optimizer: Optimizer, present: set[nn.Parameter]) -> None:
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if param not in present and param.requires_grad and param.numel():
                raise ValueError(
                    f"Group {index} of {type(optimizer).__name__} holds a parameter of shape {tuple(param.shape)} that"
                    " the module does not have: its gradients would stay on one rank. Make the optimizer in"
                    " configure_optimizers, from self.parameters(), and register what it trains as a Parameter,"
                    " ParameterList or Module of the LightningModule."
                )
