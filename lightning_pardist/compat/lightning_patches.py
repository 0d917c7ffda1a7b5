"""The one function of Lightning that is replaced while a strategy runs: ``grad_norm``."""

from __future__ import annotations

from types import CodeType

from lightning.pytorch.utilities import grads


def replace_grad_norm(code: CodeType) -> CodeType:
    """Replace the code of Lightning's ``grad_norm``, whatever names it was imported by.

    Args:
        code: Code of a function with the same arguments and defaults; its globals are those of Lightning's module.

    Returns:
        The previous code.
    """
    before = grads.grad_norm.__code__
    grads.grad_norm.__code__ = code
    return before
