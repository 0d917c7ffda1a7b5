"""Placeholder gradients of gathered parameters, between a backward and the end of the step that ran it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from lightning_pardist.compat import pytree
from lightning_pardist.compat.fsdp2 import ShardedParameter
from lightning_pardist.compat.tensors import disabled_torch_function, make_wrapper


class HiddenGradient(Tensor):
    """Placeholder in ``grad`` of a gathered parameter, whose gradient exists in shards and cannot be computed with.

    With ``None`` in its place, code that skips parameters without a gradient (sharpness-aware minimization, norms by
    hand) would silently skip all of them.

    Args:
        whole: The gathered parameter.
        name: Its name.

    Raises:
        RuntimeError: From every operation that reads or changes values.
    """

    parameter_name: str
    __torch_function__ = disabled_torch_function

    @staticmethod
    def __new__(cls, whole: Tensor, name: str) -> HiddenGradient:
        """Create a tensor of the parameter's shape without memory, with the dtype that its gradients must have."""
        plain = type(whole) is nn.Parameter and whole.is_leaf
        dtype = (getattr(whole, "grad_dtype", None) if plain else None) or whole.dtype
        made: HiddenGradient = make_wrapper(cls, whole.shape, dtype=dtype, device=whole.device)
        made.parameter_name = name
        return made

    def __init__(self, whole: Tensor, name: str) -> None:
        """Do nothing: ``__new__`` sets everything."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Raise an error for every operation."""
        found = next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        raise RuntimeError(_refusal(found.parameter_name, f"{func} reads or changes"))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"HiddenGradient({self.parameter_name})"


class HiddenGradients:
    """Sets placeholder gradients after a backward inside a step, and removes them before the next. Not collective."""

    def __init__(self) -> None:
        self._hidden: list[tuple[ShardedParameter, nn.Parameter]] = []

    def hide(self, parameters: Iterable[tuple[ShardedParameter, str]]) -> None:
        """Set placeholders after a backward, on parameters whose shards have a gradient.

        Args:
            parameters: Gathered parameters with their names.
        """
        for parameter, name in parameters:
            whole = parameter.unsharded
            if whole is not None and whole.grad is None and parameter.sharded.grad is not None:
                whole.grad = HiddenGradient(whole, name)
                self._hidden.append((parameter, whole))

    def follow(self) -> None:
        """Before an optimizer's step, drop shards' gradients that the user has cleared (``p.grad = None``)."""
        for parameter, whole in self._hidden:
            if whole.grad is None:
                parameter.sharded.grad = None

    def end(self) -> None:
        """Remove all placeholders, before the next backward and at the end of the step."""
        if self._hidden:
            self.follow()
            for _, whole in self._hidden:
                whole.grad = None
            self._hidden.clear()


def refuse_set(parameters: Iterable[tuple[ShardedParameter, str]]) -> None:
    """Check before an optimizer's step that no gathered parameter's ``grad`` was set by the user, which would be lost.

    Raises:
        RuntimeError: If one was, with its name.
    """
    for parameter, name in parameters:
        whole = parameter.unsharded
        if whole is not None and whole.grad is not None and not isinstance(whole.grad, HiddenGradient):
            raise RuntimeError(_refusal(name, "the step sets"))


def _refusal(name: str, who: str) -> str:
    return (
        f"{who} the gradient of {name}, which is sharded over ranks while training_step runs. Do this in a hook outside"
        " of the step, use torch's clipping functions inside of it, or use pardist_zero2 or pardist_ddp."
    )
