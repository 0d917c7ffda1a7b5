import torch.distributed as dist

from lightning_pardist.mesh import ParallelDims
from tests.helpers.ranks import run_ranks


def _groups():
    dims = ParallelDims(data_replicate=2, tensor_parallel=2)
    meshes = dims.build("cpu")
    mesh = meshes.all
    assert meshes.batch.size() == meshes.gradients.size() == 2
    coordinates = {**dims.coordinates(dist.get_rank()), "data_parallel": dims.batch_rank(dist.get_rank())}
    return {
        axis: (
            mesh[axis].get_local_rank() == coordinates[axis],
            sorted(dist.get_process_group_ranks(mesh[axis].get_group())),
        )
        for axis in ("data_parallel", "tensor_parallel", "pipeline_parallel")
    }


def test_mesh_coordinates_agree_with_torch():
    results = run_ranks(4, _groups)
    assert all(agrees for result in results for agrees, _ in result.values())
    assert results[0]["tensor_parallel"][1] == [0, 1]
    assert results[0]["data_parallel"][1] == [0, 2]
    assert results[3]["pipeline_parallel"][1] == [3]
