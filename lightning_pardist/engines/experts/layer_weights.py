"""Parameters of a layer's experts on this rank, as used by the experts' computation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_pardist.compat import patches
from lightning_pardist.compat.modules import own_parameters
from lightning_pardist.compat.tensors import below_torch_functions

Place = tuple[nn.Module, str]


def places_of(parts: Sequence[nn.Module]) -> list[Place]:
    """Return owner and name of every parameter of an expert, which may have parts in several lists."""
    return [
        (owner, name) for part in parts for owner in part.modules() for name, _ in owner.named_parameters(recurse=False)
    ]


class LayerWeights:
    """Parameters of this rank's experts of a layer, as used by the experts' computation.

    Args:
        places: Owner and name of each parameter.
    """

    def __init__(self, places: Sequence[Place]) -> None:
        self.places = list(places)

    def full_values(self) -> list[Tensor]:
        """Return the full values, with gradients. Collective in forward and in backward if they are sharded."""
        return [_part(own_parameters(owner)[name]) for owner, name in self.places]

    def release_after(self, result: Tensor, values: Sequence[Tensor]) -> Tensor:
        """Return a result computed from :meth:`full_values` values; they may be freed until its backward."""
        return result

    @contextmanager
    def in_modules(self, values: Sequence[Tensor]) -> Iterator[None]:
        """Context in which the modules that own the parameters compute with these values."""
        yield

    @contextmanager
    def without_values(self) -> Iterator[None]:
        """Context in which the modules can run without gathered values, to determine the form of a result."""
        yield


def with_parameters(
    module: nn.Module, values: dict[str, Tensor], attributes: dict[str, Any]
) -> AbstractContextManager[None]:
    """Replace a module's parameters and attributes inside, and in recomputations of functions checkpointed inside."""
    entries = [(own_parameters(module), name, value) for name, value in values.items()]
    return _inside([*entries, *((vars(module), name, value) for name, value in attributes.items())])


def with_expert_parameters(places: Sequence[Place], values: Sequence[Tensor]) -> AbstractContextManager[None]:
    """Like :func:`with_parameters`, for parameters of several modules."""
    return _inside([(own_parameters(owner), name, value) for (owner, name), value in zip(places, values, strict=True)])


@contextmanager
def _inside(entries: Sequence[tuple[dict[str, Any], str, Any]]) -> Iterator[None]:
    before = [(table, name, table[name]) for table, name, _ in entries]

    def with_them(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with _inside(entries):
                return function(*args, **kwargs)

        return run

    for table, name, value in entries:
        table[name] = value
    try:
        with patches.recomputed_functions(with_them):
            yield
    finally:
        for table, name, value in before:
            table[name] = value


def without_reentrant() -> AbstractContextManager[None]:
    """Reject reentrant checkpointing inside: it reruns a function as a step of its own, after the weights are gone."""
    return patches.refuse_reentrant(
        "Experts are checkpointed with use_reentrant=True, which runs them again when their weights are gone"
        " from their modules. Pass use_reentrant=False to torch.utils.checkpoint.checkpoint."
    )


def _part(parameter: Any) -> Tensor:
    """Return this rank's part of a parameter, whose gradient becomes the parameter's."""
    if not isinstance(parameter, DTensor):
        own: Tensor = parameter
        return own
    # Bypass torch functions: the tensor-parallel runtime would take any DTensor for a parameter of its own.
    with below_torch_functions():
        local: Tensor = parameter.to_local()
    return local
