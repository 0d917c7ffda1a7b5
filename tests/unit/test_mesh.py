import pytest

from lightning_pardist.mesh import ParallelDims


def test_auto_takes_what_the_others_leave():
    dims = ParallelDims.resolve(8, tensor_parallel=2, data_replicate="auto")
    assert dims == ParallelDims(data_replicate=4, tensor_parallel=2)
    assert dims.world_size == 8
    assert dims.data_parallel == 4


@pytest.mark.parametrize(
    ("world_size", "degrees", "message"),
    [
        (
            8,
            {"tensor_parallel": 3, "data_replicate": "auto"},
            r"tensor_parallel_size=3 does not divide world_size=8. Use",
        ),
        (8, {"tensor_parallel": 0}, "tensor_parallel_size=0 is not a positive integer"),
        (8, {"tensor_parallel": 2}, "makes 2 ranks, but world_size=8"),
        (8, {"tensor_parallel": "auto", "data_shard": "auto"}, "are both 'auto'"),
        (8, {"tensor_parallel": True}, "not a positive integer"),
    ],
)
def test_wrong_degrees_are_refused_with_the_fix(world_size, degrees, message):
    with pytest.raises(ValueError, match=message):
        ParallelDims.resolve(world_size, **degrees)


def test_coordinates_tensor_ranks_are_neighbours_and_every_rank_is_unique():
    dims = ParallelDims(pipeline_parallel=2, data_replicate=2, data_shard=2, tensor_parallel=2)
    seen = [
        (dims.coordinates(rank)["pipeline_parallel"], dims.batch_rank(rank), dims.coordinates(rank)["tensor_parallel"])
        for rank in range(16)
    ]
    assert len(set(seen)) == 16
    assert [dims.coordinates(rank)["tensor_parallel"] for rank in range(4)] == [0, 1, 0, 1]
    assert [dims.batch_rank(rank) for rank in range(0, 8, 2)] == [0, 1, 2, 3]
