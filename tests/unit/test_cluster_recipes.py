"""The cluster recipes parse, and say what to change."""

import shutil
import subprocess

import pytest

from tests.helpers.scripts import ROOT

RECIPES = sorted(
    path
    for pattern in ("slurm/*.sbatch", "torchrun/*.sh", "mpi/*.sh", "kubernetes/*.yaml")
    for path in (ROOT / "recipes").glob(pattern)
)


def test_there_are_recipes():
    assert len(RECIPES) >= 10


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_says_what_to_change(path):
    head = path.read_text().split("\n\n")[0] if path.suffix != ".yaml" else path.read_text()[:600]
    assert "Change" in head


@pytest.mark.parametrize("path", [path for path in RECIPES if path.suffix != ".yaml"], ids=lambda path: path.name)
def test_shell_parses(path):
    shell = shutil.which("bash")
    if shell is None:
        pytest.skip("no bash")
    finished = subprocess.run([shell, "-n", str(path)], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr


def test_kubernetes_job_parses():
    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all((ROOT / "recipes" / "kubernetes" / "job.yaml").read_text())
    spec = job["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    pods = next(entry["value"] for entry in container["env"] if entry["name"] == "PODS")
    assert spec["completions"] == spec["parallelism"] == int(pods)
    assert service["metadata"]["name"] == spec["template"]["spec"]["subdomain"]
    assert f"{job['metadata']['name']}-0.{service['metadata']['name']}:" in container["args"][0]
