"""Cluster recipes parse, mark what must be changed, and start the right commands."""

import os
import shlex
import shutil
import subprocess

import pytest

from lightning_pardist.cli import main
from tests.helpers.scripts import ROOT

RECIPES = sorted(
    path
    for pattern in ("slurm/*.sbatch", "diloco_two_sites/*.sbatch", "torchrun/*.sh", "mpi/*.sh", "kubernetes/*.yaml")
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


_SLURM = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "1", "SLURM_JOB_NODELIST": "n[1-2]"}
_SLURM |= {"SLURM_JOB_NAME": "train"}
_STARTS = {
    "one_node.sbatch": ["srun --kill-on-bad-exit=1 pardist fit"],
    "many_nodes.sbatch": ["srun pardist doctor", "srun --kill-on-bad-exit=1 pardist fit"],
    "requeue.sbatch": ["srun --kill-on-bad-exit=1 pardist fit", "default_root_dir runs/train"],
    "three_axes.sbatch": [
        "srun pardist doctor --strategy pardist_3d --devices 1 --num-nodes 2",
        "srun --kill-on-bad-exit=1 pardist fit -c recipes/gpt/config.yaml -c recipes/gpt/3d.yaml",
        "--trainer.default_root_dir runs/train",
    ],
    "torchrun.sbatch": ["srun torchrun --nnodes=2", "--rdzv-endpoint=n1:20007 --rdzv-id=7 -m lightning_pardist fit"],
    "site.sbatch": [
        "srun torchrun --nnodes=2 --node-rank=0 --nproc-per-node=2 --master-addr=h1 --master-port=29400",
        "-c recipes/gpt/config.yaml -c recipes/diloco_two_sites/config.yaml --trainer.devices 2 --trainer.num_nodes 2",
    ],
    "container.sbatch": ["srun --kill-on-bad-exit=0 apptainer exec --nv train.sif pardist fit"],
    "many_hosts.sh": ["torchrun --nnodes=1:4", "--rdzv-endpoint=h1:29400", "--trainer.num_nodes 4"],
    "one_host.sh": ["torchrun --standalone --nproc-per-node=2 --max-restarts=3 -m lightning_pardist fit"],
    "torchx.sh": ["torchx run --scheduler local_cwd dist.ddp -j 1x2", "--trainer.devices 2 --trainer.num_nodes 1"],
    "open_mpi.sh": ["mpirun -np 2 -x OMP_NUM_THREADS=1 pardist fit"],
    "mpich.sh": ["mpiexec -n 2", "-hosts h1,h2 -env MASTER_ADDR h1 pardist fit"],
}


@pytest.mark.parametrize("path", [path for path in RECIPES if path.suffix != ".yaml"], ids=lambda path: path.name)
def test_starts_what_it_should(path, tmp_path):
    for name in ("srun", "torchrun", "torchx", "mpirun", "mpiexec"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@"\n')
    (tmp_path / "scontrol").write_text("#!/bin/sh\nprintf 'n1\\nn2\\n'\n")
    for program in tmp_path.iterdir():
        program.chmod(0o755)
    given = {"FIRST": "h1"} | ({"HOSTS": "1:4" if "torchrun" in str(path) else "h1,h2"} if path.suffix == ".sh" else {})
    variables = given | (_SLURM if path.suffix == ".sbatch" else {}) | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    finished = subprocess.run(["bash", str(path)], env=variables, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    started = " ".join(finished.stdout.split())
    for wanted in _STARTS[path.name]:
        assert wanted in started
    options = {word for word in started[started.index(" fit ") :].split() if word.startswith("-")}
    assert options <= set(_COMMAND.split())


_COMMAND = (
    "fit -c recipes/gpt/config.yaml --trainer.strategy pardist_zero2 --trainer.devices 1 --trainer.num_nodes 2"
    " --trainer.default_root_dir runs/train"
)


def test_recipes_train_with_a_command_of_ours(monkeypatch, capsys):
    _parses(_COMMAND, monkeypatch, capsys)


def test_the_recipe_of_three_axes_parses(monkeypatch, capsys):
    shown = _parses(_COMMAND.replace("--trainer.strategy pardist_zero2", "-c recipes/gpt/3d.yaml"), monkeypatch, capsys)
    assert "checkpoint: sharded" in shown
    assert "data_parallel: zero1" in shown


def test_the_recipe_of_two_sites_parses(monkeypatch, capsys):
    own = "-c recipes/diloco_two_sites/config.yaml"
    shown = _parses(_COMMAND.replace("--trainer.strategy pardist_zero2", own), monkeypatch, capsys)
    assert "outer_compression: int4" in shown


def _parses(command, monkeypatch, capsys):
    """Check that the recipe's training command is a valid command line of this package."""
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as ended:
        main([*shlex.split(command), "--print_config"])
    assert ended.value.code == 0, capsys.readouterr().err
    shown = capsys.readouterr().out
    assert "strategy:" in shown
    return shown


def test_kubernetes_job_trains_with_a_command_of_ours(monkeypatch, capsys):
    yaml = pytest.importorskip("yaml")
    _, job = yaml.safe_load_all((ROOT / "recipes" / "kubernetes" / "job.yaml").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    command = container["args"][0].replace("$PODS", "2")
    _parses(command[command.index(" fit ") + 1 :], monkeypatch, capsys)


def test_kubernetes_job_parses():
    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all((ROOT / "recipes" / "kubernetes" / "job.yaml").read_text())
    spec = job["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    pods = next(entry["value"] for entry in container["env"] if entry["name"] == "PODS")
    assert spec["completions"] == spec["parallelism"] == int(pods)
    assert service["metadata"]["name"] == spec["template"]["spec"]["subdomain"]
    assert f"{job['metadata']['name']}-0.{service['metadata']['name']}:" in container["args"][0]
