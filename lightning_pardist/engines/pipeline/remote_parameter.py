"""Placeholders for parameters of other ranks' stages, which raise an error when their values are accessed.

A plain ``meta`` tensor fails silently: copying it into a real tensor does not change that, and an expression with it is
again on ``meta``. User code outside of steps may use placeholders, for instance in a hook that averages a teacher's
weights with a student's. Allowed is what has no effect on this rank and takes effect on the rank that holds the
parameter: reading shapes, writing to the placeholder, and computing values that are not used.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_pardist.compat import pytree
from lightning_pardist.compat.tensors import below_subclasses, make_subclass
from lightning_pardist.engines.pipeline.errors import CannotPipelineError
from lightning_pardist.engines.pipeline.stubs import tensors_of

_VALUES: frozenset[Any] = frozenset(
    {
        Tensor.item,
        Tensor.tolist,
        Tensor.numpy,
        Tensor.__array__,
        Tensor.__bool__,
        Tensor.__float__,
        Tensor.__int__,
        Tensor.__index__,
    }
)


_FREEZING: frozenset[Any] = frozenset({Tensor.requires_grad.__set__, Tensor.requires_grad_})  # type: ignore[attr-defined]


_UNKNOWN = "a parameter"


class _Remote(Tensor):
    """A ``meta`` tensor computed from placeholders, labelled with the parameter that it comes from."""

    _pardist_what: str

    def __deepcopy__(self, memo: dict[int, Any]) -> _Remote:
        """Return another placeholder: user code copies state dicts to remember the best weights."""
        return self.detach()  # type: ignore[return-value]

    def __copy__(self) -> _Remote:
        """Return another placeholder."""
        return self.detach()  # type: ignore[return-value]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Be pickled without values, which a warning says on the first rank, as that is the one which saves."""
        if not dist.is_initialized() or dist.get_rank() == 0:
            warnings.warn(
                f"What is saved or pickled lacks the values of {self._pardist_what}: outside of steps each rank has"
                " only the parameters of its own stages. trainer.save_checkpoint, called on all ranks, saves all.",
                stacklevel=2,
            )
        return super().__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function on ``meta`` tensors, unless it needs values.

        Raises:
            CannotPipelineError: If it reads values, or writes to a tensor that is not on ``meta``.
        """
        kwargs = kwargs or {}
        with below_subclasses():
            if getattr(func, "__name__", "") == "__get__":
                # Attribute access (shape, gradient) is the most frequent case and reads no values.
                return _marked(func(*args), getattr(args[0], "_pardist_what", _UNKNOWN))
            what = next((t._pardist_what for t in tensors_of((args, kwargs)) if hasattr(t, "_pardist_what")), _UNKNOWN)
            written = args[0] if args and _writes(func) else kwargs.get("out")
            if func in _VALUES or any(not tensor.is_meta for tensor in tensors_of(written)):
                raise _wanted(what, func)
            # Replace DTensors of this rank's own stages: operators do not mix them with plain tensors.
            args, kwargs = pytree.tree_map_only(DTensor, _without_values, (args, kwargs))
            try:
                result = func(*args, **kwargs)
            except RuntimeError as error:
                if "meta" in str(error).lower():
                    raise _wanted(what, func) from error
                raise
            if func in _FREEZING and (borrowed := args[0].__dict__.get("borrowed")) is not None:
                func(borrowed, *args[1:], **kwargs)
            return _marked(result, what)


class RemoteParameter(nn.Parameter):
    """Placeholder on ``meta`` for a parameter that another rank holds, with its shape and dtype.

    While a ``borrowed`` copy of the values takes its place in the module, setting ``requires_grad`` applies to both.

    Args:
        data: A tensor on ``meta``.
        requires_grad: As for the parameter.
        what: Name and location of the parameter, for error messages.
    """

    _pardist_what: str

    def __new__(cls, data: Tensor, requires_grad: bool = True, *, what: str = _UNKNOWN) -> RemoteParameter:
        """Create a placeholder from a tensor on ``meta``."""
        made: RemoteParameter = make_subclass(cls, data.as_subclass(Tensor), requires_grad)
        made._pardist_what = what
        return made

    __torch_function__ = _Remote.__torch_function__

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Be pickled with its module, as a placeholder."""
        return _rebuilt, (tuple(self.shape), self.dtype, self.requires_grad, self._pardist_what)


def _rebuilt(shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool, what: str) -> RemoteParameter:
    return RemoteParameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad, what=what)


def _writes(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    return name in ("__set__", "__setitem__") or (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE


_IN_PLACE = frozenset(
    f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "pow", "mod", "and", "or")
)


def _without_values(tensor: DTensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _marked(value: Any, what: str) -> Any:
    if isinstance(value, Tensor):
        if type(value) is Tensor and value.is_meta:
            value = value.as_subclass(_Remote)
            value._pardist_what = what
        return value
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return type(value)(_marked(item, what) for item in value)
    return value


def _wanted(what: str, func: Callable[..., Any]) -> CannotPipelineError:
    return CannotPipelineError(
        f"{getattr(func, '__name__', func)} needs the values of {what}, but outside of steps each rank has only the"
        " parameters of its own stages. Use these values inside of training_step.",
        ("pardist_ddp", "pardist_zero1", "pardist_zero2"),
    )
