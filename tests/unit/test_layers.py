"""Dependencies point down only."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "lightning_pardist"
MAY_IMPORT_LIGHTNING = ("strategies", "environments", "callbacks", "registry.py", "cli.py")
#: A layer may import itself and what stands behind it.
LAYERS = [
    "cli.py",
    "doctor.py",
    "registry.py",
    "callbacks",
    "strategies",
    "environments",
    "engines",
    "collectives.py",
    "mesh.py",
]
FILES = sorted(PACKAGE.rglob("*.py"))


def _imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def _layer(path):
    return path.relative_to(PACKAGE).parts[0]


def test_there_is_something_to_check():
    assert len(FILES) > 15


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports(path):
    own = _layer(path)
    for name in _imports(path):
        if name.split(".")[0] in ("lightning", "pytorch_lightning"):
            assert own in MAY_IMPORT_LIGHTNING, f"{path.name} imports {name}"
        if name.startswith("lightning_pardist.") and own in LAYERS:
            target = name.split(".")[1]
            target = target if target in LAYERS else f"{target}.py"
            if target in LAYERS:
                assert LAYERS.index(target) >= LAYERS.index(own), f"{path.name} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_environment_variables_are_read_in_one_place(path):
    if _layer(path) == "environments":
        return
    text = path.read_text()
    for reading in ("os.environ.get(", "os.getenv(", "environ.copy("):
        assert reading not in text, f"{path} reads the environment"
