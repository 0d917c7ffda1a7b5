"""Flatten and rebuild nested values, including arbitrary objects that hold tensors in their attributes.

Modules return tuples, dicts, named tuples, dataclasses, distributions and user-defined classes. A stage has to find the
tensors in them, and a stub has to return the same structure with other tensors. ``torch.utils._pytree`` supports
registered types only; here any object that holds tensors in its attributes is a container.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import types
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch

#: Types that are never containers.
ATOMS = (str, bytes, int, float, complex, bool, type(None), type, torch.dtype, torch.device, torch.Size)


@dataclasses.dataclass(frozen=True)
class Spec:
    """The structure of a nested value without its leaves; picklable if the container types are.

    Attributes:
        kind: ``"leaf"``, ``"sequence"``, ``"fields"`` (named tuple), ``"mapping"``, ``"record"`` (mapping that is also
            a dataclass) or ``"object"`` (dataclass or any class with attributes, in ``__dict__`` or slots).
        type: The container's class.
        keys: Keys or attribute names, in order.
        children: One spec per key or position.
    """

    kind: str
    type: Any = None
    keys: tuple[Any, ...] = ()
    children: tuple[Spec, ...] = ()


LEAF = Spec("leaf")


def flatten(value: Any, *, stop: frozenset[int] = frozenset(), objects: bool = True) -> tuple[list[Any], Spec]:
    """Split a nested value into its leaves (tensors and everything that is not a container) and its structure.

    Args:
        value: Any value.
        stop: ``id`` of objects to treat as leaves although they hold tensors.
        objects: Whether to flatten objects that are neither sequence nor mapping.

    Returns:
        The leaves in a fixed order, and the spec that :func:`rebuild` takes.
    """
    leaves: list[Any] = []
    return leaves, _flatten(value, leaves, stop, objects, ())


def rebuild(spec: Spec, leaves: list[Any]) -> Any:
    """Rebuild a nested value from its structure and leaves; the inverse of :func:`flatten`.

    Args:
        spec: The structure.
        leaves: All leaves, in the order of ``flatten``.
    """
    return _rebuild(spec, iter(leaves))


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a nested value, in the order of :func:`flatten`."""
    return [leaf for leaf in flatten(value)[0] if isinstance(leaf, torch.Tensor)]


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to every leaf, preserving the structure."""
    leaves, spec = flatten(value)
    return rebuild(spec, [function(leaf) for leaf in leaves])


def _flatten(value: Any, leaves: list[Any], stop: frozenset[int], objects: bool, above: tuple[int, ...]) -> Spec:
    own: Any = type(value)
    if own is value.__class__ and _kind_of(own) == "leaf":
        leaves.append(value)
        return LEAF
    inside = None if id(value) in stop or id(value) in above else _contents(value)
    if inside is None or (inside[0] == "object" and not objects):
        leaves.append(value)
        return LEAF
    kind, keys, children = inside
    above = (*above, id(value))
    return Spec(kind, type(value), keys, tuple([_flatten(child, leaves, stop, objects, above) for child in children]))


def _contents(value: Any) -> tuple[str, tuple[Any, ...], list[Any]] | None:
    """Return kind, keys and children of a container; None for a leaf."""
    # By the class as which an object presents itself, as proxies do.
    shown: Any = value.__class__
    kind = _kind_of(shown)
    if kind == "leaf":
        return None
    if kind == "fields" or (kind == "sequence" and isinstance(value, tuple) and hasattr(value, "_fields")):
        return "fields", (), list(value)
    if kind == "sequence":
        # By its iterator: a subclass may refuse len() (irreducible representations).
        return kind, (), list(iter(value))
    if kind in ("mapping", "record"):
        return kind, tuple(value.keys()), list(value.values())
    attributes = _attributes(value)
    if attributes and not callable(value) and _holds_tensor(value, 0):
        return "object", tuple(attributes), list(attributes.values())
    return None


# Not without bound: a step may make classes.
@functools.lru_cache(maxsize=4096)
def _kind_of(kind: type) -> str:
    """Return the ``kind`` of :class:`Spec` for a class; ``"other"`` if it depends on the object."""
    if issubclass(kind, (torch.Tensor, torch.nn.Module, *ATOMS)):
        return "leaf"
    if issubclass(kind, (list, tuple)):
        return "fields" if issubclass(kind, tuple) and hasattr(kind, "_fields") else "sequence"
    if issubclass(kind, Mapping):
        return "record" if dataclasses.is_dataclass(kind) else "mapping"
    return "leaf" if issubclass(kind, Iterator) else "other"


def _holds_tensor(value: Any, depth: int) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if depth > 8 or isinstance(value, (torch.nn.Module, *ATOMS)) or _is_iterator(value):
        return False
    if isinstance(value, Mapping):
        return any(_holds_tensor(item, depth + 1) for item in value.values())
    if isinstance(value, (list, tuple)):
        return any(_holds_tensor(item, depth + 1) for item in value)
    attributes = _attributes(value)
    if not attributes or callable(value):
        return False
    return any(_holds_tensor(item, depth + 1) for item in attributes.values())


def _is_iterator(value: Any) -> bool:
    """Return whether a value yields values rather than holding them, as Lightning's ``dataloader_iter`` does."""
    return isinstance(value, Iterator) and not isinstance(value, (list, tuple, Mapping))


@functools.cache
def _slots_of(kind: Hashable) -> tuple[str, ...]:
    """Return the attributes that instances of a class keep in ``__slots__``, under their (mangled) names."""
    with_slots = [vars(each) for each in reversed(getattr(kind, "__mro__", ())) if "__slots__" in vars(each)]
    return tuple(
        name
        for members in with_slots
        for name, member in members.items()
        if isinstance(member, types.MemberDescriptorType)
    )


def _slots(kind: Any) -> tuple[str, ...]:
    return _slots_of(kind)


def _attributes(value: Any) -> dict[str, Any] | None:
    """Return an object's attributes from its ``__dict__`` and slots; None if it has neither."""
    own = getattr(value, "__dict__", None)
    slots = _slots(type(value))
    if not slots:
        return own if isinstance(own, dict) else None
    found = dict(own) if isinstance(own, dict) else {}
    return found | {name: getattr(value, name) for name in slots if hasattr(value, name)}


def _set_attributes(value: Any, attributes: dict[str, Any]) -> None:
    """Set attributes without the class's ``__setattr__``, which raises for a frozen dataclass."""
    slots = _slots(type(value))
    for name, child in attributes.items():
        if name in slots:
            object.__setattr__(value, name, child)
        else:
            value.__dict__[name] = child


def hidden_tensor(value: Any) -> str | None:
    """Return the type name of a leaf that holds a tensor which :func:`flatten` does not find; None if there is none.

    Examples are sets, iterators and objects of compiled classes.

    Args:
        value: Any value.
    """
    for leaf in flatten(value)[0]:
        if isinstance(leaf, (torch.Tensor, torch.nn.Module, *ATOMS)) or callable(leaf) or hasattr(leaf, "shape"):
            continue
        if _refers_to_tensor(leaf):
            return type(leaf).__qualname__
    return None


def _refers_to_tensor(value: Any) -> bool:
    level, seen = [value], {id(value)}
    for _ in range(_REACH):
        around = gc.get_referents(*level[:_MOST])
        level = [each for each in around if id(each) not in seen and not isinstance(each, _OUTSIDE)]
        if any(isinstance(each, torch.Tensor) for each in level):
            return True
        seen.update(map(id, level))
    return False


#: Maximum number of references from a leaf to a tensor in the search for hidden tensors.
_REACH = 4
#: Maximum number of objects whose references are followed, at each distance.
_MOST = 10_000
#: Types whose references are not followed.
_OUTSIDE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, torch.nn.Module)


def _rebuild(spec: Spec, leaves: Iterator[Any]) -> Any:
    if spec.kind == "leaf":
        return next(leaves)
    children = [_rebuild(child, leaves) for child in spec.children]
    if spec.kind == "fields":
        return spec.type(*children)
    if spec.kind == "sequence":
        return children if spec.type is list else spec.type(children)
    items = dict(zip(spec.keys, children, strict=True))
    if spec.kind == "record":
        names = {field.name for field in dataclasses.fields(spec.type) if field.init}
        made = spec.type(**{key: item for key, item in items.items() if key in names})
        for key, item in items.items():
            if key not in names:
                made[key] = item
        return made
    if spec.kind == "mapping":
        return _rebuild_mapping(spec.type, items)
    made = spec.type.__new__(spec.type)
    _set_attributes(made, items)
    return made


def _rebuild_mapping(kind: Any, items: dict[Any, Any]) -> Any:
    if kind is dict:
        return items
    try:
        return kind(items)
    except TypeError:
        # defaultdict and similar: the default factory is dropped, since the copy is only read.
        made = kind()
        made.update(items)
        return made


def replace_leaves(value: Any, leaves: list[Any]) -> Any:
    """Copy a nested value with other leaves, preserving the containers' other contents.

    Args:
        value: The original; not modified.
        leaves: New leaves in the order of :func:`flatten`.
    """
    return _replace(value, iter(leaves), ())


def _replace(value: Any, leaves: Iterator[Any], above: tuple[int, ...]) -> Any:
    inside = None if id(value) in above else _contents(value)
    if inside is None:
        return next(leaves)
    above = (*above, id(value))
    return with_children(value, [_replace(child, leaves, above) for child in inside[2]])


def children_of(value: Any) -> list[Any] | None:
    """Return the direct children of a container; None for a leaf."""
    inside = _contents(value)
    return None if inside is None else inside[2]


def named_children(value: Any) -> list[tuple[str, Any]] | None:
    """Return the direct children of a container with their keys, fields or positions; None for a leaf."""
    inside = _contents(value)
    if inside is None:
        return None
    kind, keys, children = inside
    names = value._fields if kind == "fields" else keys if kind != "sequence" else range(len(children))
    return list(zip(map(str, names), children, strict=True))


def with_children(value: Any, children: list[Any]) -> Any:
    """Copy a container with other children.

    Args:
        value: The original container; not modified.
        children: In the order of :func:`children_of`.
    """
    inside = _contents(value)
    if inside is None:
        return value
    kind, keys, _ = inside
    if kind == "fields":
        return type(value)(*children)
    if kind == "sequence":
        return children if type(value) is list else type(value)(children)
    if kind == "mapping" and type(value) is dict:
        return dict(zip(keys, children, strict=True))
    made = copy.copy(value)
    if kind == "object":
        _set_attributes(made, dict(zip(keys, children, strict=True)))
        return made
    for key, child in zip(keys, children, strict=True):
        made[key] = child
    return made


def follow(value: Any, other: Any) -> Any:
    """Update a nested value in place to the content of another one, preserving the identity of mutable containers.

    Args:
        value: The value to update; other code may hold references to its containers.
        other: The value to copy the content from.

    Returns:
        ``value``, or ``other`` if the types differ or ``value`` cannot be updated in place.
    """
    if value is other or type(value) is not type(other):
        return other
    if isinstance(value, dict):
        items = {key: follow(value.get(key), item) for key, item in other.items()}
        value.clear()
        value.update(items)
    elif isinstance(value, list):
        common = [follow(mine, item) for mine, item in zip(value, other, strict=False)]
        value[:] = common + other[len(common) :]
    elif isinstance(value, tuple):
        for mine, item in zip(value, other, strict=False):
            follow(mine, item)
        return other
    elif isinstance(value, (torch.Tensor, torch.nn.Module, *ATOMS)) or (others := _attributes(other)) is None:
        return other
    else:
        mine = _attributes(value) or {}
        for name in mine.keys() - others.keys():
            object.__delattr__(value, name)
        _set_attributes(value, {name: follow(mine.get(name), item) for name, item in others.items()})
    return value
