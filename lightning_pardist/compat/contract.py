"""Registry of the private torch and Lightning names in use, and checks that the installed versions have them."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import pkgutil
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lightning_pardist.compat.versions import LIGHTNING, TORCH, installed, parse, text


@dataclass(frozen=True)
class Private:
    """A private name that torch or Lightning may change without notice.

    Attributes:
        path: Dotted path: module, class if any, name.
        needed_for: The feature that depends on it.
        instead: What to do when a release has moved it.
        since: First version that has it, if that is not the oldest supported one.
        until: First version that lacks it.
        on_instances: Whether it is set on single objects, so that its presence cannot be checked.
    """

    path: str
    needed_for: str
    instead: str
    since: str = ""
    until: str = ""
    on_instances: bool = False

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]

    @property
    def package(self) -> str:
        """``torch``, ``lightning`` or ``torchmetrics``."""
        return self.path.partition(".")[0]

    def is_expected(self) -> bool:
        """Return whether the installed version should have the name."""
        version = installed(self.package)
        if self.on_instances:
            return False
        return not (self.since and version < parse(self.since)) and not (self.until and version >= parse(self.until))

    def is_there(self) -> bool:
        """Return whether the installed version has the name. Imports the module that defines it."""
        owner = _owner(self.path.rpartition(".")[0])
        return owner is not None and (hasattr(owner, self.name) or self.name in _set_on_instances(owner))

    def __str__(self) -> str:
        return f"{self.path} (needed for {self.needed_for}; {self.instead})"


def missing(names: tuple[Private, ...]) -> list[Private]:
    """Return the names that the installed versions should have but lack."""
    return [private for private in names if private.is_expected() and not private.is_there()]


@functools.cache
def require(names: tuple[Private, ...]) -> None:
    """Check that the installed torch and Lightning have the names that are about to be used.

    Raises:
        RuntimeError: If some are missing, with the names, the features that need them, and what to do.
    """
    if gone := missing(names):
        versions = " and ".join(
            f"{package} {text(installed(package))}" for package in sorted({one.package for one in gone})
        )
        raise RuntimeError(f"{versions} lacks what lightning_pardist uses: {'; '.join(map(str, gone))}.")


def adapters(*, with_lightning: bool = True) -> Iterator[Any]:
    """Yield the modules of this package that list names, sorted by module name. Imports them.

    Args:
        with_lightning: Whether to include the modules that import lightning.
    """
    import lightning_pardist.compat as package

    for found in pkgutil.iter_modules(package.__path__):
        if found.name.startswith("lightning") and not with_lightning:
            continue
        module = importlib.import_module(f"{package.__name__}.{found.name}")
        if hasattr(module, "NAMES"):
            yield module


def all_names(*, with_lightning: bool = True) -> list[Private]:
    """Return the names of all adapters as one list."""
    return [private for module in adapters(with_lightning=with_lightning) for private in module.NAMES]


def as_markdown() -> str:
    """Return the documentation page that lists the names."""
    lines = []
    for module in adapters():
        title = (module.__doc__ or "").strip().partition("\n")[0]
        short = module.__name__.removeprefix("lightning_pardist.")
        lines += [f"## `{short}`", "", title, "", "| name | needed for | when it is gone |", "| --- | --- | --- |"]
        for private in module.NAMES:
            between = f" ({private.since or ''} to before {private.until})" if private.until else ""
            between = between or (f" (from {private.since})" if private.since else "")
            lines.append(f"| `{private.path}`{between} | {private.needed_for} | {private.instead} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


@functools.cache
def warn_if_untested() -> None:
    """Warn once, when a strategy is created, if torch or Lightning is newer than tested, with the names it lacks."""
    newer = [
        (package, text(found), newest)
        for package, (_, newest) in (("torch", TORCH), ("lightning", LIGHTNING))
        if (found := installed(package))[: len(parse(newest))] > parse(newest)
    ]
    if not newer:
        return
    which = " and ".join(f"{package} {found}" for package, found, _ in newer)
    tested = " and ".join(f"{package} {newest}" for package, _, newest in newer)
    gone = missing(tuple(all_names()))
    lacks = f"It lacks: {'; '.join(map(str, gone))}." if gone else "All private names that are used are there."
    warnings.warn(
        f"{which} is newer than what lightning_pardist was tested with ({tested}). {lacks} If something fails, install"
        f" {tested}.*, or a newer lightning_pardist.",
        stacklevel=2,
    )


def _owner(path: str) -> Any:
    """Return the module or class at a dotted path; None if there is none."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            found = getattr(found, part, None)
        return found
    return None


@functools.cache
def _set_on_instances(owner: Any) -> frozenset[str]:
    """Return the attributes that a class and its bases annotate, or that their methods assign to ``self``."""
    if not inspect.isclass(owner):
        return frozenset()
    found: set[str] = set()
    for cls in owner.__mro__:
        found.update(inspect.get_annotations(cls))
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
        except (OSError, TypeError, SyntaxError):
            continue
        found.update(node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _is_stored(node))
        # nn.Module and similar classes bypass their own __setattr__.
        found.update(
            node.args[0].value
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "__setattr__"
            and node.args
            and isinstance(node.args[0], ast.Constant)
            and isinstance(node.args[0].value, str)
        )
    return frozenset(found)


def _is_stored(node: ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self"
