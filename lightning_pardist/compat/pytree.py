"""Nested containers, including the container types that torch and other packages (transformers) have registered.

``torch.utils._pytree`` has no public name in any release so far. Its registry is what matters: functions written here
would not handle containers that other packages register.
"""

from __future__ import annotations

from torch.utils._pytree import (
    keystr,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

from lightning_pardist.compat.contract import Private

__all__ = ["keystr", "tree_flatten_with_path", "tree_leaves", "tree_map", "tree_map_only", "tree_unflatten"]

NAMES = tuple(
    Private(f"torch.utils._pytree.{name}", "batches and outputs of any container", "look for it in torch.utils.pytree")
    for name in __all__
)
