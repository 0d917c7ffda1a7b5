"""Moving a module to the CPU after an interrupted run, if other ranks hold parts of it."""

from __future__ import annotations

from functools import partial

from torch import nn

from lightning_pardist.compat.modules import own_buffers, own_parameters


def skip_meta_in_cpu(module: nn.Module) -> None:
    """Make the next ``module.cpu()``, called by Lightning, skip ``meta`` tensors, whose values other ranks hold."""
    module.__dict__["cpu"] = partial(_cpu_except_meta, module)


def _cpu_except_meta(module: nn.Module) -> nn.Module:
    module.__dict__.pop("cpu", None)
    for each in module.modules():
        for tensor in (*own_parameters(each).values(), *own_buffers(each).values()):
            if tensor is not None and not tensor.is_meta:
                tensor.data = tensor.data.cpu()
    return module
