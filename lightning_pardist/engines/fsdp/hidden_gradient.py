"""What a gathered parameter has for a gradient between a backward and the end of the step that ran it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from lightning_pardist.compat import pytree
from lightning_pardist.compat.fsdp2 import ShardedParameter
from lightning_pardist.compat.tensors import disabled_torch_function, make_wrapper


class HiddenGradient(Tensor):
    """Stands in ``grad`` of a gathered parameter: the gradient is there, in shards, and cannot be computed with.

    ``None``, which it would be otherwise, means that there is no gradient, and code that leaves out parameters without
    one (sharpness-aware minimization, norms by hand) would leave them all out without a word.

    Args:
        whole: The parameter.
        name: Its name.

    Raises:
        RuntimeError: From whatever asks for values.
    """

    parameter_name: str
    __torch_function__ = disabled_torch_function

    @staticmethod
    def __new__(cls, whole: Tensor, name: str) -> HiddenGradient:
        """A tensor of the parameter's shape without memory, of the dtype that its gradients have to have."""
        plain = type(whole) is nn.Parameter and whole.is_leaf
        dtype = (getattr(whole, "grad_dtype", None) if plain else None) or whole.dtype
        made: HiddenGradient = make_wrapper(cls, whole.shape, dtype=dtype, device=whole.device)
        made.parameter_name = name
        return made

    def __init__(self, whole: Tensor, name: str) -> None:
        """Everything is set where it is made."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuse to compute."""
        found = next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        raise RuntimeError(_refusal(found.parameter_name, f"{func} reads or changes"))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"HiddenGradient({self.parameter_name})"


class HiddenGradients:
    """Puts them there behind a backward inside of a step, and takes them away before the next one. Not collective."""

    def __init__(self) -> None:
        self._hidden: list[tuple[ShardedParameter, nn.Parameter]] = []

    def hide(self, parameters: Iterable[tuple[ShardedParameter, str]]) -> None:
        """Behind a backward.

        Args:
            parameters: Those that are gathered, with their names.
        """
        for parameter, name in parameters:
            whole = parameter.unsharded
            if whole is not None and whole.grad is None and parameter.sharded.grad is not None:
                whole.grad = HiddenGradient(whole, name)
                self._hidden.append((parameter, whole))

    def follow(self) -> None:
        """Before an optimizer's step: drop the gradients that the user has (``p.grad = None``)."""
        for parameter, whole in self._hidden:
            if whole.grad is None:
                parameter.sharded.grad = None

    def end(self) -> None:
        """Before the next backward, and at the end of the step."""
        if self._hidden:
            self.follow()
            for _, whole in self._hidden:
                whole.grad = None
            self._hidden.clear()


def refuse_set(parameters: Iterable[tuple[ShardedParameter, str]]) -> None:
    """Before an optimizer's step: what the user has set in a gathered parameter's ``grad`` would be lost.

    Raises:
        RuntimeError: With the name of one.
    """
    for parameter, name in parameters:
        whole = parameter.unsharded
        if whole is not None and whole.grad is not None and not isinstance(whole.grad, HiddenGradient):
            raise RuntimeError(_refusal(name, "the step sets"))


def _refusal(name: str, who: str) -> str:
    return (
        f"{who} the gradient of {name}, which ranks hold in parts while training_step runs. Do so in a hook outside of"
        " the step, change gradients in it by torch's clipping functions, or use pardist_zero2 or pardist_ddp."
    )
