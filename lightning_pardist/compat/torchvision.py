"""Fix for importing torchvision with a torch build that cannot load torchvision's compiled operators.

torchvision's published Linux wheel is linked against the CUDA build of torch. Beside a CPU-only build its extension
does not load, and ``import torchvision`` then fails on "operator torchvision::nms does not exist", and with it
``import lightning``, because torchmetrics imports torchvision. Datasets, transforms and models need none of these
operators; only their schemas have to exist when torchvision registers its meta kernels.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from pathlib import Path

import torch

from lightning_pardist.compat.contract import Private

NAMES = (
    Private("torch._C._get_operation_overload", "torchvision beside a CPU-only torch, at import",
            "torch.ops.torchvision, which fails slowly"),
)  # fmt: skip

_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
# Kept for the life of the process: the declarations are dropped with the object.
_library: torch.library.Library | None = None


def declare_operators() -> bool:
    """Declare torchvision's operators, schema only, where its compiled extension cannot load.

    Does nothing if torchvision is absent, already imported, or intact. Safe to call many times.

    Returns:
        Whether the operators were declared by this call or an earlier one.
    """
    global _library
    if _library is not None:
        return True
    if "torchvision" in sys.modules or _is_declared("nms"):
        return False
    spec = importlib.util.find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        return False
    if _extension_loads(Path(next(iter(spec.submodule_search_locations)))):
        return False
    _library = torch.library.Library("torchvision", "DEF")
    for name, schema in _SCHEMAS.items():
        if not _is_declared(name):
            _library.define(schema)
    return True


def _extension_loads(package: Path) -> bool:
    """Return whether torchvision's own extension exists and its symbols resolve against this torch."""
    for extension in (*package.glob("_C*.so"), *package.glob("_C*.pyd")):
        try:
            ctypes.CDLL(str(extension))
        except OSError:
            continue
        return True
    return False


def _is_declared(name: str) -> bool:
    return torch._C._get_operation_overload(f"torchvision::{name}", "") is not None
