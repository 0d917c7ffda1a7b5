"""Parameters of a layer's experts on this rank, for the time in which these compute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_pardist.compat.modules import own_parameters

Place = tuple[nn.Module, str]


def places_of(parts: Sequence[nn.Module]) -> list[Place]:
    """Owner and name of every parameter of an expert, which may have parts in several lists."""
    return [
        (owner, name) for part in parts for owner in part.modules() for name, _ in owner.named_parameters(recurse=False)
    ]


class LayerWeights:
    """Parameters of this rank's experts of a layer, for the time in which these compute.

    Args:
        places: The owner and the name of each.
    """

    def __init__(self, places: Sequence[Place]) -> None:
        self.places = list(places)

    def taken(self) -> list[Tensor]:
        """Their values whole, with gradients. Collective where they are sharded, and so is backward."""
        return [_part(own_parameters(owner)[name]) for owner, name in self.places]

    def returned(self, result: Tensor, values: Sequence[Tensor]) -> Tensor:
        """What was computed from :meth:`taken` values, which nobody needs before backward reaches the result."""
        return result

    @contextmanager
    def in_modules(self, values: Sequence[Tensor]) -> Iterator[None]:
        """The modules that own the parameters compute with these values."""
        yield

    @contextmanager
    def blank(self) -> Iterator[None]:
        """The modules can run without values being gathered, to see what a result is like."""
        yield


@contextmanager
def in_place(module: nn.Module, values: dict[str, Tensor], attributes: dict[str, Any]) -> Iterator[None]:
    """The module has other parameters and attributes inside."""
    table: dict[str, Any] = own_parameters(module)
    before = {name: table[name] for name in values}
    kept = {name: vars(module)[name] for name in attributes}
    table.update(values)
    vars(module).update(attributes)
    try:
        yield
    finally:
        vars(module).update(kept)
        table.update(before)


def _part(parameter: Any) -> Tensor:
    """This rank's part, whose gradient becomes the parameter's."""
    local: Tensor = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local
