"""``pardist doctor``: warnings and exit status."""

import dataclasses
import json

import pytest

from lightning_pardist import doctor
from lightning_pardist.cli import main
from lightning_pardist.doctor import _compare
from lightning_pardist.runtime.environments.facts import Facts
from tests.helpers.ranks import free_port
from tests.helpers.scripts import run_script

FACTS = Facts(
    rank=0,
    local_rank=0,
    node_rank=0,
    world_size=2,
    host="h1",
    address="10.0.0.1",
    interface="eth0",
    environment="TorchrunEnvironment",
    why="",
    meeting="h1:1",
    device="cpu",
    device_id="",
    cores=4,
    threads=1,
    versions={"torch": "2.13"},
)


def _warnings(*changes, skews=None):
    ranks = [dataclasses.replace(FACTS, **{"rank": rank, "host": f"h{rank}"} | own) for rank, own in enumerate(changes)]
    return "\n".join(_compare(ranks, skews))


@pytest.mark.parametrize(
    ("changes", "skews", "wanted"),
    [
        ([{}, {"versions": {"torch": "2.12"}}], None, "versions of torch differ: 2.13 on rank 0, 2.12 on rank 1"),
        ([{}, {"versions": {}}], None, "none on rank 1"),
        ([{"device": "cuda:0 A"}, {"device": "cuda:0 B"}], None, "devices differ: A, B"),
        ([{"host": "h", "device_id": "x"}] * 2, None, "ranks 0, 1 on h share one GPU"),
        (
            [{"host": "h", "threads": 4}] * 2,
            None,
            "2 rank(s) with 4 thread(s) each share 4 core(s) on h. Set OMP_NUM_THREADS=2",
        ),
        ([{"host": "a"}, {"host": "b"}, {"host": "a"}], None, "the ranks on a are not consecutive"),
        ([{}, {}], {0: 0.0, 1: -3.25}, "the clock of rank 1 is -3.2 s off"),
        ([{}, {"warnings": ["look out"]}], None, "rank 1 on h1: look out"),
    ],
)
def test_warnings(changes, skews, wanted):
    assert wanted in _warnings(*changes, skews=skews)


def test_nothing_to_warn_of():
    assert _warnings({}, {}, skews={0: 0.0, 1: 0.01}) == ""


def test_alone(capsys):
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "no launcher: this process starts its own ranks" in shown
    unknown = "not examined: the Trainer's devices and num_nodes, and whether the strategy's degrees match them."
    assert f"{unknown} Pass --devices" in shown
    assert shown.endswith("training could start\n")


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--devices", "2", "--tensor-parallel-size", "3"], "tensor_parallel_size=3 does not divide world_size=2"),
        (["--devices", "3", "--strategy", "pardist_tp", "--tensor-parallel-size", "2"], "does not divide world_size=3"),
        (["--devices", "2", "--strategy", "pardist_ddp", "--tensor-parallel-size", "2"], "does not take"),
        (["--devices", "2", "--accelerator", "quantum"], "quantum"),
    ],
)
def test_refuses_what_the_trainer_refuses(arguments, wanted, capsys):
    assert main(["doctor", *arguments]) == 1
    shown = capsys.readouterr().out
    assert wanted in shown
    assert shown.endswith("training could not start\n")


def test_numbers_that_fit_and_what_was_not_examined(capsys):
    assert main(["doctor", "--devices", "4", "--tensor-parallel-size", "2", "--pipeline-parallel-size", "2"]) == 0
    shown = capsys.readouterr().out
    assert "not examined: connections among the 4 ranks, because no launcher started them. The Trainer accepts" in shown
    assert shown.endswith("training could start\n")


def test_degrees_are_compared_with_the_ranks_of_the_launcher(monkeypatch, capsys):
    given = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in given.items():
        monkeypatch.setenv(name, str(value))
    assert main(["doctor", "--timeout", "1", "--tensor-parallel-size", "3"]) == 1
    assert "tensor_parallel_size=3 does not divide world_size=2" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["--devices", "0"], ["--timeout", "soon"], ["--megabytes", "-1"], ["--strategy", "pardist_pd"], ["x"]]
)
def test_bad_options_end_with_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *arguments])
    assert ended.value.code == 2
    assert "pardist doctor: error: " in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("rank", "address", "wanted"),
    [
        (0, "127.0.0.1", "rank 1 did not connect within 1 s"),
        (1, "127.0.0.1", "Rank 0 was not found at 127.0.0.1"),
        (1, "no such host", "cannot resolve"),
    ],
)
def test_rank_without_the_others(rank, address, wanted, monkeypatch, capsys):
    given = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": address, "MASTER_PORT": free_port()}
    for name, value in given.items():
        monkeypatch.setenv(name, str(value))
    assert main(["doctor", "--timeout", "1"]) == 1
    shown = capsys.readouterr().out
    assert wanted in shown
    assert shown.endswith("training could not start\n")


def test_other_numbers_than_the_trainers(monkeypatch, capsys):
    given = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in given.items():
        monkeypatch.setenv(name, str(value))
    assert main(["doctor", "--timeout", "1", "--devices", "4"]) == 1
    assert "makes 4 ranks, but world_size=2" in capsys.readouterr().out


def test_a_profile_that_cannot_be_saved_is_refused_before_measuring(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "measure_alone", None)
    assert main(["doctor", "--save", str(tmp_path / "missing" / "profile.json")]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("pardist doctor: --save ")
    assert shown.err.count("\n") == 1
    assert "about a minute" not in shown.out


@pytest.mark.parametrize("arguments", [["--disk", "."], ["--save", "profile.json", "--disk", "missing"]])
def test_a_disk_takes_a_folder_and_a_file_for_the_profile(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["doctor", *arguments])
    assert "needs an existing folder, and --save FILE" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_measuring_says_how_long_and_what_failed(tmp_path, monkeypatch, capsys):
    def fail(num_ranks, disk):
        raise RuntimeError("measuring failed on rank 1 of 2: no memory")

    monkeypatch.setattr(doctor, "measure_alone", fail)
    path = tmp_path / "profile.json"
    assert main(["doctor", "--devices", "2", "--save", str(path)]) == 1
    shown = capsys.readouterr()
    assert "about a minute" in shown.out
    assert shown.err == "error: nothing was saved: measuring failed on rank 1 of 2: no memory\n"
    assert not path.exists()


@pytest.mark.slow
def test_a_profile_under_torchrun(tmp_path):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "lightning_pardist")
    path = tmp_path / "profile.json"
    finished = run_script(*torchrun, "doctor", "--save", str(path))
    assert finished.code == 0, finished.output
    assert json.loads(path.read_text())["assumed_links"] == ["between"]
    finished = run_script(*torchrun, "doctor", "--save", str(tmp_path / "missing" / "profile.json"))
    assert finished.code != 0
    assert finished.output.count("cannot be written") == 1, finished.output


@pytest.mark.slow
def test_under_torchrun():
    torchrun = (
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "lightning_pardist",
        "doctor",
    )
    finished = run_script(*torchrun, "--tensor-parallel-size", "2", "--devices", "2")
    assert finished.code == 0, finished.output
    assert finished.output.count("training could start") == 1
    assert "environment  TorchrunEnvironment" in finished.output
    assert "tensor_parallel: all-reduce of one number" in finished.output
    finished = run_script(*torchrun, "--devices", "3")
    assert finished.code == 1, finished.output
    assert "Trainer(devices=3), but torchrun started 2 rank(s)" in finished.output
    assert "training could not start" in finished.output
