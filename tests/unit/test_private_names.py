"""Private names of torch, Lightning and torchmetrics are only used in compat/, and exist."""

import ast
import warnings
from pathlib import Path

import pytest

from lightning_pardist.compat import contract, versions

PACKAGE = Path(__file__).parents[2] / "lightning_pardist"
COMPAT = PACKAGE / "compat"
FOREIGN = ("torch", "lightning", "torchmetrics", "lightning_utilities", "jsonargparse")
#: Private in form only: of Python's own modules and named tuples.
STANDARD = {"_getframe", "_exit", "_current_frames", "_fields", "_asdict", "_replace", "_make"}
TREES = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
NAMES = contract.all_names()


def _is_private(name):
    return name.startswith("_") and not name.endswith("__") and name != "_"


def _defined(tree):
    """Return the names that a file defines, assigns to ``self``, or sets on third-party objects."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


OWN = {path: _defined(tree) for path, tree in TREES.items()}
EVERYWHERE = set().union(*OWN.values())


def _uses(path):
    """Yield ``(line, name)`` of every private name that a file did not define itself.

    A private attribute of ``self`` may come from any class of the package; one of another object only from this file.
    """
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if node.attr not in (EVERYWHERE if of_self else OWN[path]):
                yield node.lineno, node.attr
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for inner in ast.walk(node):
                inner.module = None  # never imported
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FOREIGN:
            for alias in node.names:
                if any(map(_is_private, [*node.module.split("."), alias.name])):
                    yield node.lineno, f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in FOREIGN and any(map(_is_private, alias.name.split("."))):
                    yield node.lineno, alias.name
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else None
            by_name = node.func.id in ("getattr", "hasattr", "setattr", "delattr") and isinstance(name, str)
            if by_name and _is_private(name) and name not in OWN[path]:
                yield node.lineno, name


@pytest.mark.parametrize("path", sorted(TREES), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_private_names_outside_of_compat(path):
    if COMPAT in path.parents:
        return
    found = [
        f"line {line}: {name}"
        for line, name in _uses(path)
        if name not in STANDARD and not name.startswith("_pardist_")
    ]
    assert not found, f"{path.name} uses {found}: put it behind a function in lightning_pardist/compat"


def _adapter_files():
    return [path for path in sorted(TREES) if COMPAT in path.parents]


@pytest.mark.parametrize("path", _adapter_files(), ids=lambda path: path.name)
def test_adapters_list_what_they_use(path):
    listed = {part for private in NAMES for part in private.path.split(".")}
    found = {name.rpartition(".")[2]: line for line, name in _uses(path)}
    missing = {name: line for name, line in found.items() if name not in listed | STANDARD | {"_C", "_functorch"}}
    assert not missing, f"{path.name} uses names that no NAMES lists: {missing}"


@pytest.mark.parametrize("private", NAMES, ids=lambda private: private.path)
def test_it_is_there(private):
    """Fails when a release has moved a name, with the name, its purpose, and the remedy."""
    assert private.needed_for
    assert private.instead
    if private.is_expected():
        assert private.is_there(), f"gone: {private}"


def test_no_name_is_listed_twice():
    paths = [private.path for private in NAMES]
    assert len(paths) == len(set(paths))


# --- versions -------------------------------------------------------------------------------------------------------


@pytest.fixture
def version(monkeypatch):
    """Return a function that fakes the installed version of a package."""

    def pretend(package, number):
        real = versions.installed
        monkeypatch.setattr(
            versions, "installed", lambda name: versions.parse(number) if name == package else real(name)
        )
        monkeypatch.setattr(contract, "installed", versions.installed)
        contract.warn_if_untested.cache_clear()

    yield pretend
    contract.warn_if_untested.cache_clear()


def test_what_is_too_old_is_refused_in_a_sentence(version):
    version("torch", "2.10.1")
    with pytest.raises(ImportError, match=r"needs torch 2\.11 or newer, and 2\.10\.1 is installed"):
        versions.require_supported()


def test_what_is_newer_than_tested_is_met_with_one_warning(version):
    version("torch", "2.16.0")
    with pytest.warns(UserWarning, match=r"torch 2\.16\.0 is newer than what lightning_pardist was tested with"):
        contract.warn_if_untested()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        contract.warn_if_untested()


def test_what_is_tested_is_met_with_none(version):
    version("torch", "2.15.3")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        contract.warn_if_untested()
        versions.require_supported()


def test_what_is_gone_is_refused_where_it_is_needed():
    gone = contract.Private("torch.Tensor._was_there_once", "an example", "do without")
    with pytest.raises(RuntimeError, match=r"_was_there_once \(needed for an example; do without\)"):
        contract.require((gone,))
