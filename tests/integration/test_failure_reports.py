"""Output of a job that fails: one rank reports the cause, in one sentence if the package refuses."""

import os
import signal
import subprocess
import sys

import pytest

from tests.helpers.scripts import ENVIRONMENT, ROOT, run_script

TRAIN = str(ROOT / "tests" / "scripts" / "train.py")
SAVES = str(ROOT / "tests" / "scripts" / "save_on_exception.py")
SPAWNED = str(ROOT / "tests" / "scripts" / "spawned.py")


def test_a_refusal_is_one_sentence_of_one_rank():
    finished = run_script(TRAIN, "pardist_pp", "2")
    assert finished.code == 1
    assert "Traceback" not in finished.output, finished.output
    assert finished.output.count("CannotPipelineError:") == 1, finished.output
    last = finished.output.strip().splitlines()[-1]
    assert last.startswith("To report a bug: raised at engines/pipeline/"), finished.output
    assert "PARDIST_TRACEBACK=full" in last


@pytest.mark.slow
def test_tracebacks_of_a_refusal_on_request():
    finished = run_script(TRAIN, "pardist_pp", "2", PARDIST_TRACEBACK="full")
    assert finished.output.count("Traceback (most recent call last)") >= 2, finished.output


def test_what_spawn_cannot_send_is_named(tmp_path):
    finished = run_script(SPAWNED, "pardist_ddp_spawn", "lambda", str(tmp_path))
    assert finished.code == 1
    assert "cannot take Module.activation" in finished.output.strip().splitlines()[-1], finished.output


@pytest.mark.slow
def test_a_spawned_run_can_be_saved_and_its_optimizer_restored(tmp_path):
    finished = run_script(SPAWNED, "pardist_ddp_spawn", "save", str(tmp_path))
    assert "state 2" in finished.output, finished.output


@pytest.mark.slow
def test_predictions_come_back_from_forked_ranks(tmp_path):
    finished = run_script(SPAWNED, "pardist_ddp_fork", "predict", str(tmp_path))
    assert "the batches of 2 ranks interleaved" in finished.output, finished.output
    assert "predicted 32 samples" in finished.output, finished.output


def test_predictions_that_cannot_come_back_are_said(tmp_path):
    finished = run_script(SPAWNED, "pardist_ddp_fork", "predict functions", str(tmp_path))
    assert finished.output.count("cannot be pickled") == 1, finished.output
    assert "predicted None" in finished.output


@pytest.mark.parametrize("strategy", ["pardist_ddp_fork", pytest.param("pardist_ddp", marks=pytest.mark.slow)])
def test_a_stop_by_a_signal_is_no_failure(strategy, tmp_path):
    finished = run_script(SPAWNED, strategy, "stop", str(tmp_path))
    assert finished.code == 143, finished.output
    assert finished.output.strip().splitlines()[-1].startswith("Stopped by a signal after step"), finished.output
    assert "Traceback" not in finished.output, finished.output
    assert len(list(tmp_path.rglob("stopped.ckpt"))) == 1
    assert not finished.left


@pytest.mark.slow
@pytest.mark.parametrize("late", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_a_failure_of_all_ranks_is_shown_once(late):
    finished = run_script(TRAIN, "pardist_ddp", "2", "late all", late)
    assert finished.code == 1
    assert finished.output.count("ValueError: a mistake on every rank") == 1, finished.output
    assert finished.output.strip().splitlines()[-1].endswith("ValueError: a mistake on every rank"), finished.output


def _interrupt(strategy, rank, *, start="fit"):
    """Send SIGINT to the process group, as a terminal does, once a rank prints that it sleeps; return the output."""
    process = subprocess.Popen(
        [sys.executable, TRAIN, strategy, "2", "sleep" if start == "fit" else "sleep before", rank],
        env=os.environ | ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # SIGINT may be ignored if the tests run in the background.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        lines = iter(process.stdout.readline, "")
        before = []
        for line in lines:
            before.append(line)
            if line.strip() == "sleeping":
                break
        os.killpg(process.pid, signal.SIGINT)
        return "".join([*before, process.communicate(timeout=60)[0]]), process.returncode
    finally:
        process.kill()


@pytest.mark.parametrize(
    ("strategy", "start", "rank"),
    [
        ("pardist_ddp", "fit", "0"),
        pytest.param("pardist_ddp", "before", "1", marks=pytest.mark.slow),
        pytest.param("pardist_ddp_spawn", "fit", "1", marks=pytest.mark.slow),
        pytest.param("pardist_ddp", "fit", "1", marks=pytest.mark.slow),
        pytest.param("pardist_ddp_spawn", "fit", "0", marks=pytest.mark.slow),
        pytest.param("pardist_ddp_fork", "fit", "0", marks=pytest.mark.slow),
        pytest.param("pardist_ddp_fork", "fit", "1", marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_run_says_so_last(strategy, start, rank):
    output, code = _interrupt(strategy, rank, start=start)
    assert code not in (0, -9), output
    assert "SIGKILL" not in output, output
    assert output.strip().splitlines()[-1] == "The run was interrupted (KeyboardInterrupt).", output


@pytest.mark.parametrize(
    ("strategy", "rank", "said"),
    [
        ("pardist_zero3", "1", "rank "),
        pytest.param(
            "pardist_ddp_fork",
            "all",
            "the ranks were separate processes (start_method='fork')",
            marks=pytest.mark.slow,
        ),
        pytest.param("pardist_ddp", "0", "rank 1 ", marks=pytest.mark.slow),
        pytest.param("pardist_pp", "all", "rank ", marks=pytest.mark.slow),
    ],
)
def test_a_failure_that_not_all_ranks_share_saves_nothing_and_is_shown_last(strategy, rank, said, tmp_path):
    finished = run_script(SAVES, strategy, rank, "ArithmeticError", str(tmp_path))
    assert finished.code == 1
    assert finished.output.count("No checkpoint is saved after the failure of the run") == 1, finished.output
    assert said in finished.output, finished.output
    assert finished.output.strip().splitlines()[-1].endswith("ArithmeticError: enough"), finished.output
    assert not list(tmp_path.rglob("*.ckpt"))
    assert not finished.left


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["pardist_ddp_fork", pytest.param("pardist_ddp", marks=pytest.mark.slow)])
def test_an_interrupt_that_the_module_raises_ends_the_run_and_saves_nothing(strategy, tmp_path):
    finished = run_script(SAVES, strategy, "all", "KeyboardInterrupt", str(tmp_path))
    assert finished.code == 1
    assert finished.output.strip().splitlines()[-1] == "The run was interrupted (KeyboardInterrupt).", finished.output
    assert finished.output.count("No checkpoint is saved after the failure of the run") == 1, finished.output
    assert not list(tmp_path.rglob("*.ckpt"))
    assert not finished.left


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["pardist_ddp_fork", pytest.param("pardist_ddp", marks=pytest.mark.slow)])
def test_an_exit_of_all_ranks_ends_the_run(strategy, tmp_path):
    finished = run_script(SAVES, strategy, "all", "SystemExit", str(tmp_path))
    assert finished.code == 0, finished.output
    assert "Traceback" not in finished.output, finished.output
    assert len(list(tmp_path.rglob("*.ckpt"))) == (strategy == "pardist_ddp")
    assert not finished.left


@pytest.mark.slow
def test_an_exit_of_the_first_rank_alone_ends_the_run(tmp_path):
    """Otherwise it and the processes it has started would wait for each other."""
    finished = run_script(SAVES, "pardist_zero2", "0", "SystemExit", str(tmp_path))
    assert finished.code == 0, finished.output
    assert not finished.left
