"""Data model of calls that treat each row of their arguments independently and can run on a subset of the rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

#: Positional and keyword arguments of a call.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Rows:
    """Location of the rows in a call's arguments and results.

    Attributes:
        arguments: Indices, among all leaves, of the tensors whose leading dims are the rows.
        places: Number of leading dims that index rows.
        dims: Those of them along which rows may be sharded.
        flat: For each returned tensor, whether its first dim is all row dims flattened.
    """

    arguments: tuple[int, ...]
    places: int
    dims: tuple[int, ...]
    flat: tuple[bool, ...] = (False,)


@dataclass(frozen=True)
class TakenRows:
    """This rank's rows of a call, with all arguments as plain tensors.

    Attributes:
        given: The call's arguments.
        put_back: Wraps the returned tensors into split tensors.
        enter: Enters a parameter into the computation, so that gradients of other ranks' rows are added.
    """

    given: Arguments
    put_back: Callable[[Any], Any]
    enter: Callable[[Tensor], Tensor]
