"""Checkpoints of earlier formats still load; the files in ``tests/data`` were written by the versions they name."""

from pathlib import Path

import pytest

from lightning_pardist.mesh import ParallelDims
from tests.helpers.checkpoints import run
from tests.helpers.parity import assert_close
from tests.helpers.ranks import run_ranks

#: Format before 0.1.0: the sizes of the four axes of that time, as a list.
UNNAMED = Path(__file__).parents[1] / "data" / "checkpoints_unnamed_layout"


def _run(name, world, settings):
    return run(name, world, "classifier", **settings)


@pytest.mark.parametrize(
    ("file", "target", "world"),
    [
        ("ddp-2-full.ckpt", "ddp", 2),
        ("pp-2-full.ckpt", "pp", 2),
        ("pp-2-full.ckpt", "zero2", 2),
        ("tp_zero1-4-sharded.ckpt", "tp_zero1", 4),
        ("tp_zero1-4-sharded.ckpt", "pp", 2),
    ],
)
def test_layouts_without_names(file, target, world):
    whole = run_ranks(1, _run, "one", 1, {"epochs": 2})[0]
    resumed = run_ranks(world, _run, target, world, {"epochs": 2, "resume": str(UNNAMED / file)})[0]
    half = len(whole["losses"]) // 2
    assert_close({"losses": resumed["losses"]}, {"losses": whole["losses"][half:]})
    assert_close(resumed["weights"], whole["weights"])


def test_layouts_by_name_and_by_position_are_the_same():
    dims = ParallelDims(pipeline_parallel=2, data_shard=3, tensor_parallel=4)
    assert ParallelDims.from_layout([2, 1, 3, 4]) == ParallelDims.from_layout(dims.layout) == dims
    assert dims.layout == {"pipeline_parallel": 2, "data_shard": 3, "tensor_parallel": 4}
    with pytest.raises(ValueError, match="axes later_parallel, which this version"):
        ParallelDims.from_layout({"later_parallel": 2})
