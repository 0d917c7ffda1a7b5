"""Comparison of two commits: one workload, each commit's own package, equal losses."""

import subprocess

import pytest

from benchmarks import compare
from benchmarks.compare import Measured, loss_difference, main, row
from tests.helpers.scripts import ROOT

pytestmark = pytest.mark.alone

TINY = ["--tiny", "--models", "mlp", "--strategies", "pardist_ddp", "--devices", "1"]
TINY += ["--rounds", "2", "--steps", "3", "--warmup", "1"]


def _measured(*losses, step_s=(0.1, 0.2, 0.3)):
    return Measured(list(step_s), list(step_s), [list(losses), list(losses)])


@pytest.mark.parametrize(
    ("ours", "theirs", "wanted"),
    [((1.0, 2.0), (1.0, 2.0), 0.0), ((1.0, 2.0), (1.0, 2.5), 0.2), ((1.0, float("nan")), (1.0, 2.0), float("inf"))],
)
def test_difference_of_losses(ours, theirs, wanted):
    assert loss_difference(_measured(*ours), _measured(*theirs)) == pytest.approx(wanted)


def test_runs_of_another_length_are_no_pair():
    with pytest.raises(ValueError, match="zip"):
        loss_difference(_measured(1.0), _measured(1.0, 2.0))


def test_speed_is_the_ratio_within_rounds():
    base, head = _measured(1.0), _measured(1.0, step_s=(0.05, 0.2, 0.3))
    line, equal = row("mlp", "pardist_ddp", base, head, 0.0)
    assert equal
    assert line == "| mlp | `pardist_ddp` | 200.0 | 200.0 | 1.000 (1.000-1.500) | 1.000 | bit for bit |"


def test_losses_beyond_the_tolerance_are_shown():
    line, equal = row("mlp", "pardist_ddp", _measured(1.0), _measured(1.001), 1e-5)
    assert not equal
    assert "DIFFER by 1.0e-03" in line
    line, equal = row("mlp", "pardist_ddp", _measured(1.0), _measured(1.001), 1e-2)
    assert equal
    assert "within 1.0e-03" in line


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["no-such-commit"], "git cannot give 'no-such-commit'"),
        (["HEAD", "--models", "resnet"], "model='resnet' is unknown"),
        (["HEAD", "--rounds", "0"], "rounds=0 is too small"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_a_sentence(arguments, wanted, capsys):
    assert main(arguments) == 2
    assert wanted in capsys.readouterr().err


def _git(*arguments):
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.skipif(_git("rev-parse", "HEAD").returncode != 0, reason="not a git checkout")
def test_a_commit_beside_itself(capsys):
    assert main(["HEAD", "HEAD", *TINY, "--tolerance", "0"]) == 0
    shown = capsys.readouterr().out
    assert "| model | strategy | HEAD, ms | HEAD, ms | speed of HEAD (quartiles) | CPU | losses |" in shown
    assert "| mlp | `pardist_ddp` |" in shown
    assert "| bit for bit |" in shown
    assert "pardist-commits-" not in _git("worktree", "list").stdout


def test_a_rank_takes_the_package_it_is_given(tmp_path):
    """A wrongly imported package is detected, and a failing rank's output is shown."""
    for name, init in (("one", "import no_such_module"), ("two", "")):
        package = tmp_path / name / compare.PACKAGE
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(init)
    packages = (tmp_path / "one", tmp_path / "two")
    with pytest.raises(RuntimeError, match="No module named 'no_such_module'"):
        compare.measure_pair(packages, "pardist_ddp", compare.Settings(devices=1))
