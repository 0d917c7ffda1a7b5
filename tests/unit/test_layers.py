"""Imports between layers point downwards only, file by file."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "lightning_pardist"
MAY_IMPORT_LIGHTNING = (
    "strategies",
    "axes",
    "trainer",
    "runtime",
    "callbacks",
    "planner",
    "doctor.py",
    "optim.py",
    "cli",
)
#: A layer may import itself and those listed after it; a file that is named has its own position.
LAYERS = [
    "cli",
    "doctor.py",
    "optim.py",
    "planner",
    "registry.py",
    "callbacks",
    "strategies",
    "axes",
    "trainer",
    "axes/base.py",
    "runtime",
    "engines",
    "checkpoint",
    "settings.py",
    "foreign_settings.py",
    "local_tensors.py",
    "collectives.py",
    "mesh.py",
    "compat",
]
FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}


def _imports(path):
    """Yield the modules that a file imports, anywhere in it, including imports for type checkers."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            yield from (name if (name := f"{module}.{alias.name}") in MODULES else module for alias in node.names)


def _may_import_lightning(path):
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] in MAY_IMPORT_LIGHTNING or str(relative).startswith("compat/lightning_")


def _layer(path):
    relative = path.relative_to(PACKAGE)
    return str(relative) if str(relative) in LAYERS else relative.parts[0]


def test_there_is_something_to_check():
    assert len(FILES) > 15
    assert all((PACKAGE / layer).exists() for layer in LAYERS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports(path):
    own = _layer(path)
    for name in _imports(path):
        if name.split(".")[0] in ("lightning", "pytorch_lightning") or ".compat.lightning_" in name:
            assert _may_import_lightning(path), f"{path.name} imports {name}"
        if own in LAYERS and name in MODULES and (target := _layer(MODULES[name])) in LAYERS:
            assert LAYERS.index(target) >= LAYERS.index(own), f"{path.name} imports {name}"


def test_no_file_imports_itself_by_way_of_others():
    graph = {
        module: {name for name in _imports(path) if name in MODULES} - {module} for module, path in MODULES.items()
    }
    while leaves := [module for module, targets in graph.items() if not targets & graph.keys()]:
        for module in leaves:
            del graph[module]
    assert not graph, f"in an import circle, or behind one: {sorted(graph)}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_environment_variables_are_read_in_one_place(path):
    if "environments" in path.parts:
        return
    text = path.read_text()
    for reading in ("os.environ.get(", "os.getenv(", "environ.copy("):
        assert reading not in text, f"{path} reads the environment"
