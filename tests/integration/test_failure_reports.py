"""What a job prints when it ends early: one rank says why, in one sentence where the package refuses."""

from tests.helpers.scripts import ROOT, run_script

TRAIN = str(ROOT / "tests" / "scripts" / "train.py")
SPAWNED = str(ROOT / "tests" / "scripts" / "spawned.py")


def test_a_refusal_is_one_sentence_of_one_rank():
    finished = run_script(TRAIN, "pardist_pp", "2")
    assert finished.code == 1
    assert "Traceback" not in finished.output, finished.output
    assert finished.output.count("CannotPipelineError:") == 1, finished.output
    last = finished.output.strip().splitlines()[-1]
    assert last.startswith("To report a bug: raised at engines/pipeline/"), finished.output
    assert "PARDIST_TRACEBACK=full" in last


def test_tracebacks_of_a_refusal_on_request():
    finished = run_script(TRAIN, "pardist_pp", "2", PARDIST_TRACEBACK="full")
    assert finished.output.count("Traceback (most recent call last)") >= 2, finished.output


def test_what_spawn_cannot_send_is_named(tmp_path):
    finished = run_script(SPAWNED, "pardist_ddp_spawn", "lambda", str(tmp_path))
    assert finished.code == 1
    assert "cannot take Module.activation" in finished.output.strip().splitlines()[-1], finished.output


def test_a_spawned_run_can_be_saved_and_its_optimizer_restored(tmp_path):
    finished = run_script(SPAWNED, "pardist_ddp_spawn", "save", str(tmp_path))
    assert "state 2" in finished.output, finished.output


def test_predictions_that_stay_in_ranks_are_said(tmp_path):
    finished = run_script(SPAWNED, "pardist_ddp_fork", "predict", str(tmp_path))
    assert "BasePredictionWriter" in finished.output, finished.output
    assert "predicted None" in finished.output
