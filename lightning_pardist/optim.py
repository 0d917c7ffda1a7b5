"""Parameter groups for optimizers that treat matrices separately, derived from a traced step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_pardist.compat import pytree
from lightning_pardist.compat.lightning_loops import trainer_of
from lightning_pardist.engines.parameter_roles import Role, find_roles
from lightning_pardist.engines.tensor.operator_trace import OperatorTrace, trace_operators
from lightning_pardist.trainer import trial_run

__all__ = ["ParameterGroups", "split_groups"]


@dataclass(frozen=True)
class ParameterGroups:
    """A module's trainable parameters grouped by their role in a step.

    Stores names and resolves them on access. It can therefore be created before a strategy shards the module and used
    afterwards in ``configure_optimizers``. It can be copied and pickled with its module.

    Attributes:
        module: Module that owns the parameters.
        roles: Role by parameter name; tied parameters appear once.
    """

    module: nn.Module
    roles: dict[str, Role]

    @property
    def matrices(self) -> list[nn.Parameter]:
        """Weights of hidden layers, stacks of them (experts) and filters, for Muon, Shampoo and similar optimizers."""
        return self._of("matrix")

    @property
    def embeddings(self) -> list[nn.Parameter]:
        """Lookup tables, learned inputs, and weights of the first layers on the batch; tied ones as well."""
        return self._of("embedding")

    @property
    def heads(self) -> list[nn.Parameter]:
        """Weights of layers that no other layer follows."""
        return self._of("head")

    @property
    def vectors(self) -> list[nn.Parameter]:
        """Biases, gains, scalars, additive position embeddings; depthwise filters."""
        return self._of("vector")

    @property
    def unused(self) -> list[nn.Parameter]:
        """Parameters that the traced step does not use."""
        return self._of("unused")

    @property
    def rest(self) -> list[nn.Parameter]:
        """All parameters but :attr:`matrices`, in the module's order."""
        return self._of("embedding", "head", "vector", "unused")

    def _of(self, *roles: Role) -> list[nn.Parameter]:
        params = dict(self.module.named_parameters(remove_duplicate=False))
        found = [(name, params.get(name)) for name, role in self.roles.items() if role in roles]
        if missing := [name for name, param in found if param is None]:
            raise RuntimeError(
                f"{type(self.module).__name__} no longer has the parameter {missing[0]!r}, which it had when"
                " split_groups was called. Call split_groups again after the module has changed."
            )
        return [param for _, param in found if param is not None and param.requires_grad]

    def __str__(self) -> str:
        """Return the number of parameters and elements of each role."""
        params = dict(self.module.named_parameters(remove_duplicate=False))
        counts, elements = Counter(self.roles.values()), Counter[str]()
        for name, role in self.roles.items():
            elements[role] += params[name].numel() if name in params else 0
        told = [f"{role}: {count} ({elements[role]:,} elements)" for role, count in sorted(counts.items())]
        return f"Parameters of {type(self.module).__name__} by their role in its step: {', '.join(told)}"


def split_groups(
    module: nn.Module, batch: Any, *, step: Callable[[nn.Module, Any], Any] | None = None
) -> ParameterGroups:
    """Split parameters into matrices of hidden layers, embeddings and heads, vectors and scalars.

    Needs a batch: the module's own step runs once on it, and a parameter's role follows from the operators that use it,
    not from its name, its module's class or its number of dims alone. Rows of an embedding are looked up, a hidden
    matrix multiplies a layer's output that leads to another layer, no layer follows a head, and the remaining
    parameters are used elementwise. Products that are written as elementwise operators and a sum are not recognised.
    The module is not changed, and the groups are logged. Not collective; the result is the same on every rank with a
    batch of the same form.

    Call it before the strategy splits the module, for example in ``setup``; the result can be used at any time::

        def setup(self, stage):
            self.groups = split_groups(self, next(iter(self.trainer.datamodule.train_dataloader())))

        def configure_optimizers(self):
            return MuonAndAdamW(matrices=self.groups.matrices, rest=self.groups.rest)

    Args:
        module: The unsharded module: a ``LightningModule``, whose ``training_step`` is run, or any other, which is
            called. On ``meta`` it is traced without values, if its step needs none.
        batch: A batch for ``training_step``; for other modules the argument, or a tuple or dict of arguments. On the
            module's device.
        step: Function of the module and the batch to run in place of ``training_step``, up to the loss. For
            ``training_step``s that use their optimizers, which do not exist yet.

    Returns:
        The groups, without parameters that are frozen at the time of access.

    Raises:
        ValueError: If the module is already sharded, or its step cannot be traced.
    """
    params = list(module.parameters())
    on_meta = [param.is_meta for param in params]
    if any(isinstance(param, DTensor) for param in params) or (any(on_meta) and not all(on_meta)):
        raise ValueError(
            f"split_groups needs the full module, but {type(module).__name__} is already sharded. Call it earlier,"
            " for example in setup(), and use its result in configure_optimizers()."
        )
    if on_meta and all(on_meta):
        batch = pytree.tree_map_only(Tensor, lambda tensor: tensor.to("meta"), batch)
    try:
        found = _traced(module, batch, step)
    except Exception as error:
        values = " (without values, because it is on the meta device)" if on_meta and all(on_meta) else ""
        raise ValueError(
            f"split_groups runs a step of {type(module).__name__}{values}, which failed: {type(error).__name__}:"
            f" {error}. Pass a batch that the step accepts, or step=."
        ) from error
    roles = find_roles(found)
    groups = ParameterGroups(module, roles)
    rank_zero_info(str(groups))
    return groups


def _traced(module: nn.Module, batch: Any, step: Callable[[nn.Module, Any], Any] | None) -> OperatorTrace:
    def run() -> Any:
        with torch.enable_grad():
            if step is not None:
                return step(module, batch)
            if isinstance(batch, dict):
                return module(**batch)
            return module(*batch) if isinstance(batch, tuple) else module(batch)

    if not isinstance(module, pl.LightningModule):
        return trace_operators(module, run)
    trainer = trainer_of(module)

    def run_training_step() -> Any:
        return trial_run.run(module, "training_step", batch, trainer)

    with trial_run.without_side_effects(module, trainer):
        return trace_operators(module, run_training_step if step is None else run)
