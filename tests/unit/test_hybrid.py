"""Degrees of several axes at once."""

import pickle

import pytest
import torch

from lightning_pardist import HybridStrategy
from lightning_pardist.mesh import degrees_of_machine


@pytest.mark.parametrize(
    ("nodes", "ranks", "tensor", "pipeline"),
    [(1, 1, 1, 1), (1, 2, 2, 1), (1, 3, 1, 1), (1, 4, 2, 2), (1, 8, 2, 2), (2, 8, 8, 2), (4, 4, 4, 2), (3, 16, 8, 3)],
)
def test_degrees_of_the_machine(nodes, ranks, tensor, pipeline):
    assert degrees_of_machine(nodes, ranks) == {"tensor_parallel": tensor, "pipeline_parallel": pipeline}


def _dims(world_size, ranks_per_node=8, nodes=1, **settings):
    strategy = HybridStrategy(**settings, parallel_devices=[torch.device("cpu")] * ranks_per_node)
    strategy.num_nodes = nodes
    dims = strategy.resolve_dims(world_size)
    return dims.pipeline_parallel, dims.data_replicate, dims.data_shard, dims.tensor_parallel


def test_the_data_axis_takes_what_the_others_leave():
    assert _dims(8, pipeline_parallel_size=2, tensor_parallel_size=2) == (2, 2, 1, 2)
    assert _dims(8, tensor_parallel_size=4, data_parallel="zero3") == (1, 1, 2, 4)
    assert _dims(16, tensor_parallel_size=2, data_parallel="zero3", data_shard_size=4) == (1, 2, 4, 2)
    assert _dims(8, tensor_parallel_size=2, pipeline_parallel_size="auto") == (4, 1, 1, 2)
    assert _dims(8, pipeline_parallel_size="machine", tensor_parallel_size="machine") == (2, 2, 1, 2)
    assert _dims(32, 8, 4, pipeline_parallel_size="machine", tensor_parallel_size="machine") == (2, 2, 1, 8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {
                "pipeline_parallel_size": 2,
                "data_parallel": "zero3",
                "pipeline_settings": {"schedule": "zbv", "chunks_per_rank": 2},
            },
            "schedule='zbv' with data_parallel='zero3' would all-gather a stage a third time",
        ),
        (
            {"pipeline_parallel_size": 2, "data_parallel": "zero3", "data_settings": {"allow_divergent_forward": True}},
            "allow_divergent_forward=True is not available with data_parallel='zero3' in a pipeline",
        ),
        ({"data_shard_size": 2}, "data_shard_size=2 is for data_parallel='zero3', but 'ddp'"),
        ({"data_parallel": "zero4"}, "data_parallel='zero4' is unknown"),
        ({"data_settings": {"bucket": 1}}, "do not fit data_parallel='ddp'"),
    ],
)
def test_settings_that_make_no_sense(settings, message):
    with pytest.raises(ValueError, match=message):
        HybridStrategy(**settings)


def test_degrees_that_do_not_fit():
    with pytest.raises(ValueError, match="does not divide world_size=8"):
        _dims(8, pipeline_parallel_size=3)


def test_strategies_travel_to_ranks_that_are_spawned():
    strategy = pickle.loads(pickle.dumps(HybridStrategy(tensor_parallel_size=2)))
    assert strategy.resolve_dims(4).tensor_parallel == 2
