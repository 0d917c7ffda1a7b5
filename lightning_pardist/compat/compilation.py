"""torch.compile: backend lookup, and modules that the user has compiled already."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from lightning_pardist.compat.contract import Private

NAMES = (
    Private("torch._dynamo.lookup_backend", "counting and timing what is compiled, and naming what is compiled again",
            "pass the backend's name to torch.compile, and leave counting out"),
    Private("torch._dynamo.OptimizedModule", "leaving modules that the user compiled as they are",
            "hasattr(module, '_orig_mod')"),
    Private("torch.nn.Module._compiled_call_impl", "leaving modules that the user compiled as they are",
            "compile their blocks as well, which does no harm"),
    Private("torch._dynamo.convert_frame.compile_lock", "exact updates of servers beside a worker that compiles",
            "leave it out, and compile before training"),
)  # fmt: skip


def backend_of(name: str | Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that a compile backend's name stands for. Imports the compiler, which takes seconds.

    Raises:
        ValueError: If there is no backend of that name; the message lists the known ones.
    """
    import torch._dynamo

    if isinstance(name, str) and name not in (known := torch.compiler.list_backends(exclude_tags=())):
        raise ValueError(f"compile_backend={name!r} is unknown. Use {', '.join(known)}, or a function.")
    found: Callable[..., Any] = torch._dynamo.lookup_backend(name)
    return found


def no_concurrent_compile() -> AbstractContextManager[Any]:
    """Return a context in which no other thread compiles.

    While one does, ``torch.compiler.is_compiling()`` is true in all threads, and torch's optimizers then keep Python
    numbers as fp32 tensors (in torch 2.13, AdamW's bias corrections: 1e-7 off in fp64).
    """
    # If the compiler has not been imported, nothing compiles.
    frames = sys.modules.get("torch._dynamo.convert_frame")
    found: AbstractContextManager[Any] = nullcontext() if frames is None else frames.compile_lock
    return found


def compiles_itself(module: nn.Module) -> bool:
    """Return whether the user has compiled this module, by ``torch.compile(module)`` or ``module.compile()``."""
    if getattr(module, "_compiled_call_impl", None) is not None:
        return True
    compiler = sys.modules.get("torch._dynamo")
    return compiler is not None and isinstance(module, compiler.OptimizedModule)
