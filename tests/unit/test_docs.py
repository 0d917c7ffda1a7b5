"""Documentation: links, code blocks, messages, settings and names match the package."""

import ast
import contextlib
import importlib
import inspect
import io
import os
import runpy
import subprocess
import sys

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI

import lightning_pardist
from lightning_pardist import optim, registry
from lightning_pardist.compat.contract import as_markdown
from tests.helpers import documentation
from tests.helpers.documentation import DOCS, ROOT
from tests.helpers.ranks import run_ranks

#: Page of each strategy class.
STRATEGY_PAGES = {
    "ddp.md": lightning_pardist.DDPStrategy,
    "zero.md": lightning_pardist.ZeroStrategy,
    "fsdp.md": lightning_pardist.FSDPStrategy,
    "tensor.md": lightning_pardist.TensorParallelStrategy,
    "context.md": lightning_pardist.ContextParallelStrategy,
    "expert.md": lightning_pardist.ExpertParallelStrategy,
    "pipeline.md": lightning_pardist.PipelineStrategy,
    "hybrid.md": lightning_pardist.HybridStrategy,
    "local_sgd.md": lightning_pardist.LocalSGDStrategy,
    "auto.md": lightning_pardist.AutoStrategy,
    "parameter_server.md": lightning_pardist.ParameterServerStrategy,
    "data_parallel.md": lightning_pardist.DataParallelStrategy,
}
#: Arguments that the Trainer passes to a strategy, or a strategy to its base class.
_NOT_SETTINGS = {
    "self", "kwargs", "unknown", "accelerator", "parallel_devices", "cluster_environment", "checkpoint_io",
    "precision_plugin", "data", "tensor", "context", "pipeline", "axes",
}  # fmt: skip


# --- links ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", documentation.pages(), ids=lambda page: str(page.path.relative_to(ROOT)))
def test_links_and_anchors_exist(page):
    wrong = []
    for link in page.links:
        if link.startswith(("https://", "http://", "mailto:")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.path.parent / name).resolve() if name else page.path
        if not target.exists():
            wrong.append(f"{link}: no such file")
        elif anchor and target.suffix == ".md" and anchor not in documentation.read(target).anchors:
            wrong.append(f"{link}: no such heading among {sorted(documentation.read(target).anchors)}")
    assert not wrong, "\n".join(wrong)


def test_the_site_shows_every_page():
    text = (ROOT / "mkdocs.yml").read_text()
    shown = {path for path in _strings(yaml.safe_load(text)["nav"]) if path.endswith(".md")}
    assert shown == {str(page.path.relative_to(DOCS)) for page in documentation.pages() if DOCS in page.path.parents}


def _strings(tree):
    if isinstance(tree, str):
        return [tree]
    values = tree.values() if isinstance(tree, dict) else tree
    return [text for value in values for text in _strings(value)]


# --- code -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", documentation.blocks("python"), ids=str)
def test_python_blocks_compile(block):
    compile(block.text, str(block), "exec")


def _run_block(source, folder):
    """Run a block as a script in an empty folder. Runs on a rank."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(source, "block", "exec"), {"__name__": "__main__"})
    finally:
        os.chdir(before)


@pytest.mark.parametrize("block", [b for b in documentation.blocks("python") if "run" in b.mark], ids=str)
def test_marked_python_blocks_run(block, tmp_path):
    ranks = next((int(word.removeprefix("ranks=")) for word in block.mark if word.startswith("ranks=")), None)
    if ranks is None:
        _run_block(block.text, tmp_path)
    else:
        run_ranks(ranks, _run_block, block.text, tmp_path)


@pytest.mark.parametrize("block", documentation.blocks("yaml"), ids=str)
def test_yaml_blocks_are_read(block, tmp_path, monkeypatch):
    config = yaml.safe_load(block.text)
    if "cli" not in block.mark:
        return
    monkeypatch.chdir(ROOT)
    file = tmp_path / "config.yaml"
    file.write_text(block.text)
    cli = LightningCLI(
        run=False, args=["--config", str(file)], save_config_callback=None, seed_everything_default=False
    )
    strategy = config["trainer"]["strategy"]
    name = strategy if isinstance(strategy, str) else strategy["class_path"].rpartition(".")[2]
    known = {entry.name: entry.strategy.__name__ for entry in registry.TABLE}
    assert type(cli.trainer.strategy).__name__ == known.get(name, name)


@pytest.mark.parametrize("block", documentation.blocks("bash"), ids=str)
def test_commands_of_pardist_exist(block):
    from lightning_pardist import cli

    commands = {*cli._COMMANDS, *cli._TRAINER_COMMANDS}
    for line in block.text.splitlines():
        words = line.partition("#")[0].split()
        for program in ("pardist", "lightning_pardist"):
            if program in words and words.index(program) + 1 < len(words):
                assert words[words.index(program) + 1] in commands, line


# --- the package's own words ------------------------------------------------------------------------------------------


def _names(cell):
    return [part for part in cell.split("`") if part.startswith("pardist_")]


def test_every_strategy_has_a_page_and_every_name_exists():
    for name, strategy in STRATEGY_PAGES.items():
        rows = documentation.read(DOCS / "strategies" / name).table("name")
        presets = {_names(row[0])[0]: row[1] for row in rows}
        wanted = {entry.name: entry.preset for entry in registry.TABLE if entry.strategy is strategy}
        assert presets.keys() == wanted.keys(), f"{name} has to list the names of {strategy.__name__}"
        for entry, preset in wanted.items():
            shown = ", ".join(f"`{key}={value!r}`" for key, value in preset.items()).replace("'", '"')
            assert presets[entry] == shown, f"{name}: preset of {entry}"
    assert {entry.strategy for entry in registry.TABLE} == set(STRATEGY_PAGES.values()), "a strategy without a page"


@pytest.mark.parametrize("file", ["strategies/index.md", "../README.md"])
def test_overviews_list_every_name(file):
    listed = {name for row in (DOCS / file).resolve().read_text().splitlines() for name in _names(row) if "|" in row}
    assert {entry.name for entry in registry.TABLE} <= listed


@pytest.mark.parametrize("page", documentation.pages(), ids=lambda page: str(page.path.relative_to(ROOT)))
def test_names_of_strategies_exist(page):
    known = {entry.name for entry in registry.TABLE}
    named = {name.partition("@")[0] for line in page.prose for name in _names(line)}
    # Folders, and candidates of benchmarks.
    assert named - known <= {"pardist_reducer", "pardist_pipeline", "pardist_resume"}


@pytest.mark.parametrize("name", [*STRATEGY_PAGES, "common.md"])
def test_settings_are_those_of_the_constructor(name):
    strategy = STRATEGY_PAGES.get(name, lightning_pardist.PardistStrategy)
    defaults = {
        setting: parameter.default
        for setting, parameter in inspect.signature(strategy).parameters.items()
        if setting not in _NOT_SETTINGS
    }
    rows = documentation.read(DOCS / "strategies" / name).table("setting")
    assert {row[0].strip("`"): ast.literal_eval(row[1].strip("`")) for row in rows} == defaults


@pytest.mark.parametrize(
    "row", documentation.read(DOCS / "troubleshooting.md").table("message"), ids=lambda row: row[0]
)
def test_quoted_messages_are_printed(row):
    assert documentation.is_printed(row[0].strip("`")), f"no string of the package reads {row[0]}"


def test_the_reference_holds_every_public_name():
    found = set()
    for path in (DOCS / "reference").glob("*.md"):
        found |= {anchor for anchor in documentation.read(path).anchors if anchor.startswith("lightning_pardist.")}
    wanted = {f"lightning_pardist.{name}" for name in lightning_pardist.__all__ if name != "__version__"}
    assert found == wanted | {f"lightning_pardist.optim.{name}" for name in optim.__all__}


def test_private_names_are_those_of_the_adapters():
    text = (DOCS / "private-names.md").read_text()
    wanted = as_markdown()
    assert text.endswith(f"\n\n{wanted}"), "run python -m lightning_pardist.compat, and paste it below the introduction"


# --- the site ---------------------------------------------------------------------------------------------------------


def test_pictures_are_those_that_the_script_draws():
    drawn = runpy.run_path(str(DOCS / "_tools" / "pictures.py"))["PICTURES"]
    stored = {path.name: path.read_text() for path in (DOCS / "pictures").iterdir()}
    assert stored == {name: draw() for name, draw in drawn.items()}


def test_docstrings_become_markdown(monkeypatch):
    monkeypatch.setitem(sys.modules, "griffe", type("griffe", (), {"Extension": object, "Object": object}))
    to_markdown = runpy.run_path(str(DOCS / "_tools" / "sphinx_roles.py"))["to_markdown"]
    assert (
        to_markdown("See :class:`~a.b.C` and :mod:`a.b`, like so::\n\n    x") == "See `C` and `a.b`, like so:\n\n    x"
    )


def test_make_docs_installs_the_extra():
    extra = next(line for line in (ROOT / "pyproject.toml").read_text().splitlines() if line.startswith("docs = "))
    makefile = (ROOT / "Makefile").read_text()
    assert all(name in makefile for name in ast.literal_eval(extra.partition("=")[2].strip()))


def test_the_site_builds_without_warnings(tmp_path):
    for module in ("mkdocs", "material", "mkdocstrings"):
        try:
            importlib.import_module(module)
        except ImportError:
            pytest.skip(f"{module} is not installed here; `make docs` builds the site in an environment of its own")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True)
    assert (tmp_path / "strategies" / "ddp" / "index.html").exists()
