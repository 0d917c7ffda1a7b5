"""Parts of a step that compute each row of their arguments by itself, and so can be given some of the rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

#: Of a call: by position, and by keyword.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Rows:
    """Where the rows of a call are.

    Attributes:
        arguments: Tensors that have the rows along their first dims, by their numbers among all leaves.
        places: How many these dims are.
        dims: Those along which rows may be divided.
        flat: Of each tensor that is returned, whether its first dim is all of these dims together.
    """

    arguments: tuple[int, ...]
    places: int
    dims: tuple[int, ...]
    flat: tuple[bool, ...] = (False,)


@dataclass(frozen=True)
class TakenRows:
    """This rank's rows of a call, with all that it is given as ordinary tensors.

    Attributes:
        given: The call's arguments.
        put_back: Makes split tensors of what it returns.
        enter: Makes of a parameter what it computes with, where other ranks' rows add to the gradient as well.
    """

    given: Arguments
    put_back: Callable[[Any], Any]
    enter: Callable[[Tensor], Tensor]
