"""The benchmark's command, on a model of test size: its three output files and their contents."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks.__main__ import main
from benchmarks.report import differing_losses, markdown
from tests.helpers.scripts import ENVIRONMENT, ROOT

pytestmark = pytest.mark.alone

NAMES = ["pardist_ddp", "torch_ddp", "one_process"]


def _command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
        cwd=ROOT,
        env=os.environ | ENVIRONMENT | {"PARDIST_TEST_WITHOUT": "transformers,scipy"},  # the chart needs matplotlib
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_a_tiny_run_writes_three_files(tmp_path):
    run = ["--tiny", "--model", "mlp", "--rounds", "2", "--steps", "4", "--warmup", "2", "--batch-size", "3"]
    done = _command(*run, "--baselines", "torch_ddp", "one_process", "--output", str(tmp_path), "--suffix=-x")
    assert done.returncode == 0, done.stdout + done.stderr
    files = {path.suffix: path for path in tmp_path.iterdir()}
    assert set(files) == {".json", ".md", ".png"}
    assert all(path.stem.endswith("-mlp-2-x") for path in files.values())
    results = json.loads(files[".json"].read_text())

    about = results["run"]
    assert about["machine"]["versions"]["torch"]
    assert about["command"].startswith("python -m benchmarks --tiny")
    assert len(about["load_before"]) == len(about["load_after"]) == 3

    assert list(results["candidates"]) == NAMES
    for name, result in results["candidates"].items():
        row = results["summary"][name]
        psi = row["num_parameters"]
        assert [len(turn["step_s"]) for turn in result["rounds"]] == [4, 4]
        assert row["step_ms_low"] <= row["step_ms"] <= row["step_ms_high"]
        ranks = 1 if name == "one_process" else 2
        assert row["samples_per_s"] == pytest.approx(3 * ranks / row["step_ms"] * 1e3, rel=1e-4)
        # Parameters, gradients and two moments; torch DDP additionally has buckets next to the gradients.
        copies = 5 if name == "torch_ddp" else 4
        assert row["held_bytes"] == pytest.approx(copies * 4 * psi, rel=0.02)
        assert row["peak_bytes"] >= row["imported_bytes"] > 0
        assert row["setup_s"] > 0

    if about["own_network"]:
        # At this size, headers of small messages weigh more than at a realistic one.
        for name, expected in (("pardist_ddp", 1.0), ("torch_ddp", 1.0), ("one_process", 0.0)):
            assert results["summary"][name]["wire"] == pytest.approx(expected, abs=0.1)

    assert [(row["strategy"], row["baseline"]) for row in results["comparisons"]] == [
        ("pardist_ddp", "torch_ddp"),
        ("pardist_ddp", "one_process"),
    ]
    text = files[".md"].read_text()
    assert all(f"| `{name}` |" in text for name in NAMES)
    assert text.count("its samples/s") == 2
    assert files[".png"].read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_measured_is_refused_by_name(capsys):
    assert main(["--network", "shared", "--strategies", "pardist_dpp"]) == 2
    assert "'pardist_dpp' is no candidate. Use one of torch_loop, torch_ddp" in capsys.readouterr().err
    assert main(["--network", "shared", "--size", "depth=3"]) == 2
    assert "'depth' is no size of gpt. Use dim, layers" in capsys.readouterr().err
    assert main(["--network", "shared", "--steps", "0"]) == 2
    assert "steps=0 is too small. Use 1 or more." in capsys.readouterr().err


def test_a_failing_rank_ends_the_run_with_its_trace(tmp_path):
    done = _command("--tiny", "--strategies", "pardist_ddp@bucket_size_mb=-1", "--output", str(tmp_path))
    assert done.returncode == 1
    assert "bucket_size_mb=-1 is not positive" in done.stderr
    assert not list(tmp_path.iterdir())


def test_one_rank_trains_as_a_plain_loop_does_in_mixed_precision(tmp_path):
    run = ["--tiny", "--model", "gpt2-124m", "--rounds", "2", "--steps", "3", "--warmup", "1", "--devices", "1"]
    run += ["--precision", "bf16-mixed", "--network", "shared", "--keep-going", "--output", str(tmp_path)]
    names = ["pardist_zero3", "pardist_ddp@bucket_size_mb=-1", "torch_loop"]
    done = _command(*run, "--strategies", *names[:2], "--baselines", "torch_loop")
    assert done.returncode == 1
    assert "is not positive" in done.stderr
    results = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert list(results["run"]["failed"]) == names[1:2]
    rows = results["summary"]
    assert list(rows) == [names[0], names[2]]
    assert rows["pardist_zero3"]["loss"] == pytest.approx(rows["torch_loop"]["loss"], rel=1e-3)
    assert rows["torch_loop"]["tokens_per_s"] == pytest.approx(16 * rows["torch_loop"]["samples_per_s"], rel=1e-4)
    assert differing_losses(results) == []
    results["candidates"]["pardist_zero3"]["rounds"][-1]["loss"] = float("nan")
    assert "do not train alike" in differing_losses(results)[0]

    # Emulate a device: only its name and memory are missing.
    results["run"]["accelerator"] = "gpu"
    for result in results["candidates"].values():
        result["device"] = "NVIDIA H100 80GB HBM3"
        for turn in result["rounds"]:
            turn["device_peak"], turn["device_reserved"] = 20_000_000_000, 23_000_000_000
    text = markdown(results)
    assert text.count("| 20.00 (23.00) |") == 2
    assert "989.5 T/s" in text
    assert "do not train alike" in text
